"""Check the operands of grouped fp8 products before any launch."""

import torch
from torch import Tensor

from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like
from kerneltune.nn.alignment import ALIGNED, is_row_major
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.fp8_products import Fp8Weights
from kerneltune.nn.recipes import Recipe
from kerneltune.ops.fp8_grouped_gemm.operands import MOST_GROUPS


def check_operands(
    A: Tensor, B_t: Tensor, offs: Tensor, recipe: Recipe | DelayedScaling, out_dtype: torch.dtype | None = None
) -> None:
    """Check the arguments of `fp8_grouped_mm`, except for values on the device.

    Raises:
        ValueError: a wrong kind of tensor, shape, stride, dtype, device or number of experts, which it names.
    """
    for name, t in (("A", A), ("B_t", B_t), ("offs", offs)):
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} must be a tensor, got {t!r}")
        if hasattr(t, "to_local"):
            raise ValueError(f"{name} must be a plain tensor, as to_local() of a DTensor is, got {type(t).__name__}")
    _check_matrices(A, B_t, A.dtype if out_dtype is None else out_dtype)
    _check_offsets(offs, B_t.shape[0])
    if A.device != B_t.device or A.device != offs.device:
        raise ValueError(f"A, B_t and offs must be on one device, got {A.device}, {B_t.device} and {offs.device}")
    if isinstance(recipe, DelayedScaling):
        _check_delayed(recipe, A, B_t.shape[0])


def _check_matrices(A: Tensor, B_t: Tensor, out_dtype: torch.dtype) -> None:
    if A.ndim != 2 or B_t.ndim != 3 or A.shape[1] != B_t.shape[1]:
        raise ValueError(f"fp8_grouped_mm takes A (M, K) and B_t (E, K, N), got {tuple(A.shape)} and {tuple(B_t.shape)}")
    _, K, N = B_t.shape
    if K % ALIGNED or N % ALIGNED or not K or not N:
        raise ValueError(f"K and N must be multiples of {ALIGNED}, got {K=} {N=}")
    for name, dtype in (("A", A.dtype), ("B_t", B_t.dtype), ("out_dtype", out_dtype)):
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} must be one of {', '.join(DTYPE_NAMES.values())}, got {dtype}")
    if not is_row_major(A) and not A.is_contiguous():
        raise ValueError(f"A must be row-major, got strides {A.stride()}")
    if not B_t.mT.is_contiguous() and not B_t.is_contiguous():
        raise ValueError(f"B_t must be column-major, strides {(K * N, 1, K)}, or contiguous, got {B_t.stride()}")


def _check_offsets(offs: Tensor, E: int) -> None:
    if tuple(offs.shape) != (E,) or offs.dtype != torch.int32:
        raise ValueError(f"offs must be ({E},) int32, got {tuple(offs.shape)} {offs.dtype}")
    if not 1 <= E <= MOST_GROUPS:
        raise ValueError(f"offs must be of 1 to {MOST_GROUPS} groups, got {tuple(offs.shape)}")
    if offs.stride(0) != 1:
        raise ValueError(f"offs must be contiguous, got strides {offs.stride()}")


def _check_delayed(recipe: DelayedScaling, A: Tensor, E: int) -> None:
    if recipe.num_experts != E:
        raise ValueError(f"recipe must scale {E} experts, got {recipe.num_experts}")
    if recipe.scales.device != A.device:
        raise ValueError(f"recipe must be on {A.device} as A is, got {recipe.scales.device}")


def check_ends(offs: Tensor, M: int) -> None:
    """Check the ends of groups, which waits for the device.

    Raises:
        ValueError: offs decrease, or are not within 0 and M.
    """
    ends = offs.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > M:
        shown = str(ends) if len(ends) <= 16 else f"{ends[:8]} … {ends[-8:]}"
        raise ValueError(f"offs decrease or exceed M: expected ends from 0 to {M} in order, got {shown}")


def check_weights(weights: Fp8Weights, B_t: Tensor, recipe: Recipe | DelayedScaling) -> None:
    """Check that the weights can be B_t (E, K, N) in fp8 by a recipe.

    Raises:
        ValueError: another type, or a field of a wrong shape, dtype, device or order.
    """
    if not isinstance(weights, Fp8Weights):
        raise ValueError(f"weights must be Fp8Weights, got {type(weights).__name__}")
    E, K, N = B_t.shape
    per_column = isinstance(recipe, Recipe) and recipe.scaling == "rowwise"
    wanted = {
        "q": ((E, K, N), torch.float8_e4m3fn),
        "scale": ((E, N) if per_column else (E,), torch.float32),
        "q_t": ((E, N, K), torch.float8_e4m3fn),
        "scale_t": ((E, K) if per_column else (E,), torch.float32),
    }
    for name, (shape, dtype) in wanted.items():
        t = getattr(weights, name)
        check_like(f"weights.{name}", t, shape, dtype, B_t.device)
        order, dense = ("column-major", t.mT) if t.ndim == 3 else ("contiguous", t)
        if not dense.is_contiguous():
            raise ValueError(f"weights.{name} must be {order}, got strides {t.stride()}")
