"""Samplers for a finite list of configs, in any Optuna study."""

import itertools
import math
import time
from typing import Any

import landscapes
import optuna
import pytest

from kerneltune.search import FiniteGPSampler
from kerneltune.search.surrogate import Surrogate

CONFIGS = [
    {"block": block, "warps": warps, "fast": fast}
    for block, warps, fast in itertools.product((64, 128, 256, 512), (1, 2, 4, 8), (False, True))
    if block >= 32 * warps
]


@pytest.fixture(autouse=True)
def few_words() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def time_of(config: dict[str, Any]) -> float:
    return 10.0 + abs(math.log2(config["block"] / 256)) + abs(math.log2(config["warps"] / 4)) + 0.5 * config["fast"]


@pytest.mark.parametrize("num_first", [4, len(CONFIGS)])
def test_study_tries_every_config_of_the_list_once(num_first: int) -> None:
    sampler = FiniteGPSampler(CONFIGS, num_first)
    study = optuna.create_study(sampler=sampler)
    for _ in CONFIGS:
        trial = study.ask(dict(sampler.space))
        study.tell(trial, time_of(trial.params))
    tried = [tuple(trial.params.items()) for trial in study.trials]
    in_order = [tuple(config.items()) for config in CONFIGS]
    assert sorted(tried) == sorted(in_order)
    assert (tried == in_order) is (num_first == len(CONFIGS))
    assert study.best_params == {"block": 256, "warps": 4, "fast": False}
    assert study.ask(dict(sampler.space)).params in CONFIGS  # used up: a repeat, no error


def test_study_whose_objective_suggests_knobs_is_optimized() -> None:
    sampler = FiniteGPSampler(CONFIGS[::-1], n_startup_trials=3, seed=1)

    def objective(trial: optuna.Trial) -> float:
        block = trial.suggest_categorical("block", (64, 128, 256, 512))
        warps = trial.suggest_categorical("warps", (1, 2, 4, 8))
        return time_of({"block": block, "warps": warps, "fast": trial.suggest_categorical("fast", (False, True))})

    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=14)
    assert study.best_value == 10.0
    assert len({tuple(trial.params.items()) for trial in study.trials}) == 14


def test_study_that_maximizes_finds_the_largest_value() -> None:
    sampler = FiniteGPSampler(CONFIGS, n_startup_trials=3)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    for _ in range(14):
        trial = study.ask(dict(sampler.space))
        study.tell(trial, 1000.0 / time_of(trial.params))
    assert study.best_params == {"block": 256, "warps": 4, "fast": False}


def test_gp_sampler_maximizing_takes_zero_as_the_slowest_and_refuses_negative_values() -> None:
    """0 ended the study with ZeroDivisionError, and a negative value with an error of a matrix that holds NaN."""
    for lowest in (0.0, -1.0):
        sampler = FiniteGPSampler(CONFIGS, n_startup_trials=2)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        for value in (lowest, 1.0):
            study.tell(study.ask(dict(sampler.space)), value)
        if lowest < 0:
            with pytest.raises(ValueError, match=r"^objective: a value of 0 or less: expected values above 0, "):
                study.ask(dict(sampler.space))
        else:
            assert study.ask(dict(sampler.space)).params not in [trial.params for trial in study.trials[:2]]


def test_sampler_asks_no_config_in_flight_again() -> None:
    sampler = FiniteGPSampler(CONFIGS, n_startup_trials=2)
    study = optuna.create_study(sampler=sampler)
    for _ in range(2):
        trial = study.ask(dict(sampler.space))
        study.tell(trial, time_of(trial.params))
    running = [study.ask(dict(sampler.space)) for _ in range(8)]
    assert len({tuple(trial.params.items()) for trial in running}) == 8
    for trial in running[::-1]:  # told in another order
        study.tell(trial, time_of(trial.params))
    assert tuple(study.ask(dict(sampler.space)).params.values()) not in {tuple(t.params.values()) for t in running}


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("configs", [CONFIGS, [{"cache": value} for value in (None, ".cg", 1, 2.5)]], ids=["knobs", "with None"])
def test_sampler_asked_by_threads_tries_every_config_once(num_threads: int, configs: list[dict[str, Any]]) -> None:
    sampler = FiniteGPSampler(configs, n_startup_trials=2)

    def objective(trial: optuna.Trial) -> float:
        knobs = {}
        for name, offered in sampler.space.items():
            knobs[name] = trial.suggest_categorical(name, offered.choices)
            time.sleep(0.002)  # other threads see a trial with a part of its knobs
        return 1.0 + configs.index(knobs)

    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=len(configs), n_jobs=num_threads)
    assert sorted(configs.index(trial.params) for trial in study.trials) == list(range(len(configs)))


def test_sampler_learns_trials_of_another_process_from_the_storage() -> None:
    storage = optuna.storages.InMemoryStorage()
    first, second = (FiniteGPSampler(CONFIGS, n_startup_trials=2) for _ in range(2))
    studies = [
        optuna.create_study(storage=storage, study_name="a", sampler=sampler, load_if_exists=True) for sampler in (first, second)
    ]
    tried = []
    for study in studies * 9:
        trial = study.ask(dict(first.space))
        tried.append(tuple(trial.params.items()))
        study.tell(trial, time_of(trial.params))
    assert len(set(tried)) == 18


def test_sampler_learns_from_failed_trials_where_configs_fail() -> None:
    space = landscapes.space(0)
    configs = [dict(knobs) for knobs in space.trials]
    sampler = FiniteGPSampler(configs[::7] + [c for i, c in enumerate(configs) if i % 7], n_startup_trials=10)
    study = optuna.create_study(sampler=sampler)
    for _ in range(40):
        trial = study.ask(dict(sampler.space))
        time_us = space.trials[tuple(trial.params.items())].time_us
        failed = optuna.trial.TrialState.FAIL
        study.tell(trial, time_us) if time_us is not None else study.tell(trial, state=failed)
    assert sum(trial.value is None for trial in study.trials[10:]) <= 3


@pytest.mark.parametrize("configs", [[], [{}], [{"a": 1}, {"b": 1}]])
def test_sampler_of_configs_without_common_knobs_raises(configs: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"^configs: expected one or more configs with the same knobs$"):
        FiniteGPSampler(configs)


def test_sampler_asked_for_a_knob_outside_of_the_list_raises() -> None:
    study = optuna.create_study(sampler=FiniteGPSampler(CONFIGS))
    with pytest.raises(ValueError, match=r"^stages: .*: expected a knob of the list: block, warps, fast$"):
        study.ask().suggest_categorical("stages", (1, 2))


def test_surrogate_of_a_knob_with_negative_values_tells_them_apart() -> None:
    surrogate = Surrogate([{"skew": skew} for skew in (-8, -4, -1, 0, 1, 4)])
    surrogate.fit([0, 3, 4, 5], [40.0, 10.0, 12.0, 20.0])
    far, near = surrogate.improvement([1, 2])
    assert near > 2 * far
