"""Ctrl-C and SIGTERM: heard once, and never in the midst of an import.

An interrupt within an import may end in a package's `except` clause: the program goes on with half a module, and kernels that are
right fail. So an interrupt waits for the end of the import.

Processes that hear these signals launch and compile no kernel: LLVM would take both signals over.
"""

import signal
import threading
from types import FrameType

_IMPORT = ("<frozen importlib._bootstrap>", "_find_and_load")
_AGAIN_S = 0.02


class Interrupts:
    """The handler of both signals in the command line's process.

    Attributes:
        heard: whether one came.
    """

    def __init__(self) -> None:
        self.heard = False
        self._ended = False
        self._waiting = False

    def take(self) -> None:
        """Handle both signals from now on, but for one that the process was started to ignore; for the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    def end(self) -> None:
        """Let one that still waits pass without a word, as the command has ended; the next ends the process."""
        self._ended = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, as soon as no import is under way."""
        self.heard = True
        if self._ended:
            signal.signal(number, signal.SIG_DFL)
            return
        if not is_importing(frame):
            raise KeyboardInterrupt
        if not self._waiting:
            self._waiting = True
            again = threading.Timer(_AGAIN_S, self._again, (number,))
            again.daemon = True
            again.start()

    def _again(self, number: int) -> None:
        self._waiting = False
        signal.pthread_kill(threading.main_thread().ident or 0, number)


interrupts = Interrupts()


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame is within an import."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == _IMPORT:
            return True
        frame = frame.f_back
    return False
