"""Make records of the samples of a case, and of checks."""

from collections.abc import Sequence
from typing import Any, cast

from kerneltune import device
from kerneltune.measuring.check import Outcome
from kerneltune.measuring.compare import CEILING, SELF, Compared
from kerneltune.records import Record, Status, timing
from kerneltune.search.task import Run, Task, config_values, stamp
from kerneltune.spec import Config
from kerneltune.stats import Samples, median_interval, ratio_interval


def compared_records(family: str, runs: Sequence[Run], ceiling: Run | None, compared: Compared) -> list[Record]:
    """Make a record for each run of a case.

    The noise floor of all rows of the case is the interval of the first correct variant's ratio to itself. If a variant has two
    records, the second record holds its second time.
    """
    samples, untimed = compared
    floor, records, seen = noise_floor(samples), [], set[str]()
    ceiling_gbps = None
    if ceiling is not None and CEILING in samples:
        ceiling_gbps = ceiling.task.op.traffic(ceiling.task.case).total / median_interval(samples[CEILING]).median / 1e3
    for run in runs:
        task, config = run
        name = task.variant.name
        if name in untimed:
            records.append(checked_record(family, run, untimed[name]))
        else:
            taken = samples[SELF if name in seen else name]
            times = timing([taken.tolist()], task.op.traffic(task.case).total, ceiling_gbps, floor)
            records.append(make_record(family, task, config, "passed", "", **times))
        seen.add(name)
    return records


def noise_floor(samples: dict[str, Samples]) -> float | None:
    """Return how far from 1 the interval of a variant against itself reaches."""
    if SELF not in samples:
        return None
    first = next(iter(samples.values()))
    interval = ratio_interval(first, samples[SELF])
    return max(abs(interval.low - 1), abs(interval.high - 1))


def checked_record(family: str, run: Run, outcome: Outcome) -> Record:
    """Make a record without times."""
    return make_record(family, *run, outcome.status, outcome.reason)


def make_record(family: str, task: Task, config: Config, status: str, reason: str, **times: Any) -> Record:
    """Make a record of this device and source; `times` are the fields of `records.timing`."""
    here = device.current()
    return Record(
        status=cast(Status, status),
        config=config_values(config),
        device=here.name,
        unit=here.unit,
        reason=reason,
        family=family,
        role=task.variant.role,
        flops=task.op.flops(task.case) if task.op.flops is not None else None,
        op=task.op.name,
        **task.key.fields,
        **stamp(task.variant),
        **times,
    )
