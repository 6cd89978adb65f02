"""How many programs of a kernel are resident on one SM (compute unit), by the architecture's limits.

Does not know the grid, nor what the driver keeps for itself besides. Imports assembly.
"""

from dataclasses import dataclass

from kerneltune.measuring.assembly import Kernel
from kerneltune.rounding import cdiv

_REGISTER_UNIT = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """What one SM has.

    Attributes:
        partitions: its schedulers (SIMDs); the warps of a program are dealt out over them.
        registers: registers per lane in a partition; a warp takes them in units of 8.
        warps: most warps in a partition.
        programs: most programs.
        program_warps: most warps of one program: 1024 threads.
        shared_bytes: shared memory (LDS) of the SM.
        shared_unit: a program takes shared memory in units of so many bytes.
        reserved_bytes: shared memory that every program loses to the system.
        scalar_registers: the most per warp with which a partition still holds all its warps but one; 0: no such limit.
    """

    partitions: int
    registers: int
    warps: int
    programs: int
    program_warps: int
    shared_bytes: int
    shared_unit: int
    reserved_bytes: int = 0
    scalar_registers: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Programs and warps that one SM holds, of `of_warps`, and what keeps it from holding more."""

    programs: int
    warps: int
    of_warps: int
    limiter: str


# CUDA C++ Programming Guide, "Features and Technical Specifications per Compute Capability"; CDNA 3 and 4 ISA guides and
# LLVM's AMDGPUUsage: 512 VGPRs per lane and 8 waves per SIMD; above 100 SGPRs a SIMD holds 7 waves.
_HOPPER = Limits(4, 512, 16, 32, 32, 233472, 128, reserved_bytes=1024)
LIMITS = {
    "sm_90": _HOPPER,
    "sm_100": _HOPPER,
    "gfx942": Limits(4, 512, 8, 16, 16, 65536, 512, scalar_registers=100),
    "gfx950": Limits(4, 512, 8, 16, 16, 163840, 1280, scalar_registers=100),
}


def occupancy(limits: Limits, warps: int, registers: int, shared_bytes: int, scalar_registers: int = 0) -> Occupancy:
    """Return the occupancy of programs with `warps` warps, `registers` per thread and `shared_bytes` of shared memory.

    A partition holds `w = min(warps, registers per lane // registers rounded up to 8)` warps, the SM
    `partitions * w // warps of a program` programs, and no more than its shared memory and its program slots allow.
    """
    slots = {"warps": limits.warps, "registers": limits.registers // max(_REGISTER_UNIT, _round_up(registers, _REGISTER_UNIT))}
    if scalar_registers > limits.scalar_registers > 0:
        slots["scalar registers"] = limits.warps - 1
    programs = {name: limits.partitions * held // warps for name, held in slots.items()}
    programs["program slots"] = limits.programs
    if warps > limits.program_warps:
        programs = {"threads of a program": 0}
    if shared_bytes:
        needed = _round_up(shared_bytes, limits.shared_unit) + limits.reserved_bytes
        programs["shared memory"] = limits.shared_bytes // needed
    limiter = min(programs, key=lambda name: programs[name])  # the first of equals: warps before all others
    return Occupancy(programs[limiter], programs[limiter] * warps, limits.partitions * limits.warps, limiter)


def resident(kernel: Kernel, target: str) -> Occupancy:
    """Return how many programs of a compiled kernel an SM of the target holds."""
    return occupancy(LIMITS[target], kernel.warps, kernel.registers, kernel.shared_bytes, kernel.scalar_registers)


def _round_up(value: int, unit: int) -> int:
    return cdiv(value, unit) * unit
