"""Samplers of Optuna studies over a finite list of configs. Knows no operator and measures nothing."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from kerneltune.spec import choice_order

if TYPE_CHECKING:
    from kerneltune.search.surrogate import Surrogate

_SCORED = 2048
"""Untried configs, in order, for which the model computes the expected improvement."""

Seen = Mapping[int, float | None]
"""Place in the list -> time of each tried config; None for a failure."""


class ListSampler(BaseSampler):
    """Try every config of a finite list once, in the order of the list.

    The knobs are categorical; `space` holds their distributions. A study must suggest the same choices, most simply by
    `study.ask(sampler.space)`. When all configs were tried, the last config is suggested again.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]]) -> None:
        """Take the configs in the order in which to try them.

        Args:
            configs: one or more mappings from names of knobs to values, the same names in every config, no config twice.
        """
        names = tuple(configs[0]) if configs else ()
        if not names or any(tuple(config) != names for config in configs):
            raise ValueError("configs: expected one or more configs with the same knobs")
        self.configs = [dict(config) for config in configs]
        values = {name: {config[name] for config in self.configs} for name in names}
        self.space = {name: CategoricalDistribution(sorted(offered, key=choice_order)) for name, offered in values.items()}
        self._index = {tuple(config.values()): i for i, config in enumerate(self.configs)}
        self._study: optuna.Study | None = None
        self._seen: dict[int, float | None] = {}
        self._num_finished = 0  # trials from the first on that are all finished, with their times in _seen

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the distributions of all knobs."""
        return dict(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the knobs of the next config."""
        seen, pending = self._times_and_pending(study)
        left = [i for i in range(len(self.configs)) if i not in seen and i not in pending]
        return dict(self.configs[self.choose(left, seen, pending) if left else -1])

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refuse a knob that the list lacks."""
        raise ValueError(f"{param_name}: {param_distribution}: expected a knob of the list: {', '.join(self.space)}")

    def prepare(self) -> None:
        """Import and set up the model of the first decision, ahead of the decision."""

    def choose(self, left: Sequence[int], seen: Seen, pending: Sequence[int]) -> int:
        """Return the place of the next config.

        Args:
            left: places in the list that were never tried, in order; one or more.
            seen: places that were tried, with their times.
            pending: places of configs that are being tried.
        """
        return left[0]

    def _times_and_pending(self, study: optuna.Study) -> tuple[dict[int, float | None], list[int]]:
        """Return times of finished trials and places of running trials; for a study that maximizes, times are reciprocals."""
        if self._study is not study:
            self._study, self._seen, self._num_finished = study, {}, 0
        inverse = study.direction is optuna.study.StudyDirection.MAXIMIZE
        pending = []
        for trial in study.get_trials(deepcopy=False)[self._num_finished :]:
            index = self._index.get(tuple(trial.params.get(name) for name in self.space))
            if not trial.state.is_finished():
                pending += [] if index is None else [index]
                continue
            if not pending and self._num_finished == trial.number:
                self._num_finished += 1
            if index is not None and trial.state is TrialState.COMPLETE and trial.value is not None:
                self._seen[index] = 1.0 / trial.value if inverse else trial.value
            elif index is not None:
                self._seen.setdefault(index, None)
        return self._seen, pending


class FiniteGPSampler(ListSampler):
    """Search a finite list of configs by the expected improvement of a Gaussian process over all untried configs.

    The sampler is made for spaces of up to some thousand configs that validity rules restrict, such as the spaces of GPU kernels.
    It never suggests a config outside the list or a config twice, knows the running trials, and learns from failed trials which
    configs will probably fail. The objective must be positive, such as a time; it is modelled on a logarithmic scale.

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
            configs: knob values by name, good guesses first, then the other configs in random order.
            n_startup_trials: number of first configs that are tried before the model decides.
            seed: seed of the model's draws.
        """
        super().__init__(configs)
        self._startup, self._seed = n_startup_trials, seed
        self._fitted: dict[int, float | None] = {}

    def prepare(self) -> None:
        """Import and set up the model."""
        _ = self._model

    @cached_property
    def _model(self) -> "Surrogate":
        from kerneltune.search.surrogate import Surrogate

        return Surrogate(self.configs, self._seed)

    def choose(self, left: Sequence[int], seen: Seen, pending: Sequence[int]) -> int:
        """Return the place of the untried config with the largest expected improvement; at the start the next in order."""
        if left[0] < self._startup or all(time is None for time in seen.values()):
            return left[0]
        model = self._model
        if seen != self._fitted:
            model.fit(list(seen), list(seen.values()))
            self._fitted = dict(seen)
        scored = left[:_SCORED]
        return scored[int(model.improvement(scored, list(pending)).argmax())]
