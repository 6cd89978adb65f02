"""Call functions in forks of this process, so that a kernel that crashes ends a single call.

Of the values that a fork writes, this process sees `shared_bytes` alone.
"""

import ctypes
import faulthandler
import importlib
import mmap
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, NamedTuple, TypeVar

from kerneltune.errors import PLACE, place_in_kernel, wrapped_by_interpreter
from kerneltune.processes.start import WorkerStoppedError, end, start, telling

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


class ForkCrashedError(RuntimeError):
    """Report that a fork ended before its function returned."""


class _Answer(NamedTuple):
    """Hold the last message of a fork: the result of its function, or the function's exception with the cause."""

    value: Any = None
    error: BaseException | None = None
    cause: BaseException | None = None


def shared_bytes(count: int) -> Any:
    """Return zeros that forks of this process write to as well, (count,) uint8."""
    import torch

    return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8) if count else torch.zeros(0, dtype=torch.uint8)


class Fork(Generic[T]):
    """Call a function in a fork of this process, which ends with this process.

    Attributes:
        pipe: can be read when the fork tells something, returns or ends.
        last_note: the last object that the function passed to `processes.tell`; None before the first.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        if "triton" in sys.modules:  # Triton's imports at the first launch of a process: 0.03 of the 0.04 s of a small launch
            with suppress(ImportError):
                importlib.import_module("triton.experimental.gluon")
        self.last_note: Any = None
        self._answer: _Answer | None = None
        with warnings.catch_warnings():  # Python warns of this process's threads, which the fork neither has nor needs
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process, self.pipe = start(_work_and_exit, work, method="fork")

    def receive(self) -> bool:
        """Wait for a message of the fork and keep it; return whether the message was the last."""
        try:
            message = self.pipe.recv()
        except EOFError:
            return True
        if not isinstance(message, _Answer):
            self.last_note = message
            return False
        self._answer = message
        return True

    def result(self) -> T:
        """Return the function's result, or raise its exception with the cause.

        Raises:
            ForkCrashedError: the fork ended before its function returned.
            WorkerStoppedError: SIGTERM ended the fork.
        """
        try:
            while not self.receive():
                pass
            self._process.join()
        finally:
            code = self.end() or 0
        if self._answer is None and code == -signal.SIGTERM:
            raise WorkerStoppedError("a process of the command was ended from outside: SIGTERM")
        if self._answer is None:
            raise ForkCrashedError(f"crashed: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")
        if self._answer.error is not None:
            raise self._answer.error from self._answer.cause
        return self._answer.value  # type: ignore[no-any-return]

    def end(self) -> int | None:
        """Kill the fork if it runs; return its exit code."""
        self.pipe.close()
        return end(self._process)


def run_forked(work: Callable[[], object]) -> None:
    """Call a function in a fork of this process and wait for its end; raise as `Fork.result` does, but return nothing."""

    def call() -> None:
        work()

    Fork(call).result()


def _work_and_exit(pipe: Connection, work: Callable[[], Any]) -> None:
    """Call a function, send its result or its exception, and end the process without running atexit."""
    import torch

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        torch.set_num_threads(1)  # the other threads are not in the fork
        faulthandler.disable()  # the parent reports the crash
        try:
            with telling(pipe.send):
                value = work()
            pipe.send(_Answer(value))
        except BaseException as error:  # whatever it is, this process ends
            if type(error) is SystemExit:
                error = ForkCrashedError(f"{place_in_kernel([error])}ended the process: SystemExit: {error.code}")
            chain = wrapped_by_interpreter(error)
            setattr(chain[-1], PLACE, place_in_kernel(chain))
            cause = chain[-1] if len(chain) > 1 else error.__cause__
            pipe.send(_Answer(error=_sendable(error), cause=_sendable(cause)))
        sys.stdout.flush()
    finally:
        os._exit(0)


def _sendable(error: BaseException | None) -> BaseException | None:
    """Return an error, or a RuntimeError with its text if it cannot be sent."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # the error of a stranger's code may hold anything
        return RuntimeError(f"{type(error).__name__}: {error}")
