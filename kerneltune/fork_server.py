"""Bind the server of `processes.fast_context` to the process that started it, also where SIGKILL ends that process.

The server imports this module first. It ends within half a second of its parent, also amid its imports, which take seconds, and
removes the folder of its socket, which its parent could not. Does nothing in other processes.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType

from kerneltune.interrupts import is_importing
from kerneltune.temporary import remove

VARIABLE = "KERNELTUNE_FORK_SERVER"
"""Environment variable of the server: its parent's id, a blank, and the folder of its socket where the parent has made it."""
_LOOK_S = 0.25


def _bind(parent: int, folder: str) -> None:
    """Look whether the parent is there while modules are imported; later the server notices by itself."""

    def look(_number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            if folder:
                remove(Path(folder))
            os._exit(1)
        if not is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    if folder:
        atexit.register(remove, Path(folder))
    sys.excepthook = _Unless(os.getpid())
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)


class _Unless:
    """Says what ended a process of the server, unless the server ends as well.

    A process that is being started as its command ends, finds what it was given removed: no word of that.
    """

    def __init__(self, server: int) -> None:
        self._server = server

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ends = time.monotonic() + 2 * _LOOK_S
        while os.getpid() != self._server and time.monotonic() < ends:
            if os.getppid() != self._server:
                return
            time.sleep(_LOOK_S / 25)
        sys.__excepthook__(kind, error, trace)


if VARIABLE in os.environ:
    _parent, _, _folder = os.environ.pop(VARIABLE).partition(" ")
    _bind(int(_parent), _folder)
