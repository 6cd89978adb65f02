"""Rank stored configs by their distance to a case.

The module reads no file. `cache export --format python` copies its source into the exported module.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import Any

Place = tuple[dict[str, int], str, str, dict[str, Any]]
"""Sizes by axis, element type, quantization mode and options."""
Group = tuple[str, frozenset[tuple[str, int]]]
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
    group = group_of(wanted, free_axes, bands)
    of_group = [(place, entry) for place, entry in stored if group_of(place, free_axes, bands) == group]
    compared = [(_nearness(wanted, place, frozenset(free_options), max_distance), entry) for place, entry in of_group]
    return sorted(((near, entry) for near, entry in compared if near is not None), key=lambda pair: pair[0])


def _nearness(wanted: Place, place: Place, free_options: frozenset[str], max_distance: float) -> Nearness | None:
    """Return the distance between places of a group; None if the entry of `place` cannot serve."""
    (axes, dtype, _, options), (sizes, other, _, values) = wanted, place
    is_moved, is_changed, is_other = sizes != axes, values != options, other != dtype
    if (is_moved and is_changed) or (is_other and not {other, dtype} <= _SIXTEEN_BIT):
        return None
    if is_changed:
        distance = _along_options(options, values, free_options)
        return None if distance is None else (is_other, False, distance)
    distance = log2_distance([max(size, 1) for size in axes.values()], [max(sizes[axis], 1) for axis in axes])
    return (is_other, is_moved, distance) if distance <= max_distance else None


def group_of(place: Place, free_axes: Collection[str], bands: Bands) -> Group:
    """Return the mode, each fixed size, and the band of each free size; an entry serves only cases of its group.

    `ranked` leaves out entries of another group, and the cache keeps its entries by group.
    """
    axes, _, quant, _ = place
    return quant, frozenset(
        (axis, band_of(bands.get(axis, ()), axes[axis]) if axis in free_axes else axes[axis]) for axis in axes
    )


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
