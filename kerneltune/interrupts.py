"""Ctrl-C and SIGTERM, kept by Python. Knows nothing of what they interrupt; imports Triton when called.

LLVM takes both over when it first runs in a process, to delete its files. It hands the first one on, but a second that comes
meanwhile, as `timeout` sends it to a process and then to its group, ends the process without a word.
"""

import signal
import threading
from typing import Any


def hear_interrupts() -> None:
    """Have Python hear them again, and after every kernel that Triton compiles here; for the main thread."""
    _take_back()
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = _take_back


def _take_back(*_: Any, **__: Any) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
