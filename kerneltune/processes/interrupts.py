"""Handle Ctrl-C and SIGTERM outside imports, and outside functions of `threading` that take or free a lock.

A package's `except` clause may catch an interrupt within an import: the program would continue with half a module, and correct
kernels would fail. An interrupt in `Condition.__enter__`, which `Future.done` calls, would leave the lock taken, and the thread
that sets the result would wait for it for ever. Therefore an interrupt waits for the end of both.

A process that handles these signals neither launches nor compiles kernels, because LLVM would replace both handlers.
"""

import signal
import threading
import time
from _thread import start_new_thread
from types import FrameType

_IMPORT = ("<frozen importlib._bootstrap>", "_find_and_load")
_LOCKING = ("__enter__", "__exit__", "notify", "notify_all", "_acquire_restore", "_release_save")
"""Functions of `threading`, of conditions above all, that take or free a lock and do not block for long."""
_AGAIN_S = 0.005
heard = False
"""True from the first signal on."""
_has_ended = False
_is_postponed = False


def take() -> None:
    """Handle both signals from now on, except a SIGINT that the process was started to ignore. Call in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def end() -> None:
    """Ignore a waiting signal, because the command has ended; let the next signal end the process."""
    global _has_ended
    _has_ended = True


def _handle(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, later if it would break an import or a lock."""
    global heard, _is_postponed
    heard = True
    if _has_ended:
        signal.signal(number, signal.SIG_DFL)
        return
    is_locking = frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name in _LOCKING
    if not (_is_importing(frame) or is_locking):
        raise KeyboardInterrupt
    if not _is_postponed:
        _is_postponed = True
        start_new_thread(_send_again, (number,))  # a `threading.Thread` would wait for locks that this thread may hold


def _send_again(number: int) -> None:
    global _is_postponed
    time.sleep(_AGAIN_S)
    _is_postponed = False
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame is within an import."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == _IMPORT:
            return True
        frame = frame.f_back
    return False
