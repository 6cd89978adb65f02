"""Occupancy by hand-computed examples of each limit."""

import pytest

from kerneltune.measuring.compiler import TARGETS
from kerneltune.measuring.occupancy import LIMITS, Occupancy, occupancy


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "scalars", "expected"),
    [
        ("sm_90", 4, 32, 0, 0, Occupancy(16, 64, 64, "warps")),
        ("sm_90", 4, 168, 49184, 0, Occupancy(3, 12, 64, "registers")),  # 512 // 168 = 3 warps in each of 4 partitions
        ("sm_90", 8, 40, 32, 0, Occupancy(6, 48, 64, "registers")),
        ("sm_90", 8, 33, 32, 0, Occupancy(6, 48, 64, "registers")),  # 33 is rounded up to 40
        ("sm_90", 4, 32, 100_000, 0, Occupancy(2, 8, 64, "shared memory")),
        ("sm_90", 4, 32, 232448, 0, Occupancy(1, 4, 64, "shared memory")),  # the most that one program may have
        ("sm_90", 1, 16, 0, 0, Occupancy(32, 32, 64, "program slots")),
        ("sm_90", 16, 255, 0, 0, Occupancy(0, 0, 64, "registers")),  # 2 warps in a partition, 8 in all
        ("gfx942", 8, 150, 8192, 0, Occupancy(1, 8, 32, "registers")),
        ("gfx942", 4, 64, 40_000, 0, Occupancy(1, 4, 32, "shared memory")),
        ("gfx950", 4, 64, 40_000, 0, Occupancy(4, 16, 32, "shared memory")),
        ("gfx942", 4, 64, 0, 100, Occupancy(8, 32, 32, "warps")),
        ("gfx942", 4, 64, 0, 102, Occupancy(7, 28, 32, "scalar registers")),
        ("gfx942", 32, 16, 0, 0, Occupancy(0, 0, 32, "threads of a program")),  # 2048 threads
    ],
)
def test_occupancy(target: str, warps: int, registers: int, shared: int, scalars: int, expected: Occupancy) -> None:
    assert occupancy(LIMITS[target], warps, registers, shared, scalars) == expected


def test_every_target_has_limits() -> None:
    assert list(LIMITS) == list(TARGETS)
    for name, target in TARGETS.items():
        assert target.shared_bytes <= LIMITS[name].shared_bytes - LIMITS[name].reserved_bytes
