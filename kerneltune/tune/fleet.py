"""Tune on several GPUs of this host, each with a process of its own.

The processes share the folders of the run: each stores its trials and configs where a single process stores them, under the
same locks. If a process dies over a task, another process performs the task and finds the stored trials. As on one GPU, an
error that `TuningSession.perform` raises ends the run.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Lock

from kerneltune import device
from kerneltune.plan import Options
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.processes.worker import Worker, WorkerCrashedError
from kerneltune.progress import Progress
from kerneltune.spec import TaskKey
from kerneltune.task import Task
from kerneltune.tune.session import TuningResult, TuningSession

ATTEMPTS = 3
"""Number of processes that may die over a task, and of processes of a GPU that may die without a finished task between."""


class Fleet:
    """Perform tasks on several GPUs of this host. A thread for each GPU hands tasks to the GPU's process.

    Attributes:
        finished: results of performed tasks.
    """

    def __init__(
        self, gpus: Sequence[str], options: Options, progress: Progress, make: Callable[..., TuningSession] = TuningSession
    ) -> None:
        """Take GPUs in the form of CUDA_VISIBLE_DEVICES; start no process yet.

        make: importable function that makes the session in a GPU's process.
        """
        self._progress = progress
        self._workers: dict[str, Worker] = {}
        for index, gpu in enumerate(gpus):
            make_here = partial(make, options, share_of_cores(index, len(gpus)))
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            self._workers[gpu] = Worker(
                make_here,
                "the process",
                environment=environment,
                has_children=True,
                passed_on=(ValueError, WorkerStoppedError),
                exit_grace_s=0.2,
            )
        self._queue: deque[Task] = deque()
        self._lock = Lock()
        self._deaths: Counter[str] = Counter()
        self._attempts: Counter[TaskKey] = Counter()
        self._reason = ""
        self.finished: list[TuningResult] = []

    def run(self, tasks: Sequence[Task]) -> list[TuningResult]:
        """Perform tasks, each on one GPU, and return their results."""
        self._progress.stage(f"tune on {len(self._workers)} GPUs", len(tasks))
        self._queue.extend(tasks)
        with ThreadPoolExecutor(len(self._workers)) as threads, ExitStack() as ending:
            for worker in self._workers.values():
                ending.callback(worker.stop)  # also after an interrupt: the threads end with the processes
            while self._queue:
                alive = [gpu for gpu in self._workers if self._deaths[gpu] < ATTEMPTS]
                if not alive:
                    raise ValueError(f"no GPU is left: {self._reason}")
                list(threads.map(self._work, alive))
        return self.finished

    def _work(self, gpu: str) -> None:
        """Perform tasks on a GPU until the queue is empty, or the GPU is of no use."""
        worker = self._workers[gpu]
        while self._deaths[gpu] < ATTEMPTS and not worker.is_stopped:
            task: Task | None = None
            try:
                name = worker.ask("gpu_name")
                if name != device.current().name:
                    self._reason = f"GPU {gpu} is {name}, expected {device.current().name}"
                    self._deaths[gpu] = ATTEMPTS
                    self._progress.note(f"left out: {self._reason}")
                    return
                with self._lock:
                    if not self._queue:
                        return
                    ahead = len(self._workers) - 1  # tasks that the other processes will take before
                    task, following = self._queue.popleft(), list(self._queue)[ahead : ahead + 1]
                self._finish(task, worker.ask("perform_in_fleet", task, following))
                self._deaths[gpu] = 0
            except WorkerCrashedError as error:
                self._on_dead(gpu, task, str(error))
            except (ValueError, WorkerStoppedError):  # of a folder or of the machine, as any other GPU would find
                if worker.is_stopped:
                    return
                for other in self._workers.values():
                    other.stop()
                raise

    def _on_dead(self, gpu: str, task: Task | None, reason: str) -> None:
        """Put the task of a dead process at the end of the queue, or give the task up.

        The other tasks come first: they tell whether the task or the GPU is broken.
        """
        self._deaths[gpu] += 1
        self._reason = reason
        self._progress.note(f"GPU {gpu}: {reason}")
        if task is None:
            return
        self._attempts[task.key] += 1
        if self._attempts[task.key] < ATTEMPTS:
            with self._lock:
                self._queue.append(task)
        else:
            text = f"not tuned: {task.key.label}: {ATTEMPTS} processes died over it, the last: {reason}"
            self._finish(task, TuningResult("failed", reason=text))

    def _finish(self, task: Task, result: TuningResult) -> None:
        with self._lock:
            self.finished.append(result)
            result.report(self._progress, task)


def share_of_cores(index: int, count: int) -> frozenset[int] | None:
    """Return the cores of the index-th of `count` processes; None (all) if there are more processes than cores."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    return frozenset(chosen) if chosen else None


def visible_gpus(selected: str) -> list[str]:
    """Return the GPUs of this host that this process may use, `all` or the first N, in the form of CUDA_VISIBLE_DEVICES."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES")  # torch may have counted before the variable was set
    visible = [*map(str, range(torch.cuda.device_count()))] if names is None else [name for name in names.split(",") if name]
    if selected == "all" and visible:
        return visible
    if not selected.isdecimal() or not 0 < int(selected) <= len(visible):
        raise ValueError(f"gpus: {selected!r}: expected all or a number of GPUs, {len(visible)} here")
    return visible[: int(selected)]
