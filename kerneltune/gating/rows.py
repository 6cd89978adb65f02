"""Pool the records of several processes. This module reads no file and judges nothing."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from kerneltune.listing import OpFacts
from kerneltune.records import Record, grouped, timing
from kerneltune.spec import Op, Option

_POOLED = ("device", "unit", "driver", "torch", "triton", "source_hash", "config")
"""Fields that all records of a pool have in common."""


def defaults_of(ops: Mapping[str, Op | OpFacts], name: str) -> Mapping[str, Option]:
    """Return the default of every option of an operator; empty for an unknown operator."""
    return {option: values[0] for option, values in ops[name].options.items()} if name in ops else {}


def pool(rows: Iterable[Record]) -> list[Record]:
    """Pool the records that share a key, in the order of the first record of each pool.

    The pooled time is the geometric mean of the processes' medians. Its interval is resampled by process, then by round. The
    pooled noise floor is the median of the processes' noise floors: noise that only one process met does not hide a slowdown. A
    row that failed or was skipped in any process has that status in the pooled record.

    Raises:
        ValueError: rows of the same key differ in GPU, versions, source or config, or hold no samples.
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
    ceiling_gbps, floor = (_median(getattr(row, name) for row in group) for name in ("ceiling_gbps", "aa_floor"))
    return replace(last, **timing(processes, traffic_bytes, ceiling_gbps, floor))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
