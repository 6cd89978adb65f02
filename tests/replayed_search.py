"""Run the search on a measured space: every trial is known, so that a search takes no GPU."""

import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, make_dataclass
from typing import Any

import numpy as np
from kept_trials import TrialBlock
from numpy.typing import NDArray

from kerneltune.search.loop import Candidates, SearchLimits, explore
from kerneltune.spec import Config
from kerneltune.stats import Interval, median_interval
from kerneltune.task import Evaluation


@dataclass(frozen=True, slots=True)
class StandIn:
    """An evaluator whose parts a test gives; each part does nothing by default."""

    compile: Callable[[Config], Any]
    evaluate: Callable[[Config, Any], Future[Evaluation]] = lambda _config, begun: begun.evaluate()
    compilers: int = 1
    use_idle_time: Callable[[], None] = lambda: None
    is_ready: Callable[[], bool] = lambda: True


def known_times(trials: Mapping[Config, Evaluation]) -> StandIn:
    """Return an evaluator for which every config is compiled at once, and its trial is known."""

    def begin(config: Config) -> Future[Evaluation]:
        future: Future[Evaluation] = Future()
        future.set_result(trials[config])
        return future

    return StandIn(begin, lambda _config, begun: begun)


def replay(space: TrialBlock, seeds: int, evaluations: int = 200) -> NDArray[np.float64]:
    """Return the (seeds, evaluations) gaps of the best time so far to the optimum; infinite before the first time."""
    return np.array([search_once(space, evaluations, seed) for seed in range(seeds)])


def by_chance(space: TrialBlock, seeds: int, evaluations: int = 200) -> NDArray[np.float64]:
    """Return the gaps of a search that tries the default, then configs in random order."""
    others = [trial for knobs, trial in space.trials.items() if knobs != space.default]
    gaps = []
    for rng in map(random.Random, range(seeds)):
        order = [space.trials[space.default], *sorted(others, key=lambda _: rng.expovariate(1.0))]
        gaps.append(_gaps(space, order[:evaluations]))
    return np.array(gaps)


def _gaps(space: TrialBlock, trials: Iterable[Evaluation]) -> NDArray[np.float64]:
    times = [np.inf if trial.time_us is None else trial.time_us for trial in trials]
    return np.asarray(np.minimum.accumulate(times) / min(space.feasible.values()) - 1.0)


def search_once(space: TrialBlock, evaluations: int, seed: int) -> NDArray[np.float64]:
    """Return the gap after each evaluation of a search."""
    make = make_dataclass("Knobs", [name for name, _ in space.default], frozen=True, slots=True)
    trials: Mapping[Config, Evaluation] = {make(**dict(knobs)): trial for knobs, trial in space.trials.items()}
    search = SearchLimits(trials=min(evaluations, len(trials)), seed=seed)
    candidates = Candidates(list(trials), [make(**dict(space.default))])
    return _gaps(space, explore(candidates, search, known_times(trials)).values())


def gap_at(gaps: NDArray[np.float64], evaluations: int) -> Interval | None:
    """Return the median gap over the seeds with its interval; None where the space has fewer configs."""
    return None if evaluations > gaps.shape[1] else median_interval(np.minimum(gaps[:, evaluations - 1], 9.99))
