"""Start processes: fresh ones, one after the other, or many that are started fast. None outlives the process that started it.

Does not know what their work is.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from pebble import ProcessPool

from kerneltune import fork_server
from kerneltune.temporary import process_folder

T = TypeVar("T")

TIMEOUT_S = 1800.0
_EXIT_GRACE_S = 5.0
_BOUND = """import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != {parent}:
        os._exit(1)
"""


def in_fresh_processes(
    count: int, work: Callable[..., T], *args: Any, timeout_s: float = TIMEOUT_S, first: Callable[[], Any] | None = None
) -> Iterator[T]:
    """Return what `work(*args)` returns in `count` processes; both are pickled. Only one process runs at a time.

    first: called in each, before what `work` needs is imported.

    Raises:
        ValueError: a process crashed or took longer than `timeout_s`. What `work` raises is raised here.
    """
    context = multiprocessing.get_context("spawn")
    for number in range(1, count + 1):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(sender, first, work, args))  # no daemon: it may have children
        process.start()
        sender.close()
        try:
            if not receiver.poll(timeout_s):
                raise ValueError(f"process {number} of {count} took longer than {timeout_s:g} s")
            result, error = receiver.recv()
            process.join(_EXIT_GRACE_S)
        except EOFError:
            process.join()
            raise ValueError(f"process {number} of {count} crashed: exit code {process.exitcode}") from None
        finally:  # also when interrupted: nothing goes on timing behind our back
            process.kill()
            process.join()
        if error is not None:
            raise error
        yield result


def run_bound(code: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process that may be of another version of this package, and return its errors and exit code.

    The process is killed as soon as the calling thread ends, also by SIGKILL (Linux); where waiting is interrupted, it is killed
    together with whatever it started.
    """
    command = [sys.executable, "-c", _BOUND.format(parent=os.getpid()) + code, *arguments]
    with subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        try:
            _, errors = process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, None, errors)


def _answer(sender: Connection, first: Callable[[], Any] | None, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Send what `work(*args)` returns or raises; Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_with_parent()
    answer: tuple[Any, Exception | None]
    try:
        if first is not None:
            first()
        answer = work(*args), None
    except Exception as error:  # raised again by `in_fresh_processes`
        answer = None, error
    sender.send(answer)


def _leave_with_parent() -> None:
    """Have this process end as soon as its parent does, whatever it is at: one that hangs would hold the GPU for good."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def fast_context() -> ForkServerContext:
    """Start processes that need not import torch, which takes seconds: fork them from a server that has done nothing else.

    They have the environment that the server began with: give them yours by `in_environment`. Like the server they do not hear
    Ctrl-C, which is their parent's to answer.
    """
    start_server()
    return multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Have the server of `fast_context` import torch and Triton while this process does something else; it may run already.

    Where kernels are interpreted it imports no Triton, which decides that when it is imported: not every process that the server
    starts interprets them. It imports nothing of this package, another copy of which may lie where the command is run.

    Blocked while the server is started, an interrupt is blocked in it for good; here it comes when the server has begun. The
    server ends with this process, however that ends, and leaves no socket.
    """
    triton = ["triton"] if "TRITON_INTERPRET" not in os.environ else []
    forkserver.set_forkserver_preload(["kerneltune.fork_server", "torch", *triton])
    resource_tracker.ensure_running()  # else the server starts it, and lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ[fork_server.VARIABLE] = f"{os.getpid()} {_folder_of_sockets()}"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[fork_server.VARIABLE]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _folder_of_sockets() -> str:
    """Return the folder for multiprocessing's sockets where this process has made it; empty where a parent has."""
    config = vars(multiprocessing.current_process())["_config"]  # what multiprocessing.util.get_temp_dir() goes by
    if "tempdir" in config:
        return ""
    config["tempdir"] = str(process_folder())
    return str(config["tempdir"])


@contextmanager
def side_by_side(count: int) -> Iterator[Callable[[Callable[[Any], T], Iterable[Any]], Iterator[T]]]:
    """Return a `map` that `count` processes work for, results in order; the usual `map` for one. What it maps is pickled.

    The processes do not hear Ctrl-C, which is their parent's to answer, and are gone at the end, whatever they are at.
    """
    if count == 1:
        yield map
        return
    pool = ProcessPool(count, context=fast_context())
    try:
        yield lambda work, items: iter(pool.map(work, items).result())
    finally:
        pool.stop()
        pool.join()


def in_environment(environment: Mapping[str, str], work: Callable[..., T], *args: Any) -> T:
    """Run `work(*args)` in a process of `fast_context` where os.environ is `environment`, from here on."""
    _leave_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    return work(*args)
