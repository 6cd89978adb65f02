"""Zero-initialised memory through which the programs of one launch talk to each other.

Layout: tl_exchange's `launch_tag`, `close_launch` and `publish`. Launches nothing. May import torch.
"""

import ctypes
import itertools
from functools import cache, lru_cache

import torch

from kerneltune.rounding import next_power_of_2

HEADER_WORDS = 32
"""64-bit words before the first slot: the launch counter and the count of arrived programs, a cache line apart."""

_MIN_WORDS = 1 << 16
_CAPTURES_KEPT = 64

_LAUNCHES_NUMBERED = 1 << 31
"""After so many launches a workspace is cleared: the 32 bits of their numbers would come round to those of words in it."""


def workspace(slots: int, device: torch.device) -> torch.Tensor:
    """(≥ slots + header,) int64 for the next launch on the current stream.

    Launches on one stream follow each other and share a workspace: each marks its words with the number of its launch, so
    nothing has to be cleared but once in 2^31 launches. A CUDA graph has a workspace of its own, cleared once at the start of
    every replay, so that graphs may be replayed side by side.
    """
    return _memory(slots + HEADER_WORDS, device, "slots")


def counters(count: int, device: torch.device) -> torch.Tensor:
    """(≥ count,) int64 zeros, which the next launch on the current stream must leave zero; shared as a workspace is."""
    return _memory(count, device, "counters")


def _memory(least: int, device: torch.device, purpose: str) -> torch.Tensor:
    words = max(_MIN_WORDS, next_power_of_2(least))
    if device.type != "cuda":
        return torch.zeros(words, dtype=torch.int64, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = _capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
    if capture is None:
        return torch.zeros(words, dtype=torch.int64, device=device)
    if capture:
        return _of_capture(device.index or 0, stream, capture, words, purpose)
    return _of_stream(device.index or 0, stream, words, purpose).next()


class _Shared:
    """Memory of the launches on one stream, which follow each other; `next` gives it to the next of them."""

    def __init__(self, words: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # what inference mode makes cannot be cleared outside of it
            self._memory = torch.zeros(words, dtype=torch.int64, device=device)
        self._launches = itertools.count(1)

    def next(self) -> torch.Tensor:
        if next(self._launches) % _LAUNCHES_NUMBERED == 0:
            self._memory.zero_()
        return self._memory


@cache
def _of_stream(index: int, _stream: int, words: int, _purpose: str) -> _Shared:
    return _Shared(words, torch.device("cuda", index))


@lru_cache(maxsize=_CAPTURES_KEPT)
def _of_capture(index: int, _stream: int, _capture: int, words: int, _purpose: str) -> torch.Tensor:
    """Allocated while capturing: the memory and its clearing belong to the graph."""
    return torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", index))


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _capture_id(stream: int) -> int | None:
    """The driver's number of the capture under way on a stream; None where the driver cannot be asked."""
    driver = _driver()
    if driver is None:
        return None
    status, capture = ctypes.c_int(), ctypes.c_uint64()
    failed = driver.cuStreamGetCaptureInfo(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture))
    return None if failed else capture.value
