"""Compile a variant's kernels ahead of time, on the CPU, in a pool of processes.

A process calls the variant's function on meta tensors under a driver that compiles and never launches. So a later launch finds
its kernels in Triton's disk cache.
"""

import os
import pickle
import re
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from kerneltune.compat import failing_line
from kerneltune.errors import first_line, line_of_inputs, statement_in
from kerneltune.measuring import assembly
from kerneltune.measuring.assembly import MAX_THREADS, TARGETS, Kernel, Target
from kerneltune.processes.programs import run_to_end
from kerneltune.processes.worker import Worker, WorkerCrashedError, WorkerHungError
from kerneltune.spec import Config, Inputs
from kerneltune.task import Task

COMPILE_TIMEOUT_S = 90.0
_FOR_A_WORKER = 4
"""Fewest jobs for which a further worker pays: it starts in the time of some compilations."""
_REFUSAL = re.compile("(CompilationError|UnsupportedLanguageConstruct|CompileTimeAssertionFailure|OutOfResources|NameError):")
"""Errors of Triton's compiler. Any other error may be of host code that needs values, which meta tensors lack."""
_NOT_PICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
"""Errors of pickling a job whose functions are no functions of a module."""
_STORES = {0x386, 0x986, 0x388, 0x988, 0x387, 0x987, 0x385, 0x985, 0x844}
"""The lowest twelve bits of the store instructions of sm_90 and sm_100: STG, STS, STL and ST without and with a uniform base, and
STSM, as cuobjdump names them. Bits 32 to 39 are the stored register, or the first of several stored registers."""
_STACK_POINTER = 1


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
    """

    kernels: tuple[Kernel, ...]
    seconds: float
    error: str = ""
    crashed: bool = False

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
        self._compilers = [Worker(partial(Compiler, target, cores), "the compiler") for _ in range(self.workers)]
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
        for job in pending:
            yield job.result()

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


def refusals(jobs: Sequence[CompileJob], workers: int | None = None) -> dict[int, str]:
    """Return by number of a job why Triton's compiler refuses its kernels on every target, as it refuses code that is no Triton.

    Jobs that no other process can import are left out.
    """
    reasons: dict[int, str] = {}
    numbers = [number for number, job in enumerate(jobs) if is_picklable(job)]
    for name, target in TARGETS.items():
        if not numbers:
            break
        with CompilePool(target, min(workers or 2, -(-len(numbers) // _FOR_A_WORKER))) as pool:
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


def know_triton() -> None:
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
        from triton import knobs
        from triton.runtime.driver import driver

        self._driver = _DryDriver(target)
        driver.set_active(self._driver)
        knobs.runtime.add_stages_inspection_hook = partial(_refuse_early, target)
        know_triton()

    def compile(self, job: CompileJob) -> CompileResult:
        """Return the kernels that a job launches."""
        launched, line_of, is_of_machine = self._driver.launched, line_of_inputs, False
        launched.clear()
        started = time.perf_counter()
        try:
            inputs = job.make_inputs(device="meta")
            line_of = first_line
            job.run(inputs, job.config)
        except Exception as exception:  # any other error of a compiler is a property of the config, and is recorded
            is_of_triton = type(exception).__module__.startswith("triton.")
            place = failing_line(exception) or ("" if is_of_triton else statement_in("", exception))
            error, is_of_machine = f"{place}{line_of(exception)}", isinstance(exception, OSError | MemoryError)
        else:
            wrong = "wrong code: ptxas stores the stack pointer in {} places where numbers belong"
            error = next((f"{one.name}: {wrong.format(one.stray_stores)}" for one in launched if one.stray_stores), "")
        return CompileResult(tuple(launched), time.perf_counter() - started, error, is_of_machine)


def _refuse_early(
    target: Target, _backend: Any = None, stages: Any = None, options: Any = None, *_others: Any
) -> tuple[str, str] | None:
    """Stop compilations that cannot be launched, as Triton's hook into the stages of a compilation.

    Without arguments, the hook adds nothing to the key of the disk cache, because a compilation that it stops is not kept.
    """
    from triton.runtime.errors import OutOfResources

    if stages is None:
        return "", ""
    threads = options.num_warps * target.warp_size
    if threads > MAX_THREADS:
        raise OutOfResources(threads, MAX_THREADS, "threads")
    to_llir = stages["llir"]

    def checked(source: Any, metadata: Any) -> Any:
        llir = to_llir(source, metadata)
        if metadata["shared"] > target.program_bytes:
            raise OutOfResources(metadata["shared"], target.program_bytes, "shared memory")
        return llir

    stages["llir"] = checked
    return None


class _DryDriver:
    """Stand for a Triton driver, and for its `utils`: compile for a target without its GPU, and launch nothing.

    Attributes:
        launched: the kernels that were to be launched.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.utils = target, self
        self.launched: list[Kernel] = []
        self._loading = SimpleNamespace()

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.warp_size)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing can be timed while compiling")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": self.target.program_bytes, "multiprocessor_count": 132, "warpSize": self.target.warp_size}

    def launcher_cls(self, _source: Any, metadata: Any) -> Callable[..., None]:
        """Return the launcher of a kernel, which Triton loads next."""
        loading = self._loading = SimpleNamespace(metadata=metadata, kernel=None)
        return lambda *_args: self.launched.append(loading.kernel)

    def load_binary(self, _name: str, binary: bytes, _shared: int, _device: int) -> tuple[int, int, int, int, int]:
        kernel = self._loading.kernel = self._kernel(self._loading.metadata, binary)
        return 0, 0, kernel.registers, kernel.spill_bytes, MAX_THREADS

    def _kernel(self, metadata: Any, binary: bytes) -> Kernel:
        if self.target.backend == "cuda":
            ptx, stray_stores = _assembly(metadata, "ptx"), _stray_stores(binary)
            usage, accesses = assembly.sass_usage(_resource_report(binary)), assembly.ptx_accesses(ptx)
        else:
            amdgcn, stray_stores = _assembly(metadata, "amdgcn"), 0
            usage, accesses = assembly.gcn_usage(amdgcn), assembly.gcn_accesses(amdgcn)
        return Kernel(
            metadata.name, metadata.num_warps, usage.registers, usage.spill_bytes, metadata.shared, usage.scalar_registers,
            accesses, bool(metadata.launch_cooperative_grid), stray_stores,
        )  # fmt: skip


def _assembly(metadata: Any, kind: str) -> str:
    """Read the assembly that Triton keeps beside a kernel's binary."""
    from triton.runtime.cache import get_cache_manager

    path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.{kind}")
    return Path(path).read_text(encoding="utf-8") if path else ""


def _stray_stores(cubin: bytes) -> int:
    """Count the instructions that store the stack pointer, see `Kernel`."""
    words = (word for section in _code(cubin) for (word, _) in struct.iter_unpack("<QQ", section[: len(section) // 16 * 16]))
    return sum(word & 0xFFF in _STORES and word >> 32 & 0xFF == _STACK_POINTER for word in words)


def _code(cubin: bytes) -> Iterator[bytes]:
    """Yield the sections of a 64-bit ELF file that hold instructions."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for header in range(table, table + size * count, size):
        _name, _kind, flags, _address, offset, length = struct.unpack_from("<IIQQQQ", cubin, header)
        if flags & 0x4:  # executable
            yield cubin[offset : offset + length]


def _resource_report(cubin: bytes) -> str:
    """Return the report of registers and stack that the cuobjdump in Triton's package prints for a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return str(run_to_end([str(tool), "-res-usage", file.name], must_succeed=True, text=True).stdout)
