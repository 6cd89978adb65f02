"""Compilations and measurements of a search, and their overlap with its decisions."""

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_tuner
import pytest
from asserting import every
from fake_tuner import CASE, LARGE, SMALL, Setting, Small, op_of, small_time
from replayed_search import StandIn
from subprocesses import environment, wait_for
from test_run import H200, Bench, Pool
from warm_python import python

from kerneltune import cache, device
from kerneltune.measuring.compiler import CompileResult, Kernel
from kerneltune.plan import Options
from kerneltune.search import loop
from kerneltune.search.loop import Candidates, SearchLimits, explore
from kerneltune.spec import Case, Config
from kerneltune.task import Evaluation, Task
from kerneltune.tune.session import TuningSession

SPILLS = CompileResult((Kernel("k", 4, 255, 96, 0),))
POOL = list(LARGE.configs(CASE))


class OnItsWay:
    """A compilation that is compiled and evaluated when a test says so."""

    compiled: Callable[[Any], bool] = staticmethod(lambda _config: True)

    def __init__(self, config: Config) -> None:
        self.config, self.was_cancelled = config, False
        self.evaluation: Future[Evaluation] = Future()

    def done(self) -> bool:
        return self.compiled(self.config)

    def evaluate(self) -> "Future[Evaluation]":
        return self.evaluation

    def cancel(self) -> None:
        self.was_cancelled = True


class EnoughError(Exception):
    """Ends a search that would wait for ever."""


def in_flight(done: Callable[[Config], bool], compilers: int) -> int:
    """Return the configs that a search begins before anything is measured."""

    class One(OnItsWay):
        compiled = staticmethod(done)

    begun: list[One] = []

    def start(config: Config) -> One:
        begun.append(One(config))
        return begun[-1]

    turns = iter(range(5))

    def meanwhile() -> None:
        if next(turns, None) is None:
            raise EnoughError

    with pytest.raises(EnoughError):
        explore(
            Candidates(POOL, POOL[:1]), SearchLimits(budget_s=60.0), StandIn(start, compilers=compilers, use_idle_time=meanwhile)
        )
    assert every(one.was_cancelled or one.evaluation.cancelled() for one in begun)
    return len(begun)


def test_search_compiles_on_every_core_while_nothing_waits_to_be_measured() -> None:
    assert in_flight(lambda _config: False, 20) == 20
    assert in_flight(lambda _config: False, 2) == loop.MOST_IN_FLIGHT
    assert in_flight(lambda config: config == POOL[0], 20) == 21  # this one is with the bench
    assert in_flight(lambda _config: True, 2) == loop.MOST_IN_FLIGHT


def test_search_whose_compilations_hang_ends_at_its_budget() -> None:
    class Hangs(OnItsWay):
        def done(self) -> bool:
            return self.config == POOL[0]

        def evaluate(self) -> "Future[Evaluation]":
            self.evaluation.set_result(Evaluation("passed", 10.0))
            return self.evaluation

    ends = time.monotonic() + 60

    def meanwhile() -> None:
        if time.monotonic() > ends:
            raise EnoughError

    trials_of_search = explore(Candidates(POOL, POOL[:1]), SearchLimits(budget_s=0.1), StandIn(Hangs, use_idle_time=meanwhile))
    assert list(trials_of_search) == POOL[:1]


def test_search_tells_refused_configs_before_measured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = OnItsWay(POOL[0])

    class Refused(OnItsWay):
        def evaluate(self) -> "Future[Evaluation]":
            self.evaluation.set_result(Evaluation("spills"))
            return self.evaluation

    def tell(_state: loop.SearchState, config: Config, time_us: float | None) -> None:
        results.append((config, time_us))
        if len(results) == 9:
            measured.evaluation.set_result(Evaluation("passed", 10.0))

    results: list[tuple[Config, float | None]] = []
    monkeypatch.setattr(loop.SearchState, "tell", tell)
    begin = StandIn(lambda config: measured if config == POOL[0] else Refused(config))
    explore(Candidates(POOL[:10]), SearchLimits(), begin)
    assert results[-1] == (POOL[0], 10.0)
    assert {time_us for _, time_us in results[:-1]} == {None}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_search_measures_while_the_sampler_decides(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)
    ahead: list[int] = []

    def on_trial(_config: Config, _trial: Evaluation) -> None:
        if not ahead:
            wait_for(lambda: len(tuner.evaluated) > 1)
            ahead.append(len(tuner.evaluated))

    entry = setting.tune(tuner, on_trial=on_trial)
    assert ahead[0] >= 2
    assert entry.evidence["trials"] == len(tuner.evaluated) == 25


def test_search_at_its_time_limit_counts_the_last_measurement(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, small_time)
    measured: list[Config] = []
    entry = setting.tune(tuner, SearchLimits(budget_s=1e-9), lambda config, _trial: measured.append(config))
    assert measured == tuner.evaluated
    assert entry.evidence["trials"] == len(measured) < 25


def test_search_at_the_end_of_its_run_tries_configs_until_one_has_a_time(setting: Setting) -> None:
    tuner = setting.tuner(SMALL, lambda config: None if config == POOL[0] else small_time(config))
    entry = setting.tune(tuner, SearchLimits(until=0.0))
    assert (entry.evidence["ended_early"], 1 < entry.evidence["trials"] < 25) == (True, True)


def test_search_prepares_the_case_while_the_first_config_compiles(setting: Setting) -> None:
    prepared: list[bool] = []

    class Ready(fake_tuner.NoBench):
        def prepare(self, *_: object) -> None:
            prepared.append(True)

    tuner = setting.tuner(SMALL, small_time)
    tuner.worker = Ready()
    waiting: list[Future[CompileResult]] = []

    def compiling(_task: Task, _config: Config) -> "Future[CompileResult]":
        waiting.append(Future())
        return waiting[-1]

    def meanwhile() -> None:
        if prepared:
            for future in waiting:
                if not future.done():
                    future.set_result(CompileResult(()))

    tuner.queue.fill, tuner.queue.compile = meanwhile, compiling
    assert setting.tune(tuner).evidence["trials"] == 25
    again = setting.tuner(SMALL, small_time)
    again.worker = Ready()
    again.queue.compile = compiling
    setting.tune(again)
    assert prepared == [True]  # not where everything is known


# look-ahead


class Slow(Pool):
    """Compiles when a test says so."""

    workers = 3
    requested: list[tuple[Case, Config]] = []
    futures: list["Future[CompileResult]"] = []

    def submit(self, run: Any) -> "Future[CompileResult]":
        self.requested.append((run.task.case, run.config))
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Options:
    Slow.requested, Slow.futures = [], []
    monkeypatch.setattr(device, "current", lambda: H200)
    monkeypatch.setattr("kerneltune.tune.session.CompilePool", Slow)
    monkeypatch.setattr("kerneltune.tune.session.GpuWorker", Bench)
    cache.use_root(tmp_path / "configs")
    return Options(results=tmp_path / "results")


def test_idle_compilers_compile_for_later_cases(slow: Options) -> None:
    cases = [Case(f"m{size}", (("M", size),), "bfloat16") for size in (8, 16, 32)]
    op = op_of(SMALL)
    with TuningSession(slow) as session:
        now, *later = (session.tuner(Task(op, case, SMALL)) for case in cases)
        session.queue.look_ahead(run for one in later for run in one.first_runs())
        now.compile(Small(64, 1))
        session.queue.fill()
        session.queue.fill()
        assert [case for case, _ in Slow.requested] == [cases[0], cases[1], cases[1]]  # three workers
        for done in range(1, 60):
            Slow.futures[done].set_result(CompileResult(())) if done < len(Slow.futures) else None
            session.queue.fill()
        ahead = Slow.requested[1:]
        assert len(ahead) == len(set(ahead)) == 50
        assert {case for case, _ in ahead} == {cases[1], cases[2]}
        assert ahead[0] == (cases[1], Small(256, 4))  # what the search asks for first
        taken = [later[0].compile(config) for config in SMALL.configs(cases[1])]
        assert len(Slow.requested) == 51
        assert len(taken) == 25
        session.queue.forget(later[1].task)
        later[1].compile(Small(64, 1))
        assert len(Slow.requested) == 52


def test_gpu_worker_begins_before_the_driver_is_asked(slow: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Begun(Bench):
        def begin(self) -> None:
            happened.append("worker")

        def __exit__(self, *_: object) -> None:
            happened.append("ended")

    def current() -> device.Device:
        happened.append("driver")
        return replace(H200, arch="sm_70")

    monkeypatch.setattr("kerneltune.tune.session.GpuWorker", Begun)
    monkeypatch.setattr(device, "current", current)
    with pytest.raises(ValueError, match=r"^cannot compile ahead of time for sm_70; known targets: sm_90, "), TuningSession(slow):
        pass
    assert happened == ["worker", "driver", "ended"]


SEARCHED = """
import sys
from kerneltune.cli.loading import load_ops
from kerneltune.tune import fleet
from kerneltune.search.loop import SearchState, Candidates, SearchLimits
from fake_tuner import CASE, LARGE

load_ops()
state = SearchState(Candidates(list(LARGE.configs(CASE))), SearchLimits(budget_s=1.0), None)
state.sampler.ask()
print(*sorted({"scipy", "pandas", "torch._dynamo"} & set(sys.modules)))
state.sampler.prepare()
print(*sorted({"scipy", "pandas", "torch._dynamo"} & set(sys.modules)))
"""


def test_search_imports_scipy_while_the_first_configs_compile() -> None:
    done = subprocess.run([python(), "-c", SEARCHED], capture_output=True, text=True, env=environment(), timeout=800)
    assert done.stdout == "\nscipy\n", done.stderr[-2000:]


def test_search_process_leaves_the_core_of_the_gpu_worker(slow: Options) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    with TuningSession(slow) as machines, machines.off_worker_core():
        assert os.sched_getaffinity(0) == before - {max(before)}
    assert os.sched_getaffinity(0) == before
