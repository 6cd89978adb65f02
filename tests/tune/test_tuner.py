"""The search, on a made-up operator: visited configs, chosen configs, and the end."""

import itertools
import random
import statistics
from concurrent.futures import Future
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from asserting import every
from fake_tuner import (
    BLOCKS,
    CASE,
    HALF,
    LARGE,
    SINGLE,
    SMALL,
    WARPS,
    CompiledAtOnce,
    FakeTuner,
    Landscape,
    Large,
    NoBench,
    Setting,
    Small,
    compiled,
    evaluated,
    in_step,
    large_space,
    nothing,
    op_of,
    small_space,
    small_time,
    tables,
)

from kerneltune import cache, device
from kerneltune.measuring.compiler import CompileResult, Kernel
from kerneltune.plan import Options
from kerneltune.search import loop
from kerneltune.search.loop import SearchLimits
from kerneltune.search.trials import TrialStore
from kerneltune.spec import Case, Config, Variant
from kerneltune.task import Evaluation, Task
from kerneltune.tune.tuner import NothingPassedError, Tuner

# enumeration


def test_tuner_visits_a_small_space_once_with_the_default_first(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)
    seen: list[Config] = []
    entry = setting.tune(tuner, on_trial=lambda config, _trial: seen.append(config))
    assert tuner.evaluated[0] == Small(256, 4)
    assert len(tuner.evaluated) == len(BLOCKS) * len(WARPS)
    assert set(tuner.evaluated) == {Small(b, w) for b, w in itertools.product(BLOCKS, WARPS)}
    assert seen == tuner.evaluated
    assert entry.config == {"block": 512, "warps": 8} == setting.cached()
    assert entry.evidence["trials"] == 25
    assert entry.evidence["default_us"] == pytest.approx(small_time(Small(256, 4)))


def test_tuner_tries_a_default_outside_of_the_space(setting: Setting) -> None:
    variant = Variant("optimized", nothing, Small, small_space, default=lambda _: Small(768, 3))
    pool = setting.candidates(op_of(variant)).pool
    assert pool[0] == Small(768, 3)
    assert len(pool) == 26 == len(set(pool))


def test_tuner_tries_promising_configs_of_the_space_first(setting: Setting) -> None:
    wanted = (Large(1024, 16, 4, 4), Large(512, 2, 3, 1))
    variant = replace(LARGE, promising=lambda _case: (*wanted, Large(96, 1, 1, 0)))
    tuner = setting.tuner(variant, tables(0))
    setting.tune(tuner, SearchLimits(trials=12))
    assert tuner.evaluated[:3] == [Large(64, 1, 1, 0), *wanted]
    assert Large(96, 1, 1, 0) not in tuner.evaluated


def test_tuner_tries_no_invalid_config(setting: Setting) -> None:
    variant = Variant("optimized", nothing, Small, small_space, lambda _, c: "odd" if c.block < 256 else None, SMALL.default)
    tuner = setting.tuner(variant, small_time)
    setting.tune(tuner)
    assert len(tuner.evaluated) == 15
    assert min(c.block for c in tuner.evaluated) == 256


def test_tuner_counts_failed_configs_and_never_chooses_them(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda c: None if c.block == 512 else small_time(c))
    entry = setting.tune(tuner)
    assert entry.config == {"block": 256, "warps": 8}
    assert entry.evidence["trials"] == 25
    assert every(config.block != 512 for config in tuner.finals[0])


# Optuna


def test_tuner_asks_the_sampler_in_a_large_space_and_never_twice(setting: Setting) -> None:
    tuner = setting.tuner(LARGE, tables(0))
    entry = setting.tune(tuner, SearchLimits(trials=64))
    assert tuner.evaluated[0] == Large(64, 1, 1, 0)
    assert len(tuner.evaluated) == 64 == len(set(tuner.evaluated)) == entry.evidence["trials"]
    order = [config for config in LARGE.configs(CASE)]
    assert set(tuner.evaluated) < set(order)
    assert tuner.evaluated[1:] != order[1:64]


def test_tuner_without_a_budget_visits_a_large_space_whole(setting: Setting) -> None:
    narrow = Variant(
        "optimized", nothing, Large, large_space, lambda _, c: None if c.ctas < 2 and c.stages < 4 else "x", LARGE.default
    )
    tuner = setting.tuner(narrow, tables(0))
    setting.tune(tuner, SearchLimits())
    assert len(tuner.evaluated) == 150
    assert set(tuner.evaluated) == set(narrow.configs(CASE))


@pytest.mark.parametrize(("variant", "landscape"), [(SMALL, small_time), (LARGE, tables(0))], ids=["enumerated", "asked"])
@pytest.mark.parametrize("trials", [1, 5, 20])
def test_tuner_makes_at_most_the_allowed_trials(setting: Setting, variant: Variant, landscape: Landscape, trials: int) -> None:
    tuner = setting.tuner(variant, landscape)
    entry = setting.tune(tuner, SearchLimits(trials=trials))
    assert len(tuner.evaluated) == trials == entry.evidence["trials"]


@pytest.mark.parametrize(("variant", "landscape"), [(SMALL, small_time), (LARGE, tables(0))], ids=["enumerated", "asked"])
def test_tuner_ends_at_its_time_limit(
    setting: Setting, variant: Variant, landscape: Landscape, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])

    def slow(config: Any) -> float | None:
        now[0] += 1.0
        return landscape(config)

    tuner = setting.tuner(variant, slow)
    tuner.winner = lambda configs: configs[0]
    setting.tune(tuner, SearchLimits(budget_s=4.5), in_step(tuner))
    assert len(tuner.evaluated) - 1 - 4 in (1, 2)  # the config over which the seconds end, and the next if that has begun


def test_tuner_time_limit_begins_after_inputs_are_made(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    now, refused = [0.0], Event()
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])

    class MakesInputs(NoBench):
        def prepare(self, *_: object) -> None:
            assert refused.wait(60)
            now[0] += 100.0

    def slow(config: Any) -> float | None:
        now[0] += 1.0
        return small_time(config)

    tuner, default = setting.tuner(SMALL, slow), Small(256, 4)
    tuner.worker = MakesInputs()
    measured, statuses = in_step(tuner), list[str]()
    step = tuner.queue.fill

    def meanwhile() -> None:
        step()
        if statuses:
            refused.set()

    tuner.queue.fill = meanwhile
    tuner.refusal = lambda config, _compiled: Evaluation("spills") if config == default else None  # type: ignore[method-assign]
    tuner.winner = lambda configs: configs[0]

    def on_trial(config: Config, trial: Evaluation) -> None:
        statuses.append(trial.status)
        measured(config, trial)

    setting.tune(tuner, SearchLimits(budget_s=4.5), on_trial)
    assert statuses[0] == "spills"
    assert statuses[1:] in (["passed"] * 6, ["passed"] * 7)


def test_tuner_stores_the_best_of_its_trials(setting: Setting) -> None:
    tuner = setting.tuner(LARGE, tables(1))
    entry = setting.tune(tuner, SearchLimits(trials=32))
    assert len(tuner.evaluated) == 32 == len(set(tuner.evaluated))
    assert entry.evidence["time_us"] == min(map(tables(1), tuner.evaluated))


def best_of(setting: Setting, seed: int) -> float:
    """Return the best time that 64 trials find, over the optimum of 10."""
    landscape = tables(seed)
    tuner = FakeTuner(CASE, LARGE, TrialStore(setting.trials.with_name(f"trials{seed}"), source_hash="abc"), landscape)
    cache.use_root(setting.root / f"cache{seed}")
    tuner.options = Options(search=SearchLimits(trials=64, seed=seed))
    tuner.tune()
    return min(map(landscape, tuner.evaluated)) / 10.0


def test_search_finds_a_config_within_10_percent_and_beats_chance(setting: Setting) -> None:
    times, space = [best_of(setting, seed) for seed in range(5)], list(LARGE.configs(CASE))
    chance = [min(map(tables(seed), random.Random(seed).sample(space, 64))) / 10.0 for seed in range(5)]
    assert sum(time <= 1.1 for time in times) >= 3, times
    assert statistics.median(times) < statistics.median(chance), (times, chance)


def test_sampler_is_asked_for_every_config_once_and_told_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = list(SMALL.configs(CASE))
    evaluator: Any = None
    state = loop.SearchState(loop.Candidates(pool, pool[:1]), SearchLimits(budget_s=60.0), evaluator)
    heard, choose = {}, state.sampler.choose

    def heard_before() -> int:
        heard.update({Small(**state.sampler.configs[index]): time for index, time in state.sampler.times.items()})
        return choose()

    monkeypatch.setattr(state.sampler, "choose", heard_before)
    times = {}
    while (index := state.sampler.ask()) is not None:
        config = Small(**state.sampler.configs[index])
        times[config] = small_time(config)
        state.tell(config, times[config])
    last = list(times)[-1]
    assert heard == {config: time for config, time in times.items() if config != last}
    assert len(times) == len(pool)


def test_sampler_continues_where_half_of_the_configs_fail(setting: Setting) -> None:
    landscape = tables(2)
    tuner = setting.tuner(LARGE, lambda c: None if c.warps in (1, 2) and c != Large(64, 1, 1, 0) else landscape(c))
    setting.tune(tuner, SearchLimits(trials=64))
    assert len(set(tuner.evaluated)) == 64


# resuming


@pytest.mark.parametrize(("variant", "landscape"), [(SMALL, small_time), (LARGE, tables(0))], ids=["enumerated", "asked"])
def test_tuner_over_a_complete_store_evaluates_nothing(setting: Setting, variant: Variant, landscape: Landscape) -> None:
    first = setting.tuner(variant, landscape)
    before = setting.tune(first, SearchLimits(trials=48))
    size = setting.trials.stat().st_size
    second = setting.tuner(variant, landscape)
    after = setting.tune(second, SearchLimits(trials=48))
    assert first.evaluated
    assert second.evaluated == []
    assert after.config == before.config
    assert after.evidence["trials"] == before.evidence["trials"]
    assert setting.trials.stat().st_size == size


def test_tuner_evaluates_no_known_config_outside_of_the_space_again(setting: Setting) -> None:
    setting.tune(first := setting.tuner(SMALL, small_time))
    assert setting.cached() == {"block": 512, "warps": 8}
    assert len(first.evaluated) == 25
    narrow = Variant("optimized", nothing, Small, lambda _: {"block": (256, 1024), "warps": WARPS}, default=SMALL.default)
    again = setting.tuner(narrow, small_time)
    setting.tune(again)
    assert again.finals[0][0] == Small(512, 8)
    assert again.evaluated == []


def test_tuner_after_an_interrupt_continues_behind_stored_trials(setting: Setting) -> None:
    def interrupted(config: Small) -> float:
        if len(first.evaluated) == 10:
            raise KeyboardInterrupt
        return small_time(config)

    first = setting.tuner(SMALL, interrupted)
    with pytest.raises(KeyboardInterrupt):
        setting.tune(first, None, in_step(first))
    second = setting.tuner(SMALL, small_time)
    entry = setting.tune(second)
    assert len(first.evaluated) == 10
    assert len(second.evaluated) == 25 - 9
    assert not set(second.evaluated) & {*first.evaluated[:9]}
    assert entry.config == {"block": 512, "warps": 8}


# the other 16-bit type


def test_pool_is_narrowed_to_the_best_configs_of_the_other_16_bit_dtype(setting: Setting) -> None:
    setting.tune(setting.tuner(SMALL, small_time))
    ranked = sorted(SMALL.configs(CASE), key=small_time)
    pool = setting.candidates(op_of(SMALL), HALF).pool
    assert pool[0] == Small(256, 4)
    assert set(pool) == {*ranked[:16], Small(256, 4)}
    for case, policy in ((SINGLE, "cold"), (HALF, "hot"), (Case("b", (("M", 9),), "float16"), "cold"), (CASE, "cold")):
        assert len(setting.candidates(op_of(SMALL), case, policy).pool) == 25

    half = setting.tuner(SMALL, small_time, HALF)
    setting.tune(half)
    assert sorted(half.evaluated, key=small_time) == sorted(pool, key=small_time)
    assert setting.cached(HALF) == {"block": 512, "warps": 8}


def test_pool_is_not_narrowed_by_few_trials_of_the_other_dtype(setting: Setting) -> None:
    store = setting.store()
    for config in list(SMALL.configs(CASE))[:16]:
        store.put(Task(op_of(SMALL), CASE, SMALL), config, Evaluation("passed", small_time(config)))
    assert len(setting.candidates(op_of(SMALL), HALF).pool) == 25


def test_tuner_over_a_narrowed_complete_store_evaluates_nothing(setting: Setting) -> None:
    setting.tune(setting.tuner(SMALL, small_time))
    setting.tune(setting.tuner(SMALL, small_time, HALF))
    again = setting.tuner(SMALL, small_time, HALF)
    setting.tune(again)
    assert again.evaluated == []


def test_starting_points_include_configs_of_other_free_options(setting: Setting) -> None:
    op = replace(op_of(SMALL), options={"group": (64, 32)}, free_options=("group",))
    wide, narrow = (replace(CASE, options=(("group", group),)) for group in (64, 32))
    entry = cache.CacheEntry(op="fake", variant="optimized", case=wide, policy="cold", config={"block": 512, "warps": 8})
    cache.store(device.current().slug, entry, setting.root)
    assert setting.candidates(op, narrow).first == [Small(256, 4), Small(512, 8)]
    fixed = replace(op, free_options=())
    assert setting.candidates(fixed, narrow).first == [Small(256, 4)]


# before the GPU is touched


def test_tuner_runs_no_config_that_spills_much_or_does_not_compile(setting: Setting) -> None:
    tuner = Tuner(Task(op_of(SMALL), CASE, SMALL), setting.store(), NoBench(), CompiledAtOnce(), Options())
    assert tuner.drops_unfit  # 25 configs: no published list
    broken = evaluated(tuner, Small(64, 1), CompileResult((), "CompilationError: no"))
    assert broken == Evaluation("compile", reason="CompilationError: no")
    spilling = CompileResult((Kernel("k", 4, 255, 96, 0),))
    assert evaluated(tuner, Small(64, 2), spilling) == Evaluation("spills", reason="96 bytes per thread")
    assert tuner.refusal(tuner.task.default, spilling) is None  # the others are compared with the default
    assert tuner.refusal(Small(64, 2), replace(spilling, error="reads values", unknown=True)) is None  # the worker tells
    assert tuner.refusal(Small(64, 2), CompileResult((Kernel("k", 4, 255, 32, 0),))) is None
    assert tuner.program_registers == {Small(64, 1): 0, Small(64, 2): 1020}
    assert setting.store().get(Task(op_of(SMALL), CASE, SMALL), Small(64, 1)) == broken


def test_tuner_runs_no_config_with_lower_occupancy_than_it_asks_for(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(Task(op_of(LARGE), CASE, LARGE), setting.store(), NoBench(), CompiledAtOnce(), Options())
    asked = Large(64, 1, 1, 4)
    twice = CompileResult((Kernel("k", 8, 128, 0, 65536), Kernel("k", 8, 64, 0, 81920)))
    monkeypatch.setattr(device, "current", lambda: device.NO_GPU)
    with pytest.raises(AssertionError):  # it goes to the bench: nothing is known of the interpreter's multiprocessors
        evaluated(tuner, asked, twice)
    monkeypatch.setattr(device, "current", lambda: replace(device.NO_GPU, arch="sm_90"))
    assert evaluated(tuner, asked, twice) == Evaluation(
        "occupancy", program_registers=1024, shared_bytes=81920, reason="2 programs fit an SM, not 4"
    )
    for config, kernels in (
        (Large(64, 1, 1, 2), twice),
        (Large(64, 1, 2, 4), CompileResult((Kernel("k", 4, 64, 0, 8192),))),
    ):
        with pytest.raises(AssertionError):  # these fit
            evaluated(tuner, config, kernels)


def test_tuner_refuses_a_cooperative_grid_that_does_not_fit_beside_a_smaller_kernel(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = Tuner(Task(op_of(LARGE), CASE, LARGE), setting.store(), NoBench(), CompiledAtOnce(), Options())
    here = device.current()
    monkeypatch.setattr(device, "current", lambda: replace(here, arch="sm_90"))
    main, small = Kernel("main", 8, 168, 0, 0), Kernel("dgamma", 8, 32, 0, 0)
    together = CompileResult((replace(main, cooperative=True), small))
    trial = evaluated(tuner, Large(64, 1, 1, 2), together)
    assert (trial.status, trial.reason) == ("occupancy", "1 programs fit an SM, not 2")
    with pytest.raises(AssertionError):  # as many as it asks for fit
        evaluated(tuner, Large(64, 1, 1, 1), together)
    with pytest.raises(AssertionError):  # a grid that can run in turns is not dropped for another kernel
        evaluated(tuner, Large(64, 1, 2, 2), CompileResult((main, small)))


# errors


@pytest.mark.parametrize("variant", [SMALL, LARGE], ids=["enumerated", "asked"])
def test_tuner_raises_and_stores_nothing_if_no_config_passes(setting: Setting, variant: Variant) -> None:
    tuner = setting.tuner(variant, lambda _config: None)
    with pytest.raises(
        NothingPassedError, match=r"^fake optimized: no config can be timed for M=8 bfloat16 none; the default: off by one$"
    ):
        setting.tune(tuner, SearchLimits(trials=32))
    assert setting.cached() is None
    assert len(tuner.evaluated) >= 25
    assert tuner.finals == []


def test_tuner_of_an_empty_space_raises_with_the_case(setting: Setting) -> None:
    variant = Variant("optimized", nothing, Small, small_space, lambda *_: "never", SMALL.default)
    with pytest.raises(ValueError, match=r"^fake optimized: no valid config for M=8 bfloat16 none: never .25 of 25 configs.$"):
        setting.tune(setting.tuner(variant, small_time))


# the pipeline


def test_tuner_measures_others_while_one_compilation_is_slow(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)
    slow: Future[CompileResult] = Future()

    def compiling(_task: Task, config: Config) -> "Future[CompileResult]":
        return slow if config == Small(64, 1) else compiled(config)

    def on_trial(_config: Config, _trial: Evaluation) -> None:
        if len(tuner.evaluated) == 24 and not slow.done():
            slow.set_result(CompileResult(()))

    tuner.queue.compile = compiling
    entry = setting.tune(tuner, on_trial=on_trial)
    assert tuner.evaluated[-1] == Small(64, 1)
    assert entry.evidence["trials"] == 25


def test_tuner_cancels_compilations_in_flight_at_an_interrupt(setting: Setting) -> None:
    futures: list[Future[CompileResult]] = []

    def compiling(_task: Task, config: Config) -> "Future[CompileResult]":
        futures.append(Future() if len(futures) >= 3 else compiled(config))
        return futures[-1]

    tuner = setting.tuner(LARGE, tables(0))
    measured = in_step(tuner)

    def interrupt(config: Config, trial: Evaluation) -> None:
        measured(config, trial)
        if len(tuner.evaluated) == 3:
            raise KeyboardInterrupt

    tuner.queue.compile = compiling
    with pytest.raises(KeyboardInterrupt):
        setting.tune(tuner, SearchLimits(trials=30), interrupt)
    assert len(futures) == 2 + loop.MOST_IN_FLIGHT
    assert every(future.cancelled() for future in futures[3:])
