"""Check the variants of one case, time them in rounds interleaved with the ceiling, and make records of the outcomes."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from kerneltune import device
from kerneltune.checking.check import Checker, broken_context
from kerneltune.checking.memory import gpu_free_bytes, why_too_large, within_memory
from kerneltune.errors import first_line
from kerneltune.measuring.rounds import POLICIES, Contender, Policy, interleave, num_input_sets, throttled
from kerneltune.processes.start import tell
from kerneltune.records import Record, timing
from kerneltune.spec import Case, Config, Inputs, Op, Variant
from kerneltune.stats import Samples, median_interval, ratio_interval
from kerneltune.task import CaseError, Outcome, Run, SkippedError, Task, knobs_of, provenance


class Compared(NamedTuple):
    """Hold the result of a comparison by variant: its times (rounds,), or the outcome of a variant without times."""

    samples: dict[str, Samples]
    untimed: dict[str, Outcome]


SELF = "A/A"
CEILING = "ceiling"
_CEILING_OP = "stream"


def ceiling_task(ops: Mapping[str, Op], op: Op, case: Case, policy: str) -> Task | None:
    """Return the streaming operator on as many bytes as a case moves; None where `ops` lacks that operator."""
    if (stream := ops.get(_CEILING_OP)) is None:
        return None
    traffic = op.traffic(case)
    read, write = max(1, traffic.read), max(1, traffic.write)  # the ceiling reads and writes
    moved = Case(f"{read}+{write}", (("read", read), ("write", write)), "int32")
    return Task(stream, moved, stream.variants[0], policy)


def why_not_timed(task: Task) -> str | None:
    """Return why a task cannot be timed: its case does not fit the GPU, or no call would find the L2 cold; None if it can."""
    try:
        _num_input_sets(task)
    except SkippedError as error:
        return str(error)
    return why_too_large(task.op, task.case)


def time_runs(runs: Sequence[Run], ceiling: Run | None, untimed: Mapping[str, Outcome]) -> Compared:
    """Check every variant of a case, and time the correct variants in the same interleaved run.

    The first correct variant is timed twice, the second time as `SELF`. A variant or ceiling that runs out of memory is skipped.
    If the shared inputs do not fit in memory, all variants are skipped. Before the first launch of a variant or of the ceiling,
    `tell` gets its name; before all are timed together, an empty name.

    Args:
        runs: runs of one case; a second run of a variant adds nothing, as the first variant is timed twice in any case.
        ceiling: the streaming operator that moves as many bytes, timed as `CEILING`.
        untimed: outcomes of variants that failed elsewhere and are not launched here.

    Raises:
        RuntimeError: a launch broke the GPU context of this process.
    """
    outcomes = dict(untimed)
    runs_by_name = {run.task.variant.name: run for run in runs if run.task.variant.name not in outcomes}
    try:
        outcomes |= _check_variants(runs[0].task, runs_by_name)
        torch.cuda.empty_cache()
        contenders, failed = _contenders({name: run for name, run in runs_by_name.items() if name not in outcomes})
        outcomes |= failed
        samples = _sample(contenders, ceiling) if contenders else {}
    except CaseError as error:
        samples, outcomes = {}, dict.fromkeys(runs_by_name, error.outcome) | outcomes
    torch.cuda.empty_cache()
    return Compared(samples, outcomes)


def _check_variants(task: Task, runs: Mapping[str, Run]) -> dict[str, Outcome]:
    """Check the variants of a case; return an outcome for each that is not timed: `failed`, or `skipped` if not supported.

    Raises:
        CaseError: no variant of the case can be checked or timed.
    """
    if (reason := why_not_timed(task)) is not None:
        raise SkippedError(reason)
    checker = Checker.make(task.op, task.case, "cuda")
    untimed = dict[str, Outcome]()
    for name, (variant_task, config) in runs.items():
        unsupported = variant_task.variant.unsupported(task.case)
        if unsupported is not None:
            untimed[name] = Outcome("skipped", unsupported)
            continue
        tell(name)
        outcome = checker.check(variant_task.variant, config)
        if outcome.status != "checked":
            untimed[name] = outcome
        if outcome.status == "failed":
            _require_context(outcome.reason)
    return untimed


def _require_context(reason: str) -> None:
    """Raise RuntimeError if the reason is a broken GPU context, in which all later launches fail."""
    if broken_context():
        raise RuntimeError(reason)


def _contenders(runs: Mapping[str, Run]) -> tuple[dict[str, Contender], dict[str, Outcome]]:
    """Capture variants of one case, the first variant twice; return the outcomes of variants that cannot be captured, too."""
    contenders, failed = dict[str, Contender](), dict[str, Outcome]()
    inputs = input_sets(next(iter(runs.values())).task) if runs else []
    for name, (task, config) in runs.items():
        tell(name)
        labels, capture = (name,) if contenders else (name, SELF), partial(contender, task.variant, config, inputs)
        try:
            contenders |= within_memory(partial(dict, ((label, capture(POLICIES[task.policy])) for label in labels)))
        except SkippedError as error:
            failed[name] = error.outcome
        except Exception as error:  # an error of another package under capture is a result
            failed[name] = Outcome("failed", f"cannot be timed: {first_line(error)}")
            _require_context(failed[name].reason)
    return contenders, failed


def _sample(contenders: dict[str, Contender], ceiling: Run | None) -> dict[str, Samples]:
    """Time the contenders, and in the same rounds the ceiling, if its inputs fit in memory."""
    if ceiling is not None:
        tell(CEILING)
        task, config = ceiling
        with suppress(SkippedError):
            contenders[CEILING] = within_memory(lambda: contender(task.variant, config, input_sets(task), POLICIES[task.policy]))
    tell("")
    return within_memory(partial(time_contenders, contenders))


def time_contenders(contenders: Mapping[str, Contender]) -> dict[str, Samples]:
    """Sample the contenders in interleaved rounds, whose random order differs between processes."""
    return interleave(contenders, throttled=throttled, seed=os.getpid())


def input_sets(task: Task) -> list[Inputs]:
    """Make so many input sets that every call finds the L2 cold or hot, as the policy says.

    Raises:
        SkippedError: the memory is too small for the sets, or no call would find the L2 cold.
    """
    count = _num_input_sets(task)
    return within_memory(lambda: [task.op.inputs(task.case, device="cuda", seed=i) for i in range(count)])


def _num_input_sets(task: Task) -> int:
    bytes_of_set = task.op.traffic(task.case).total
    return num_input_sets(POLICIES[task.policy], bytes_of_set, device.current().l2_bytes, gpu_free_bytes())


def contender(variant: Variant, config: Config, inputs: Sequence[Inputs], policy: Policy, **options: Any) -> Contender:
    """Make a variant that walks over input sets; `options` as in Contender."""
    return Contender(lambda i: variant.run(inputs[i], config), len(inputs), policy, **options)


def compared_records(family: str, runs: Sequence[Run], ceiling: Run | None, compared: Compared) -> list[Record]:
    """Make a record for each run of a case.

    The noise floor of all rows of the case is the interval of the first correct variant's ratio to itself. A variant
    with two runs, as in `compare X X`, gets a record of its first time and a record of its second time.
    """
    samples, untimed = compared
    floor, records, seen = noise_floor(samples), [], set[str]()
    ceiling_gbps = None
    if ceiling is not None and CEILING in samples:
        ceiling_gbps = ceiling.task.op.traffic(ceiling.task.case).total / median_interval(samples[CEILING]).median / 1e3
    for run in runs:
        name = run.task.variant.name
        if name in untimed:
            records.append(make_record(family, run, untimed[name]))
        else:
            taken = samples[SELF if name in seen else name]
            times = timing([taken.tolist()], run.task.op.traffic(run.task.case).total, ceiling_gbps, floor)
            records.append(make_record(family, run, Outcome("passed"), **times))
        seen.add(name)
    return records


def noise_floor(samples: dict[str, Samples]) -> float | None:
    """Return how far from 1 the interval of a variant against itself reaches."""
    if SELF not in samples:
        return None
    interval = ratio_interval(next(iter(samples.values())), samples[SELF])
    return max(abs(interval.low - 1), abs(interval.high - 1))


def make_record(family: str, run: Run, outcome: Outcome, **times: Any) -> Record:
    """Make a record of this device and source; `times` are the fields of `records.timing`, of a run that passed."""
    assert outcome.status != "noted"
    here, (task, config) = device.current(), run
    return Record(
        status=outcome.status,
        config=knobs_of(config) or None,
        device=here.name,
        unit=here.unit,
        reason=outcome.reason,
        family=family,
        role=task.variant.role,
        flops=task.op.flops(task.case) if task.op.flops is not None else None,
        op=task.op.name,
        **task.key.fields,
        **provenance(task.variant),
        **times,
    )
