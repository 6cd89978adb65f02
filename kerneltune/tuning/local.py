"""A worker process for every GPU of this host.

Knows nothing of the work.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from kerneltune.plan import Options
from kerneltune.processes import fast_context, in_environment
from kerneltune.tuning.worker import Event, MakeWorker, RemoteTask, Worker, share_of_cores

_GRACE_S = 10.0


class LocalWorkers:
    """Workers as processes, each of which sees one GPU and has its share of the cores. Use as a context manager."""

    def __init__(self, family: str, options: Options, gpus: Sequence[str], make: MakeWorker = Worker) -> None:
        """gpus: as CUDA_VISIBLE_DEVICES takes them."""
        self._family, self._options, self._gpus, self._make = family, options, gpus, make
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self.count = len(gpus)

    def start(self, index: int) -> None:
        """Start a worker; it says when it is ready."""
        context = fast_context()
        self._pipes[index], theirs = context.Pipe()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": self._gpus[index]}
        arguments = (theirs, share_of_cores(index, self.count), self._family, self._options, self._make)
        process = context.Process(target=in_environment, args=(environment, _serve, *arguments))
        process.start()
        self._processes[index] = process  # not before: an interrupted start leaves nothing to wait for
        theirs.close()

    def give(self, index: int, order: RemoteTask) -> None:
        """Give a task to a worker; `next` finds out about a dead worker."""
        with suppress(OSError):
            self._pipes[index].send(order)

    def next(self) -> tuple[int, Event]:
        """Wait for what any worker has to say next."""
        heard = wait(list(self._pipes.values()))[0]
        index = next(number for number, pipe in self._pipes.items() if pipe is heard)
        try:
            event: Event = self._pipes[index].recv()
            return index, event
        except (EOFError, OSError):
            self.stop(index)
            return index, ("dead", f"exit code {self._processes[index].exitcode}")

    def stop(self, index: int) -> None:
        """End a worker: it leaves when it finds that nobody listens, by force if it must."""
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
            pipe.close()  # all at once: they leave together
        self._pipes.clear()
        for index in self._processes:
            self.stop(index)


def visible_gpus(wanted: str) -> list[str]:
    """Return the GPUs of this host that this process may use, `all` or the first so many, as CUDA_VISIBLE_DEVICES takes them.

    Raises:
        ValueError: there are not so many, or `wanted` is no number.
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
    """Work: carry out what comes through the pipe until nobody is there any more."""
    with make(family, options, cores) as worker, suppress(EOFError, OSError):
        pipe.send(("ready", worker.identity()))
        while True:
            for event in worker.events(pipe.recv()):
                pipe.send(event)
