"""Tune a sweep on the GPU of this process, or on several GPUs of this host, each with a process of its own.

The processes share the folders of the run: each stores its trials, configs and measured spaces where a single process stores
them, under the same locks. If a process dies over a task, another process performs the task and finds the stored trials.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from kerneltune import cache, device
from kerneltune.processes import end, start
from kerneltune.run_options import Options, Plan, Progress, require_gpu
from kerneltune.search.task import Task, TaskKey
from kerneltune.tune.candidates import widened
from kerneltune.tune.session import TuningSession
from kerneltune.tune.tune_run import Performed, TuningResult, TuningSummary, missing, perform, tell, tune_here

ATTEMPTS = 3
"""Number of processes that may die over a task, and of times that the process of a GPU is started."""
_GRACE_S = 10.0

Serve = Callable[[Connection, frozenset[int] | None, Options], None]
"""`serve`, or an importable function in its place."""


def serve(pipe: Connection, cores: frozenset[int] | None, options: Options) -> None:
    """Perform the tasks that come through a pipe, on the GPU of this process, until the other end of the pipe is closed.

    Args:
        pipe: first sends the name of the GPU; then receives a task with the tasks that probably follow, and sends the result.
        cores: cores of this process and of the processes that it starts; None for all.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    with suppress(EOFError, OSError):
        pipe.send(device.current().name)
        with TuningSession(options) as session:
            while True:
                task, following = pipe.recv()
                try:
                    session.refresh()
                    done = perform(session, task, following)
                except Exception as error:  # no task may end the process
                    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
                    done = TuningResult(problem=f"not tuned: {task.op.name} {task.case.name}: {text}")
                pipe.send(done)


@dataclass(slots=True)
class GpuProcess:
    """Hold the process of a GPU and the task that it performs.

    Attributes:
        process, pipe: the process, and the end of the pipe to it.
        task: task that the process performs; None before its first task and between tasks.
        is_ready: whether the process has named its GPU.
    """

    process: BaseProcess
    pipe: Connection
    task: Task | None = None
    is_ready: bool = False

    def stop(self, is_dead: bool = False) -> int | None:
        """End the process, by force if it starts or works on a task; return its exit code."""
        self.pipe.close()
        return end(self.process, _GRACE_S if is_dead or (self.is_ready and self.task is None) else 0.0)


class Fleet:
    """Hold the processes of several GPUs. Use as a context manager.

    Attributes:
        finished: performed tasks with their results.
    """

    def __init__(self, gpus: Sequence[str], options: Options, progress: Progress, target: Serve = serve) -> None:
        """Start no process yet; `gpus` are GPUs in the form of CUDA_VISIBLE_DEVICES."""
        self._gpus, self._options, self._progress, self._target = gpus, options, progress, target
        self._processes: dict[int, GpuProcess] = {}
        self._deaths: Counter[int] = Counter()
        self._attempts: Counter[TaskKey] = Counter()
        self._reason = ""
        self.finished: list[Performed] = []

    def run(self, tasks: Sequence[Task]) -> list[Performed]:
        """Perform tasks, each on one GPU, and return them with their results."""
        self._progress.stage(f"tune on {len(self._gpus)} GPUs", len(tasks))
        queue = deque(tasks)
        for index in range(len(self._gpus)):
            self._start(index)
        while queue or any(one.task is not None for one in self._processes.values()):
            if not self._processes:
                raise ValueError(f"no GPU is left: {self._reason}")
            for one in self._processes.values():
                if queue and one.is_ready and one.task is None:
                    one.task = queue.popleft()
                    ahead = len(self._processes) - 1  # tasks that the other processes will take before
                    with suppress(OSError):  # of a dead process, which `_hear` finds
                        one.pipe.send((one.task, list(queue)[ahead : ahead + 1]))
            self._hear(queue)
        return self.finished

    def _start(self, index: int) -> None:
        cores, environment = share_of_cores(index, len(self._gpus)), os.environ | {"CUDA_VISIBLE_DEVICES": self._gpus[index]}
        self._processes[index] = GpuProcess(*start(self._target, cores, self._options, environment=environment))

    def _hear(self, queue: deque[Task]) -> None:
        """Wait for a process: it names its GPU, sends a result, or has died."""
        heard = wait([one.pipe for one in self._processes.values()])[0]
        index, one = next((index, one) for index, one in self._processes.items() if one.pipe is heard)
        try:
            said = one.pipe.recv()
        except (EOFError, OSError):
            self._on_dead(index, queue)
            return
        if one.is_ready:
            assert one.task is not None
            self._finish(one.task, said)
            one.task = None
        elif said == device.current().name:
            one.is_ready = True
        else:
            self._reason = f"GPU {self._gpus[index]} is {said}, expected {device.current().name}"
            self._progress.note(f"left out: {self._reason}")
            self._processes.pop(index).stop()

    def _on_dead(self, index: int, queue: deque[Task]) -> None:
        """Put the task of a dead process back into the queue, and start the process again."""
        dead = self._processes.pop(index)
        task = dead.task
        self._reason = f"exit code {dead.stop(is_dead=True)}"
        self._progress.note(f"the process of GPU {self._gpus[index]} died: {self._reason}")
        self._deaths[index] += 1
        if task is not None:
            self._attempts[task.key] += 1
            if self._attempts[task.key] < ATTEMPTS:
                queue.appendleft(task)
            else:
                problem = f"not tuned: {task.label}: {ATTEMPTS} processes died over it, the last: {self._reason}"
                self._finish(task, TuningResult(problem=problem))
        if self._deaths[index] < ATTEMPTS:
            self._start(index)

    def _finish(self, task: Task, done: TuningResult) -> None:
        self.finished.append((task, done))
        tell(self._progress, task, done)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._processes.values():
            one.stop()


def run_tune(plan: Plan, progress: Progress) -> TuningSummary:
    """Search the selected bench cases, or measure their whole spaces."""
    for op in dict.fromkeys(entry.op for entry in plan.cases() if plan.options.knobs):
        for variant in plan.variants(op):
            if variant.config is not None:
                widened(variant, plan.options.knobs)  # raises for an unknown knob
    gpus = visible_gpus(plan.options.gpus) if plan.options.gpus else []
    require_gpu("tune")
    slug = device.current().slug
    tasks, kept = missing(plan, progress)
    if not tasks:
        return TuningSummary(slug, [], kept=kept)
    if gpus:
        with Fleet(gpus, plan.options, progress) as fleet:
            finished = fleet.run(tasks)
    else:
        finished = tune_here(plan, tasks, progress)
    cache.clear()
    stored = [done.entry for _, done in finished if done.entry is not None]
    return TuningSummary(slug, stored, len(finished), sum(bool(done.problem) for _, done in finished), kept)


def share_of_cores(index: int, count: int) -> frozenset[int] | None:
    """Return the cores of the index-th of `count` processes; None (all) if there are more processes than cores."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    return frozenset(chosen) if chosen else None


def visible_gpus(wanted: str) -> list[str]:
    """Return the GPUs of this host that this process may use, `all` or the first N, in the form of CUDA_VISIBLE_DEVICES."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        found = [str(index) for index in range(torch.cuda.device_count())]
    else:
        found = [name for name in given.split(",") if name]  # torch may have counted before the variable was set
    if wanted == "all" and found:
        return found
    if not wanted.isdecimal() or not 0 < int(wanted) <= len(found):
        raise ValueError(f"gpus: {wanted!r}: expected all or a number of GPUs, {len(found)} here")
    return found[: int(wanted)]
