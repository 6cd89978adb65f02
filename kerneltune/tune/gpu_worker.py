"""Check, time and compare configs on a GPU, in a process that may crash: the GPU worker.

Of the processes of a search or a sweep, the GPU worker alone launches kernels on the GPU. It decides nothing and stores nothing.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from kerneltune import cache
from kerneltune.checking.check import Checker, broken_context
from kerneltune.checking.consistency import FirstSeen
from kerneltune.checking.memory import out_of_memory_reason, within_memory
from kerneltune.errors import first_line
from kerneltune.measuring.compare import CEILING, Compared, compared_records, contender, input_sets, time_runs
from kerneltune.measuring.compiler import hash_triton_sources
from kerneltune.measuring.rounds import POLICIES, Contender, interleave
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.processes.worker import State, Worker, WorkerCrashedError
from kerneltune.records import Record
from kerneltune.spec import LARGEST_MEASURE, Config
from kerneltune.stats import Samples
from kerneltune.task import CaseError, Evaluation, Outcome, Run, SkippedError, Task

SCREEN_SAMPLES = 5
_SCREEN_US = 250.0
_REJECTED_AT = 1.3
"""Factor over the best time so far at which a config gets no sample after its first."""
CONFIG_TIMEOUT_S = 60.0
FINAL_TIMEOUT_S = 300.0
VARIANT_TIMEOUT_S = 900.0
"""Seconds for each variant of a comparison, including compilation."""
_EXIT_GRACE_S = 0.2


class GpuBench:
    """Check and time configs on the GPU of this process.

    Inputs and reference of a case stay in memory until a request for another case, or `close`.
    """

    def __init__(self, cores: frozenset[int] | None = None) -> None:
        """Begin to open a context on the GPU and Triton's driver; the first launch waits for both.

        cores: cores that this thread keeps to once both are open and inputs are made; None for all.
        """
        self._cores = cores
        self._task: Task | None = None
        self._checker: Checker | None = None
        self._inputs: list[Any] = []
        self._first_seen = FirstSeen()
        opener = ThreadPoolExecutor(1)
        self._launchable = opener.submit(open_driver)
        opener.shutdown(wait=False)

    def _open(self, task: Task) -> Checker:
        """Free inputs and reference of another case, and return the checker of this case."""
        before, self._task = self._task, task
        if before is None or (before.op.name, before.case) != (task.op.name, task.case):
            self._checker = None
        if before is None or before.key != task.key:
            self._inputs = []
            cache.clear(forgets_misses=False)  # operators that the task's operator calls may have been tuned since
        self._launchable.result()
        if self._checker is None:
            self._checker = Checker(task.op, task.case, "cuda", first_seen=self._first_seen)
        return self._checker

    def prepare(self, task: Task) -> None:
        """Make inputs and reference of a task.

        Raises:
            MemoryError: the sets of inputs do not fit the memory, or no call would be cold.
        """
        self._open(task)
        if not self._inputs:
            try:
                self._inputs = input_sets(task)
            except SkippedError as error:
                raise MemoryError(str(error)) from None  # fails the task; `SkippedError` would fail a single config
        if self._cores:
            os.sched_setaffinity(0, self._cores)

    def check(self, task: Task, config: Config) -> Outcome:
        """Return the outcome of a config."""
        try:
            return within_memory(lambda: self._open(task).check(task.variant, config))
        except CaseError as error:
            return error.outcome

    def measure(self, task: Task, config: Config, best_us: float | None, samples: int = SCREEN_SAMPLES) -> Evaluation:
        """Check a config and return the median of its samples; a config far behind `best_us` gets a single sample."""
        self.prepare(task)
        checked = self.check(task, config)
        if checked.status != "checked":
            assert checked.status != "noted"
            return Evaluation(checked.status, reason=checked.reason)
        try:
            return within_memory(lambda: self._time(task, config, best_us, samples))
        except SkippedError as error:
            return Evaluation("skipped", reason=str(error))

    def _time(self, task: Task, config: Config, best_us: float | None, samples: int) -> Evaluation:
        try:
            screened = self._contender(task, config, sample_us=_SCREEN_US)
            times = [screened.sample_us()]
            while len(times) < samples and not (best_us and times[0] > _REJECTED_AT * best_us):
                times.append(screened.sample_us())
            time_us = float(np.median(times))
            if not 0 < time_us < LARGEST_MEASURE:
                return Evaluation("failed", reason=f"measured {time_us} µs")
            return Evaluation("passed", time_us)
        except RuntimeError as error:
            if out_of_memory_reason(error):
                raise
            return Evaluation("failed", reason=first_line(error))

    def time_interleaved(self, task: Task, configs: Sequence[Config]) -> list[Samples | None]:
        """Time correct configs interleaved and return (rounds,) microseconds for each; None for a config without memory.

        The rounds end when the intervals of the ratios to the first config are narrow.
        """
        self.prepare(task)
        # every other config is compared with the first config, so a failure of the first config fails the request
        contenders = {"0": self._contender(task, configs[0])}
        for i, config in enumerate(configs[1:], start=1):
            with suppress(SkippedError):
                contenders[str(i)] = within_memory(partial(self._contender, task, config))
        samples = interleave(contenders, max_rounds=40)
        return [samples.get(str(i)) for i in range(len(configs))]

    def compare(self, runs: Sequence[Run], ceiling: Run | None, untimed: Mapping[str, Outcome]) -> Compared:
        """Check and time variants of a case, see `measuring.compare.time_runs`."""
        self.close()
        self._launchable.result()
        return time_runs(runs, ceiling, untimed)

    def close(self) -> None:
        """Free the memory of inputs and reference."""
        self._task, self._checker, self._inputs = None, None, []
        torch.cuda.empty_cache()

    def _contender(self, task: Task, config: Config, **options: Any) -> Contender:
        return contender(task.variant, config, self._inputs, POLICIES[task.policy], **options)


def open_driver() -> None:
    """Open a context on the GPU and Triton's driver, which compiles and loads a C module, before the first launch."""
    from triton.runtime.driver import driver

    torch.cuda.synchronize()
    driver.active.get_current_device()
    hash_triton_sources()


class GpuWorker(Worker):
    """Send requests to a process that holds a `GpuBench`. Use as a context manager.

    The evaluation of a config that hangs, faults or crashes the process has the status `crashed`. The next request starts a
    process with a clean context, which makes inputs and reference again.
    """

    def __init__(self, make: Callable[[], Any] = GpuBench, config_timeout_s: float = CONFIG_TIMEOUT_S) -> None:
        """Start no process yet; make: importable function that makes the object that answers."""
        super().__init__(make, "the GPU worker", quiet=("measure",), problem=broken_context, exit_grace_s=_EXIT_GRACE_S)
        self.config_timeout_s, self.variant_timeout_s = config_timeout_s, VARIANT_TIMEOUT_S

    def prepare(self, task: Task) -> None:
        """Make inputs and reference of a task."""
        self.ask("prepare", task, timeout_s=FINAL_TIMEOUT_S)

    def check(self, task: Task, config: Config) -> Outcome:
        """Call `GpuBench.check` in the process; the outcome is `failed` if the process crashes."""
        try:
            return cast(Outcome, self.ask("check", task, config, timeout_s=self.config_timeout_s))
        except WorkerCrashedError as error:
            return Outcome("failed", f"crashed: {error}")

    def measure(self, task: Task, config: Config, best_us: float | None) -> Evaluation:
        """Call `GpuBench.measure` in the process; the evaluation is `crashed` if the process crashes."""
        self.prepare(task)
        try:
            return cast(Evaluation, self.ask("measure", task, config, best_us, timeout_s=self.config_timeout_s))
        except WorkerCrashedError as error:
            return Evaluation("crashed", reason=str(error))

    def time_interleaved(self, task: Task, configs: Sequence[Config]) -> Sequence[Samples | None]:
        """Call `GpuBench.time_interleaved` in the process."""
        self.prepare(task)
        return cast(Sequence[Samples | None], self.ask("time_interleaved", task, configs, timeout_s=FINAL_TIMEOUT_S))

    def compare(self, runs: Sequence[Run], ceiling: Run | None, untimed: Mapping[str, Outcome]) -> Compared:
        """Call `GpuBench.compare` in the process."""
        return cast(Compared, self.ask("compare", runs, ceiling, untimed, timeout_s=self.variant_timeout_s))

    def close(self) -> None:
        """Free the tensors of the process."""
        if self.state is State.IDLE:
            with suppress(WorkerCrashedError, WorkerStoppedError):
                self.ask("close", timeout_s=self.config_timeout_s)


def split_cores() -> tuple[frozenset[int] | None, frozenset[int] | None]:
    """Return a core for the GPU worker and the other cores for the compilers; (None, None) if there is a single core."""
    cores = sorted(os.sched_getaffinity(0))
    return (frozenset(cores[-1:]), frozenset(cores[:-1])) if len(cores) > 1 else (None, None)


def compare_in_worker(worker: GpuWorker | GpuBench, family: str, runs: Sequence[Run], ceiling: Run | None) -> list[Record]:
    """Compare variants of a case and return a record for each.

    A variant that crashes or hangs the worker fails, and a new process measures the other variants. All variants fail if several
    may be the cause of a crash. If the ceiling crashes, the records have no ceiling.
    """
    untimed: dict[str, Outcome] = {}
    while any(task.variant.name not in untimed for task, _ in runs):
        try:
            return compared_records(family, runs, ceiling, worker.compare(runs, ceiling, untimed))
        except WorkerCrashedError as error:
            if error.last_note == CEILING:
                ceiling = None
            else:
                blamed = [error.last_note] if error.last_note else [task.variant.name for task, _ in runs]
                untimed = dict.fromkeys(blamed, Outcome("failed", f"crashed: {error}")) | untimed
    return compared_records(family, runs, None, Compared({}, untimed))
