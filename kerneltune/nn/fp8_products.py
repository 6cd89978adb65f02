"""Multiply in fp8, forward and backward: the autograd function of all layers.

    Y = X W      dX = dY Wᵀ      dW = Xᵀ dY      for every group of rows with its own W, or for all rows with one W
    Y = swiglu(X W) V            with a second weight, tensor-wise: SwiGLU and its gradient are cast while they are computed

Launches of a grouped product, forward and backward: tensorwise 9, rowwise 6; with weights already cast 7 and 5; delayed 6.
Shapes and types of arguments are not checked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kerneltune.compat import scaled_mm, unsafe_view
from kerneltune.kernel_lib.functions import custom_op
from kerneltune.nn.alignment import row_major
from kerneltune.nn.delayed import AnyRecipe
from kerneltune.nn.recipes import Fp8Operand, Recipe, one_group
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

    torch multiplies on a GPU where the result is bf16 or fp16 and K a multiple of 16; elsewhere a grouped product of one
    group does.
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
