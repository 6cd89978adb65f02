"""The main charts as PNG or SVG for a pull request: shares of the ceiling, peers, achieved bandwidth.

Returns bytes; does not read or write files.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kerneltune.device import slug
from kerneltune.records import Record, grouped, newest
from kerneltune.reporting.naming import by_family, case_names, look, source
from kerneltune.reporting.shares import Bound, bound_of, bounds_named, share
from kerneltune.rounding import cdiv
from kerneltune.table import wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#8a93a2", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#d55e00", "#6f5bc0", "#3d4654")
_MARKERS = ("o", "s", "^", "D", "*", "v", "P", "X")
_SCALE = {"*": 1.6, "^": 1.15, "v": 1.15, "D": 0.85, "P": 1.1}
_COLUMNS, _MOST_TICKS = 2, 7
_TITLE_WIDTH = 38
_INK, _MUTED, _LINE = "#1a1f27", "#586171", "#dce1e8"
_STYLE = {
    "font.size": 9.0,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _LINE,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _MUTED,
    "ytick.color": _INK,
    "grid.color": _LINE,
    "svg.hashsalt": "kerneltune",
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}

_Looks = Mapping[str, tuple[str, str]]
"""Variant -> colour and marker."""
_Chart = Callable[["Axes", Sequence[Record], tuple[str, str], _Looks], str]
"""Draws the records of one group and answers with what its x axis shows; nothing where it has nothing to show."""


def draw(records: Sequence[Record], pair: tuple[str, str], suffix: str) -> dict[str, bytes]:
    """Return the charts that have data by name, `FAMILY_ceiling`, `FAMILY_peers` (time over that of B), `FAMILY_bandwidth`.

    Args:
        pair: the variants A and B, which `ceiling` joins by a line.
        suffix: `png` or `svg`.

    Raises:
        ValueError: matplotlib is not installed, or no record is timed.
    """
    with _style():
        timed = [record for record in newest(records) if record.time_us is not None]
        if not timed:
            raise ValueError("no timed records to draw")
        charts: dict[str, _Chart] = {"ceiling": _ceiling, "peers": _peers, "bandwidth": _bandwidth}
        drawn = {
            f"{slug(family)}_{name}": _picture(members, pair, chart, suffix)
            for family, members in by_family(timed).items()
            for name, chart in charts.items()
        }
    return {name: content for name, content in drawn.items() if content}


@contextmanager
def _style() -> Iterator[None]:
    """Apply the look of all pictures.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install 'kerneltune[report]'") from error
    style: dict[Any, Any] = dict(_STYLE)
    with rc_context(style):
        yield


def _look(variant: str) -> tuple[str, str]:
    """Return colour and marker of a variant, the same in every picture."""
    colour, marker = look(variant)
    return _COLOURS[colour], _MARKERS[marker]


def _keys(variants: Sequence[str], inches: float) -> int:
    """Return the columns of the legend: one per variant where all fit, else as many as the longest name leaves room for."""
    widths = [0.4 + 0.075 * len(variant) for variant in variants]
    return len(variants) if sum(widths) <= inches else max(1, int(inches / max(widths)))


def _title(text: str) -> str:
    """Draw text on lines that stay within their panel; a dot ends a line, it begins none."""
    return "\n".join(wrapped(text.replace(" · ", "\xa0· "), _TITLE_WIDTH, "")).replace("\xa0", " ")


def _groups(timed: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of every chart by title: those of one operator, mode, element type and setting of the options."""
    named = grouped(zip(case_names(timed), timed, strict=True), lambda item: item[0].title)
    return {title: [record for _, record in items] for title, items in named.items()}


def _picture(timed: Sequence[Record], pair: tuple[str, str], chart: _Chart, suffix: str) -> bytes:
    """Draw one chart for every group, under one legend and above one line that says where the numbers come from."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    variants = list(dict.fromkeys(record.variant for record in timed))
    looks = {v: _look(v) for v in variants}
    groups = _groups(timed)
    columns = min(_COLUMNS, len(groups))
    rows = cdiv(len(groups), columns)
    shapes = [len({_shape(record) for record in group}) for group in groups.values()]
    heights = [1.1 + 0.2 * max(6, *shapes[row * columns : (row + 1) * columns]) for row in range(rows)]
    keys = _keys(variants, 5.0 * columns)
    height = sum(heights) + 0.6 + 0.2 * cdiv(len(variants), keys)
    figure = Figure(figsize=(5.0 * columns, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flatten()
    shown = False
    for panel, (title, group) in zip(panels, groups.items(), strict=False):
        panel.set_title(_title(title))
        label = chart(panel, group, pair, looks)
        panel.set_xlabel(label)
        shown = shown or bool(label)
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    if not shown:
        return b""
    marks = [Line2D([], [], color=colour, marker=marker, linestyle="", label=v) for v, (colour, marker) in looks.items()]
    figure.legend(handles=marks, loc="outside upper left", ncols=keys, frameon=False, handletextpad=0.1, columnspacing=1.2)
    figure.supxlabel(source(timed), fontsize=7.5, color=_MUTED, x=0.01, ha="left")
    return _bytes(figure, suffix)


def _ceiling(axes: "Axes", group: Sequence[Record], pair: tuple[str, str], looks: _Looks) -> str:
    """Draw percent of what bounds each case; a line joins A and B."""
    bounds: dict[object, Bound] = {}
    for record in group:
        if record.time_us is not None:
            bounds.setdefault(record.key, bound_of(record))
    reached = [(record, share(record, bounds[record.key])) for record in group if record.key in bounds]
    shares = [(record, percent) for record, percent in reached if percent is not None]
    if not shares:
        return ""
    shapes = _shape_axis(axes, [record for record, _ in shares])
    for y, shape in enumerate(shapes):
        ends = [percent for record, percent in shares if _shape(record) == shape and record.variant in pair]
        if len(ends) > 1:
            axes.plot(ends, [y] * len(ends), color=_LINE, linewidth=3, zorder=1, solid_capstyle="round")
    _dots(axes, [(record, percent, shapes.index(_shape(record))) for record, percent in shares], pair, looks)
    axes.axvline(100, color=_MUTED, linestyle=(0, (4, 3)), linewidth=0.9)
    axes.set_xlim(0, max(104.0, *(1.02 * percent for _, percent in shares)))
    return f"% of the {bounds_named(bounds[record.key] for record, _ in shares)}"


def _peers(axes: "Axes", group: Sequence[Record], pair: tuple[str, str], looks: _Looks) -> str:
    """Draw the time over the time of B; right of 1 is slower than B."""
    times = {r.key: r.time_us for r in group if r.variant == pair[1] and r.time_us}
    ratios = [(record, (record.time_us or 0.0) / times[record.key]) for record in group if record.key in times]
    if not ratios:
        return ""
    shapes = _shape_axis(axes, [record for record, _ in ratios])
    _dots(axes, [(record, ratio, shapes.index(_shape(record))) for record, ratio in ratios], pair, looks)
    axes.axvline(1, color=_MUTED, linewidth=0.9)
    _round_ticks(axes, [1.0, *(ratio for _, ratio in ratios)], "gx")
    return f"time / time of {pair[1]}"


def _bandwidth(axes: "Axes", group: Sequence[Record], pair: tuple[str, str], looks: _Looks) -> str:
    """Draw GB/s against the bytes that must move, below the measured ceiling."""
    moved = [(r, r.gbps * r.time_us / 1e3) for r in group if r.gbps and r.time_us]
    ceiling = sorted({(size, r.ceiling_gbps) for r, size in moved if r.ceiling_gbps})
    axes.plot([x for x, _ in ceiling], [y for _, y in ceiling], color=_MUTED, linestyle=(0, (4, 3)), linewidth=1)
    _dots(axes, [(record, size, record.gbps or 0.0) for record, size in moved], pair, looks)
    _round_ticks(axes, [size for _, size in moved], "g")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s")
    axes.grid(True, linewidth=0.6)
    return "MB that must move; dashed: the ceiling"


def _dots(axes: "Axes", points: Sequence[tuple[Record, float, float]], pair: tuple[str, str], looks: _Looks) -> None:
    """Draw one mark per point, those of A and B on top."""
    for variant, (colour, marker) in looks.items():
        xs, ys = [x for r, x, _ in points if r.variant == variant], [y for r, _, y in points if r.variant == variant]
        size = 5.5 * _SCALE.get(marker, 1.0)
        above = 3 + (variant in pair) + (variant == pair[1])
        axes.plot(xs, ys, marker, color=colour, markersize=size, alpha=0.9, markeredgewidth=0, zorder=above)


def _shape_axis(axes: "Axes", group: Sequence[Record]) -> list[str]:
    """Draw one row per shape, the first on top."""
    shapes = list(dict.fromkeys(_shape(record) for record in group))
    axes.set_yticks(range(len(shapes)), shapes)
    axes.set_ylim(len(shapes) - 0.5, -0.5)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.grid(True, axis="both", linewidth=0.6)
    return shapes


def _round_ticks(axes: "Axes", values: Sequence[float], form: str) -> None:
    """Set a logarithmic x axis that ends where the values do, with few round ticks; form: `g` plain, `gx` with an x."""
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = min(values) / 1.08, max(values) * 1.08
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    ticks = ticks or [float(f"{value:.2g}") for value in dict.fromkeys((min(values), max(values)))]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:g}{form[1:]}" for tick in ticks])


def _shape(record: Record) -> str:
    return "×".join(str(size) for size in record.axes.values())


def _bytes(figure: "Figure", suffix: str) -> bytes:
    """Return the picture's file, the same for the same records."""
    file = io.BytesIO()
    metadata = {"Date": None} if suffix == "svg" else {"Software": None}
    figure.savefig(file, format=suffix, dpi=150, metadata=metadata)
    return file.getvalue()
