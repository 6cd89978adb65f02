"""The final, on a made-up operator: its configs, its winner, and when the incumbent stays."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_tuner import CASE, HALF, SMALL, CompiledAtOnce, NoBench, Setting, Small, nothing, op_of, small_space, small_time

from kerneltune.plan import Options
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.search.loop import SearchLimits
from kerneltune.spec import Config, Variant
from kerneltune.task import Task, knobs_of
from kerneltune.tune.tuner import _FINALISTS, Tuner


def test_tune_keeps_the_incumbent_that_wins_the_final(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)
    tuner.winner = lambda configs: configs[0]
    entry = setting.tune(tuner)
    assert tuner.finals[0][0] == Small(256, 4)
    assert entry.config == {"block": 256, "warps": 4} == setting.cached()


def test_final_contains_the_default_however_slow(setting: Setting) -> None:
    default = Small(256, 4)
    tuner = setting.tuner(SMALL, lambda c: 1000.0 if c == default else small_time(c))
    setting.tune(tuner)
    (final,) = tuner.finals
    assert final[0] == default
    assert final[1] == Small(512, 8)
    assert len(set(final)) == len(final) == 1 + _FINALISTS


def test_final_begins_with_the_cached_config_then_the_default(setting: Setting) -> None:
    first = setting.tuner(SMALL, small_time)
    cached = Small(64, 1)
    first.winner = lambda _configs: cached
    setting.tune(first)
    assert setting.cached() == {"block": 64, "warps": 1}

    second = setting.tuner(SMALL, small_time)
    second.winner = lambda configs: configs[0]
    setting.tune(second)
    assert second.finals[0][:3] == [cached, Small(256, 4), Small(512, 8)]
    assert setting.cached() == {"block": 64, "warps": 1}

    setting.tune(setting.tuner(SMALL, small_time))
    assert setting.cached() == {"block": 512, "warps": 8}


def test_final_begins_with_the_config_that_calls_ran_before(setting: Setting) -> None:
    """A case without an entry runs with the entry of the other 16-bit type, and the gain is over this entry."""
    half = setting.tuner(SMALL, small_time, HALF)
    half.winner = lambda _configs: Small(64, 1)
    assert setting.tune(half).evidence["before"] == "default"
    tuner = setting.tuner(SMALL, small_time)
    entry = setting.tune(tuner)
    assert tuner.finals[0][:3] == [Small(64, 1), Small(256, 4), Small(512, 8)]
    assert entry.evidence["before"] == "near"
    assert entry.evidence["speedup"] == pytest.approx(small_time(Small(64, 1)) / small_time(Small(512, 8)))


def test_final_contains_a_cached_config_that_the_budget_left_out(setting: Setting) -> None:
    first = setting.tuner(SMALL, small_time)
    cached = Small(512, 8)
    first.winner = lambda _configs: cached
    setting.tune(first)

    setting.trials.unlink()  # as after a change of the source
    again = setting.tuner(SMALL, small_time)
    again.winner = lambda configs: configs[0]
    setting.tune(again, SearchLimits(trials=2))
    assert again.finals[0][0] == cached
    assert setting.cached() == {"block": 512, "warps": 8}


def test_final_excludes_a_cached_config_that_is_wrong_or_invalid(setting: Setting) -> None:
    first = setting.tuner(SMALL, small_time)
    first.winner = lambda _configs: Small(64, 1)
    setting.tune(first)

    setting.trials.unlink()
    wrong = setting.tuner(SMALL, lambda c: None if c == Small(64, 1) else small_time(c))
    setting.tune(wrong)
    assert Small(64, 1) not in wrong.finals[0]
    assert wrong.finals[0][0] == Small(256, 4)

    setting.tune(first)
    assert setting.cached() == {"block": 64, "warps": 1}
    invalid = Variant("optimized", nothing, Small, small_space, lambda _, c: "no" if c == Small(64, 1) else None, SMALL.default)
    tuner = setting.tuner(invalid, small_time)
    setting.tune(tuner)
    assert tuner.finals[0][0] == Small(256, 4)
    assert Small(64, 1) not in tuner.finals[0]


DEFAULT, BEST, SECOND = Small(256, 4), Small(512, 8), Small(512, 4)


@pytest.mark.parametrize(
    ("lost", "stored", "finals"),
    [
        ({BEST}, SECOND, 6),  # all, the incumbent alone, beside each of four
        ({BEST, SECOND, Small(512, 16), Small(512, 2)}, DEFAULT, 6),
        ({DEFAULT}, BEST, 3),  # all, the incumbent alone, all but the incumbent
        ({DEFAULT, BEST}, SECOND, 5),  # the same, then the best alone, and the three behind it
    ],
)
def test_final_drops_configs_that_crash_the_gpu_worker(lost: set[Config], stored: Small, finals: int, setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)

    def winner(configs: Sequence[Config]) -> Config:
        if lost & set(configs):
            raise WorkerCrashedError("took longer than 300 s")
        return min(configs, key=small_time)

    tuner.winner = winner
    entry = setting.tune(tuner)
    assert setting.cached() == knobs_of(stored)
    assert len(tuner.finals) == finals
    assert entry.evidence["time_us"] == small_time(stored)
    assert entry.evidence["default_us"] == (None if DEFAULT in lost else small_time(DEFAULT))
    assert ("before" in entry.evidence) == (DEFAULT not in lost), "a gain over earlier calls needs their config in the final"


def test_final_whose_configs_all_crash_the_gpu_worker_stores_nothing(setting: Setting) -> None:
    def winner(_configs: Sequence[Config]) -> Config:
        raise WorkerCrashedError("took longer than 300 s")

    tuner = setting.tuner(SMALL, small_time)
    tuner.winner = winner
    with pytest.raises(WorkerCrashedError, match=r"^took longer than 300 s$"):
        setting.tune(tuner)
    assert setting.cached() is None
    assert set(map(tuple, tuner.finals)) >= {(config,) for config in tuner.finals[0]}


@pytest.mark.parametrize("stopped", [1, 2, 3, 6])
def test_final_in_which_the_gpu_worker_is_stopped_stores_nothing(stopped: int, setting: Setting) -> None:
    """The first final and the finals of BEST crash; SIGTERM from outside ends the worker in one of six finals."""
    tuner = setting.tuner(SMALL, small_time)

    def winner(configs: Sequence[Config]) -> Config:
        if len(tuner.finals) == stopped:
            raise WorkerStoppedError("the GPU worker was stopped")
        if BEST in configs:
            raise WorkerCrashedError("took longer than 300 s")
        return min(configs, key=small_time)

    tuner.winner = winner
    with pytest.raises(WorkerStoppedError):
        setting.tune(tuner)
    assert len(tuner.finals) == stopped
    assert setting.cached() is None


def test_final_contains_only_configs_close_to_the_best(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda c: 10.0 if c == Small(64, 1) else 10.3 if c == Small(64, 2) else 11.0)
    setting.tune(tuner)
    assert tuner.finals == [[Small(256, 4), Small(64, 1), Small(64, 2)]]


def test_final_excludes_a_default_with_wrong_results(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda c: None if c == Small(256, 4) else small_time(c))
    tuner.winner = lambda configs: configs[0]
    entry = setting.tune(tuner)
    assert Small(256, 4) not in tuner.finals[0]
    assert entry.config == {"block": 512, "warps": 8}
    assert entry.evidence["default_us"] is None


def test_tune_with_one_passing_config_has_no_final(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda c: 10.0 if c == Small(64, 1) else None)
    entry = setting.tune(tuner)
    assert tuner.finals == []
    assert entry.config == {"block": 64, "warps": 1}
    assert entry.evidence["time_us"] == 10.0


def final(setting: Setting, *contenders: tuple[float, float, int]) -> tuple[int, dict[str, Any]]:
    """Return the index of the winner among (median, spread, registers), the incumbent first, and the evidence."""
    configs = [Small(64, i) for i in range(len(contenders))]

    class Bench(NoBench):
        def time_interleaved(self, _task: Task, timed: Sequence[Config]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
            assert list(timed) == configs
            rng = np.random.default_rng(0)
            return [median * np.exp(spread * rng.permutation(np.linspace(-2, 2, 41))) for median, spread, _ in contenders]

    tuner = Tuner(Task(op_of(SMALL), CASE, SMALL), setting.store(), Bench(), CompiledAtOnce(), Options())
    tuner.program_registers = {config: registers for config, (*_, registers) in zip(configs, contenders, strict=True)}
    _, best, evidence = tuner.run_final(configs, configs[-1])
    assert evidence["default_us"] == pytest.approx(contenders[-1][0], rel=0.05), "timed in the same rounds"
    low, high = evidence["over_default"]
    assert low <= 1.05 * contenders[-1][0] / evidence["time_us"], "never surely slower than the default"
    assert high >= 1.0, "never surely slower than the default"
    assert low <= evidence["gain"] <= high, "a median of the same pairs"
    return configs.index(best), evidence


def test_final_replaces_the_incumbent_by_a_surely_faster_config(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    winner, evidence = final(setting, (100.0, 1e-3, 64), (90.0, 1e-3, 128), (95.0, 1e-3, 32))
    assert winner == 1
    assert evidence["speedup"] == pytest.approx(100 / 90, rel=2e-3)
    assert 1.0 < evidence["ci_low"] <= evidence["speedup"] <= evidence["ci_high"]
    assert (evidence["time_us"], evidence["incumbent_us"]) == pytest.approx((90.0, 100.0), rel=1e-3)


@pytest.mark.parametrize(
    ("hot", "winner"),
    [
        ((50.0, 50.0, 50.0), 1),
        ((50.0, 51.0, 50.0), 1),  # 1.11x with a cold L2 outweighs 0.98x with a hot one
        ((50.0, 57.0, 50.0), 2),
        ((50.0, 57.0, 54.0), 0),
        ((50.0, None, 40.0), 1),  # no memory for a second config
    ],
)
def test_final_of_a_capture_weighs_a_hot_cache(setting: Setting, hot: Sequence[float | None], winner: int) -> None:
    configs, cold, asked = [Small(64, i) for i in range(3)], (100.0, 90.0, 95.0), list[str]()

    class Bench(NoBench):
        def time_interleaved(self, task: Task, timed: Sequence[Config]) -> list[np.ndarray[Any, np.dtype[np.float64]] | None]:
            assert list(timed) == configs
            asked.append(task.policy)
            noise = np.exp(1e-3 * np.random.default_rng(0).permutation(np.linspace(-2, 2, 41)))
            return [None if median is None else median * noise for median in (cold if task.policy == "cold" else hot)]

    task = Task(replace(op_of(SMALL), weighs_hot=True), CASE, SMALL)
    tuner = Tuner(task, setting.store(), Bench(), CompiledAtOnce(), Options())
    assert tuner.run_final(configs, configs[0]).best == configs[winner]
    assert asked == ["cold", "hot"]


def test_final_keeps_the_incumbent_beside_a_perhaps_faster_config(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    winner, evidence = final(setting, (100.0, 0.05, 128), (99.9, 0.05, 32))
    assert winner == 0
    assert evidence["speedup"] == 1.0
    assert evidence["time_us"] == evidence["incumbent_us"]


def test_final_keeps_the_incumbent_beside_a_slower_config(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    assert final(setting, (100.0, 1e-3, 128), (101.0, 1e-3, 32))[0] == 0


def test_final_of_equally_fast_configs_takes_the_fewest_registers(setting: Setting) -> None:
    assert final(setting, (100.0, 5e-3, 8), (90.0, 5e-3, 128), (90.01, 5e-3, 64), (90.02, 5e-3, 96))[0] == 2
    assert final(setting, (100.0, 5e-3, 8), (90.0, 5e-3, 64), (90.01, 5e-3, 64))[0] == 1


def test_final_replaces_the_incumbent_beside_a_doubtful_config_with_few_registers(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is surely faster than the incumbent; the third can be told apart from neither."""
    assert final(setting, (100.0, 1e-3, 64), (98.0, 1e-3, 128), (99.0, 0.2, 32))[0] == 1
