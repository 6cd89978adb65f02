"""Times of rivals on many cases: what a rule is fitted to and judged by. Needs a GPU; decides nothing."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerneltune import device
from kerneltune.measuring.compare import obstacle
from kerneltune.plan import Options, Progress
from kerneltune.search.observations import Observation, Observed, merged, path_of, read, write
from kerneltune.search.trials import Evaluation, knobs_of
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.sweep import results_root
from kerneltune.tuning.cached import stamp
from kerneltune.tuning.isolated import ChildCrashedError
from kerneltune.tuning.machines import Machines
from kerneltune.tuning.one_case import measure_space
from kerneltune.tuning.task import TuningTask
from kerneltune.tuning.transfer import Donor
from kerneltune.tuning.tuner import Tuner

_CASES_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """A case with the configs to time on it."""

    work: TuningTask
    configs: tuple[Config, ...]


def targets(op: Op, variant: Variant, donors: Sequence[Donor], bench: Iterable[Case]) -> list[Case]:
    """Return the recorded cases and the supported bench cases as calls describe them, each once, recorded sizes first.

    Of several types of the same sizes bf16 stays, or else the first.
    """
    cases = [op.called(case) for case in (*(case for case, _ in donors), *bench) if variant.unsupported(case) is None]
    chosen: dict[object, Case] = {}
    for case in sorted(dict.fromkeys(cases), key=lambda case: case.dtype != "bfloat16"):
        chosen.setdefault((case.axes, case.quant, case.options), case)
    return [case for case in dict.fromkeys(cases) if case in chosen.values()]


def observe(asked: Sequence[Asked], options: Options, progress: Progress) -> int:
    """Time every config on its case and keep the times beside the records, case by case.

    options.budget_s: seconds after which no further case is begun, None for no limit.

    Returns:
        The cases that were timed.

    Raises:
        ValueError: a store or file that cannot be read, or a folder that cannot be written.
    """
    began, done = time.monotonic(), 0
    progress.stage("observe", len(asked))
    with Machines(options) as machines:
        for name in dict.fromkeys(one.work.op.name for one in asked):
            of_op = [one for one in asked if one.work.op.name == name]
            runs = {one.work.variant.name: stamp(one.work.variant) for one in of_op}
            for number, one in enumerate(of_op):
                if options.budget_s is not None and time.monotonic() - began > options.budget_s:
                    break
                rows = _observed(machines, one, of_op[number + 1 : number + 1 + _CASES_AHEAD], options, progress)
                if rows:
                    keep(one.work.op, rows, results_root(options.results), runs)
                done += 1
    return done


def keep(op: Op, rows: Sequence[Observation], results: Path, runs: Mapping[str, Mapping[str, Any]]) -> Path:
    """Add observations of this GPU to the operator's file, and return it.

    runs: of each variant, when and with what it is measured.

    Raises:
        ValueError: the file cannot be read or written.
    """
    path = path_of(op.name, device.current().slug, results)
    variants = list(dict.fromkeys(row.variant for row in rows))
    new = tuple(replace(row, run=variants.index(row.variant)) for row in rows)
    write(path, op, merged(read(path, op), Observed(tuple(dict(runs[name]) for name in variants), new)))
    return path


def _observed(
    machines: Machines, one: Asked, following: Sequence[Asked], options: Options, progress: Progress
) -> Sequence[Observation]:
    work = one.work
    try:
        reason = obstacle(work.op, work.case, options.policy)
        if reason is not None:
            progress.note(f"not timed: {work.label}: {reason}")
            return []
        tuner = machines.tuner(work.op, work.case, work.variant)
        tuner.measures_spills = True  # a call runs what spills, too
        machines.look_ahead_at(_ahead(machines, following))
        with machines.deciding():
            trials = measure_space(tuner, machines.compiling(tuner), some=one.configs)
        machines.forget_ahead(tuner)
    except ChildCrashedError as error:
        progress.note(f"not timed: {work.label}: {error}")
        return []
    progress.advance(work.label)
    return [observation(work.case, work.variant, options.policy, config, trial) for config, trial in trials.items()]


def _ahead(machines: Machines, following: Sequence[Asked]) -> Iterator[tuple[Tuner, Config]]:
    for one in following:
        tuner = machines.tuner(one.work.op, one.work.case, one.work.variant)
        yield from ((tuner, config) for config in one.configs)


def observation(case: Case, variant: Variant, policy: str, config: Config, trial: Evaluation) -> Observation:
    """Return a trial as an observation of the newest run."""
    knobs = tuple(knobs_of(config).items())
    fixed = (0, variant.name, case.axes, case.dtype, case.quant, case.options, policy)
    return Observation(*fixed, knobs, trial.status, trial.time_us)
