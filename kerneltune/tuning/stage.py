"""The tuning stage: which cases lack a config or have a stale one, and their search on the GPU of this process.

One task, a variant on a case, is the unit of work wherever it runs: searched, or its whole space measured. Decides nothing about
configs and prints nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from kerneltune import cache, device, sweep
from kerneltune.files import append_lines
from kerneltune.measuring.check import release_memory
from kerneltune.measuring.compare import ceiling_task, commit, obstacle
from kerneltune.plan import Options, Progress, Selection, wanted_variants
from kerneltune.search.loop import Search
from kerneltune.search.task import Evaluation, Knobs, Place, Task, knobs_of
from kerneltune.spec import Config, Op
from kerneltune.table import pairs
from kerneltune.tuning.bench import ChildCrashedError
from kerneltune.tuning.candidates import cached, changed, checked_space, takes, widened
from kerneltune.tuning.machines import Machines, Usage
from kerneltune.tuning.tuner import NothingPassedError, Tuner, first_asked, measure_space, tune

_FROM = {"own": "its own config", "near": "of a near case", "rule": "by the rule", "default": "the default"}
_CASES_AHEAD = 6
"""Every other of them is the ceiling of one, which is compiled in no time."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Hold the result of a search.

    Attributes:
        entry: stored in the config cache; None where whole spaces are measured, or nothing passed.
        space: the file of a measured space.
        space_bytes: its content, where a worker measured it on files of its own.
        best: what was found, in a few words.
        skipped: why it cannot be done on this GPU; empty where it can.
        problem: why nothing was found though it can; empty where all is well.
        usage: None where the search did not begin.
    """

    entry: cache.CacheEntry | None = None
    space: Path | None = None
    space_bytes: bytes = b""
    best: str = ""
    skipped: str = ""
    problem: str = ""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class TuningSummary:
    """What a run did.

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
    with Machines(options) as machines:
        for number, work in enumerate(works, start=1):
            done = perform(machines, work, works[number:], selection.family, options)
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
        append_lines(path, (json.dumps(row) + "\n").encode(), partial_line="cut")
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
                "again, `cache verify --write` holds them to the clock)"
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
    found: dict[Place, Task] = {}
    for entry in sorted(entries, key=lambda e: e.case.dtype != "bfloat16"):
        op = ops[entry.op]
        case = entry.case if options.exhaustive else op.called(entry.case)
        tasks = [Task(op, case, variant, options.policy) for variant in wanted_variants(op, selection, options)]
        ceiling = None if options.exhaustive else ceiling_task(ops, op, case, options.policy)
        wanted = [task for task in tasks if task.variant.config is not None and takes(task)]
        found |= {task.place: task for task in (*wanted, *([ceiling] if ceiling is not None else []))}
    return list(found.values())


def search_of(options: Options) -> Search:
    """Return how much to search.

    Raises:
        ValueError: it makes no sense.
    """
    return Search(options.budget_s, options.trials, options.sampler, until_gain=options.until_gain or None)


def perform(machines: Machines, task: Task, following: Sequence[Task], family: str, options: Options) -> TuningResult:
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


def _tuned(machines: Machines, tuner: Tuner, following: Sequence[Task], options: Options) -> TuningResult:
    search = search_of(options)
    later = [machines.tuner(_widened(task, options)) for task in following[:_CASES_AHEAD]]
    machines.look_ahead(asked for one in later for asked in first_asked(one, search, options.configs))
    entry = tune(tuner, search, options.configs)
    gain, before = entry.evidence.get("speedup"), entry.evidence.get("before", "default")
    over = f", {gain:.2f}x what calls ran with before ({_FROM[before]})" if gain else ""
    return TuningResult(entry, best=pairs(entry.config) + over)


def _measured(machines: Machines, tuner: Tuner, family: str, options: Options) -> TuningResult:
    path, best = _export(tuner, measure_space(tuner), family, options)
    return TuningResult(space=path, best=best)


def _widened(task: Task, options: Options) -> Task:
    """Return a task with the further values that the options give to its knobs."""
    return replace(task, variant=widened(task.variant, options.knobs))


def tell(progress: Progress, task: Task, done: TuningResult) -> None:
    """Say what became of a task."""
    if reason := done.skipped or done.problem:
        progress.note(reason)
    if done.best:
        progress.best(f"{done.best}: {done.space}" if done.space else done.best)
    progress.advance(task.label)


def _export(tuner: Tuner, trials: Mapping[Config, Evaluation], family: str, options: Options) -> tuple[Path, str]:
    """Write the measured space of a case; the file, and what is in it.

    Raises:
        NothingPassedError: no config has a time.
    """
    op, case, variant, here = tuner.task.op, tuner.task.case, tuner.task.variant, device.current()
    if all(trial.time_us is None for trial in trials.values()):
        raise NothingPassedError(f"{op.name} {variant.name}: no config has a time for {case.label}")
    from kerneltune.search import spaces

    stored = tuner.store.of_task(tuner.task)
    newest = max(stored.values(), key=lambda evaluation: evaluation.date)
    flags = [f"--knob {name}={','.join(texts)}" for name, texts in options.knobs]
    parts = ["kerneltune tune", family, "--exhaustive --op", op.name, "--case", case.name, "--dtype", case.dtype]
    command = [*parts, "--quant", case.quant, "--variant", variant.name, *flags]
    space = spaces.MeasuredSpace(
        op=op.name, variant=variant.name, case=case.name, axes=case.axes, dtype=case.dtype, quant=case.quant,
        options=case.options, policy=tuner.task.policy, default=_knobs(tuner.task.default), device=here.name,
        driver=here.driver, source_hash=variant.source_hash, commit=newest.commit, date=newest.date, command=" ".join(command),
        trials={_knobs(config): trials[config] for config in variant.configs(case) if config in trials}, **device.versions(),
    )  # fmt: skip
    path = spaces.write(sweep.results_root(options.results) / here.slug / "spaces", space)
    best = f"{len(space.feasible)} of {len(space.trials)} configs have a time, best {min(space.feasible.values()):.2f} µs"
    return path, best


def _knobs(config: Config) -> Knobs:
    return tuple(knobs_of(config).items())
