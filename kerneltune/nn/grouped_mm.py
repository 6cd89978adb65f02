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
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import AnyRecipe, Fp8Operand, Recipe, Scaled, cast_tensorwise, one_group, recipe_of
from kerneltune.nn.routing import Routing
from kerneltune.ops.fp8_grouped_gemm.operands import MOST_GROUPS
from kerneltune.rounding import ALIGNED


def multiply(x: Scaled, w: Scaled, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply rows (M, K), in groups that end at offs, with w (E, K, N), or all rows with w (1, K, N)."""
    if offs is None:
        return _multiply_all(x.q, w.q[0], x.scale, w.scale, dtype)
    y: Tensor = torch.ops.kerneltune.fp8_grouped_gemm(x.q, w.q, x.scale, w.scale, offs, out_dtype=dtype)
    return y


def weight_gradient(dy_t: Scaled, x_t: Scaled, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dW (E, N, K), or (N, K) of all rows, of the casts of dY and X down their columns.

    Both casts are (M, …) column-major: `dy_t.q.t()` is row-major (N, M), the left operand.
    """
    if offs is None:
        return _multiply_all(dy_t.q.t(), x_t.q, dy_t.scale, x_t.scale, dtype)
    ops = torch.ops.kerneltune
    dw: Tensor = ops.fp8_grouped_gemm(dy_t.q.t(), x_t.q, dy_t.scale, x_t.scale, offs, out_dtype=dtype, aligned=True)
    return dw


def _multiply_all(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a (M, K) row-major with b (K, N) column-major; scale_a: of 1 or M elements, scale_b: of 1 or N elements.

    On a GPU torch multiplies if the result is bf16 or fp16 and K a multiple of 16; else `fp8_grouped_gemm` multiplies, with all
    rows as a group.
    """
    (M, K), N = a.shape, b.shape[1]
    if not a.is_cuda or K % ALIGNED or dtype == torch.float32:
        scale_b = scale_b.reshape(1, -1) if scale_b.numel() > 1 else scale_b.view(1)
        return multiply(Scaled(a, scale_a.reshape(-1)), Scaled(b[None], scale_b), one_group(a), dtype)
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
    w, _ = Recipe(scaling, pow2).cast_weights(b.mT, for_dx=False).split()
    return multiply(Scaled(q, scale), w, offs, dtype)


@input_gradient.register_fake
def _(q: Tensor, scale: Tensor, b: Tensor, offs: Tensor | None, scaling: str, pow2: bool, dtype: torch.dtype) -> Tensor:
    return q.new_empty((q.shape[0], b.shape[1]), dtype=dtype)


@custom_op("kerneltune::fp8_late_weight_gradient")
def late_weight_gradient(
    dy_t: Tensor, scale: Tensor, x: Tensor, scaling: str, pow2: bool, x_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return dW (N, K) of all rows. dY is cast already; x (…, K) is cast here, in x_dtype as in the forward pass."""
    _, x_t = Recipe(scaling, pow2).cast_rows(rows_of(x, x_dtype), None, for_product=False).split()
    return weight_gradient(Scaled(dy_t, scale), x_t, None, dtype)


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
    def forward(
        ctx: Any, x: Tensor, w: Tensor, v: Any, recipe: AnyRecipe, dtype: Any, offs: Any, routing: Any, w_cast: Any, v_cast: Any
    ) -> Tensor:
        """Return Y, and keep the operands of the gradients."""
        for_x, for_w, for_v = ctx.needs_input_grad[:3]
        for_h, keep = for_x or for_w, recipe.keep_weights  # h = X W; its gradient gives dX and dW
        places = None
        if routing is not None:
            offs, places = routing.offs, routing.places
            rows, x_t = _cast_tokens(recipe, x, routing).split()
        elif offs is not None:
            rows, x_t = recipe.cast_rows(rows_of(x, x.dtype), offs, for_dw=for_w).split()
        else:
            rows, x_t = recipe.cast_rows(rows_of(x, dtype), None, for_dw=for_w and keep).split()
        cast, w_t = (recipe.cast_weights(w, for_dx=for_x and keep) if w_cast is None else w_cast).split()
        y = multiply(rows, cast, offs, dtype)
        w_t, x_t = _for_backward(w_t, w, for_x), _for_backward(x_t, x, for_w)
        h, v_t, gated_t = None, Scaled(), Scaled()
        if v is not None:
            h = y if for_h else None
            del rows, cast  # so that only the operands of the second product are alive, beside the kept tensors
            gated, gated_t = cast_tensorwise(torch.ops.kerneltune.fp8_swiglu_2d, y, offs, for_dw=for_v).split()
            cast, v_t = (recipe.cast_weights(v, for_dx=for_h and keep) if v_cast is None else v_cast).split()
            y = multiply(gated, cast, offs, dtype)
            v_t = _for_backward(v_t, v, for_h)
        ctx.save_for_backward(offs, places, h, *w_t, *x_t, *v_t, *gated_t)
        ctx.recipe, ctx.shape = recipe, x.shape
        ctx.dtypes = dtype, x.dtype, w.dtype, None if v is None else v.dtype
        # in the result's shape, because FSDP2 warns of views; and no view, because autograd lets no caller change that in
        # place
        return unsafe_view(y, [*x.shape[:-1], y.shape[1]]) if offs is None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        offs, places, h, w, scale_w, x, scale_x, v, scale_v, gated, scale_gated = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # unless the graph is kept; torch itself clears them, but only after this function
        recipe, (dtype, x_dtype, w_dtype, v_dtype), dx, dw, dv = ctx.recipe, ctx.dtypes, None, None, None
        for_x, for_w, for_v = ctx.needs_input_grad[:3]
        for_h, has_v = for_x or for_w, v_dtype is not None
        needs = {"for_product": for_h if has_v else for_x, "for_dw": for_v if has_v else for_w}
        dy, dy_t = recipe.cast_rows(row_major(grads[0].reshape(-1, grads[0].shape[-1])), offs, **needs, is_gradient=True).split()
        if has_v:
            dh = dh_t = Scaled()
            if for_h:
                dgated = _input_gradient(recipe, dy, Scaled(v, scale_v), offs, dtype)
                del dy, v
                dh, dh_t = cast_tensorwise(torch.ops.kerneltune.fp8_swiglu_bwd_2d, dgated, h, offs, for_dw=for_w).split()
                del dgated, h
            if for_v:
                dv = _weight_gradient(recipe, dy_t, Scaled(gated, scale_gated), offs, dtype, v_dtype)
            dy, dy_t = dh, dh_t
            del dh, dh_t
        if for_x:
            dx = _input_gradient(recipe, dy, Scaled(w, scale_w), offs, x_dtype)
        del dy, w
        if dx is not None:
            dx = dx.view(ctx.shape) if places is None else torch.ops.kerneltune.moe_combine(dx, places, offs, None)
        if for_w:
            dw = _weight_gradient(recipe, dy_t, Scaled(x, scale_x), offs, dtype, w_dtype)
        return dx, dw, dv, None, None, None, None, None, None


def _cast_tokens(recipe: AnyRecipe, x: Tensor, routing: Routing) -> Fp8Operand:
    """Cast tokens (T, K) with one scale and copy them to their experts, in both layouts."""
    rows, _ = recipe.cast_rows(x, None, for_dw=False).split()
    q, q_t = torch.ops.kerneltune.moe_permute_fp8(rows.q, routing.pairs, routing.offs, routing.places.shape[1])
    return Fp8Operand(q, rows.scale, q_t, rows.scale)


def _for_backward(cast: Scaled, source: Tensor, is_wanted: bool) -> Scaled:
    """Return the operand that the backward pass reads: a cast; or the source without a scale, to be cast there."""
    if not is_wanted:
        return Scaled()
    return Scaled(source) if cast.q is None else cast


def _input_gradient(recipe: Any, dy: Scaled, w_t: Scaled, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dX (M, K) of cast rows and of a weight as `_for_backward` returns it."""
    if w_t.scale is not None:
        return multiply(dy, w_t, offs, dtype)
    dx: Tensor = input_gradient(*dy, w_t.q, offs, recipe.scaling, recipe.pow2, dtype)
    return dx


def _weight_gradient(
    recipe: Any, dy_t: Scaled, x_t: Scaled, offs: Tensor | None, cast_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return dW (E, K, N), column-major, of cast rows and of the rows of `_for_backward`, which are cast in cast_dtype here."""
    dw: Tensor
    if x_t.scale is None:
        dw = late_weight_gradient(*dy_t, x_t.q, recipe.scaling, recipe.pow2, cast_dtype, dtype)
    else:
        dw = weight_gradient(dy_t, x_t, offs, dtype)
    return dw.t()[None] if offs is None else dw.transpose(1, 2)


def fp8_product(
    x: Tensor,
    w: Tensor,
    recipe: AnyRecipe,
    dtype: torch.dtype,
    *,
    v: Tensor | None = None,
    offs: Tensor | None = None,
    routing: Routing | None = None,
    w_cast: Fp8Operand | None = None,
    v_cast: Fp8Operand | None = None,
) -> Tensor:
    """Multiply with autograd: Y = X W, or Y = swiglu(X W) V.

    Args:
        x: rows (M, K); tokens (T, K) with a routing; (…, K) without offs.
        w, v: (E, K, N) and (E, N / 2, N2), of either order.
        recipe: recipe of the casts.
        dtype: type of the result.
        offs: ends of the groups of sorted rows; None for a single group, and with a routing.
        routing: places of the rows of tokens, which are copied to their experts here.
        w_cast, v_cast: earlier casts of w and v; None for a weight that is cast here.
    """
    if not torch.is_grad_enabled():  # so that no cast of a gradient is made
        x, w, v = x.detach(), w.detach(), None if v is None else v.detach()
    y: Tensor = _Product.apply(x, w, v, recipe, dtype, offs, routing, w_cast, v_cast)  # type: ignore[no-untyped-call]
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
    product = _untraced_product if isinstance(how, DelayedScaling) else fp8_product
    return product(A, B_t, how, dtype, offs=offs, w_cast=cast)


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
        gated = x.new_empty((0, w.shape[2] // 2))  # of the shape and type of gated rows
        if w.shape[2] % 2 or v.shape[1] != gated.shape[1]:
            raise ValueError(f"weights must be (E, K, 2I) and (E, I, N), got {tuple(w.shape)} and {tuple(v.shape)}")
        check_product(gated, v, routing.offs, recipe)
    w_cast = _earlier_cast(x, w, recipe, weights[0])
    v_cast = None if v is None else _earlier_cast(x, v, recipe, weights[1])
    return fp8_product(x, w, recipe, x.dtype, v=v, routing=routing, w_cast=w_cast, v_cast=v_cast)


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
