"""Report faults of kernels in Triton's interpreter by file and line: unknown keywords of a launch, programs that do not end."""

import dataclasses
import functools
import inspect
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from kerneltune.errors import meant

PROGRAM_SECONDS, _REVERSED_SECONDS = 60.0, 3.0
"""Most processor time of a program, and of a program in reverse order: a program of a check takes milliseconds."""
NOT_ENDED = "has not ended after"
_REVERSED: ContextVar[bool] = ContextVar("reversed", default=False)
T = TypeVar("T")


class KernelFaultError(Exception):
    """Report in a line that a kernel has undefined behaviour, fails its own assertion, or does not end."""


@functools.cache
def is_kernel_file(name: str) -> bool:
    """Return whether a file may hold a kernel: it is no generated code, and no part of an interpreter, of numpy or of torch."""
    files = [getattr(sys.modules.get(module), "__file__", None) for module in (__name__, "triton", "numpy", "torch")]
    packages = [f"{Path(file).parent}{os.sep}" for file in files if file]
    is_of_python = name.startswith(sysconfig.get_path("stdlib")) and "-packages" not in name
    return not (is_of_python or name.startswith(("<", *packages)))


def statement(frame: Any = None) -> tuple[str, int]:
    """Return file and line of the kernel's statement that runs in a frame; without a frame, take the frame of the caller."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_kernel_file(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0


def line_of(frame: Any = None) -> str:
    """Return `, FILE:LINE` of the kernel's statement that runs in a frame, empty if no kernel runs."""
    name, number = statement(frame)
    return f", {os.path.basename(name)}:{number}" if name else ""  # a Path takes 10 us


@contextmanager
def time_limit(program: Callable[[], str]) -> Iterator[None]:
    """Raise KernelFaultError in a program that runs on after `begin_time`; in other threads than the main thread do nothing.

    program: function that names the kernel and the program that runs.
    """

    def end(_signal: int, frame: FrameType | None) -> None:
        raise KernelFaultError(f"{program()} {NOT_ENDED} {_seconds():g} s{line_of(frame)}")

    if not _is_limited():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _is_limited() -> bool:
    return threading.current_thread() is threading.main_thread()


def begin_time() -> None:
    """Give the program that begins, within `time_limit`, `PROGRAM_SECONDS` of processor time; in reverse order fewer."""
    if _is_limited():
        signal.setitimer(signal.ITIMER_VIRTUAL, _seconds(), 1.0)  # again after a second: Python drops an exception of a `__del__`


def _seconds() -> float:
    return _REVERSED_SECONDS if _REVERSED.get() else PROGRAM_SECONDS


@contextmanager
def setting(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Give a context variable a value within."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def reverse_order() -> AbstractContextManager[bool]:
    """Run the last program of each launch first; a program that waits for another soon raises an error with NOT_ENDED."""
    return setting(_REVERSED, True)


def place_that_runs(at: Sequence[int], grid: Sequence[int]) -> Sequence[int]:
    """Return the place of the program that runs next if the program at a place is due: in reverse order its mirror image."""
    return [size - 1 - place for size, place in zip(grid, at, strict=True)] if _REVERSED.get() else at


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of the cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def fault_of(error: BaseException) -> KernelFaultError | None:
    """Return the KernelFaultError among an error and its causes; None for all other errors."""
    return next((cause for cause in causes(error) if isinstance(cause, KernelFaultError)), None)


@functools.cache
def _launch_keywords() -> frozenset[str]:
    """Return the keywords of a launch that are no parameters of the kernel: the options of all of Triton's backends."""
    from triton.backends import backends

    keywords = {"grid", "warmup", "debug", "num_warps", "num_stages", "num_ctas", "maxnreg"}
    for backend in backends.values():
        module = inspect.getmodule(backend.compiler)
        options = [kind for name, kind in vars(module).items() if name.endswith("Options") and dataclasses.is_dataclass(kind)]
        keywords |= {option.name for kind in options for option in dataclasses.fields(kind)}
    return frozenset(keywords)


def check_keywords(executor: Any, keywords: dict[str, Any]) -> None:
    """Raise KernelFaultError for a keyword that is neither a parameter nor an option; the interpreter would drop it."""
    accepted = (*executor.arg_names, *sorted(_launch_keywords()))
    for name in keywords:
        if name not in accepted:
            raise KernelFaultError(
                f"{executor.fn.__name__}: {name!r}: no parameter of the kernel and no option of a launch{meant(name, accepted)}"
            )
