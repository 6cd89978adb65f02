"""Check, time and compare configs on a GPU, in a process that may crash: the GPU worker.

Of a command's processes only the GPU worker launches kernels on a GPU. The worker decides nothing and stores nothing.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, cast

import numpy as np
import torch

from kerneltune.errors import first_line
from kerneltune.measuring.check import CaseError, Checker, InPlace, Outcome, affordable, broken_context, out_of_memory_reason
from kerneltune.measuring.compare import CEILING, Compared, compared_records, contender, input_sets, time_runs
from kerneltune.measuring.compiler import know_triton
from kerneltune.measuring.rounds import POLICIES, Contender, interleave
from kerneltune.processes import end, start
from kerneltune.records import Record
from kerneltune.search.task import Evaluation, Run, Task
from kerneltune.spec import MOST, Config
from kerneltune.stats import Samples

TRIED_WHOLE = 20
"""Largest number of configs of a space that are all measured, even if they spill: so small a space is a published list."""
SCREEN_SAMPLES = 5
_SCREEN_US = 250.0
_REJECTED_AT = 1.3
"""Factor over the best time so far at which a config gets no sample after its first."""
CONFIG_TIMEOUT_S = 60.0
FINAL_TIMEOUT_S = 300.0
VARIANT_TIMEOUT_S = 900.0
"""Seconds for each variant of a comparison, including compilation."""
_EXIT_GRACE_S = 0.2
_ENDED_FROM_OUTSIDE = (-signal.SIGTERM, 255)
"""Exit codes after SIGTERM, which `timeout` sends to all processes: 255 if the server of processes got the signal, too."""


class GpuBench:
    """Check and time configs on the GPU of this process.

    Inputs and reference of a case stay in memory until a request for another case, or `close`.

    Attributes:
        on_variant: function that `compare` calls with the name of each variant before it launches the variant alone, and with an
            empty name before it launches all variants.
    """

    def __init__(self) -> None:
        """Begin to open a context on the GPU and Triton's driver; the first launch waits for both."""
        self.on_variant: Callable[[str], None] = lambda _name: None
        self._task: Task | None = None
        self._checker: Checker | None = None
        self._inputs: list[Any] = []
        self._in_place = InPlace()
        beside = ThreadPoolExecutor(1)
        self._launchable = beside.submit(open_driver)
        beside.shutdown(wait=False)

    def _open(self, task: Task) -> Checker:
        """Free inputs and reference of another case, and return the checker of this case."""
        before, self._task = self._task, task
        if before is None or (before.op.name, before.case) != (task.op.name, task.case):
            self._checker = None
        if before is None or before.key != task.key:
            self._inputs = []
        self._launchable.result()
        if self._checker is None:
            self._checker = Checker(task.op, task.case, "cuda", in_place=self._in_place)
        return self._checker

    def prepare(self, task: Task) -> None:
        """Make inputs and reference of a task.

        Raises:
            MemoryError: the sets of inputs do not fit the memory, or no call would be cold.
        """
        self._open(task)
        if not self._inputs:
            made = input_sets(task)
            if isinstance(made, Outcome):
                raise MemoryError(made.reason)
            self._inputs = made

    def check(self, task: Task, config: Config) -> Outcome:
        """Return the outcome of a config."""
        try:
            return affordable(lambda: self._open(task).check(task.variant, config))
        except CaseError as error:
            return Outcome("failed", str(error))

    def measure(self, task: Task, config: Config, best_us: float | None, samples: int = SCREEN_SAMPLES) -> Evaluation:
        """Check a config and return the median of its samples; a config far behind `best_us` gets a single sample."""
        self.prepare(task)
        checked = self.check(task, config)
        if checked.status != "checked":
            return Evaluation(checked.status, reason=checked.reason)
        timed = affordable(lambda: self._timed(task, config, best_us, samples))
        return Evaluation("skipped", reason=timed.reason) if isinstance(timed, Outcome) else timed

    def _timed(self, task: Task, config: Config, best_us: float | None, samples: int) -> Evaluation:
        try:
            screened = self._contender(task, config, sample_us=_SCREEN_US)
            times = [screened.sample_us()]
            while len(times) < samples and not (best_us and times[0] > _REJECTED_AT * best_us):
                times.append(screened.sample_us())
            time_us = float(np.median(times))
            return Evaluation("passed", time_us) if 0 < time_us < MOST else Evaluation("failed", reason=f"measured {time_us} µs")
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
            beside = affordable(partial(self._contender, task, config))
            if not isinstance(beside, Outcome):
                contenders[str(i)] = beside
        samples = interleave(contenders, min_rounds=15, max_rounds=40)
        return [samples.get(str(i)) for i in range(len(configs))]

    def compare(self, runs: Sequence[Run], ceiling: Run | None, untimed: Mapping[str, Outcome]) -> Compared:
        """Check and time variants of a case, see `measuring.compare.time_runs`."""
        self.close()
        self._launchable.result()
        return time_runs(runs, ceiling, untimed, self.on_variant)

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
    know_triton()


class WorkerCrashedError(Exception):
    """Report that the GPU worker crashed, was killed or was stopped; the message says how.

    Attributes:
        variant: variant that `compare` had launched alone; empty where several variants may be the cause.
    """

    def __init__(self, reason: str = "", variant: str = "") -> None:
        super().__init__(reason)
        self.variant = variant


class WorkerStoppedError(WorkerCrashedError):
    """Report that this process, or a signal from outside, ended the GPU worker."""


class GpuWorker:
    """Send requests to a process that holds a `GpuBench`. Use as a context manager.

    The evaluation of a config that hangs, faults or crashes the process has the status `crashed`. The next request starts a
    process with a clean context, which makes inputs and reference again. One thread sends requests. Another thread may call
    `stop`, or leave the context. A request raises WorkerCrashedError if the process crashes over it, or if the worker is stopped.

    Attributes:
        process: the present process; None before the first request and after a crash.
        is_closed: whether the worker was stopped for good.
        started: number of processes so far.
    """

    def __init__(
        self,
        make: Callable[[], Any] = GpuBench,
        cores: frozenset[int] | None = None,
        config_timeout_s: float = CONFIG_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
        has_children: bool = False,
    ) -> None:
        """Start no process yet.

        Args:
            make: importable function that makes the object that answers, a `GpuBench` for the methods of this class.
            cores: cores of the process; None for all.
            config_timeout_s: seconds after which a check or a measurement of a config is given up.
            environment: `os.environ` of the process; None for the environment of this process.
            has_children: the process may start processes.
        """
        self._start = partial(start, _serve, make, cores, environment=environment, is_daemon=not has_children)
        self.config_timeout_s, self.variant_timeout_s = config_timeout_s, VARIANT_TIMEOUT_S
        self.process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._holds_tensors = False
        self._lock = Lock()
        self.is_asking = False
        self.is_closed = False
        self.started = 0

    def __enter__(self) -> "GpuWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process, even while another thread waits for its answer; no request starts another process."""
        self.is_closed = True
        self.end(asked_here=False)

    def begin(self) -> None:
        """Start a process, which opens the GPU while this process does other work."""
        with self._lock:
            self._connect()

    def _connect(self) -> Connection:
        """Return the pipe to the process, which is started if there is none."""
        if self.is_closed:
            raise WorkerStoppedError("the GPU worker was stopped")
        if self.process is None or self._pipe is None:
            self.process, self._pipe = self._start()
            self.started += 1
        return self._pipe

    def prepare(self, task: Task) -> None:
        """Make inputs and reference of a task."""
        self.ask("prepare", task, timeout_s=FINAL_TIMEOUT_S)

    def check(self, task: Task, config: Config) -> Outcome:
        """Call `GpuBench.check` in the process; the outcome is `failed` if the process crashes."""
        try:
            return cast(Outcome, self.ask("check", task, config, timeout_s=self.config_timeout_s))
        except WorkerCrashedError as error:
            return Outcome("failed", f"crashed: {error}")

    def measure(self, task: Task, config: Config, best_us: float | None, samples: int = SCREEN_SAMPLES) -> Evaluation:
        """Call `GpuBench.measure` in the process; a process that ends without a signal from outside has crashed."""
        self.prepare(task)
        try:
            return cast(Evaluation, self.ask("measure", task, config, best_us, samples, timeout_s=self.config_timeout_s))
        except WorkerStoppedError:
            raise
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
        if self._holds_tensors:
            with suppress(WorkerCrashedError):
                self.ask("close", timeout_s=self.config_timeout_s)
            self._holds_tensors = False

    def ask(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the object in the process; after `timeout_s` seconds the process is ended."""
        with self._lock:
            pipe, self.is_asking, self._holds_tensors = self._connect(), True, True
        variant = ""
        try:
            pipe.send((name, arguments))
            while True:
                if not pipe.poll(timeout_s):
                    self.end()
                    raise WorkerCrashedError(f"took longer than {timeout_s:g} s", variant)
                said = pipe.recv()
                if isinstance(said, tuple):
                    break
                variant = said
        except (EOFError, OSError) as error:
            code = self.end()
            error_type = WorkerStoppedError if self.is_closed or code in _ENDED_FROM_OUTSIDE else WorkerCrashedError
            reason = "was stopped" if self.is_closed else f"died: exit code {code}"
            raise error_type(f"the GPU worker {reason}", variant) from error
        finally:
            self.is_asking = False
        answer, problem = said
        if problem:
            self.end()
            raise WorkerCrashedError(problem, variant)
        return answer

    def end(self, asked_here: bool = True) -> int | None:
        """End the process, by force if necessary, and return its exit code; None where another thread ends it.

        The next request starts another process. If `asked_here` is false, another thread may wait for an answer, so the pipe
        stays open until that thread finds its end.
        """
        with self._lock:
            process, pipe, in_use = self.process, self._pipe, self.is_asking and not asked_here
            self.process, self._pipe, self._holds_tensors = None, None, False
        if process is None or pipe is None:
            return None
        if not in_use:
            pipe.close()
        return end(process, 0.0 if in_use else _EXIT_GRACE_S)


def _serve(pipe: Connection, make: Callable[[], GpuBench], cores: frozenset[int] | None) -> None:
    """Answer requests in the worker's process until its GPU context breaks or the parent closes the pipe.

    The process keeps to its cores after it has opened the GPU's and Triton's drivers, because opening may use any core.
    """
    bench: Any = make()
    bench.on_variant = pipe.send
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        if cores and name != "prepare":
            os.sched_setaffinity(0, cores)
        try:
            answer, problem = getattr(bench, name)(*arguments), ""
        except Exception as error:  # also missing memory for the inputs: the next config finds a clean process
            answer, problem = None, first_line(error)
        problem = problem or broken_context()
        pipe.send((answer, problem))
        if problem:
            return


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
            if error.variant == CEILING:
                ceiling = None
            else:
                blamed = [error.variant] if error.variant else [task.variant.name for task, _ in runs]
                untimed = dict.fromkeys(blamed, Outcome("failed", f"crashed: {error}")) | untimed
    return compared_records(family, runs, None, Compared({}, untimed))
