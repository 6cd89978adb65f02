"""Tables of records: A against B in the published column form, and what a sweep found, as text, Markdown and CSV; final losses.

Pure functions that return text; does not measure, read files or print.
Imports the standard library, numpy, cells, curves, stats, device, records, naming, ranks and spec.
"""

import csv
import io
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kerneltune.cells import aligned, number, pairs, ratio, wrapped
from kerneltune.curves import LAST, Curves
from kerneltune.device import INTERPRETER
from kerneltune.records import Record, other_run
from kerneltune.reporting.naming import CaseName, case_names
from kerneltune.reporting.ranks import rank_flips
from kerneltune.spec import NO_PARTS, Parts
from kerneltune.stats import geometric_mean, ratio_interval

WIN, LOSS = 1.05, 0.95
_BASELINE = "baseline"
INTERPRETER_NOTE = "device: interpreter (no GPU): results were checked for correctness; times do not exist"
_CSV_CASE = ("op", "case", "options", "policy", "device")
_CSV_SIDE = ("variant", "us", "pct_ceiling", "unit", "commit")
_CSV_LAST = ("speedup_low", "speedup_high", "aa_floor", "note")
_RUN_WORDS = {"unit": "GPU unit"}
_PUBLISHED = ("kind", "dtype", "quant")
_AB_NUMBERS = ("A ms", "B ms", "A GB/s", "B GB/s", "speedup")
_AB_WIDTHS = (10, 10, 9, 9, 9)
_SWEEP_HEAD = ("op", "case", "dtype", "quant", "  variant", "time µs", "GB/s", "% ceiling", "vs baseline")
_CASE_CELLS, _LEFT_CELLS = 4, 5
_LEAST_ROOM, _REASON_INDENT, _REASON_LINES = 30, 8, 3


@dataclass(frozen=True, slots=True)
class Row:
    """One line of an A/B table: the same case on the same device, measured for A and for B."""

    a: Record
    b: Record

    @property
    def note(self) -> str:
        """Why there is nothing to compare; empty where both sides are timed."""
        sides = (("A", self.a), ("B", self.b))
        return "; ".join(f"{side} {_status(record)}" for side, record in sides if record.status != "passed")

    @property
    def speedup(self) -> float | None:
        """Time of A over time of B, unrounded; None where a side has no time."""
        return ratio(self.a.time_us, self.b.time_us)

    @property
    def speedup_interval(self) -> tuple[float | None, float | None]:
        """Bounds of the speed-up from the ends of the two intervals, so wider than 95 %; None for sides of different runs.

        Intervals are of what differs within a run.
        """
        if other_run(self.a, self.b):
            return None, None
        return ratio(self.a.ci_low_us, self.b.ci_high_us), ratio(self.a.ci_high_us, self.b.ci_low_us)

    @property
    def aa_floor(self) -> float | None:
        """The larger noise floor of the two sides, a fraction; None where neither was taken."""
        return max((f for f in (self.a.aa_floor, self.b.aa_floor) if f is not None), default=None)

    @property
    def mark(self) -> str:
        """`+` above 1.05x, `-` below 0.95x."""
        speedup = self.speedup or 1.0
        return "+" if speedup > WIN else "-" if speedup < LOSS else ""


def ab_rows(a: list[Record], b: list[Record]) -> list[Row]:
    """Pair A and B by key and device, in the order of A; the last record of a key counts, and what has no partner is left out."""
    of_a, of_b = ({(record.key, record.device): record for record in side} for side in (a, b))
    return [Row(record, of_b[key]) for key, record in of_a.items() if key in of_b]


def ab_text(rows: list[Row], width: int = 100) -> str:
    """The published table and its summary; where it is too wide, with narrower columns; else shapes under a heading per kind."""
    names = case_names(row.a for row in rows)
    options, axes = _columns(names)
    head, left = [*_PUBLISHED, *options, *axes, *_AB_NUMBERS], len(_PUBLISHED) + len(options)
    cells = [[*_case_cells(name, options, axes), *_number_cells(row)] for name, row in zip(names, rows, strict=True)]
    headings = [""] * len(rows)
    widths = _widths(head, cells, (4, 8, 6, *[0] * len(options), *[6] * len(axes), *_AB_WIDTHS))
    if _span(widths) > width:
        widths = _widths(head, cells)
    if _span(widths) > width:
        head, left = ["  shape", *_AB_NUMBERS], 1
        cells = [[f"  {name.shape}", *_number_cells(row)] for name, row in zip(names, rows, strict=True)]
        headings = [name.heading for name in names]
        widths = _widths(head, cells)
    lines = [aligned(head, widths, left), "-" * (sum(widths) + len(widths) - 1)]
    for heading in dict.fromkeys(headings):
        lines += wrapped(heading, width) if heading else []
        for row, line, other in zip(rows, cells, headings, strict=True):
            if other == heading:
                lines += _ab_lines(row, aligned(line, widths, left), width)
    summary = [part for line in _ab_summary(rows) for part in wrapped(line, width)]
    return "\n".join([*lines, "", *summary]) + "\n"


def ab_markdown(rows: list[Row]) -> str:
    """The same table for a pull request, with percent of ceiling, interval and noise floor."""
    names = case_names(row.a for row in rows)
    options, axes = _columns(names)
    texts = [*_PUBLISHED, *options]
    head = [*texts, *axes, *_AB_NUMBERS, "", "interval", "B % of ceiling", "A/A floor"]
    lines = [_pipe(head), _pipe(["---"] * len(texts) + ["---:"] * (len(head) - len(texts)))]
    for name, row in zip(names, rows, strict=True):
        low, high = row.speedup_interval
        interval = f"{low:.2f}x–{high:.2f}x" if low is not None and high is not None else ""
        floor = f"{row.aa_floor:.1%}" if row.aa_floor is not None else ""
        *numbers, speedup = _number_cells(row)
        last = [f"{speedup}x" if speedup else row.note, row.mark, interval, number(row.b.pct_ceiling, 1), floor]
        lines.append(_pipe([*_case_cells(name, options, axes), *numbers, *last]))
    return "\n".join([*lines, "", *(f"- {line.strip()}" for line in _ab_summary(rows))]) + "\n"


def ab_csv(rows: list[Row]) -> str:
    """The published CSV columns, then the unrounded times, shares of ceiling, bounds and floor."""
    names = case_names(row.a for row in rows)
    _, axes = _columns(names)
    published = [*_PUBLISHED, *axes, "A_ms", "B_ms", "A_gbps", "B_gbps", "speedup", "mark"]
    lines: list[Sequence[object]] = [
        [*published, *_CSV_CASE, *(f"{side}_{name}" for side in "AB" for name in _CSV_SIDE), *_CSV_LAST]
    ]
    for name, row in zip(names, rows, strict=True):
        case = [row.a.op, row.a.case, pairs(row.a.options), row.a.policy, row.a.device]
        sides = [value for side in (row.a, row.b) for value in _csv_side(side)]
        last = [*row.speedup_interval, row.aa_floor, row.note]
        lines.append([*_case_cells(name, (), axes), *_number_cells(row), row.mark, *case, *sides, *last])
    return _csv(lines)


def aa_lines(rows: Iterable[Row]) -> list[str]:
    """A line per row of a variant against itself, both timed in the same rounds, that does not say 1.00x within its interval."""
    lines = []
    for row in rows:
        if row.a.samples_us and row.b.samples_us:
            interval = ratio_interval(np.concatenate(row.a.samples_us), np.concatenate(row.b.samples_us))
            if not interval.contains(1.0):
                extent = f"{interval.low:.4f}x to {interval.high:.4f}x"
                lines.append(f"A/A interval without 1: {row.a.case} {row.a.label}: {extent}")
    return lines


def sweep_text(records: list[Record], width: int = 100, parts: Parts = NO_PARTS) -> str:
    """Every variant of every case, the best one marked `*`; a heading per case where the full columns do not fit.

    parts: in all tables of a sweep, what is never the best and has a time alone: bytes and speed-ups are of the whole.
    """
    lines = _device_lines(records)
    groups = _groups(records)
    names = case_names(group[0] for group in groups)
    cells = [[_sweep_cells(name, record, group, parts) for record in group] for name, group in zip(names, groups, strict=True)]
    widths = [max(map(len, column)) for column in zip(_SWEEP_HEAD, *(line for group in cells for line in group), strict=True)]
    start = 0 if sum(widths) + len(widths) - 1 <= width else _CASE_CELLS
    indent = "  " if start else ""
    lines.append((indent + aligned(_SWEEP_HEAD[start:], widths[start:], _LEFT_CELLS - start)).rstrip())
    for group, group_cells in zip(groups, cells, strict=True):
        if start:
            lines += wrapped(" ".join(group_cells[0][:start]), width)
        for index, (record, line) in enumerate(zip(group, group_cells, strict=True)):
            shown = line if index == 0 else [""] * _CASE_CELLS + line[_CASE_CELLS:]
            if record.status != "passed":
                left = aligned(shown[start:_LEFT_CELLS], widths[start:_LEFT_CELLS], _LEFT_CELLS, strip=False)
                lines += _reasoned(f"{indent}{left} ", _status(record), width)
            else:
                lines.append(indent + aligned(shown[start:], widths[start:], _LEFT_CELLS - start))
    return "\n".join([*lines, "", _counts(records)]) + "\n"


def sweep_markdown(records: list[Record], parts: Parts = NO_PARTS) -> str:
    """The same as a Markdown table with the configs, the best variant in bold."""
    lines = [*_device_lines(records), "", _pipe([*(name.strip() for name in _SWEEP_HEAD), "config"])]
    lines.append(_pipe(["---"] * _LEFT_CELLS + ["---:"] * 4 + ["---"]))
    groups = _groups(records)
    for name, group in zip(case_names(group[0] for group in groups), groups, strict=True):
        for record in group:
            cells = [cell.strip() for cell in _sweep_cells(name, record, group, parts)]
            if record.status != "passed":
                cells[_LEFT_CELLS] = _status(record)
            elif record is _best(group, parts):
                cells[_LEFT_CELLS - 1] = f"**{record.variant}**"
            lines.append(_pipe([*cells, record.config_label]))
    flips = rank_flips(records, parts)
    return "\n".join([*lines, "", _counts(records), *(["", flips] if flips else [])]) + "\n"


def sweep_csv(records: list[Record], parts: Parts = NO_PARTS) -> str:
    """One line per record, unrounded."""
    axes = list(dict.fromkeys(axis for record in records for axis in record.axes))
    names = ("dtype", "quant", "options", "policy", "variant", "status", "time_us", "ci_low_us", "ci_high_us", "gbps")
    last = ("pct_ceiling", "aa_floor", "vs_baseline", "best", "config", "device", "reason")
    lines: list[Sequence[object]] = [["op", "case", *axes, *names, *last]]
    for group in _groups(records):
        for r in group:
            sizes = [r.axes.get(axis, "") for axis in axes]
            gbps, share, speedup = _of_the_whole(r, group, parts)
            measured = [r.time_us, r.ci_low_us, r.ci_high_us, gbps, share, r.aa_floor, speedup]
            best = "*" if r is _best(group, parts) else ""
            head = [r.op, r.case, *sizes, r.dtype, r.quant, pairs(r.options), r.policy, r.variant, r.status]
            lines.append([*head, *measured, best, r.config_label, r.device, _flat(r.reason)])
    return _csv(lines)


def curves_markdown(curves: Curves) -> str:
    """The final losses, and how far they are from the first curve's."""
    base, *others = curves.finals
    lines = [_pipe(["", f"{curves.loss}, mean of the last {min(LAST, len(curves.steps))} steps", f"difference to {base.name}"])]
    lines += [_pipe(["---", "---:", "---:"]), _pipe([base.name, f"{base.loss:.4f}", ""])]
    lines += [_pipe([final.name, f"{final.loss:.4f}", f"{final.difference:+.2%}"]) for final in others]
    return "\n".join(lines) + "\n"


def _csv_side(side: Record) -> tuple[object, ...]:
    return side.variant, side.time_us, side.pct_ceiling, side.unit, side.commit


def _columns(names: Iterable[CaseName]) -> tuple[list[str], list[str]]:
    """The options and the axes that the cases have, in order of appearance."""
    found = list(names)
    options = dict.fromkeys(option for name in found for option in name.options)
    return list(options), list(dict.fromkeys(axis for name in found for axis in name.axes))


def _case_cells(name: CaseName, options: Iterable[str], axes: Iterable[str]) -> list[str]:
    """The published columns that name a row, those of the options, and the sizes."""
    chosen = [str(name.options.get(option, "")) for option in options]
    return [name.kind, name.dtype, name.quant, *chosen, *(str(name.axes.get(axis, "")) for axis in axes)]


def _widths(head: Sequence[str], cells: Iterable[Sequence[str]], least: Sequence[int] = ()) -> list[int]:
    content = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return [max(pair) for pair in zip(content, least or content, strict=True)]


def _span(widths: Sequence[int]) -> int:
    """Columns that a line takes with its mark."""
    return sum(widths) + len(widths) - 1 + len("x  +")


def _ab_lines(row: Row, line: str, width: int) -> list[str]:
    return _reasoned(f"{line}  ", row.note, width) if row.note else [f"{line}x  {row.mark}".rstrip()]


def _number_cells(row: Row) -> list[str]:
    """A ms, B ms, A GB/s, B GB/s, speed-up; nothing where the two are not compared."""
    if row.note:
        return [""] * 5
    times = [number(side.time_us / 1000 if side.time_us else None, 4) for side in (row.a, row.b)]
    return [*times, number(row.a.gbps, 1), number(row.b.gbps, 1), number(row.speedup, 2)]


def _ab_summary(rows: list[Row]) -> list[str]:
    speedups = [row.speedup for row in rows if row.speedup is not None]
    skipped = len(rows) - len(speedups)
    lines = [f"{skipped} of {len(rows)} rows not compared"] if skipped else []
    if not speedups:
        return lines or ["no rows to compare"]
    marks = [row.mark for row in rows if row.speedup is not None]
    wins, ties, losses = (marks.count(mark) for mark in ("+", "", "-"))
    extent = f"{min(speedups):.2f}x to {max(speedups):.2f}x"
    lines += [
        f"{_rows(speedups)}: geometric mean {geometric_mean(speedups):.2f}x, range {extent}",
        f"wins {wins}, ties {ties}, losses {losses}",
    ]
    kinds = {name.op: name.kind for name in case_names(row.a for row in rows)}
    for op, quant in dict.fromkeys((row.a.op, row.a.quant) for row in rows):
        part = [row.speedup for row in rows if (row.a.op, row.a.quant) == (op, quant) and row.speedup is not None]
        if part:
            lines.append(f"  {kinds[op]} {quant}: {_rows(part)}, geometric mean {geometric_mean(part):.2f}x")
    shares = [row.b.pct_ceiling for row in rows if row.b.pct_ceiling is not None]
    if shares:
        lines.append(f"B reaches {statistics.median(shares):.1f} % of the ceiling in the median")
    floors = [row.aa_floor for row in rows if row.aa_floor is not None]
    if floors:
        lines.append(f"A/A floor, a variant against itself: at most {max(floors):.1%}")
    apart = [fields for row in rows if row.speedup is not None and (fields := other_run(row.a, row.b))]
    if apart:
        other = " or ".join(dict.fromkeys(_RUN_WORDS.get(name, name) for fields in apart for name in fields))
        other_runs = f"A and B are of different runs (another {other}): may differ by a few per cent"
        lines.append(f"{len(apart)} of {_rows(speedups)}: {other_runs}")
    return lines


def _rows(values: Sequence[float]) -> str:
    return f"{len(values)} row{'' if len(values) == 1 else 's'}"


def _groups(records: Iterable[Record]) -> list[list[Record]]:
    """The records case by case, device by device, in order of appearance."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        groups.setdefault((record.device, record.key), []).append(record)
    return list(groups.values())


def _best(group: Iterable[Record], parts: Parts) -> Record | None:
    whole = [record for record in group if (record.op, record.variant) not in parts]
    timed = [(record.time_us, index, record) for index, record in enumerate(whole) if record.time_us is not None]
    return min(timed)[2] if timed else None


def _of_the_whole(record: Record, group: Iterable[Record], parts: Parts) -> tuple[float | None, float | None, float | None]:
    """GB/s, percent of the ceiling, and the speed-up over the baseline of the same case; none for a part of the work."""
    if (record.op, record.variant) in parts:
        return None, None, None
    baseline = next((other.time_us for other in group if other.variant == _BASELINE), None)
    return record.gbps, record.pct_ceiling, ratio(baseline, record.time_us)


def _sweep_cells(name: CaseName, record: Record, group: Sequence[Record], parts: Parts) -> list[str]:
    mark = "*" if record is _best(group, parts) else " "
    gbps, share, speedup = _of_the_whole(record, group, parts)
    numbers = [number(record.time_us, 2), number(gbps, 1), number(share, 1)]
    left = [name.op, f"{name.case} {name.settings}".rstrip(), name.dtype, name.quant, f"{mark} {record.variant}"]
    return [*left, *numbers, f"{speedup:.2f}x" if speedup is not None else ""]


def _device_lines(records: Iterable[Record]) -> list[str]:
    devices = dict.fromkeys(record.device for record in records)
    return [INTERPRETER_NOTE if device == INTERPRETER else f"device: {device}" for device in devices] or ["no records"]


def _counts(records: Sequence[Record]) -> str:
    found = dict.fromkeys(record.status for record in records)
    return ", ".join(f"{sum(record.status == status for record in records)} {status}" for status in found) or "nothing to show"


def _status(record: Record) -> str:
    """The status with its reason, on one line."""
    if record.status == "checked":
        return "checked, not timed"
    return f"{record.status}: {_flat(record.reason)}"


def _reasoned(left: str, reason: str, width: int) -> list[str]:
    """A reason beside what is on the left, or below it where there is little room, on few lines."""
    beside = width - len(left) >= _LEAST_ROOM
    indent = " " * (len(left) if beside else _REASON_INDENT)
    words = textwrap.wrap(reason, width - len(indent), max_lines=_REASON_LINES, placeholder=" …", break_on_hyphens=False)
    lines = [indent + line for line in words]
    return [left + words[0], *lines[1:]] if beside else [left.rstrip(), *lines]


def _flat(text: str) -> str:
    return " ".join(text.split())


def _pipe(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _csv(lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(["" if cell is None else cell for cell in line] for line in lines)
    return text.getvalue()
