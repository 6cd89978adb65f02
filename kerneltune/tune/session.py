"""Perform tasks on a GPU with the GPU worker, the compile pool, the trial stores and the compile queue of a run."""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Literal

from kerneltune import cache, device
from kerneltune.errors import first_line, statement_in
from kerneltune.files import UnwritableError
from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compare import why_not_timed
from kerneltune.measuring.compiler import CompilePool
from kerneltune.plan import Options
from kerneltune.processes.start import WorkerStoppedError, start_server
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.progress import Progress
from kerneltune.task import Run, Task
from kerneltune.tune.gpu_worker import GpuBench, GpuWorker, split_cores
from kerneltune.tune.tuner import CompileQueue, NothingPassedError, Tuner
from kerneltune.wording import assignments

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore


_CASES_AHEAD = 6
"""Cases whose first configs are compiled ahead. Half of these cases are ceiling cases, which compile at once."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Hold the result of a task in a run, which searches it, renews its config or keeps it.

    Attributes:
        status: `tuned`; `kept`: the cache has a config; `skipped`: this GPU cannot run the task; `failed`; `dropped`: a stale
            config left the cache because it does not run.
        entry: entry that is now in the config cache, of a tuned task.
        best: best config, in a few words.
        reason: why the task was skipped or failed, or its config dropped.
        label: the task that failed before a config could be tried.
    """

    status: Literal["tuned", "kept", "skipped", "failed", "dropped"]
    entry: cache.CacheEntry | None = None
    best: str = ""
    reason: str = ""
    label: str = ""

    def report(self, progress: Progress, task: Task) -> None:
        """Report that a task was performed."""
        if self.reason:
            progress.note(self.reason)
        if self.best:
            progress.best(self.best)
        progress.advance(task.key.label)


class TuningSession:
    """Hold the processes, stores and queue of a run on one GPU. Use as a context manager, or as the object of a `Worker`.

    Attributes:
        options: options of the run.
        worker: the GPU worker, which checks and times configs.
        queue: compilations.
    """

    def __init__(self, options: Options, cores: frozenset[int] | None = None) -> None:
        """Let the server of processes start in the background.

        cores: cores that this process, and the processes that it will start, keep to; None for all.
        """
        if cores:
            os.sched_setaffinity(0, cores)
        start_server()
        worker_cores, self._cores = split_cores()
        self.options, self.worker = options, GpuWorker(partial(GpuBench, worker_cores))
        self.queue: CompileQueue
        self._stores: dict[tuple[str, str], TrialStore] = {}
        self._entered: ExitStack | None = None

    def tuner(self, task: Task) -> Tuner:
        """Return a tuner of a task that knows the stored trials, without transient failures if `retune` is `all`."""
        options = self.options
        store = self._stores.get((task.op.name, task.variant.name))
        if store is None:
            from kerneltune.search.trials import open_store  # imports Optuna, which takes 0.4 s

            store = open_store(task.op, task.variant, options.results, options.retune == "all")
            self._stores[task.op.name, task.variant.name] = store
        return Tuner(task, store, self.worker, self.queue, options)

    def gpu_name(self) -> str:
        """Return the name of the GPU."""
        return device.current().name

    def perform_in_fleet(self, task: Task, following: Sequence[Task]) -> TuningResult:
        """Perform a task of a run that other processes share, after reading the trials and configs of the other processes.

        The first task enters the session, when the process has its GPU.
        """
        if self._entered is None:
            self.__enter__()
        cache.clear()
        for store in self._stores.values():
            store.refresh()
        return self.perform(task, following)

    def perform(self, task: Task, following: Sequence[Task]) -> TuningResult:
        """Search a task.

        `following` are the tasks that this session will probably perform next, in order. A task whose operator or kernels fail is
        `failed`.

        Raises:
            ValueError: the stored trials cannot be read, or trials or the config cannot be written.
            WorkerStoppedError: a signal from outside ended the GPU worker.
        """
        tuner = self.tuner(task)
        try:
            reason = why_not_timed(task)
            if reason is not None:
                return TuningResult("skipped", reason=f"not tuned: {task.op.name} {task.case.name}: {reason}")
            with self.off_worker_core():
                return self._tuned(tuner, following)
        except (UnwritableError, WorkerStoppedError):  # not the task's fault
            raise
        except NothingPassedError as error:
            return TuningResult("failed", reason=str(error))
        except Exception as error:  # an operator's own code may fail in any way: other tasks go on
            text = str(error) if isinstance(error, WorkerCrashedError) else f"{statement_in('', error)}{first_line(error)}"
            return TuningResult("failed", reason=f"not tuned: {task.key.label}: {text}", label=task.key.label)
        finally:
            self.queue.forget(task)

    def _tuned(self, tuner: Tuner, following: Sequence[Task]) -> TuningResult:
        self.queue.look_ahead(self._first_runs(following[:_CASES_AHEAD]))
        entry = tuner.tune()
        gain, before = entry.evidence.get("speedup"), entry.evidence.get("before")
        over = f", {gain:.2f}x what calls ran with before ({cache.Source[before].value})" if gain and before else ""
        return TuningResult("tuned", entry, best=assignments(entry.config) + over)

    def _first_runs(self, tasks: Sequence[Task]) -> Iterator[Run]:
        """Yield the first configs of later tasks' searches; a task that fails says so at its own turn."""
        for task in tasks:
            with suppress(Exception):
                yield from self.tuner(task).first_runs()

    @contextmanager
    def off_worker_core(self) -> Iterator[None]:
        """Keep this thread off the core of the GPU worker, so that decisions do not disturb measurements."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores or before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def __enter__(self) -> "TuningSession":
        """Start the GPU worker, then the compilers."""
        with ExitStack() as entered:
            entered.enter_context(self.worker)
            self.worker.begin()  # the worker and this process open the driver, which takes long, at the same time
            Thread(target=importlib.import_module, args=("kerneltune.search.trials",), daemon=True).start()  # Optuna takes 0.4 s
            arch = device.current().arch
            target = TARGETS.get(arch)
            if target is None:
                raise ValueError(f"cannot compile ahead of time for {arch}; known targets: {', '.join(TARGETS)}")
            self.queue = CompileQueue(entered.enter_context(CompilePool(target, self.options.workers, self._cores)))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._entered is not None:
            self._entered.close()
