"""Run a launch of the interpreter in a fork of this process, so that a kernel that crashes costs its launch alone.

The fork shares `shared_bytes` with this process, and nothing else that it writes.
"""

import faulthandler
import mmap
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from kerneltune.errors import PLACE, place_in_kernel, wrapped_by_interpreter


class LaunchCrashedError(RuntimeError):
    """A launch ended the process that it ran in."""


def shared_bytes(count: int) -> Any:
    """Return zeros that forks of this process write to as well, (count,) uint8."""
    import torch

    return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8) if count else torch.zeros(0, dtype=torch.uint8)


def run_forked(work: Callable[[], Any]) -> None:
    """Call a function in a fork of this process. Its exceptions are raised here, with their causes.

    Raises:
        LaunchCrashedError: a signal ended the fork.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # of threads, which the fork does not have and does not need
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _work_and_exit(work, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as stream:
            said = stream.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise LaunchCrashedError(f"crashed: {signal.Signals(os.WTERMSIG(status)).name}")
    if said:
        error, cause = pickle.loads(said)  # written by the fork, which is this program
        raise error from cause


def _work_and_exit(work: Callable[[], Any], writer: int) -> None:
    """Call a function, send its exception, and end the process without running atexit."""
    import torch

    torch.set_num_threads(1)  # the other threads are not in the fork
    faulthandler.disable()  # the parent says what happened
    try:
        work()
    except BaseException as error:  # whatever it is, this process ends
        chain = wrapped_by_interpreter(error)
        setattr(chain[-1], PLACE, place_in_kernel(chain))
        cause = chain[-1] if len(chain) > 1 else error.__cause__
        with os.fdopen(writer, "wb") as stream:
            stream.write(pickle.dumps((_sendable(error), _sendable(cause))))
    finally:
        sys.stdout.flush()
        os._exit(0)


def _sendable(error: BaseException | None) -> BaseException | None:
    """Return an error, or a RuntimeError with its text if it cannot be sent."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # the error of a stranger's code may hold anything
        return RuntimeError(f"{type(error).__name__}: {error}")
