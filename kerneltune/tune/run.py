"""Tune a plan, on the GPU of this process or on several GPUs of this host: list the tasks to search, and search each task.

A task, a variant on a case, is the unit of work on every GPU: its config is searched.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kerneltune import cache, device
from kerneltune.checking.memory import release_memory
from kerneltune.measuring.compare import ceiling_task
from kerneltune.plan import Options, Plan
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.progress import Progress
from kerneltune.search.loop import times_of
from kerneltune.spec import Op, TaskKey
from kerneltune.task import Run, Task, is_outdated, is_stale, knobs_of, provenance
from kerneltune.tune.candidates import checked_space
from kerneltune.tune.fleet import Fleet, visible_gpus
from kerneltune.tune.session import TuningResult, TuningSession

_SEARCH_S, _COMPILE_S, _MEASURE_S = 1.6, 1.5, 0.06
"""Seconds of a search that ends at an expected gain of 1 %; of a core to compile a config; of the GPU to check and time a config.

H200, 16 cores: 390 searches of rmsnorm took 545 s, 100 of int4_fp8_gemm 180 s; 278 configs of a capture took 44 s.
"""
_NOTES_OF_KEPT = {
    "stale": "are stale, chosen with other code: kept (`sweep --stale` times them beside their default)",
    "outdated": "are outdated, chosen with another driver, torch or triton: kept (`tune --stale` searches again)",
}
"""State of cached configs that `tune` keeps -> the rest of its note."""


def run_tune(plan: Plan, progress: Progress) -> list[TuningResult]:
    """Search the selected bench cases, and return a result for each task.

    On this GPU no further task begins when `until` of the limits has passed; several GPUs perform all tasks.
    """
    options = plan.options
    gpus = visible_gpus(options.gpus) if options.gpus else []
    device.require_gpu("tune")
    tasks, num_kept = tasks_to_search(plan, progress)
    results = [TuningResult("kept")] * num_kept
    if tasks:
        results += Fleet(gpus, options, progress).run(tasks) if gpus else _tune_here(options, tasks, progress)
        cache.clear()
    return results


def tasks_to_search(plan: Plan, progress: Progress) -> tuple[list[Task], int]:
    """Return the tasks of a plan to search on this GPU model, and how many tasks keep their config.

    A task is searched if the cache lacks its config, or with `retune` if the config is stale or outdated. All spaces and config
    files are checked before anything is measured or written.
    """
    options, tasks, gpu = plan.options, _tasks(plan), device.current().slug
    for path in sorted({cache.path_of(task.op.name, gpu) for task in tasks}):
        cache.load_strict(path)
    chosen = tasks
    if options.retune != "all":
        states = list(map(_state, tasks))
        for state, text in () if options.retune else _NOTES_OF_KEPT.items():
            if state in states:
                progress.note(f"{states.count(state)} of {len(states) - states.count('lacking')} cached configs {text}")
        searched = ("lacking", "stale", "outdated") if options.retune else ("lacking",)
        chosen = [task for task, state in zip(tasks, states, strict=True) if state in searched]
    for task in chosen:
        checked_space(task)
    return chosen, len(tasks) - len(chosen)


def _tasks(plan: Plan) -> list[Task]:
    """Return for every case its variants on the case as calls look it up, then its ceiling task; bf16 before other types."""
    tasks = dict[TaskKey, Task]()
    for sweep_case in sorted(plan.cases(), key=lambda sweep_case: sweep_case.case.dtype != "bfloat16"):
        op = plan.ops[sweep_case.op]
        case = op.case_of_call(sweep_case.case)
        with_knobs = [task for task in plan.tasks(sweep_case.op, case) if task.variant.config is not None]
        supported = [task for task in with_knobs if task.variant.unsupported(case) is None]
        tasks |= {task.key: task for task in supported}
        ceiling = ceiling_task(plan.ops, op, case, plan.policy(sweep_case.op))
        if ceiling is not None:
            tasks.setdefault(ceiling.key, ceiling)
    return list(tasks.values())


def _state(task: Task) -> str:
    """Return the state of a task's config in the cache: `lacking`, `stale`, `outdated` or `fresh`.

    A stale config was chosen with other code. An outdated config was chosen with the present code and another driver, torch or
    triton.
    """
    own = task.own_entry()
    if own is None:
        return "lacking"
    if is_stale(task.variant, own.entry):
        return "stale"
    return "outdated" if is_outdated(task.variant, own.entry) else "fresh"


class ExpectedWork(NamedTuple):
    """Estimate a search: the number of configs that it may try, and its seconds."""

    num_configs: int
    seconds: float


def expected_work(task: Task, options: Options) -> ExpectedWork:
    """Estimate the search of a task."""
    search, space = options.search, len(checked_space(task))
    num_configs = min(space, search.trials or space)
    all_s = num_configs * (_COMPILE_S / (options.workers or len(os.sched_getaffinity(0))) + _MEASURE_S)
    return ExpectedWork(num_configs, min(all_s, _SEARCH_S if search.until_gain else all_s, search.budget_s or all_s))


def _tune_here(options: Options, tasks: Sequence[Task], progress: Progress) -> list[TuningResult]:
    """Perform tasks on the GPU of this process."""
    release_memory()  # the GPU worker needs the memory
    results: list[TuningResult] = []
    progress.stage("tune", len(tasks))
    with TuningSession(options) as session:
        for number, task in enumerate(tasks, start=1):
            if results and options.search.is_time_over:
                break
            results.append(session.perform(task, tasks[number:]))
            results[-1].report(progress, task)
    return results


def renew_configs(
    ops: Mapping[str, Op], options: Options, configs: Sequence[cache.CacheEntry], progress: Progress
) -> list[tuple[cache.CacheEntry, TuningResult]]:
    """Time configs of this GPU against their default in interleaved rounds, store the faster, and return entries with results.

    The entry of a config that the operator refuses, or that does not run although the default does, is dropped. No further
    config is timed when `until` of the limits has passed.
    """
    renewals, gpu = list[tuple[cache.CacheEntry, TuningResult]](), device.current().slug
    work = [(entry, *_runs_of(ops[entry.op], entry)) for entry in configs]
    progress.stage("time stale configs", len(work))
    with TuningSession(options) as session:
        for number, (entry, runs, refusal) in enumerate(work, start=1):
            if options.search.is_time_over:
                break
            session.queue.look_ahead(run for _, later, _ in work[number:] for run in later)
            result = refusal or _renewed(session, runs, entry)
            if result.entry is not None:
                cache.store(gpu, result.entry)
            if result.status == "dropped":
                cache.drop(gpu, entry)
            renewals.append((entry, result))
            progress.advance(entry.key.label)
    return renewals


def _runs_of(op: Op, entry: cache.CacheEntry) -> tuple[list[Run], TuningResult | None]:
    """Return an entry's task with its config and, if it differs, with the default; or no run and the result that says why."""
    case = entry.case
    try:
        variant = op.variant(entry.variant)
        names, expected = {*case.sizes, *dict(case.options)}, {*op.axes, *op.options}
        if names != expected:
            raise ValueError(f"axes and options {', '.join(sorted(names))}: expected {', '.join(sorted(expected))}")
        task, config = Task(op, case, variant, entry.policy), variant.config_from(entry.config)
        reason = variant.unsupported(case) or variant.invalid(case, config)
        if reason:
            raise ValueError(reason)
        return [Run(task, distinct) for distinct in dict.fromkeys([config, task.default])], None
    except Exception as error:  # an operator's own code may fail in any way on an old entry
        is_refusal = isinstance(error, ValueError | ArithmeticError)  # any other error is a mistake of the operator
        reason = " ".join(str(error).split()) or type(error).__name__
        return [], TuningResult("dropped" if is_refusal else "failed", reason=reason)


def _renewed(session: TuningSession, runs: Sequence[Run], entry: cache.CacheEntry) -> TuningResult:
    """Return an entry with the faster of its config and the default, and with new evidence; or why its config does not run."""
    task, configs = runs[0].task, [run.config for run in runs]
    tuner = session.tuner(task)
    try:
        with tuner:
            compilations = [tuner.compile(config) for config in configs]
            tuner.prepare()
            session.queue.fill()
            for compilation in compilations:
                compilation.result()
            evaluations = {config: tuner.requests.submit(tuner.measure_config, config).result() for config in configs}
            if evaluations[configs[0]].status == "crashed":  # perhaps another process kept the GPU busy
                evaluations[configs[0]] = tuner.requests.submit(tuner.measure_config, configs[0]).result()
            own, times = evaluations[configs[0]], times_of(evaluations)
            if own.time_us is None:
                is_own_fault = times and own.status != "skipped"  # the default runs
                return TuningResult("dropped" if is_own_fault else "failed", reason=f"{own.status}: {own.reason}")
            final = tuner.run_final(list(times), configs[-1])
    except (WorkerCrashedError, ValueError) as error:
        return TuningResult("failed", reason=f"{'' if isinstance(error, ValueError) else 'crashed: '}{error}")
    finally:
        session.queue.forget(task)
    evidence = final.evidence | provenance(task.variant)
    if final.best != configs[0]:
        return TuningResult("tuned", replace(entry, config=knobs_of(final.best), evidence=evidence))
    search_evidence = {name: entry.evidence[name] for name in ("trials", "before") if name in entry.evidence}
    return TuningResult("tuned", replace(entry, evidence=evidence | search_evidence))
