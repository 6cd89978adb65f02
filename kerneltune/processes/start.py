"""Start processes of this package, fresh or forked. Every process ends with the process that started it.

A process keeps its temporary folder locked. If SIGKILL ends the process, the lock ends, and the next process that makes a folder
removes this folder.

The server of `start_server` imports this module first, which binds the server to its parent.
"""

import ast
import atexit
import functools
import inspect
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock, Thread
from types import FrameType, TracebackType
from typing import Any, Literal, TypeVar

T = TypeVar("T")

TIMEOUT_S = 1800.0
_PREFIX = "ktune-held-"
"""Beginning of the names of temporary folders."""
_LONGEST = 107 - len(f"/{_PREFIX}12345678/listener-12345678")
"""Longest path, in bytes, of a folder that can hold our sockets: the system takes 107 bytes of a socket's path."""
_SHORT = Path("/tmp")
_SERVER = "KERNELTUNE_FORK_SERVER"
"""Environment variable of the server: its parent's id, a blank, and the folder of its socket where the parent has made it."""
_STARTING = Lock()
"""Held while this process starts the server."""
_SEND_NOTE: ContextVar[Callable[[object], None]] = ContextVar("tell", default=lambda _note: None)
_POLL_S = 0.25
_EXIT_GRACE_S = 5.0


class WorkerStoppedError(Exception):
    """Report that this process, or a signal from outside, ended a worker or a fork: its request is not to blame."""


def start(
    work: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    method: Literal["forkserver", "spawn", "fork"] = "forkserver",
    is_daemon: bool = False,
) -> tuple[BaseProcess, Connection]:
    """Start a process that calls `work(pipe, *arguments)`, and return the process with the other end of the pipe.

    Args:
        work: function; importable where the process is no fork of this process.
        arguments: arguments, which are pickled where the process is no fork of this process.
        environment: `os.environ` of the process; None for the environment of this process.
        method: the process is forked from the server of `start_server`, imports everything anew, or is forked from this process.
        is_daemon: the process has no children of its own, and need not be waited for.
    """
    if method == "forkserver":
        start_server()
    elif method == "spawn":
        _require_guard()
    context: Any = multiprocessing.get_context(method)
    pipe, theirs = context.Pipe()
    call: tuple[Any, ...] = (work, theirs, *arguments)
    if method != "fork":
        call = (in_environment, dict(os.environ if environment is None else environment), *call)
    process = context.Process(target=call[0], args=call[1:], daemon=is_daemon)
    process.start()
    theirs.close()
    return process, pipe


def _require_guard() -> None:
    """Raise ValueError where a new process, which executes the program's file, would come here as well.

    multiprocessing executes neither a program without a file nor the `__main__` of a package.
    """
    main, frame = sys.modules["__main__"], inspect.currentframe()
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or (spec is not None and spec.name.endswith("__main__")):
        return
    while frame is not None and not (frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    if frame is not None and not _is_guarded(file, frame.f_lineno):
        guard = 'expected below `if __name__ == "__main__":`'
        raise ValueError(f"{file}:{frame.f_lineno}: starts processes, each of which executes this file: {guard}")


@functools.cache
def _is_guarded(file: str, line: int) -> bool:
    """Return whether a condition about the module's name or the process stands above a line; true if the file is no Python."""
    try:
        nodes = [*ast.walk(ast.parse(Path(file).read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return True
    conditions = [node for node in nodes if isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or line)]
    return any(re.search("__name__|[Pp]rocess", ast.unparse(node.test)) for node in conditions)


def tell(note: object) -> None:
    """Send a note to the parent, before a step that may crash, if this process is a fork or answers requests of a worker."""
    _SEND_NOTE.get()(note)


@contextmanager
def telling(send: Callable[[object], None]) -> Iterator[None]:
    """Let `tell` send notes by a function."""
    token = _SEND_NOTE.set(send)
    try:
        yield
    finally:
        _SEND_NOTE.reset(token)


def end(process: BaseProcess, grace_s: float = 0.0) -> int | None:
    """Wait some seconds for the end of a process, then kill it with the programs that it runs; return its exit code."""
    process.join(grace_s)
    if process.exitcode is None:
        assert process.pid
        with suppress(ProcessLookupError):  # a fork, or a process that has just begun, leads no group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(_EXIT_GRACE_S)
        if process.exitcode is None and (stat := _stat(process.pid)):  # the server, which tells exit codes, stalls
            return os.waitstatus_to_exitcode(int(stat[-1])) or None
    return process.exitcode


def _stat(pid: int) -> list[str]:
    """Return the state, the parent, … and the exit status of a process, as the system tells them; empty of a missing process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def in_fresh_processes(count: int, work: Callable[..., T], *args: Any, timeout_s: float = TIMEOUT_S) -> Iterator[T]:
    """Run `work(*args)` in `count` processes, one process after another, and yield each result; all values are pickled."""
    for number in range(1, count + 1):
        process, pipe = start(_answer, work, args, method="spawn")
        try:
            if not pipe.poll(timeout_s):
                raise ValueError(f"process {number} of {count} took longer than {timeout_s:g} s")
            result, error = pipe.recv()
            process.join(_EXIT_GRACE_S)
        except EOFError:
            process.join()
            raise ValueError(f"process {number} of {count} crashed: exit code {process.exitcode}") from None
        finally:  # also after an interrupt, so that the process does not go on timing
            end(process)
        if error is not None:
            raise error
        yield result


def _answer(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Send the result or the exception of `work(*args)`; ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer: tuple[Any, Exception | None]
    try:
        answer = work(*args), None
    except Exception as error:  # raised again by `in_fresh_processes`
        answer = None, error
    pipe.send(answer)


def start_server() -> None:
    """Let a server, which may run already, import torch and Triton while this process does something else.

    Processes that are forked from the server need not import them, which takes seconds. They begin with the environment of the
    server; `in_environment` gives them the environment of their parent. Like the server they ignore Ctrl-C, which their parent
    handles.

    Where kernels are interpreted, the server does not import Triton: Triton decides at its import whether to interpret, and some
    processes of the server compile. The server imports no other module of this package, because the current folder may hold
    another copy.

    SIGINT is blocked while the server starts, so that the server inherits the block; this process gets the signal after the
    start. The server ends with this process, however this process ends, and leaves no socket.
    """
    _require_guard()
    triton = ["triton"] if "TRITON_INTERPRET" not in os.environ else []
    forkserver.set_forkserver_preload([__name__, "torch", *triton])
    resource_tracker.ensure_running()  # else the server starts it, and lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _STARTING:  # another thread may start a process, too
            config = vars(multiprocessing.current_process())["_config"]  # multiprocessing.util.get_temp_dir() reads "tempdir"
            folder = "" if "tempdir" in config else config.setdefault("tempdir", str(process_folder()))
            os.environ[_SERVER] = f"{os.getpid()} {folder}"
            forkserver.ensure_running()
    finally:
        os.environ.pop(_SERVER, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_environment(environment: Mapping[str, str], work: Callable[..., T], *args: Any) -> T:
    """Set os.environ of this process, which begins, to `environment`, and run `work(*args)`.

    The process leads a group of its own, with the programs that it will run. The group ends as soon as the parent ends: a kernel
    that hangs would hold the GPU, ptxas a core.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    Thread(target=end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    return work(*args)


def _bind(parent: int, folder: str) -> None:
    """Let this process, the server, end within half a second of its parent, also during its imports, which take seconds.

    The server then removes the folder of its socket, because its parent could not. The server's own loop would notice the
    parent's end only after the end of every child, because a child holds the pipe to the parent.
    """

    def look(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

    if folder:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.excepthook = functools.partial(_show_error, os.getpid(), parent)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _POLL_S, _POLL_S)


def _show_error(server: int, command: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the error that ended a process of the server, unless its command ends as well, which the server may notice late.

    A process that starts while its command ends finds its files removed. This error is not printed.
    """
    ends = time.monotonic() + 4 * _POLL_S
    while os.getpid() != server and time.monotonic() < ends:
        if os.getppid() != server or _stat(server)[1:2] not in ([], [str(command)]):
            return
        time.sleep(_POLL_S / 25)
    sys.__excepthook__(kind, error, trace)


@contextmanager
def held_folder() -> Iterator[Path]:
    """Yield a new temporary folder, and remove it afterwards. Removes abandoned folders first."""
    folder, lock = _new_folder(Path(tempfile.gettempdir()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def process_folder() -> Path:
    """Return a new temporary folder for sockets that lasts as long as this process. Removes abandoned folders first.

    It is below /tmp where the path of TMPDIR is too long for sockets.
    """
    parent = Path(tempfile.gettempdir())
    folder, _ = _new_folder(parent if len(os.fsencode(parent)) <= _LONGEST else _SHORT)

    def remove_folder(owner: int = os.getpid()) -> None:
        if os.getpid() == owner:  # not in a fork
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove_folder)
    return folder


def _new_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that keeps it locked. Removes abandoned folders of the parent first."""
    from kerneltune.files import new_locked, remove_abandoned  # not above: the server imports this module alone

    remove_abandoned(parent.glob(f"{_PREFIX}*"))
    return new_locked(lambda: Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)))


if _SERVER in os.environ:
    _parent, _, _folder = os.environ.pop(_SERVER).partition(" ")
    _bind(int(_parent), _folder)
