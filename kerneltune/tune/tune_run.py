"""Tune a sweep on the GPU of this process: list the tasks to search, and search each task.

A task, a variant on a case, is the unit of work on every GPU: its config is searched, or its whole space is measured.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kerneltune import cache, device
from kerneltune.measuring.check import release_memory
from kerneltune.measuring.compare import ceiling_task, obstacle
from kerneltune.run_options import Options, Plan, Progress
from kerneltune.search.loop import times_of
from kerneltune.search.task import Evaluation, Task, TaskKey
from kerneltune.spec import Config
from kerneltune.tune.candidates import cached, changed, checked_space, is_supported, widened
from kerneltune.tune.gpu_worker import WorkerCrashedError
from kerneltune.tune.session import TuningSession
from kerneltune.tune.tuner import NothingPassedError, Tuner, first_runs, measure_space, tune
from kerneltune.wording import pairs

_FROM = {"own": "its own config", "near": "of a near case", "default": "the default"}
_SEARCH_S, _COMPILE_S, _TRIAL_S = 1.6, 1.5, 0.06
"""Seconds of a search that ends at an expected gain of 1 %; of a core to compile a config; of the GPU to check and time a config.

H200, 16 cores: 390 searches of rmsnorm took 545 s, 100 of int4_fp8_gemm 180 s; 278 configs of a capture took 44 s.
"""
_KEPT = {
    "stale": "are stale, chosen with other code: kept (`sweep --stale` times them beside their default)",
    "outdated": "are outdated, chosen with another driver, torch or triton: kept (`tune --stale` searches again)",
}
"""State of cached configs that `tune` keeps -> the rest of its note."""
_CASES_AHEAD = 6
"""Cases whose first configs are compiled ahead. Half of these cases are ceiling cases, which compile at once."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Hold the result of a task.

    Attributes:
        entry: entry that is now in the config cache; None where a space was measured, or no config passed.
        best: best config, or best time of a measured space, in a few words.
        skipped: reason why this GPU cannot run the task, or empty.
        problem: reason for a missing config on a GPU that can run the task; empty where all is well.
    """

    entry: cache.CacheEntry | None = None
    best: str = ""
    skipped: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TuningSummary:
    """Hold the result of a run.

    Attributes:
        device_slug: folder name of the GPU model.
        entries: entries that are now in the config cache.
        searched: number of tasks that were searched, or whose spaces were measured.
        failed: number of searched tasks that ended with a problem.
        kept: number of tasks whose cached config was kept.
    """

    device_slug: str
    entries: list[cache.CacheEntry]
    searched: int = 0
    failed: int = 0
    kept: int = 0


Performed = tuple[Task, TuningResult]
"""A task that was performed, with its result."""


def missing(plan: Plan, progress: Progress) -> tuple[list[Task], int]:
    """Return the tasks of a plan to search on this GPU model, and how many tasks keep their config.

    A task is searched if the cache lacks its config, or with `stale` if the config is stale or outdated. All spaces and config
    files are checked before anything is measured or written.
    """
    options, tasks, here = plan.options, _tasks(plan), device.current().slug
    files = {cache.path_of(task.op.name, here, options.configs) for task in tasks}
    for path in sorted(files if not options.exhaustive else ()):
        if path.exists():
            cache.load_strict(path)
    chosen = tasks
    if not options.force and not options.exhaustive:
        states = [_state(task, options) for task in tasks]
        num_cached = len(tasks) - states.count("lacking")
        for state, text in _KEPT.items() if not options.stale else ():
            if count := states.count(state):
                progress.note(f"{count} of {num_cached} cached configs {text}")
        searched = ("lacking", "stale", "outdated") if options.stale else ("lacking",)
        chosen = [task for task, state in zip(tasks, states, strict=True) if state in searched]
    for task in chosen:
        checked_space(_widened(task, options))
    return chosen, len(tasks) - len(chosen)


def _tasks(plan: Plan) -> list[Task]:
    """Return for every case its ceiling task, then its variants on the case as calls look it up; bf16 before other types.

    If whole spaces are measured, there are no ceiling tasks, and every case stays as it is in the sweep.
    """
    whole, tasks = plan.options.exhaustive, dict[TaskKey, Task]()
    for entry in sorted(plan.cases(), key=lambda e: e.case.dtype != "bfloat16"):
        op = plan.ops[entry.op]
        case = entry.case if whole else op.called(entry.case)
        wanted = [task for task in plan.tasks(entry.op, case) if task.variant.config is not None and is_supported(task)]
        ceiling = None if whole else ceiling_task(plan.ops, op, case, plan.policy(entry.op))
        tasks |= {task.key: task for task in (*wanted, *([ceiling] if ceiling is not None else []))}
    return list(tasks.values())


def _state(task: Task, options: Options) -> str:
    """Return the state of a task's config in the cache: `lacking`, `stale`, `outdated` or `fresh`.

    A stale config was chosen with other code. An outdated config was chosen with the present code and another driver, torch or
    triton.
    """
    own = cached(task, options.configs)
    if own is None:
        return "lacking"
    if changed(task.variant, own[0], here=False):
        return "stale"
    return "outdated" if changed(task.variant, own[0], here=True) else "fresh"


def expected_work(task: Task, options: Options) -> tuple[int, float]:
    """Return the number of configs that a search of a task may try, and estimate its seconds."""
    search, configs = options.search, len(checked_space(_widened(task, options)))
    if options.exhaustive:
        return configs, seconds_of(configs, options.workers)
    configs = min(configs, search.trials or configs)
    all_s = seconds_of(configs, options.workers)
    return configs, min(all_s, _SEARCH_S if search.until_gain else all_s, search.budget_s or all_s)


def seconds_of(configs: int, workers: int | None) -> float:
    """Estimate the seconds to compile and time configs, with a number of compile processes; None for the number of cores."""
    return configs * (_COMPILE_S / (workers or len(os.sched_getaffinity(0))) + _TRIAL_S)


def tune_here(plan: Plan, tasks: Sequence[Task], progress: Progress, until: float = math.inf) -> list[Performed]:
    """Perform tasks on the GPU of this process; after `until`, a time of the monotonic clock in s, no further task begins."""
    release_memory()  # the GPU worker needs the memory
    finished: list[Performed] = []
    progress.stage("measure spaces" if plan.options.exhaustive else "tune", len(tasks))
    with TuningSession(plan.options) as session:
        for number, task in enumerate(tasks, start=1):
            if finished and time.monotonic() >= until:
                break
            finished.append((task, perform(session, task, tasks[number:])))
            tell(progress, *finished[-1])
    return finished


def perform(session: TuningSession, task: Task, following: Sequence[Task]) -> TuningResult:
    """Search a task, or measure its whole space.

    `following` are the tasks that this session will probably perform next, in order.
    """
    reason = obstacle(task)
    if reason is not None:
        return TuningResult(skipped=f"not tuned: {task.op.name} {task.case.name}: {reason}")
    tuner = session.tuner(_widened(task, session.options))
    try:
        with session.deciding():
            if session.options.exhaustive:
                return TuningResult(best=_best_of_space(tuner, measure_space(tuner)))
            return _tuned(session, tuner, following)
    except NothingPassedError as error:
        return TuningResult(problem=str(error))
    except WorkerCrashedError as error:
        return TuningResult(problem=f"not tuned: {task.label}: {error}")
    finally:
        session.queue.forget(task)


def _tuned(session: TuningSession, tuner: Tuner, following: Sequence[Task]) -> TuningResult:
    search, configs = session.options.search, session.options.configs
    later = [session.tuner(_widened(task, session.options)) for task in following[:_CASES_AHEAD]]
    session.queue.look_ahead(run for one in later for run in first_runs(one, search, configs))
    entry = tune(tuner, search, configs)
    gain, before = entry.evidence.get("speedup"), entry.evidence.get("before", "default")
    over = f", {gain:.2f}x what calls ran with before ({_FROM[before]})" if gain else ""
    return TuningResult(entry, best=pairs(entry.config) + over)


def _widened(task: Task, options: Options) -> Task:
    """Return a task whose space has the knob values of the options beside its own."""
    return replace(task, variant=widened(task.variant, options.knobs))


def tell(progress: Progress, task: Task, done: TuningResult) -> None:
    """Report the result of a task."""
    if reason := done.skipped or done.problem:
        progress.note(reason)
    if done.best:
        progress.best(done.best)
    progress.advance(task.label)


def _best_of_space(tuner: Tuner, trials: Mapping[Config, Evaluation]) -> str:
    """Return the number of times in the measured space of a case, and the best time.

    Raises:
        NothingPassedError: no config has a time.
    """
    times = times_of(trials)
    if not times:
        raise NothingPassedError(
            f"{tuner.task.op.name} {tuner.task.variant.name}: no config has a time for {tuner.task.case.label}"
        )
    return f"{len(times)} of {len(trials)} configs have a time, best {min(times.values()):.2f} µs"
