"""Run the first and the last iterations of a long loop in a launch without memory, and let values move on by those between."""

import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from kerneltune.interpreter.facts import ITERATIONS, WITHOUT_MEMORY, note_here
from kerneltune.interpreter.faults import KernelFaultError, is_kernel_file, line_of

_LONG_LOOP = 128
"""Most iterations of a loop that a launch without memory runs, half of them the first and half the last, as a launch has 2 s."""
_OUTER_LOOP, _INNER_LOOP = 16, 8
"""Most iterations of a loop that holds a loop, and fewest of a loop within a loop, as a persistent kernel has."""
AROUND: ContextVar[int] = ContextVar("around", default=1)
"""Product of the iterations of the loops that run in a launch without memory; each program begins with 1."""


def iterations_of(loop: range) -> Iterator[int]:
    """Note how many iterations a loop has, and yield the iterations to run: without memory the first and last of many."""
    note_here(ITERATIONS[min(len(loop), 2)])
    if not WITHOUT_MEMORY.get():
        yield from loop
        return
    frame = sys._getframe(1)
    while not is_kernel_file(frame.f_code.co_filename):
        assert frame.f_back is not None
        frame = frame.f_back
    number, around, seen = 0, AROUND.get(), list[Mapping[tuple[str, int], Any]]()
    overflowing: Mapping[tuple[str, int], Any] = {}
    half, inside = max(_INNER_LOOP, _LONG_LOOP // around) // 2, around
    while number < len(loop):
        AROUND.set(inside := around * min(len(loop), 2 * half))
        yield loop[number]
        half = half if AROUND.get() == inside else min(half, _OUTER_LOOP // 2)  # a loop within has left its product
        seen = [*seen[-2:], {place: handle.data for place, handle in _carried(frame)}]
        following = number + 1 if number + 1 < half else max(number + 1, len(loop) - half)
        if following > number + 1:
            overflowing = _move_on(frame, seen, following - number - 1, len(loop) - following)
        number = following
    for place, handle in _carried(frame):
        if np.array_equal(handle.data, overflowing.get(place, ())):
            raise KernelFaultError(f"{handle.data.dtype} overflow detected for operation add{line_of(frame)}, in a long loop")
    AROUND.set(inside if around > 1 else 1)


def _carried(frame: Any) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield the handles of a kernel's integers and pointers, with the name and, for a block pointer, the axis of the offset."""
    for name, value in frame.f_locals.items():
        handle = getattr(value, "handle", None)
        for axis, part in enumerate(getattr(handle, "offsets", [handle])):
            if getattr(getattr(part, "data", None), "dtype", np.dtype(bool)).kind in "iu":
                yield (name, axis), part


def _move_on(
    frame: Any, seen: list[Mapping[tuple[str, int], Any]], num_skipped: int, num_left: int
) -> dict[tuple[str, int], Any]:
    """Move the values on that changed by equal steps in the last two iterations, as a pointer to the next tile does.

    An integer of 32 bits that would overflow on its way stays. Return what it is after the iterations that are left, unless they
    compute it anew, from the loop's index.
    """
    overflowing: dict[tuple[str, int], Any] = {}
    for place, handle in _carried(frame):
        first, second, third = (values.get(place) for values in seen)
        if first is None or second is None or third is None or not first.shape == second.shape == third.shape:
            continue
        step = np.asarray(third) - np.asarray(second)
        if not step.any() or not np.array_equal(step, np.asarray(second) - np.asarray(first)):
            continue
        kind = step.dtype
        ends = np.asarray(third, np.int64) + step.astype(np.int64) * num_skipped
        if kind.kind == "i" and (ends != ends.astype(kind)).any():
            overflowing[place] = np.asarray(third) + step * kind.type(num_left)
        else:
            handle.data = handle.data + step * kind.type(num_skipped)
    return overflowing
