"""Tables of records: A against B in the published column form, and what a sweep found, as text, Markdown and CSV.

Pure functions that return text; does not measure, read files or print.
Imports the standard library, cells, stats, device, spec and records.
"""

import csv
import io
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kerneltune.cells import aligned, number, ratio
from kerneltune.device import INTERPRETER
from kerneltune.records import Record
from kerneltune.spec import Option
from kerneltune.stats import geometric_mean

WIN, LOSS = 1.05, 0.95
_WIDE = 92
_BASELINE = "baseline"
INTERPRETER_NOTE = "device: interpreter (no GPU): results were checked for correctness; times do not exist"
_CSV_CASE = ("op", "case", "options", "policy", "device")
_CSV_SIDE = ("variant", "us", "pct_ceiling")
_CSV_LAST = ("speedup_low", "speedup_high", "aa_floor", "note")
_PUBLISHED = ("kind", "dtype", "quant")
_AB_NUMBERS = ("A ms", "B ms", "A GB/s", "B GB/s")
_SWEEP_HEAD = ("op", "case", "dtype", "quant", "  variant", "time µs", "GB/s", "% ceiling", "vs baseline")
_CASE_CELLS, _LEFT_CELLS = 4, 5


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
        """Bounds of the speed-up from the ends of the two intervals, so wider than 95 %."""
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
    """The published table and its summary; below 92 columns the same columns, narrower."""
    names, axes, kinds = _naming(rows), _axes(rows), _kinds(rows)
    head = [*names, *axes, *_AB_NUMBERS, "speedup"]
    cells = [[*_names(row, names, kinds), *_sizes(row, axes), *_number_cells(row)] for row in rows]
    usual = [4, 8, 6, *[0] * (len(names) - len(_PUBLISHED)), *[6] * len(axes), 10, 10, 9, 9, 9]
    content = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    widths = [max(pair) for pair in zip(usual, content, strict=True)] if width >= _WIDE else content
    lines = [aligned(head, widths, len(names)), "-" * (sum(widths) + len(widths) - 1)]
    for row, line in zip(rows, cells, strict=True):
        if row.note:
            lines.append(_cut(f"{aligned(line, widths, len(names))}  {row.note}", width))
        else:
            lines.append(f"{aligned(line, widths, len(names))}x  {row.mark}".rstrip())
    return "\n".join([*lines, "", *_ab_summary(rows)]) + "\n"


def ab_markdown(rows: list[Row]) -> str:
    """The same table for a pull request, with percent of ceiling, interval and noise floor."""
    names, axes, kinds = _naming(rows), _axes(rows), _kinds(rows)
    head = [*names, *axes, *_AB_NUMBERS, "speedup", "", "interval", "B % of ceiling", "A/A floor"]
    lines = [_pipe(head), _pipe(["---"] * len(names) + ["---:"] * (len(head) - len(names)))]
    for row in rows:
        low, high = row.speedup_interval
        interval = f"{low:.2f}x–{high:.2f}x" if low is not None and high is not None else ""
        floor = f"{row.aa_floor:.1%}" if row.aa_floor is not None else ""
        *numbers, speedup = _number_cells(row)
        last = [f"{speedup}x" if speedup else row.note, row.mark, interval, number(row.b.pct_ceiling, 1), floor]
        lines.append(_pipe([*_names(row, names, kinds), *_sizes(row, axes), *numbers, *last]))
    return "\n".join([*lines, "", *(f"- {line.strip()}" for line in _ab_summary(rows))]) + "\n"


def ab_csv(rows: list[Row]) -> str:
    """The published CSV columns, then the unrounded times, shares of ceiling, bounds and floor."""
    axes, kinds = _axes(rows), _kinds(rows)
    published = [*_PUBLISHED, *axes, "A_ms", "B_ms", "A_gbps", "B_gbps", "speedup", "mark"]
    lines: list[Sequence[object]] = [
        [*published, *_CSV_CASE, *(f"{side}_{name}" for side in "AB" for name in _CSV_SIDE), *_CSV_LAST]
    ]
    for row in rows:
        case = [row.a.op, row.a.case, options_label(row.a), row.a.policy, row.a.device]
        sides = [value for side in (row.a, row.b) for value in (side.variant, side.time_us, side.pct_ceiling)]
        last = [*row.speedup_interval, row.aa_floor, row.note]
        named = _names(row, _PUBLISHED, kinds)
        lines.append([*named, *_sizes(row, axes), *_number_cells(row), row.mark, *case, *sides, *last])
    return _csv(lines)


def sweep_text(records: list[Record], width: int = 100) -> str:
    """Every variant of every case, the best one marked `*`; a heading per case where the full columns do not fit."""
    lines = _device_lines(records)
    groups, ambiguous = _groups(records), _ambiguous(records)
    cells = [[_sweep_cells(record, group, ambiguous) for record in group] for group in groups]
    widths = [max(map(len, column)) for column in zip(_SWEEP_HEAD, *(line for group in cells for line in group), strict=True)]
    start = 0 if sum(widths) + len(widths) - 1 <= width else _CASE_CELLS
    indent = "  " if start else ""
    lines.append((indent + aligned(_SWEEP_HEAD[start:], widths[start:], _LEFT_CELLS - start)).rstrip())
    for group, group_cells in zip(groups, cells, strict=True):
        if start:
            lines.append(_cut(" ".join(group_cells[0][:start]), width))
        for index, (record, line) in enumerate(zip(group, group_cells, strict=True)):
            shown = line if index == 0 else [""] * _CASE_CELLS + line[_CASE_CELLS:]
            if record.status != "passed":
                left = aligned(shown[start:_LEFT_CELLS], widths[start:_LEFT_CELLS], _LEFT_CELLS, strip=False)
                lines.append(_cut(f"{indent}{left} {_status(record)}", width))
            else:
                lines.append(indent + aligned(shown[start:], widths[start:], _LEFT_CELLS - start))
    return "\n".join([*lines, "", _counts(records)]) + "\n"


def sweep_markdown(records: list[Record]) -> str:
    """The same as a Markdown table with the configs, the best variant in bold."""
    lines = [*_device_lines(records), "", _pipe([*(name.strip() for name in _SWEEP_HEAD), "config"])]
    lines.append(_pipe(["---"] * _LEFT_CELLS + ["---:"] * 4 + ["---"]))
    ambiguous = _ambiguous(records)
    for group in _groups(records):
        for record in group:
            cells = [cell.strip() for cell in _sweep_cells(record, group, ambiguous)]
            if record.status != "passed":
                cells[_LEFT_CELLS] = _status(record)
            elif record is _best(group):
                cells[_LEFT_CELLS - 1] = f"**{record.variant}**"
            lines.append(_pipe([*cells, record.config_label]))
    return "\n".join([*lines, "", _counts(records)]) + "\n"


def sweep_csv(records: list[Record]) -> str:
    """One line per record, unrounded."""
    axes = list(dict.fromkeys(axis for record in records for axis in record.axes))
    names = ("dtype", "quant", "options", "policy", "variant", "status", "time_us", "ci_low_us", "ci_high_us", "gbps")
    last = ("pct_ceiling", "aa_floor", "vs_baseline", "best", "config", "device", "reason")
    lines: list[Sequence[object]] = [["op", "case", *axes, *names, *last]]
    for group in _groups(records):
        for r in group:
            sizes = [r.axes.get(axis, "") for axis in axes]
            measured = [r.time_us, r.ci_low_us, r.ci_high_us, r.gbps, r.pct_ceiling, r.aa_floor, _against_baseline(r, group)]
            best = "*" if r is _best(group) else ""
            head = [r.op, r.case, *sizes, r.dtype, r.quant, options_label(r), r.policy, r.variant, r.status]
            lines.append([*head, *measured, best, r.config_label, r.device, _flat(r.reason)])
    return _csv(lines)


def _axes(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(axis for row in rows for axis in row.a.axes))


def _naming(rows: Sequence[Row]) -> list[str]:
    """The published columns that name a row, and the options by which rows of one operator and size differ."""
    seen: dict[tuple[object, ...], dict[str, set[Option]]] = {}
    for row in rows:
        settings = seen.setdefault((row.a.op, row.a.dtype, row.a.quant, *row.a.axes.items()), {})
        for name, value in row.a.options.items():
            settings.setdefault(name, set()).add(value)
    varied = dict.fromkeys(name for settings in seen.values() for name, values in settings.items() if len(values) > 1)
    return [*_PUBLISHED, *varied]


def _kinds(rows: Iterable[Row]) -> dict[str, str]:
    """Operator -> the last part of its name, `fwd`; all of it where another operator's ends likewise."""
    short = {row.a.op: row.a.op.rsplit("_", 1)[-1] for row in rows}
    counts = Counter(short.values())
    return {op: kind if counts[kind] == 1 else op for op, kind in short.items()}


def _names(row: Row, columns: Sequence[str], kinds: Mapping[str, str]) -> list[str]:
    return [kinds[row.a.op], row.a.dtype, row.a.quant, *(str(row.a.options.get(name, "")) for name in columns[len(_PUBLISHED) :])]


def _sizes(row: Row, axes: Sequence[str]) -> list[str]:
    return [str(row.a.axes.get(axis, "")) for axis in axes]


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
    kinds = _kinds(rows)
    for op, quant in dict.fromkeys((row.a.op, row.a.quant) for row in rows):
        part = [row.speedup for row in rows if (row.a.op, row.a.quant) == (op, quant) and row.speedup is not None]
        if part:
            lines.append(f"  {kinds[op]} {quant}: {_rows(part)}, geometric mean {geometric_mean(part):.2f}x")
    shares = [row.b.pct_ceiling for row in rows if row.b.pct_ceiling is not None]
    if shares:
        lines.append(f"B reaches {statistics.median(shares):.1f} % of the ceiling in the median")
    floors = [row.aa_floor for row in rows if row.aa_floor is not None]
    if floors:
        lines.append(f"A/A floor at most {max(floors):.1%}")
    return lines


def _rows(values: Sequence[float]) -> str:
    return f"{len(values)} row{'' if len(values) == 1 else 's'}"


def _groups(records: Iterable[Record]) -> list[list[Record]]:
    """The records case by case, device by device, in order of appearance."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        groups.setdefault((record.device, record.key), []).append(record)
    return list(groups.values())


def _best(group: Iterable[Record]) -> Record | None:
    timed = [(record.time_us, index, record) for index, record in enumerate(group) if record.time_us is not None]
    return min(timed)[2] if timed else None


def _against_baseline(record: Record, group: Iterable[Record]) -> float | None:
    """Speed-up over the baseline of the same case; None without both times."""
    baseline = next((other.time_us for other in group if other.variant == _BASELINE), None)
    return ratio(baseline, record.time_us)


def _sweep_cells(record: Record, group: Sequence[Record], ambiguous: set[tuple[str, ...]]) -> list[str]:
    mark = "*" if record is _best(group) else " "
    speedup = _against_baseline(record, group)
    numbers = [number(record.time_us, 2), number(record.gbps, 1), number(record.pct_ceiling, 1)]
    key = (record.op, record.case, record.dtype, record.quant)
    case = f"{record.case} {options_label(record)}" if key in ambiguous else record.case
    left = [record.op, case, record.dtype, record.quant, f"{mark} {record.variant}"]
    return [*left, *numbers, f"{speedup:.2f}x" if speedup is not None else ""]


def _ambiguous(records: Iterable[Record]) -> set[tuple[str, ...]]:
    """The (op, case, dtype, quant) that several settings of the options share."""
    seen: dict[tuple[str, ...], set[str]] = {}
    for record in records:
        seen.setdefault((record.op, record.case, record.dtype, record.quant), set()).add(options_label(record))
    return {key for key, options in seen.items() if len(options) > 1}


def options_label(record: Record) -> str:
    """The options in one line: `zero_centered=False row_pad=0`; empty where there are none."""
    return " ".join(f"{name}={value}" for name, value in record.options.items())


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


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _flat(text: str) -> str:
    return " ".join(text.split())


def _pipe(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _csv(lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(["" if cell is None else cell for cell in line] for line in lines)
    return text.getvalue()
