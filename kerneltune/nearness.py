"""Rank stored configs by their distance to a case.

`cache export --format python` copies the source of this module into the exported module.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

CaseValues = tuple[dict[str, int], str, str, dict[str, Any]]
"""Sizes by axis, element type, quantization mode and options."""
Group = tuple[str, frozenset[tuple[str, int]]]
Bands = Mapping[str, tuple[int, ...]]
"""Axis -> the last size of each band, without the band of the largest sizes."""
NO_BANDS: Bands = {}

_SIXTEEN_BIT = {"bfloat16", "float16"}
_OTHER_DISTANCE = 1.0
"""Distance between two values of an option that are no positive integers, such as 0, often a switch."""


class Nearness(NamedTuple):
    """Compare an entry with a case; the least is nearest, and (False, False, 0) is the case itself."""

    differs_in_type: bool
    differs_in_size: bool
    distance: float


def ranked(
    case: CaseValues,
    stored: Iterable[tuple[CaseValues, Any]],
    free_axes: Collection[str],
    free_options: Collection[str],
    bands: Bands,
    max_distance: float = math.inf,
) -> list[tuple[Nearness, Any]]:
    """Return the entries that can serve a case: entries of its type first, then of its sizes, then by distance.

    Equally near entries keep the order in which they are given.

    An entry differs from the case in free options alone, or in free axes alone, within a band and `max_distance`, and perhaps in
    the 16-bit type as well. An entry that differs in options and axes does not serve: the default is better than two guesses.
    """
    group = group_of(case, free_axes, bands)
    serving = []
    for values, entry in stored:
        if group_of(values, free_axes, bands) == group:
            nearness = _nearness(case, values, frozenset(free_options), max_distance)
            if nearness is not None:
                serving.append((nearness, entry))
    return sorted(serving, key=lambda pair: pair[0])


def _nearness(case: CaseValues, stored: CaseValues, free_options: frozenset[str], max_distance: float) -> Nearness | None:
    """Compare an entry with a case of its group; return None if the entry cannot serve the case."""
    (axes, dtype, _, options), (stored_axes, stored_dtype, _, stored_options) = case, stored
    other_type, other_sizes = stored_dtype != dtype, stored_axes != axes
    if other_type and not {dtype, stored_dtype} <= _SIXTEEN_BIT:
        return None
    if stored_options != options:
        distance = None if other_sizes else _along_options(options, stored_options, free_options)
        return None if distance is None else Nearness(other_type, False, distance)
    distance = log2_distance([max(size, 1) for size in axes.values()], [max(stored_axes[axis], 1) for axis in axes])
    return Nearness(other_type, other_sizes, distance) if distance <= max_distance else None


def group_of(case: CaseValues, free_axes: Collection[str], bands: Bands) -> Group:
    """Return the mode, each fixed size, and the band of each free size; an entry serves only cases of its group.

    `ranked` leaves out entries of another group, and the cache keeps its entries by group.
    """
    axes, _, quant, _ = case
    return quant, frozenset(
        (axis, band_of(bands.get(axis, ()), axes[axis]) if axis in free_axes else axes[axis]) for axis in axes
    )


def log2_distance(sizes: Iterable[float], others: Iterable[float]) -> float:
    """Return the sum of the log2 distances between positive sizes and other sizes, pair by pair."""
    return sum([abs(math.log2(size / other)) for size, other in zip(sizes, others, strict=True)])


def _along_options(options: Mapping[str, Any], stored: Mapping[str, Any], free: frozenset[str]) -> float | None:
    """Return the distance between values of options; None if a fixed option differs."""
    if stored.keys() != options.keys():
        return None
    changed = [name for name, value in options.items() if stored[name] != value]
    if not free.issuperset(changed):
        return None
    return sum([_value_distance(options[name], stored[name]) for name in changed])


def band_of(ends: tuple[int, ...], size: int) -> int:
    """Return the index of the band that contains a size."""
    return bisect_left(ends, size)


def _value_distance(a: object, b: object) -> float:
    """Return the log2 distance between positive integers, and `_OTHER_DISTANCE` between other values."""
    return log2_distance([a], [b]) if type(a) is int and type(b) is int and min(a, b) > 0 else _OTHER_DISTANCE
