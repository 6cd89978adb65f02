"""Compare the two records of a row, and the rows of a family as a whole. This module does not measure or read files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kerneltune.records import Record, grouped, other_run
from kerneltune.stats import Shift, shifts

_FAMILY_MARGIN, _FAMILY_ROWS = 0.01, 5
"""A family with at least _FAMILY_ROWS rows fails if the lower bound of its mean slowdown is above _FAMILY_MARGIN."""


@dataclass(frozen=True, slots=True)
class Change:
    """Hold the two records of a row and their difference."""

    old: Record
    new: Record
    slowdown: float
    low: float
    high: float
    p: float
    basis: str

    @property
    def is_peer(self) -> bool:
        """Return whether another package implements the variant, as either record says."""
        return "peer" in (self.old.role, self.new.role)

    @property
    def change_us(self) -> float:
        """Return the new time minus the old time, in µs."""
        return us_of(self.new) - us_of(self.old)

    @property
    def floor(self) -> float:
        """Return the larger noise floor of the two records, a fraction."""
        return max(self.old.aa_floor or 0.0, self.new.aa_floor or 0.0)


def us_of(record: Record) -> float:
    """Return the time of a timed record in µs."""
    assert record.time_us is not None
    return record.time_us


def device_policy(record: Record) -> tuple[str, str]:
    """Return the device and the policy that a record was measured with."""
    return record.device, record.policy


def slower_families(found: Sequence[Change]) -> tuple[list[str], list[str]]:
    """Return a line for each family that is surely slower: first families that fail, then families measured on two GPUs."""
    slower: list[str] = []
    doubtful: list[str] = []
    for (family, device, policy), rows in grouped(
        found, lambda met: (met.new.family or met.new.op, met.new.device, met.new.policy)
    ).items():
        if len(rows) < _FAMILY_ROWS:
            continue
        shift = _family_shift(rows)
        low, high = shift.bounds
        if low > _FAMILY_MARGIN:
            of_two = any("unit" in other_run(met.old, met.new) for met in rows)
            basis = "" if any(met.basis for met in rows) else "; one process a side"
            line = (
                f"{family} on {device}, {policy}: slower by {shift.slowdown:.1%} in the geometric mean of {len(rows)} rows "
                f"({low:+.1%} to {high:+.1%}), tolerated {_FAMILY_MARGIN:.0%}{basis}"
            )
            (doubtful if of_two else slower).append(line)
    return slower, doubtful


def _family_shift(rows: Sequence[Change]) -> Shift:
    """Return the geometric mean of the rows' slowdowns.

    Its error adds the larger of two spreads over rows (of the slowdowns, of their intervals) and the spread of process means.
    """
    logs = np.array([math.log1p(met.slowdown) for met in rows])
    of_rows = np.array([(math.log1p(met.high) - math.log1p(max(met.low, -0.9))) / 4 for met in rows])
    spread = max(float(logs.std(ddof=1)), float(np.sqrt(np.square(of_rows).mean())))
    errors, freedom = [spread / math.sqrt(len(rows))], len(rows) - 1
    for side in ("old", "new"):
        samples = [getattr(met, side).samples_us or () for met in rows]
        count = min(map(len, samples))
        if count > 1 and count == max(map(len, samples)):
            means = [np.mean([np.log(np.median(processes[at])) for processes in samples]) for at in range(count)]
            errors.append(float(np.std(means, ddof=1)) / math.sqrt(count))
            freedom = min(freedom, 2 * (count - 1))
    return Shift(float(logs.mean()), math.hypot(*errors), freedom)


def shifts_by_process(pairs: Sequence[tuple[Record, Record | None]]) -> list[Shift | None]:
    """Return the shift by process of every pair; None if the two sides have one process each, or a side has no samples."""
    sampled = [
        (at, old.samples_us, new.samples_us)
        for at, (old, new) in enumerate(pairs)
        if new is not None and old.samples_us and new.samples_us and len(old.samples_us) + len(new.samples_us) > 2
    ]
    found: list[Shift | None] = [None] * len(pairs)
    for (at, _old, _new), by_process in zip(sampled, shifts([sides for _at, *sides in sampled]), strict=True):
        found[at] = by_process
    return found
