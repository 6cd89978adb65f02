"""Rank stored configs by their distance to a case.

The module reads no file. `cache export --format python` copies its source into the exported module.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Place = tuple[dict[str, int], str, dict[str, Any]]
"""Sizes by axis, element type and options."""
Nearness = tuple[bool, bool, float]
"""(the type differs, sizes differ, log2 distance); (False, False, 0) is the case itself."""
Bands = Mapping[str, tuple[int, ...]]
"""Axis -> the last size of each band, without the band of the largest sizes."""
NO_BANDS: Bands = {}

_SIXTEEN_BIT = {"bfloat16", "float16"}
_NO_NUMBER = 1.0
"""Distance between two values of an option that have no log2 distance."""


def ranked(
    wanted: Place,
    stored: Iterable[tuple[Place, Any]],
    free_axes: Collection[str],
    free_options: Collection[str],
    bands: Bands,
    max_distance: float = math.inf,
) -> list[tuple[Nearness, Any]]:
    """Return the entries that can serve a case: entries of its type first, then of its sizes, then by distance; ties as given.

    An entry differs from the case in free options alone, or in free axes alone, within a band and `max_distance`, and perhaps in
    the 16-bit type as well. An entry that differs in options and axes does not serve: the default is better than two guesses.
    """
    free = frozenset(free_axes), frozenset(free_options), bands, max_distance
    compared = [(_nearness(wanted, place, *free), entry) for place, entry in stored]
    return sorted(((near, entry) for near, entry in compared if near is not None), key=lambda pair: pair[0])


def _nearness(
    wanted: Place, place: Place, free_axes: frozenset[str], free_options: frozenset[str], bands: Bands, max_distance: float
) -> Nearness | None:
    (axes, dtype, options), (sizes, other, values) = wanted, place
    is_moved, is_changed, is_other = sizes != axes, values != options, other != dtype
    if (is_moved and is_changed) or (is_other and not {other, dtype} <= _SIXTEEN_BIT):
        return None
    distance: float | None = 0.0
    if is_moved:
        distance = _along_axes(axes, sizes, free_axes, bands)
        distance = None if distance is None or distance > max_distance else distance
    elif is_changed:
        distance = _along_options(options, values, free_options)
    return None if distance is None else (is_other, is_moved, distance)


def _along_axes(axes: Mapping[str, int], sizes: Mapping[str, int], free: frozenset[str], bands: Bands) -> float | None:
    """Return the log2 distance between sizes; None if a fixed axis or a band differs."""
    if sizes.keys() != axes.keys():
        return None
    changed = [axis for axis, size in axes.items() if sizes[axis] != size]
    if not free.issuperset(changed):
        return None
    if any(band_of(bands[axis], axes[axis]) != band_of(bands[axis], sizes[axis]) for axis in changed if axis in bands):
        return None
    return log2_distance([max(axes[axis], 1) for axis in changed], [max(sizes[axis], 1) for axis in changed])


def log2_distance(sizes: Iterable[float], others: Iterable[float]) -> float:
    """Return the sum of the log2 distances between positive sizes and other sizes, pair by pair."""
    return sum([abs(math.log2(size / other)) for size, other in zip(sizes, others, strict=True)])


def _along_options(options: Mapping[str, Any], values: Mapping[str, Any], free: frozenset[str]) -> float | None:
    """Return the distance between values of options; None if a fixed option differs."""
    if values.keys() != options.keys():
        return None
    changed = [option for option, value in options.items() if values[option] != value]
    return sum([_value_distance(options[option], values[option]) for option in changed]) if free.issuperset(changed) else None


def band_of(ends: tuple[int, ...], size: int) -> int:
    """Return the index of the band that contains a size."""
    return bisect_left(ends, size)


def _value_distance(a: object, b: object) -> float:
    """Return the log2 distance between positive integers; a fixed distance for other values, such as 0, often a switch."""
    return log2_distance([a], [b]) if type(a) is int and type(b) is int and min(a, b) > 0 else _NO_NUMBER
