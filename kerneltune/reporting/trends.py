"""Trends of rows over revisions as a table and as a page without scripts. Reads no records."""

from collections import Counter
from collections.abc import Sequence

from kerneltune.reporting.history import Trend
from kerneltune.reporting.naming import case_names
from kerneltune.reporting.page import rendered
from kerneltune.table import Column, Row, Table, pairs

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT = 160, 28
_MOST_ROWS = 200
"""Rows of a page at most, so that it stays small."""


def trend_table(found: Sequence[Trend], every: bool = False) -> Table:
    """Return a row per change point, variant by variant, the largest change first; `every`: rows without one as well."""
    columns = (
        Column("row"),
        Column("variant", rank=3, shared=True),
        Column("trend", rank=5, only=("text", "markdown")),
        Column("first µs", digits=2, key="first_us", rank=4),
        Column("last µs", digits=2, key="last_us"),
        Column("change %", digits=1, key="change_pct"),
        Column("at", rank=2),
        Column("commit", rank=1),
        Column("cause"),
    )
    lines = []
    names = _labels(found)
    largest = sorted(found, key=lambda trend: -abs(trend.total))
    variants = list(dict.fromkeys(trend.variant for trend in largest))
    for trend in sorted(largest, key=lambda trend: variants.index(trend.variant)):
        ends = [trend.points[0].record.time_us, trend.points[-1].record.time_us]
        for change in trend.changes:
            at = change.after.revision
            last = (100 * change.ratio, at.day, at.commit, ", ".join(change.causes))
            lines.append(Row((names[trend.label], trend.variant, spark(trend), *ends, *last)))
        if every and not trend.changes:
            lines.append(Row((names[trend.label], trend.variant, spark(trend), *ends, 100 * trend.total, None, None, None)))
    changed = sum(bool(trend.changes) for trend in found)
    measured = sum(len(trend.points) > 1 for trend in found)
    counts = Counter(cause for trend in found for change in trend.changes for cause in change.causes)
    said = ", ".join(f"{cause} {count}" for cause, count in counts.most_common())
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
    return "".join(_BARS[round(part * (len(_BARS) - 1))] for part in _heights(trend))


def _heights(trend: Trend) -> list[float]:
    """Return how far each time lies between the lowest and the highest, 0 to 1."""
    times = [point.record.time_us or 0.0 for point in trend.points]
    low, high = min(times), max(times)
    return [(time - low) / ((high - low) or 1.0) for time in times]


def trend_page(found: Sequence[Trend], title: str) -> str:
    """Return one HTML page: the summary, and a line with a curve per row, those that changed first."""
    names = _labels(found)
    shown = sorted(found, key=lambda trend: (-len(trend.changes), -abs(trend.total)))[:_MOST_ROWS]
    rows = [{"name": names[trend.label], "trend": trend, "dots": _dots(trend)} for trend in shown]
    summary, size = trend_table(found).head, (_WIDTH, _HEIGHT)
    return rendered("trends.html.j2", title=title, summary=summary, rows=rows, left_out=len(found) - len(shown), size=size)


def _dots(trend: Trend) -> list[tuple[float, float, float]]:
    """Return x, y and radius of the points of a curve; points where the time changed are larger."""
    step = (_WIDTH - 8) / max(1, len(trend.points) - 1)
    changed = [change.after for change in trend.changes]
    return [
        (4 + nth * step, _HEIGHT - 4 - part * (_HEIGHT - 8), 3 if any(point is after for after in changed) else 1.5)
        for nth, (point, part) in enumerate(zip(trend.points, _heights(trend), strict=True))
    ]
