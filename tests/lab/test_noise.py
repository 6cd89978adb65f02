"""How much a busy compile pool disturbs times, on a made-up GPU."""

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up_gpu
import numpy as np
import pytest
from made_up_gpu import OPS, Bench, Pool
from typer.testing import CliRunner

from kerneltune.cli import app
from kerneltune.lab import noise
from kerneltune.measuring.compiler import CompileResult
from kerneltune.plan import Options
from kerneltune.search.task import Task
from kerneltune.spec import Case, Config, Variant
from kerneltune.stats import Samples
from kerneltune.tuning import stage
from kerneltune.tuning.bench import ChildCrashedError


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with made_up_gpu.stands_in(monkeypatch):
        yield


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(results=tmp_path / "results", configs=tmp_path / "configs")


class Busy(Pool):
    """Compiles and is never done; says what it was given, and where its cache is."""

    given: list[Any] = []
    caches: set[str | None] = set()

    def __init__(self, *_: object) -> None:
        Busy.given, Busy.caches = [], {os.environ.get("TRITON_CACHE_DIR")}

    def submit(self, job: object) -> "Future[CompileResult]":
        self.given.append(job)
        return Future()


CASE = Case("big", (("read", 1 << 20), ("write", 1 << 20)), "int32")
STREAM = OPS["stream"].variants[0]


def disturbed(options: Options, variant: Variant = STREAM) -> tuple[noise.Noise, noise.Noise]:
    return noise.disturbance(OPS["stream"], CASE, variant, variant.default_config(CASE), options)


def test_noise_compares_an_idle_with_a_busy_pool(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, calls = np.random.default_rng(0), itertools.count()

    def samples(_self: Bench, _task: Task, configs: Sequence[Config]) -> list[Samples]:
        call = next(calls)
        assert bool(Busy.given) == (call >= 5)
        return [10.0 * np.exp(rng.normal(0, 0.001 if call < 5 else 0.05, 15)) for _ in configs]

    monkeypatch.setattr(stage, "CompilePool", Busy)
    monkeypatch.setattr(Bench, "samples", samples)
    monkeypatch.setenv("TRITON_CACHE_DIR", "full of what was tuned")
    idle, busy = disturbed(options)
    assert idle.floor < 0.005 < busy.floor
    assert idle.spread < 0.01 < busy.spread
    assert idle.time_us.median == pytest.approx(10.0, rel=0.01)
    (folder,) = Busy.caches  # where nothing is found that need not be compiled
    assert folder != "full of what was tuned" == os.environ["TRITON_CACHE_DIR"]
    assert not Path(str(folder)).exists()


def test_noise_says_where_the_pool_would_be_idle(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "stream baseline: read=1048576 write=1048576 int32 none: "
    alone = replace(STREAM, space=lambda _: {"block": (1024,), "warps": (8,), "ctas": (0,)})
    with pytest.raises(ValueError, match=f"^{where}one config: expected others"):
        disturbed(options, alone)
    with pytest.raises(ValueError, match=f"^{where}11 other configs keep 2 workers busy for less than it takes"):
        disturbed(options)  # the pool of these tests is done at once


def test_noise_of_a_config_without_a_time_is_one_line(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "lost", staticmethod(lambda _config: True))
    with pytest.raises(ValueError, match=r"int32 none: lost: took longer than 60 s$"):
        disturbed(options)

    def lost(*_: object) -> None:
        raise ChildCrashedError("the measuring process died: exit code -9")

    monkeypatch.setattr(Bench, "trial", lost)
    with pytest.raises(ValueError, match=r"int32 none: crashed: the measuring process died: exit code -9$"):
        disturbed(options)


def test_noise_of_an_operator_without_knobs_is_one_line() -> None:
    result = CliRunner().invoke(app, ["lab", "noise", "moe_training"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: moe_step: no variant of ours has knobs")
