"""What a search chooses from, what it begins with, and what of it is likely to be refused: from what is stored and cached.

Measures nothing.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kerneltune.errors import unknown
from kerneltune.search.trials import Sizes, TrialStore, knobs_of
from kerneltune.spec import Case, Config, Op, Space, Variant
from kerneltune.tuning.cached import fitting

REFUSED = frozenset(("compile", "spills", "occupancy"))

Told = Sequence[tuple[Sizes, Mapping[str, Any], bool]]
"""Other cases: sizes, knobs of a config, and whether it was refused."""

_PER_DOUBLING = 2.0
_SIZES_COUNT = 0.2
_DOUBT = 0.02
_NEIGHBOURS = 3
_TRANSFERRED = 16
TOLD = 2000
"""Refusals of other sizes that are asked, the newest: more take longer than they are worth."""


def neighbour_dtype(op: Op, case: Case) -> Case | None:
    """Return the same case in the other 16-bit type, whose ranking this one may start from."""
    other = {"bfloat16": "float16", "float16": "bfloat16"}.get(case.dtype)
    return Case(case.name, case.axes, other, case.quant, case.options) if other in op.dtypes and other else None


def candidates(op: Op, case: Case, variant: Variant, policy: str, store: TrialStore | None = None) -> list[Config]:
    """Default first, then the space; only the neighbour's best where the other 16-bit type was searched before.

    store: of what was searched before; without it all of the space is a candidate.

    Raises:
        ValueError: the space has no valid config for the case, or says what makes no sense.
    """
    space = checked_space(op, case, variant)
    neighbour = neighbour_dtype(op, case)
    if store is not None and neighbour is not None:
        ranked = store.ranked(op, neighbour, variant, policy)
        if len(ranked) > max(_TRANSFERRED, len(store.ranked(op, case, variant, policy))):
            space = [config for values in ranked[:_TRANSFERRED] if (config := variant.config_from(values)) in set(space)]
    default = variant.default_config(case)
    return [default, *(config for config in space if config != default)]


def starting_points(op: Op, case: Case, variant: Variant, policy: str, pool: Sequence[Config], root: Path | None) -> list[Config]:
    """Return the default, what is promising, then what the cache holds for this case and the nearest: sizes, options, type."""
    near = fitting(op, case, variant, policy, root)
    nearest = [config for _, config in sorted(near, key=lambda found: found[0].distance)[:_NEIGHBOURS]]
    offered = set(pool)
    found = [config for config in (*variant.promising(case), *nearest) if config in offered]
    return list(dict.fromkeys([pool[0], *found]))


def feasibility_of(op: Op, case: Case, variant: Variant, store: TrialStore, pool: Sequence[Config]) -> dict[Config, float] | None:
    """Return the probability that each config compiles for good, by what is stored of other sizes; None where nothing is."""
    told = [
        (axes, knobs, evaluation.status in REFUSED)
        for axes, knobs, evaluation in store.of_other_sizes(op, case, variant)[-TOLD:]
        if list(knobs) == list(knobs_of(pool[0]))
    ]
    found = probabilities(case.axes, [knobs_of(config) for config in pool], told)
    return None if found is None else dict(zip(pool, map(float, found), strict=True))


def probabilities(sizes: Sizes, configs: Sequence[Mapping[str, Any]], told: Told) -> NDArray[np.float64] | None:
    """Return the probability (configs,) that each config compiles for good; None where nothing is known of other cases.

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
    """Return the numeric knobs as powers of two, and the other knobs as the number of their value."""
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


Given = Sequence[tuple[str, tuple[str, ...]]]
"""Names of knobs and their values as text."""
_Values = tuple[Any, ...]


def widened(variant: Variant, knobs: Given) -> Variant:
    """Return the variant with further values to some knobs of its space; `valid` still has the last word.

    Raises:
        ValueError: a knob that the variant does not have, or a value of another type.
    """
    return _changed(variant, knobs, lambda offered, given: tuple(dict.fromkeys((*offered, *given))))


def narrowed(variant: Variant, knobs: Given) -> Variant:
    """Return the variant with only these values to some knobs of its space.

    Raises:
        ValueError: a knob that the variant does not have, or a value of another type.
    """
    return _changed(variant, knobs, _some_of)


def _some_of(offered: _Values, given: _Values) -> _Values:
    missing = [value for value in given if value not in offered]
    if missing:
        raise unknown("knob", missing[0], offered)
    return given


def _changed(variant: Variant, knobs: Given, change: Callable[[_Values, _Values], _Values]) -> Variant:
    if not knobs:
        return variant
    types = {f.name: f.type for f in fields(variant.config)} if variant.config is not None else {}
    values: dict[str, _Values] = {}
    for name, texts in knobs:
        if name not in types:
            raise unknown("knob", name, types, f" of {variant.name}")
        values[name] = tuple(_typed(name, text, types[name]) for text in texts)

    def space(case: Case) -> Space:
        offered = variant.space(case)
        return {name: change(given, values[name]) if name in values else given for name, given in offered.items()}

    return replace(variant, space=space)


def _typed(name: str, text: str, kind: Any) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"knob: {name}: {text!r}: expected {getattr(kind, '__name__', kind)}") from None


def takes(op: Op, case: Case, variant: Variant) -> bool:
    """Return whether a variant takes a case.

    Raises:
        ValueError: `unsupported` raises.
    """
    with _in_one_line(op, case, variant):
        return variant.unsupported(case) is None


def checked_space(op: Op, case: Case, variant: Variant) -> list[Config]:
    """Return the valid configs of a space, each once.

    Raises:
        ValueError: no config is valid (names the most frequent reason), a knob has no value or the same one twice, knobs and
            config class disagree, or `space`, `valid`, `default` or `promising` raises.
    """
    with _in_one_line(op, case, variant):
        knobs = variant.space(case)
        for knob, offered in knobs.items():
            if not offered:
                raise ValueError(f"space: {knob}: no value")
            if len(set(offered)) < len(offered):
                raise ValueError(f"space: {knob}: {offered!r}: a value twice")
        found = list(variant.configs(case))
        chosen = [("default", variant.default_config(case)), *(("promising", config) for config in variant.promising(case))]
    if not found:
        raise ValueError(f"{op.name} {variant.name}: no valid config for {case.label}{_why(variant, case)}")
    with _in_one_line(op, case, variant):
        for name, config in chosen:
            if type(config) is not type(found[0]):
                raise ValueError(f"{name}: {config!r}: expected a {type(found[0]).__name__}")
    return found


@contextmanager
def _in_one_line(op: Op, case: Case, variant: Variant) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # an operator's own code may fail in any way
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{op.name} {variant.name}: {case.label}: {kind}{' '.join(str(error).split())}") from error


def _why(variant: Variant, case: Case) -> str:
    """Return the reason that `valid` gives most often."""
    space = variant.space(case)
    make = partial(_configured, variant, tuple(space))
    reasons = Counter(variant.valid(case, make(values)) for values in itertools.product(*space.values()))
    return f": {reasons.most_common(1)[0][0]} ({reasons.most_common(1)[0][1]} of {reasons.total()} configs)" if reasons else ""


def _configured(variant: Variant, knobs: tuple[str, ...], values: tuple[Any, ...]) -> Config:
    assert variant.config is not None
    return variant.config(**dict(zip(knobs, values, strict=True)))
