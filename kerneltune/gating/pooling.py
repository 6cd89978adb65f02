"""Pool the records that several processes made of the same rows: the result has a single record per row.

This module does not measure or judge.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from kerneltune.records import Record, grouped, rounded
from kerneltune.stats import centre_interval, deciles

_SAME = ("device", "unit", "driver", "torch", "triton", "source_hash", "config")


def pool(rows: Iterable[Record]) -> list[Record]:
    """Pool the records that share key and variant, in the order of the first record of each pool.

    The pooled time is the geometric mean of the processes' medians. Its interval is resampled by process, then by round. The
    pooled noise floor is the largest noise floor of the processes. A row that failed or was skipped in any process has that
    status in the pooled record.

    Raises:
        ValueError: rows of the same key differ in GPU, versions, source or config, or hold no samples.
    """
    return [_pooled(group) for group in grouped(rows, lambda row: (row.key, row.variant)).values()]


def _pooled(group: Sequence[Record]) -> Record:
    last = group[-1]
    for status in ("failed", "skipped", "checked"):
        untimed = [row for row in group if row.status == status]
        if untimed:
            return untimed[-1]
    for name in _SAME:
        if any(getattr(row, name) != getattr(last, name) for row in group):
            raise ValueError(f"{name}: {getattr(last, name)!r}: differs between the processes of {last.label} {last.variant}")
    if len(group) == 1:
        return last
    processes = [rounds for row in group for rounds in row.samples_us or ()]
    if not processes:
        raise ValueError(f"samples_us: None: expected the samples of {last.label} {last.variant}")
    return replace(last, **_timing(group, processes))


def _timing(group: Sequence[Record], processes: Sequence[Sequence[float]]) -> dict[str, Any]:
    last = group[-1]
    interval = centre_interval([np.asarray(rounds) for rounds in processes])
    p10, p90 = deciles(np.concatenate(processes))
    gbps = rounded((last.gbps or 0.0) * (last.time_us or 0.0) / interval.median)
    ceilings = [row.ceiling_gbps for row in group if row.ceiling_gbps]
    ceiling = float(np.median(ceilings)) if ceilings else None
    return {
        "time_us": rounded(interval.median),
        "gbps": gbps,
        "ceiling_gbps": ceiling,
        "pct_ceiling": rounded(100 * gbps / ceiling) if ceiling else None,
        "ci_low_us": rounded(interval.low),
        "ci_high_us": rounded(interval.high),
        "n": sum(map(len, processes)),
        "aa_floor": max((row.aa_floor for row in group if row.aa_floor is not None), default=None),
        "p10_us": rounded(p10),
        "p90_us": rounded(p90),
        "samples_us": processes,
    }
