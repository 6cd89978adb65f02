"""The regression gate: compares two sets of records by their intervals and says pass, regression or ambiguous.

Does not measure, re-run or read files. Imports the standard library, device and records.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kerneltune.device import INTERPRETER
from kerneltune.records import Key, Record, newest

PASS, REGRESSION, UNUSABLE, AMBIGUOUS = 0, 1, 2, 3
MIN_CHANGE_US = 0.5

Outcome = Literal["pass", "regression", "ambiguous", "missing", "failed", "faster"]
_WORST_FIRST: tuple[Outcome, ...] = ("failed", "missing", "regression", "ambiguous", "faster", "pass")


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRow:
    """One variant on one case, baseline against new.

    Attributes:
        label: the key in one line.
        slowdown: new time over old time minus 1, with its conservative bounds; None where nothing was compared.
        reason: why the verdict is not `pass`; empty otherwise.
    """

    key: Key
    label: str
    variant: str
    case: str
    verdict: Outcome
    slowdown: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's answer: exit code 0 pass, 1 regression, 2 nothing to compare or not comparable, 3 ambiguous."""

    rows: tuple[GateRow, ...]
    exit_code: int
    reason: str

    def count(self, verdict: Outcome) -> int:
        """How many rows got this verdict."""
        return sum(row.verdict == verdict for row in self.rows)


def gate(baseline: list[Record], new: list[Record], margin: float) -> Verdict:
    """Compare the newest record of every row; `margin` is the slowdown tolerated, a fraction.

    Raises:
        ValueError: a margin below 0 or not finite.
    """
    if not math.isfinite(margin) or margin < 0:
        raise ValueError(f"margin: {margin!r}: expected a finite fraction of 0 or more")
    baseline, new = newest(baseline), newest(new)
    obstacle = _obstacle(baseline, new)
    if obstacle:
        return Verdict((), UNUSABLE, obstacle)
    fresh = {(record.key, record.variant): record for record in new}
    rows = [_compare(old, fresh.pop((old.key, old.variant), None), margin) for old in baseline if old.status == "passed"]
    rows += [_row(record, "failed", reason=record.reason) for record in fresh.values() if record.status == "failed"]
    return _verdict(tuple(rows))


def gate_text(verdict: Verdict) -> str:
    """One line per row that did not simply pass, worst first, then the summary."""
    lines = [
        f"{row.verdict:<10}  {row.label}  {row.variant}  {_change(row)}".rstrip() + (f"  ({row.reason})" if row.reason else "")
        for row in _notable(verdict)
    ]
    return "\n".join([*lines, _summary(verdict)]) + "\n"


def gate_markdown(verdict: Verdict) -> str:
    """The same as a Markdown table under its summary."""
    lines = [f"**{_summary(verdict)}**", ""]
    if _notable(verdict):
        lines += ["| verdict | row | case | variant | slowdown | reason |", "|---|---|---|---|---:|---|"]
    for row in _notable(verdict):
        lines.append(f"| {row.verdict} | {row.label} | {row.case} | {row.variant} | {_change(row)} | {_cell(row.reason)} |")
    return "\n".join(lines).rstrip() + "\n"


def _obstacle(baseline: list[Record], new: list[Record]) -> str:
    """Why the two sets cannot be compared at all; empty where they can."""
    for name, records in (("baseline", baseline), ("new", new)):
        if not records:
            return f"nothing compared: {name} has no records"
        if any(record.device == INTERPRETER for record in records):
            return f"{name} holds records of the interpreter, whose times mean nothing"
    aspects: dict[str, Callable[[Record], str]] = {"device": lambda r: r.device, "policy": lambda r: r.policy}
    for name, aspect in aspects.items():
        old, fresh = sorted({aspect(record) for record in baseline}), sorted({aspect(record) for record in new})
        if old != fresh:
            return f"not comparable: baseline has {name} {', '.join(old)}, new has {', '.join(fresh)}"
    return ""


def _compare(old: Record, new: Record | None, margin: float) -> GateRow:
    if new is None:
        return _row(old, "missing", reason="not in the new records")
    if new.status == "failed":
        return _row(old, "failed", reason=new.reason)
    if new.status != "passed":
        return _row(old, "missing", reason=f"{new.status} in the new records: {new.reason or 'not timed'}")
    old_us, old_low, old_high = _times(old)
    new_us, new_low, new_high = _times(new)
    slowdown, low, high = new_us / old_us - 1, new_low / old_high - 1, new_high / old_low - 1
    threshold = max(margin, old.aa_floor or 0.0, new.aa_floor or 0.0)
    verdict: Outcome = "pass"
    reason = ""
    if new_us - old_us > MIN_CHANGE_US and low > threshold:
        verdict, reason = "regression", f"at least {low:+.1%}, tolerated {threshold:.1%}"
    elif new_us - old_us > MIN_CHANGE_US and slowdown > threshold:
        verdict, reason = "ambiguous", f"at least {low:+.1%}, tolerated {threshold:.1%}: measure more"
    elif old_us - new_us > MIN_CHANGE_US and high < -threshold:
        verdict = "faster"
    return _row(old, verdict, slowdown, low, high, reason)


def _row(
    record: Record,
    verdict: Outcome,
    slowdown: float | None = None,
    low: float | None = None,
    high: float | None = None,
    reason: str = "",
) -> GateRow:
    return GateRow(
        key=record.key,
        label=record.label,
        variant=record.variant,
        case=record.case,
        verdict=verdict,
        slowdown=slowdown,
        low=low,
        high=high,
        reason=" ".join(reason.split()),
    )


def _times(record: Record) -> tuple[float, float, float]:
    assert record.time_us is not None and record.ci_low_us is not None and record.ci_high_us is not None
    return record.time_us, record.ci_low_us, record.ci_high_us


def _verdict(rows: tuple[GateRow, ...]) -> Verdict:
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in _WORST_FIRST}
    if not counts["failed"] and all(row.slowdown is None for row in rows):
        return Verdict(rows, UNUSABLE, "nothing compared: no row of the baseline is timed in the new records")
    for verdicts, code in ((("failed", "missing", "regression"), REGRESSION), (("ambiguous",), AMBIGUOUS)):
        found = [f"{counts[verdict]} {verdict}" for verdict in _WORST_FIRST if verdict in verdicts and counts[verdict]]
        if found:
            return Verdict(rows, code, ", ".join(found))
    return Verdict(rows, PASS, "no row is slower")


def _notable(verdict: Verdict) -> list[GateRow]:
    return sorted((row for row in verdict.rows if row.verdict != "pass"), key=lambda row: _WORST_FIRST.index(row.verdict))


def _summary(verdict: Verdict) -> str:
    compared = sum(row.slowdown is not None for row in verdict.rows)
    answer = {PASS: "pass", REGRESSION: "regression", UNUSABLE: "not usable", AMBIGUOUS: "ambiguous"}[verdict.exit_code]
    rows = "row" if compared == 1 else "rows"
    return f"gate: {answer}: {verdict.reason} ({compared} {rows} compared, {verdict.count('faster')} faster)"


def _change(row: GateRow) -> str:
    if row.slowdown is None or row.low is None or row.high is None:
        return ""
    return f"{row.slowdown:+.1%} [{row.low:+.1%}, {row.high:+.1%}]"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
