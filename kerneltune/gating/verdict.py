"""Compare two sets of records and judge each row: pass, regression or ambiguous.

`_verdict_of` has the rules of a row, `rows.slower_groups` the rule for a variant as a whole, docs/gate.md the reasons. Only
changes of our own code can fail the gate. A measurement that is the same on both sides passes, however noisy it is.

Records with samples are compared by process (see stats). If both sides have one process each, or a side has no samples, the
opposite ends of the two intervals are compared. These intervals do not contain the variation between processes: the spread of
all rows' slowdowns about their median replaces it.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from kerneltune.device import INTERPRETER
from kerneltune.gating.rows import Change, is_peer, pool, setup_of, slower_groups, us_of
from kerneltune.records import Defaults, Record, differing_run_fields, newest_by, shared_case_key
from kerneltune.spec import TaskKey
from kerneltune.stats import Interval, Shift, holm, interval_shift, shifts
from kerneltune.wording import counted, first_of, printable

PASS, REGRESSION, UNUSABLE, AMBIGUOUS = 0, 1, 2, 3
DEFAULT_MARGIN = 0.03
MIN_CHANGE_US = 0.5
ALPHA = 0.05
_WIDEST = 0.03
"""If the interval of a slowdown is wider than ± this fraction (or the margin), the row is ambiguous."""
_SIGMAS_PER_MAD = 1.4826
_SPREAD_ROWS = 12
"""Fewest rows of one process a side whose spread widens their intervals."""
_MOST_SPREAD, _SPREADS = 0.03, 3.0
"""Largest spread that counts, and the number of spreads on either side of a widened interval."""
_BETWEEN_PROCESSES = 0.0566
"""Fraction by which two processes with the same code may differ: two standard deviations of a ratio of two times, each with 2 %
noise. Fewer than _SPREAD_ROWS rows of one process a side do not show this difference. Each of them is a regression only above
(1 + limit) (1 + _BETWEEN_PROCESSES) - 1. In simulated runs of 3 unchanged rows, 3 of 1,000 runs fail; without this rule 228."""
_BETWEEN_UNITS_PERCENT = 5.5
"""Largest difference between two H200s that was measured for the same code (docs/notes/gate.md)."""
_MOST_TRAFFIC = 10.0
"""Factor between the bytes of two sides above which their times are no times of the same work in the same unit."""
A_PEER, _FAILED_BEFORE = "a peer", "fails in the baseline as well"
"""Reasons why a row is a note."""
RERUNS = 2
"""Number of further measurements: first all suspects, then the suspects that are still ambiguous."""

RowVerdict = Literal["pass", "slower", "regression", "ambiguous", "missing", "failed", "faster"]
WORST_FIRST: tuple[RowVerdict, ...] = ("failed", "missing", "regression", "ambiguous", "slower", "faster", "pass")


@dataclass(frozen=True, slots=True)
class GateRow:
    """Hold the verdict on a variant and a case.

    Attributes:
        record: the new record of the row, or the baseline's record if there is no new record.
        verdict: `slower` is surely slower, but within the margin or by less than 0.5 µs; `missing` and `failed` rows were not
            compared.
        change: the compared records and their difference, `p` Holm-corrected over the rows; None if the row was not compared.
        reason: the reason for a verdict other than `pass`, and the number of processes behind it; may be empty.
        note: the reason why the verdict does not count: `a peer` or `fails in the baseline as well`; empty if it counts.
    """

    record: Record
    verdict: RowVerdict
    change: Change | None = None
    reason: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold the gate's answer: exit code 0 pass, 1 regression, 2 nothing to compare or not comparable, 3 ambiguous.

    Attributes:
        notes: facts about the comparison as a whole, a line each.
        stale: a line for each variant measured with other code or configs.
        slower: a line for each variant that is slower as a whole, or for each finding in compiled code.
    """

    rows: tuple[GateRow, ...]
    exit_code: int
    reason: str
    notes: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    slower: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the lines for failures that no single row shows."""
        return self.stale + self.slower

    def count(self, verdict: RowVerdict) -> int:
        """Return the number of rows with this verdict, without notes."""
        return sum(row.verdict == verdict and not row.note for row in self.rows)

    @property
    def compared(self) -> int:
        """Return the number of rows that were compared."""
        return sum(row.change is not None for row in self.rows)

    @property
    def notable(self) -> list[GateRow]:
        """Return the rows that did not simply pass: worst first, notes last."""
        return sorted((r for r in self.rows if r.verdict != "pass"), key=lambda r: (bool(r.note), WORST_FIRST.index(r.verdict)))

    def keys_with(self, *verdicts: RowVerdict) -> frozenset[TaskKey]:
        """Return the keys of the rows with any of these verdicts, without notes."""
        return frozenset(row.record.key for row in self.rows if row.verdict in verdicts and not row.note)


def gate(
    baseline: Sequence[Record],
    new: Sequence[Record],
    margin: float,
    *,
    peers: bool = False,
    defaults: Defaults = lambda _op: {},
    stale: Sequence[str] = (),
) -> Verdict:
    """Compare the newest record of every row.

    Args:
        margin: tolerated slowdown, a fraction.
        peers: judge peers as well; if False, rows of peers are notes.
        defaults: operator -> the default of every option; called only if a side has an option that the other side lacks.
        stale: a line for each variant whose new records were measured with other code or configs than the checkout's; they
            fail the gate.
    """
    obstacle = _why_not_compared(baseline, new)
    if obstacle:
        return Verdict((), UNUSABLE, obstacle)
    case_of = shared_case_key(baseline, new, defaults)
    old_rows, new_rows = (newest_by(side, lambda record: (case_of(record), record.variant)) for side in (baseline, new))
    old_setups, new_setups = set(map(setup_of, old_rows.values())), set(map(setup_of, new_rows.values()))
    pairs = [(old_rows.get(row), new_rows.get(row)) for row in old_rows | new_rows]
    timed = [(old, fresh) for old, fresh in pairs if old and fresh and old.status == fresh.status == "passed"]
    process_shifts = shifts([(old.samples_us or (), fresh.samples_us or ()) for old, fresh in timed])
    changes = _widened([_change(*sides, shift) for sides, shift in zip(timed, process_shifts, strict=True)])
    judged = [change for change in changes if peers or not is_peer(change.old, change.new)]
    noted = [change for change in changes if is_peer(change.old, change.new) and not peers]
    rows = []
    for group, note in ((judged, ""), (noted, A_PEER)):  # each group is corrected for multiple tests by itself
        p_values = holm([change.p for change in group])
        rows += [_judged(replace(change, p=p), margin, note) for change, p in zip(group, p_values, strict=True)]
    rows += filter(None, (_not_compared(old, fresh, new_setups, peers) for old, fresh in pairs))
    notes = [
        _other_gpu(changes),
        _too_short(changes, margin),
        _older("baseline", len(baseline) - len(old_rows)),
        _older("new", len(new) - len(new_rows)),
        _left_out("baseline", old_rows.values(), new_setups),
        _left_out("new", new_rows.values(), old_setups),
        _added([fresh for key, fresh in new_rows.items() if key not in old_rows and setup_of(fresh) in old_setups]),
    ]
    groups, doubtful = slower_groups(judged)
    unanswered = Verdict(tuple(rows), PASS, "", tuple(filter(None, [*notes, *doubtful])), tuple(stale), tuple(groups))
    return _with_answer(unanswered, is_judged=bool(judged))


def confirm(
    judge: Callable[[Sequence[Record]], Verdict],
    new: Sequence[Record],
    remeasure: Callable[[frozenset[TaskKey]], Sequence[Record]],
    reruns: int = RERUNS,
) -> tuple[Verdict, list[Record]]:
    """Run the gate, measure regressions and ambiguous rows again, and return the verdict and the pooled new records.

    A further measurement clears a row that was suspect by chance, and narrows the interval of a row that is slow. The records
    from `remeasure` are pooled with the earlier records of the suspects; they never replace them. There are at most `reruns`
    further measurements. A row that is a regression after the first further measurement is not measured again; a row that is
    still ambiguous is.

    Args:
        judge: function that compares new records with the baseline, such as a partial `gate`.
        new: records of the processes, a row of each or pooled.
        remeasure: function that measures rows again, and returns records as `new` holds them.
    """
    measured, pooled = list(new), pool(new)
    verdict = judge(pooled)
    suspects = verdict.keys_with("regression", "ambiguous")
    for _ in range(reruns):
        if not suspects:
            break
        measured += [record for record in remeasure(suspects) if record.key in suspects]
        pooled = pool(measured)
        verdict = judge(pooled)
        suspects = suspects & verdict.keys_with("ambiguous")
    return verdict, pooled


def _why_not_compared(baseline: Sequence[Record], new: Sequence[Record]) -> str:
    """Return the reason why the two sets cannot be compared at all; empty if they can."""
    for name, records in (("baseline", baseline), ("new", new)):
        if not records:
            return f"nothing compared: {name} has no records"
        if all(record.device == INTERPRETER for record in records):
            return f"{name} holds records of the interpreter, whose times mean nothing"
    for name in ("device", "policy"):
        old, fresh = ({getattr(record, name) for record in side} for side in (baseline, new))
        if not old & fresh:
            return f"not comparable: baseline has {name} {', '.join(sorted(old))}, new has {', '.join(sorted(fresh))}"
    return ""


def _left_out(side: str, records: Iterable[Record], setups: Collection[tuple[str, str]]) -> str:
    """Return a note with the number of timed rows whose GPU or policy is missing on the other side; empty if no row is."""
    counts = Counter(setup_of(record) for record in records if record.status == "passed")
    named = ", ".join(f"{count} of {' '.join(setup)}" for setup, count in sorted(counts.items()) if setup not in setups)
    return f"rows that only {side} has, left out: {named}" if named else ""


def _older(side: str, count: int) -> str:
    """Return a note on rows of a case that a newer row has as well, as without an option and with its default; empty if none."""
    return f"{counted(count, 'older row')} of {side} not judged, as newer rows have the same cases" if count else ""


def _added(records: Iterable[Record]) -> str:
    """Return a note with the number of timed rows by variant that the baseline lacks; empty if the baseline has all rows."""
    counts = Counter(f"{record.op} {record.variant}" for record in records if record.status == "passed")
    named = first_of((f"{count} of {name}" for name, count in counts.items()), 3)
    return f"rows that the baseline lacks, not judged: {named}" if named else ""


def _widened(changes: list[Change]) -> list[Change]:
    """Widen the intervals of rows with one process a side by the spread of the slowdowns of all these rows, if they show it."""
    logs = [change.log for change in changes if not change.basis]
    if len(logs) < _SPREAD_ROWS:
        return [change if change.basis else replace(change, between_processes=_BETWEEN_PROCESSES) for change in changes]
    middle = median(logs)
    factor = math.exp(_SPREADS * min(_MOST_SPREAD, _SIGMAS_PER_MAD * median(abs(log - middle) for log in logs)))

    def wider(change: Change) -> Change:
        low, high = (1 + change.slowdown) / factor - 1, (1 + change.slowdown) * factor - 1
        return replace(change, low=min(change.low, low), high=max(change.high, high))

    return [change if change.basis else wider(change) for change in changes]


def _too_short(changes: Sequence[Change], margin: float) -> str:
    """Return a note on rows too short for the margin, with the smallest visible change; empty if all rows are long enough."""
    short = [change for change in changes if us_of(change.old) * margin < MIN_CHANGE_US and not is_peer(change.old, change.new)]
    if not short or not margin:
        return ""
    shortest = min(short, key=lambda change: us_of(change.old))
    least = MIN_CHANGE_US / us_of(shortest.old)
    return (
        f"{counted(len(short), 'row')} shorter than {MIN_CHANGE_US / margin:.1f} µs: changes below {MIN_CHANGE_US} µs are not "
        f"judged, {least:+.1%} of the shortest, {shortest.new.label} {shortest.new.variant}"
    )


def _change(old: Record, new: Record, process_shift: Shift | None) -> Change:
    """Return the change of a row that both sides have timed; process_shift: None where a side lacks several processes."""
    same = ("date", "time_us", "ci_low_us", "ci_high_us", "n", "unit", "commit", "samples_us")
    if all(getattr(old, name) == getattr(new, name) for name in same):  # a measurement is never slower than itself
        return Change(old, new, 0.0, 0.0, 0.0, 1.0, "the same measurement")
    if process_shift is not None:
        basis = f"{len(old.samples_us or ())} and {len(new.samples_us or ())} processes"
        return Change(old, new, process_shift.log, *process_shift.bounds, process_shift.p_slower, basis)
    before, after = (Interval(us_of(side), side.ci_low_us or 0.0, side.ci_high_us or 0.0) for side in (old, new))
    shift = interval_shift(before, after)
    return Change(old, new, shift.log, after.low / before.high - 1, after.high / before.low - 1, shift.p_slower, "")


def _not_compared(old: Record | None, new: Record | None, new_setups: Collection[tuple[str, str]], peers: bool) -> GateRow | None:
    """Return a row whose new record failed, or is not timed where the baseline's is; None for any other row."""
    note = ""
    if old is not None and old.status == "failed":
        note = _FAILED_BEFORE
    elif is_peer(old, new) and not peers:
        note = A_PEER
    if new is not None and new.status == "failed":
        return GateRow(new, "failed", None, _one_line(note, new.reason), note)
    if old is None or old.status != "passed" or setup_of(old) not in new_setups:
        return None
    if new is not None and new.status == "passed":
        return None
    reason = f"not {'timed ' if new else ''}in the new records"
    if new and new.reason:
        reason = f"{new.status} in the new records: {new.reason}"
    return GateRow(new or old, "missing", None, _one_line(note, reason), note)


def _judged(change: Change, margin: float, note: str) -> GateRow:
    """Return a compared row; only a row that is slower or ambiguous keeps the note."""
    verdict, reason = _verdict_of(change, margin)
    if verdict == "pass":
        return GateRow(change.new, verdict, change)
    basis = change.basis or ("" if verdict == "faster" else "one process a side")
    note = "" if verdict == "faster" else note
    names = [name for name in differing_run_fields(change.old, change.new) if name in ("driver", "torch", "triton")]
    versions = [f"{name} {getattr(change.old, name)} → {getattr(change.new, name)}" for name in names]  # which may cost time
    return GateRow(change.new, verdict, change, _one_line(note, reason, *versions, basis), note)


def _verdict_of(change: Change, margin: float) -> tuple[RowVerdict, str]:
    """Return the verdict on a row and its reason: the first line of the table that is true of the row.

    | the row is | verdict |
    |---|---|
    | of a tenth or ten times the bytes (time times GB/s): another unit of time, or another `traffic` | ambiguous |
    | long, and surely slower by more than the limit and the usual difference of processes | regression |
    | long, and slower by more than the margin | ambiguous |
    | long, surely slower, and perhaps by more than the limit | ambiguous |
    | surely slower by more than the limit, and perhaps long | ambiguous |
    | known too inexactly | ambiguous |
    | short, surely slower, and by more than the limit | slower |
    | long, surely slower, and by more than the noise floor | slower |
    | surely faster by more than the limit, and by more than MIN_CHANGE_US | faster |
    | any other | pass |

    The limit is the larger of margin and noise floor. A row is long if its time has grown by more than MIN_CHANGE_US. It is
    surely slower if its interval lies above 0 and its p-value, corrected over all rows, is at most ALPHA; surely slower by a
    fraction if the interval lies above the fraction.
    """
    limit, tolerated, old_us = max(margin, change.floor), f"tolerated {margin:.1%}", us_of(change.old)
    half_width, most_us = (change.high - change.low) / 2, change.high * old_us
    is_long, is_surely_slower = change.us > MIN_CHANGE_US, change.p <= ALPHA and change.low > 0
    before, after = (us_of(side) * (side.gbps or 0.0) / 1e3 for side in (change.old, change.new))
    if max(before, after) > _MOST_TRAFFIC * min(before, after):
        return "ambiguous", f"{before:.6g} MB before, now {after:.6g}, as time_us times gbps: another unit, or another traffic?"
    if is_long and is_surely_slower and (1 + change.low) / (1 + change.between_processes) > 1 + limit:
        return "regression", f"at least {change.low:.1%} slower, {tolerated}"
    if is_long and change.slowdown > margin:
        return "ambiguous", _why_ambiguous(change, margin)
    if is_long and is_surely_slower and change.high > limit:
        return "ambiguous", f"up to {change.high:+.1%}, {tolerated}: measure more"
    if is_surely_slower and change.low > limit and most_us > MIN_CHANGE_US:
        up_to = f"{change.us:.2f} µs, up to {most_us:.2f}, tolerated {MIN_CHANGE_US}"
        return "ambiguous", f"at least {change.low:.1%} slower, {tolerated}; {up_to}: measure more"
    if half_width > max(_WIDEST, margin) and half_width * old_us > MIN_CHANGE_US:
        return "ambiguous", f"known to ±{half_width:.1%} only: measure more"
    if is_surely_slower and change.slowdown > limit:  # by at most 0.5 µs, else it is ambiguous
        least_judged = f"{MIN_CHANGE_US / old_us:+.1%} of this row"
        return "slower", f"{change.us:.2f} µs: below {MIN_CHANGE_US} µs nothing is judged, {least_judged}"
    if is_long and is_surely_slower and change.low > change.floor:
        return "slower", f"within the {tolerated}"
    return ("faster" if -change.us > MIN_CHANGE_US and change.high < -limit else "pass"), ""


def _why_ambiguous(change: Change, margin: float) -> str:
    """Return the reason why a slowdown above the margin is no regression, and the measurement that would tell."""
    if change.low <= margin:
        is_slower, to = change.low > 0, f"{change.high:.1%} slower"
        extent = f"at least {change.low:.1%} slower" if is_slower else f"{-change.low:.1%} faster to {to}"
        return f"{extent}, tolerated {margin:.1%}: measure more"
    beyond = f"at least {change.low:.1%} slower, tolerated {margin:.1%}"
    if change.low <= change.floor:
        noisy = [name for name, side in (("baseline", change.old), ("new", change.new)) if (side.aa_floor or 0.0) >= change.low]
        records = f"{' and '.join(noisy)} records"
        return f"{beyond}, but within the noise floor of {change.floor:.1%}: measure {records} afresh on an idle GPU"
    if change.p > ALPHA:
        return f"{beyond}, perhaps by chance: measure more"
    least = (1 + max(margin, change.floor)) * (1 + change.between_processes) - 1
    return f"{beyond}, a regression from {least:.1%} on: measure more processes"


def _one_line(*parts: str) -> str:
    return printable(" ".join("; ".join(filter(None, parts)).split()))


def _other_gpu(compared: Sequence[Change]) -> str:
    """Return a note on rows whose two sides were measured on different GPUs of the same model; empty if no row was."""
    moved = [change.new for change in compared if "unit" in differing_run_fields(change.old, change.new)]
    if not moved:
        return ""
    rows = "rows" if len(moved) == len(compared) else f"{len(moved)} of {len(compared)} rows"
    return f"another {moved[0].device}: {rows} may differ by up to about {_BETWEEN_UNITS_PERCENT} %"


def _with_answer(verdict: Verdict, *, is_judged: bool) -> Verdict:
    """Return a verdict with its exit code and reason; is_judged: whether any compared row counts."""
    if not verdict.count("failed") and not verdict.compared:
        rows = tuple(row for row in verdict.rows if row.record.status != "passed")  # the reason below says it of all other rows
        reason = "nothing compared: no row of the baseline is timed in the new records"
        return replace(verdict, rows=rows, exit_code=UNUSABLE, reason=reason)
    failures = [
        (verdict.count("failed"), f"{verdict.count('failed')} failed"),
        (verdict.count("missing"), f"{verdict.count('missing')} missing"),
        (verdict.count("regression"), counted(verdict.count("regression"), "regression")),
        (len(verdict.stale), f"{counted(len(verdict.stale), 'variant')} of other code or configs"),
        (len(verdict.slower), f"{counted(len(verdict.slower), 'variant')} slower as a whole"),
    ]
    if any(count for count, _ in failures):
        return replace(verdict, exit_code=REGRESSION, reason=", ".join(text for count, text in failures if count))
    if not is_judged:
        return replace(verdict, exit_code=UNUSABLE, reason="nothing judged: all compared rows are of peers, which --peers judges")
    ambiguous, slower = verdict.count("ambiguous"), verdict.count("slower")
    if ambiguous:
        return replace(verdict, exit_code=AMBIGUOUS, reason=f"{ambiguous} ambiguous")
    return replace(verdict, reason=f"{slower} slower, tolerated" if slower else "no row is slower")
