"""The search of a finite space: an Optuna study is asked for configs, and told their times, until enough is known.

Knows no operator, GPU or file: whoever starts a search says how a config is evaluated, so a replay runs the same code
offline. Imports Optuna when a search begins.
"""

import operator
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from kerneltune.search.task import Evaluation, knobs_of
from kerneltune.spec import Config

if TYPE_CHECKING:
    from kerneltune.search.study import ListSampler
    from kerneltune.search.surrogate import Surrogate

SAMPLERS = ("ours", "random")
"""`ours` is search.FiniteGPSampler. `random` draws every config with the same probability."""
DEFAULT_SAMPLER = "ours"
ENUMERATE_UP_TO = 120
AHEAD = 8
"""Configs in flight as long as one of them is compiled and waits to be measured: what to try is decided that many configs
before its time is known; a replay keeps the same delay. While none waits, as many compile as there are compilers."""
_AHEAD_BLIND = 48
"""Configs in flight where no time changes what is tried next."""
_FIRST = 8
_LESS_LIKELY = 2.0
"""Factor by which a config is drawn less likely for every knob in which it differs from a default or a neighbour's best.

Those are good guesses: on the shipped spaces at most two knobs differ from the default's in 8 % of all configs, and in 39 of the
63 that are within 3 % of the best.
"""
_GAIN_AFTER = 16
_GAIN_EVERY = 4
_AT_HAND = 2
"""Compiled configs with which the bench, measuring one, does not wait for what is decided here. A search is told of as many at
a time, as a replay has all evaluations at once."""
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Search:
    """The limits of a search.

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

    def enumerates(self, configs: int) -> bool:
        """Return whether all configs of a space of that size are tried, in order."""
        unlimited = self.budget_s is None and self.until_gain is None and (self.trials or configs) >= configs
        return unlimited and configs <= ENUMERATE_UP_TO


class Started(Protocol):
    """A config whose evaluation has begun: it is compiled, then measured unless the compiler's word is enough."""

    def done(self) -> bool:
        """Return whether it is compiled."""

    def evaluate(self) -> "Future[Evaluation]":
        """Return the evaluation of a compiled config; one that is measured waits for its turn, and may be cancelled as long."""

    def cancel(self) -> None:
        """Give up compiling; what was stored stays."""


def explore(
    pool: Sequence[Config],
    first: Sequence[Config],
    search: Search,
    start: Callable[[Config], Started],
    on_trial: Callable[[Config, Evaluation], None] = lambda _config, _evaluation: None,
    known: Mapping[Config, Evaluation] = MappingProxyType({}),
    compilers: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
    feasibility: Mapping[Config, float] | None = None,
    ready: Callable[[], bool] = lambda: True,
) -> dict[Config, Evaluation]:
    """Try configs of a pool until a budget is used, the expected gain is small, or no config is left.

    Args:
        pool: all configs, none twice.
        first: configs of the pool to begin with, such as the default and the best of the nearest shape.
        search: how much to search.
        start: begins to evaluate a config.
        on_trial: told every new evaluation.
        known: what was found out before; it counts as tried, as in a search that was interrupted.
        compilers: how many configs compile at the same time.
        meanwhile: called whenever the search has asked for what it wants, again and again.
        feasibility: the probability that a config of the pool compiles for good, where something is known.
        ready: whether the bench could measure: a refusal before that does not begin the budget's seconds.

    Returns:
        The evaluations in their order, those known first.
    """
    asking, gain = Asking(pool, first, search, feasibility), _Gain(pool, search, known)
    for config, evaluation in known.items():
        asking.tell(config, evaluation.time_us)
    limit = len(pool) if search.trials is None else min(search.trials, len(pool))
    line, found = _Line(compilers), dict(known)
    began: float | None = None  # starting a process on the GPU, inputs and reference are not the search's time
    enough = False
    try:
        while True:
            while not enough and line.has_room(asking.ahead) and len(found) + line.length < limit:
                asked = asking.ask()
                if asked is None:
                    break
                line.add(asked, start(asked))
            if not line.length:
                break
            asking.prepare()
            meanwhile()
            for config, evaluation in line.move():
                found[config] = evaluation
                asking.tell(config, evaluation.time_us)
                on_trial(config, evaluation)
                began = time.monotonic() if began is None and ready() else began
                spent = search.budget_s is not None and began is not None and time.monotonic() - began > search.budget_s
                enough = enough or spent or gain.is_small(config, evaluation)
            if enough:
                line.give_up()
    finally:
        line.give_up()
    return found


def times_of(found: Mapping[Config, Evaluation]) -> dict[Config, float]:
    """Return the times of the configs that have one."""
    return {config: evaluation.time_us for config, evaluation in found.items() if evaluation.time_us is not None}


def opening(
    pool: Sequence[Config], first: Sequence[Config], search: Search, feasibility: Mapping[Config, float] | None = None
) -> list[Config]:
    """Return all configs in the order in which a search begins: no sampler knows better before the first times.

    Configs that are more likely to be refused than not come last.
    """
    order = list(dict.fromkeys([*first, *pool]))
    begin = len(set(first))
    rest = order[begin:]
    if not search.enumerates(len(pool)):
        rest = _drawn(rest, () if search.sampler == "random" else order[:begin], search.seed)
    return order[:begin] + sorted(rest, key=lambda config: feasibility is not None and feasibility[config] < 0.5)


def _drawn(rest: Sequence[Config], guesses: Sequence[Config], seed: int) -> list[Config]:
    """Return configs in random order, those like one of the guesses sooner: drawn with a weight, without being put back."""
    rng, known = random.Random(seed), [_values(guess) for guess in guesses]

    def when(config: Config) -> float:
        values = _values(config)
        changed = min((sum(map(operator.ne, values, guess)) for guess in known), default=0)
        return rng.expovariate(1.0) * _LESS_LIKELY**changed

    return sorted(rest, key=when)


def _values(config: Config) -> tuple[Any, ...]:
    return tuple(knobs_of(config).values())


class Asking:
    """An Optuna study over the configs of a pool, each of which is asked for once.

    Attributes:
        ahead: how many configs may be in flight.
        study: the study, kept in memory; finished trials are in the trial store's journal.
    """

    def __init__(
        self,
        pool: Sequence[Config],
        first: Sequence[Config],
        search: Search,
        feasibility: Mapping[Config, float] | None = None,
    ) -> None:
        """Set up the study of a search; arguments as in `explore`."""
        import optuna

        from kerneltune.search.study import quiet

        quiet()
        order = opening(pool, first, search, feasibility)
        self._sampler = _sampler(order, len(set(first)), search, feasibility)
        self.ahead = _AHEAD_BLIND if search.sampler == "random" or search.enumerates(len(pool)) else AHEAD
        self.study = optuna.create_study(sampler=self._sampler)
        self._configs = {_values(config): config for config in order}
        self._left = set(order)
        self._asked: dict[Config, optuna.Trial] = {}

    def ask(self) -> Config | None:
        """Return the next config to try, None when there is no other."""
        if not self._left:
            return None
        trial = self.study.ask(dict(self._sampler.space))
        config = self._configs[tuple(trial.params[name] for name in self._sampler.space)]
        self._left.discard(config)
        self._asked[config] = trial
        return config

    def tell(self, config: Config, time_us: float | None) -> None:
        """Tell the study a config's time, None where it has none; also of a config that it was not asked for."""
        from optuna.trial import TrialState

        from kerneltune.search.study import finished_trial

        self._left.discard(config)
        trial = self._asked.pop(config, None)
        if trial is None:
            self.study.add_trial(finished_trial(knobs_of(config), self._sampler.space, time_us))
        else:
            self.study.tell(trial, time_us, state=TrialState.FAIL if time_us is None else TrialState.COMPLETE)

    def prepare(self) -> None:
        """Import, while the first configs compile, what was not needed to ask for them. May be called again and again."""
        prepare = getattr(self._sampler, "prepare", None)
        if prepare is not None:
            prepare()


def _sampler(order: Sequence[Config], guesses: int, search: Search, feasibility: Mapping[Config, float] | None) -> "ListSampler":
    """Return the sampler of a search over configs in the order in which it begins."""
    from kerneltune.search.study import FiniteGPSampler, ListSampler

    configs = [knobs_of(config) for config in order]
    if search.sampler == "random" or search.enumerates(len(order)):
        return ListSampler(configs)
    likely = None if feasibility is None else [feasibility[config] for config in order]
    return FiniteGPSampler(configs, guesses + _FIRST, search.seed, likely)


class _Line:
    """Configs on their way: compiling, or waiting for their evaluation. One slow compilation keeps no others waiting."""

    def __init__(self, compilers: int) -> None:
        self._compilers = compilers
        self._compiling: list[tuple[Config, Started]] = []
        self._waiting: list[tuple[Config, Future[Evaluation]]] = []

    @property
    def length(self) -> int:
        """Configs that were asked for and have no evaluation yet."""
        return len(self._compiling) + len(self._waiting)

    def has_room(self, ahead: int) -> bool:
        """Return whether to ask for another config."""
        return self.length < ahead or (len(self._waiting) <= _AT_HAND and len(self._compiling) < self._compilers)

    def add(self, config: Config, begun: Started) -> None:
        """Add a config that begins to compile."""
        self._compiling.append((config, begun))

    def move(self) -> list[tuple[Config, Evaluation]]:
        """Have compiled configs evaluated; return up to two evaluations. Waits a little where there is none."""
        for one in [one for one in self._compiling if one[1].done()]:
            self._compiling.remove(one)
            self._waiting.append((one[0], one[1].evaluate()))
        ready = [one for one in self._waiting if one[1].done()][:_AT_HAND]
        if not ready:
            time.sleep(_POLL_S)
        self._waiting = [one for one in self._waiting if one not in ready]
        return [(config, evaluation.result()) for config, evaluation in ready]

    def give_up(self) -> None:
        """Give up what neither has an evaluation nor is measured at this moment."""
        for _, begun in self._compiling:
            begun.cancel()
        self._compiling.clear()
        self._waiting = [one for one in self._waiting if not one[1].cancel()]


class _Gain:
    """The expected gain of a search with `until_gain`, by joint draws of a Gaussian process, whatever the sampler is."""

    def __init__(self, pool: Sequence[Config], search: Search, known: Mapping[Config, Evaluation]) -> None:
        self._least, self._seed = search.until_gain, search.seed
        if self._least is not None:
            self._index = {config: i for i, config in enumerate(pool)}
            self._seen = {self._index[config]: one.time_us for config, one in known.items()}

    def is_small(self, config: Config, evaluation: Evaluation) -> bool:
        """Return whether to stop after this evaluation; decided every few evaluations."""
        if self._least is None:
            return False
        self._seen[self._index[config]] = evaluation.time_us
        timed = sum(time_us is not None for time_us in self._seen.values())
        if timed < _GAIN_AFTER or len(self._seen) % _GAIN_EVERY:
            return False
        self._surrogate.fit(list(self._seen), list(self._seen.values()))
        return self._surrogate.gain([i for i in self._index.values() if i not in self._seen]) < self._least

    @cached_property
    def _surrogate(self) -> "Surrogate":
        from kerneltune.search.surrogate import FAR, Surrogate

        return Surrogate([knobs_of(config) for config in self._index], self._seed, worst=FAR)
