"""Own the GPU worker, the compile pool, the trial stores and the compile queue, which all searches of a run share."""

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
        self._stores: dict[tuple[str, str], TrialStore] = {}

    def tuner(self, task: Task) -> Tuner:
        """Return a tuner of a task that knows the stored trials; `force` forgets transient failures."""
        store = self._stores.get((task.op.name, task.variant.name))
        if store is None:
            store = open_store(task.op, task.variant, self.options.results, self.options.force)
            self._stores[task.op.name, task.variant.name] = store
        return Tuner(task, store, self.worker, self.queue, self.options.force or bool(self.options.knobs))

    def refresh(self) -> None:
        """Read the trials and configs that other processes have stored by now."""
        cache.clear()
        for store in self._stores.values():
            store.refresh()

    @contextmanager
    def deciding(self) -> Iterator[None]:
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
            here = device.current()
            target = TARGETS.get(here.arch)
            if target is None:
                raise ValueError(f"cannot compile ahead of time for {here.arch}; known targets: {', '.join(TARGETS)}")
            self.queue = CompileQueue(entered.enter_context(CompilePool(target, self.options.workers, self._cores)))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
