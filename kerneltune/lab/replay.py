"""A search run again on a measured space: how far from the optimum it is after so many evaluations.

Runs the code of `loop`; only the evaluator is another. Touches no GPU.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, make_dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kerneltune.search.loop import Search, explore
from kerneltune.search.spaces import MeasuredSpace
from kerneltune.search.task import Evaluation, Knobs
from kerneltune.spec import Config
from kerneltune.stats import Interval, median_interval

BUDGETS = (10, 25, 50, 100, 200)


@dataclass(frozen=True, slots=True)
class Answered:
    """A search.Started whose trial is known."""

    trial: Evaluation

    def done(self) -> bool:
        """Return true: every config compiles."""
        return True

    def evaluate(self) -> "Future[Evaluation]":
        """Return the trial."""
        future: Future[Evaluation] = Future()
        future.set_result(self.trial)
        return future

    def cancel(self) -> None:
        """Do nothing: there is nothing to give up."""


Gaps = NDArray[np.float64]
"""(seeds, evaluations): best time so far over the optimum, less one; infinite before the first time."""


def gap_at(gaps: Gaps, evaluations: int) -> Interval | None:
    """Return the median gap over the seeds and its interval; None where the space has fewer configs."""
    return None if evaluations > gaps.shape[1] else median_interval(np.minimum(gaps[:, evaluations - 1], 9.99))


def replay(
    space: MeasuredSpace,
    sampler: str,
    seeds: int,
    evaluations: int = max(BUDGETS),
    first: Sequence[Knobs] = (),
    ended: Callable[[], None] = lambda: None,
    each: Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]] = map,
) -> Gaps:
    """Run the search on a stored space, once with every seed.

    Args:
        evaluations: where to stop, also configs that give no time count.
        first: what to begin with beside the default, such as the best of the nearest shape.
        ended: called after every search.
        each: as `map`: does the searches, which know nothing of each other, and gives what they return in order.

    Raises:
        ValueError: no config of the space has a time.
    """
    if not space.feasible:
        raise ValueError(f"{space.file_name}: no config has a time")
    curves = []
    for curve in each(partial(_search, space, sampler, evaluations, first), range(seeds)):
        curves.append(curve)
        ended()
    return np.array(curves)


def _search(space: MeasuredSpace, sampler: str, evaluations: int, first: Sequence[Knobs], seed: int) -> NDArray[np.float64]:
    """Return the (evaluations,) gaps of one search."""
    make = make_dataclass("Knobs", [name for name, _ in next(iter(space.trials))], frozen=True, slots=True)
    trials: Mapping[Config, Evaluation] = {make(**dict(knobs)): trial for knobs, trial in space.trials.items()}
    begin = [config for knobs in (space.default, *first) if (config := make(**dict(knobs))) in trials]
    search = Search(trials=min(evaluations, len(trials)), sampler=sampler, seed=seed)
    found = explore(list(trials), begin, search, lambda c: Answered(trials[c]))
    times = [np.inf if trial.time_us is None else trial.time_us for trial in found.values()]
    return np.asarray(np.minimum.accumulate(times) / min(space.feasible.values()) - 1.0)


def nearest_best(space: MeasuredSpace, others: Sequence[MeasuredSpace], count: int = 2) -> list[Knobs]:
    """Return the best configs of the nearest other spaces of the same operator, variant and quantization."""

    def distance(other: MeasuredSpace) -> float:
        sizes = zip(space.axes, other.axes, strict=True)
        return float(sum(abs(np.log2(max(a, 1) / max(b, 1))) for (_, a), (_, b) in sizes)) + 0.5 * (other.dtype != space.dtype)

    same = (space.op, space.variant, space.quant, space.policy)
    related = [o for o in others if o is not space and (o.op, o.variant, o.quant, o.policy) == same and o.feasible]
    return [min(o.feasible, key=lambda knobs: o.feasible[knobs]) for o in sorted(related, key=distance)[:count]]
