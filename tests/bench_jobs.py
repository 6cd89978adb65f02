"""An operator and a bench without a GPU, for test_gpu_worker.py and test_kill.py, importable by a GPU worker."""

import os
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kerneltune import ops
from kerneltune.measuring.compare import Compared
from kerneltune.misses import CacheMissWarning
from kerneltune.processes.start import tell
from kerneltune.spec import Case, Config, Op, Space, Traffic, Variant
from kerneltune.stats import Samples
from kerneltune.task import Evaluation, Outcome, Run, Task


@dataclass(frozen=True, slots=True)
class Knobs:
    """does: an action, a name in `_do`; n: added to the time, in µs."""

    does: str
    n: int


def nothing(*_args: Any, **_kwargs: Any) -> Mapping[str, Any]:
    """Make inputs, reference and outputs of an operator that has none."""
    return {}


def no_errors(*_args: Any) -> list[str]:
    """Return no error."""
    return []


def space(_case: Case) -> Space:
    """Return the space of sixty well-behaved configs."""
    return {"does": ("run",), "n": tuple(range(60))}


VARIANT = Variant("optimized", nothing, Knobs, space, default=lambda _case: Knobs("run", 0))
OPS = (Op("fake", ("M",), ("bfloat16",), nothing, nothing, no_errors, lambda _: Traffic(1, 1), (VARIANT,), __name__),)
CASE = Case("a", (("M", 8),), "bfloat16")
LOG, DOES = "KERNELTUNE_TEST_LOG", "KERNELTUNE_TEST_DOES"


class FakeBench:
    """Act as a config says: `run` and `slow` take 10 + n µs, other actions end the process or raise."""

    tried = 0

    def prepare(self, task: Task) -> None:
        """Check that the worker finds the task by name."""
        assert task.key == ("fake", "optimized", CASE, "cold")

    def measure(self, task: Task, config: Config, best_us: float | None) -> Evaluation:
        """Return in the detail the how-manieth config of the worker this is."""
        self.tried += 1
        if LOG in os.environ:
            with open(os.environ[LOG], "a") as file:
                file.write(f"{config.n}\n")
            time.sleep(0.02)
        _do(config.does)
        return Evaluation("passed", 10.0 + config.n, f"{self.tried} {os.getpid()}")

    def time_interleaved(self, task: Task, configs: Sequence[Config]) -> list[Samples]:
        """Return the same times again."""
        return [np.full(15, 10.0 + config.n) for config in configs]

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class HangsInEveryRequest(FakeBench):
    """Never answers `check` or `compare`."""

    def check(self, *_: object) -> None:
        """Sleep longer than any test."""
        time.sleep(600)

    compare = check


class FakeCheck(FakeBench):
    """Checks that nothing is wrong; a block of 512 words takes the process along."""

    def check(self, task: Task, config: Config) -> Outcome:
        """Return the outcome of the block."""
        if config.block == 512:
            os.abort()
        return Outcome("failed", "dst: 1 of 2 words wrong") if config.block == 4096 else Outcome("checked")


class FakeCompare(FakeBench):
    """Takes 10 µs for every variant; the launch of `pr593` in the case `big` does what the environment says."""

    def __init__(self) -> None:
        """Import the operators now: the time limit of a request would count the import."""
        ops.load()

    def compare(self, runs: Sequence[Run], ceiling: Run | None, untimed: Mapping[str, Outcome]) -> Compared:
        """Launch the variants in turn."""
        timed = [task for task, _ in runs if task.variant.name not in untimed]
        for task in timed:
            tell(task.variant.name)
            if (task.case.name, task.variant.name) == ("big", "pr593"):
                _do(os.environ[DOES])
        tell("")
        return Compared({task.variant.name: np.linspace(9.9, 10.1, 15) for task in timed}, dict(untimed))


def _do(does: str) -> None:
    if does == "abort":
        os.abort()
    if does == "llvm":
        os.write(1, b"a kernel of 4000 lines\n")
        os.write(2, b"LLVM ERROR: cannot select\nstack dump\n")
        os.abort()
    if does == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    if does == "exit":
        os._exit(7)
    if does == "slow":
        time.sleep(0.2)
    if does == "hang":
        time.sleep(3600)
    if does == "memory":
        raise MemoryError("no memory for 17 tensors\nsecond line")
    if does == "fault":
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


class Prints:
    """Prints an error, shows a warning, or dies without a word."""

    def warning(self) -> str:
        """Return what is printed of a look-up without a config."""
        return warnings.formatwarning("no config; using the default", CacheMissWarning, "launch.py", 39)

    def whisper(self) -> None:
        """Print an error."""
        os.write(2, b"error: of another request\n")

    def die(self) -> None:
        """End the process."""
        os.abort()


class NeverOpens(FakeBench):
    """Dies before it comes to a config."""

    def prepare(self, task: Task) -> None:
        """Raise as on a GPU that lacks memory for the inputs."""
        raise MemoryError("inputs do not fit")
