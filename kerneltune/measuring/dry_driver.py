"""Stand in for Triton's driver in a process that compiles: build kernels for a target without its GPU, and launch nothing."""

import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kerneltune.interpreter.gpu_calls import Driver
from kerneltune.measuring import assembly
from kerneltune.measuring.assembly import MAX_THREADS, Kernel, Target
from kerneltune.processes.programs import run_to_end

_STORES = {0x386, 0x986, 0x388, 0x988, 0x387, 0x987, 0x385, 0x985, 0x844}
"""The lowest twelve bits of the store instructions of sm_90 and sm_100: STG, STS, STL and ST without and with a uniform base, and
STSM, as cuobjdump names them. Bits 32 to 39 are the stored register, or the first of several stored registers."""
_STACK_POINTER = 1


def activate(target: Target) -> list[Kernel]:
    """Let Triton compile for a target in this process; return the list to which each launch adds its kernel."""
    from triton import knobs
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver

    dry_driver = _DryDriver(target)
    driver.set_active(dry_driver)
    knobs.runtime.add_stages_inspection_hook = partial(_refuse_early, target)
    # an autotuner takes its first config, as nothing is timed, and keeps no times on disk, where a later launch would read them
    Autotuner.do_bench = lambda *_args, **_named: 0.0
    Autotuner.check_disk_cache = lambda _self, _key, _configs, time_all: bool(time_all())
    return dry_driver.launched


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


class _DryDriver(Driver):
    """Stand for the driver of a target: compile without its GPU, and launch nothing.

    Attributes:
        launched: the kernels that were to be launched.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.launched: list[Kernel] = []
        self._loading = SimpleNamespace()

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.warp_size)

    def get_device_properties(self, _device: int = 0) -> dict[str, int]:
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
