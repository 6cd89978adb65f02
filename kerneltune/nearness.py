"""How near a stored config lies to a case: the rule by which the cache finds one, which exported dispatch modules carry along.

Knows no file and no entry. Imports bisect and math.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Place = tuple[dict[str, int], str, dict[str, Any]]
"""Sizes by axis, element type and options."""
Nearness = tuple[bool, bool, float]
"""Whether the type differs, whether sizes do, and the log2 distance; (False, False, 0) is the case itself."""
Bands = Mapping[str, tuple[int, ...]]
"""Of an axis the last size of each band but that of the largest."""
NO_BANDS: Bands = {}

_SIXTEEN_BIT = {"bfloat16", "float16"}
_OTHER_DTYPE = 0.5
_NO_NUMBER = 1.0


def ranked(
    wanted: Place,
    stored: Iterable[tuple[Place, Any]],
    free_axes: Collection[str],
    free_options: Collection[str],
    bands: Bands,
) -> list[tuple[Nearness, Any]]:
    """Sort what can serve a case: its own type first, then its own sizes, then the nearest; ties as given.

    Free options differ at the case's own sizes, or free axes do within a band, never both: to a guess made twice the default is
    preferred.
    """
    free = frozenset(free_axes), frozenset(free_options), bands
    found = [(_nearness(wanted, place, *free), what) for place, what in stored]
    return sorted(((near, what) for near, what in found if near is not None), key=lambda pair: pair[0])


def _nearness(
    wanted: Place, place: Place, free_axes: frozenset[str], free_options: frozenset[str], bands: Bands
) -> Nearness | None:
    (axes, dtype, options), (sizes, other, values) = wanted, place
    moved = [axis for axis, size in axes.items() if sizes.get(axis) != size]
    if not free_axes.issuperset(moved):
        return None
    if any(bisect_left(ends, axes[axis]) != bisect_left(ends, sizes[axis]) for axis, ends in bands.items() if axis in moved):
        return None
    changed = [option for option, value in options.items() if values.get(option) != value]
    if not free_options.issuperset(changed) or (moved and changed):
        return None
    if sizes.keys() != axes.keys() or values.keys() != options.keys():
        return None
    if other != dtype and not {other, dtype} <= _SIXTEEN_BIT:
        return None
    distance = sum(abs(math.log2(max(axes[axis], 1) / max(sizes[axis], 1))) for axis in moved)
    distance += sum(_apart(options[option], values[option]) for option in changed)
    return other != dtype, bool(moved), distance + (_OTHER_DTYPE if other != dtype else 0.0)


def _apart(a: object, b: object) -> float:
    """Return the log2 distance between values; a fixed one where a value is no number, or 0, which often means something else."""
    return abs(math.log2(a / b)) if type(a) is int and type(b) is int and min(a, b) > 0 else _NO_NUMBER
