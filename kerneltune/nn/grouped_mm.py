"""Multiply groups of rows, or tokens routed to experts, by expert weights in fp8, with autograd.

Casts and products run on a GPU and in Triton's interpreter.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kerneltune.compat import assert_group_ends, untraced
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like, debugging
from kerneltune.nn.alignment import is_row_major
from kerneltune.nn.delayed import AnyRecipe, DelayedScaling
from kerneltune.nn.fp8_products import fp8_product
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import Fp8Operand, Recipe, recipe_of
from kerneltune.nn.routing import Routing
from kerneltune.ops.fp8_grouped_gemm.operands import MOST_GROUPS
from kerneltune.rounding import ALIGNED

_untraced_product: Callable[..., Tensor] = untraced(fp8_product)


def fp8_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    *,
    recipe: str | Recipe | DelayedScaling = "tensorwise",
    out_dtype: torch.dtype | None = None,
    weights: Fp8Operand | KeptWeights | None = None,
    amax: Tensor | None = None,
    check_offs: bool = False,
) -> Tensor:
    """Multiply the rows of A by their group's matrix, in fp8 with fp32 accumulation; differentiable once in A and B_t, in fp8.

    Compiles without a graph break and can be captured: no step of it waits for the GPU.

    Args:
        A: (M, K) bf16, fp16 or fp32, rows contiguous.
        B_t: (E, K, N) bf16, fp16 or fp32, column-major, which is the transposed view of a contiguous (E, N, K), or
            contiguous. K and N multiples of 16. Its gradient is column-major.
        offs: (E,) int32, E to 1024, where each group's rows end, not decreasing, at most M. Groups may be empty and of any
            size. Rows behind the last group have no part in scales and gradients; the result has zeros there.
        recipe: `tensorwise`, `rowwise`, or a Recipe; or a DelayedScaling, with which the graph breaks.
        out_dtype: type of the result; None for A's type.
        weights: an earlier cast of B_t by the same recipe, or the KeptWeights that cast B_t; None casts B_t here.
        amax: (E,) fp32, the largest magnitudes of B_t at the last cast, zeros at first; the caller keeps the tensor from
            step to step, and the cast updates it. Under `tensorwise` with powers of two, a cast reads B_t once instead of
            twice while the scales stay. No result depends on it. Used only where the backward pass needs the weights'
            transpose.
        check_offs: whether to check the order of offs, which waits for the GPU. The CPU always checks it. Under
            TRITON_DEBUG=1 the GPU asserts it.

    Returns:
        (M, N), contiguous. Of A the backward keeps M K bytes; of the weights E K N bytes with `Recipe.keep_weights`, unless
        they are passed in.

    Source: torchao's rowwise grouped product for MoE training and its pull requests 4179 and 4389, from their contract.
    """
    how = recipe if isinstance(recipe, DelayedScaling) else recipe_of(recipe)
    check_product(A, B_t, offs, how, out_dtype)
    cast = _earlier_cast(A, B_t, how, weights, amax)
    if (check_offs or offs.device.type == "cpu") and type(offs) is Tensor and not torch.compiler.is_compiling():
        check_ends(offs, A.shape[0])
    elif debugging():
        assert_group_ends(offs, A.shape[0])
    dtype = out_dtype or A.dtype
    multiply = _untraced_product if isinstance(how, DelayedScaling) else fp8_product
    return multiply(A, B_t, how, dtype, routing=(None, None, offs), casts=(None, cast, None))


def fp8_routed_mm(
    x: Tensor,
    matrices: Sequence[Tensor],
    routing: Routing,
    recipe: Recipe,
    weights: Sequence[Fp8Operand | KeptWeights | None] = (None, None),
) -> Tensor:
    """Multiply each token by the matrices of its experts, in fp8, x W or swiglu(x W) V; differentiable once in x, W and V.

    Because one `tensorwise` scale serves all copies of a token, tokens are cast before they are copied to their experts: the
    copy moves bytes in place of bf16 values, and a K-th of the rows is cast. Where every token has an expert, x W has the
    bits of `fp8_grouped_mm` on `permute_tokens`. The rows that SwiGLU gates and their gradient are never written in 16 bits.

    Args:
        x: (T, K) bf16, fp16 or fp32, rows contiguous.
        matrices: W (E, K, N); or W (E, K, 2I), whose columns hold gate, then up, and V (E, I, N).
        routing: routing of the same tokens.
        recipe: recipe with tensorwise scaling, and with powers of two if V is given. The scale covers tokens without an
            expert, too.
        weights: of `fp8_grouped_mm`, for each of the matrices.

    Returns:
        (T k, N) in the order of `routing`, of x's type.
    """
    w, v = matrices[0], matrices[1] if len(matrices) > 1 else None
    check_product(x, w, routing.offs, recipe)
    if v is not None:
        half = x.new_empty((0, w.shape[2] // 2))
        if w.shape[2] % 2 or v.shape[1] != half.shape[1]:
            raise ValueError(f"weights must be (E, K, 2I) and (E, I, N), got {tuple(w.shape)} and {tuple(v.shape)}")
        check_product(half, v, routing.offs, recipe)
    casts = [_earlier_cast(x, b_t, recipe, known) for b_t, known in zip(matrices, weights, strict=False)]
    return fp8_product(x, w, recipe, x.dtype, v=v, routing=routing, casts=(None, *casts, None)[:3])


def _earlier_cast(
    A: Tensor, B_t: Tensor, recipe: AnyRecipe, weights: Fp8Operand | KeptWeights | None, amax: Tensor | None = None
) -> Fp8Operand | None:
    """Return B_t in fp8 by the arguments `weights` and `amax` of `fp8_grouped_mm`; None lets the product cast B_t."""
    if isinstance(weights, KeptWeights):
        return weights.cast(B_t, recipe, A.requires_grad)
    if weights is not None:
        _check_weights(weights, B_t, recipe)
    elif amax is not None:
        check_like("amax", amax, (B_t.shape[0],), torch.float32, B_t.device)
        if recipe.uses_amax and torch.is_grad_enabled() and A.requires_grad:
            return recipe.cast_weights(B_t.detach(), amax=amax)
    return weights


def check_product(A: Tensor, B_t: Tensor, offs: Tensor, recipe: AnyRecipe, out_dtype: torch.dtype | None = None) -> None:
    """Check the arguments of `fp8_grouped_mm`, except for values on the device."""
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
        if recipe.num_experts != B_t.shape[0]:
            raise ValueError(f"recipe must scale {B_t.shape[0]} experts, got {recipe.num_experts}")
        if recipe.scales.device != A.device:
            raise ValueError(f"recipe must be on {A.device} as A is, got {recipe.scales.device}")


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


def check_ends(offs: Tensor, M: int) -> None:
    """Check the ends of groups, which waits for the device."""
    ends = offs.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > M:
        shown = str(ends) if len(ends) <= 16 else f"{ends[:8]} … {ends[-8:]}"
        raise ValueError(f"offs decrease or exceed M: expected ends from 0 to {M} in order, got {shown}")


def _check_weights(weights: Fp8Operand, B_t: Tensor, recipe: AnyRecipe) -> None:
    """Check that the weights can be B_t (E, K, N) in fp8 by a recipe."""
    if not isinstance(weights, Fp8Operand):
        raise ValueError(f"weights must be an Fp8Operand, got {type(weights).__name__}")
    E, K, N = B_t.shape
    wanted = {
        "q": ((E, K, N), torch.float8_e4m3fn),
        "scale": ((E, N) if recipe.is_rowwise else (E,), torch.float32),
        "q_t": ((E, N, K), torch.float8_e4m3fn),
        "scale_t": ((E, K) if recipe.is_rowwise else (E,), torch.float32),
    }
    for name, (shape, dtype) in wanted.items():
        t = getattr(weights, name)
        check_like(f"weights.{name}", t, shape, dtype, B_t.device)
        order, dense = ("column-major", t.mT) if t.ndim == 3 else ("contiguous", t)
        if not dense.is_contiguous():
            raise ValueError(f"weights.{name} must be {order}, got strides {t.stride()}")
