"""A made-up operator whose times are a formula, and the tuner of it: no GPU, nothing is compiled."""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Semaphore
from typing import Any
from unittest import mock

from kerneltune import cache, device
from kerneltune.measuring.compiler import CompileResult
from kerneltune.plan import Options
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.search.loop import Candidates, SearchLimits, SearchState
from kerneltune.search.trials import TrialStore
from kerneltune.spec import Case, Config, Op, Space, Traffic, Variant
from kerneltune.task import Evaluation, Task
from kerneltune.tune.candidates import candidates
from kerneltune.tune.tuner import Final, Tuner

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
    """Return a time that is least at block 512, warps 8; every config has a time of its own."""
    return (
        10.0
        + abs(BLOCKS.index(config.block) - 3)
        + 0.1 * abs(WARPS.index(config.warps) - 3)
        + config.block / 1e4
        + config.warps / 1e5
    )


def tables(seed: int) -> Callable[[Large], float]:
    """Make a landscape of 400 configs, the best at 10 µs: a knob's values cost what chance says, one of them nothing.

    Some knobs matter more, as in kernels.
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

    def prepare(self, *_args: Any) -> None:
        pass

    def measure(self, *_args: Any) -> Evaluation:
        raise AssertionError

    def time_interleaved(self, *_args: Any) -> Any:
        raise AssertionError

    def close(self) -> None:
        pass

    def stop(self) -> None:
        pass


class FakeTuner(Tuner):
    """Times are a formula, None for a config that is wrong; a final is won by the faster config, or by whom it is told."""

    def __init__(self, case: Case, variant: Variant, store: TrialStore, landscape: Landscape) -> None:
        super().__init__(Task(op_of(variant), case, variant), store, NoBench(), CompiledAtOnce(), Options())
        self.landscape = landscape
        self.evaluated: list[Config] = []
        self.finals: list[list[Config]] = []
        self.winner: Callable[[Sequence[Config]], Config] = lambda configs: min(configs, key=landscape)  # type: ignore[arg-type]

    def refusal(self, config: Config, compiled: CompileResult) -> Evaluation | None:
        return None

    def measure_config(self, config: Config) -> Evaluation:
        self.evaluated.append(config)
        time_us = self.landscape(config)
        return Evaluation("failed", reason="off by one") if time_us is None else Evaluation("passed", time_us)

    def run_final(self, configs: Sequence[Config], default: Config) -> Final:
        self.finals.append(list(configs))
        best = self.winner(configs)
        default_us = self.landscape(default) if default in configs else None
        speedup = self.landscape(configs[0]) / self.landscape(best)  # type: ignore[operator]
        return Final(configs[0], best, {"time_us": self.landscape(best), "speedup": speedup, "default_us": default_us})


def in_step(tuner: FakeTuner) -> Callable[[Config, Evaluation], None]:
    """Have the bench begin with a config when the search is done with the one before; it has to be told every trial."""
    gate, measure, measured, stopped = Semaphore(), tuner.measure_config, deque[Config](), Event()

    def gated(config: Config) -> Evaluation:
        assert gate.acquire(timeout=60)
        if stopped.is_set():
            raise WorkerCrashedError
        return measure(config)

    def stop() -> None:
        stopped.set()
        gate.release()

    def meanwhile() -> None:
        while measured:
            measured.popleft()
            gate.release()

    def on_trial(config: Config, _trial: Evaluation) -> None:
        if config in tuner.evaluated:  # not where it is refused
            measured.append(config)

    tuner.measure_config, tuner.queue.fill, tuner.worker.stop = gated, meanwhile, stop  # type: ignore[method-assign]
    return on_trial


class Setting:
    """A store and a configs folder; every `tuner` is a new process in what it knows."""

    def __init__(self, folder: Path) -> None:
        self.trials, self.root = folder / "trials.log", folder / "configs"
        cache.use_root(self.root)

    def store(self) -> TrialStore:
        return TrialStore(self.trials, source_hash="abc")

    def candidates(self, op: Op, case: Case = CASE, policy: str = "cold") -> Candidates:
        return candidates(Task(op, case, op.variants[0], policy), self.store(), Options())

    def tuner(self, variant: Variant, landscape: Landscape, case: Case = CASE) -> FakeTuner:
        return FakeTuner(case, variant, self.store(), landscape)

    def tune(
        self,
        tuner: FakeTuner,
        search: SearchLimits | None = None,
        on_trial: Callable[[Config, Evaluation], None] = lambda _config, _trial: None,
    ) -> cache.CacheEntry:
        tell, tuner.options = SearchState.tell, Options(search=search or SearchLimits())

        def tell_both(state: SearchState, config: Config, time_us: float | None) -> None:
            tell(state, config, time_us)
            if (trial := tuner.stored_trial(config)) is not None:
                on_trial(config, trial)

        with mock.patch.object(SearchState, "tell", tell_both):
            return tuner.tune()

    def cached(self, case: Case = CASE) -> dict[str, Any] | None:
        stored = cache.load("fake", device.current().slug, self.root)
        return next((entry.config for entry in stored if (entry.case, entry.policy) == (case, "cold")), None)


def evaluated(tuner: Tuner, config: Config, compiled: CompileResult) -> Evaluation:
    """Compile on the thread that asks."""
    return tuner.stored_or_measured(config, compiled, tuner.refusal(config, compiled))


def compiled(_config: object = None) -> "Future[CompileResult]":
    future: Future[CompileResult] = Future()
    future.set_result(CompileResult(()))
    return future


class CompiledAtOnce:
    """A queue whose configs are compiled when they are asked for; tests give it other functions."""

    compilers = 1

    def __init__(self) -> None:
        self.fill: Callable[[], None] = lambda: None
        self.compile: Callable[[Task, Config], Future[CompileResult]] = lambda _task, config: compiled(config)
