"""Samplers of Optuna studies over a finite list of configs."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from kerneltune.spec import knob_order

if TYPE_CHECKING:
    from kerneltune.search.surrogate import Surrogate

_CHOOSING = Lock()
"""Held while a sampler reads its study and chooses: `optimize(n_jobs=…)` asks from several threads."""
_SCORED = 2048
"""Untried configs, in order, for which the model computes the expected improvement."""


class FiniteGPSampler(BaseSampler):
    """Search a finite list of configs by the expected improvement of a Gaussian process over all untried configs.

    The sampler is made for spaces of up to some thousand configs that validity rules restrict, such as the spaces of GPU kernels.
    It tries each config once, knows the running trials, and learns from failed trials which configs will probably fail. The
    objective must be positive, such as a time; it is modelled on a logarithmic scale.

    The knobs are categorical; `space` holds their distributions. A study must suggest the same choices, most simply by
    `study.ask(sampler.space)`. When all configs were tried, the last config is suggested again. Without a study, `ask` and `tell`
    do the same with indices.

    Attributes:
        untried: indices of configs that were neither asked for nor told, in the order of the list.
        running: indices of configs that were asked for and not told, in the order of asking.
        times: time of each told config by index; None for a failure.

    Example:
        ::

            import optuna
            from kerneltune.search import FiniteGPSampler

            configs = [{"block": b, "warps": w} for b in (64, 128, 256) for w in (2, 4, 8) if b >= 32 * w]
            sampler = FiniteGPSampler(configs, n_startup_trials=3, seed=0)
            study = optuna.create_study(sampler=sampler)
            for _ in configs:
                trial = study.ask(sampler.space)
                study.tell(trial, measure(**trial.params))
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], n_startup_trials: int = 10, seed: int = 0) -> None:
        """Take the configs in the order in which to begin with them.

        Args:
            configs: one or more mappings from names of knobs to values, the same names in every config, no config twice: good
                guesses first, then the other configs in random order.
            n_startup_trials: number of first configs that are tried before the model decides.
            seed: seed of the model's draws.
        """
        names = tuple(configs[0]) if configs else ()
        if not names or any(tuple(config) != names for config in configs):
            raise ValueError("configs: expected one or more configs with the same knobs")
        self.configs = [dict(config) for config in configs]
        values = {name: {config[name] for config in self.configs} for name in names}
        self.space = {name: CategoricalDistribution(sorted(offered, key=knob_order)) for name, offered in values.items()}
        self._index = {tuple(config.values()): i for i, config in enumerate(self.configs)}
        self.untried: dict[int, None] = dict.fromkeys(range(len(self.configs)))
        self.running: dict[int, None] = {}
        self.times: dict[int, float | None] = {}
        self._study: optuna.Study | None = None
        self._num_finished = 0  # trials of the study from the first on that are all finished, with their times in `times`
        self._suggested: dict[int, int] = {}  # trial of the study -> index: a running trial gets a knob at a time
        self._startup, self._seed = n_startup_trials, seed
        self._fitted: dict[int, float | None] = {}

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the distributions of all knobs."""
        return dict(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the knobs of the next config."""
        with _CHOOSING:
            self._read(study)
            self._suggested[trial.number] = index = self.choose() if self.untried else len(self.configs) - 1
        return dict(self.configs[index])

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refuse a knob that the list lacks."""
        raise ValueError(f"{param_name}: {param_distribution}: expected a knob of the list: {', '.join(self.space)}")

    def ask(self) -> int | None:
        """Return the index of the next config to try; None when all were tried."""
        if not self.untried:
            return None
        index = self.choose()
        self.running[index] = self.untried.pop(index)
        return index

    def tell(self, index: int, time: float | None) -> None:
        """Take the time of a config, or None for a failure, whether `ask` returned the config or not."""
        self.untried.pop(index, None)
        self.running.pop(index, None)
        self.times[index] = time

    def prepare(self) -> None:
        """Import and set up the model."""
        _ = self._model

    @cached_property
    def _model(self) -> "Surrogate":
        from kerneltune.search.surrogate import Surrogate

        return Surrogate(self.configs, self._seed)

    def choose(self) -> int:
        """Return the index of the untried config with the largest expected improvement; at the start the next in order."""
        untried, times = list(self.untried), self.times
        successes = [time for time in times.values() if time is not None]
        if untried[0] < self._startup or not successes:
            return untried[0]
        if min(successes) <= 0:
            raise ValueError("objective: a value of 0 or less: expected values above 0, which have a logarithm")
        model = self._model
        if times != self._fitted:
            model.fit(list(times), list(times.values()))
            self._fitted = dict(times)
        scored = untried[:_SCORED]
        return scored[int(model.improvement(scored, list(self.running)).argmax())]

    def _read(self, study: optuna.Study) -> None:
        """Take the states of the configs in a study; if the study maximizes, the times are reciprocals."""
        if self._study is not study:
            self._study, self.times, self._num_finished, self._suggested = study, {}, 0, {}
        maximizes = study.direction is optuna.study.StudyDirection.MAXIMIZE
        self.running = {}
        are_finished = True
        for trial in study.get_trials(deepcopy=False)[self._num_finished :]:
            index = self._index.get(tuple(trial.params.get(name, ...) for name in self.space))
            are_finished = are_finished and trial.state.is_finished()
            self._num_finished += are_finished
            if not trial.state.is_finished():
                index = self._suggested.get(trial.number) if index is None else index
                self.running |= {} if index is None else {index: None}
            elif index is None:
                continue
            elif trial.state is TrialState.COMPLETE and trial.value is not None:
                reciprocal = 1.0 / trial.value if trial.value else float("inf")
                self.times[index] = reciprocal if maximizes else trial.value
            else:
                self.times.setdefault(index, None)
        self.untried = dict.fromkeys(i for i in range(len(self.configs)) if i not in self.times and i not in self.running)
