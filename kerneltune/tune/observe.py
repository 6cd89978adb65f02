"""Time configs on many cases, so that rules can be fitted to the times and judged by them. Needs a GPU."""

import time
from collections.abc import Mapping, Sequence

from kerneltune import device
from kerneltune.measuring.compare import obstacle
from kerneltune.run_options import Options, Progress
from kerneltune.search.task import Evaluation, Task
from kerneltune.search.trial_table import add, block_of, table_path
from kerneltune.spec import Config
from kerneltune.sweep import results_root
from kerneltune.tune.candidates import stamp
from kerneltune.tune.gpu_worker import WorkerCrashedError
from kerneltune.tune.session import TuningSession
from kerneltune.tune.tuner import measure_space

_CASES_AHEAD = 8
"""Following cases whose configs are compiled while a case is timed."""

Asked = tuple[Task, Sequence[Config]]
"""A task with the configs to time."""


def observe(asked: Sequence[Asked], options: Options, progress: Progress) -> int:
    """Time configs on their cases and keep the trials beside the records, operator by operator and case by case.

    After `options.budget_s` seconds no further case is begun.

    Returns:
        The number of cases that were timed.
    """
    began, names = time.monotonic(), list(dict.fromkeys(task.op.name for task, _ in asked))
    ordered = sorted(asked, key=lambda one: names.index(one[0].op.name))
    runs = {(task.op.name, task.variant.name): stamp(task.variant) for task, _ in ordered}
    progress.stage("observe", len(ordered))
    with TuningSession(options) as session:
        for number, (task, configs) in enumerate(ordered):
            if options.budget_s is not None and time.monotonic() - began > options.budget_s:
                return number
            trials = _timed(session, task, configs, ordered[number + 1 : number + 1 + _CASES_AHEAD], progress)
            if trials:
                here, run = device.current(), runs[task.op.name, task.variant.name]
                block = block_of(task, trials, device=here.name, **run)
                add(table_path(results_root(options.results), here.slug, task.op.name), block)
    return len(ordered)


def _timed(
    session: TuningSession, task: Task, configs: Sequence[Config], following: Sequence[Asked], progress: Progress
) -> Mapping[Config, Evaluation]:
    reason = obstacle(task)
    if reason is not None:
        progress.note(f"not timed: {task.label}: {reason}")
        return {}
    tuner = session.tuner(task)
    tuner.measures_spills = True  # because a call runs a config that spills, too
    session.look_ahead((later, config) for later, wanted in following for config in wanted)
    try:
        with session.deciding():
            trials = measure_space(tuner, configs)
    except WorkerCrashedError as error:
        progress.note(f"not timed: {task.label}: {error}")
        return {}
    session.close(tuner)
    progress.advance(task.label)
    return trials
