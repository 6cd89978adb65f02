"""Read registers, spills and the width of every access to global memory from assembly, and the programs that an SM holds.

The functions are pure. Their inputs are PTX, amdgcn, the resource report of cuobjdump, and targets. The
module knows neither the grid nor the resources that the driver reserves.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kerneltune.rounding import cdiv

_PTX = re.compile(
    r"^\s*(?:@!?%\w+ )?(?:(ld|st)((?:\.[\w:]+)*\.global(?:\.[\w:]+)*) |cp\.async\.c[ag]\.[^;]*?\], (\w+))", re.MULTILINE
)
_PTX_TYPE = re.compile(r"(?:\.v(\d))?\.[busf](\d+)$")
_GCN = re.compile(r"^\s+(?:global|buffer|flat)_(load|store)_(\w+)", re.MULTILINE)
_GCN_BITS = re.compile(r"(?:lds_)?(?:(dword)(?:x(\d))?|b(\d+)|([us]?byte|[ui]8)|(u?short|short|[ui]16))")
_DEFAULT_BITS = 32
_PARTITIONS = 4
"""Schedulers (SIMDs) of an SM, on every target, over which the warps of a program are distributed."""
_LANE_REGISTERS, _REGISTER_UNIT = 512, 8
"""Registers per lane in a partition, on every target; a warp takes them in units."""
MAX_THREADS = 1024
"""Threads of the largest program, on every target."""


@dataclass(frozen=True, slots=True)
class Access:
    """Count the instructions that access global memory with the same kind and width.

    Attributes:
        kind: `load` or `store`; a copy from global to shared memory is a load. Atomics and bulk (TMA) copies are not counted.
        bits: width of an access: bits that a thread moves per instruction.
        count: instructions in the code, however often they run.
    """

    kind: str
    bits: int
    count: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """Hold the resources of a compiled kernel.

    Attributes:
        registers, spill_bytes: registers and spilled bytes per thread.
        scalar_registers: scalar registers per warp, on AMD GPUs.
        accesses: accesses to global memory.
        cooperative: whether the kernel is launched as a cooperative grid, whose programs must all be resident at once.
        stray_stores: instructions that store the stack pointer. Source code never asks for a store of the stack pointer. ptxas
            12.8 emits a stray store in place of fp8 values that it failed to compute (triton-lang/triton#11111).
    """

    name: str
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    scalar_registers: int = 0
    accesses: tuple[Access, ...] = ()
    cooperative: bool = False
    stray_stores: int = 0


class Usage(NamedTuple):
    """Hold the registers and spilled bytes per thread of a kernel, and its scalar registers per warp, on AMD GPUs."""

    registers: int
    spill_bytes: int
    scalar_registers: int = 0


def sass_usage(text: str) -> Usage:
    """Read the usage of a cubin's largest function from `cuobjdump -res-usage`; spilled bytes are stack and local memory."""
    registers, stack, local = (re.findall(rf"{field}:(\d+)", text) for field in ("REG", "STACK", "LOCAL"))
    return Usage(max(map(int, registers), default=0), max(map(int, stack + local), default=0))


def gcn_usage(text: str) -> Usage:
    """Read the usage of a kernel from its amdgcn assembly; an AGPR counts as a VGPR, because both share a register file."""
    fields = ("vgpr_count", "private_segment_fixed_size", "sgpr_count")
    return Usage(*(max(map(int, re.findall(rf"^\s+\.{name}:\s+(\d+)", text, re.M)), default=0) for name in fields))


def ptx_accesses(text: str) -> tuple[Access, ...]:
    """Find loads and stores of global memory in PTX, widest first; ptxas keeps the widths, but may copy unrolled accesses."""
    counts: Counter[tuple[str, int]] = Counter()
    for kind, modifiers, copied_bytes in _PTX.findall(text):
        if copied_bytes:
            counts["load", 8 * int(copied_bytes, 0)] += 1
        elif m := _PTX_TYPE.search(modifiers):
            counts["load" if kind == "ld" else "store", int(m[1] or 1) * int(m[2])] += 1
    return _ordered(counts)


def gcn_accesses(text: str) -> tuple[Access, ...]:
    """Find loads and stores of global memory in amdgcn assembly, the widest first."""
    counts: Counter[tuple[str, int]] = Counter()
    for kind, suffix in _GCN.findall(text):
        if m := _GCN_BITS.match(suffix):
            words, bits = int(m[2] or 1), int(m[3] or 0)
            counts[kind, _DEFAULT_BITS * words if m[1] else bits or (8 if m[4] else 16)] += 1
    return _ordered(counts)


def typical_bits(accesses: tuple[Access, ...], kind: str) -> int:
    """Return the access width that moves the most bits in the code; 0 for code without accesses of this kind."""
    return max(((a.bits * a.count, a.bits) for a in accesses if a.kind == kind), default=(0, 0))[1]


def narrowed_bits(before: tuple[Access, ...], after: tuple[Access, ...], kind: str) -> int:
    """Return how many bits of the code's accesses of the width that moves the most bits have become narrower."""
    width = typical_bits(before, kind)

    def grown(is_counted: Callable[[int], bool]) -> int:
        bits = [sum(a.bits * a.count for a in accesses if a.kind == kind and is_counted(a.bits)) for accesses in (before, after)]
        return bits[1] - bits[0]

    return max(0, min(-grown(lambda bits: bits == width), grown(lambda bits: bits < width)))


def _ordered(counts: Counter[tuple[str, int]]) -> tuple[Access, ...]:
    return tuple(Access(kind, bits, counts[kind, bits]) for kind, bits in sorted(counts, key=lambda key: (key[0], -key[1])))


@dataclass(frozen=True, slots=True)
class Target:
    """Describe a target: triton's backend, architecture and warp size, and the resources of an SM.

    Attributes:
        warps: most warps in a partition.
        programs: most programs.
        shared_bytes: shared memory (LDS) of the SM.
        shared_unit: a program takes shared memory in units of so many bytes.
        reserved_bytes: shared memory that every program loses to the system.
        scalar_registers: largest number per warp with which a partition still holds `warps - 1` warps; 0: no limit.
    """

    backend: str
    arch: int | str
    warp_size: int
    warps: int
    programs: int
    shared_bytes: int
    shared_unit: int
    reserved_bytes: int = 0
    scalar_registers: int = 0

    @property
    def program_bytes(self) -> int:
        """Return the shared memory that a program may use."""
        return self.shared_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Hold the resident programs and warps of an SM, the most warps that it can hold (`of_warps`), and the limiting resource."""

    programs: int
    warps: int
    of_warps: int
    limiter: str


# CUDA C++ Programming Guide, "Features and Technical Specifications per Compute Capability"; CDNA 3 and 4 ISA guides and
# LLVM's AMDGPUUsage: 512 VGPRs per lane and 8 waves per SIMD; above 100 SGPRs a SIMD holds 7 waves.
TARGETS = {
    "sm_90": Target("cuda", 90, 32, warps=16, programs=32, shared_bytes=233472, shared_unit=128, reserved_bytes=1024),
    "sm_100": Target("cuda", 100, 32, warps=16, programs=32, shared_bytes=233472, shared_unit=128, reserved_bytes=1024),
    "gfx942": Target("hip", "gfx942", 64, warps=8, programs=16, shared_bytes=65536, shared_unit=512, scalar_registers=100),
    "gfx950": Target("hip", "gfx950", 64, warps=8, programs=16, shared_bytes=163840, shared_unit=1280, scalar_registers=100),
}


def occupancy_of(kernel: Kernel, target: str) -> Occupancy:
    """Return how many programs of a compiled kernel an SM of the target holds.

    A partition holds `w = min(warps, registers per lane // registers rounded up to 8)` warps, and the SM
    `partitions * w // warps of a program` programs, if its shared memory and its program slots allow as many.
    """
    limits = TARGETS[target]
    units = max(1, cdiv(kernel.registers, _REGISTER_UNIT))
    slots = {"warps": limits.warps, "registers": _LANE_REGISTERS // (units * _REGISTER_UNIT)}
    if kernel.scalar_registers > limits.scalar_registers > 0:
        slots["scalar registers"] = limits.warps - 1
    programs = {name: _PARTITIONS * held // kernel.warps for name, held in slots.items()}
    programs["program slots"] = limits.programs
    if kernel.warps * limits.warp_size > MAX_THREADS:
        programs = {"threads of a program": 0}
    if kernel.shared_bytes:
        needed = cdiv(kernel.shared_bytes, limits.shared_unit) * limits.shared_unit + limits.reserved_bytes
        programs["shared memory"] = limits.shared_bytes // needed
    limiter = min(programs, key=lambda name: programs[name])  # the first of equals, so warps come first
    return Occupancy(programs[limiter], programs[limiter] * kernel.warps, _PARTITIONS * limits.warps, limiter)
