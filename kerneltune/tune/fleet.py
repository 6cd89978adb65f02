"""Tune a sweep on the GPU of this process, or on several workers whose results are merged here.

Each task is decided on one GPU. If a worker dies, its trials are stored already, and another worker gets its task.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kerneltune import cache, device
from kerneltune.files import read_text
from kerneltune.run_options import Options, Progress, Selection, load_plan, wanted_variants
from kerneltune.search.task import Task, store_path
from kerneltune.spec import Op
from kerneltune.sweep import results_root
from kerneltune.tune.candidates import MOST_OTHER_SIZES, widened
from kerneltune.tune.cluster import RayWorkers
from kerneltune.tune.session import Usage
from kerneltune.tune.tune_run import TunePlan, TuningResult, TuningSummary, keep_space, tell, tune_here
from kerneltune.tune.worker import Identity, LocalWorkers, RemoteTask, visible_gpus

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

ATTEMPTS = 3
"""Number of workers that may die over a task, and of times that a worker is started."""


class Fleet:
    """A run on several workers."""

    def __init__(self, workers: LocalWorkers | RayWorkers, options: Options, progress: Progress) -> None:
        self._workers, self._options, self._progress = workers, options, progress
        here = device.current()
        self.identity = Identity.of_this_process() if here.is_gpu else None
        self.finished: list[tuple[Task, TuningResult]] = []
        self._tasks: list[Task] = []
        self._stores: dict[tuple[str, str], TrialStore] = {}
        self._queue: deque[int] = deque()
        self._reserved: dict[int, int] = {}
        self._running: dict[int, int] = {}
        self._attempts: Counter[int] = Counter()
        self._idle: set[int] = set()
        self._alive: set[int] = set()
        self._deaths: Counter[int] = Counter()
        self._reason = ""
        self._began: float | None = None
        self._trials = 0
        self._took_part: set[int] = set()

    def run(self, wanted: Callable[[str], Sequence[Task]]) -> Usage:
        """Perform the tasks that `wanted` names for a GPU model: the model of this process, else of the first worker.

        Raises:
            ValueError: no worker is left, or a file cannot be written.
        """
        for index in range(self._workers.count):
            self._workers.start(index)
            self._alive.add(index)
        while self.identity is None or not self._idle:
            self._handle_next()
        self._tasks += wanted(self.identity.device.slug)
        self._queue.extend(range(len(self._tasks)))
        self._progress.stage(f"tune on {self._workers.count} GPUs", len(self._tasks))
        while self._queue or self._reserved or self._running:
            for index in sorted(self._idle):
                self._dispatch(index)
            if self._queue or self._reserved or self._running:
                self._handle_next()
        return self._usage()

    def _usage(self) -> Usage:
        usages = [done.usage for _, done in self.finished if done.usage is not None]
        wall_s = time.monotonic() - self._began if self._began is not None else 0.0
        return Usage(wall_s, sum(usage.busy_s for usage in usages), self._trials, max(1, len(self._took_part)))

    def _dispatch(self, index: int) -> None:
        """Give an idle worker its reserved task, else the next task, else the task that is reserved for another worker."""
        number = self._reserved.pop(index, None)
        if number is None and self._queue:
            number = self._queue.popleft()
        if number is None and self._reserved:
            number = self._reserved.pop(next(iter(self._reserved)))
        if number is None:
            return
        if self._queue:
            self._reserved[index] = self._queue.popleft()
        following = self._tasks[self._reserved[index]] if index in self._reserved else None
        self._idle.discard(index)
        self._running[index] = number
        self._took_part.add(index)
        self._workers.give(index, self._order_for(self._tasks[number], following))

    def _order_for(self, task: Task, following: Task | None) -> RemoteTask:
        slug, op = self.slug, task.op.name
        config_file = cache.path_of(op, slug, self._options.configs)
        configs = read_text(config_file) if config_file.exists() else ""
        self._store(task).begin(task)
        return RemoteTask(task, following, tuple(self._store(task).relevant_to(task, MOST_OTHER_SIZES)), configs)

    @property
    def slug(self) -> str:
        """The folder name of the GPU model, after the first worker is ready."""
        assert self.identity is not None
        return self.identity.device.slug

    def _store(self, task: Task) -> "TrialStore":
        from kerneltune.search.trials import TrialStore  # Optuna takes 0.4 s

        key = task.op.name, task.variant.name
        if key not in self._stores:
            assert self.identity is not None
            path = store_path(results_root(self._options.results) / "runs" / "trials" / self.slug, task.op.name)
            self._stores[key] = TrialStore(path, self.identity.commit, **self.identity.fingerprint(task.variant))
        return self._stores[key]

    def _handle_next(self) -> None:
        if not self._alive:
            raise ValueError(f"no worker is left: {self._reason}")
        index, (kind, payload) = self._workers.next()
        if kind == "ready":
            self._on_ready(index, payload)
        elif kind == "dead":
            self._on_dead(index, payload)
        else:
            self._began = self._began or time.monotonic()
            task = self._tasks[self._running[index]]
            if kind == "trial":
                self._store(task).put(task, *payload)
                self._trials += 1
            else:
                self._merge(task, payload)
                del self._running[index]
                self._idle.add(index)

    def _on_ready(self, index: int, identity: Identity) -> None:
        """Accept a worker with the same GPU model and versions, and stop any other worker."""
        if self.identity is None and identity.device.is_gpu:
            self.identity = identity
        if identity == self.identity:
            self._idle.add(index)
            return
        self._reason = f"{identity.text}: no GPU" if not identity.device.is_gpu else f"{identity.text}: of another kind"
        self._progress.note(f"worker {index} left out: {self._reason}")
        self._alive.discard(index)
        self._workers.stop(index)

    def _on_dead(self, index: int, reason: str) -> None:
        """Put the tasks of a dead worker back into the queue, and start the worker again."""
        self._reason = reason
        self._progress.note(f"worker {index} died: {reason}")
        self._idle.discard(index)
        self._alive.discard(index)
        if index in self._running:
            number = self._running.pop(index)
            self._attempts[number] += 1
            if self._attempts[number] < ATTEMPTS:
                self._queue.appendleft(number)
            else:
                task = self._tasks[number]
                self._finish(
                    task, TuningResult(problem=f"not tuned: {task.label}: {ATTEMPTS} workers died over it, the last: {reason}")
                )
        if index in self._reserved:
            self._queue.appendleft(self._reserved.pop(index))
        self._deaths[index] += 1
        if self._deaths[index] < ATTEMPTS:
            self._workers.start(index)
            self._alive.add(index)

    def _merge(self, task: Task, done: TuningResult) -> None:
        """Store the config of a result in the cache and its space in the results."""
        if done.entry is not None:
            cache.store(task.op.name, self.slug, done.entry, self._options.configs)
        self._finish(task, keep_space(done, self.slug, self._options))

    def _finish(self, task: Task, done: TuningResult) -> None:
        self.finished.append((task, done))
        tell(self._progress, task, done)


def run_tune(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> TuningSummary:
    """Search the selected bench cases, or measure their whole spaces.

    Raises:
        ValueError: there is no GPU, the input is wrong, a space contradicts itself, or a folder cannot be written.
    """
    loaded = load_plan(ops, selection)
    plan = TunePlan(ops, [entry for entry in loaded.bench if selection.takes(entry)], selection, options)
    for name in dict.fromkeys(entry.op for entry in plan.entries if options.knobs):
        for variant in wanted_variants(ops[name], selection, options):
            if variant.config is not None:
                widened(variant, options.knobs)
    if options.ray or options.gpus:
        return _tune_on_many(plan, progress)
    if not device.current().is_gpu:
        raise ValueError("tune needs a GPU: in the interpreter nothing can be timed")
    return tune_here(plan, progress)


def _tune_on_many(plan: TunePlan, progress: Progress) -> TuningSummary:
    """Tune on several GPUs at once.

    Raises:
        ValueError: there are no GPUs, or every worker dies.
    """

    @lru_cache
    def missing(device_slug: str) -> tuple[list[Task], int]:
        return plan.missing(device_slug, progress)

    here = device.current()
    if here.is_gpu and not missing(here.slug)[0]:
        return TuningSummary(here.slug, [], kept=missing(here.slug)[1])
    with make_workers(plan.selection.family, plan.options) as workers:
        fleet = Fleet(workers, plan.options, progress)
        usage = fleet.run(lambda device_slug: missing(device_slug)[0])
    return plan.summary(fleet.finished, usage, fleet.slug, missing(fleet.slug)[1], progress)


def make_workers(family: str, options: Options) -> LocalWorkers | RayWorkers:
    """Return the workers, a worker for every GPU that the options name."""
    if not options.ray:
        return LocalWorkers(family, options, visible_gpus(options.gpus))
    if options.gpus in ("", "all"):
        return RayWorkers(family, options)
    if not options.gpus.isdecimal() or not int(options.gpus):
        raise ValueError(f"gpus: {options.gpus!r}: expected all or a number of GPUs")
    return RayWorkers(family, options, int(options.gpus))
