"""Make tables of records: A against B, and the variants of a sweep. `table.Table` writes them in every form."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from kerneltune.device import INTERPRETER
from kerneltune.records import Record, case_key, differing_run_fields, grouped, ratio
from kerneltune.reporting.naming import CaseName, case_names, source
from kerneltune.reporting.pairing import BASELINE, BEST_PEER, Comparison, paired, status_of, status_word
from kerneltune.reporting.shares import Bound, bound_of, share
from kerneltune.table import CellValue, Column, Row, Table, values
from kerneltune.wording import assignments, counted, short_dtype

_MUCH_SLOWER = 0.8
"""A row whose speed-up is at most this is named above the table."""
_NAMED = 5
INTERPRETER_NOTE = "device: interpreter (no GPU): correctness is checked, no timing"
_RUN_WORDS = {"unit": "GPU serial"}
_CASE, _INTERVAL, _SHARE, _NOISE, _GBPS = range(1, 6)
"""Ranks of columns: the last leaves a narrow table first."""


def _interval(row: Comparison) -> str | None:
    low, high = row.speedup_interval
    return f"{low:.2f}x–{high:.2f}x" if low is not None and high is not None else None


def _measure(name: str, value: Callable[[Comparison], CellValue], **form: Any) -> Column:
    """Return a column of A's and B's measurements, which is empty where A and B are not compared."""
    return Column(name, value=lambda row: None if row.note else value(row), **form)


def _bound_word(bounds: Iterable[Bound]) -> str:
    """Return the bound of the rows, for the heading of their shares; `bound` where another column says which."""
    kinds = set(bounds)
    return "bound" if len(kinds) > 1 else next(iter(kinds), "ceiling")


def ab_columns(bounds: Iterable[Bound]) -> tuple[Column, ...]:
    """Return the columns of A's and B's measurements, in print, in CSV and on the page, of rows with these bounds."""
    return (
        _measure("A µs", lambda row: row.a.time_us, digits=2, key="A_us"),
        _measure("B µs", lambda row: row.b.time_us, digits=2, key="B_us"),
        _measure("speedup", lambda row: row.speedup, digits=2, suffix="x"),
        _measure("", lambda row: row.mark, key="mark"),
        _measure("A GB/s", lambda row: row.a.gbps, digits=0, key="A_gbps", rank=_GBPS),
        _measure("B GB/s", lambda row: row.b.gbps, digits=0, key="B_gbps", rank=_GBPS),
        _measure(f"B % {_bound_word(bounds)}", lambda row: share(row.b), digits=1, key="B_pct_bound", rank=_SHARE),
        _measure("95 % interval", _interval, key="interval", rank=_INTERVAL, only=("text", "markdown", "page")),
        _measure("noise %", lambda row: row.aa_floor and 100 * row.aa_floor, digits=1, key="noise_pct", rank=_NOISE),
    )


_CSV_COLUMNS = (
    *(Column(name, only=("csv",), value=attrgetter(f"a.{name}")) for name in ("op", "case")),
    Column("options", only=("csv",), value=lambda row: assignments(row.a.options)),
    *(Column(name, only=("csv",), value=attrgetter(f"a.{name}")) for name in ("policy", "device")),
    *(
        Column(f"{side}_{name}", only=("csv",), value=attrgetter(f"{side.lower()}.{name}"))
        for side in "AB"
        for name in ("variant", "unit", "commit")
    ),
    Column("speedup_low", only=("csv",), value=lambda row: row.speedup_interval[0]),
    Column("speedup_high", only=("csv",), value=lambda row: row.speedup_interval[1]),
)
"""Further columns of CSV."""


def families_table(families: Mapping[str, Sequence[Record]], pairs_of: Mapping[str, tuple[str, str]]) -> Table:
    """Return a row per family: the speed-up of B over A, the slowest row by name, and the number of rows that are compared.

    Families with another A are never pooled: each row states its own A and B.
    """
    columns = (
        Column("family"),
        Column("speed-up", digits=2, suffix="x", key="speedup"),
        Column("slowest row", wraps=True, key="slowest"),
        Column("faster", digits=0),
        Column("within 5 %", digits=0, key="within"),
        Column("slower", digits=0),
        Column("A", wraps=True),
        Column("B"),
        Column("compared", wraps=True),
        Column("B % bound", digits=0, key="B_pct_bound", rank=_SHARE),
    )
    lines = []
    for family, members in families.items():
        a, b = pairs_of[family]
        rows = [row for row in paired(members, a, b) if row.speedup is not None]
        cases = len(set(map(case_key, members)))
        compared = str(cases) if len(rows) == cases else f"{len(rows)} of {cases}"
        name = "fastest peer" if a == BEST_PEER else a
        if not rows:
            lines.append(Row((family, *[None] * 5, name, b, compared, None)))
            continue
        marks = [row.mark for row in rows]
        shares = _shares(rows)
        median_share = statistics.median(shares) if shares else None
        speedup = statistics.geometric_mean(row.speedup or 1.0 for row in rows)
        counts = [marks.count(mark) for mark in ("+", "", "-")]
        lines.append(Row((family, speedup, slowest(rows)[0], *counts, name, b, compared, median_share)))
    return Table(columns, tuple(lines))


def slowest(rows: Sequence[Comparison]) -> list[str]:
    """Return the timed rows by name, the smallest speed-up first: `0.61x fwd none bfloat16 128×4096`."""
    timed = []
    for row, name in zip(rows, case_names(row.a for row in rows), strict=True):
        if row.speedup:
            words = [name.kind, name.quant, short_dtype(name.dtype), name.shape, name.settings]
            timed.append((row.speedup, " ".join(filter(None, words))))
    return [f"{speedup:.2f}x {name}" for speedup, name in sorted(timed)]


def ab_table(rows: Sequence[Comparison], a: str = "A", b: str = "B", title: str = "") -> Table:
    """Return the table of A against B, by these names: the summary, a row per case, and the origin of the records."""
    case_part, names = case_columns([row.a for row in rows], Column("kind", shared=True))
    bounds = [bound_of(row.b) for row in rows if row.speedup is not None]
    is_mixed = len(set(bounds)) > 1
    sides = [Column(f"{side} is", key=f"{side}_is", value=attrgetter(f"{side.lower()}.variant")) for side in "AB"]
    measures = (
        *(column for column in sides if len(set(map(column.value, rows))) > 1),
        *ab_columns(bounds),
        _measure("bound", lambda row: bound_of(row.b), rank=_SHARE, only=() if is_mixed else ("csv",)),
        *_CSV_COLUMNS,
    )
    lines = [Row((*values(case_part, name), *values(measures, row)), row.note) for name, row in zip(names, rows, strict=True)]
    records = [side for row in rows for side in (row.a, row.b)]
    head = [_sides(rows, a, b), *_ab_summary(rows)] if rows else ["no rows to compare"]
    foot = [source(records), *(_aa_lines(rows) if a == b else ())] if records else []
    return Table((*case_part, *measures), tuple(lines), tuple(head), tuple(foot), title=title)


def _aa_lines(rows: Iterable[Comparison]) -> list[str]:
    """Return a line per row of a variant against itself, timed in the same rounds, if its interval does not contain 1."""
    import numpy as np

    from kerneltune.stats import ratio_interval

    lines = []
    for row in rows:
        if row.a.samples_us and row.b.samples_us:
            interval = ratio_interval(np.concatenate(row.a.samples_us), np.concatenate(row.b.samples_us))
            if not interval.contains(1.0):
                extent = f"{interval.low:.4f}x to {interval.high:.4f}x"
                lines.append(f"A/A interval without 1: {row.a.case} {row.a.label}: {extent}")
    return lines


def sweep_table(records: Sequence[Record], brief: bool = False) -> Table:
    """Return a row per case and variant, the fastest variant marked `*`; a part of the work has only a time.

    brief: leave out each variant that was skipped in every case, of two cases or more; a line below the table names it.
    """
    skipped = _always_skipped(records) if brief else {}
    kept = [r for r in records if (r.op, r.variant) not in skipped]
    groups = list(grouped(kept, case_key).values())
    rows = [list(_sweep_rows(group)) for group in groups]
    bounds = [row.bound for group in rows for row in group if row.bound]
    op_and_case = Column("op", shared=True), Column("case", rank=_CASE)
    case_part, names = case_columns([group[0] for group in groups], *op_and_case, sizes_first=True)
    measures = (
        Column("", key="best", value=lambda row: "*" if row.is_best else ""),
        Column("variant", value=attrgetter("record.variant")),
        Column("µs", digits=2, key="time_us", value=attrgetter("record.time_us")),
        Column("GB/s", digits=0, key="gbps", rank=_GBPS, value=lambda row: row.record.gbps if row.bound else None),
        Column(
            f"% {_bound_word(bounds)}", digits=1, key="pct_bound", rank=_SHARE, value=lambda row: row.bound and share(row.record)
        ),
        Column("vs baseline", digits=2, suffix="x", key="vs_baseline", value=attrgetter("speedup")),
        Column("bound", rank=_SHARE, only=() if len(set(bounds)) > 1 else ("csv",), value=attrgetter("bound")),
        Column("config", only=("markdown", "csv", "page"), value=attrgetter("record.config_label")),
        *(
            Column(name, only=("csv",), value=attrgetter(f"record.{name}"))
            for name in ("policy", "status", "ci_low_us", "ci_high_us", "aa_floor", "device")
        ),
    )
    lines = [
        Row((*values(case_part, name), *values(measures, row)), "" if row.record.status == "passed" else status_of(row.record))
        for name, group in zip(names, rows, strict=True)
        for row in group
    ]
    foot = [status_counts(r.status for r in records)]
    foot += [f"skipped in all cases: {op} {variant}: {reason}" for (op, variant), reason in skipped.items()]
    columns = (*case_part, *measures)
    return Table(columns, tuple(lines), tuple(_device_lines(records)), tuple(foot), repeated=len(case_part))


def _always_skipped(records: Sequence[Record]) -> dict[tuple[str, str], str]:
    """Return the variants that were skipped in all of several cases, with the reasons, if the operator has other variants."""
    shown_ops = {record.op for record in records if record.status != "skipped"}
    reasons_of = {}
    for (op, variant), group in grouped(records, lambda record: (record.op, record.variant)).items():
        if op in shown_ops and len(group) > 1 and all(record.status == "skipped" for record in group):
            reasons_of[op, variant] = "; ".join(dict.fromkeys(" ".join(record.reason.split()) for record in group))
    return reasons_of


def check_table(records: Sequence[Record], to_read: Iterable[str] = ()) -> Table:
    """Return one line per operator and variant: how many cases passed, failed with a config, and were skipped; no times.

    to_read: lines of the checks, each with its operator first; a note in the last row of the operator counts them.
    """
    statuses = ("checked", "failed", "skipped")
    numbers = [Column(status_word(status), digits=0) for status in statuses]
    columns = (Column("op", wraps=True), Column("variant"), *numbers, Column("types", wraps=True), Column("modes", wraps=True))
    noted, lines = Counter(line.partition(" ")[0].rstrip(":") for line in to_read), []
    for op, rows in grouped(records, lambda record: record.op).items():
        for variant, group in grouped(rows, lambda record: record.variant).items():
            counts = case_statuses(group)
            types = ", ".join(dict.fromkeys(short_dtype(r.dtype) for r in group))
            modes = ", ".join(dict.fromkeys(r.quant for r in group))
            lines.append(Row((op, variant, *(counts[status] for status in statuses), types, modes)))
        if noted[op]:
            lines[-1] = lines[-1]._replace(note=f"{counted(noted[op], 'line')} to read")
    return Table(columns, tuple(lines), tuple(_device_lines(records)), repeated=1)


def case_statuses(records: Iterable[Record]) -> Counter[str]:
    """Return how often each status occurs among the checks of a variant on a case; a check fails if any of its configs fails."""
    checks = grouped(records, lambda record: (record.op, record.variant, record.case, record.key.case)).values()
    return Counter("failed" if any(row.status == "failed" for row in rows) else rows[0].status for rows in checks)


def case_columns(records: Iterable[Record], *first: Column, sizes_first: bool = False) -> tuple[list[Column], list[CaseName]]:
    """Return the columns that name a case, and the names of each record's case: `first` by name, type, mode, options and sizes.

    first: columns of the fields of `CaseName`.
    """
    names = case_names(records)
    options = dict.fromkeys(option for name in names for option in name.options)
    axes = dict.fromkeys(axis for name in names for axis in name.axes)
    leading = [replace(column, value=attrgetter(column.name)) for column in first]
    settings = [Column(name, shared=True, value=attrgetter(name)) for name in ("dtype", "quant")]
    settings += [Column(name, shared=True, value=partial(_part, "options", name)) for name in options]
    sizes = [Column(name, digits=0, value=partial(_part, "axes", name)) for name in axes]
    return [*leading, *(sizes + settings if sizes_first else settings + sizes)], names


def _part(group: str, part: str, name: CaseName) -> CellValue:
    """Return an option or a size of a case; None if the case lacks it."""
    value: CellValue = getattr(name, group).get(part)
    return value


def _sides(rows: Sequence[Comparison], a: str, b: str) -> str:
    """Return the names of A and B in words: `A: the fastest peer of every case (torch.compile 20, liger 9); B: optimized`."""
    words = []
    for letter, name in (("A", a), ("B", b)):
        variants = Counter((row.a if letter == "A" else row.b).variant for row in rows)
        counts = ", ".join(f"{variant} {count}" for variant, count in variants.most_common())
        words.append(f"{letter}: the fastest peer of every case ({counts})" if name == BEST_PEER else f"{letter}: {name}")
    return "; ".join(words)


def _ab_summary(rows: Sequence[Comparison]) -> Iterator[str]:
    """Yield how fast B is beside A: in all rows, the slowest rows, each operator, each bound; and what makes it doubtful."""
    speedups = [row.speedup for row in rows if row.speedup is not None]
    if len(speedups) < len(rows):
        yield f"{len(rows) - len(speedups)} of {_count(rows)} not compared"
    if not speedups:
        return
    marks = [row.mark for row in rows if row.speedup is not None]
    wins, ties, losses = (marks.count(mark) for mark in ("+", "", "-"))
    extent = f"{_count(speedups)}, {min(speedups):.2f}x to {max(speedups):.2f}x"
    counts = f"{wins} faster (+), {ties} within 5 %, {losses} slower (-)"
    yield f"B is {statistics.geometric_mean(speedups):.2f}x as fast as A: geometric mean of {extent}; {counts}"
    if slow := sum(speedup <= _MUCH_SLOWER for speedup in speedups):
        more = "; …" if slow > _NAMED else ""
        yield f"20 % slower or more in {counted(slow, 'row')}: {'; '.join(slowest(rows)[: min(slow, _NAMED)])}{more}"
    kinds = {name.op: name.kind for name in case_names(row.a for row in rows)}
    groups = grouped(rows, lambda row: (row.a.op, row.a.quant))
    for (op, quant), members in groups.items() if len(groups) > 1 else ():
        if part := [row.speedup for row in members if row.speedup is not None]:
            yield f"  {kinds[op]} {quant}: {statistics.geometric_mean(part):.2f}x in {_count(part)}"
    yield from _reached(rows)
    if floors := [row.aa_floor for row in rows if row.aa_floor is not None]:
        yield f"noise, a variant against itself: at most {max(floors):.1%}"
    if runs := list(filter(None, (differing_run_fields(row.a, row.b) for row in rows if row.speedup is not None))):
        words = dict.fromkeys(_RUN_WORDS.get(name, name) for fields in runs for name in fields)
        remark = f"A and B are of different runs (another {' or '.join(words)}): may differ by a few per cent"
        yield f"{len(runs)} of {_count(speedups)}: {remark}"


def _reached(rows: Sequence[Comparison]) -> list[str]:
    """Return the median share that B reaches, of each bound."""
    shares_of = {bound: _shares(members) for bound, members in grouped(rows, lambda row: bound_of(row.b)).items()}
    shares_of = {bound: shares for bound, shares in sorted(shares_of.items()) if shares}
    medians = [
        f"{statistics.median(shares):.1f} % of the {bound}{f' ({_count(shares)})' if len(shares_of) > 1 else ''}"
        for bound, shares in shares_of.items()
    ]
    return [f"B reaches {' and '.join(medians)} in the median"] if medians else []


def _shares(rows: Iterable[Comparison]) -> list[float]:
    """Return the shares of the bound that B reaches, of the rows whose share is known."""
    return [part for part in (share(row.b) for row in rows) if part is not None]


def _count(values: Sequence[object]) -> str:
    return counted(len(values), "row")


class _SweepRow(NamedTuple):
    """Hold a record of a sweep; bound and speed-up over the baseline are None without a time and for a part of the work."""

    record: Record
    is_best: bool
    bound: Bound | None = None
    speedup: float | None = None


def _sweep_rows(group: Sequence[Record]) -> Iterator[_SweepRow]:
    """Yield the rows of the variants of a case."""
    baseline_us = next((record.time_us for record in group if record.variant == BASELINE), None)
    timed = [record for record in group if record.role != "part" and record.time_us is not None]
    best = min(timed, key=lambda record: record.time_us or 0.0, default=None)
    for record in group:
        if best is None or record.role == "part" or not record.time_us:
            yield _SweepRow(record, False)
        else:
            yield _SweepRow(record, record is best, bound_of(best), ratio(baseline_us, record.time_us))


def _device_lines(records: Iterable[Record]) -> list[str]:
    devices = dict.fromkeys(record.device for record in records)
    return [INTERPRETER_NOTE if device == INTERPRETER else f"device: {device}" for device in devices] or ["no records"]


def status_counts(statuses: Iterable[str]) -> str:
    """Return how often each status occurs: `12 passed, 1 failed`."""
    return ", ".join(f"{count} {status}" for status, count in Counter(map(status_word, statuses)).items()) or "nothing to show"
