"""What the trials of searches say: regret, which knobs matter, values that never win, ties, and how few configs would do.

Pure functions of configs and times. May import optuna.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneltune.rounding import cdiv

Knobs = tuple[tuple[str, Any], ...]

NEAR = 0.02
"""Configs within this fraction of the best are good enough."""
TIE = 0.01
"""Configs within this fraction of the best cannot be told apart by what a screen measures."""
_EXACT_UP_TO = 20_000
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class DeadValue:
    """A value that no config within 2 % of the best has. saving: the share of all configs that have it."""

    knob: str
    value: Any
    saving: float


@dataclass(frozen=True, slots=True)
class Portfolio:
    """The fewest configs of which one is within 2 % of the best on every case. worst: the largest gap that is left."""

    configs: tuple[Knobs, ...]
    worst: float
    exact: bool


def regret(times: Sequence[float | None]) -> list[float]:
    """After every evaluation, how far the best so far is above the best of all; infinite before the first time."""
    best = min(time for time in times if time is not None)
    so_far = itertools.accumulate((float("inf") if time is None else time for time in times), min)
    return [time / best - 1.0 for time in so_far]


def sparkline(gaps: Sequence[float], width: int = 40) -> str:
    """Draw the curve as bars of at most `width` columns, a full bar at 50 % or more."""
    step = max(1, cdiv(len(gaps), width))
    return "".join(_BARS[min(len(_BARS) - 1, int(min(gap, 0.5) / 0.5 * (len(_BARS) - 1) + 0.999))] for gap in gaps[::step])


def importances(times: Mapping[Knobs, float]) -> dict[str, float]:
    """How much of being among the best tenth is due to each knob (PED-ANOVA), largest first; empty where nothing varies."""
    import optuna

    configs = [dict(knobs) for knobs in times]
    offered = {name: sorted({config[name] for config in configs}, key=repr) for name in configs[0]}
    varied = {name: values for name, values in offered.items() if len(values) > 1}
    if not varied or len(set(times.values())) < 2:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(values) for name, values in varied.items()
    }
    study = optuna.create_study()
    for config, time in zip(configs, times.values(), strict=True):
        params = {name: config[name] for name in varied}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=time))
    return dict(optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()))


def dead_values(cases: Iterable[Mapping[Knobs, float]]) -> list[DeadValue]:
    """Values that no good config of any case has, the largest saving first."""
    tried: dict[tuple[str, Any], int] = {}
    alive: set[tuple[str, Any]] = set()
    total = 0
    for times in cases:
        best = min(times.values())
        for knobs, time in times.items():
            total += 1
            for pair in knobs:
                tried[pair] = tried.get(pair, 0) + 1
            if time <= (1 + NEAR) * best:
                alive.update(knobs)
    dead = [DeadValue(*pair, saving=count / total) for pair, count in tried.items() if pair not in alive]
    return sorted(dead, key=lambda value: (-value.saving, value.knob, repr(value.value)))


def ties(times: Mapping[Knobs, float]) -> list[Knobs]:
    """Return the configs that cannot be told from the best, fastest first."""
    best = min(times.values())
    return sorted((knobs for knobs, time in times.items() if time <= (1 + TIE) * best), key=lambda knobs: times[knobs])


def portfolio(cases: Sequence[Mapping[Knobs, float]]) -> Portfolio:
    """Exact where few combinations have to be looked at, else greedy."""
    best = [min(times.values()) for times in cases]
    covers: dict[Knobs, frozenset[int]] = {}
    for index, times in enumerate(cases):
        for knobs, time in times.items():
            if time <= (1 + NEAR) * best[index]:
                covers[knobs] = covers.get(knobs, frozenset()) | {index}
    everything = frozenset(range(len(cases)))
    greedy = _greedy(covers, everything)
    chosen = _smaller(covers, everything, len(greedy)) or greedy
    exact = chosen is not greedy or _combinations(len(_useful(covers)), len(greedy) - 1) <= _EXACT_UP_TO
    gaps = [
        min(times[knobs] for knobs in chosen if knobs in times) / floor - 1.0 for times, floor in zip(cases, best, strict=True)
    ]
    return Portfolio(tuple(chosen), max(gaps), exact)


def _greedy(covers: Mapping[Knobs, frozenset[int]], everything: frozenset[int]) -> list[Knobs]:
    chosen: list[Knobs] = []
    left = everything
    while left:
        chosen.append(max(covers, key=lambda knobs: len(covers[knobs] & left)))
        left -= covers[chosen[-1]]
    return chosen


def _smaller(covers: Mapping[Knobs, frozenset[int]], everything: frozenset[int], size: int) -> list[Knobs] | None:
    """Find the first cover with fewer than `size` configs, the fewest first, as far as it can be looked for."""
    useful = _useful(covers)
    for fewer in range(1, size):
        if _combinations(len(useful), fewer) > _EXACT_UP_TO:
            return None
        for chosen in itertools.combinations(useful, fewer):
            if frozenset().union(*(covers[knobs] for knobs in chosen)) == everything:
                return list(chosen)
    return None


def _useful(covers: Mapping[Knobs, frozenset[int]]) -> list[Knobs]:
    """Configs that cover something no other one covers along with more."""
    distinct: dict[frozenset[int], Knobs] = {}
    for knobs, covered in covers.items():
        distinct.setdefault(covered, knobs)
    return [knobs for covered, knobs in distinct.items() if not any(covered < other for other in distinct)]


def _combinations(n: int, k: int) -> int:
    """Return how many combinations of up to k of n have to be looked at."""
    return sum(math.comb(n, i) for i in range(1, k + 1))
