"""Compile a variant's kernels ahead of time, on the CPU, in a pool of processes.

A process calls the variant's function on meta tensors under a driver that compiles and never launches. So a later launch finds
its kernels in Triton's disk cache.
"""

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
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
from kerneltune.task import Run, Task, knobs_of

COMPILE_TIMEOUT_S = 90.0
_RUNS_PER_WORKER = 4
"""Fewest runs for which a further worker pays: it starts in the time of some compilations."""
_REFUSAL = re.compile("(CompilationError|UnsupportedLanguageConstruct|CompileTimeAssertionFailure|OutOfResources|NameError):")
"""Errors of Triton's compiler. Any other error may be of host code that needs values, which meta tensors lack."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Hold the result of a compilation: the kernels that a run launches, or the error.

    Attributes:
        crashed: whether the process crashed or hung, or the machine lacked memory or disk; the error says which.
        unknown: whether host code reads values, which a compilation lacks: only a launch tells whether the config runs.
    """

    kernels: tuple[Kernel, ...]
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
    """Hold processes that compile runs for a target, each with a config if its variant has knobs. Use as a context manager.

    If a process dies over a run, it may have been killed for its memory: a new process compiles the run again. A second death or
    a hang is the run's result. After SIGTERM to a process its run raises WorkerStoppedError, as a request of the GPU worker does.
    A compilation that has not begun can be cancelled.
    """

    def __init__(self, target: Target, workers: int | None = None, cores: frozenset[int] | None = None) -> None:
        """Start no process yet.

        Args:
            target: target of all compilations.
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

    def submit(self, run: Run, timeout_s: float = COMPILE_TIMEOUT_S) -> "Future[CompileResult]":
        """Begin to compile a run."""
        return self._threads.submit(self._compile, run, timeout_s)

    def compile(self, runs: Sequence[Run], timeout_s: float = COMPILE_TIMEOUT_S) -> Iterator[CompileResult]:
        """Compile all runs, and yield their results in the order of the runs."""
        pending = [self.submit(run, timeout_s) for run in runs]
        yield from (compilation.result() for compilation in pending)

    def _compile(self, run: Run, timeout_s: float) -> CompileResult:
        compiler, has_died = self._idle.get(), False
        try:
            while True:
                try:
                    names = pickle.dumps(run.task)  # by which the compilation imports the operator, and fails alone if it cannot
                    compiled: CompileResult = compiler.ask("compile", names, knobs_of(run.config), timeout_s=timeout_s)
                    return compiled
                except WorkerHungError as error:
                    return CompileResult((), f"compiling {error}", crashed=True)
                except WorkerCrashedError as error:
                    if has_died:
                        return CompileResult((), f"{error}, twice", crashed=True)
                    has_died = True
        finally:
            self._idle.put(compiler)


def refusals(runs: Sequence[Run], workers: int | None) -> dict[int, str]:
    """Return by number of a run why Triton's compiler refuses its kernels on every target: it refuses code that is no Triton."""
    reasons = dict.fromkeys(range(len(runs)), "")
    for name, target in TARGETS.items():
        if reasons:
            with CompilePool(target, min(workers or 2, -(-len(reasons) // _RUNS_PER_WORKER))) as pool:
                results = list(pool.compile([runs[number] for number in reasons]))
            refused = {n: it.error for n, it in zip(reasons, results, strict=True) if _REFUSAL.search(it.error)}
            reasons = {n: reasons[n] or f"does not compile for {name}: {error}" for n, error in refused.items()}
    return reasons


def hash_triton_sources() -> None:
    """Make Triton hash its own files now, which takes 0.3 s and otherwise delays the first kernel of a process."""
    with suppress(ImportError):  # a Triton with `triton_key` elsewhere hashes at the first kernel
        from triton.runtime.cache import triton_key

        triton_key()


class Compiler:
    """Compile runs for a target in this process."""

    def __init__(self, target: Target, cores: frozenset[int] | None) -> None:
        """Let Triton compile for the target, on some cores; None for all."""
        if cores:
            os.sched_setaffinity(0, cores)
        os.environ.pop("TRITON_INTERPRET", None)
        self._launched, self._importing = activate(target), ExitStack()
        self._importing.enter_context(without_gpu())
        hash_triton_sources()

    def compile(self, names: bytes, knobs: Mapping[str, Any]) -> CompileResult:
        """Return the kernels that a pickled task launches with a config of these knobs, none for a variant without knobs."""
        launched, line_of, is_of_machine, unknown = self._launched, line_of_inputs, False, False
        launched.clear()
        try:
            task: Task = pickle.loads(names)
            inputs, kind = task.op.inputs(task.case, device="meta"), task.variant.config
            line_of = first_line
            with host_on("meta"):
                task.variant.run(inputs, None if kind is None else kind(**knobs))
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
        return CompileResult(tuple(launched), error, is_of_machine, unknown)
