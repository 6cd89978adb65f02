"""The tuning stage: which cases lack a config or have a stale one, and their search on the GPU of this process, by its machines.

One task, a variant on a case, is the unit of work wherever it runs: searched, or its whole space measured. Decides nothing about
configs and prints nothing.
"""

import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from kerneltune import cache, device, sweep
from kerneltune.files import append_lines
from kerneltune.measuring.check import release_memory
from kerneltune.measuring.compare import ceiling_task, commit, obstacle
from kerneltune.measuring.compiler import TARGETS, CompilePool, PendingCompile, compile_job
from kerneltune.plan import Options, Progress, Selection, wanted_variants
from kerneltune.processes import held_folder, start_server
from kerneltune.search.loop import Search
from kerneltune.search.task import Evaluation, Run, Task, TaskKey, Trial, knob_pairs, store_path
from kerneltune.spec import Config, Op
from kerneltune.sweep import results_root
from kerneltune.table import pairs
from kerneltune.tuning.bench import ChildCrashedError, IsolatedBench, split_cores
from kerneltune.tuning.candidates import cached, changed, checked_space, present, takes, widened
from kerneltune.tuning.tuner import NothingPassedError, Tuner, first_asked, measure_space, tune

if TYPE_CHECKING:
    from kerneltune.search.trial_table import TrialBlock
    from kerneltune.search.trials import TrialStore

_FROM = {"own": "its own config", "near": "of a near case", "rule": "by the rule", "default": "the default"}
_CASES_AHEAD = 6
"""Every other of them is the ceiling of one, which is compiled in no time."""
_STORES = "kerneltune.search.trials"


@dataclass(frozen=True, slots=True)
class Usage:
    """The time and evaluations of one search, or of all searches of a run.

    Attributes:
        wall_s: from the first compiled config to the end.
        busy_s: of that, spent by the measuring processes, all together, on inputs, checks and samples.
        evaluations: configs tried that were not known before.
        gpus: that took part.
    """

    wall_s: float
    busy_s: float
    evaluations: int
    gpus: int = 1

    @property
    def idle(self) -> float:
        """The share of the time in which a GPU waited."""
        return max(0.0, 1.0 - self.busy_s / (self.gpus * self.wall_s)) if self.wall_s > 0 else 0.0

    @property
    def values(self) -> dict[str, float]:
        """Return the usage as JSON."""
        return {name: round(value, 3) for name, value in (asdict(self) | {"idle": self.idle}).items()}

    @property
    def text(self) -> str:
        """Write the usage on one line."""
        who = "GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        share = f"{100 * self.idle:.0f} % of {self.wall_s:.1f} s"
        return f"{who} idle for {share} after the first compiled config, {self.evaluations} evaluations"


@contextmanager
def empty_caches() -> Iterator[Path]:
    """Make an empty folder, and point Triton's compile cache at it, also in processes started from here."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with held_folder() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
        try:
            yield folder
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


class Machines:
    """The measuring process, compilers and stores of a stage. Use as a context manager."""

    def __init__(
        self, options: Options, on_trial: Callable[[Config, Evaluation], None] = lambda _config, _evaluation: None
    ) -> None:
        """Begin to start processes. on_trial: told every new evaluation."""
        start_server()
        measuring, self._cores = split_cores()
        self.pool: CompilePool
        self.bench = IsolatedBench(cores=measuring)
        self._on_trial = on_trial
        self._options = options
        self._began: float | None = None
        self._evaluations = 0
        self._stores: dict[tuple[str, str], TrialStore] = {}
        self._begun: list[PendingCompile] = []
        self._ahead: dict[tuple[TaskKey, Config], PendingCompile] = {}
        self._later: Iterator[Run] = iter(())

    def know(self, task: Task, known: Iterable[Trial] = ()) -> None:
        """Open the store of a task's variant; `known` are evaluations that it finds as well. `force` forgets transient failures.

        Raises:
            ValueError: the store cannot be read.
        """
        from kerneltune.search.trials import TrialStore  # begun to be imported in `__enter__`

        store = TrialStore(store_path(self._folder, task.op.name), commit(), **present(task.variant))
        self._stores[task.op.name, task.variant.name] = store
        store.on_put = self._on_trial
        store.know(known)
        if self._options.force:
            store.forget_transient()

    def tuner(self, task: Task) -> Tuner:
        """Return a tuner that remembers what was tried before.

        Raises:
            ValueError: the store cannot be read.
        """
        if (task.op.name, task.variant.name) not in self._stores:
            self.know(task)
        tuner = Tuner(task, self._stores[task.op.name, task.variant.name], self.bench, partial(self._compiling, task))
        tuner.compilers, tuner.meanwhile = self.pool.workers, self.fill
        tuner.whole = self._options.force or bool(self._options.knobs)
        return tuner

    def _compiling(self, task: Task, config: Config) -> PendingCompile:
        """Begin to compile a config, unless that was begun ahead."""
        return self._ahead.pop((task.key, config), None) or self._begin(task, config)

    def _begin(self, task: Task, config: Config) -> PendingCompile:
        self._begun.append(self.pool.submit(compile_job(task, config)))
        return self._begun[-1]

    def look_ahead(self, later: Iterable[tuple[Tuner, Config]]) -> None:
        """Say which configs come next, in place of what was said before; `fill` compiles them."""
        self._later = ((tuner.task, config) for tuner, config in later if (tuner.task.key, config) not in self._ahead)

    def fill(self) -> None:
        """Begin to compile what later cases will ask for first where a core has nothing to do."""
        self._begun = [one for one in self._begun if not one.done()]
        while len(self._begun) < self.pool.workers:
            following = next(self._later, None)
            if following is None:
                return
            task, config = following
            self._ahead[task.key, config] = self._begin(task, config)

    def forget_ahead(self, tuner: Tuner) -> None:
        """Let go of what was compiled ahead for a case whose search is over."""
        over = tuner.task.key
        self._ahead = {(place, config): begun for (place, config), begun in self._ahead.items() if place != over}

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Keep this thread off the measuring core: what is tried next is decided while something is measured."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores or before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def usage_of(self, tuner: Tuner) -> Usage:
        """Return the usage of a search that is over, from its first compiled config until now; `usage` counts it too."""
        usage = self._usage(tuner.began, tuner.evaluations)
        self._began, self._evaluations = self._began or tuner.began, self._evaluations + tuner.evaluations
        return usage

    @property
    def usage(self) -> Usage:
        """Return the usage of all searches, from the first compiled config until now."""
        return self._usage(self._began, self._evaluations)

    def _usage(self, began: float | None, evaluations: int) -> Usage:
        now = time.monotonic()
        since = began or now
        return Usage(now - since, self.bench.busy_since(since), evaluations)

    def __enter__(self) -> "Machines":
        """Start the measuring child, then the compilers.

        Raises:
            ValueError: a GPU that nothing can be compiled for ahead of time.
        """
        with ExitStack() as entered:
            entered.enter_context(self.bench)
            self.bench.begin()  # asks for the driver while this process does, which takes as long
            Thread(target=importlib.import_module, args=(_STORES,), daemon=True).start()  # Optuna takes 0.4 s
            here = device.current()
            target = TARGETS.get(here.arch)
            if target is None:
                raise ValueError(f"cannot compile ahead of time for {here.arch}; known targets: {', '.join(TARGETS)}")
            self._folder = results_root(self._options.results) / "runs" / "trials" / here.slug
            self.pool = entered.enter_context(CompilePool(target, self._options.workers, self._cores))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()


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
    with Machines(options) as machines:
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
