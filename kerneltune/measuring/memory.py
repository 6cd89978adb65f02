"""Running out of memory: it costs what asked for it and nothing else, and what that held of the GPU's is given back.

Decides nothing about records or trials. May import torch.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from kerneltune.errors import first_line

T = TypeVar("T")

_MEMINFO = Path("/proc/meminfo")

_SAID = ("out of memory", "STATUS_ALLOC_FAILED")
"""By torch, and by drivers and libraries that allocate for themselves, whose errors have no type of their own."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Stands for what there was not the memory for; reason: one line, with the bytes wanted and free where torch names them."""

    reason: str


def affordable(work: Callable[[], T]) -> T | OutOfMemory:
    """Return what the work returns, or that there was not the memory for it."""
    try:
        return work()
    except Exception as error:
        reason = out_of_memory_reason(error)
        if not reason:
            raise
    release_memory()  # only here: the traceback held what the work had allocated
    return OutOfMemory(reason)


def out_of_memory_reason(error: BaseException) -> str:
    """Return the line of an error, or of its cause, that tells of missing memory; empty where none does.

    What led to it: the end of a capture, or a compiler that wraps all errors, raises one of its own.
    """
    said: BaseException | None = error
    while said is not None:
        if any(text in str(said) for text in _SAID):
            return first_line(said)
        said = said.__cause__ or said.__context__
    return ""


def host_free_bytes() -> int:
    """Return bytes that Linux can give to processes without swapping."""
    fields = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].removesuffix("kB")) * 1024


def release_memory() -> None:
    """Give back what torch keeps of the GPU's memory for later, so that others find it."""
    gc.collect()
    torch.cuda.empty_cache()
