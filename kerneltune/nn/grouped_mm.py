"""Multiply groups of rows, all rows, or tokens routed to experts, by weights in fp8, with autograd.

    Y = X W      dX = dY Wᵀ      dW = Xᵀ dY      for every group of rows with its own W, or for all rows with one W
    Y = swiglu(X W) V            with a second weight, tensor-wise: SwiGLU and its gradient are cast while they are computed

Launches of a grouped product, forward and backward: tensorwise 9, rowwise 6; with weights already cast 7 and 5; delayed 6.
Casts and products run on a GPU and in Triton's interpreter. `fp8_product` does not check shapes and types of its arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kerneltune.compat import assert_group_ends, scaled_mm, unsafe_view, untraced
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like, debugging
from kerneltune.kernel_lib.functions import custom_op
from kerneltune.nn.alignment import is_row_major, row_major
from kerneltune.nn.delayed import AnyRecipe, DelayedScaling
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import Fp8Operand, Recipe, one_group, recipe_of
from kerneltune.nn.routing import Routing
from kerneltune.ops.fp8_grouped_gemm.operands import MOST_GROUPS
from kerneltune.rounding import ALIGNED


def multiply(x: Sequence[Any], w: Sequence[Any], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply rows (M, K), in groups that end at offs, with w (E, K, N), or all rows with w (1, K, N); q and scale of both."""
    (q, scale), (q_w, scale_w) = x[:2], w[:2]
    if offs is None:
        return _multiply_all(q, q_w[0], scale, scale_w, dtype)
    y: Tensor = torch.ops.kerneltune.fp8_grouped_gemm(q, q_w, scale, scale_w, offs, out_dtype=dtype)
    return y


def weight_gradient(dy: Sequence[Any], x: Sequence[Any], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dW (E, N, K), or (N, K) of all rows, of q_t and scale_t of dY and of X."""
    (dy_t, scale_dy), (x_t, scale_x) = dy[-2:], x[-2:]
    if offs is None:
        return _multiply_all(dy_t.t(), x_t, scale_dy, scale_x, dtype)
    ops = torch.ops.kerneltune
    made: Tensor = ops.fp8_grouped_gemm(dy_t.t(), x_t, scale_dy, scale_x, offs, out_dtype=dtype, aligned=True)
    return made


def _multiply_all(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a (M, K) row-major with b (K, N) column-major; scale_a: of 1 or M elements, scale_b: of 1 or N elements.

    On a GPU torch multiplies if the result is bf16 or fp16 and K a multiple of 16; else `fp8_grouped_gemm` multiplies, with all
    rows as a group.
    """
    (M, K), N = a.shape, b.shape[1]
    if not a.is_cuda or K % ALIGNED or dtype == torch.float32:
        scale_b = scale_b.reshape(1, -1) if scale_b.numel() > 1 else scale_b.view(1)
        return multiply((a, scale_a.reshape(-1)), (b[None], scale_b), one_group(a), dtype)
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        scales = scale_a.view(()), scale_b.view(())
    else:
        scales = scale_a.reshape(-1, 1).expand(M, 1).contiguous(), scale_b.reshape(1, -1).expand(1, N).contiguous()
    return scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=True)


@custom_op("kerneltune::fp8_input_gradient")
def input_gradient(
    q: Tensor, scale: Tensor, b: Tensor, offs: Tensor | None, scaling: str, pow2: bool, dtype: torch.dtype
) -> Tensor:
    """Multiply cast rows of dY with the transpose of b (E, K, N), which is cast here.

    An operator of its own, as `late_weight_gradient` is, because the compiler would move casts that do not depend on dY to
    the forward pass and keep them.
    """
    return multiply((q, scale), Recipe(scaling, pow2).cast_weights(b.mT, False), offs, dtype)


@input_gradient.register_fake
def _(q: Tensor, scale: Tensor, b: Tensor, offs: Tensor | None, scaling: str, pow2: bool, dtype: torch.dtype) -> Tensor:
    return q.new_empty((q.shape[0], b.shape[1]), dtype=dtype)


@custom_op("kerneltune::fp8_late_weight_gradient")
def late_weight_gradient(
    dy_t: Tensor, scale: Tensor, x: Tensor, scaling: str, pow2: bool, x_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return dW (N, K) of all rows, of the cast of dY and of x (…, K), which is cast here in x_dtype as in the forward pass."""
    cast = Recipe(scaling, pow2).cast_rows(rows_of(x, x_dtype), None, along=False)
    return weight_gradient((dy_t, scale), cast, None, dtype)


@late_weight_gradient.register_fake
def _(dy_t: Tensor, scale: Tensor, x: Tensor, scaling: str, pow2: bool, x_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    return x.new_empty((dy_t.shape[1], x.shape[-1]), dtype=dtype)


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x (…, K) as rows (M, K) of a type."""
    return row_major(x.reshape(-1, x.shape[-1]).to(dtype))


class _Product(torch.autograd.Function):
    """Compute Y = X W, or Y = swiglu(X W) V, and the gradients, by the arguments of `fp8_product`.

    The backward pass releases each tensor at its last use, so that nothing else waits beside dW, the largest tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, v: Any, routing: Any, recipe: AnyRecipe, dtype: Any, casts: Any) -> Tensor:
        """Return Y, and keep the operands of the gradients."""
        (pairs, places, offs), (rows, of_w, of_v), keep = routing, casts, recipe.keep_weights
        for_x, for_w, for_v = ctx.needs_input_grad[:3]
        for_h = for_x or for_w
        if rows is None and places is not None:
            rows = _cast_tokens(recipe, x, pairs, places, offs)
        elif rows is None:
            for_dw = for_w and (keep or offs is not None)
            rows = recipe.cast_rows(rows_of(x, dtype if offs is None else x.dtype), offs, down=for_dw)
        cast = recipe.cast_weights(w, for_x and keep) if of_w is None else of_w
        y = multiply(rows, cast, offs, dtype)
        kept = [*_for_backward(cast, w, for_x), *_for_backward(rows, x, for_w)]
        h = y if v is not None and for_h else None
        if v is not None:
            del rows, cast  # so that only the operands of the second product are alive, beside the kept tensors
            q, *q_t, scale = torch.ops.kerneltune.fp8_swiglu_2d(y, offs, layout="both" if for_v else "row")
            cast = recipe.cast_weights(v, for_h and keep) if of_v is None else of_v
            y = multiply((q, scale), cast, offs, dtype)
            kept += [*_for_backward(cast, v, for_h), *((*q_t, scale) if for_v else (None, None))]
        ctx.save_for_backward(offs, places, h, *kept)
        ctx.recipe, ctx.shape = recipe, x.shape
        ctx.dtypes = dtype, x.dtype, w.dtype, None if v is None else v.dtype
        # in the result's shape, because FSDP2 warns of views; and no view, because autograd lets no caller change that in
        # place
        return unsafe_view(y, [*x.shape[:-1], y.shape[1]]) if offs is None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        offs, places, h, *kept = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # unless the graph is kept; torch itself clears them, but only after this function
        recipe, (dtype, x_dtype, w_dtype, v_dtype), dv = ctx.recipe, ctx.dtypes, None
        for_x, for_w, for_v = ctx.needs_input_grad[:3]
        last = (for_x, for_w) if v_dtype is None else (for_x or for_w, for_v)
        dy: list[Any] = list(recipe.cast_rows(row_major(grads[0].reshape(-1, grads[0].shape[-1])), offs, *last, is_gradient=True))
        if v_dtype is not None:
            v, gated, kept = kept[4:6], kept[6:], kept[:4]
            dh: list[Any] = []
            if for_x or for_w:
                of_gated = _input_gradient(recipe, dy, v, offs, dtype)
                q, *q_t, scale = torch.ops.kerneltune.fp8_swiglu_bwd_2d(of_gated, h, offs, layout="both" if for_w else "row")
                dh = [q, scale, *(q_t or [None]), scale]
                del of_gated, h, q, q_t
            dv = _weight_gradient(recipe, dy, gated, offs, dtype, v_dtype) if for_v else None
            dy = dh
        w, x = kept[:2], kept[2:]
        del kept
        dx = _input_gradient(recipe, dy, w, offs, x_dtype) if for_x else None
        if dx is not None:
            dx = dx.view(ctx.shape) if places is None else torch.ops.kerneltune.moe_combine(dx, places, offs, None)
        dw = _weight_gradient(recipe, dy, x, offs, dtype, w_dtype) if for_w else None
        return dx, dw, dv, None, None, None, None


def _cast_tokens(recipe: AnyRecipe, x: Tensor, pairs: Tensor, places: Tensor, offs: Tensor) -> Fp8Operand:
    """Cast tokens (T, K) with one scale and copy them to their experts, in both layouts."""
    q, scale, *_ = recipe.cast_rows(x, None, down=False)
    q, q_t = torch.ops.kerneltune.moe_permute_fp8(q, pairs, offs, places.shape[1])
    return Fp8Operand(q, scale, q_t, scale)


def _for_backward(cast: Fp8Operand, source: Tensor, is_wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors that the backward pass reads: the cast for it and its scale, or the source, to be cast there."""
    if not is_wanted:
        return None, None
    return (source, None) if cast.q_t is None else (cast.q_t, cast.scale_t)


def _input_gradient(recipe: Any, dy: list[Any], w: list[Any], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dX (M, K) of cast rows and of a weight as `_for_backward` returns it; both lists lose their first tensor."""
    (q, scale), (w_t, scale_w) = dy[:2], w
    if not torch.compiler.is_compiling():  # torch 2.11 lets traced code change no list of saved tensors
        dy[0] = w[0] = None
    if scale_w is not None:
        return multiply((q, scale), (w_t, scale_w), offs, dtype)
    made: Tensor = input_gradient(q, scale, w_t, offs, recipe.scaling, recipe.pow2, dtype)
    return made


def _weight_gradient(
    recipe: Any, dy: list[Any], x: list[Any], offs: Tensor | None, x_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return dW (E, K, N), column-major, of cast rows and of the rows of `_for_backward`, which are cast in x_dtype here."""
    made: Tensor
    if x[1] is None:
        made = late_weight_gradient(*dy[2:], x[0], recipe.scaling, recipe.pow2, x_dtype, dtype)
    else:
        made = weight_gradient(dy, x, offs, dtype)
    return made.t()[None] if offs is None else made.transpose(1, 2)


def fp8_product(
    x: Tensor,
    w: Tensor,
    recipe: AnyRecipe,
    dtype: torch.dtype,
    *,
    v: Tensor | None = None,
    routing: Sequence[Tensor | None] = (None, None, None),
    casts: Sequence[Fp8Operand | None] = (None, None, None),
) -> Tensor:
    """Multiply with autograd: Y = X W, or Y = swiglu(X W) V.

    Args:
        x: rows (M, K); tokens (T, K) with pairs and places; (…, K) without offs.
        w, v: (E, K, N) and (E, N / 2, N2), of either order.
        recipe: recipe of the casts.
        dtype: type of the result.
        routing: pairs, places and offs of a Routing; offs alone for rows that are sorted; none of them for a single group.
        casts: earlier casts of x, w and v; None for an operand that is cast here.
    """
    if not torch.is_grad_enabled():  # so that no cast of a gradient is made
        x, w, v = x.detach(), w.detach(), None if v is None else v.detach()
    y: Tensor = _Product.apply(x, w, v, tuple(routing), recipe, dtype, tuple(casts))  # type: ignore[no-untyped-call]
    return y


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the type of a product's result with x: the autocast type, or else x's type."""
    kind = x.device.type
    in_region = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has no autocast, and torch raises
    return torch.get_autocast_dtype(kind) if in_region else x.dtype


def in_autocast(x: Tensor) -> Tensor:
    """Return x in the type of the autocast region, or x itself outside of autocast."""
    return x.to(output_dtype(x))


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
