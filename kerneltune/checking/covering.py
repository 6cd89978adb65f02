"""Choose pairs of config and check case in which every knob value meets every class of cases, and the values of other knobs.

A knob value and a class, or two knob values, are an interaction. The chosen pairs are a covering array of all interactions.
"""

import functools
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from kerneltune.spec import Case, Config, Variant
from kerneltune.task import knob_pairs

Pair = tuple[Config, Case]
Value = tuple[str, object]
"""A knob and its value."""
Setting = tuple[str, Any]
"""An element type, a mode or an option of a case: its name and its value."""
Interaction = tuple[str | Value, ...]
"""Name of a class of cases, or of a relation to a size (`_size_relations`), with a value; or `_OTHER_KNOBS` with two values."""

_ALIGNMENT = 16
"""A size that is no multiple of `_ALIGNMENT` leaves a tail in vectorized accesses and in tiles."""
_WIDE = 4
"""A case is wide if its largest axis is at least the largest axis of all cases divided by `_WIDE`."""
_CLASS_WEIGHT = 16
"""A mistake in a mask or a tail shows in a class of cases; few mistakes need certain values of two knobs."""
_OTHER_KNOBS = "values of other knobs"
"""Stands where a class's name stands: for cases, pairs of knob values count; an interaction has two knob values behind it."""


def classes(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Return the cases of each class: ragged in an axis, wide, tiny, first, and with each type, mode and value of an option."""
    with_work = [case for case in cases if num_elements(case)]
    if not with_work:
        return {}
    wide, least = max(map(width, with_work)) / _WIDE, min(map(num_elements, with_work))
    axes = dict.fromkeys(axis for case in with_work for axis, _size in case.axes)
    ragged_axes = {case: {axis for axis, size in case.axes if size > 1 and size % _ALIGNMENT} for case in with_work}
    members_of = {f"ragged {axis}": [case for case in with_work if axis in ragged_axes[case]] for axis in axes}
    members_of["wide"] = [case for case in with_work if width(case) >= wide]
    members_of["tiny"] = [case for case in with_work if num_elements(case) == least]
    members_of["first"] = with_work[:1]
    for setting in dict.fromkeys(setting for case in with_work for setting in settings(case)):
        members = [case for case in with_work if setting in settings(case)]
        if len(members) < len(with_work):
            members_of["=".join(map(str, setting))] = members
    return {name: members for name, members in members_of.items() if members}


def settings(case: Case) -> tuple[Setting, ...]:
    """Return the element type, the quantization mode and the options of a case, with their names."""
    return ("dtype", case.dtype), ("quant", case.quant), *case.options


def num_elements(case: Case) -> int:
    """Return the product of a case's sizes; 1 without an axis."""
    return math.prod(case.sizes.values())


def width(case: Case) -> int:
    """Return the size of a case's largest axis; 0 without an axis."""
    return max(case.sizes.values(), default=0)


def configs_by_case(variant: Variant, cases: Sequence[Case]) -> dict[Case, list[Config]]:
    """Return the valid configs of each supported case, the default among them even where the space does not offer it."""
    supported = [case for case in cases if variant.unsupported(case) is None]
    return {case: list(dict.fromkeys([variant.default_config(case), *variant.configs(case)])) for case in supported}


def covering(configs: Mapping[Case, Sequence[Config]], cost: Callable[[Config, Case], float]) -> Iterator[Pair]:
    """Yield pairs until every knob value has met every class of cases, and then every value of the other knobs.

    The default config of each case counts as checked. The next pair is the pair with the most new interactions, for its cost; an
    interaction with a class counts as `_CLASS_WEIGHT` interactions of two values.

    Args:
        configs: the configs of each case, its default first.
        cost: the cost of a check of a pair.
    """
    names_of, covered = _names_by_case(list(configs)), set[Interaction]()
    for case, (default, *_others) in configs.items():
        covered |= _interactions(default, case, names_of[case])
    pairs = [(config, case) for case, (_default, *rest) in configs.items() if names_of[case] for config in rest]
    random.Random(0).shuffle(pairs)
    heap = [(-math.inf, number) for number in range(len(pairs))]  # new interactions for the cost, negative, as last counted
    while heap:
        _last, number = heapq.heappop(heap)
        config, case = pairs[number]
        new = _interactions(config, case, names_of[case]) - covered
        weight = sum(1 if name == _OTHER_KNOBS else _CLASS_WEIGHT for name, *_values in new)
        entry = (-weight / cost(config, case), number)
        if weight and heap and entry > heap[0]:  # another pair may have more: counts only fall, as interactions are covered
            heapq.heappush(heap, entry)
        elif weight:
            covered |= new
            yield config, case


def _interactions(config: Config, case: Case, class_names: Set[str]) -> set[Interaction]:
    """Return each knob value with the names of classes and of relations to sizes; as `_OTHER_KNOBS`, each two knob values.

    Two values meet again for each axis that is longer than both: with a single tile, no mistake in the order of tiles shows.
    """
    values = sorted(knob_pairs(config))
    interactions: set[Interaction] = {(name, value) for name in class_names - {_OTHER_KNOBS} for value in values}
    if class_names:
        interactions |= {(name, value) for value in values for name in _size_relations(case, value)}
    for two in itertools.combinations(values if _OTHER_KNOBS in class_names else (), 2):
        interactions |= {(_OTHER_KNOBS, axis, *two) for axis in ("", *_axes_above(case, two))}
    return interactions


@functools.lru_cache(maxsize=1 << 16)
def _axes_above(case: Case, knob_values: tuple[Value, ...]) -> tuple[str, ...]:
    """Return the axes that are longer than the knob values above `_ALIGNMENT`: they have several tiles if these are blocks."""
    blocks = [value for _knob, value in knob_values if isinstance(value, int) and value > _ALIGNMENT]
    return tuple(axis for axis, size in case.axes if blocks and size > max(blocks))


@functools.lru_cache(maxsize=1 << 16)
def _size_relations(case: Case, knob_value: Value) -> tuple[str, ...]:
    """Return names for the axes whose size is a multiple of `_ALIGNMENT`, but smaller than a knob value, or no multiple of it.

    A kernel may take such a size for whole blocks: `EVEN_K = K % 32 == 0` is wrong for a block of 128 and 64 elements.
    """
    _knob, value = knob_value
    if not isinstance(value, int) or value <= _ALIGNMENT:
        return ()
    uneven = [(axis, size) for axis, size in case.axes if size % _ALIGNMENT == 0 and size % value]
    return tuple(f"aligned {axis} {'below' if size < value else 'not divided by'} a knob" for axis, size in uneven)


def _names_by_case(cases: Sequence[Case]) -> dict[Case, set[str]]:
    """Return the names of the classes of each case, and `_OTHER_KNOBS` if values of two knobs shall meet in the case.

    They shall not meet in an empty case, in a tiny case that is not wide, or, if other cases remain, in a wide case with a size
    of 1: with every tile size it has one tile in that axis.
    """
    members_of = classes(cases)
    names_of = {case: {name for name, members in members_of.items() if case in members} for case in cases}
    large = {case for case, names in names_of.items() if names and ("tiny" not in names or "wide" in names)}
    thick = {case for case in large if "wide" not in names_of[case] or all(size > 1 for size in case.sizes.values())}
    for case in thick or large:
        names_of[case].add(_OTHER_KNOBS)
    return names_of


def uncovered(configs: Mapping[Case, Sequence[Config]], done: set[Pair]) -> Iterator[str]:
    """Yield a line for each class of cases that some knob values did not meet, and one for pairs of values that did not meet."""
    names_of = _names_by_case(list(configs))

    def interactions_of(pairs: Iterable[Pair]) -> set[Interaction]:
        return {interaction for config, case in pairs for interaction in _interactions(config, case, names_of[case])}

    possible = interactions_of((config, case) for case, case_configs in configs.items() for config in case_configs)
    num_possible = Counter(name for name, *_values in possible)
    num_left = Counter(name for name, *_values in possible - interactions_of(done))
    for name in dict.fromkeys((*classes(list(configs)), *sorted(num_left.keys() - {_OTHER_KNOBS}), _OTHER_KNOBS)):
        if num_left[name]:
            yield f"{name} ({num_left[name]} of {num_possible[name]} left)"
