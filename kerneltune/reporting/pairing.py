"""Pair the records of A with the records of B by case: two variants, or a variant and the fastest peer of every case."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kerneltune.errors import unknown
from kerneltune.records import Record, case_key, differing_run_fields, grouped, newest, ratio, shared_case_key
from kerneltune.wording import assignments

WIN, LOSS = 1.05, 0.95
BEST_PEER = "best-peer"
"""The name that stands for the fastest peer of every case."""
BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold a line of an A/B table: the records of A and B for a case on a device."""

    a: Record
    b: Record

    @property
    def note(self) -> str:
        """Return why there is nothing to compare; empty where both sides are timed."""
        sides = (("A", self.a), ("B", self.b))
        return "; ".join(f"{side} {status_of(record)}" for side, record in sides if record.status != "passed")

    @property
    def speedup(self) -> float | None:
        """Return the time of A over the time of B, unrounded; None where a side has no time."""
        return ratio(self.a.time_us, self.b.time_us)

    @property
    def speedup_interval(self) -> tuple[float | None, float | None]:
        """Return the bounds of the speed-up from the ends of the two intervals, so wider than 95 %; None for different runs.

        An interval covers the noise within a run only.
        """
        if differing_run_fields(self.a, self.b):
            return None, None
        return ratio(self.a.ci_low_us, self.b.ci_high_us), ratio(self.a.ci_high_us, self.b.ci_low_us)

    @property
    def aa_floor(self) -> float | None:
        """Return the larger noise floor of the two sides, a fraction; None if neither side has a noise floor."""
        return max((f for f in (self.a.aa_floor, self.b.aa_floor) if f is not None), default=None)

    @property
    def mark(self) -> str:
        """Return `+` above 1.05x, `-` below 0.95x, else an empty text."""
        speedup = self.speedup or 1.0
        if speedup > WIN:
            return "+"
        return "-" if speedup < LOSS else ""


def status_word(status: str) -> str:
    """Return the word for a status in tables: a check without a time that passed is stored as `checked`."""
    return "passed" if status == "checked" else status


def status_of(record: Record) -> str:
    """Return the status with its reason, on one line."""
    if record.status == "checked":
        return "passed, not timed"
    return f"{record.status}: {' '.join(record.reason.split())}"


def ab_rows(a: Iterable[Record], b: Iterable[Record]) -> list[Comparison]:
    """Pair A and B by case and device; the last record of a case counts.

    Rows of the same operator, mode, element type and options stand together, groups and rows in the order of their appearance.
    """
    a, b = list(a), list(b)
    case_of = shared_case_key(a, b)
    a_records = {case_of(record): record for record in a}
    b_records = {case_of(record): record for record in b}
    rows = [Comparison(record, b_records[case]) for case, record in a_records.items() if case in b_records]
    keys = [_group_key(row.a) for row in rows]
    orders = [list(dict.fromkeys(values)) for values in zip(*keys, strict=True)]  # of appearance, for each part of a key
    return sorted(rows, key=lambda row: [order.index(value) for order, value in zip(orders, _group_key(row.a), strict=True)])


def best_peers(records: Iterable[Record]) -> list[Record]:
    """Return the fastest timed peer of every case and device, in the order of the cases."""
    timed = [record for record in records if record.role == "peer" and record.time_us is not None]
    return [min(peers, key=lambda record: record.time_us or 0.0) for peers in grouped(timed, case_key).values()]


def side(records: Iterable[Record], name: str) -> list[Record]:
    """Return the newest records of a variant, or of the fastest peer of every case where the name is `best-peer`."""
    latest = newest(records)
    return best_peers(latest) if name == BEST_PEER else [record for record in latest if record.variant == name]


def paired(records: Iterable[Record], a: str, b: str) -> list[Comparison]:
    """Pair two variants of some records, or the fastest peers where a name is `best-peer`; a variant alone has no pair."""
    listed = list(records) if a != b else []
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
    own = Counter(r.variant for r in records if r.role != "peer" and r.variant not in (BASELINE, "optimized"))
    most = max(own, key=lambda name: own[name], default=variants[-1])
    cases = set(map(case_key, records))
    first = BASELINE if BASELINE in variants else variants[0]
    if 2 * len(peers) >= len(cases):
        first = BEST_PEER
    return a or first, b or ("optimized" if "optimized" in variants else most)


def family_pairs(families: Mapping[str, Sequence[Record]], pair: tuple[str | None, str | None]) -> dict[str, tuple[str, str]]:
    """Return family -> A and B: as asked where the family has the variant, else the default."""
    pairs_of = {}
    for family, members in families.items():
        a, b = (name if name in side_names(members) else None for name in pair)
        pairs_of[family] = default_pair(members, a, b)
    return pairs_of


def _group_key(record: Record) -> tuple[str, ...]:
    return record.op, record.quant, record.dtype, assignments(record.options)
