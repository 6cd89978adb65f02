"""Trends of rows over revisions as a table and as a page without scripts. Pure; reads nothing."""

import html
from collections.abc import Sequence
from typing import Protocol

from kerneltune.cells import pairs
from kerneltune.records import Record
from kerneltune.reporting.naming import case_names
from kerneltune.table import Column, Row, Table

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT = 160, 28
_MOST_ROWS = 200
"""Rows of a page at most, so that it stays small."""


class _Revision(Protocol):
    @property
    def commit(self) -> str: ...
    @property
    def day(self) -> str: ...


class _Point(Protocol):
    @property
    def revision(self) -> _Revision: ...
    @property
    def record(self) -> Record: ...


class _Change(Protocol):
    @property
    def after(self) -> _Point: ...
    @property
    def ratio(self) -> float: ...
    @property
    def causes(self) -> tuple[str, ...]: ...


class Trend(Protocol):
    """A row's measurements, oldest first, and where its time changed; `gating.history.Trend` is one."""

    @property
    def label(self) -> str:
        """Return the name of the row."""
        ...

    @property
    def variant(self) -> str:
        """Return the variant that was measured."""
        ...

    @property
    def points(self) -> Sequence[_Point]:
        """Return the measurements, oldest first."""
        ...

    @property
    def changes(self) -> Sequence[_Change]:
        """Return where the time changed, oldest first."""
        ...

    @property
    def total(self) -> float:
        """Return the last time over the first."""
        ...


def trend_table(found: Sequence[Trend], every: bool = False) -> Table:
    """Return a row per change point, the largest rows of change first; `every`: rows without one as well."""
    columns = (
        Column("row"),
        Column("variant", shared=True),
        Column("trend", rank=2, only=("text", "markdown")),
        Column("first µs", digits=2, key="first_us"),
        Column("last µs", digits=2, key="last_us"),
        Column("change %", digits=1, key="change_pct"),
        Column("at", rank=1),
        Column("commit", rank=1),
        Column("cause"),
    )
    lines = []
    names = _labels(found)
    for trend in sorted(found, key=lambda trend: -abs(trend.total)):
        ends = [trend.points[0].record.time_us, trend.points[-1].record.time_us]
        for change in trend.changes:
            at = change.after.revision
            last = (100 * change.ratio, at.day, at.commit, ", ".join(change.causes))
            lines.append(Row((names[trend.label], trend.variant, spark(trend), *ends, *last)))
        if every and not trend.changes:
            lines.append(Row((names[trend.label], trend.variant, spark(trend), *ends, 100 * trend.total, None, None, None)))
    changed = sum(bool(trend.changes) for trend in found)
    measured = sum(len(trend.points) > 1 for trend in found)
    counts: dict[str, int] = {}
    for trend in found:
        for change in trend.changes:
            for cause in change.causes:
                counts[cause] = counts.get(cause, 0) + 1
    said = ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items(), key=lambda item: -item[1]))
    head = [f"{len(found)} rows, {measured} measured more than once, {changed} changed by more than 3 % and their noise"]
    head += [f"change points by cause: {said}"] if said else []
    return Table(columns, tuple(lines), tuple(head), repeated=5)


def _labels(found: Sequence[Trend]) -> dict[str, str]:
    """Return label -> the label without what is the same in all rows."""
    names = case_names(trend.points[-1].record for trend in found)
    return {
        trend.label: " ".join(filter(None, [name.kind, pairs(name.axes), name.dtype, name.quant, name.settings]))
        for trend, name in zip(found, names, strict=True)
    }


def spark(trend: Trend) -> str:
    """Return the times as bars, lowest to highest."""
    times = [point.record.time_us or 0.0 for point in trend.points]
    low, high = min(times), max(times)
    span = (high - low) or 1.0
    return "".join(_BARS[round((time - low) / span * (len(_BARS) - 1))] if high > low else _BARS[0] for time in times)


def trend_page(found: Sequence[Trend], title: str) -> str:
    """Return one HTML page: the summary, and a line with a curve per row, those that changed first."""
    table = trend_table(found)
    shown = sorted(found, key=lambda trend: (-len(trend.changes), -abs(trend.total)))[:_MOST_ROWS]
    left_out = len(found) - len(shown)
    names = _labels(found)
    rows = "\n".join(_html_row(trend, names[trend.label]) for trend in shown)
    summary = "".join(f"<p>{html.escape(line)}</p>" for line in table.head)
    rest = f"<p>{left_out} rows are left out; <code>kerneltune history --all</code> lists them.</p>" if left_out else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>{summary}
<div class="scroll" tabindex="0" role="region" aria-label="Trends"><table>
<thead><tr><th>row</th><th>variant</th><th>µs over revisions</th>
<th class="n">first</th><th class="n">last</th><th class="n">change</th><th>change points</th></tr></thead><tbody>
{rows}
</tbody></table></div>{rest}
</body></html>
"""


def _html_row(trend: Trend, label: str) -> str:
    first, last = (trend.points[at].record.time_us or 0.0 for at in (0, -1))
    changes = "; ".join(
        f"{change.after.revision.day} {change.after.revision.commit} {change.ratio:+.1%}: {', '.join(change.causes)}"
        for change in trend.changes
    )
    cells = [html.escape(label), html.escape(trend.variant), _svg(trend)]
    numbers = [f"{first:.2f}", f"{last:.2f}", f"{trend.total:+.1%}"]
    body = "".join(f"<td>{cell}</td>" for cell in cells) + "".join(f'<td class="n">{cell}</td>' for cell in numbers)
    return f"<tr>{body}<td>{html.escape(changes)}</td></tr>"


def _svg(trend: Trend) -> str:
    times = [point.record.time_us or 0.0 for point in trend.points]
    low, high = min(times), max(times)
    span = (high - low) or 1.0
    step = (_WIDTH - 8) / max(1, len(times) - 1)
    places = [(4 + i * step, _HEIGHT - 4 - (time - low) / span * (_HEIGHT - 8)) for i, time in enumerate(times)]
    changed = {id(change.after.record) for change in trend.changes}
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if id(point.record) in changed else 1.5}"/>'
        for (x, y), point in zip(places, trend.points, strict=True)
    )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    said = html.escape(f"{times[0]:.2f} to {times[-1]:.2f} µs over {len(times)} measurements")
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{said}"><title>{said}</title>'
        f'<polyline points="{line}"/>{dots}</svg>'
    )


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:24px auto;max-width:1200px;padding:0 16px;color:#1a1f27;background:#fff}"
    "h1{font-size:22px}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}"
    "th,td{text-align:left;padding:4px 8px;border-bottom:1px solid #dce1e8;vertical-align:middle}.n{text-align:right}"
    "polyline{fill:none;stroke:#0072b2;stroke-width:1.5}circle{fill:#d55e00}svg{display:block}"
)
