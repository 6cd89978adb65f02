"""The tuning stage: which cases lack a config or have a stale one, and their search on the GPU of this process, by its machines.

One task, a variant on a case, is the unit of work wherever it runs: searched, or its whole space measured. Decides nothing about
configs and prints nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kerneltune import cache, device, sweep
from kerneltune.files import append_lines
from kerneltune.measuring.check import release_memory
from kerneltune.measuring.compare import ceiling_task, commit, obstacle
from kerneltune.run_options import Options, Progress, Selection, wanted_variants
from kerneltune.search.loop import Search
from kerneltune.search.task import Evaluation, Task, TaskKey, knob_pairs
from kerneltune.spec import Config, Op
from kerneltune.sweep import results_root
from kerneltune.table import pairs
from kerneltune.tune.candidates import cached, changed, checked_space, present, takes, widened
from kerneltune.tune.gpu_worker import ChildCrashedError
from kerneltune.tune.session import TuningSession, Usage
from kerneltune.tune.tuner import NothingPassedError, Tuner, first_asked, measure_space, tune

if TYPE_CHECKING:
    from kerneltune.search.trial_table import TrialBlock

_FROM = {"own": "its own config", "near": "of a near case", "rule": "by the rule", "default": "the default"}
_CASES_AHEAD = 6
"""Every other of them is the ceiling of one, which is compiled in no time."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Hold the result of a search.

    Attributes:
        entry: stored in the config cache; None where whole spaces are measured, or nothing passed.
        space: measured space; None where a config was searched.
        best: what was found, in a few words.
        skipped: why it cannot be done on this GPU; empty where it can.
        problem: why nothing was found though it can; empty where all is well.
        usage: None where the search did not begin.
    """

    entry: cache.CacheEntry | None = None
    space: "TrialBlock | None" = None
    best: str = ""
    skipped: str = ""
    problem: str = ""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class TuningSummary:
    """The result of a run.

    Attributes:
        device_slug: the GPU model, as its folder is called, that it is for.
        entries: stored in the config cache.
        searched: cases of a variant that were to be searched, or their spaces measured.
        failed: those of them that ended with a problem.
        kept: cases of a variant of which the cache's config was kept as it is.
    """

    device_slug: str
    entries: list[cache.CacheEntry]
    searched: int = 0
    failed: int = 0
    kept: int = 0


def tune_entries(
    ops: Mapping[str, Op], entries: Sequence[sweep.SweepCase], selection: Selection, options: Options, progress: Progress
) -> TuningSummary:
    """Search what the cache lacks; the ceiling of every case as well.

    Raises:
        ValueError: a GPU that nothing can be compiled for ahead of time, a space that makes no sense, or a broken config file.
    """
    here = device.current()
    works, kept = wanted_works(ops, entries, selection, options, here.slug, progress)
    if not works:
        return TuningSummary(here.slug, [], kept=kept)
    release_memory()  # the measuring process needs what this one no longer does
    finished: list[tuple[Task, TuningResult]] = []
    progress.stage("measure spaces" if options.exhaustive else "tune", len(works))
    with TuningSession(options) as machines:
        for number, work in enumerate(works, start=1):
            done = keep_space(perform(machines, work, works[number:], selection.family, options), here.slug, options)
            finished.append((work, done))
            tell(progress, work, done)
        whole = machines.usage
    return ended(finished, whole, here.slug, kept, selection, options, progress)


def ended(
    finished: Sequence[tuple[Task, TuningResult]],
    whole: Usage,
    device_slug: str,
    kept: int,
    selection: Selection,
    options: Options,
    progress: Progress,
) -> TuningSummary:
    """Say and keep how busy the GPUs were; what became of it all."""
    if whole.evaluations:
        progress.note(whole.text)
        searches = [{**task.identity, **done.usage.values} for task, done in finished if done.usage is not None]
        run = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "family": sweep.family_name(selection.family)}
        row = {**run, "commit": commit(), **whole.values, "searches": searches}
        path = sweep.results_root(options.results) / "runs" / "searches" / f"{device_slug}.jsonl"
        append_lines(path, (json.dumps(row) + "\n").encode())
    cache.clear()
    stored = [done.entry for _, done in finished if done.entry is not None]
    return TuningSummary(device_slug, stored, len(finished), sum(bool(done.problem) for _, done in finished), kept)


def wanted_works(
    ops: Mapping[str, Op],
    entries: Sequence[sweep.SweepCase],
    selection: Selection,
    options: Options,
    device_slug: str,
    progress: Progress,
) -> tuple[list[Task], int]:
    """List the cases that the cache has no config for, or also a stale config where those are asked for.

    Before anything is measured or written all spaces are held to make sense and all config files to be whole.

    Raises:
        ValueError: one does not, or is not.
    """
    search_of(options)
    works = _works(ops, entries, selection, options)
    files = {cache.path_of(work.op.name, device_slug, options.configs) for work in works}
    for path in sorted(files if not options.exhaustive else ()):
        if path.exists():
            cache.load_strict(path)
    chosen = works
    if not options.force and not options.exhaustive:
        states = [_state(work, options, device_slug) for work in works]
        stale = states.count("stale")
        if stale and not options.stale:
            progress.note(
                f"{stale} of {len(works) - states.count('lacking')} cached configs are stale: kept (`tune --stale` searches "
                "again, `sweep --stale` holds them to the clock)"
            )
        searched = ("lacking", "stale") if options.stale else ("lacking",)
        chosen = [work for work, state in zip(works, states, strict=True) if state in searched]
    for work in chosen:
        checked_space(_widened(work, options))
    return chosen, len(works) - len(chosen)


def _state(task: Task, options: Options, device_slug: str) -> str:
    """Return the state of the cache's config for a task: `lacking`, `stale` or `fresh`."""
    found = cached(task, options.configs, device_slug)
    if found is None:
        return "lacking"
    return "stale" if changed(task.variant, found[0], device_slug == device.current().slug) else "fresh"


def _works(ops: Mapping[str, Op], entries: Sequence[sweep.SweepCase], selection: Selection, options: Options) -> list[Task]:
    """Return the ceiling of every case first, then the cases as calls look them up, bf16 before the other types.

    No ceilings, and every case as it is, where whole spaces are measured.

    Raises:
        ValueError: a variant that cannot say whether it takes a case.
    """
    found: dict[TaskKey, Task] = {}
    for entry in sorted(entries, key=lambda e: e.case.dtype != "bfloat16"):
        op = ops[entry.op]
        case = entry.case if options.exhaustive else op.called(entry.case)
        tasks = [Task(op, case, variant, options.policy) for variant in wanted_variants(op, selection, options)]
        ceiling = None if options.exhaustive else ceiling_task(ops, op, case, options.policy)
        wanted = [task for task in tasks if task.variant.config is not None and takes(task)]
        found |= {task.key: task for task in (*wanted, *([ceiling] if ceiling is not None else []))}
    return list(found.values())


def search_of(options: Options) -> Search:
    """Return how much to search.

    Raises:
        ValueError: it makes no sense.
    """
    return Search(options.budget_s, options.trials, options.sampler, until_gain=options.until_gain or None)


def perform(machines: TuningSession, task: Task, following: Sequence[Task], family: str, options: Options) -> TuningResult:
    """Search a task, or measure its whole space; `following` is what these machines are expected to do next, in this order.

    Raises:
        ValueError: a space that makes no sense, a store that cannot be read, or a folder that cannot be written.
    """
    reason = obstacle(task)
    if reason is not None:
        return TuningResult(skipped=f"not tuned: {task.op.name} {task.case.name}: {reason}")
    tuner = machines.tuner(_widened(task, options))
    try:
        with machines.deciding():
            done = (
                _measured(machines, tuner, family, options) if options.exhaustive else _tuned(machines, tuner, following, options)
            )
    except NothingPassedError as error:
        done = TuningResult(problem=str(error))
    except ChildCrashedError as error:
        done = TuningResult(problem=f"not tuned: {task.label}: {error}")
    machines.forget_ahead(tuner)
    return replace(done, usage=machines.usage_of(tuner))


def _tuned(machines: TuningSession, tuner: Tuner, following: Sequence[Task], options: Options) -> TuningResult:
    search = search_of(options)
    later = [machines.tuner(_widened(task, options)) for task in following[:_CASES_AHEAD]]
    machines.look_ahead(asked for one in later for asked in first_asked(one, search, options.configs))
    entry = tune(tuner, search, options.configs)
    gain, before = entry.evidence.get("speedup"), entry.evidence.get("before", "default")
    over = f", {gain:.2f}x what calls ran with before ({_FROM[before]})" if gain else ""
    return TuningResult(entry, best=pairs(entry.config) + over)


def _measured(machines: TuningSession, tuner: Tuner, family: str, options: Options) -> TuningResult:
    return TuningResult(space=_whole_space(tuner, measure_space(tuner), family, options))


def _widened(task: Task, options: Options) -> Task:
    """Return a task with the further values that the options give to its knobs."""
    return replace(task, variant=widened(task.variant, options.knobs))


def tell(progress: Progress, task: Task, done: TuningResult) -> None:
    """Say what became of a task."""
    if reason := done.skipped or done.problem:
        progress.note(reason)
    if done.best:
        progress.best(done.best)
    progress.advance(task.label)


def _whole_space(tuner: Tuner, trials: Mapping[Config, Evaluation], family: str, options: Options) -> "TrialBlock":
    """Return the measured space of a case.

    Raises:
        NothingPassedError: no config has a time.
    """
    from kerneltune.search.trial_table import block_of

    task, case, variant, here = tuner.task, tuner.task.case, tuner.task.variant, device.current()
    if all(trial.time_us is None for trial in trials.values()):
        raise NothingPassedError(f"{task.op.name} {variant.name}: no config has a time for {case.label}")
    newest = max(tuner.store.of_task(task).values(), key=lambda evaluation: evaluation.date)
    flags = [f"--knob {name}={','.join(texts)}" for name, texts in options.knobs]
    parts = ["kerneltune tune", family, "--exhaustive --op", task.op.name, "--case", case.name, "--dtype", case.dtype]
    command = " ".join([*parts, "--quant", case.quant, "--variant", variant.name, *flags])
    ordered = {config: trials[config] for config in variant.configs(case) if config in trials}
    run = {"device": here.name, **present(variant), "commit": newest.commit, "date": newest.date}
    return block_of(task, ordered, **run, default=knob_pairs(task.default), command=command)


def keep_space(done: TuningResult, device_slug: str, options: Options) -> TuningResult:
    """Add the space that a task has measured, if any, to the kept trials, and return the result with the file's name.

    Raises:
        ValueError: the file cannot be read or written.
    """
    if done.space is None:
        return done
    from kerneltune.search.trial_table import add, table_path

    path = table_path(results_root(options.results), device_slug, done.space.op)
    add(path, done.space)
    times = done.space.feasible
    best = f"{len(times)} of {len(done.space.rows)} configs have a time, best {min(times.values()):.2f} µs: {path}"
    return replace(done, best=best)
