"""Perform tuning tasks in a process without the files of the run: known trials come with a task, results go back.

Each worker has one GPU. On this host a worker is a process; `cluster` has the workers of a Ray cluster. A worker writes only
below its own temporary folder.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from threading import Thread
from typing import Any

from kerneltune import cache, device
from kerneltune.device import Device
from kerneltune.files import replace_text
from kerneltune.measuring.compare import commit
from kerneltune.processes import fast_context, held_folder, in_environment
from kerneltune.run_options import Options
from kerneltune.search.task import Task, Trial
from kerneltune.spec import Variant
from kerneltune.tune.session import TuningSession
from kerneltune.tune.tune_run import TuningResult, perform

_GRACE_S = 10.0

Event = tuple[str, Any]
"""`ready` with an Identity, `trial` with a config and its evaluation, `done` with a TuningResult, or `dead` with a reason."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The GPU, versions and commit that a worker's times depend on. All workers of a run have the same identity."""

    device: Device
    versions: tuple[tuple[str, str], ...]
    commit: str

    @classmethod
    def of_this_process(cls) -> "Identity":
        """Return the identity of this process."""
        return cls(device.current(), tuple(device.versions().items()), commit())

    def fingerprint(self, variant: Variant) -> dict[str, str]:
        """Return the driver, packages and source that times of a variant depend on."""
        return {**dict(self.versions), "driver": self.device.driver, "source_hash": variant.source_hash}

    @property
    def text(self) -> str:
        """The identity on one line."""
        packages = " ".join(f"{name} {version}" for name, version in self.versions)
        return f"{self.device.name}, driver {self.device.driver}, {packages}, commit {self.commit}"


@dataclass(frozen=True, slots=True)
class RemoteTask:
    """A task with the known trials and configs of its operator.

    Attributes:
        task: task to perform.
        following: next task that the worker will probably get.
        trials: stored trials that the search looks at.
        configs: text of the operator's file in the config cache; empty without a file.
    """

    task: Task
    following: Task | None
    trials: tuple[Trial, ...]
    configs: str


class Worker:
    """Performs tasks in sequence. Use as a context manager."""

    def __init__(self, family: str, options: Options, cores: frozenset[int] | None) -> None:
        """Make the worker's folder. `cores` are the cores that it may use; None for all cores."""
        self._family, self._cores = family, cores
        self._opened = ExitStack()
        root = self._opened.enter_context(held_folder())
        self._options = replace(options, results=root / "results", configs=root / "configs")
        self._session: TuningSession | None = None
        self._said: SimpleQueue[Event] = SimpleQueue()

    def identity(self) -> Identity:
        """Return the identity of the worker's GPU."""
        return Identity.of_this_process()

    def events(self, order: RemoteTask) -> Iterator[Event]:
        """Yield every new trial as soon as it is stored, then the result."""
        Thread(target=self._carry_out, args=(order,), daemon=True).start()
        kind = ""
        while kind != "done":
            kind, payload = self._said.get()
            yield kind, payload

    def _carry_out(self, order: RemoteTask) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # for this thread and the processes that it starts
        try:
            if self._session is None:
                session = TuningSession(self._options, lambda *trial: self._said.put(("trial", trial)))
                self._session = self._opened.enter_context(session)
            report = self._perform(self._session, order)
        except Exception as error:  # no order may end a worker
            problem = (
                f"not tuned: {order.task.op.name} {order.task.case.name}: {type(error).__name__}: {' '.join(str(error).split())}"
            )
            report = TuningResult(problem=problem)
        self._said.put(("done", report))

    def _perform(self, session: TuningSession, order: RemoteTask) -> TuningResult:
        task = order.task
        assert self._options.results is not None and self._options.configs is not None
        slug = device.current().slug
        session.know(task, order.trials)
        config_file = self._options.configs / slug / f"{task.op.name}.json"
        config_file.unlink(missing_ok=True)
        if order.configs:
            replace_text(config_file, order.configs)
        cache.clear()
        following = [order.following] if order.following is not None else []
        return perform(session, task, following, self._family)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes, and remove the folder."""
        self._opened.close()


MakeWorker = Callable[[str, Options, frozenset[int] | None], Worker]
"""`Worker`, or an importable function that makes a worker."""


def share_of_cores(index: int, count: int) -> frozenset[int] | None:
    """Return the cores for the index-th of `count` workers of this host; None (all) if there are more workers than cores."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    return frozenset(chosen) if chosen else None


class LocalWorkers:
    """Workers as processes with a GPU and a share of the cores each. Use as a context manager."""

    def __init__(self, family: str, options: Options, gpus: Sequence[str], make: MakeWorker = Worker) -> None:
        """Start no worker yet. `gpus` are names of GPUs in the form of CUDA_VISIBLE_DEVICES."""
        self._family, self._options, self._gpus, self._make = family, options, gpus, make
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self.count = len(gpus)

    def start(self, index: int) -> None:
        """Start a worker, which sends `ready`."""
        context = fast_context()
        self._pipes[index], theirs = context.Pipe()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": self._gpus[index]}
        arguments = (theirs, share_of_cores(index, self.count), self._family, self._options, self._make)
        process = context.Process(target=in_environment, args=(environment, _serve, *arguments))
        process.start()
        self._processes[index] = process  # after `start`, because an interrupted start leaves no process to wait for
        theirs.close()

    def give(self, index: int, order: RemoteTask) -> None:
        """Give a task to a worker; `next` reports a dead worker."""
        with suppress(OSError):
            self._pipes[index].send(order)

    def next(self) -> tuple[int, Event]:
        """Wait for the next event of any worker."""
        heard = wait(list(self._pipes.values()))[0]
        index = next(number for number, pipe in self._pipes.items() if pipe is heard)
        try:
            event: Event = self._pipes[index].recv()
            return index, event
        except (EOFError, OSError):
            self.stop(index)
            return index, ("dead", f"exit code {self._processes[index].exitcode}")

    def stop(self, index: int) -> None:
        """Close the pipe of a worker, at which it ends; kill it after 10 s."""
        pipe = self._pipes.pop(index, None)
        if pipe is not None:
            pipe.close()
        process = self._processes[index]
        process.join(_GRACE_S)
        if process.exitcode is None:
            process.kill()
            process.join()

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes.values():
            pipe.close()  # all pipes first, so that the workers end at the same time
        self._pipes.clear()
        for index in self._processes:
            self.stop(index)


def visible_gpus(wanted: str) -> list[str]:
    """Return the GPUs of this host that this process may use, `all` or the first N, in the form of CUDA_VISIBLE_DEVICES.

    Raises:
        ValueError: there are fewer GPUs, or `wanted` is no number.
    """
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


def _serve(pipe: Connection, cores: frozenset[int] | None, family: str, options: Options, make: MakeWorker) -> None:
    """Perform the tasks that come through the pipe until its other end is closed."""
    with make(family, options, cores) as worker, suppress(EOFError, OSError):
        pipe.send(("ready", worker.identity()))
        while True:
            for event in worker.events(pipe.recv()):
                pipe.send(event)
