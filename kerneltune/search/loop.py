"""Search a finite space: ask a sampler for configs and tell it their times until a limit is reached.

An `Evaluator` evaluates the configs, so a replay of measured spaces runs the same code. `samplers.py` extends the samplers of
Optuna; a search imports it when it begins.
"""

import math
import operator
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from kerneltune.spec import Config
from kerneltune.task import Evaluation, knobs_of

if TYPE_CHECKING:
    from kerneltune.search.surrogate import Surrogate

MOST_IN_FLIGHT = 8
"""Configs in flight from which on no further config begins, unless a compiler is idle and at most `_READY` configs wait.

The sampler decides without the times of the configs in flight.
"""
_FIRST = 8
"""Configs that are tried after `Candidates.first` before the sampler's model chooses."""
_LESS_LIKELY = 2.0
"""Each knob that differs from the default, or from the best config of a near case, makes a config so much less likely to be next.

Defaults and near cases guess well. On the shipped spaces, configs within two knobs of the default are 8 % of all configs, and 39
of the 63 configs within 3 % of the best.
"""
_GAIN_AFTER = 16
"""Fewest known times from which the expected gain is computed."""
_GAIN_EVERY = 4
"""Told configs between two computations of the expected gain."""
_READY = 2
"""Compiled configs that keep the GPU busy while the search decides; the sampler is told so many evaluations at a time."""
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Hold the limits of a search.

    Attributes:
        budget_s: seconds per case, counted from the first evaluation after the GPU is ready; None for no limit.
        trials: largest number of configs, with the configs of earlier searches of the task.
        seed: seed of everything that is drawn.
        until_gain: end when all untried configs are expected to save less than this fraction of the best time; 0 for never.
        until: time of the monotonic clock in s from which on nothing begins; a search ends once a config has a time.
    """

    budget_s: float | None = None
    trials: int | None = None
    seed: int = 0
    until_gain: float = 0.0
    until: float = math.inf

    @property
    def is_time_over(self) -> bool:
        """Return whether `until` has passed."""
        return time.monotonic() >= self.until


@dataclass(frozen=True, slots=True)
class Candidates:
    """Hold the configs that a search may try.

    Attributes:
        pool: all configs, each once.
        first: configs of the pool to begin with, such as the default and the best config of the nearest case.
    """

    pool: Sequence[Config]
    first: Sequence[Config] = ()

    def in_order(self, limits: SearchLimits) -> list[Config]:
        """Return all configs in the order in which a search tries them before the first times are known.

        After the first configs comes a random order, in which a config that differs little from one of them probably comes early.
        """
        first, rng = dict.fromkeys(self.first), random.Random(limits.seed)
        guesses = [knobs_of(guess).values() for guess in first]

        def draw_time(config: Config) -> float:
            values = knobs_of(config).values()
            num_changed = min((sum(map(operator.ne, values, guess)) for guess in guesses), default=0)
            return rng.expovariate(1.0) * _LESS_LIKELY**num_changed

        return [*first, *sorted((config for config in self.pool if config not in first), key=draw_time)]


class Evaluator(Protocol):
    """Evaluate configs for a search; `compilers` is the number of configs that compile at the same time."""

    compilers: int

    def compile(self, config: Config) -> "Future[Any]":
        """Begin to compile a config. The compilation can be cancelled until it runs."""

    def evaluate(self, config: Config, compilation: "Future[Any]") -> "Future[Evaluation]":
        """Return the evaluation of a compiled config. Until its measurement begins, the future can be cancelled."""

    def is_ready(self) -> bool:
        """Return whether a compiled config can be measured now. A budget counts from the first evaluation after that."""

    def use_idle_time(self) -> None:
        """Do useful work while the search waits. The search calls this again and again."""


def explore(
    candidates: Candidates, limits: SearchLimits, evaluator: Evaluator, known: Mapping[Config, Evaluation] = MappingProxyType({})
) -> dict[Config, Evaluation]:
    """Try candidates until a budget is used, the expected gain is small, or no config is left; return all evaluations.

    known: evaluations of an earlier search, which count as tried and come first.
    """
    state = SearchState(candidates, limits, evaluator)
    for config, evaluation in known.items():
        state.tell(config, evaluation.time_us)
    most = min(limits.trials or len(candidates.pool), len(candidates.pool))
    evaluations = dict(known)
    began_at: float | None = None  # the time to start a process and to make inputs does not belong to the search
    is_over = False
    try:
        while True:
            while not is_over and len(evaluations) + state.num_in_flight < most and state.compile_next():
                pass
            if not state.num_in_flight:
                break
            state.sampler.prepare()
            evaluator.use_idle_time()
            for config, evaluation in state.finished():
                evaluations[config] = evaluation
                state.tell(config, evaluation.time_us)
                if began_at is None and evaluator.is_ready():
                    began_at = time.monotonic()
                is_over = is_over or state.is_gain_small()
            spent_s = 0.0 if began_at is None else time.monotonic() - began_at
            is_over = is_over or spent_s > (limits.budget_s or math.inf) or (limits.is_time_over and bool(times_of(evaluations)))
            if is_over:
                state.cancel()
    finally:
        state.cancel()
    return evaluations


def times_of(evaluations: Mapping[Config, Evaluation]) -> dict[Config, float]:
    """Return config -> time; configs without a time are left out."""
    return {config: evaluation.time_us for config, evaluation in evaluations.items() if evaluation.time_us is not None}


class SearchState:
    """Choose the configs of a search as a study of Optuna does, and hold the configs that compile or wait for a measurement.

    A slow compilation delays no other config.

    Attributes:
        sampler: sampler that chooses among the untried configs.
    """

    def __init__(self, candidates: Candidates, limits: SearchLimits, evaluator: Evaluator) -> None:
        """Set up the sampler of a search."""
        from kerneltune.search.samplers import FiniteGPSampler

        self._order, self._evaluator = candidates.in_order(limits), evaluator
        knobs = [knobs_of(config) for config in self._order]
        self.sampler = FiniteGPSampler(knobs, len(set(candidates.first)) + _FIRST, limits.seed)
        self._least_gain, self._seed = limits.until_gain, limits.seed
        self._index = {config: index for index, config in enumerate(self._order)}
        self._compiling: list[tuple[Config, Future[Any]]] = []
        self._waiting: list[tuple[Config, Future[Evaluation]]] = []

    @property
    def num_in_flight(self) -> int:
        """Return the number of configs that compile or wait."""
        return len(self._compiling) + len(self._waiting)

    def compile_next(self) -> bool:
        """Begin to compile the next config; return False if enough configs are in flight, or all were tried."""
        is_busy = len(self._waiting) > _READY or len(self._compiling) >= self._evaluator.compilers
        index = None if self.num_in_flight >= MOST_IN_FLIGHT and is_busy else self.sampler.ask()
        if index is not None:
            config = self._order[index]
            self._compiling.append((config, self._evaluator.compile(config)))
        return index is not None

    def tell(self, config: Config, time_us: float | None) -> None:
        """Take the time of a config, or None for a failure, whether the sampler chose the config or not."""
        self.sampler.tell(self._index[config], time_us)

    def is_gain_small(self) -> bool:
        """Return whether the untried configs are expected to gain too little; computed after every fourth told config."""
        times = self.sampler.times
        num_timed = sum(time_us is not None for time_us in times.values())
        if not self._least_gain or num_timed < _GAIN_AFTER or len(times) % _GAIN_EVERY:
            return False
        self._surrogate.fit(list(times), list(times.values()))
        return self._surrogate.gain([*self.sampler.untried, *self.sampler.running]) < self._least_gain

    @cached_property
    def _surrogate(self) -> "Surrogate":
        from kerneltune.search.surrogate import FAR, Surrogate

        return Surrogate(self.sampler.configs, self._seed, worst=FAR)

    def finished(self) -> list[tuple[Config, Evaluation]]:
        """Hand compiled configs to their evaluation and return up to two finished evaluations; wait 1 ms if there are none."""
        for config, compilation in [(config, future) for config, future in self._compiling if future.done()]:
            self._compiling.remove((config, compilation))
            self._waiting.append((config, self._evaluator.evaluate(config, compilation)))
        ready = [pending for pending in self._waiting if pending[1].done()][:_READY]
        if not ready:
            time.sleep(_POLL_S)
        self._waiting = [pending for pending in self._waiting if pending not in ready]
        return [(config, evaluation.result()) for config, evaluation in ready]

    def cancel(self) -> None:
        """Give up every config that has no evaluation, except the config that is measured at this moment."""
        for _, compilation in self._compiling:
            compilation.cancel()
        self._compiling.clear()
        self._waiting = [(config, evaluation) for config, evaluation in self._waiting if not evaluation.cancel()]
