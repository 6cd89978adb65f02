"""What the operators of this package share on the host: how to cast, checks, outputs.

Knows no kernel and no operator. May import arguments, spec, tl_lib.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from kerneltune.kernel_lib.arguments import DTYPE_NAMES, assert_group_ends, check_format, debugging
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES, FP8_MAX
from kerneltune.spec import Option

QUANT_OPTIONS: tuple[tuple[str, Option], ...] = (("fp8_format", "e4m3"), ("pow2", True), ("inverse", False), ("special", False))
"""The options under which configs are cached. Only pow2 may change which is best: without it tensorwise casts read twice."""

GROUP_OPTIONS: tuple[tuple[str, Option], ...] = (*QUANT_OPTIONS, ("groups", "balanced"))
"""The same of token groups, whose sizes the host does not know."""

FREE_OPTIONS = tuple(name for name, _ in QUANT_OPTIONS)
FREE_GROUP_OPTIONS = tuple(name for name, _ in GROUP_OPTIONS)
"""Options under which a cached config may serve another value. Layouts are none of them: they want tiles of other shapes."""


@dataclass(frozen=True, slots=True)
class Cast:
    """How numbers become fp8: the type, scales rounded down to powers of two or not, the multiplier returned or 1 / scale; where.

    Raises:
        ValueError: there is no such type, or the device has it not.
    """

    fp8_format: str
    pow2: bool
    inverse: bool
    where: torch.device

    def __post_init__(self) -> None:
        check_format(self.fp8_format, FP8_DTYPES, self.where)

    @property
    def dtype(self) -> torch.dtype:
        """The type."""
        return FP8_DTYPES[self.fp8_format]

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are told of it."""
        return {"FP8_MAX": FP8_MAX[self.fp8_format], "POW2": self.pow2, "INVERSE": self.inverse}

    @property
    def scale_of_nothing(self) -> float:
        """What amax 0 gives, rounded as the kernels round it."""
        scale = float(torch.tensor(FP8_MAX[self.fp8_format] / 1e-12, dtype=torch.float32))
        scale = 2.0 ** math.floor(math.log2(scale)) if self.pow2 else scale
        return 1.0 / scale if self.inverse else scale


def check_weights(name: str, w: torch.Tensor) -> None:
    """Expert weights (E, K, N) of bf16, fp16 or fp32 in column-major order.

    Raises:
        ValueError: they are not.
    """
    if w.ndim != 3 or w.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} must be (E, K, N) of {', '.join(DTYPE_NAMES.values())}, got shape {tuple(w.shape)} {w.dtype}")
    if w.numel() and not w.transpose(1, 2).is_contiguous():
        raise ValueError(f"{name} must be column-major, strides {(w.shape[1] * w.shape[2], 1, w.shape[1])}, got {w.stride()}")


def check_offs(offs: torch.Tensor, M: int, where: torch.device, whole: bool = True) -> None:
    """Group ends (G,) int32 on a device, contiguous, at least one; under TRITON_DEBUG=1 the device asserts that they are ends
    within M rows, the last at M if `whole`.

    Raises:
        ValueError: they are not.
    """
    if offs.ndim != 1 or offs.shape[0] == 0 or offs.dtype != torch.int32 or offs.device != where:
        raise ValueError(f"offs must be (G,) int32 on {where}, got {tuple(offs.shape)} {offs.dtype} on {offs.device}")
    if offs.shape[0] > 1 and offs.stride(0) != 1:
        raise ValueError(f"offs must be contiguous, got strides {offs.stride()}")
    if debugging():
        assert_group_ends(offs, M, whole=whole)


def target(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device, turned: bool = False
) -> torch.Tensor:
    """The contiguous tensor that a result is written to: a new one, or the one given, or its transpose where that is `turned`.

    Raises:
        ValueError: the one given is another.
    """
    if given is None:
        return torch.empty(shape, dtype=dtype, device=where)
    found = given.transpose(-2, -1) if turned else given
    if found.shape != shape or found.dtype != dtype or found.device != where or not found.is_contiguous():
        wanted = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        order = "column-major" if turned else "contiguous"
        raise ValueError(
            f"{name} must be {order} {tuple(wanted)} {dtype} on {where}, "
            f"got {tuple(given.shape)} {given.dtype} on {given.device}, strides {given.stride()}"
        )
    return found
