"""`kerneltune tune`: on the GPU of this process, or spread over several workers whose results are merged here.

One piece of work is decided on one GPU. A worker that dies costs the evaluation it was at: its trials are stored already, and
its work goes to another. Decides nothing about configs and prints nothing.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kerneltune import cache, device, sweep
from kerneltune.files import read_text
from kerneltune.run_options import Options, Progress, Selection, load_plan, wanted_variants
from kerneltune.search.task import Task, store_path
from kerneltune.spec import Op
from kerneltune.sweep import results_root
from kerneltune.tune.candidates import TOLD, widened
from kerneltune.tune.cluster import RayWorkers
from kerneltune.tune.session import Usage
from kerneltune.tune.tune_run import TuningResult, TuningSummary, ended, keep_space, tell, tune_entries, wanted_works
from kerneltune.tune.worker import Identity, LocalWorkers, RemoteTask, visible_gpus

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

ATTEMPTS = 3
"""So many workers may die over one piece of work, and so often may one be started again."""


class Fleet:
    """A run that is spread over workers."""

    def __init__(self, workers: LocalWorkers | RayWorkers, options: Options, progress: Progress) -> None:
        self._workers, self._options, self._progress = workers, options, progress
        here = device.current()
        self.identity = Identity.of_this_process() if here.is_gpu else None
        self.finished: list[tuple[Task, TuningResult]] = []
        self._works: list[Task] = []
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
        """Do all that is wanted on GPUs of one model, given its slug: this process's own, else that of the first worker.

        Raises:
            ValueError: no worker is left, or a file cannot be written.
        """
        for index in range(self._workers.count):
            self._workers.start(index)
            self._alive.add(index)
        while self.identity is None or not self._idle:
            self._handle_next()
        self._works += wanted(self.identity.device.slug)
        self._queue.extend(range(len(self._works)))
        self._progress.stage(f"tune on {self._workers.count} GPUs", len(self._works))
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
        """Give an idle worker what was reserved for it, what is next, or what was reserved for another."""
        number = self._reserved.pop(index, None)
        if number is None and self._queue:
            number = self._queue.popleft()
        if number is None and self._reserved:
            number = self._reserved.pop(next(iter(self._reserved)))
        if number is None:
            return
        if self._queue:
            self._reserved[index] = self._queue.popleft()
        following = self._works[self._reserved[index]] if index in self._reserved else None
        self._idle.discard(index)
        self._running[index] = number
        self._took_part.add(index)
        self._workers.give(index, self._order_for(self._works[number], following))

    def _order_for(self, work: Task, following: Task | None) -> RemoteTask:
        slug, op = self.slug, work.op.name
        config_file = cache.path_of(op, slug, self._options.configs)
        configs = read_text(config_file) if config_file.exists() else ""
        self._store(work).begin(work)
        return RemoteTask(work, following, tuple(self._store(work).relevant_to(work, TOLD)), configs)

    @property
    def slug(self) -> str:
        """Return the slug of the GPU model, once it is known."""
        assert self.identity is not None
        return self.identity.device.slug

    def _store(self, work: Task) -> "TrialStore":
        from kerneltune.search.trials import TrialStore  # Optuna takes 0.4 s

        key = work.op.name, work.variant.name
        if key not in self._stores:
            assert self.identity is not None
            path = store_path(results_root(self._options.results) / "runs" / "trials" / self.slug, work.op.name)
            self._stores[key] = TrialStore(path, self.identity.commit, **self.identity.fingerprint(work.variant))
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
            work = self._works[self._running[index]]
            if kind == "trial":
                self._store(work).put(work, *payload)
                self._trials += 1
            else:
                self._merge(work, payload)
                del self._running[index]
                self._idle.add(index)

    def _on_ready(self, index: int, identity: Identity) -> None:
        """Take a worker on, unless it is of another kind."""
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
        """Hand on what a dead worker had, and start it again."""
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
                work = self._works[number]
                self._finish(
                    work, TuningResult(problem=f"not tuned: {work.label}: {ATTEMPTS} workers died over it, the last: {reason}")
                )
        if index in self._reserved:
            self._queue.appendleft(self._reserved.pop(index))
        self._deaths[index] += 1
        if self._deaths[index] < ATTEMPTS:
            self._workers.start(index)
            self._alive.add(index)

    def _merge(self, work: Task, done: TuningResult) -> None:
        """Keep what a worker found: its config in the cache, its space in the results."""
        if done.entry is not None:
            cache.store(work.op.name, self.slug, done.entry, self._options.configs)
        self._finish(work, keep_space(done, self.slug, self._options))

    def _finish(self, work: Task, done: TuningResult) -> None:
        self.finished.append((work, done))
        tell(self._progress, work, done)


def run_tune(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> TuningSummary:
    """Search the selected bench cases, or measure their whole spaces.

    Raises:
        ValueError: no GPU, bad input, a space that makes no sense, or a folder that cannot be written.
    """
    plan = load_plan(ops, selection)
    entries = [entry for entry in plan.bench if selection.takes(entry)]
    for name in dict.fromkeys(entry.op for entry in entries if options.knobs):
        for variant in wanted_variants(ops[name], selection, options):
            if variant.config is not None:
                widened(variant, options.knobs)
    if options.ray or options.gpus:
        return _tune_on_many(ops, entries, selection, options, progress)
    if not device.current().is_gpu:
        raise ValueError("tune needs a GPU: in the interpreter nothing can be timed")
    return tune_entries(ops, entries, selection, options, progress)


def _tune_on_many(
    ops: Mapping[str, Op], entries: Sequence[sweep.SweepCase], selection: Selection, options: Options, progress: Progress
) -> TuningSummary:
    """Tune on several GPUs at once.

    Raises:
        ValueError: there are none, or no worker on one of them stays alive.
    """

    @lru_cache
    def wanted(device_slug: str) -> tuple[list[Task], int]:
        return wanted_works(ops, entries, selection, options, device_slug, progress)

    here = device.current()
    if here.is_gpu and not wanted(here.slug)[0]:
        return TuningSummary(here.slug, [], kept=wanted(here.slug)[1])
    with make_workers(selection.family, options) as workers:
        fleet = Fleet(workers, options, progress)
        whole = fleet.run(lambda device_slug: wanted(device_slug)[0])
    return ended(fleet.finished, whole, fleet.slug, wanted(fleet.slug)[1], selection, options, progress)


def make_workers(family: str, options: Options) -> LocalWorkers | RayWorkers:
    """Make one worker for every GPU that the options name."""
    if not options.ray:
        return LocalWorkers(family, options, visible_gpus(options.gpus))
    if options.gpus in ("", "all"):
        return RayWorkers(family, options)
    if not options.gpus.isdecimal() or not int(options.gpus):
        raise ValueError(f"gpus: {options.gpus!r}: expected all or a number of GPUs")
    return RayWorkers(family, options, int(options.gpus))
