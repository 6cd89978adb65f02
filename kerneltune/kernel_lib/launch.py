"""Choose the device and the number of programs of a launch, and the options of launches whose programs wait for each other."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from kerneltune import device
from kerneltune.interpreter.corrections import correct_or_warn
from kerneltune.kernel_lib.tl_lib import is_cuda
from kerneltune.rounding import cdiv

correct_or_warn()  # every operator launches from here, also an operator that a user calls without a check

_REGISTERS_OF_QUARTER = 16384
"""Registers of a quarter of an SM; a quarter runs every fourth warp."""

_MAX_REGISTERS = 255
_SHARED_BYTES = 225_000


P = ParamSpec("P")
R = TypeVar("R")


@cache
def several_gpus() -> bool:
    """Return whether this process sees more than one GPU."""
    return torch.cuda.device_count() > 1


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """Run an operator's function on the GPU of its first argument (a tensor or several): Triton launches on the current GPU."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not several_gpus():
            return function(*args, **kwargs)
        first: Any = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, list | tuple) and first:
            first = first[0]
        where = getattr(first, "device", None)
        if not isinstance(where, torch.device) or where.type != "cuda" or where.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(where):
            return function(*args, **kwargs)

    return run


def resident(where: torch.device, ctas: int) -> int:
    """Return the number of resident programs if every SM of the device holds `ctas` programs."""
    return ctas * device.sm_count(where.type, where.index)


def registers(warps: int, ctas: int) -> dict[str, Any]:
    """Return the launch option that makes `ctas` programs fit an SM; no option where Triton has none."""
    return {"maxnreg": min(_MAX_REGISTERS, _REGISTERS_OF_QUARTER // (32 * cdiv(warps * ctas, 4)) // 8 * 8)} if is_cuda() else {}


def too_much_shared(shared_bytes: int) -> str | None:
    """Return why programs with so many bytes of shared memory do not fit an SM of Hopper together; None if they fit."""
    return f"{shared_bytes} bytes of shared memory" if shared_bytes > _SHARED_BYTES else None


def too_small_to_transpose(rows: int, cols: int, warps: int) -> str | None:
    """Return why a tile of fp8 values cannot be cast and written as words of its transpose; None if the tile can be.

    Where a thread has fewer than sixteen, some bytes of the words have no value, and ptxas 12.8 then stores the casts before it
    has computed them: the neighbouring output is wrong, without an error.
    """
    per_thread = rows * cols / (32 * warps)
    return f"{per_thread:g} elements per thread, of which fp8 tiles that are transposed need 16" if per_thread < 16 else None


def phases(warps: int, ctas: int, together: bool = True) -> list[tuple[int, dict[str, Any]]]:
    """Yield the launches of a kernel whose programs wait for each other: PHASE and launch options of each.

    On CUDA, yield a cooperative launch (PHASE 0) whose register limit lets `ctas` programs share an SM. On other backends, and if
    the waiting programs cannot be resident `together`, yield two launches: programs publish in PHASE 1 and collect in PHASE 2.
    The interpreter needs two launches, because it runs its programs in sequence.
    """
    if not is_cuda():
        return [(1, {}), (2, {})]
    limit = registers(warps, ctas)
    return [(0, limit | {"launch_cooperative_grid": True})] if together else [(1, limit), (2, limit)]
