"""The search, on a made-up operator whose times are a formula: what it visits, what it finds, what it keeps."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kerneltune import cache, device
from kerneltune.measuring.compiler import Compiled, Kernel
from kerneltune.search import loop
from kerneltune.search.loop import ENUMERATE_UP_TO, Search
from kerneltune.search.trials import Trial, TrialStore
from kerneltune.spec import Case, Config, Op, Space, Traffic, Variant
from kerneltune.tuning.tuner import _FINALISTS, NothingPassedError, Tuner, candidates, neighbour_dtype, tune

BLOCKS, WARPS, STAGES, CTAS = (64, 128, 256, 512, 1024), (1, 2, 4, 8, 16), (1, 2, 3, 4), (0, 1, 2, 4)
CASE = Case("a", (("M", 8),), "bfloat16")
HALF = Case("a", (("M", 8),), "float16")
SINGLE = Case("a", (("M", 8),), "float32")
Landscape = Callable[[Any], float | None]


@dataclass(frozen=True, slots=True)
class Small:
    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class Large:
    block: int
    warps: int
    stages: int
    ctas: int


def nothing(*_args: Any, **_kwargs: Any) -> Mapping[str, Any]:
    return {}


def op_of(variant: Variant) -> Op:
    dtypes = ("bfloat16", "float16", "float32")
    return Op("fake", ("M",), dtypes, nothing, nothing, lambda *_: [], lambda _: Traffic(1, 1), (variant,), __name__)


def small_space(_case: Case) -> Space:
    return {"block": BLOCKS, "warps": WARPS}


def large_space(_case: Case) -> Space:
    return {"block": BLOCKS, "warps": WARPS, "stages": STAGES, "ctas": CTAS}


SMALL = Variant("optimized", nothing, Small, small_space, default=lambda _: Small(256, 4))
LARGE = Variant("optimized", nothing, Large, large_space, default=lambda _: Large(64, 1, 1, 0))


def small_time(config: Small) -> float:
    """Best at block 512, warps 8; every config has a time of its own."""
    return 10.0 + abs(BLOCKS.index(config.block) - 3) + 0.1 * abs(WARPS.index(config.warps) - 3) + config.block / 1e4


def tables(seed: int) -> Callable[[Large], float]:
    """A landscape of 400 configs, the best at 10 µs: every value of a knob costs what chance says, and one of them nothing.

    As in kernels some knobs matter more than others.
    """
    rng = random.Random(seed)
    knobs = {"block": (1.0, BLOCKS), "warps": (1.0, WARPS), "stages": (0.6, STAGES), "ctas": (0.2, CTAS)}
    costs = {
        knob: dict(
            zip(
                values,
                (weight * cost for cost in rng.sample((0.0, 0.2, 0.35, 0.6, 0.9)[: len(values)], len(values))),
                strict=True,
            )
        )
        for knob, (weight, values) in knobs.items()
    }

    def time_us(config: Large) -> float:
        return 10.0 * math.prod(1 + cost[getattr(config, knob)] for knob, cost in costs.items())

    return time_us


class NoBench:
    """A bench that must not be asked for times."""

    def open(self, *_args: Any) -> None:
        raise AssertionError

    def trial(self, *_args: Any) -> Trial:
        raise AssertionError

    def samples(self, *_args: Any) -> Any:
        raise AssertionError

    def close(self) -> None:
        pass


class FakeTuner(Tuner):
    """Times are a formula, None for a config that is wrong; a duel is won by the faster config, or by whom it is told."""

    def __init__(self, case: Case, variant: Variant, store: TrialStore, landscape: Landscape) -> None:
        super().__init__(op_of(variant), case, variant, "cold", store, NoBench())
        self.landscape = landscape
        self.evaluated: list[Config] = []
        self.duels: list[list[Config]] = []
        self.winner: Callable[[Sequence[Config]], Config] = lambda configs: min(configs, key=landscape)  # type: ignore[arg-type]

    def _evaluate(self, config: Config, compiled: Compiled) -> Trial:
        self.evaluated.append(config)
        time_us = self.landscape(config)
        return Trial("wrong", detail="off by one") if time_us is None else Trial("ok", time_us)

    def duel(self, configs: Sequence[Config]) -> tuple[Config, dict[str, Any]]:
        self.duels.append(list(configs))
        best = self.winner(configs)
        return best, {"time_us": self.landscape(best), "speedup": 1.0}


class Setting:
    """A store and a configs folder; every `tuner` is a new process in what it knows."""

    def __init__(self, folder: Path) -> None:
        self.trials, self.root = folder / "trials.jsonl", folder / "configs"

    def store(self) -> TrialStore:
        return TrialStore(self.trials, source_hash="abc")

    def tuner(self, variant: Variant, landscape: Landscape, case: Case = CASE) -> FakeTuner:
        return FakeTuner(case, variant, self.store(), landscape)

    def tune(self, tuner: FakeTuner, search: Search | None = None) -> cache.Entry:
        return tune(tuner, search or Search(), compiled, self.root)

    def cached(self, case: Case = CASE) -> dict[str, Any] | None:
        hit = cache.lookup("fake", "optimized", device.current().slug, case.axes, case.dtype, "none", (), root=self.root)
        return hit.entry.config if hit and hit.exact else None


def compiled(_config: Config) -> "Future[Compiled]":
    future: Future[Compiled] = Future()
    future.set_result(Compiled((), 0.0))
    return future


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    cache.clear()
    yield Setting(tmp_path)
    cache.clear()


# enumeration


def test_a_small_space_is_visited_whole_once_and_default_first(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)
    seen: list[Config] = []
    entry = tune(tuner, Search(), compiled, setting.root, lambda config, trial: seen.append(config))
    assert tuner.evaluated[0] == Small(256, 4)
    assert len(tuner.evaluated) == len(BLOCKS) * len(WARPS) <= ENUMERATE_UP_TO
    assert set(tuner.evaluated) == {Small(b, w) for b, w in itertools.product(BLOCKS, WARPS)}
    assert seen == tuner.evaluated
    assert entry.config == {"block": 512, "warps": 8} == setting.cached()
    assert entry.evidence["trials"] == 25
    assert entry.evidence["default_us"] == pytest.approx(small_time(Small(256, 4)))


def test_a_default_outside_the_space_is_tried_too(setting: Setting) -> None:
    variant = Variant("optimized", nothing, Small, small_space, default=lambda _: Small(768, 3))
    pool = candidates(op_of(variant), CASE, variant, "cold", setting.store())
    assert pool[0] == Small(768, 3) and len(pool) == 26 == len(set(pool))


def test_configs_that_are_not_valid_are_not_tried(setting: Setting) -> None:
    variant = Variant("optimized", nothing, Small, small_space, lambda _, c: "odd" if c.block < 256 else None, SMALL.default)
    tuner = setting.tuner(variant, small_time)
    setting.tune(tuner)
    assert len(tuner.evaluated) == 15 and min(c.block for c in tuner.evaluated) == 256


def test_what_fails_is_counted_and_never_chosen(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda c: None if c.block == 512 else small_time(c))
    entry = setting.tune(tuner)
    assert entry.config == {"block": 256, "warps": 8} and entry.evidence["trials"] == 25
    assert all(config.block != 512 for config in tuner.duels[0])


# Optuna


def test_a_large_space_is_asked_of_optuna_which_never_asks_twice(setting: Setting) -> None:
    tuner = setting.tuner(LARGE, tables(0))
    entry = setting.tune(tuner, Search(trials=64))
    assert tuner.evaluated[0] == Large(64, 1, 1, 0)
    assert len(tuner.evaluated) == 64 == len(set(tuner.evaluated)) == entry.evidence["trials"]
    order = [config for config in LARGE.configs(CASE)]
    assert set(tuner.evaluated) < set(order) and tuner.evaluated[1:] != order[1:64]


def test_a_large_space_without_a_budget_is_used_up(setting: Setting) -> None:
    narrow = Variant(
        "optimized", nothing, Large, large_space, lambda _, c: None if c.ctas < 2 and c.stages < 4 else "x", LARGE.default
    )
    tuner = setting.tuner(narrow, tables(0))
    setting.tune(tuner, Search(sampler="random"))
    assert len(tuner.evaluated) == 150 > ENUMERATE_UP_TO
    assert set(tuner.evaluated) == set(narrow.configs(CASE))


@pytest.mark.parametrize(("variant", "landscape"), [(SMALL, small_time), (LARGE, tables(0))], ids=["enumerated", "asked"])
@pytest.mark.parametrize("trials", [1, 5, 20])
def test_no_more_trials_than_allowed(setting: Setting, variant: Variant, landscape: Landscape, trials: int) -> None:
    tuner = setting.tuner(variant, landscape)
    entry = setting.tune(tuner, Search(trials=trials))
    assert len(tuner.evaluated) == trials == entry.evidence["trials"]


@pytest.mark.parametrize(("variant", "landscape"), [(SMALL, small_time), (LARGE, tables(0))], ids=["enumerated", "asked"])
def test_a_search_ends_when_its_seconds_are_over(
    setting: Setting, variant: Variant, landscape: Landscape, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])

    def slow(config: Any) -> float | None:
        now[0] += 1.0
        return landscape(config)

    tuner = setting.tuner(variant, slow)
    tuner.winner = lambda configs: configs[0]
    setting.tune(tuner, Search(budget_s=4.5))
    assert 5 <= len(tuner.evaluated) <= 4 + 1


@pytest.mark.parametrize("sampler", loop.SAMPLERS)
def test_every_sampler_searches(setting: Setting, sampler: str) -> None:
    tuner = setting.tuner(LARGE, tables(1))
    entry = setting.tune(tuner, Search(trials=32, sampler=sampler))
    assert len(tuner.evaluated) == 32 == len(set(tuner.evaluated))
    assert entry.evidence["time_us"] == min(map(tables(1), tuner.evaluated))


def best_of(setting: Setting, sampler: str, seed: int) -> float:
    """The best time that 64 trials find, over the optimum of 10."""
    landscape = tables(seed)
    tuner = FakeTuner(CASE, LARGE, TrialStore(setting.trials.with_name(f"{sampler}{seed}"), source_hash="abc"), landscape)
    tune(tuner, Search(trials=64, sampler=sampler, seed=seed), compiled, setting.root / f"{sampler}{seed}")
    return min(map(landscape, tuner.evaluated)) / 10.0


def test_the_default_sampler_finds_a_good_config_and_beats_chance(setting: Setting) -> None:
    found = [best_of(setting, Search().sampler, seed) for seed in range(5)]
    chance = [best_of(setting, "random", seed) for seed in range(5)]
    assert sum(time <= 1.1 for time in found) >= 3, found
    assert statistics.median(found) < statistics.median(chance), (found, chance)


def test_optuna_goes_on_where_half_of_the_configs_fail(setting: Setting) -> None:
    landscape = tables(2)
    tuner = setting.tuner(LARGE, lambda c: None if c.warps in (1, 2) and c != Large(64, 1, 1, 0) else landscape(c))
    setting.tune(tuner, Search(trials=64))
    assert len(set(tuner.evaluated)) == 64


# resuming


@pytest.mark.parametrize(("variant", "landscape"), [(SMALL, small_time), (LARGE, tables(0))], ids=["enumerated", "asked"])
def test_a_second_run_over_the_same_store_evaluates_nothing_anew(
    setting: Setting, variant: Variant, landscape: Landscape
) -> None:
    first = setting.tuner(variant, landscape)
    before = setting.tune(first, Search(trials=48))
    size = setting.trials.stat().st_size
    second = setting.tuner(variant, landscape)
    after = setting.tune(second, Search(trials=48))
    assert first.evaluated and second.evaluated == []
    assert after.config == before.config and after.evidence["trials"] == before.evidence["trials"]
    assert setting.trials.stat().st_size == size


def test_an_interrupted_search_goes_on_where_it_was(setting: Setting) -> None:
    def interrupted(config: Small) -> float:
        if len(first.evaluated) == 10:
            raise KeyboardInterrupt
        return small_time(config)

    first = setting.tuner(SMALL, interrupted)
    with pytest.raises(KeyboardInterrupt):
        setting.tune(first)
    second = setting.tuner(SMALL, small_time)
    entry = setting.tune(second)
    assert len(second.evaluated) == 25 - 9 and not set(second.evaluated) & set(first.evaluated[:9])
    assert entry.config == {"block": 512, "warps": 8}


# the other 16-bit type


def test_the_neighbour_is_the_other_16_bit_type() -> None:
    op = op_of(SMALL)
    assert neighbour_dtype(op, CASE) == HALF and neighbour_dtype(op, HALF) == CASE
    assert neighbour_dtype(op, SINGLE) is None


def test_the_ranking_of_the_neighbour_narrows_the_candidates(setting: Setting) -> None:
    setting.tune(setting.tuner(SMALL, small_time))
    ranked = sorted(SMALL.configs(CASE), key=small_time)
    pool = candidates(op_of(SMALL), HALF, SMALL, "cold", setting.store())
    assert pool[0] == Small(256, 4)
    assert set(pool) == {*ranked[:16], Small(256, 4)}
    for case, policy in ((SINGLE, "cold"), (HALF, "hot"), (Case("b", (("M", 9),), "float16"), "cold"), (CASE, "cold")):
        assert len(candidates(op_of(SMALL), case, SMALL, policy, setting.store())) == 25

    half = setting.tuner(SMALL, small_time, HALF)
    setting.tune(half)
    assert half.evaluated == pool
    assert setting.cached(HALF) == {"block": 512, "warps": 8}


def test_a_neighbour_that_was_hardly_searched_does_not_narrow(setting: Setting) -> None:
    store = setting.store()
    for config in list(SMALL.configs(CASE))[:16]:
        store.put(op_of(SMALL), CASE, SMALL, "cold", config, Trial("ok", small_time(config)))
    assert len(candidates(op_of(SMALL), HALF, SMALL, "cold", store)) == 25


def test_a_second_run_of_a_narrowed_search_evaluates_nothing_anew(setting: Setting) -> None:
    setting.tune(setting.tuner(SMALL, small_time))
    setting.tune(setting.tuner(SMALL, small_time, HALF))
    again = setting.tuner(SMALL, small_time, HALF)
    setting.tune(again)
    assert again.evaluated == []


# the decision


def test_the_incumbent_stays_when_the_duel_says_so(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)
    tuner.winner = lambda configs: configs[0]
    entry = setting.tune(tuner)
    assert tuner.duels[0][0] == Small(256, 4)
    assert entry.config == {"block": 256, "warps": 4} == setting.cached()


def test_the_default_is_in_the_duel_however_slow(setting: Setting) -> None:
    default = Small(256, 4)
    tuner = setting.tuner(SMALL, lambda c: 1000.0 if c == default else small_time(c))
    setting.tune(tuner)
    (duel,) = tuner.duels
    assert duel[0] == default and duel[1] == Small(512, 8)
    assert len(set(duel)) == len(duel) == 1 + _FINALISTS


def test_the_cached_config_is_first_and_the_default_second(setting: Setting) -> None:
    first = setting.tuner(SMALL, small_time)
    cached = Small(64, 1)
    first.winner = lambda _configs: cached
    setting.tune(first)
    assert setting.cached() == {"block": 64, "warps": 1}

    second = setting.tuner(SMALL, small_time)
    second.winner = lambda configs: configs[0]
    setting.tune(second)
    assert second.duels[0][:3] == [cached, Small(256, 4), Small(512, 8)]
    assert setting.cached() == {"block": 64, "warps": 1}

    setting.tune(setting.tuner(SMALL, small_time))
    assert setting.cached() == {"block": 512, "warps": 8}


def test_a_cached_config_that_the_budget_leaves_out_is_judged_anew(setting: Setting) -> None:
    first = setting.tuner(SMALL, small_time)
    cached = Small(512, 8)
    first.winner = lambda _configs: cached
    setting.tune(first)

    setting.trials.unlink()  # as after a change of the source
    again = setting.tuner(SMALL, small_time)
    again.winner = lambda configs: configs[0]
    setting.tune(again, Search(trials=2))
    assert again.duels[0][0] == cached
    assert setting.cached() == {"block": 512, "warps": 8}


def test_a_cached_config_that_is_wrong_now_or_no_longer_fits_does_not_stand(setting: Setting) -> None:
    first = setting.tuner(SMALL, small_time)
    first.winner = lambda _configs: Small(64, 1)
    setting.tune(first)

    setting.trials.unlink()
    wrong = setting.tuner(SMALL, lambda c: None if c == Small(64, 1) else small_time(c))
    setting.tune(wrong)
    assert Small(64, 1) not in wrong.duels[0] and wrong.duels[0][0] == Small(256, 4)

    setting.tune(first)
    assert setting.cached() == {"block": 64, "warps": 1}
    invalid = Variant("optimized", nothing, Small, small_space, lambda _, c: "no" if c == Small(64, 1) else None, SMALL.default)
    tuner = setting.tuner(invalid, small_time)
    setting.tune(tuner)
    assert tuner.duels[0][0] == Small(256, 4) and Small(64, 1) not in tuner.duels[0]


def test_only_what_is_close_to_the_best_is_in_the_duel(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda c: 10.0 if c == Small(64, 1) else 10.3 if c == Small(64, 2) else 11.0)
    setting.tune(tuner)
    assert tuner.duels == [[Small(256, 4), Small(64, 1), Small(64, 2)]]


def test_a_wrong_default_does_not_stand(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda c: None if c == Small(256, 4) else small_time(c))
    tuner.winner = lambda configs: configs[0]
    entry = setting.tune(tuner)
    assert Small(256, 4) not in tuner.duels[0]
    assert entry.config == {"block": 512, "warps": 8} and entry.evidence["default_us"] is None


def test_one_config_needs_no_duel(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda c: 10.0 if c == Small(64, 1) else None)
    entry = setting.tune(tuner)
    assert tuner.duels == [] and entry.config == {"block": 64, "warps": 1} and entry.evidence["time_us"] == 10.0


# the duel


def duel(setting: Setting, *contenders: tuple[float, float, int]) -> tuple[int, dict[str, Any]]:
    """Which of (median, spread, registers) wins, the first the incumbent."""
    configs = [Small(64, i) for i in range(len(contenders))]

    class Bench(NoBench):
        def open(self, *_args: Any) -> None:
            pass

        def samples(self, given: Sequence[Config]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
            assert list(given) == configs
            rng = np.random.default_rng(0)
            return [median * np.exp(spread * rng.permutation(np.linspace(-2, 2, 41))) for median, spread, _ in contenders]

    tuner = Tuner(op_of(SMALL), CASE, SMALL, "cold", setting.store(), Bench())
    tuner.resources = {config: registers for config, (*_, registers) in zip(configs, contenders, strict=True)}
    best, evidence = tuner.duel(configs)
    return configs.index(best), evidence


def test_a_surely_faster_config_replaces_the_incumbent(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    winner, evidence = duel(setting, (100.0, 1e-3, 64), (90.0, 1e-3, 128), (95.0, 1e-3, 32))
    assert winner == 1
    assert evidence["speedup"] == pytest.approx(100 / 90, rel=2e-3)
    assert 1.0 < evidence["ci_low"] <= evidence["speedup"] <= evidence["ci_high"]
    assert (evidence["time_us"], evidence["incumbent_us"]) == pytest.approx((90.0, 100.0), rel=1e-3)


def test_a_config_that_is_perhaps_faster_does_not(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    winner, evidence = duel(setting, (100.0, 0.05, 128), (99.9, 0.05, 32))
    assert winner == 0 and evidence["speedup"] == 1.0 and evidence["time_us"] == evidence["incumbent_us"]


def test_a_slower_config_does_not(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    assert duel(setting, (100.0, 1e-3, 128), (101.0, 1e-3, 32))[0] == 0


def test_of_equally_fast_configs_the_one_with_fewer_registers_wins(setting: Setting) -> None:
    assert duel(setting, (100.0, 5e-3, 8), (90.0, 5e-3, 128), (90.01, 5e-3, 64), (90.02, 5e-3, 96))[0] == 2
    assert duel(setting, (100.0, 5e-3, 8), (90.0, 5e-3, 64), (90.01, 5e-3, 64))[0] == 1


def test_a_doubtful_config_with_few_registers_does_not_save_the_incumbent(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is surely faster than the incumbent; the third can be told apart from neither."""
    assert duel(setting, (100.0, 1e-3, 64), (98.0, 1e-3, 128), (99.0, 0.2, 32))[0] == 1


# before the GPU is touched


def test_what_cannot_compile_or_spills_is_never_run(setting: Setting) -> None:
    tuner = Tuner(op_of(SMALL), CASE, SMALL, "cold", setting.store(), NoBench())
    assert tuner.prune  # 25 configs: no published list
    broken = tuner.evaluate(Small(64, 1), Compiled((), 0.0, "CompilationError: no"))
    assert broken == Trial("compile", detail="CompilationError: no")
    spilling = Compiled((Kernel("k", 4, 255, 96, 0),), 1.0)
    assert tuner.evaluate(Small(64, 2), spilling) == Trial("spills", detail="96 bytes per thread")
    assert tuner.resources == {Small(64, 1): 0, Small(64, 2): 1020}
    assert setting.store().get(op_of(SMALL), CASE, SMALL, "cold", Small(64, 1)) == broken


# errors


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"budget_s": 0}, "budget must be above 0 seconds, got 0"),
        ({"budget_s": -1.5}, "budget must be above 0 seconds, got -1.5"),
        ({"trials": 0}, "trials must be above 0, got 0"),
        ({"trials": -3}, "trials must be above 0, got -3"),
        ({"sampler": "annealing"}, "sampler must be one of gp, tpe, random, qmc, got 'annealing'"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Search(**wrong)
    assert str(caught.value) == text


@pytest.mark.parametrize("variant", [SMALL, LARGE], ids=["enumerated", "asked"])
def test_a_search_in_which_nothing_passes_says_so_and_stores_nothing(setting: Setting, variant: Variant) -> None:
    tuner = setting.tuner(variant, lambda _config: None)
    with pytest.raises(NothingPassedError, match="^fake optimized: no config passed its check for M=8 bfloat16 none$"):
        setting.tune(tuner, Search(trials=32))
    assert setting.cached() is None and len(tuner.evaluated) >= 25 and tuner.duels == []


def test_an_empty_space_is_an_error_that_names_the_case(setting: Setting) -> None:
    variant = Variant("optimized", nothing, Small, small_space, lambda *_: "never", SMALL.default)
    with pytest.raises(ValueError, match="^fake optimized: no valid config for M=8 bfloat16 none: never .25 of 25 configs.$"):
        setting.tune(setting.tuner(variant, small_time))


# the pipeline


def test_one_slow_compilation_does_not_keep_the_others_waiting(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)
    slow: Future[Compiled] = Future()

    def compiling(config: Config) -> "Future[Compiled]":
        return slow if config == Small(64, 1) else compiled(config)

    def on_trial(_config: Config, _trial: Trial) -> None:
        if len(tuner.evaluated) == 24:
            slow.set_result(Compiled((), 60.0))

    entry = tune(tuner, Search(), compiling, setting.root, on_trial)
    assert tuner.evaluated[-1] == Small(64, 1) and entry.evidence["trials"] == 25


def test_what_is_in_flight_at_the_end_is_given_up(setting: Setting) -> None:
    futures: list[Future[Compiled]] = []

    def compiling(config: Config) -> "Future[Compiled]":
        futures.append(Future() if len(futures) >= 3 else compiled(config))
        return futures[-1]

    def interrupt(_config: Config, _trial: Trial) -> None:
        if len(tuner.evaluated) == 3:
            raise KeyboardInterrupt

    tuner = setting.tuner(LARGE, tables(0))
    with pytest.raises(KeyboardInterrupt):
        tune(tuner, Search(trials=30), compiling, setting.root, interrupt)
    assert len(futures) == 2 + loop.AHEAD and all(future.cancelled() for future in futures[3:])
