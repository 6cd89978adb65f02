"""Analyse trials: how many a search needed, knobs that matter, values that never win, ties, the fewest configs for all cases."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from kerneltune.task import Evaluation, Knobs

NEAR = 0.02
"""Fraction over the best time up to which a config is good enough."""
TIE = 0.01
"""Fraction over the best time up to which the times of a screen cannot distinguish configs."""
_MOST_S = 10.0
"""Seconds of the search for a set cover, after which the smallest known cover is returned."""


class DeadValue(NamedTuple):
    """Hold a value of a knob that no good config of any case has, and the fraction of configs that were tried with it."""

    knob: str
    value: Any
    fraction: float


class Cover(NamedTuple):
    """Hold a set of configs: in every case the fastest config of the set is near the best time.

    Attributes:
        configs: the configs.
        worst_gap: largest gap of a case to its best time, a fraction.
        is_exact: whether no fewer configs can do.
    """

    configs: list[Knobs]
    worst_gap: float
    is_exact: bool


def num_to_near(evaluations: Iterable[Evaluation]) -> int:
    """Return the number of evaluations until a time is within 2 % of the best of all."""
    times = [math.inf if evaluation.time_us is None else evaluation.time_us for evaluation in evaluations]
    return next(number for number, time in enumerate(times, start=1) if time <= (1 + NEAR) * min(times))


def importances(times: Mapping[Knobs, float]) -> dict[str, float]:
    """Return the importance of each knob for the fastest tenth (PED-ANOVA), largest first; empty if no knob varies."""
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
    """Return the values of knobs that no good config of any case has, the largest fraction of configs first."""
    tried: Counter[tuple[str, Any]] = Counter()
    alive: set[tuple[str, Any]] = set()
    total = 0
    for times in cases:
        best = min(times.values())
        for knobs, time in times.items():
            total += 1
            tried.update(knobs)
            if time <= (1 + NEAR) * best:
                alive.update(knobs)
    dead = [DeadValue(*pair, count / total) for pair, count in tried.items() if pair not in alive]
    return sorted(dead, key=lambda value: (-value.fraction, value.knob, repr(value.value)))


def ties(times: Mapping[Knobs, float]) -> list[Knobs]:
    """Return the configs that are indistinguishable from the best config, fastest first."""
    best = min(times.values())
    return sorted((knobs for knobs, time in times.items() if time <= (1 + TIE) * best), key=lambda knobs: times[knobs])


def set_cover(cases: Sequence[Mapping[Knobs, float]]) -> Cover:
    """Return the smallest set of configs that has a config within 2 % of the best time of every case, by an integer program."""
    configs = list(dict.fromkeys(knobs for times in cases for knobs in times))
    times_us = np.array([[times.get(knobs, math.inf) for knobs in configs] for times in cases])
    gaps = times_us / times_us.min(axis=1, keepdims=True) - 1.0  # (cases, configs)
    count = 1.0 + np.minimum(gaps, 1.0).mean(axis=0) / len(configs)  # between sets of equal size, prefer smaller gaps
    covered = LinearConstraint((gaps <= NEAR).astype(float), lb=1)
    solved = milp(count, integrality=1, bounds=Bounds(0, 1), constraints=covered, options={"time_limit": _MOST_S})
    chosen = np.unique(gaps.argmin(axis=1)) if solved.x is None else np.flatnonzero(solved.x > 0.5)
    return Cover([configs[i] for i in chosen], float(gaps[:, chosen].min(axis=1).max()), is_exact=solved.status == 0)
