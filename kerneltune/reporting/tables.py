"""Make tables of records: A against B, and the variants of a sweep. `table.Table` writes them in every form.

Pure functions; does not measure, read files or print.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kerneltune.device import INTERPRETER
from kerneltune.errors import unknown
from kerneltune.records import Record, case_on_device, grouped, identity_of, newest, other_run, ratio
from kerneltune.reporting.naming import CaseName, case_names, source
from kerneltune.reporting.shares import Bound, bound_of, share
from kerneltune.spec import short_dtype
from kerneltune.table import CellValue, Column, Row, Table
from kerneltune.wording import counted, pairs

WIN, LOSS = 1.05, 0.95
BEST_PEER = "best-peer"
"""The name that stands for the fastest peer of every case."""
_BASELINE = "baseline"
_MUCH_SLOWER = 0.8
"""A row whose speed-up is at most this is named above the table."""
_NAMED = 5
INTERPRETER_NOTE = "device: interpreter (no GPU): correctness is checked, no timing"
_RUN_WORDS = {"unit": "GPU serial"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold a line of an A/B table: the records of A and B for a case on a device."""

    a: Record
    b: Record

    @property
    def note(self) -> str:
        """Return why there is nothing to compare; empty where both sides are timed."""
        sides = (("A", self.a), ("B", self.b))
        return "; ".join(f"{side} {_status(record)}" for side, record in sides if record.status != "passed")

    @property
    def speedup(self) -> float | None:
        """Return the time of A over the time of B, unrounded; None where a side has no time."""
        return ratio(self.a.time_us, self.b.time_us)

    @property
    def speedup_interval(self) -> tuple[float | None, float | None]:
        """Return the bounds of the speed-up from the ends of the two intervals, so wider than 95 %; None for different runs.

        An interval covers the noise within a run only.
        """
        if other_run(self.a, self.b):
            return None, None
        return ratio(self.a.ci_low_us, self.b.ci_high_us), ratio(self.a.ci_high_us, self.b.ci_low_us)

    @property
    def aa_floor(self) -> float | None:
        """Return the larger noise floor of the two sides, a fraction; None if neither side has a noise floor."""
        return max((f for f in (self.a.aa_floor, self.b.aa_floor) if f is not None), default=None)

    @property
    def bound(self) -> Bound:
        """Return the bound of the case, by B's record."""
        return bound_of(self.b)

    @property
    def mark(self) -> str:
        """Return `+` above 1.05x, `-` below 0.95x, else an empty text."""
        speedup = self.speedup or 1.0
        return "+" if speedup > WIN else "-" if speedup < LOSS else ""


def _interval(row: Comparison) -> str | None:
    low, high = row.speedup_interval
    return f"{low:.2f}x–{high:.2f}x" if low is not None and high is not None else None


_Value = Callable[[Comparison], CellValue]
_MEASURES: tuple[tuple[Column, _Value], ...] = (
    (Column("A µs", digits=2, key="A_us"), lambda row: row.a.time_us),
    (Column("B µs", digits=2, key="B_us"), lambda row: row.b.time_us),
    (Column("speedup", digits=2, suffix="x"), lambda row: row.speedup),
    (Column("", key="mark"), lambda row: row.mark),
    (Column("A GB/s", digits=0, key="A_gbps", rank=6), lambda row: row.a.gbps),
    (Column("B GB/s", digits=0, key="B_gbps", rank=6), lambda row: row.b.gbps),
    (Column("B % ceiling", digits=1, key="B_pct_bound", rank=4), lambda row: share(row.b, row.bound)),
    (Column("95 % interval", key="interval", rank=3, only=("text", "markdown", "page")), _interval),
    (Column("noise %", digits=1, key="noise_pct", rank=5), lambda row: None if row.aa_floor is None else 100 * row.aa_floor),
)
"""Columns of A's and B's measurements with their values, which are empty where A and B are not compared."""
AB_COLUMNS = tuple(column for column, _ in _MEASURES)
"""The columns of A's and B's measurements, in print, in CSV and on the page."""
_CSV_VALUES: tuple[tuple[str, _Value], ...] = (
    ("op", lambda row: row.a.op),
    ("case", lambda row: row.a.case),
    ("options", lambda row: pairs(row.a.options)),
    ("policy", lambda row: row.a.policy),
    ("device", lambda row: row.a.device),
    ("A_variant", lambda row: row.a.variant),
    ("A_unit", lambda row: row.a.unit),
    ("A_commit", lambda row: row.a.commit),
    ("B_variant", lambda row: row.b.variant),
    ("B_unit", lambda row: row.b.unit),
    ("B_commit", lambda row: row.b.commit),
    ("speedup_low", lambda row: row.speedup_interval[0]),
    ("speedup_high", lambda row: row.speedup_interval[1]),
)
"""Further columns of CSV with their values."""


def ab_rows(a: Iterable[Record], b: Iterable[Record]) -> list[Comparison]:
    """Pair A and B by case and device, sorted by operator, mode, element type and options; the last record of a case counts."""
    sides = list(a), list(b)
    case_of = identity_of(*sides)
    of_a, of_b = ({case_of(record): record for record in side} for side in sides)
    rows = [Comparison(record, of_b[case]) for case, record in of_a.items() if case in of_b]
    orders = [list(dict.fromkeys(values)) for values in zip(*(_kind(row.a) for row in rows), strict=True)]
    return sorted(rows, key=lambda row: [order.index(value) for order, value in zip(orders, _kind(row.a), strict=True)])


def best_peers(records: Iterable[Record]) -> list[Record]:
    """Return the fastest timed peer of every case and device, in the order of the cases."""
    best: dict[object, Record] = {}
    for record in records:
        if record.role == "peer" and record.time_us is not None:
            known = best.setdefault(case_on_device(record), record)
            if record.time_us < (known.time_us or 0.0):
                best[case_on_device(record)] = record
    return list(best.values())


def side(records: Iterable[Record], name: str) -> list[Record]:
    """Return the newest records of a variant, or of the fastest peer of every case where the name is `best-peer`."""
    latest = newest(records)
    return best_peers(latest) if name == BEST_PEER else [record for record in latest if record.variant == name]


def paired(records: Iterable[Record], a: str, b: str) -> list[Comparison]:
    """Pair two variants of some records, or the fastest peers where a name is `best-peer`."""
    listed = list(records)
    return ab_rows(side(listed, a), side(listed, b))


def side_names(records: Sequence[Record]) -> list[str]:
    """Return the names that A or B may have: the fastest peer where a peer is timed, and the variants."""
    has_peer = any(record.role == "peer" and record.time_us is not None for record in records)
    return [*([BEST_PEER] if has_peer else []), *dict.fromkeys(record.variant for record in records)]


def default_pair(records: Sequence[Record], a: str | None = None, b: str | None = None) -> tuple[str, str]:
    """Return A and B as given, else the defaults.

    A is the fastest peer where most cases have a peer, else `baseline`. B is `optimized`, else the variant of most cases.
    """
    sides = side_names(records)
    variants = [name for name in sides if name != BEST_PEER]
    if not variants:
        raise ValueError("no records to compare")
    peers = best_peers(newest(records))
    for letter, name in (("a", a), ("b", b)):
        if name is not None and name not in sides:
            raise unknown(letter, name, sides)
    own = Counter(r.variant for r in records if r.role != "peer" and r.variant not in ("baseline", "optimized"))
    most = max(own, key=lambda name: own[name], default=variants[-1])
    cases = set(map(case_on_device, records))
    first = BEST_PEER if 2 * len(peers) >= len(cases) else "baseline" if "baseline" in variants else variants[0]
    return a or first, b or ("optimized" if "optimized" in variants else most)


def family_pairs(families: Mapping[str, Sequence[Record]], pair: tuple[str | None, str | None]) -> dict[str, tuple[str, str]]:
    """Return family -> A and B: as asked where the family has the variant, else the default."""
    return {
        family: default_pair(members, *(name if name in side_names(members) else None for name in pair))
        for family, members in families.items()
    }


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
        Column("B % bound", digits=0, key="B_pct_bound", rank=1),
    )
    lines = []
    for family, members in families.items():
        a, b = pairs_of[family]
        rows = [row for row in paired(members, a, b) if row.speedup is not None]
        cases = len(set(map(case_on_device, members)))
        compared = str(cases) if len(rows) == cases else f"{len(rows)} of {cases}"
        name = "fastest peer" if a == BEST_PEER else a
        if not rows:
            lines.append(Row((family, *[None] * 5, name, b, compared, None)))
            continue
        marks = [row.mark for row in rows]
        shares = [part for row in rows if (part := share(row.b, row.bound)) is not None]
        speedup = statistics.geometric_mean(row.speedup or 1.0 for row in rows)
        counts = [marks.count(mark) for mark in ("+", "", "-")]
        lines.append(
            Row((family, speedup, slowest(rows)[0], *counts, name, b, compared, statistics.median(shares) if shares else None))
        )
    return Table(columns, tuple(lines))


def slowest(rows: Sequence[Comparison]) -> list[str]:
    """Return the timed rows by name, the smallest speed-up first: `0.61x fwd none bfloat16 128×4096`."""
    timed = [(row.speedup, name) for row, name in zip(rows, case_names(row.a for row in rows), strict=True) if row.speedup]
    words = [
        (speedup, " ".join(filter(None, [n.kind, n.quant, short_dtype(n.dtype), n.shape, n.settings]))) for speedup, n in timed
    ]
    return [f"{speedup:.2f}x {name}" for speedup, name in sorted(words)]


def ab_table(rows: Sequence[Comparison], a: str = "A", b: str = "B", title: str = "") -> Table:
    """Return the table of A against B: the summary, a row per case, and the origin of the records.

    Args:
        rows: the result of `ab_rows`.
        a, b: the names of A and B; `best-peer` for the fastest peer of every case.
        title: heading above the table.
    """
    of_cases, cases = case_columns([row.a for row in rows], Column("kind", shared=True))
    bounds = [row.bound for row in rows if row.speedup is not None]
    is_mixed = len(set(bounds)) > 1
    a_varies, b_varies = (len({getattr(row, side).variant for row in rows}) > 1 for side in "ab")
    columns = (
        *of_cases,
        *([Column("A is", key="A_is")] if a_varies else []),
        *([Column("B is", key="B_is")] if b_varies else []),
        *_named_bound(AB_COLUMNS, bounds),
        Column("bound", rank=4, only=() if is_mixed else ("csv",)),
        *(Column(name, only=("csv",)) for name, _ in _CSV_VALUES),
    )
    lines = []
    for case, row in zip(cases, rows, strict=True):
        sides = [side.variant for side, varies in ((row.a, a_varies), (row.b, b_varies)) if varies]
        measures = [None if row.note else value(row) for _, value in _MEASURES]
        further = [value(row) for _, value in _CSV_VALUES]
        lines.append(Row((*case, *sides, *measures, None if row.note else row.bound, *further), row.note))
    records = [side for row in rows for side in (row.a, row.b)]
    head = [_sides(rows, a, b), *_ab_summary(rows)] if rows else ["no rows to compare"]
    foot = [source(records), *(_aa_lines(rows) if a == b else ())] if records else []
    return Table(columns, tuple(lines), tuple(head), tuple(foot), title=title)


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

    Args:
        brief: name variants that skipped all of several cases in a line below, without rows.
    """
    skipped = _always_skipped(records) if brief else {}
    kept = [r for r in records if (r.op, r.variant) not in skipped]
    groups = list(grouped(kept, case_on_device).values())
    bounds = [bound_of(best) for group in groups if (best := _best(group)) is not None]
    of_cases, cases = case_columns(
        [group[0] for group in groups], Column("op", shared=True), Column("case", rank=1), sizes_first=True
    )
    columns = (
        *of_cases,
        Column("", key="best"),
        Column("variant"),
        Column("µs", digits=2, key="time_us"),
        Column("GB/s", digits=0, key="gbps", rank=3),
        *_named_bound([Column("% ceiling", digits=1, key="pct_bound", rank=2)], bounds),
        Column("vs baseline", digits=2, suffix="x", key="vs_baseline"),
        Column("bound", rank=2, only=() if len(set(bounds)) > 1 else ("csv",)),
        Column("config", only=("markdown", "csv", "page")),
        *(Column(name, only=("csv",)) for name in ("policy", "status", "ci_low_us", "ci_high_us", "aa_floor", "device")),
    )
    lines = []
    for case, group in zip(cases, groups, strict=True):
        best = _best(group)
        for r in group:
            measured = [r.time_us, *_of_the_whole(r, group), r.config_label]
            last = [r.policy, r.status, r.ci_low_us, r.ci_high_us, r.aa_floor, r.device]
            note = "" if r.status == "passed" else _status(r)
            lines.append(Row((*case, "*" if r is best else "", r.variant, *measured, *last), note))
    foot = [status_counts(r.status for r in records)]
    foot += [f"skipped in all cases: {op} {variant}: {reason}" for (op, variant), reason in skipped.items()]
    return Table(columns, tuple(lines), tuple(_device_lines(records)), tuple(foot), repeated=len(of_cases))


def _always_skipped(records: Sequence[Record]) -> dict[tuple[str, str], str]:
    """Return variant -> reason where all records of several cases are skipped, unless it is an operator's last variant."""
    of_variants = grouped(records, lambda record: (record.op, record.variant))
    shown = {op for (op, _), of_it in of_variants.items() if any(r.status != "skipped" for r in of_it)}
    return {
        (op, variant): "; ".join(dict.fromkeys(" ".join(r.reason.split()) for r in of_it))
        for (op, variant), of_it in of_variants.items()
        if op in shown and len(of_it) > 1 and all(r.status == "skipped" for r in of_it)
    }


def check_table(records: Sequence[Record]) -> Table:
    """Return one line per operator and variant: how many cases passed, failed with a config, and were skipped; no times."""
    columns = (
        Column("op", wraps=True), Column("variant"), *(Column(status, digits=0) for status in ("checked", "failed", "skipped")),
        Column("types", wraps=True), Column("modes", wraps=True),
    )  # fmt: skip
    lines, all_counts = [], Counter[str]()
    for op, variant in dict.fromkeys((r.op, r.variant) for r in records):
        of_it = [r for r in records if (r.op, r.variant) == (op, variant)]
        by_case = grouped(of_it, lambda r: (r.case, r.key.case))
        counts = Counter(
            "failed" if any(r.status == "failed" for r in of_case) else of_case[0].status for of_case in by_case.values()
        )
        spans = (", ".join(dict.fromkeys(names)) for names in ((short_dtype(r.dtype) for r in of_it), (r.quant for r in of_it)))
        lines.append(Row((op, variant, *(counts[status] for status in ("checked", "failed", "skipped")), *spans)))
        all_counts += counts
    return Table(columns, tuple(lines), tuple(_device_lines(records)), (status_counts(all_counts.elements()),), repeated=1)


def _kind(record: Record) -> tuple[str, ...]:
    return record.op, record.quant, record.dtype, pairs(record.options)


def case_columns(
    records: Iterable[Record], *first: Column, sizes_first: bool = False
) -> tuple[list[Column], list[list[CellValue]]]:
    """Return the columns that name a case, and the values of each record: `first` by name, type, mode, options and sizes.

    first: columns of the fields of `CaseName`.
    """
    names = case_names(records)
    options = list(dict.fromkeys(option for name in names for option in name.options))
    axes = list(dict.fromkeys(axis for name in names for axis in name.axes))
    settings, sizes = (
        [Column(name, shared=True) for name in ("dtype", "quant", *options)],
        [Column(name, digits=0) for name in axes],
    )

    def values(name: CaseName) -> list[CellValue]:
        leading = [getattr(name, column.name) for column in first]
        of_settings = [name.dtype, name.quant, *(str(name.options.get(option, "")) for option in options)]
        of_sizes = [name.axes.get(axis) for axis in axes]
        return [*leading, *of_sizes, *of_settings] if sizes_first else [*leading, *of_settings, *of_sizes]

    return [*first, *(sizes + settings if sizes_first else settings + sizes)], list(map(values, names))


def _sides(rows: Sequence[Comparison], a: str, b: str) -> str:
    """Return the names of A and B in words: `A: the fastest peer of every case (torch.compile 20, liger 9); B: optimized`."""
    said = []
    for letter, name in (("A", a), ("B", b)):
        variants = Counter((row.a if letter == "A" else row.b).variant for row in rows)
        counts = ", ".join(f"{variant} {count}" for variant, count in variants.most_common())
        said.append(f"{letter}: the fastest peer of every case ({counts})" if name == BEST_PEER else f"{letter}: {name}")
    return "; ".join(said)


def _ab_summary(rows: Sequence[Comparison]) -> list[str]:
    speedups = [row.speedup for row in rows if row.speedup is not None]
    skipped = len(rows) - len(speedups)
    lines = [f"{skipped} of {_count(rows)} not compared"] if skipped else []
    if not speedups:
        return lines
    marks = [row.mark for row in rows if row.speedup is not None]
    wins, ties, losses = (marks.count(mark) for mark in ("+", "", "-"))
    extent = f"{min(speedups):.2f}x to {max(speedups):.2f}x"
    lines += [
        f"B is {statistics.geometric_mean(speedups):.2f}x as fast as A: geometric mean of {_count(speedups)}, {extent}; "
        f"{wins} faster (+), {ties} within 5 %, {losses} slower (-)"
    ]
    slow = sum(speedup <= _MUCH_SLOWER for speedup in speedups)
    if slow:
        more = "; …" if slow > _NAMED else ""
        lines.append(f"20 % slower or more in {counted(slow, 'row')}: {'; '.join(slowest(rows)[: min(slow, _NAMED)])}{more}")
    kinds = {name.op: name.kind for name in case_names(row.a for row in rows)}
    groups = list(dict.fromkeys((row.a.op, row.a.quant) for row in rows))
    for op, quant in groups if len(groups) > 1 else ():
        part = [row.speedup for row in rows if (row.a.op, row.a.quant) == (op, quant) and row.speedup is not None]
        if part:
            lines.append(f"  {kinds[op]} {quant}: {statistics.geometric_mean(part):.2f}x in {_count(part)}")
    lines += _reached(rows)
    floors = [row.aa_floor for row in rows if row.aa_floor is not None]
    if floors:
        lines.append(f"noise, a variant against itself: at most {max(floors):.1%}")
    apart = [fields for row in rows if row.speedup is not None and (fields := other_run(row.a, row.b))]
    if apart:
        other = " or ".join(dict.fromkeys(_RUN_WORDS.get(name, name) for fields in apart for name in fields))
        other_runs = f"A and B are of different runs (another {other}): may differ by a few per cent"
        lines.append(f"{len(apart)} of {_count(speedups)}: {other_runs}")
    return lines


def _reached(rows: Sequence[Comparison]) -> list[str]:
    """Return the median share that B reaches, of each bound."""
    reached = ((row.bound, share(row.b, row.bound)) for row in rows)
    by_bound = grouped([(bound, part) for bound, part in reached if part is not None], lambda item: item[0])
    said = [
        f"{statistics.median(part for _, part in of):.1f} % of the {bound}{f' ({_count(of)})' if len(by_bound) > 1 else ''}"
        for bound, of in sorted(by_bound.items())
    ]
    return [f"B reaches {' and '.join(said)} in the median"] if said else []


def _named_bound(columns: Iterable[Column], bounds: Iterable[Bound]) -> list[Column]:
    """Return the columns, with the bound of the rows in the heading of the shares; `bound` where another column says which."""
    kinds = set(bounds)
    word = "bound" if len(kinds) > 1 else next(iter(kinds), "ceiling")
    return [replace(c, name=c.name.replace("ceiling", word)) if c.key.endswith("pct_bound") else c for c in columns]


def _count(values: Sequence[object]) -> str:
    return counted(len(values), "row")


def _best(group: Iterable[Record]) -> Record | None:
    whole = [record for record in group if record.role != "part"]
    timed = [(record.time_us, index, record) for index, record in enumerate(whole) if record.time_us is not None]
    return min(timed)[2] if timed else None


def _of_the_whole(record: Record, group: Sequence[Record]) -> tuple[CellValue, ...]:
    """Return GB/s, percent of the bound, speed-up over the baseline of the same case, bound; none for a part of the work."""
    best = _best(group)
    if record.role == "part" or best is None:
        return None, None, None, None
    bound = bound_of(best)
    baseline = next((other.time_us for other in group if other.variant == _BASELINE), None)
    return record.gbps, share(record, bound), ratio(baseline, record.time_us), bound if record.time_us else None


def _device_lines(records: Iterable[Record]) -> list[str]:
    devices = dict.fromkeys(record.device for record in records)
    return [INTERPRETER_NOTE if device == INTERPRETER else f"device: {device}" for device in devices] or ["no records"]


def status_counts(statuses: Iterable[str]) -> str:
    """Return how often each status occurs: `12 passed, 1 failed`."""
    return ", ".join(f"{count} {status}" for status, count in Counter(statuses).items()) or "nothing to show"


def _status(record: Record) -> str:
    """Return the status with its reason, on one line."""
    if record.status == "checked":
        return "checked, not timed"
    return f"{record.status}: {' '.join(record.reason.split())}"
