"""Transfer configs from recorded cases to other cases, with equal knobs or with knobs that follow a size."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kerneltune import cache
from kerneltune.rounding import next_power_of_2
from kerneltune.rule import Scaled, knobs_at
from kerneltune.spec import Case, Config, Op, Variant

_EXPLAINED = 0.6
"""Largest fraction of a knob's variance that may remain if the knob follows a size."""
_LEAST_DONORS = 5
_LEAST_RIVALS = 8
"""Smallest number of configs of a case; configs of its space fill up a smaller number."""

Donor = tuple[Case, dict[str, Any]]
Pairs = tuple[tuple[str, Any], ...]
"""A `rule.Form` as hashable pairs."""


def donors_of(op: Op, variant: Variant, policy: str, device_slug: str, root: Path | None) -> list[Donor]:
    """Return the recorded cases of a variant with their knobs, if the knobs are still valid."""
    found = []
    for entry in cache.load(op.name, device_slug, root):
        case = entry.as_case
        if (entry.variant, entry.policy) == (variant.name, policy) and variant.valid_config(case, entry.config) is not None:
            found.append((case, entry.config))
    return found


def followed(donors: Sequence[Donor]) -> dict[str, Scaled]:
    """Return the knobs that follow a size, each with the size and the factor that explain most of its variance.

    The bounds of a knob are its smallest and its largest value among the donors.
    """
    found: dict[str, Scaled] = {}
    if len(donors) < _LEAST_DONORS:
        return found
    for knob, value in donors[0][1].items():
        if type(value) is not int or any(type(given.get(knob)) is not int or given[knob] < 1 for _, given in donors):
            continue
        values = [given[knob] for _, given in donors]
        logs, low, high = np.log2(values), min(values), max(values)
        best = _EXPLAINED * float(((logs - np.median(logs)) ** 2).mean())
        for (axis, _), sign in itertools.product(donors[0][0].axes, (1, -1)):
            sizes = sign * np.log2([next_power_of_2(case[axis]) for case, _ in donors])
            for factor in np.unique(np.round(logs - sizes)):
                left = float(((np.clip(sizes + factor, math.log2(low), math.log2(high)) - logs) ** 2).mean())
                if left < best:
                    best, found[knob] = left, Scaled(axis, float(2.0**factor), low, high, sign < 0)
    return found


def forms_of(donor: Donor, follows: Mapping[str, Scaled]) -> list[Pairs]:
    """Return a donor's config with plain knobs, with each single knob following its size, and with all knobs following.

    If the common factor does not give the donor's value, the donor's own factor replaces it.
    """
    case, knobs = donor
    sizes, scaled = dict(case.axes), {}
    for knob, common in follows.items():
        whole = next_power_of_2(case[common.pow2])
        own = float(knobs[knob] * whole) if common.inverse else knobs[knob] / whole
        scaled[knob] = common if common.at(sizes) == knobs[knob] else msgspec.structs.replace(common, times=own)
    changes = [{}, *({knob: value} for knob, value in scaled.items()), scaled]
    return list(dict.fromkeys(tuple({**knobs, **change}.items()) for change in changes))


def distance(a: Case, b: Case) -> float:
    """Return the distance of two cases: log2 of their sizes, plus 2 for each other option or mode, plus 0.5 for another type."""
    apart = sum(abs(math.log2(max(size, 1) / max(b[axis], 1))) for axis, size in a.axes)
    other = dict(b.options)
    apart += 2.0 * sum(other.get(name) != value for name, value in a.options)
    return apart + 2.0 * (a.quant != b.quant) + 0.5 * (a.dtype != b.dtype)


def rivals(op: Op, variant: Variant, case: Case, donors: Sequence[Donor], most: int) -> list[Config]:
    """Return configs that a rule might choose for a case: default, promising, of the nearest donors, then the most frequent."""
    follows = followed(donors)
    offered = [(distance(case, donor[0]), form) for donor in donors for form in forms_of(donor, follows)]
    counts = Counter(form for _, form in offered)
    near = [form for _, form in sorted(offered, key=lambda pair: pair[0])]
    frequent = [form for form, _ in counts.most_common()]
    sizes = dict(case.axes)
    own = [knobs for donor, knobs in donors if donor == case]
    found: dict[Config, None] = {config: None for knobs in own if (config := variant.valid_config(case, knobs)) is not None}
    found |= dict.fromkeys([variant.default_config(case), *variant.promising(case)[: most // 4]])
    for group, limit in ((near, most // 2), (frequent, most), (near, most)):
        for form in dict.fromkeys(group):
            if len(found) >= (limit + len(own) + 1 if group is near else most):
                break
            config = variant.valid_config(case, knobs_at(dict(form), sizes))
            if config is not None:
                found[config] = None
    space = list(variant.configs(case)) if len(found) < min(most, _LEAST_RIVALS) else []
    for config in random.Random(0).sample(space, min(len(space), _LEAST_RIVALS)):
        if len(found) < min(most, _LEAST_RIVALS):
            found[config] = None
    return list(found)[:most]
