"""Report faults of kernels in Triton's interpreter by file and line: unknown keywords of a launch, programs that do not end."""

import ctypes
import dataclasses
import functools
import inspect
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kerneltune.errors import meant

PROGRAM_SECONDS = 60.0
"""Longest time of a program: a program of a check takes milliseconds."""


class KernelFaultError(Exception):
    """Report in a line that a kernel has undefined behaviour, fails its own assertion, or does not end."""


def program_text(program: Any) -> str:
    """Return the number of a program in each axis of the grid."""
    return ", ".join(map(str, program))


@functools.cache
def _is_kernel_file(name: str) -> bool:
    """Return whether a file may hold a kernel: it is no generated code, and no part of the interpreter, of numpy or of Python."""
    files = [getattr(sys.modules.get(module), "__file__", None) for module in ("triton", "numpy", "torch")]
    packages = [f"{Path(file).parent}{os.sep}" for file in files if file]
    is_of_python = name.startswith(sysconfig.get_path("stdlib")) and "-packages" not in name
    return not (is_of_python or name in _OWN_FILES or name.startswith(("<", *packages)))


def statement(frame: Any = None) -> tuple[str, int]:
    """Return file and line of the kernel's statement that runs in a frame; without a frame, take the frame of the caller."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_kernel_file(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0


def line_of(frame: Any = None) -> str:
    """Return `, FILE:LINE` of the kernel's statement that runs in a frame, empty if no kernel runs."""
    name, number = statement(frame)
    return f", {os.path.basename(name)}:{number}" if name else ""  # a Path takes 10 us


class Watchdog:
    """End a launch in which a program runs for longer than `PROGRAM_SECONDS`."""

    def __init__(self, guard: Any, kernel: str) -> None:
        self._guard, self._kernel = guard, kernel
        self._thread_id = threading.get_ident()
        self._lock, self._end = threading.Lock(), threading.Event()
        self._reason = ""

    def __enter__(self) -> None:
        self._guard.program_begin = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._end.wait(max(0.01, self._guard.program_begin + PROGRAM_SECONDS - time.monotonic())):
            with self._lock:
                if time.monotonic() - self._guard.program_begin < PROGRAM_SECONDS or self._end.is_set():
                    continue
                program = program_text(self._guard._interpreter.interpreter_builder.grid_idx)
                line = line_of(sys._current_frames().get(self._thread_id))
                self._reason = f"{self._kernel}: program ({program}) has not ended after {PROGRAM_SECONDS:g} s{line}"
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(_EndedError))
                return

    def __exit__(self, kind: Any, error: Any, _trace: Any) -> None:
        with self._lock:
            self._end.set()
        if not self._reason:
            return
        if not any(isinstance(cause, _EndedError) for cause in _causes(error)):
            try:
                time.sleep(1.0)  # the launch ended by itself just before the exception that is to come
            except _EndedError:
                return
        raise KernelFaultError(self._reason)


class _EndedError(Exception):
    """Interrupt the thread of a launch that does not end."""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of the cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def fault_of(error: BaseException) -> KernelFaultError | None:
    """Return the KernelFaultError among an error and its causes; None for all other errors."""
    return next((cause for cause in _causes(error) if isinstance(cause, KernelFaultError)), None)


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


def check_keywords(executor: Any, given: dict[str, Any]) -> None:
    """Raise KernelFaultError for a keyword that is neither a parameter nor an option; the interpreter would drop it."""
    known = (*executor.arg_names, *sorted(_launch_keywords()))
    for name in given:
        if name not in known:
            raise KernelFaultError(
                f"{executor.fn.__name__}: {name!r}: no parameter of the kernel and no option of a launch{meant(name, known)}"
            )


_OWN_FILES = frozenset(
    str(Path(__file__).with_name(f"{name}.py")) for name in ("bounds", "faults", "interpreted", "quick", "races", "reached")
)
