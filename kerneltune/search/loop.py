"""What to try next in a finite space, and the loop that asks for it and hears what it took.

Knows no operator, GPU or file: whoever starts a search says how a config is evaluated, so a replay runs the same code
offline. May import optuna.
"""

import operator
import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kerneltune.search.line import Line, Started
from kerneltune.search.trials import Trial, knobs_of
from kerneltune.spec import Config

if TYPE_CHECKING:
    from kerneltune.search.surrogate import Surrogate

SAMPLERS = ("gp", "tpe", "random", "qmc")
DEFAULT_SAMPLER = "gp"
ENUMERATE_UP_TO = 120
AHEAD = 8
"""Configs in flight as long as one of them is compiled and waits to be measured: what to try is decided that many configs
before its time is known; a replay keeps the same delay. While none waits, as many compile as there are compilers."""
_AHEAD_BLIND = 48
"""The same where no time changes what is tried next."""
_FIRST = 8
_LESS_LIKELY = 2.0
"""How much less likely a config is drawn for every knob in which it differs from a default or a neighbour's best, which are good
guesses: on the shipped spaces at most two knobs differ from the default's in 8 % of all configs, and in 39 of the 63 that are
within 3 % of the best."""
_GAIN_AFTER = 16
_GAIN_EVERY = 4
_SCORED = 2048


@dataclass(frozen=True, slots=True)
class Search:
    """How much to search.

    Attributes:
        budget_s: seconds per case from its first result on that the bench is ready for, None for no limit.
        trials: most configs.
        until_gain: stop when trying all the rest is expected to save less than this fraction of the best time.
        sampler: where the space is not simply enumerated: one of SAMPLERS.
        seed: of whatever is drawn.

    Raises:
        ValueError: a number out of range, an unknown sampler.
    """

    budget_s: float | None = None
    trials: int | None = None
    sampler: str = DEFAULT_SAMPLER
    seed: int = 0
    until_gain: float | None = None

    def __post_init__(self) -> None:
        if self.budget_s is not None and not self.budget_s > 0:
            raise ValueError(f"budget must be above 0 seconds, got {self.budget_s}")
        if self.trials is not None and self.trials <= 0:
            raise ValueError(f"trials must be above 0, got {self.trials}")
        if self.until_gain is not None and not 0 < self.until_gain < 1:
            raise ValueError(f"until-gain must be between 0 and 1, got {self.until_gain}")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {self.sampler!r}")


class Proposals(Protocol):
    """Where configs come from, each of them once. ahead: how many may be in flight."""

    ahead: int

    def ask(self) -> Config | None:
        """The next config to try; None when there is no other."""

    def tell(self, config: Config, time_us: float | None) -> None:
        """What it took; None where it gave no time. It is not proposed after that."""

    def prepare(self) -> None:
        """Now that the first configs compile: what takes long and was not needed to ask for them. Called again and again."""


@dataclass(frozen=True, slots=True)
class Explored:
    """The trials of a search in the order of their evaluation."""

    trials: dict[Config, Trial]

    @property
    def times(self) -> dict[Config, float]:
        """The configs that have a time."""
        return {config: trial.time_us for config, trial in self.trials.items() if trial.time_us is not None}


def explore(
    pool: Sequence[Config],
    first: Sequence[Config],
    search: Search,
    start: Callable[[Config], Started],
    on_trial: Callable[[Config, Trial], None] = lambda _config, _trial: None,
    known: Mapping[Config, Trial] = MappingProxyType({}),
    compilers: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
    chances: Mapping[Config, float] | None = None,
    ready: Callable[[], bool] = lambda: True,
) -> Explored:
    """Try configs of a pool until a budget is used, the expected gain is small, or there are no others.

    Args:
        pool: all configs, none twice.
        first: those of the pool to begin with, such as the default and the best of the nearest shape.
        known: what was found out before; it counts as tried, as in a search that was interrupted.
        compilers: how many configs compile at the same time.
        meanwhile: called whenever the search has asked for what it wants, again and again.
        chances: how likely each config of the pool is not to be refused, where that can be told.
        ready: whether the bench could measure: what is refused before that does not begin the budget's seconds.
    """
    proposals, gain = propose(pool, first, search, chances), _Gain(pool, search, known)
    for config, trial in known.items():
        proposals.tell(config, trial.time_us)
    limit = len(pool) if search.trials is None else min(search.trials, len(pool))
    line, trials = Line(compilers), dict(known)
    began: float | None = None  # starting a process on the GPU, inputs and reference are not the search's time
    enough = False
    try:
        while True:
            while not enough and line.has_room(proposals.ahead) and len(trials) + line.length < limit:
                asked = proposals.ask()
                if asked is None:
                    break
                line.add(asked, start(asked))
            if not line.length:
                break
            proposals.prepare()
            meanwhile()
            for config, trial in line.move():
                trials[config] = trial
                proposals.tell(config, trial.time_us)
                on_trial(config, trial)
                began = time.monotonic() if began is None and ready() else began
                spent = search.budget_s is not None and began is not None and time.monotonic() - began > search.budget_s
                enough = enough or spent or gain.is_small(config, trial)
            if enough:
                line.give_up()
    finally:
        line.give_up(also_measured=True)
    return Explored(trials)


def propose(
    pool: Sequence[Config], first: Sequence[Config], search: Search, chances: Mapping[Config, float] | None = None
) -> Proposals:
    """The proposals of a search: all in order where the space is small and no budget is set, else those of its sampler.

    What is more likely to be refused than not comes last, as long as no sampler knows better.
    """
    order = list(dict.fromkeys([*first, *pool]))
    begin = len(set(first))
    unlimited = search.budget_s is None and search.until_gain is None and (search.trials or len(pool)) >= len(pool)
    if unlimited and len(pool) <= ENUMERATE_UP_TO:
        return _Listed(order[:begin] + _doubtful_last(order[begin:], chances))
    guesses = () if search.sampler == "random" else order[:begin]
    order[begin:] = _doubtful_last(_drawn(order[begin:], guesses, search.seed), chances)
    if search.sampler == "random":
        return _Listed(order)
    return _Modelled(order, begin, search.seed, chances) if search.sampler == "gp" else _Asked(order, begin, search)


def _drawn(rest: Sequence[Config], guesses: Sequence[Config], seed: int) -> list[Config]:
    """In random order, those like one of the guesses sooner: each is drawn with a weight, without being put back."""
    rng, known = random.Random(seed), [_values(guess) for guess in guesses]

    def when(config: Config) -> float:
        values = _values(config)
        changed = min((sum(map(operator.ne, values, guess)) for guess in known), default=0)
        return rng.expovariate(1.0) * _LESS_LIKELY**changed

    return sorted(rest, key=when)


def _values(config: Config) -> tuple[Any, ...]:
    return tuple(knobs_of(config).values())


def _doubtful_last(order: Sequence[Config], chances: Mapping[Config, float] | None) -> list[Config]:
    return sorted(order, key=lambda config: chances is not None and chances[config] < 0.5)


class _Listed:
    """A fixed order."""

    ahead = _AHEAD_BLIND

    def __init__(self, order: Sequence[Config]) -> None:
        self._left = dict.fromkeys(order)

    def ask(self) -> Config | None:
        chosen = next(iter(self._left), None)
        self._left.pop(chosen, None)
        return chosen

    def tell(self, config: Config, time_us: float | None) -> None:
        self._left.pop(config, None)

    def prepare(self) -> None:
        """Nothing."""


class _Modelled:
    """The largest expected improvement of a Gaussian process over all untried configs."""

    ahead = AHEAD

    def __init__(self, order: Sequence[Config], known: int, seed: int, chances: Mapping[Config, float] | None = None) -> None:
        """order: what to begin with in front, `known` of them chosen, the others drawn."""
        self._order = list(order)
        self._left = dict.fromkeys(range(len(order)))
        self._begin = deque(range(min(len(order), known + _FIRST)))
        self._index = {config: i for i, config in enumerate(order)}
        self._seed, self._chances = seed, chances
        self._seen: dict[int, float | None] = {}
        self._pending: dict[int, None] = {}
        self._stale = True

    def ask(self) -> Config | None:
        if not self._left:
            return None
        while self._begin and self._begin[0] not in self._left:
            self._begin.popleft()
        if self._begin or not self._fitted:
            chosen = self._begin.popleft() if self._begin else next(iter(self._left))
        else:
            if self._stale:
                self._surrogate.fit(list(self._seen), list(self._seen.values()))
                self._stale = False
            left = list(self._left)[:_SCORED]
            chosen = left[int(np.argmax(self._surrogate.improvement(left, list(self._pending))))]
        del self._left[chosen]
        self._pending[chosen] = None
        return self._order[chosen]

    def tell(self, config: Config, time_us: float | None) -> None:
        index = self._index[config]
        self._pending.pop(index, None)
        self._left.pop(index, None)
        self._seen[index] = time_us
        self._stale = True

    def prepare(self) -> None:
        _ = self._surrogate

    @cached_property
    def _surrogate(self) -> "Surrogate":
        from kerneltune.search.surrogate import Surrogate

        believed = None if self._chances is None else np.array([self._chances[config] for config in self._order])
        return Surrogate([knobs_of(config) for config in self._order], self._seed, believed)

    @property
    def _fitted(self) -> bool:
        return any(time_us is not None for time_us in self._seen.values())


class _Asked:
    """What an Optuna sampler draws, each knob a category; repeats and configs that are not valid are drawn again."""

    ahead = AHEAD

    def __init__(self, order: Sequence[Config], known: int, search: Search) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler: optuna.samplers.BaseSampler = optuna.samplers.QMCSampler(seed=search.seed)
        if search.sampler == "tpe":
            sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, n_startup_trials=_FIRST, seed=search.seed)
        self._study = optuna.create_study(sampler=sampler)
        self._left = dict.fromkeys(order)
        self._begin = deque(order[:known])
        knobs = list(knobs_of(order[0]))
        self._space: dict[str, optuna.distributions.BaseDistribution] = {
            knob: optuna.distributions.CategoricalDistribution(sorted({getattr(config, knob) for config in order}, key=repr))
            for knob in knobs
        }
        self._trials: dict[Config, Any] = {}
        self._make = type(order[0])

    def ask(self) -> Config | None:
        import optuna

        if not self._left:
            return None
        while self._begin and self._begin[0] not in self._left:
            self._begin.popleft()
        if self._begin:
            return self._given(self._begin.popleft())
        for _ in range(20 * AHEAD):
            trial = self._study.ask(self._space)
            config = self._make(**trial.params)
            if config in self._left:
                self._trials[config] = trial
                del self._left[config]
                return config
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return self._given(next(iter(self._left)))

    def _given(self, config: Config) -> Config:
        """A config that the sampler did not draw, as a trial of its study: it hears the time of that, too."""
        self._study.enqueue_trial(knobs_of(config))
        self._trials[config] = self._study.ask(self._space)
        del self._left[config]
        return config

    def tell(self, config: Config, time_us: float | None) -> None:
        import optuna

        trial = self._trials.pop(config, None)
        if trial is None:
            if self._left.pop(config, self) is None and time_us is not None:
                known = optuna.trial.create_trial(params=knobs_of(config), distributions=self._space, value=time_us)
                self._study.add_trial(known)
        elif time_us is None:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, time_us)

    def prepare(self) -> None:
        """Nothing."""


class _Gain:
    """The expected gain of a search with `until_gain`, by the surrogate's joint draws, whatever the sampler is."""

    def __init__(self, pool: Sequence[Config], search: Search, known: Mapping[Config, Trial]) -> None:
        self._least, self._seed = search.until_gain, search.seed
        if self._least is not None:
            self._index = {config: i for i, config in enumerate(pool)}
            self._seen = {self._index[config]: trial.time_us for config, trial in known.items()}

    def is_small(self, config: Config, trial: Trial) -> bool:
        """Whether to stop after this trial; asked every few trials."""
        if self._least is None:
            return False
        self._seen[self._index[config]] = trial.time_us
        timed = sum(time_us is not None for time_us in self._seen.values())
        if timed < _GAIN_AFTER or len(self._seen) % _GAIN_EVERY:
            return False
        self._surrogate.fit(list(self._seen), list(self._seen.values()))
        return self._surrogate.gain([i for i in self._index.values() if i not in self._seen]) < self._least

    @cached_property
    def _surrogate(self) -> "Surrogate":
        from kerneltune.search.surrogate import FAR, Surrogate

        return Surrogate([knobs_of(config) for config in self._index], self._seed, worst=FAR)
