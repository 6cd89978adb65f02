"""How many programs to launch, and launches whose programs wait for each other.

Knows no operator and launches nothing itself. May import torch.
"""

from typing import Any

import torch

from kerneltune import device
from kerneltune.kernel_lib.tl_lib import is_cuda
from kerneltune.rounding import cdiv

_QUARTER = 16384
"""Registers of a quarter of a multiprocessor, which holds every fourth warp."""

_MAX_REGISTERS = 255


def resident(where: torch.device, ctas: int) -> int:
    """Programs that are resident together where every multiprocessor of the device holds `ctas`."""
    return ctas * device.sm_count(where.type, where.index)


def registers(warps: int, ctas: int) -> dict[str, Any]:
    """The launch option that has `ctas` programs fit a multiprocessor; none where Triton has no such option."""
    return {"maxnreg": min(_MAX_REGISTERS, _QUARTER // (32 * cdiv(warps * ctas, 4)) // 8 * 8)} if is_cuda() else {}


def phases(warps: int, ctas: int, together: bool = True) -> list[tuple[int, dict[str, Any]]]:
    """The launches of a kernel whose programs wait for each other: PHASE and launch options of each.

    On CUDA one cooperative launch (PHASE 0) with as many registers as `ctas` programs leave each other. Elsewhere, and where
    not all that must wait for each other can be resident `together`, programs publish in one launch (PHASE 1) and collect in
    a second (PHASE 2); the interpreter runs them in turn.
    """
    if not is_cuda():
        return [(1, {}), (2, {})]
    limit = registers(warps, ctas)
    return [(0, limit | {"launch_cooperative_grid": True})] if together else [(1, limit), (2, limit)]
