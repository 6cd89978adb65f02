"""Handle Ctrl-C and SIGTERM outside imports only.

A package's `except` clause may catch an interrupt within an import: the program would continue with half a module, and correct
kernels would fail. Therefore an interrupt waits for the end of the import.

A process that handles these signals neither launches nor compiles kernels, because LLVM would replace both handlers.
"""

import signal
import threading
from types import FrameType

_IMPORT = ("<frozen importlib._bootstrap>", "_find_and_load")
_AGAIN_S = 0.02
heard = False
"""True from the first signal on."""
_has_ended = False
_waits_for_import = False


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
    """Raise KeyboardInterrupt, after the end of a running import."""
    global heard, _waits_for_import
    heard = True
    if _has_ended:
        signal.signal(number, signal.SIG_DFL)
        return
    if not _is_importing(frame):
        raise KeyboardInterrupt
    if not _waits_for_import:
        _waits_for_import = True
        again = threading.Timer(_AGAIN_S, _send_again, (number,))
        again.daemon = True
        again.start()


def _send_again(number: int) -> None:
    global _waits_for_import
    _waits_for_import = False
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame is within an import."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == _IMPORT:
            return True
        frame = frame.f_back
    return False
