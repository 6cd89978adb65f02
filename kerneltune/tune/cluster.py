"""Start a worker on every GPU of a Ray cluster. Ray is imported at the first use."""

import importlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from kerneltune.run_options import Options
from kerneltune.spec import PLUGINS
from kerneltune.tune.worker import Event, Identity, MakeWorker, RemoteTask, Worker, share_of_cores

_REACH_S = 5.0
_ASK_S = 1.0
_GONE_S = 30.0
"""Seconds without any GPU in the cluster after which its workers count as dead."""


class RayWorkers:
    """Workers as Ray actors with an exclusive GPU each. Use as a context manager."""

    def __init__(
        self, family: str, options: Options, count: int | None = None, make: MakeWorker = Worker, gpus_each: float = 1
    ) -> None:
        """Connect to the cluster of `options.ray`.

        Args:
            family: name of the sweep.
            options: options of the run.
            count: number of workers; None for the number of GPUs in the cluster.
            make: makes a worker.
            gpus_each: GPUs of a worker, 0 in tests.

        Raises:
            ValueError: ray is not installed, the cluster cannot be reached, or it has too few GPUs.
        """
        _reach(options.ray)
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ValueError("ray: not installed: pip install 'kerneltune[ray]'") from None
        self._family, self._options, self._make, self._gpus_each = family, options, make, gpus_each
        try:
            plugins = {name: os.environ[name] for name in (PLUGINS,) if name in os.environ}
            self._ray.init(
                address=options.ray, log_to_driver=False, logging_level=logging.WARNING, runtime_env={"env_vars": plugins}
            )
        except Exception as error:  # ray raises many types of errors
            raise ValueError(f"ray: {options.ray!r}: cannot connect: {' '.join(str(error).split())[:200]}") from error
        offered = self._gpus()
        self.count = count or offered
        if gpus_each and not 0 < self.count <= offered:
            self._ray.shutdown()
            raise ValueError(f"ray: {options.ray!r}: {offered} GPUs in the cluster, expected {count or 'some'}")
        self._actors: dict[int, Any] = {}
        self._waiting: dict[int, Any] = {}

    def start(self, index: int) -> None:
        """Start a worker on a free GPU; it sends `ready`."""
        actor = self._ray.remote(_RayWorker).options(num_gpus=self._gpus_each, num_cpus=1, max_restarts=0)
        self._actors[index] = actor.remote(self._family, self._options, self._make)
        self._waiting[index] = self._actors[index].identity.remote()

    def give(self, index: int, order: RemoteTask) -> None:
        """Give a task to a worker; `next` reports a dead worker."""
        self._waiting[index] = self._actors[index].events.options(num_returns="streaming").remote(order)

    def next(self) -> tuple[int, Event]:
        """Wait for the next event of any worker. Report a worker as dead if all workers wait and the cluster has no GPU left."""
        hoped = time.monotonic()
        while not (said := self._ray.wait(list(self._waiting.values()), num_returns=1, timeout=_ASK_S)[0]):
            if self._is_any_at_work() or self._gpus() >= self._gpus_each:
                hoped = time.monotonic()
            elif time.monotonic() - hoped >= _GONE_S:
                index = next(iter(self._waiting))
                self.stop(index)
                return index, ("dead", "no GPU left in the cluster")
        (heard,) = said
        index = next(number for number, waiting in self._waiting.items() if waiting is heard)
        try:
            if isinstance(heard, self._ray.ObjectRef):
                del self._waiting[index]
                return index, ("ready", self._ray.get(heard))
            event: Event = self._ray.get(next(heard))
            if event[0] == "done":
                del self._waiting[index]
            return index, event
        except (self._ray.exceptions.RayError, StopIteration) as error:
            self.stop(index)
            return index, ("dead", " ".join(str(error).split())[:200] or type(error).__name__)

    def _is_any_at_work(self) -> bool:
        return not all(isinstance(waiting, self._ray.ObjectRef) for waiting in self._waiting.values())

    def _gpus(self) -> int:
        return int(self._ray.cluster_resources().get("GPU", 0))

    def stop(self, index: int) -> None:
        """End a worker and free its GPU."""
        self._waiting.pop(index, None)
        self._ray.kill(self._actors[index])

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        for index in self._actors:
            self.stop(index)
        self._ray.shutdown()


def _reach(address: str) -> None:
    """Raise ValueError if no server listens at the address, because ray would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"ray: {address!r}: expected HOST:PORT, auto or local")
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except OSError as error:
        raise ValueError(f"ray: {address!r}: cannot connect: {error.strerror or error}") from error


class _RayWorker:
    """A worker with the cores of its host divided by the GPUs of its host."""

    def __init__(self, family: str, options: Options, make: MakeWorker) -> None:
        ray: Any = importlib.import_module("ray")
        context = ray.get_runtime_context()
        mine, node = context.get_accelerator_ids().get("GPU", []), context.get_node_id()
        gpus = next((int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["NodeID"] == node), 0)
        within = bool(mine) and mine[0].isdecimal() and int(mine[0]) < gpus
        self._worker = make(family, options, share_of_cores(int(mine[0]), gpus) if within else None)

    def identity(self) -> Identity:
        """Return the identity of the worker's GPU."""
        return self._worker.identity()

    def events(self, order: RemoteTask) -> Iterator[Event]:
        """Yield the events of the worker."""
        yield from self._worker.events(order)
