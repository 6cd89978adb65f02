"""Send requests to a process that may crash: a request that crashes, hangs or kills the process costs itself alone."""

import multiprocessing
import signal
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Self

from kerneltune.errors import first_line
from kerneltune.processes import end, start

_ENDED_FROM_OUTSIDE = (-signal.SIGTERM, 255)
"""Exit codes after SIGTERM: 255 if the server of processes got the signal, too."""
_START_TIMEOUT_S = 300.0
"""Seconds for the imports of a process, and to make its object."""


class WorkerCrashedError(Exception):
    """Report that a worker crashed, hung, was killed or was stopped; the message says how.

    Attributes:
        last_note: the last text that the request had told, see `Worker`; empty if there is none.
    """

    def __init__(self, reason: str = "", last_note: str = "") -> None:
        super().__init__(reason)
        self.last_note = last_note


class WorkerHungError(WorkerCrashedError):
    """Report that a request took too long."""


class WorkerStoppedError(WorkerCrashedError):
    """Report that this process, or a signal from outside, ended the worker."""


class Worker:
    """Send requests to an object in another process. Use as a context manager.

    The next request after a crash starts another process. One thread sends requests. Another thread may call `stop`, or leave
    the context. A request raises WorkerCrashedError if the process crashes over it, or if the worker is stopped. The object may
    call its attribute `tell` with a text before a step that may crash; the error then has the text, and the time limit of the
    request begins anew.

    Attributes:
        process: the present process; None before the first request and after a crash.
        is_closed: whether the worker was stopped for good.
        started: number of processes so far.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        has_children: bool = False,
        problem: Callable[[], str] = str,
        exit_grace_s: float = 0.0,
    ) -> None:
        """Start no process yet.

        Args:
            make: importable function that makes the object in the process.
            name: name of the worker in messages.
            environment: `os.environ` of the process; None for the environment of this process.
            has_children: the process may start processes.
            problem: importable function that returns why the process is of no further use after a request; empty if it is.
            exit_grace_s: seconds that a process has to end by itself.
        """
        self._start = partial(start, _serve, make, problem, environment=environment, is_daemon=not has_children)
        self._name, self._exit_grace_s = name, exit_grace_s
        self.process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._is_ready = False
        self._lock = Lock()
        self.is_asking = False
        self.is_closed = False
        self.started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process, even while another thread waits for its answer; no request starts another process."""
        self.is_closed = True
        self.end(asked_here=False)

    def begin(self) -> None:
        """Start a process, which makes its object while this process does other work."""
        with self._lock:
            self._connect()

    def _connect(self) -> Connection:
        """Return the pipe to the process, which is started if there is none, or if it has died since its last answer."""
        if self.is_closed:
            raise WorkerStoppedError(f"{self._name} was stopped")
        if self.process is not None and self.process.exitcode is not None and self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self.process is None or self._pipe is None:
            (self.process, self._pipe), self._is_ready = self._start(), False
            self.started += 1
        return self._pipe

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the object in the process; after `timeout_s` seconds the process is ended."""
        with self._lock:
            pipe, self.is_asking = self._connect(), True
        last_note = ""
        try:
            if not self._is_ready:
                self._receive(pipe, _START_TIMEOUT_S, last_note)
                self._is_ready = True
            pipe.send((method, arguments))
            while isinstance(said := self._receive(pipe, timeout_s, last_note), str):
                last_note = said
        except (EOFError, OSError) as error:
            code = self.end()
            error_type = WorkerStoppedError if self.is_closed or code in _ENDED_FROM_OUTSIDE else WorkerCrashedError
            reason = "was stopped" if self.is_closed else f"died: exit code {code}"
            raise error_type(f"{self._name} {reason}", last_note) from error
        finally:
            self.is_asking = False
        answer, problem = said
        if problem:
            self.end()
            raise WorkerCrashedError(problem, last_note)
        return answer

    def _receive(self, pipe: Connection, timeout_s: float | None, last_note: str) -> Any:
        if not pipe.poll(timeout_s):
            self.end()
            raise WorkerHungError(f"took longer than {timeout_s:g} s", last_note)
        return pipe.recv()

    def end(self, asked_here: bool = True) -> int | None:
        """End the process, by force if necessary, and return its exit code; None where another thread ends it.

        The next request starts another process. If `asked_here` is false, another thread may wait for an answer, so the pipe
        stays open until that thread finds its end.
        """
        with self._lock:
            process, pipe, in_use = self.process, self._pipe, self.is_asking and not asked_here
            self.process, self._pipe = None, None
        if process is None or pipe is None:
            return None
        if not in_use:
            pipe.close()
        return end(process, 0.0 if in_use else self._exit_grace_s)


def _serve(pipe: Connection, make: Callable[[], Any], problem_of: Callable[[], str]) -> None:
    """Answer requests in the worker's process until the process has a problem or the parent closes the pipe."""
    served = make()
    served.tell = pipe.send
    pipe.send("")  # ready for the first request, whose time limit begins now
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer, problem = getattr(served, method)(*arguments), ""
        except Exception as error:  # also missing memory for the inputs: the next request finds a clean process
            answer, problem = None, first_line(error)
        problem = problem or problem_of()
        pipe.send((answer, problem))
        if problem:
            return
