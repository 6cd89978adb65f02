"""Multiply in fp8, forward and backward: the casts of the operands, and the autograd function of all layers.

    Y = X W      dX = dY Wᵀ      dW = Xᵀ dY      for every group of rows with its own W, or for all rows with one W
    Y = swiglu(X W) V            with a second weight, tensor-wise: SwiGLU and its gradient are cast while they are computed

Launches of a grouped product, forward and backward: tensorwise 9, rowwise 6; with weights already cast 7 and 5; delayed 6.
Shapes and types of arguments are not checked.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kerneltune.compat import scaled_mm, unsafe_view
from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.tl_lib import INTERPRETED
from kerneltune.nn.alignment import ALIGNED, row_major
from kerneltune.nn.recipes import Recipe
from kerneltune.ops import fp8

Operand = Sequence[Tensor | None]
"""q and its scale for the product with Y or dX, q_t and its scale for the other product; None where nothing reads them."""
NOT_CAST: Operand = (None,) * 4


class Fp8Weights(NamedTuple):
    """Hold expert weights (E, K, N) in fp8 for the forward product, and transposed for dX.

    Attributes:
        q: (E, K, N), strides (K N, 1, K).
        scale: factors of the values of q: (E,) or (E, N) fp32.
        q_t: (E, N, K), strides (N K, 1, N).
        scale_t: factors of the values of q_t: (E,) or (E, K) fp32.
    """

    q: Tensor
    scale: Tensor
    q_t: Tensor
    scale_t: Tensor

    def transposed(self) -> "Fp8Weights":
        """Return the transposed weights."""
        return Fp8Weights(self.q_t, self.scale_t, self.q, self.scale)


class Casts(NamedTuple):
    """The functions by which a product casts its operands.

    Attributes:
        rows, gradient: (rows (M, …), ends of groups or None, whether dX or Y reads them, whether dW reads them) -> Operand.
        weights: (weight (E, K, N), whether the backward pass reads the cast) -> Operand.
    """

    rows: Callable[[Tensor, Tensor | None, bool, bool], Operand]
    gradient: Callable[[Tensor, Tensor | None, bool, bool], Operand]
    weights: Callable[[Tensor, bool], Operand]


def fresh_casts(scaling: str, pow2: bool) -> Casts:
    """Return the casts with scales of the values at hand, by the fields of a Recipe."""
    rows = partial(cast_rows, scaling, pow2)
    return Casts(rows, rows, partial(cast_product_weights, scaling, pow2))


def cast_rows(scaling: str, pow2: bool, x: Tensor, offs: Tensor | None, along: bool, down: bool) -> Operand:
    """Cast x (M, K) along its rows for the product with a weight, and down its columns for dW.

    Rows behind the last group have no part in any scale. With offs the cast for dW holds aligned groups.
    """
    ops, options = torch.ops.kerneltune, {"pow2": pow2, "inverse": True}
    if scaling == "tensorwise":
        layout = "both" if along and down else "row" if along else "col"
        *made, scale = ops.fp8_tensorwise_2d(x, layout=layout, offs=offs, **options)
        return made[0] if along else None, scale, made[-1] if down else None, scale
    ends, q, scale, q_t, scale_t = one_group(x) if offs is None else offs, *NOT_CAST
    if along and down:
        q, scale, q_t, scale_t = ops.fp8_group_both(x, ends, aligned=offs is not None, **options)
    elif along:
        q, scale = ops.fp8_rowwise_2d(x, **options)
    else:
        q_t, scale_t = ops.fp8_group_colwise(x, ends, aligned=offs is not None, **options)
    shape = ends.shape[0], x.shape[1]
    return q, None if scale is None else scale.view(-1), q_t, None if scale_t is None else scale_t.view(shape)


def one_group(rows: Tensor) -> Tensor:
    """Return the end of all rows as a single group."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)


def cast_product_weights(scaling: str, pow2: bool, b: Tensor, both: bool, amax: Tensor | None = None) -> Operand:
    """Cast b (E, K, N) of either order for the forward product, and with `both` for dX; amax: of `cast_weights`, with `both`."""
    if not torch.compiler.is_compiling():
        _check_device(b)
    is_contiguous = b.is_contiguous()
    w, ops, options = b.mT if is_contiguous else b, torch.ops.kerneltune, {"pow2": pow2, "inverse": True}
    E, _, N = w.shape
    if both:
        if scaling == "rowwise":
            q, scale, q_t, scale_t = ops.fp8_rowwise_3d_both(w, **options)
            found = q, scale.view(E, N), q_t, scale_t
        elif amax is not None and pow2:
            q, scale, q_t = expected_weights(w, amax)
            found = q, scale, q_t, scale
        else:
            q, q_t, scale = ops.fp8_tensorwise_3d(w, layout="both", **options)
            found = q, scale, q_t, scale
        return (*found[2:], *found[:2]) if is_contiguous else found
    if scaling == "tensorwise":
        q, scale = ops.fp8_tensorwise_3d(w, layout="col" if is_contiguous else "row", **options)
    elif is_contiguous:
        q, scale = ops.fp8_rowwise_3d_transpose(w, **options)
    else:
        q, scale = ops.fp8_colwise_3d(w, **options)
        scale = scale.view(E, N)
    return q, scale, None, None


def cast_weights(b_t: Tensor, recipe: Recipe, into: Fp8Weights | None = None, amax: Tensor | None = None) -> Fp8Weights:
    """Return b_t (E, K, N), column-major or contiguous, in both layouts; scale_t is scale where an expert has one scale.

    into: the result of an earlier call for a weight of this size and recipe, which is overwritten.
    amax: of `fp8_tensorwise_3d`; `rowwise` ignores it.
    """
    _check_device(b_t)
    if b_t.is_contiguous():
        return cast_weights(b_t.mT, recipe, into and into.transposed(), amax).transposed()
    E, _, N = b_t.shape
    if recipe.scaling == "tensorwise":
        segments = None if into is None else fp8.SegmentOutput(into.q, into.q_t, into.scale)
        out = fp8.fp8_tensorwise_3d(b_t, layout="both", pow2=recipe.pow2, inverse=True, amax=amax, out=segments)
        assert out.q is not None and out.q_t is not None
        return into or Fp8Weights(out.q, out.scale, out.q_t, out.scale)
    both = None if into is None else fp8.BothLayouts(into.q, into.scale.view(E, 1, N), into.q_t, into.scale_t)
    q, scale, q_t, scale_t = fp8.fp8_rowwise_3d_both(b_t, pow2=recipe.pow2, inverse=True, out=both)
    return into or Fp8Weights(q, scale.view(E, N), q_t, scale_t)


def _check_device(w: Tensor) -> None:
    if not (w.is_cuda or INTERPRETED or w.is_meta):
        raise ValueError(f"weights must be on a GPU, or kernels interpreted (TRITON_INTERPRET=1), got weights on {w.device}")


@custom_op("kerneltune::fp8_expected_weights", mutates_args=("amax",))
def expected_weights(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast w (E, K, N) tensor-wise per expert and write its largest magnitudes to amax: q, scale and q_t."""
    q, scale, q_t, _ = cast_weights(w, Recipe("tensorwise"), amax=amax)
    return q, scale, q_t


@expected_weights.register_fake
def _(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, q_t, scale = torch.ops.kerneltune.fp8_tensorwise_3d(w, layout="both", inverse=True)
    return q, scale, q_t


def multiply(x: Operand, w: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply rows (M, K), in groups that end at offs, with w (E, K, N), or all rows with w (1, K, N): q times scale of both."""
    (q, scale), (q_w, scale_w) = x[:2], w[:2]
    assert q is not None and scale is not None and q_w is not None and scale_w is not None
    if offs is None:
        return _multiply_all(q, q_w[0], scale, scale_w, dtype)
    y: Tensor = torch.ops.kerneltune.fp8_grouped_gemm(q, q_w, scale, scale_w, offs, out_dtype=dtype)
    return y


def weight_gradient(dy: Operand, x: Operand, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dW (E, N, K), or (N, K) of all rows, of q_t and scale of dY and of X."""
    (dy_t, scale_dy), (x_t, scale_x) = dy, x
    assert dy_t is not None and scale_dy is not None and x_t is not None and scale_x is not None
    if offs is None:
        return _multiply_all(dy_t.t(), x_t, scale_dy, scale_x, dtype)
    ops = torch.ops.kerneltune
    made: Tensor = ops.fp8_grouped_gemm(dy_t.t(), x_t, scale_dy, scale_x, offs, out_dtype=dtype, aligned=True)
    return made


def _multiply_all(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a (M, K) row-major with b (K, N) column-major; scale_a: of 1 or M elements, scale_b: of 1 or N elements.

    torch multiplies on a GPU where the result is bf16 or fp16 and K a multiple of 16; elsewhere a grouped product of one group
    does.
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

    An operator of its own, as `late_weight_gradient` is, because the compiler would move casts that do not depend on dY to the
    forward pass and keep them.
    """
    return multiply((q, scale), cast_product_weights(scaling, pow2, b.mT, False), offs, dtype)


@input_gradient.register_fake
def _(q: Tensor, scale: Tensor, b: Tensor, offs: Tensor | None, scaling: str, pow2: bool, dtype: torch.dtype) -> Tensor:
    return q.new_empty((q.shape[0], b.shape[1]), dtype=dtype)


@custom_op("kerneltune::fp8_late_weight_gradient")
def late_weight_gradient(
    dy_t: Tensor, scale: Tensor, x: Tensor, scaling: str, pow2: bool, x_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return dW (N, K) of all rows, of the cast of dY and of x (…, K), which is cast here in x_dtype as in the forward pass."""
    cast = cast_rows(scaling, pow2, rows_of(x, x_dtype), None, False, True)
    return weight_gradient((dy_t, scale), cast[2:], None, dtype)


@late_weight_gradient.register_fake
def _(dy_t: Tensor, scale: Tensor, x: Tensor, scaling: str, pow2: bool, x_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    return x.new_empty((dy_t.shape[1], x.shape[-1]), dtype=dtype)


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x (…, K) as rows (M, K) of a type."""
    return row_major(x.reshape(-1, x.shape[-1]).to(dtype))


class _Product(torch.autograd.Function):
    """Compute Y = X W, or Y = swiglu(X W) V, and the gradients.

    Its arguments are tensors and plain values, on which torch.compile can guard. The backward pass releases each tensor at its
    last use, so that nothing else waits beside dW, the largest tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, v: Tensor | None, offs: Tensor | None, pairs: Tensor | None, places: Tensor | None,
        scaling: str, pow2: bool, keep: bool, delayed: Any, dtype: torch.dtype, for_x: bool, for_w: bool, for_v: bool,
        *operands: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return Y, and keep the operands of the gradients.

        Args:
            x: rows (M, K); tokens (T, K) with pairs and places; (…, K) without offs.
            w, v: (E, K, N) and (E, N / 2, N2), of either order.
            offs, pairs, places: of a Routing; offs alone for rows that are sorted; None for a single group.
            scaling, pow2, keep: of the Recipe.
            delayed: a DelayedScaling in place of scaling and pow2, or None.
            dtype: of the result.
            for_x, for_w, for_v: which gradients will be asked for.
            operands: q, scale, q_t and scale_t of x, of w and of v; scale_t is None where it is scale, all are None where the
                product casts.
        """
        casts, for_h = fresh_casts(scaling, pow2) if delayed is None else delayed.casts, for_x or for_w
        rows: Operand
        rows, of_w, of_v = ((*operands[i : i + 3], operands[i + 3 if operands[i + 3] is not None else i + 1]) for i in (0, 4, 8))
        if rows[0] is None and places is not None:
            rows = _cast_tokens(casts, x, offs, pairs, places)
        elif rows[0] is None:
            rows = casts.rows(rows_of(x, dtype if offs is None else x.dtype), offs, True, for_w and (keep or offs is not None))
        cast = of_w if of_w[0] is not None else casts.weights(w, for_x and keep)
        y = multiply(rows, cast, offs, dtype)
        kept = [*_kept(cast, w, for_x), *_kept(rows, x, for_w)]
        h = y if v is not None and for_h else None
        if v is not None:
            del rows, cast  # so that only the operands of the second product are alive, beside the kept tensors
            q, *q_t, scale = torch.ops.kerneltune.fp8_swiglu_2d(y, offs, layout="both" if for_v else "row")
            cast = of_v if of_v[0] is not None else casts.weights(v, for_h and keep)
            y = multiply((q, scale), cast, offs, dtype)
            kept += [*_kept(cast, v, for_h), *((*q_t, scale) if for_v else (None, None))]
        ctx.save_for_backward(offs, places, h, *kept)
        ctx.scaling, ctx.pow2, ctx.delayed, ctx.dtype, ctx.wanted = scaling, pow2, delayed, dtype, (for_x, for_w, for_v)
        ctx.shape, ctx.dtypes, ctx.count = x.shape, (x.dtype, w.dtype, None if v is None else v.dtype), len(operands)
        # in the result's shape, because FSDP2 warns of views; and no view, because autograd lets no caller change that in place
        return unsafe_view(y, [*x.shape[:-1], y.shape[1]]) if offs is None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        offs, places, h, *kept = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # unless the graph is kept; torch itself clears them, but only after this function
        (for_x, for_w, for_v), (x_dtype, w_dtype, v_dtype), dv = ctx.wanted, ctx.dtypes, None
        casts = fresh_casts(ctx.scaling, ctx.pow2) if ctx.delayed is None else ctx.delayed.casts
        last = (for_x, for_w) if v_dtype is None else (for_x or for_w, for_v)
        dy = list(casts.gradient(row_major(grads[0].reshape(-1, grads[0].shape[-1])), offs, *last))
        if v_dtype is not None:
            v, gated, kept = kept[4:6], kept[6:], kept[:4]
            dh: list[Any] = []
            if for_x or for_w:
                of_gated = _input_gradient(ctx, dy, v, offs, ctx.dtype)
                q, *q_t, scale = torch.ops.kerneltune.fp8_swiglu_bwd_2d(of_gated, h, offs, layout="both" if for_w else "row")
                dh = [q, scale, *(q_t or [None]), scale]
                del of_gated, h, q, q_t
            dv = _weight_gradient(ctx, dy, gated, offs, v_dtype) if for_v else None
            dy = dh
        w, x = kept[:2], kept[2:]
        del kept
        dx = _input_gradient(ctx, dy, w, offs, x_dtype) if for_x else None
        if dx is not None:
            dx = dx.view(ctx.shape) if places is None else torch.ops.kerneltune.moe_combine(dx, places, offs, None)
        dw = _weight_gradient(ctx, dy, x, offs, w_dtype) if for_w else None
        return (dx, dw, dv, *[None] * (11 + ctx.count))


def _cast_tokens(casts: Casts, x: Tensor, offs: Tensor | None, pairs: Tensor | None, places: Tensor) -> Operand:
    """Cast tokens (T, K) with one scale and copy them to their experts, in both layouts."""
    q, scale, *_ = casts.rows(x, None, True, False)
    q, q_t = torch.ops.kerneltune.moe_permute_fp8(q, pairs, offs, places.shape[1])
    return q, scale, q_t, scale


def _kept(cast: Operand, source: Tensor, is_wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors that the backward pass reads: the cast for it and its scale, or the source, to be cast there."""
    if not is_wanted:
        return None, None
    return (source, None) if cast[2] is None else (cast[2], cast[3])


def _input_gradient(ctx: Any, dy: list[Any], w: list[Any], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dX (M, K) of cast rows and of a weight as `_kept` returns it; both lists lose their first tensor."""
    (q, scale), (w_t, scale_w) = dy[:2], w
    if not torch.compiler.is_compiling():  # torch 2.11 lets traced code change no list of saved tensors
        dy[0] = w[0] = None
    if scale_w is not None:
        return multiply((q, scale), (w_t, scale_w), offs, dtype)
    made: Tensor = input_gradient(q, scale, w_t, offs, ctx.scaling, ctx.pow2, dtype)
    return made


def _weight_gradient(ctx: Any, dy: list[Any], x: list[Any], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dW (E, K, N), column-major, of cast rows and of rows as `_kept` returns them."""
    made: Tensor
    if x[1] is None:
        made = late_weight_gradient(*dy[2:], x[0], ctx.scaling, ctx.pow2, ctx.dtype, dtype)
    else:
        made = weight_gradient(dy[2:], x, offs, dtype)
    return made.t()[None] if offs is None else made.transpose(1, 2)


def fp8_product(
    x: Tensor,
    w: Tensor,
    recipe: Any,
    dtype: torch.dtype,
    *,
    v: Tensor | None = None,
    routing: Sequence[Tensor | None] = (None, None, None),
    casts: Sequence[Operand | None] = (None, None, None),
) -> Tensor:
    """Multiply with autograd; see `_Product`.

    Args:
        x, w, v, dtype: of `_Product`.
        recipe: a Recipe or a DelayedScaling.
        routing: pairs, places and offs; None for offs alone, or for a single group.
        casts: of x, w and v, as far as they were made before.
    """
    is_fresh = isinstance(recipe, Recipe)
    how = (recipe.scaling, recipe.pow2, recipe.keep_weights, None) if is_fresh else ("delayed", False, True, recipe)
    pairs, places, offs = routing
    wanted = [t is not None and wants_gradient(t) for t in (x, w, v)]
    operands = [
        t
        for q, scale, q_t, scale_t in (cast or NOT_CAST for cast in casts)
        for t in (q, scale, q_t, None if scale_t is scale else scale_t)
    ]  # torch.compile takes no tensor twice
    y: Tensor = _Product.apply(x, w, v, offs, pairs, places, *how, dtype, *wanted, *operands)  # type: ignore[no-untyped-call]
    return y


def wants_gradient(t: Tensor) -> bool:
    """Return whether a product that runs now needs a gradient for t."""
    return torch.is_grad_enabled() and t.requires_grad


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the type of a product's result with x: the autocast type, or else x's type."""
    kind = x.device.type
    in_region = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has no autocast, and torch raises
    return torch.get_autocast_dtype(kind) if in_region else x.dtype


def in_autocast(x: Tensor) -> Tensor:
    """Return x in the type of the autocast region, or x itself outside of autocast."""
    return x.to(output_dtype(x))
