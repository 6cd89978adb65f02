"""Send requests to a process that may crash: a request that crashes, hangs or kills the process costs itself alone."""

import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from pathlib import Path
from threading import Lock
from typing import Any, Self

from kerneltune.errors import first_line, warning_line
from kerneltune.processes.start import WorkerStoppedError, end, start, start_server, telling

_ENDED_FROM_OUTSIDE = (-signal.SIGTERM, 255)
"""Exit codes after SIGTERM: 255 if the server of processes got the signal, too."""
_ERROR = re.compile(r"^.*(?:error|assert).*$", re.IGNORECASE | re.MULTILINE)
_LONGEST = 200
"""Characters of a printed line in a message."""
_START_TIMEOUT_S = 300.0
"""Seconds for the imports of a process, and to make its object."""


class WorkerCrashedError(Exception):
    """Report that a worker crashed, hung or was killed over a request; the message says how.

    Attributes:
        last_note: the last text that the request had told, see `Worker`; empty if there is none.
    """

    def __init__(self, reason: str = "", last_note: str = "") -> None:
        super().__init__(reason)
        self.last_note = last_note


class WorkerHungError(WorkerCrashedError):
    """Report that a request took too long."""


class State(Enum):
    """Name the states of a worker's process."""

    MISSING = auto()  # no process runs; the next request starts a process
    STARTING = auto()
    IDLE = auto()
    ANSWERING = auto()
    STOPPED = auto()  # no process runs, and the next request fails


class Worker:
    """Send requests to an object in another process. Use as a context manager.

    After a crash, or an exception of the object, which may still hold memory of the GPU, the next request starts another process.
    One thread sends requests. Another thread may call `stop`, or leave the context. A request raises WorkerCrashedError if the
    process crashes over it, and WorkerStoppedError if the worker is stopped. The object may `tell` a text before a step that
    may crash; the error then has the text, and the time limit of the request begins anew.

    Attributes:
        state: state of the process.
        process: the present process; None while no process runs.
        started: number of processes so far.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        has_children: bool = False,
        quiet: tuple[str, ...] = (),
        problem: Callable[[], str] = str,  # str() is empty: no problem
        passed_on: tuple[type[Exception], ...] = (),
        exit_grace_s: float = 0.0,
    ) -> None:
        """Start no process yet.

        Args:
            make: importable function that makes the object in the process.
            name: name of the worker in messages.
            environment: `os.environ` of the process; None for the environment of this process.
            has_children: the process may start processes.
            quiet: methods whose output is not shown, because Triton prints whole kernels where a config does not compile; the
                message of a crash quotes the first error.
            problem: importable function that returns why the process is of no further use after a request; empty if it is.
            passed_on: types of the object's exceptions that a request raises as they are, not as a WorkerCrashedError.
            exit_grace_s: seconds that a process has to end by itself.
        """
        self._start = partial(start, _serve, make, problem, passed_on, quiet, environment=environment, is_daemon=not has_children)
        self._quiet, self._output = quiet, Path()
        self._passed_on = passed_on
        self._name, self._exit_grace_s = name, exit_grace_s
        self.process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._lock = Lock()
        self.state = State.MISSING
        self.started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_stopped(self) -> bool:
        """Return whether no request starts another process."""
        return self.state is State.STOPPED

    def stop(self) -> None:
        """End the process, even while another thread waits for its answer; no request starts another process."""
        self.end(State.STOPPED)

    def end(self, state: State = State.MISSING) -> int | None:
        """End the process, by force if necessary, and return its exit code; None where another thread ends it.

        state: the state from now on, in which the next request starts another process or, if it is STOPPED, fails.
        """
        with self._lock:
            process, pipe = self.process, self._pipe
            is_awaited = state is State.STOPPED and self.state is State.ANSWERING
            self.process, self._pipe = None, None
            self.state = self.state if self.is_stopped else state
        if process is None or pipe is None:
            return None
        if not is_awaited:  # a thread that waits for the answer finds the end of the pipe
            pipe.close()
        return end(process, 0.0 if is_awaited else self._exit_grace_s)  # a process that still answers would use up the grace

    def begin(self) -> None:
        """Start a process, which makes its object while this process does other work."""
        with self._lock:
            self._connect()

    def _connect(self) -> Connection:
        """Return the pipe to the process, which is started if there is none, or if it has died since its last answer."""
        if self.is_stopped:
            raise WorkerStoppedError(f"{self._name} was stopped")
        if self.process is not None and self.process.exitcode is not None and self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self.process is None or self._pipe is None:
            start_server()  # its folder ends with this process
            self._output = Path(get_temp_dir()) / f"output-{id(self)}"
            (self.process, self._pipe), self.state = self._start(self._output), State.STARTING
            self.started += 1
        return self._pipe

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the object in the process; after `timeout_s` seconds the process is ended."""
        request = ForkingPickler.dumps((method, arguments))  # an argument that cannot be pickled leaves the process as it is
        with self._lock:
            pipe = self._connect()
            is_starting, self.state = self.state is State.STARTING, State.ANSWERING
        last_note = ""
        try:
            if is_starting:
                self._receive(pipe, _START_TIMEOUT_S, last_note)
            pipe.send_bytes(request)
            while isinstance(message := self._receive(pipe, timeout_s, last_note), str):
                last_note = message
        except (EOFError, OSError) as error:
            code = self.end()
            if self.is_stopped:
                raise WorkerStoppedError(f"{self._name} was stopped") from error
            if code in _ENDED_FROM_OUTSIDE:
                raise WorkerStoppedError(f"{self._name} was ended from outside: exit code {code}") from error
            raise WorkerCrashedError(f"{self._name} died: exit code {code}{self._printed_error(method)}", last_note) from error
        except BaseException:  # an interrupt: the process would send this answer to the next request
            self.end()
            raise
        with self._lock:
            self.state = State.IDLE if self.state is State.ANSWERING else self.state
        answer, problem = message
        if problem:
            self.end()
            raise WorkerCrashedError(problem, last_note)
        if isinstance(answer, self._passed_on):
            raise answer
        return answer

    def _printed_error(self, method: str) -> str:
        """Return `: text`, the first error that the process printed in a quiet request; empty if it printed none."""
        text = self._output.read_text(errors="replace") if method in self._quiet and self._output.exists() else ""
        found = _ERROR.search(text)
        return f": {found[0].strip()[:_LONGEST]}" if found else ""

    def _receive(self, pipe: Connection, timeout_s: float | None, last_note: str) -> Any:
        if not pipe.poll(timeout_s):
            self.end()
            raise WorkerHungError(f"took longer than {timeout_s:g} s", last_note)
        return pipe.recv()


def _serve(
    pipe: Connection,
    make: Callable[[], Any],
    problem_of: Callable[[], str],
    passed_on: tuple[type[Exception], ...] = (),
    quiet: tuple[str, ...] = (),
    output: Path | None = None,
) -> None:
    """Answer requests in the worker's process until the process has a problem or the parent closes the pipe."""
    warnings.formatwarning = lambda *given, **_: warning_line(*given) + "\n"
    served = make()
    with suppress(EOFError, OSError), telling(pipe.send):  # the parent has closed the pipe
        pipe.send("")  # ready for the first request, whose time limit begins now
        while True:
            method, arguments = pipe.recv()
            try:
                with _into(output if method in quiet else None):
                    answer, problem = getattr(served, method)(*arguments), ""
            except passed_on as error:
                answer, problem = error, ""
            except Exception as error:  # also missing memory for the inputs: the next request finds a clean process
                answer, problem = None, first_line(error)
            problem = problem or problem_of()
            pipe.send((answer, problem))
            if problem:
                return


@contextmanager
def _into(path: Path | None) -> Iterator[None]:
    """Let this process, libraries in C++ included, print to a new file in place of stdout and stderr; None changes nothing."""
    if path is None:
        yield
        return
    shown = [os.dup(number) for number in (1, 2)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    try:
        _redirect((file, file))
        yield
    finally:
        _redirect(shown)
        for number in (*shown, file):
            os.close(number)


def _redirect(numbers: Sequence[int]) -> None:
    """Let stdout and stderr be open files, by their numbers."""
    for stream, number, target in zip((sys.stdout, sys.stderr), (1, 2), numbers, strict=True):
        stream.flush()
        os.dup2(target, number)
