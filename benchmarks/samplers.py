"""Compare samplers of Optuna with `FiniteGPSampler` on measured spaces, without a GPU.

python benchmarks/samplers.py [--sampler ours,gp,tpe,qmc,random] [--seeds 5] [SPACE]...

A row shows the gap to the fastest config in per cent after 10, 25, 50 and 100 evaluations: the median over the seeds. Every
search begins with the default config and keeps eight configs in flight, as `kerneltune tune` does.
"""

import argparse
import random
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from kept_trials import ROOT, TrialBlock, whole_spaces
from optuna.distributions import BaseDistribution

from kerneltune.search import FiniteGPSampler

EVALUATIONS = (10, 25, 50, 100)
IN_FLIGHT = 8
STARTUP = 8


class UntriedSampler(FiniteGPSampler):
    """Let another sampler draw from the product of all knobs; repeats and invalid configs are drawn again."""

    def __init__(self, configs: Sequence[Mapping[str, Any]], inner: optuna.samplers.BaseSampler, attempts: int) -> None:
        """Take the configs; after `attempts` draws the next config of the list is tried instead."""
        super().__init__(configs, n_startup_trials=len(configs))
        self._inner, self._attempts = inner, attempts
        self._varied = {name: choices for name, choices in self.space.items() if not choices.single()}

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the knobs of the next config."""
        self._asking = study, trial
        return super().sample_relative(study, trial, search_space)

    def choose(self) -> int:
        """Return the index of a config that was not tried."""
        first = super().choose()
        for _ in range(self._attempts if first >= STARTUP else 0):
            drawn = self.configs[first] | self._inner.sample_relative(*self._asking, dict(self._varied))
            index = self._index.get(tuple(drawn[name] for name in self.space))
            if index in self.untried:
                return index
        return first


def make_sampler(name: str, configs: Sequence[Mapping[str, Any]], seed: int) -> FiniteGPSampler:
    """Return a sampler by name over configs whose order is the order in which the search begins."""
    if name == "ours":
        return FiniteGPSampler(configs, 1 + STARTUP, seed)
    if name == "random":
        return FiniteGPSampler(configs, n_startup_trials=len(configs))
    if name == "gp":
        return UntriedSampler(configs, optuna.samplers.GPSampler(n_startup_trials=STARTUP, seed=seed), attempts=2)
    if name == "tpe":
        inner = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, n_startup_trials=STARTUP, seed=seed)
        return UntriedSampler(configs, inner, attempts=32)
    return UntriedSampler(configs, optuna.samplers.QMCSampler(seed=seed), attempts=32)


def gaps(space: TrialBlock, name: str, seed: int) -> list[float]:
    """Return the gap of the best time so far to the optimum after every evaluation of one search."""
    rest = [knobs for _, knobs, _ in space.rows if knobs != space.default]
    random.Random(seed).shuffle(rest)
    sampler = make_sampler(name, [dict(knobs) for knobs in (space.default, *rest)], seed)
    study = optuna.create_study(sampler=sampler)
    fastest = min(space.feasible.values())
    in_flight: deque[optuna.Trial] = deque()
    best, found, times = float("inf"), [], {knobs: trial.time_us for _, knobs, trial in space.rows}
    for _ in range(min(EVALUATIONS[-1], len(times))):
        while len(in_flight) < IN_FLIGHT:
            in_flight.append(study.ask(dict(sampler.space)))
        trial = in_flight.popleft()
        time_us = times[tuple((knob, trial.params[knob]) for knob, _ in space.default)]
        state = optuna.trial.TrialState.FAIL if time_us is None else optuna.trial.TrialState.COMPLETE
        study.tell(trial, time_us, state=state)
        best = min(best, time_us or best)
        found.append(best / fastest - 1.0)
    return found


def main() -> None:
    """Print a table for every space."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", nargs="*", help="parts of the names of spaces; all if none")
    parser.add_argument("--sampler", default="ours,random", help="names, separated by commas: ours, gp, tpe, qmc, random")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    names = options.sampler.split(",")
    if unknown := set(names) - {"ours", "gp", "tpe", "qmc", "random"}:
        parser.error(f"sampler: {', '.join(sorted(unknown))}: expected ours, gp, tpe, qmc or random")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    spaces = [space for space in whole_spaces() if any(part in space.name for part in options.space or [""])]
    if not spaces:
        parser.error(f"space: no measured space in {ROOT} has one of these parts in its name: {options.space}")
    for space in spaces:
        print(f"{space.name}: {len(space.rows)} configs")
        for name in names:
            began = time.process_time()
            curves = np.array([gaps(space, name, seed) for seed in range(options.seeds)])
            shown = (f"@{n} {100 * np.median(curves[:, n - 1]):.1f} %" for n in EVALUATIONS if n <= curves.shape[1])
            print(f"  {name:<8}{'  '.join(shown)}  {(time.process_time() - began) / options.seeds:.1f} CPU s per search")


if __name__ == "__main__":
    main()
