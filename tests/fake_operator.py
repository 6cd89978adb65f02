"""A made-up operator with its compile pool and its bench, importable by a fresh process: its times are a formula."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from kerneltune.device import Device
from kerneltune.measuring.compiler import CompileResult, Kernel
from kerneltune.spec import Case, Config, Op, Space, Traffic, Variant
from kerneltune.stats import Samples
from kerneltune.task import Evaluation, Task

H200 = Device("NVIDIA H200", "sm_90", 132, 50 << 20, "580")
COMPILED = CompileResult((Kernel("k", 4, 32, 0, 1024),))
launched: list[Config] = []


@dataclass(frozen=True, slots=True)
class Knobs:
    """Two knobs."""

    block: int
    warps: int


def nothing(*_args: Any, **_kwargs: Any) -> Mapping[str, Any]:
    """Make inputs and reference of an operator that has none."""
    return {}


def no_errors(*_args: Any) -> list[str]:
    """Return no error."""
    return []


def run(_inputs: object, config: Config) -> Mapping[str, Any]:
    """Remember the config; fail for the config that cannot be launched."""
    if config == Knobs(3, 4):
        raise RuntimeError("Triton Error [CUDA]: invalid argument")
    launched.append(config)
    return {}


def space(_case: Case) -> Space:
    """Return the space of twenty configs."""
    return {"block": tuple(range(5)), "warps": (1, 2, 4, 8)}


def time_us(config: Config) -> float:
    """Return a time that is least at block 3, warps 8."""
    return 10.0 + abs(config.block - 3) + abs(config.warps - 8) / 8


VARIANT = Variant("optimized", run, Knobs, space, default=lambda _case: Knobs(0, 1))
OP = Op("fake", ("M",), ("bfloat16",), nothing, nothing, no_errors, lambda _: Traffic(1, 1), (VARIANT,), __name__)
OPS = (OP,)
CASE = Case("a", (("M", 8),), "bfloat16")


class Pool:
    """A compile pool that is done at once."""

    workers = 2

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, _job: object) -> "Future[CompileResult]":
        """Compile nothing."""
        return self.done()

    def done(self, compiled: CompileResult = COMPILED) -> "Future[CompileResult]":
        """Return an answer that is there."""
        future: Future[CompileResult] = Future()
        future.set_result(compiled)
        return future


class Bench:
    """A bench whose times are a formula; a config with block 2 is wrong."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def begin(self) -> None:
        """Do nothing: there is nothing to start."""

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None: ...

    def prepare(self, task: Task) -> None:
        """Do nothing: there is nothing to make."""

    def measure(self, task: Task, config: Config, best_us: float | None) -> Evaluation:
        """Return the time by the formula."""
        return Evaluation("failed", reason="off by one") if config.block == 2 else Evaluation("passed", time_us(config))

    def time_interleaved(self, task: Task, configs: Sequence[Config]) -> list[Samples]:
        """Return the same times with a noise that is known."""
        return [time_us(config) * np.linspace(0.999, 1.001, 15) for config in configs]

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
