"""An H200 that is none: the pool of fake_operator.py, and a bench whose times are a formula of a config of `stream`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fake_operator
import numpy as np
import pytest
from fake_operator import H200, Pool

from kerneltune import cache, device, ops
from kerneltune.spec import Config
from kerneltune.stats import Samples
from kerneltune.task import Evaluation, Task
from kerneltune.tune.session import TuningResult

OPS = ops.load()


def time_us(config: Any) -> float:
    """Return a time that is least at 2048 words and 8 warps."""
    return 10.0 + abs(np.log2(config.block / 2048)) + abs(config.warps - 8) / 8 + config.ctas / 100


class Bench(fake_operator.Bench):
    """A bench of configs of `stream`; a test says which config crashes."""

    crashed: Callable[[Any], bool] = staticmethod(lambda _config: False)

    def measure(self, task: Task, config: Config, best_us: float | None) -> Evaluation:
        if Bench.crashed(config):
            return Evaluation("crashed", reason="took longer than 60 s")
        return Evaluation("passed", time_us(config))

    def time_interleaved(self, task: Task, configs: Sequence[Config]) -> list[Samples]:
        return [np.full(15, time_us(config)) for config in configs]


@contextmanager
def stands_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tune on this GPU, until the end."""
    monkeypatch.setattr(device, "current", lambda: H200)
    monkeypatch.setattr("kerneltune.tune.session.CompilePool", Pool)
    monkeypatch.setattr("kerneltune.tune.session.GpuWorker", Bench)
    monkeypatch.setattr("kerneltune.tune.session.why_not_timed", lambda *_: None)
    cache.clear()
    yield
    cache.clear()


def entries_of(results: Sequence[TuningResult]) -> list[cache.CacheEntry]:
    """Return the entries that a run has stored."""
    return [result.entry for result in results if result.entry is not None]
