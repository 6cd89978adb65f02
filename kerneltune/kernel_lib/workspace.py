"""Lend zeroed memory through which the programs of a launch, or of several launches, communicate.

`with workspace(...) as ws:` lends memory to the launches inside the block. Its layout is that of `launch_tag`, `close_launch` and
`publish` in tl_exchange. The module launches nothing.
"""

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from types import TracebackType

import torch
from triton.runtime.driver import driver

from kerneltune.rounding import next_power_of_2

HEADER_WORDS = 32
"""64-bit words before the first slot: the launch counter and the count of arrived programs, a cache line apart."""

_MIN_WORDS = 1 << 16
_CAPTURES_KEPT = 64

LOANS_PER_CLEARING = 1 << 31
"""Clear a workspace after so many loans: launch numbers have 32 bits, and words of old launches must not match a new number."""


class Loan:
    """Hold memory that a single caller has at a time: `with loan as tensor:`.

    The end of the block gives the memory back. If the block ends with an exception, the memory is dropped, because a launch may
    be missing and the words may belong to an unfinished operation.
    """

    __slots__ = ("_free", "_loans", "_period", "_tensor")

    def __init__(self, tensor: torch.Tensor, free: "list[Loan] | None", period: int) -> None:
        self._tensor, self._free, self._loans, self._period = tensor, free, 0, period

    def __enter__(self) -> torch.Tensor:
        self._loans += 1
        if self._loans % self._period == 0:
            self._tensor.zero_()
        return self._tensor

    def __exit__(self, kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None) -> None:
        if kind is None and self._free is not None:
            self._free.append(self)


class Pool:
    """Hold the memory of a size for a stream.

    `lend` never gives memory that another caller has: two threads that launch on the stream at once have memory of their own, so
    that the order of their launches does not matter. Returned memory is lent again without a wait, because the next
    borrower's launches follow on the same stream. `list.pop` and `list.append` are atomic, so that no lock is needed.

    Args:
        make: allocates zeroed words.
        period: loans after which memory is cleared.
    """

    def __init__(self, make: Callable[[], torch.Tensor], period: int = LOANS_PER_CLEARING) -> None:
        self._make, self._period = make, period
        self._free: list[Loan] = []

    def lend(self) -> Loan:
        """Return memory that nobody else has until the loan's `with` block ends."""
        try:
            return self._free.pop()
        except IndexError:
            return Loan(self._make(), self._free, self._period)


def workspace(slots: int, device: torch.device) -> Loan:
    """Lend (≥ slots + header,) int64 words to the launches of an operation on the current stream.

    Each launch marks its words with the launch number of the workspace, so that nothing is cleared between loans, except once in
    2^31. A CUDA graph has memory of its own, cleared once at the start of every replay, so that graphs may be replayed side by
    side.
    """
    return _lend(slots + HEADER_WORDS, device, "slots")


def counters(count: int, device: torch.device) -> Loan:
    """Lend (≥ count,) int64 zeros, which the launches inside the block must leave zero; memory is shared as a workspace is."""
    return _lend(count, device, "counters")


def _lend(least: int, device: torch.device, purpose: str) -> Loan:
    words = max(_MIN_WORDS, next_power_of_2(least))
    if device.type != "cuda":
        return Loan(_zeros(words, device), None, LOANS_PER_CLEARING)
    stream = driver.active.get_current_stream(device.index or 0)  # half the time of torch.cuda.current_stream
    capture = _capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
    if capture is None:
        return Loan(_zeros(words, device), None, LOANS_PER_CLEARING)
    if capture:
        return _pool_of_capture(device.index or 0, stream, capture, words, purpose).lend()
    return _pool_of_stream(device.index or 0, stream, words, purpose).lend()


def _zeros(words: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # memory of inference mode cannot be cleared outside of it
        return torch.zeros(words, dtype=torch.int64, device=device)


@cache
def _pool_of_stream(index: int, _stream: int, words: int, _purpose: str) -> Pool:
    return Pool(lambda: _zeros(words, torch.device("cuda", index)))


@lru_cache(maxsize=_CAPTURES_KEPT)
def _pool_of_capture(index: int, _stream: int, _capture: int, words: int, _purpose: str) -> Pool:
    """Return the pool of a capture, whose memory and its clearing belong to the graph."""
    return Pool(lambda: _zeros(words, torch.device("cuda", index)))


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _capture_id(stream: int) -> int | None:
    """Return the driver's number of the capture under way on a stream; None where the driver cannot be asked."""
    driver = _driver()
    if driver is None:
        return None
    status, capture = ctypes.c_int(), ctypes.c_uint64()
    failed = driver.cuStreamGetCaptureInfo(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture))
    return None if failed else capture.value
