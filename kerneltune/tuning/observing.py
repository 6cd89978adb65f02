"""Times of rivals on many cases: what a rule is fitted to and judged by. Needs a GPU; decides nothing."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kerneltune import device
from kerneltune.measuring.compare import obstacle
from kerneltune.plan import Options, Progress
from kerneltune.search.observations import Observation, Observed, merged, path_of, read, write
from kerneltune.search.task import Evaluation, Task, knobs_of
from kerneltune.spec import Config, Op
from kerneltune.sweep import results_root
from kerneltune.tuning.bench import ChildCrashedError
from kerneltune.tuning.candidates import stamp
from kerneltune.tuning.stage import Machines
from kerneltune.tuning.tuner import measure_space

_CASES_AHEAD = 8
"""Whose configs are compiled while a case is timed."""

Asked = tuple[Task, Sequence[Config]]
"""A case with the configs to time on it."""


def observe(asked: Sequence[Asked], options: Options, progress: Progress) -> int:
    """Time every config on its case and keep the times beside the records, case by case, operator by operator.

    options.budget_s: seconds after which no further case is begun, None for no limit.

    Returns:
        The cases that were timed.

    Raises:
        ValueError: a store or file that cannot be read, or a folder that cannot be written.
    """
    began, names = time.monotonic(), list(dict.fromkeys(task.op.name for task, _ in asked))
    ordered = sorted(asked, key=lambda one: names.index(one[0].op.name))
    runs = {(task.op.name, task.variant.name): stamp(task.variant) for task, _ in ordered}
    progress.stage("observe", len(ordered))
    with Machines(options) as machines:
        for number, (task, configs) in enumerate(ordered):
            if options.budget_s is not None and time.monotonic() - began > options.budget_s:
                return number
            rows = _observed(machines, task, configs, ordered[number + 1 : number + 1 + _CASES_AHEAD], progress)
            if rows:
                run = runs[task.op.name, task.variant.name]
                keep(task.op, rows, results_root(options.results), {task.variant.name: run})
    return len(ordered)


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
    machines: Machines, task: Task, configs: Sequence[Config], following: Sequence[Asked], progress: Progress
) -> Sequence[Observation]:
    reason = obstacle(task)
    if reason is not None:
        progress.note(f"not timed: {task.label}: {reason}")
        return []
    tuner = machines.tuner(task)
    tuner.measures_spills = True  # a call runs what spills, too
    machines.look_ahead((machines.tuner(later), config) for later, wanted in following for config in wanted)
    try:
        with machines.deciding():
            trials = measure_space(tuner, configs)
    except ChildCrashedError as error:
        progress.note(f"not timed: {task.label}: {error}")
        return []
    machines.forget_ahead(tuner)
    progress.advance(task.label)
    return [observation(task, config, trial) for config, trial in trials.items()]


def observation(task: Task, config: Config, trial: Evaluation) -> Observation:
    """Return a trial as an observation of the newest run."""
    case, knobs = task.case, tuple(knobs_of(config).items())
    fixed = (0, task.variant.name, case.axes, case.dtype, case.quant, case.options, task.policy)
    return Observation(*fixed, knobs, trial.status, trial.time_us)
