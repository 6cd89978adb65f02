"""Compile a variant's kernels ahead of time, on the CPU, in a pool of processes.

A process calls the variant's function on meta tensors under a driver that compiles and never launches. So a later launch finds
its kernels in Triton's disk cache.
"""

import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from kerneltune.compat import failing_line, innermost_error
from kerneltune.errors import first_line, line_of_inputs, reads_values, statement_in
from kerneltune.interpreter.modes import host_on, without_gpu
from kerneltune.measuring.assembly import TARGETS, Kernel, Target
from kerneltune.measuring.dry_driver import activate
from kerneltune.processes.worker import Worker, WorkerCrashedError, WorkerHungError
from kerneltune.spec import Config, Inputs
from kerneltune.task import Task

COMPILE_TIMEOUT_S = 90.0
_JOBS_PER_WORKER = 4
"""Fewest jobs for which a further worker pays: it starts in the time of some compilations."""
_REFUSAL = re.compile("(CompilationError|UnsupportedLanguageConstruct|CompileTimeAssertionFailure|OutOfResources|NameError):")
"""Errors of Triton's compiler. Any other error may be of host code that needs values, which meta tensors lack."""
_NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
"""Errors of pickling a job whose functions are no functions of a module."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Compile `run(make_inputs(device="meta"), config)`. Both functions must be importable, so that workers can unpickle them."""

    make_inputs: Callable[..., Inputs]
    run: Callable[[Inputs, Any], Any]
    config: Any


def compile_job(task: Task, config: Config) -> CompileJob:
    """Make the job that compiles a config of a task."""
    return CompileJob(partial(task.op.inputs, task.case), task.variant.run, config)


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Hold the result of a compilation: the kernels that a job launches, or the error.

    Attributes:
        crashed: whether the process crashed or hung, or the machine lacked memory or disk; the error says which.
        unknown: whether host code reads values, which a compilation lacks: only a launch tells whether the config runs.
    """

    kernels: tuple[Kernel, ...]
    seconds: float
    error: str = ""
    crashed: bool = False
    unknown: bool = False

    @property
    def spill_bytes(self) -> int:
        """Return the largest spill of the kernels, in bytes per thread."""
        return max((k.spill_bytes for k in self.kernels), default=0)

    @property
    def program_registers(self) -> int:
        """Return registers of all threads of the largest program: the tie-breaker between equally fast configs."""
        return max((k.registers * k.warps for k in self.kernels), default=0)


class CompilePool:
    """Hold processes that compile jobs for a target. Use as a context manager.

    If a process dies over a job, it may have been killed for its memory: a new process compiles the job again. A second death or
    a hang is the job's result. After SIGTERM to a process its job raises WorkerStoppedError, as a request of the GPU worker does.
    A job that has not begun can be cancelled.
    """

    def __init__(self, target: Target, workers: int | None = None, cores: frozenset[int] | None = None) -> None:
        """Start no process yet.

        Args:
            target: target of all jobs.
            workers: number of processes; None for a process per core.
            cores: cores that the processes may use; None for all.
        """
        self.workers = workers or len(cores or os.sched_getaffinity(0))
        self._compilers = [
            Worker(partial(Compiler, target, cores), "the compiler", quiet=("compile",)) for _ in range(self.workers)
        ]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._threads = ThreadPoolExecutor(self.workers)
        for compiler in self._compilers:
            self._idle.put(compiler)

    def __enter__(self) -> "CompilePool":
        """Start the processes."""
        try:
            for compiler in self._compilers:
                compiler.begin()
        except BaseException:  # an interrupt, most likely
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:  # after an interrupt as well, the other processes end, and the threads with them
            ending.callback(self._threads.shutdown, cancel_futures=True)
            for compiler in self._compilers:
                ending.callback(compiler.stop)

    def submit(self, job: CompileJob, timeout_s: float = COMPILE_TIMEOUT_S) -> "Future[CompileResult]":
        """Begin to compile a job."""
        return self._threads.submit(self._compile, job, timeout_s)

    def compile(self, jobs: Sequence[CompileJob], timeout_s: float = COMPILE_TIMEOUT_S) -> Iterator[CompileResult]:
        """Compile all jobs, and yield their results in the order of the jobs."""
        pending = [self.submit(job, timeout_s) for job in jobs]
        yield from (job.result() for job in pending)

    def _compile(self, job: CompileJob, timeout_s: float) -> CompileResult:
        compiler, has_died = self._idle.get(), False
        try:
            while True:
                try:
                    compiled: CompileResult = compiler.ask("compile", job, timeout_s=timeout_s)
                    return compiled
                except _NOT_PICKLABLE as error:
                    return CompileResult((), 0.0, f"inputs or run: expected functions of a module: {first_line(error)}")
                except WorkerHungError as error:
                    return CompileResult((), timeout_s, f"compiling {error}", crashed=True)
                except WorkerCrashedError as error:
                    if has_died:
                        return CompileResult((), 0.0, f"{error}, twice", crashed=True)
                    has_died = True
        finally:
            self._idle.put(compiler)


def refusals(jobs: Sequence[CompileJob], workers: int | None) -> dict[int, str]:
    """Return by number of a job why Triton's compiler refuses its kernels on every target, as it refuses code that is no Triton.

    Jobs that no other process can import are left out.
    """
    reasons: dict[int, str] = {}
    numbers = [number for number, job in enumerate(jobs) if is_picklable(job)]
    for name, target in TARGETS.items():
        if not numbers:
            break
        with CompilePool(target, min(workers or 2, -(-len(numbers) // _JOBS_PER_WORKER))) as pool:
            errors = [result.error for result in pool.compile([jobs[number] for number in numbers])]
        refused = {number: error for number, error in zip(numbers, errors, strict=True) if _REFUSAL.search(error)}
        reasons = {number: reasons.get(number, f"does not compile for {name}: {error}") for number, error in refused.items()}
        numbers = list(refused)
    return reasons


def is_picklable(job: CompileJob) -> bool:
    """Return whether another process can import the functions of a job; it cannot import a lambda."""
    try:
        pickle.dumps(job)
    except _NOT_PICKLABLE:
        return False
    return True


def hash_triton_sources() -> None:
    """Make Triton hash its own files now, which takes 0.3 s and otherwise delays the first kernel of a process."""
    with suppress(ImportError):  # a Triton with `triton_key` elsewhere hashes at the first kernel
        from triton.runtime.cache import triton_key

        triton_key()


class Compiler:
    """Compile jobs for a target in this process."""

    def __init__(self, target: Target, cores: frozenset[int] | None) -> None:
        """Let Triton compile for the target, on some cores; None for all."""
        if cores:
            os.sched_setaffinity(0, cores)
        os.environ.pop("TRITON_INTERPRET", None)
        self._launched, self._importing = activate(target), ExitStack()
        self._importing.enter_context(without_gpu())
        hash_triton_sources()

    def compile(self, job: CompileJob) -> CompileResult:
        """Return the kernels that a job launches."""
        launched, line_of, is_of_machine, unknown = self._launched, line_of_inputs, False, False
        launched.clear()
        started = time.perf_counter()
        try:
            inputs = job.make_inputs(device="meta")
            line_of = first_line
            with host_on("meta"):
                job.run(inputs, job.config)
        except Exception as raised:  # any other error of a compiler is a property of the config, and is recorded
            exception = innermost_error(raised)
            is_of_triton = type(exception).__module__.startswith("triton.")
            place = failing_line(raised) or ("" if is_of_triton else statement_in("", exception))
            unknown = line_of is first_line and reads_values(exception)
            why = "host code reads values, which a compilation lacks: " if unknown else ""
            error, is_of_machine = f"{place}{why}{line_of(exception)}", isinstance(exception, OSError | MemoryError)
        else:
            wrong = "wrong code: ptxas stores the stack pointer in {} places where numbers belong"
            error = next((f"{one.name}: {wrong.format(one.stray_stores)}" for one in launched if one.stray_stores), "")
        return CompileResult(tuple(launched), time.perf_counter() - started, error, is_of_machine, unknown)
