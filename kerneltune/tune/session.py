"""Own the GPU worker, the compile pool, the trial stores and the compile queue, which all searches of a run share."""

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING

from kerneltune import cache, device
from kerneltune.measuring.compiler import TARGETS, CompilePool
from kerneltune.processes import start_server
from kerneltune.run_options import Options
from kerneltune.search.task import Task
from kerneltune.tune.candidates import open_store
from kerneltune.tune.compile_queue import CompileQueue
from kerneltune.tune.gpu_worker import GpuWorker, split_cores
from kerneltune.tune.tuner import Tuner

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

_STORES = "kerneltune.search.trials"


@dataclass(frozen=True, slots=True)
class Usage:
    """Hold the time and the number of evaluations of a search, or of all searches of a run.

    Attributes:
        wall_s: seconds from the first compiled config to the end.
        busy_s: seconds that the processes on the GPUs spent on inputs, checks and samples.
        evaluations: number of configs that were evaluated for the first time.
        gpus: number of GPUs that took part.
    """

    wall_s: float
    busy_s: float
    evaluations: int
    gpus: int = 1

    @property
    def idle(self) -> float:
        """Return the fraction of the time in which a GPU waited."""
        return max(0.0, 1.0 - self.busy_s / (self.gpus * self.wall_s)) if self.wall_s > 0 else 0.0

    @property
    def text(self) -> str:
        """Return the usage on one line."""
        gpus = "GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        share = f"{100 * self.idle:.0f} % of {self.wall_s:.1f} s"
        return f"{gpus} idle for {share} after the first compiled config, {self.evaluations} evaluations"


class TuningSession:
    """Hold the processes, stores and queue of a run on one GPU. Use as a context manager.

    Attributes:
        options: options of the run.
        worker: the GPU worker, which checks and times configs.
        queue: compilations.
    """

    def __init__(self, options: Options) -> None:
        """Let the server of processes start in the background."""
        start_server()
        of_worker, self._cores = split_cores()
        self.options, self.worker = options, GpuWorker(cores=of_worker)
        self.queue: CompileQueue
        self._began: float | None = None
        self._evaluations = 0
        self._stores: dict[tuple[str, str], TrialStore] = {}

    def tuner(self, task: Task) -> Tuner:
        """Return a tuner of a task that knows the stored trials; `force` forgets transient failures."""
        store = self._stores.get((task.op.name, task.variant.name))
        if store is None:
            store = open_store(task.op, task.variant, self.options.results_root)
            self._stores[task.op.name, task.variant.name] = store
            if self.options.force:
                store.forget_transient()
        return Tuner(task, store, self.worker, self.queue, self.options.force or bool(self.options.knobs))

    def refresh(self) -> None:
        """Read the trials and configs that other processes have stored by now."""
        cache.clear()
        for store in self._stores.values():
            store.refresh()
            if self.options.force:
                store.forget_transient()

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Keep this thread off the core of the GPU worker, so that decisions do not disturb measurements."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores or before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def close(self, tuner: Tuner) -> Usage:
        """End the search of a tuner: drop its compilations, and return and count its usage."""
        self.queue.forget(tuner.task)
        self._began, self._evaluations = self._began or tuner.began, self._evaluations + tuner.evaluations
        return self._usage(tuner.began, tuner.evaluations)

    @property
    def usage(self) -> Usage:
        """Return the usage of all searches, from the first compiled config until now."""
        return self._usage(self._began, self._evaluations)

    def _usage(self, began: float | None, evaluations: int) -> Usage:
        now = time.monotonic()
        since = began or now
        return Usage(now - since, self.worker.busy_since(since), evaluations)

    def __enter__(self) -> "TuningSession":
        """Start the GPU worker, then the compilers."""
        with ExitStack() as entered:
            entered.enter_context(self.worker)
            self.worker.begin()  # the worker and this process open the driver, which takes long, at the same time
            Thread(target=importlib.import_module, args=(_STORES,), daemon=True).start()  # Optuna takes 0.4 s
            here = device.current()
            target = TARGETS.get(here.arch)
            if target is None:
                raise ValueError(f"cannot compile ahead of time for {here.arch}; known targets: {', '.join(TARGETS)}")
            self.queue = CompileQueue(entered.enter_context(CompilePool(target, self.options.workers, self._cores)))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
