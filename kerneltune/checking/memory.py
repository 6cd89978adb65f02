"""Tell how much memory is free, and run work that may need more: its allocations are freed, and the process goes on."""

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from kerneltune import device
from kerneltune.errors import first_line
from kerneltune.interpreter.faults import causes
from kerneltune.spec import Case, Op
from kerneltune.task import SkippedError

T = TypeVar("T")

_MEMINFO = Path("/proc/meminfo")

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUPS_HERE = Path("/proc/self/cgroup")
_LIMITS = {"": ("memory.max", "memory.current", "inactive_file"),
           "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}  # fmt: skip
"""Folder of a version of cgroups -> the files of limit and use, and the field of memory.stat that can be given back."""

_OUT_OF_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")
"""Texts in out-of-memory errors of torch, of drivers and of libraries, which raise no error type of their own."""


def within_memory(work: Callable[[], T]) -> T:
    """Return the result of `work`.

    Raises:
        SkippedError: `work` ran out of memory; with the bytes if torch names them. What `work` allocated is free.
    """
    try:
        return work()
    except SkippedError:
        raise
    except Exception as error:  # torch, Triton and the driver raise other types where memory is short
        reason = out_of_memory_reason(error)
        if not reason:
            raise
    release_memory()  # only here: until now the traceback kept the allocations of `work` alive
    raise SkippedError(reason)


def out_of_memory_reason(error: BaseException) -> str:
    """Return the out-of-memory line of an error or of its cause; empty if neither has an out-of-memory line.

    The cause matters, because the end of a capture, and a compiler that wraps all errors, raise an error of their own.
    """
    for cause in causes(error):
        if isinstance(cause, MemoryError) or any(text in str(cause) for text in _OUT_OF_MEMORY):
            return first_line(cause)
    return ""


def why_too_large(op: Op, case: Case) -> str | None:
    """Return None if the case fits in memory, else the bytes needed and free: GPU memory, or host memory without a GPU."""
    needed = needed_bytes(op, case)
    free = gpu_free_bytes() if device.current().is_gpu else host_free_bytes()
    return f"needs {needed:,} bytes, {free:,} are free" if needed > free else None


def needed_bytes(op: Op, case: Case) -> int:
    """Return the bytes of memory that a check of a case needs."""
    return op.memory_factor * op.traffic(case).total


def host_free_bytes() -> int:
    """Return bytes that Linux can give to processes without swapping, within the limits of this process's cgroups."""
    fields = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    return min([int(fields["MemAvailable"].removesuffix("kB")) * 1024, *_free_in_cgroups()])


def _free_in_cgroups() -> Iterator[int]:
    """Yield the bytes left in each cgroup of this process and above it that has a limit."""
    with suppress(OSError):
        for line in _CGROUPS_HERE.read_text().splitlines():
            _number, version, path = line.split(":", 2)
            limit, used, given_back = _LIMITS.get(version, ("", "", ""))
            below = Path(version, path.lstrip("/"))
            for folder in (_CGROUPS / path for path in (below, *below.parents) if limit):
                with suppress(OSError, ValueError):  # no such folder in a container, or the limit `max`
                    most, now = (int((folder / name).read_text()) for name in (limit, used))
                    stat = dict(text.split() for text in (folder / "memory.stat").read_text().splitlines())
                    yield max(0, most - now + int(stat.get(given_back, 0)))


def gpu_free_bytes() -> int:
    """Return the bytes of the GPU's memory that torch can still allocate."""
    free, _total = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def release_memory() -> None:
    """Release the GPU memory that torch caches, so that other processes and libraries can allocate it."""
    gc.collect()
    torch.cuda.empty_cache()
