"""Pool the records of several processes, compare the two records of a row, and the rows of a variant as a whole."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from msgspec.structs import replace

from kerneltune.listing import OpSummary
from kerneltune.records import Record, differing_run_fields, grouped, timing
from kerneltune.spec import Op, Option
from kerneltune.stats import Shift

_POOLED = ("device", "unit", "driver", "torch", "triton", "source_hash", "config")
"""Fields that all records of a pool have in common."""
_GROUP_MARGIN, _GROUP_ROWS = 0.01, 5
"""A group of at least _GROUP_ROWS rows fails if its mean slowdown is surely above _GROUP_MARGIN."""
_FALSE_ALARM = 0.01
"""Probability that any group of a run is taken to be slower by chance; each of n groups has an n-th part of it."""


def defaults_of(ops: Mapping[str, Op | OpSummary], name: str) -> Mapping[str, Option]:
    """Return the default of every option of an operator; empty for an unknown operator."""
    return {option: values[0] for option, values in ops[name].options.items()} if name in ops else {}


def pool(rows: Iterable[Record]) -> list[Record]:
    """Pool the records that share a key, in the order of the first record of each pool.

    The pooled time is the geometric mean of the processes' medians. Its interval is resampled by process, then by round. The
    pooled noise floor is the median of the processes' noise floors: noise that only one process met does not hide a slowdown. A
    row that failed or was skipped in any process has that status in the pooled record.
    """
    return [_pooled(group) for group in grouped(rows, lambda row: row.key).values()]


def _pooled(group: Sequence[Record]) -> Record:
    last = group[-1]
    for status in ("failed", "skipped", "checked"):
        untimed = [row for row in group if row.status == status]
        if untimed:
            return untimed[-1]
    for name in _POOLED:
        if any(getattr(row, name) != getattr(last, name) for row in group):
            raise ValueError(f"{name}: {getattr(last, name)!r}: differs between the processes of {last.label} {last.variant}")
    if len(group) == 1:
        return last
    processes = [rounds for row in group for rounds in row.samples_us or ()]
    if not processes:
        raise ValueError(f"samples_us: None: expected the samples of {last.label} {last.variant}")
    traffic_bytes = (last.gbps or 0.0) * (last.time_us or 0.0) * 1e3
    ceiling_gbps, floor = _median(row.ceiling_gbps for row in group), _median(row.aa_floor for row in group)
    return replace(last, **timing(processes, traffic_bytes, ceiling_gbps, floor))


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


@dataclass(frozen=True, slots=True)
class Change:
    """Hold the two records of a row and their difference.

    Attributes:
        log: log(new time / old time); a time that is a tiny part of the other has a log, but no slowdown above -1.
        low, high: 95 % interval of the slowdown.
        p: p-value of the hypothesis that the new side is not slower.
        basis: words for the processes that the interval comes from, such as `5 and 3 processes`; empty for one process a side.
        between_processes: fraction by which unchanged code may differ between two processes, where the interval lacks it.
    """

    old: Record
    new: Record
    log: float
    low: float
    high: float
    p: float
    basis: str
    between_processes: float = 0.0

    @property
    def slowdown(self) -> float:
        """Return new time / old time - 1."""
        return math.expm1(self.log)

    @property
    def us(self) -> float:
        """Return the new time minus the old time, in µs."""
        return us_of(self.new) - us_of(self.old)

    @property
    def floor(self) -> float:
        """Return the larger noise floor of the two records, a fraction."""
        return max(self.old.aa_floor or 0.0, self.new.aa_floor or 0.0)


def is_peer(*records: Record | None) -> bool:
    """Return whether the records of a row are of a peer; if the two differ in the role, the row is not a peer's."""
    return {record.role for record in records if record is not None and record.role} == {"peer"}


def us_of(record: Record) -> float:
    """Return the time of a timed record in µs."""
    assert record.time_us is not None
    return record.time_us


def setup_of(record: Record) -> tuple[str, str]:
    """Return the device and the policy that a record was measured with."""
    return record.device, record.policy


def slower_groups(changes: Sequence[Change]) -> tuple[list[str], list[str]]:
    """Return lines, a line for each group of rows that is surely slower: groups that fail, and groups measured on two GPUs."""
    slower: list[str] = []
    doubtful: list[str] = []
    groups = _groups(changes)
    for (name, device, policy), rows in groups.items():
        shift = _group_shift(rows)
        least = shift.least(_FALSE_ALARM / len(groups))
        if least > _GROUP_MARGIN:
            has_two_units = any("unit" in differing_run_fields(change.old, change.new) for change in rows)
            basis = "" if all(change.basis for change in rows) else "; one process a side"
            line = (
                f"{name} on {device}, {policy}: slower by {shift.slowdown:.1%} in the geometric mean of {len(rows)} rows "
                f"(at least {least:+.1%}), tolerated {_GROUP_MARGIN:.0%}{basis}"
            )
            (doubtful if has_two_units else slower).append(line)
    return slower, doubtful


def _groups(changes: Sequence[Change]) -> dict[tuple[str, str, str], list[Change]]:
    """Return the rows of each variant of an operator; variants with few rows are a group of their family."""
    variants = grouped(changes, lambda change: (f"{change.new.op} {change.new.variant}", *setup_of(change.new)))
    few = [change for rows in variants.values() if len(rows) < _GROUP_ROWS for change in rows]
    families = grouped(few, lambda change: (change.new.family or change.new.op, *setup_of(change.new)))
    return {name: rows for name, rows in (variants | families).items() if len(rows) >= _GROUP_ROWS}


def _group_shift(rows: Sequence[Change]) -> Shift:
    """Return the geometric mean of the rows' slowdowns.

    Its error has two parts: the spread of the process means, and the spread over rows of the slowdowns or of their intervals,
    whichever is larger.
    """
    logs = np.array([change.log for change in rows])
    bounds = np.array([(change.low, change.high) for change in rows])  # (rows, 2)
    row_errors = np.diff(np.log1p(np.maximum(bounds, -0.9)))[:, 0] / 4
    spread = max(float(logs.std(ddof=1)), float(np.sqrt(np.square(row_errors).mean())))
    errors, freedom = [spread / math.sqrt(len(rows))], len(rows) - 1
    for side in ("old", "new"):
        samples = [getattr(change, side).samples_us or () for change in rows]
        count = min(map(len, samples))
        if count > 1 and count == max(map(len, samples)):
            medians = np.log([[np.median(rounds) for rounds in processes] for processes in samples])  # (rows, processes)
            means = medians.mean(axis=0)
            errors.append(float(np.std(means, ddof=1)) / math.sqrt(count))
            freedom = min(freedom, 2 * (count - 1))
    return Shift(float(logs.mean()), math.hypot(*errors), freedom)
