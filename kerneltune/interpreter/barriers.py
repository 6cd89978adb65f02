"""Find elements that a program stores and loads in different threads, without a barrier between: their order is undefined.

Equal places of equal blocks are in the same thread. Reductions, products and other operations that exchange values between
threads have a barrier, and so have atomics.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kerneltune.interpreter.facts import note_here

_EXCHANGING = ("trans", "reshape", "join", "split", "cat", "gather", "histogram", "dot", "dot_scaled", "atomic_rmw", "atomic_cas")
_MOST_KEPT = 32
"""Most accesses of a kind to a storage that are kept: a loop may load any number of blocks before a barrier."""


class _Access(NamedTuple):
    """Describe an access of the program that runs: the shape of its block, places in it, and their offsets in the storage."""

    shape: tuple[int, ...]
    places: Any
    at: Any


_ACCESSES: dict[tuple[str, int], deque[_Access]] = defaultdict(lambda: deque(maxlen=_MOST_KEPT))
"""(`load` or `store`, address of a storage) -> accesses since the last barrier."""


def begin_threads() -> None:
    """Forget the accesses before: a program begins, or its threads have met at a barrier."""
    _ACCESSES.clear()


def note_access(kind: str, storage: int, at: Any, mask: Any, is_changed: Callable[[], Any] = lambda: True) -> None:
    """Note a load or a store, and the fact if another thread stores, or loads, one of the elements before, without a barrier.

    Args:
        is_changed: function without arguments -> whether a store changes the value of each element.
    """
    access = _Access(np.squeeze(mask).shape, np.flatnonzero(mask), at)
    for before in _ACCESSES.get(("load" if kind == "store" else "store", storage), ()):
        if (is_other := _by_another_thread(before, access)).any() and (is_other & is_changed()).any():
            note_here(
                "no barrier", "stores elements that it has loaded" if kind == "store" else "loads elements that it has stored"
            )
            break
    if at.size == access.places.size:
        _ACCESSES[kind, storage].append(access)


def _by_another_thread(before: _Access, access: _Access) -> Any:
    """Return whether another thread made the access before to each element of an access."""
    is_other = np.zeros(access.at.size, bool)
    is_same = before.shape == access.shape and np.array_equal(before.at, access.at)
    if is_same or not before.at.size or not access.at.size:
        return is_other
    if before.at.max() < access.at.min() or access.at.max() < before.at.min():
        return is_other
    _common, of_before, of_access = np.intersect1d(before.at, access.at, return_indices=True)
    is_other[of_access] = (before.shape != access.shape) | (before.places[of_before] != access.places[of_access])
    return is_other


def barrier_parts() -> dict[tuple[Any, str], Any]:
    """Return the parts of the interpreter, (owner, name), that are replaced so that they count as a barrier."""
    from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface

    parts = [(InterpreterBuilder, f"create_{name}") for name in ("barrier", *_EXCHANGING)]
    parts = [part for part in parts if hasattr(*part)] + [(ReduceScanOpInterface, "apply")]
    return {(owner, name): _with_barrier(getattr(owner, name)) for owner, name in parts}


def _with_barrier(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        begin_threads()
        return function(*args, **named)

    return call
