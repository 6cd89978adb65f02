"""Which configs are likely to be refused for what the compiler says, from other cases of the same variant.

A guess that orders what is tried, and forbids nothing. Knows no operator and measures nothing. May import numpy.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kerneltune.search.trials import Sizes

REFUSED = frozenset(("compile", "spills", "occupancy"))

Told = Sequence[tuple[Sizes, Mapping[str, Any], bool]]
"""Of other cases: sizes, knobs of a config, and whether it was refused."""

_PER_DOUBLING = 2.0
_SIZES_COUNT = 0.2
_DOUBT = 0.02


def chances(sizes: Sizes, configs: Sequence[Mapping[str, Any]], told: Told) -> NDArray[np.float64] | None:
    """How likely each config (configs,) is to be compiled for good; None where nothing is known of other cases.

    The share of those that were, every one counted by its distance in powers of two: e^-2 for a knob of twice the value, or of
    another one where it is no number, and e^-0.4 for an axis of twice the size.
    """
    if not told:
        return None
    numbers, names = _split([knobs for _, knobs, _ in told] + list(configs))
    axes = np.log2([[max(1, size) for _, size in place] for place in (*(s for s, _, _ in told), *[sizes] * len(configs))])
    numbers = np.hstack([numbers, _SIZES_COUNT * axes])
    known = len(told)
    accepted = np.array([not refused for _, _, refused in told], dtype=float)
    found = np.empty(len(configs))
    for i in range(len(configs)):
        distance = np.abs(numbers[:known] - numbers[known + i]).sum(axis=1) + (names[:known] != names[known + i]).sum(axis=1)
        weight = np.exp(-_PER_DOUBLING * distance)
        found[i] = (weight @ accepted + _DOUBT * accepted.mean()) / (weight.sum() + _DOUBT)
    return found


def _split(configs: Sequence[Mapping[str, Any]]) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
    """The knobs that are numbers, as powers of two, and the others, as the number of their value."""
    numbers, names = [], []
    for knob in configs[0]:
        values = [config[knob] for config in configs]
        if all(isinstance(value, bool | int | float) for value in values):
            numbers.append(np.log2(np.maximum(np.array(values, dtype=float), 0.0) + 0.5))
        else:
            places = {value: place for place, value in enumerate(dict.fromkeys(map(repr, values)))}
            names.append(np.array([places[repr(value)] for value in values]))
    empty = np.empty((len(configs), 0))
    return (np.column_stack(numbers) if numbers else empty), (np.column_stack(names) if names else empty.astype(int))
