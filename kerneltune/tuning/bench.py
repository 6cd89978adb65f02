"""Check, time and compare configs in this process.

Decides nothing and stores nothing. May import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from kerneltune.errors import first_line
from kerneltune.measuring.check import CaseError, Checker
from kerneltune.measuring.compare import Compared, Untimed, input_sets, time_runs
from kerneltune.measuring.compiler import know_triton
from kerneltune.measuring.memory import OutOfMemory, affordable, out_of_memory_reason
from kerneltune.measuring.rounds import POLICIES, Contender, interleave
from kerneltune.search.task import Run, Task
from kerneltune.search.trials import Evaluation
from kerneltune.spec import Config
from kerneltune.stats import Samples

TRIED_WHOLE = 20
"""Spaces up to this size are published lists, and run even where they spill."""
SCREEN_SAMPLES = 5
_SCREEN_US = 250.0
_REJECTED_AT = 1.3
"""A config whose first sample is slower than the best so far by this factor gets no others."""


class GpuBench:
    """A bench on the GPU of this process.

    Attributes:
        on_variant: told the name of each variant before `compare` launches it, and an empty name before all are launched.
    """

    def __init__(self) -> None:
        """Begin with what every case needs, a context on the GPU and Triton's driver; the first launch waits for it."""
        self.on_variant: Callable[[str], None] = lambda _name: None
        self._task: Task | None = None
        self._checker: Checker | None = None
        self._inputs: list[Any] = []
        beside = ThreadPoolExecutor(1)
        self._launchable = beside.submit(open_driver)
        beside.shutdown(wait=False)

    @property
    def task(self) -> Task:
        """Return the task that is open."""
        assert self._task is not None
        return self._task

    def open(self, task: Task) -> None:
        """Remember the task; what was made of its case stays."""
        before, self._task = self._task, task
        if before is None or (before.op.name, before.case) != (task.op.name, task.case):
            self._checker = None
        if before is None or before.place != task.place:
            self._inputs = []

    def prepare(self) -> None:
        """Make inputs and reference.

        Raises:
            MemoryError: the sets of inputs do not fit the memory, or no call would be cold.
        """
        self._reference()
        if not self._inputs:
            made = input_sets(self.task)
            if isinstance(made, OutOfMemory):
                raise MemoryError(made.reason)
            self._inputs = made

    def _reference(self) -> Checker:
        self._launchable.result()
        if self._checker is None:
            self._checker = Checker(self.task.op, self.task.case, "cuda")
        return self._checker

    def check(self, config: Config) -> Evaluation:
        """Return `ok`, `wrong`, `failed` without inputs or reference, or `memory`; no time."""
        try:
            errors = affordable(lambda: self._reference().errors(self.task.variant, config))
        except CaseError as error:
            return Evaluation("failed", detail=str(error))
        if isinstance(errors, OutOfMemory):
            return Evaluation("memory", detail=errors.reason)
        return Evaluation("wrong", detail="; ".join(errors)) if errors else Evaluation("ok")

    def trial(self, config: Config, best_us: float | None, samples: int = SCREEN_SAMPLES) -> Evaluation:
        """Check a config and time it roughly: the median of the samples, one sample where that is far behind `best_us`."""
        self.prepare()
        checked = self.check(config)
        if checked.status != "ok":
            return checked
        timed = affordable(lambda: self._timed(config, best_us, samples))
        return Evaluation("memory", detail=timed.reason) if isinstance(timed, OutOfMemory) else timed

    def _timed(self, config: Config, best_us: float | None, samples: int) -> Evaluation:
        try:
            contender = self._contender(config, _SCREEN_US)
            times = [contender.sample_us()]
            while len(times) < samples and not (best_us and times[0] > _REJECTED_AT * best_us):
                times.append(contender.sample_us())
            return Evaluation("ok", time_us=float(np.median(times)))
        except RuntimeError as error:
            if out_of_memory_reason(error):
                raise
            return Evaluation("failed", detail=first_line(error))

    def samples(self, configs: Sequence[Config]) -> list[Samples | None]:
        """Time correct configs interleaved: (rounds,) microseconds each, None where those before leave no memory.

        Rounds end when the ratios to the first are known well.
        """
        self.prepare()
        contenders = {"0": self._contender(configs[0])}  # the others are held against it: without it there is no answer
        for i, config in enumerate(configs[1:], start=1):
            beside = affordable(partial(self._contender, config))
            if not isinstance(beside, OutOfMemory):
                contenders[str(i)] = beside
        samples = interleave(contenders, min_rounds=15, max_rounds=40)
        return [samples.get(str(i)) for i in range(len(configs))]

    def compare(self, runs: Sequence[Run], ceiling: Run | None, untimed: Mapping[str, Untimed]) -> Compared:
        """Check and time variants of a case, see `measuring.compare.time_runs`."""
        self.close()
        self._launchable.result()
        return time_runs(runs, ceiling, untimed, self.on_variant)

    def close(self) -> None:
        """Give the memory of inputs and reference back."""
        self._task, self._checker, self._inputs = None, None, []
        torch.cuda.empty_cache()

    def _contender(self, config: Config, sample_us: float = 800.0) -> Contender:
        run, inputs = self.task.variant.run, self._inputs
        return Contender(lambda i: run(inputs[i], config), len(inputs), POLICIES[self.task.policy], sample_us)


def open_driver() -> None:
    """Open a context on the GPU and Triton's driver, which compiles and loads a C module, before a launch needs them."""
    from triton.runtime.driver import driver

    torch.cuda.synchronize()
    driver.active.get_current_device()
    know_triton()
