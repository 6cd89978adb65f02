"""An H200 that is none: a compile pool that is done at once, and a bench whose times are a formula."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kerneltune import cache, device, ops
from kerneltune.device import Device
from kerneltune.measuring.compiler import CompileResult, Kernel
from kerneltune.search.task import Evaluation, Task
from kerneltune.spec import Config
from kerneltune.stats import Samples

H200 = Device("NVIDIA H200", "sm_90", 132, 50 << 20, "580")
OPS = ops.load()
COMPILED = CompileResult((Kernel("k", 4, 32, 0, 1024),), 0.1)


def time_us(config: Any) -> float:
    """Best at 2048 words and 8 warps."""
    return 10.0 + abs(np.log2(config.block / 2048)) + abs(config.warps - 8) / 8 + config.ctas / 100


class Pool:
    """A compile pool that is done at once."""

    workers = 2

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, _job: object) -> "Future[CompileResult]":
        return self.done()

    def done(self, compiled: CompileResult = COMPILED) -> "Future[CompileResult]":
        future: Future[CompileResult] = Future()
        future.set_result(compiled)
        return future


class Bench:
    """A bench whose times are a formula; refuses what a test tells it to."""

    crashed: Callable[[Any], bool] = staticmethod(lambda _config: False)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, task: Task) -> None:
        pass

    def begin(self) -> None:
        pass

    def trial(self, task: Task, config: Config, best_us: float | None, samples: int = 5) -> Evaluation:
        return (
            Evaluation("crashed", detail="took longer than 60 s") if Bench.crashed(config) else Evaluation("ok", time_us(config))
        )

    def time_interleaved(self, task: Task, configs: Sequence[Config]) -> list[Samples]:
        return [np.full(15, time_us(config)) for config in configs]

    def close(self) -> None:
        pass


@contextmanager
def stands_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tune on this GPU, until the end."""
    monkeypatch.setattr(device, "current", lambda: H200)
    monkeypatch.setattr("kerneltune.tune.session.CompilePool", Pool)
    monkeypatch.setattr("kerneltune.tune.session.GpuWorker", Bench)
    monkeypatch.setattr("kerneltune.tune.tune_run.obstacle", lambda *_: None)
    cache.clear()
    yield
    cache.clear()
