"""Multiply in fp8, forward and backward: the casts of the operands, and the autograd function of all layers.

    Y = X W      dX = dY Wᵀ      dW = Xᵀ dY      for every group of rows with its own W, or for all rows with one W
    Y = swiglu(X W) V            with a second weight, tensor-wise: SwiGLU and its gradient are cast while they are computed

Launches of a grouped product, forward and backward: tensorwise 9, rowwise 6; with weights already cast 7 and 5; delayed 6.
Shapes and types of arguments are not checked.
"""

from collections.abc import Iterable, Sequence
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


class Operand(NamedTuple):
    """Hold rows, or a weight (E, K, N), in fp8 for two products; a tensor that no product reads is None.

    Attributes:
        q, scale: values and their scale for the product that gives Y; of dY for the product that gives dX.
        q_t, scale_t: values and their scale for the other product, which gives dW, or dX of a weight; scale_t may be scale.
    """

    q: Tensor | None = None
    scale: Tensor | None = None
    q_t: Tensor | None = None
    scale_t: Tensor | None = None


NOT_CAST = Operand()


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


AnyOperand = Operand | Fp8Weights
Pair = Sequence[Tensor | None]
"""q and scale, the beginning of an operand, or q_t and scale_t, its end."""


def cast_rows(scaling: str, pow2: bool, x: Tensor, offs: Tensor | None, along: bool, down: bool) -> Operand:
    """Cast x (M, K) along its rows for the product with a weight, and down its columns for dW.

    Rows behind the last group have no part in any scale. With offs the cast for dW holds aligned groups.
    """
    ops, options = torch.ops.kerneltune, {"pow2": pow2, "inverse": True}
    if scaling == "tensorwise":
        layout = "both" if along and down else "row" if along else "col"
        *made, scale = ops.fp8_tensorwise_2d(x, layout=layout, offs=offs, **options)
        return Operand(made[0] if along else None, scale, made[-1] if down else None, scale)
    if along and not down:
        q, scale = ops.fp8_rowwise_2d(x, **options)
        return Operand(q, scale.view(-1))
    ends = one_group(x) if offs is None else offs
    shape, options["aligned"] = (ends.shape[0], x.shape[1]), offs is not None
    if not along:
        q_t, scale_t = ops.fp8_group_colwise(x, ends, **options)
        return Operand(q_t=q_t, scale_t=scale_t.view(shape))
    q, scale, q_t, scale_t = ops.fp8_group_both(x, ends, **options)
    return Operand(q, scale.view(-1), q_t, scale_t.view(shape))


def one_group(rows: Tensor) -> Tensor:
    """Return the end of all rows as a single group."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)


def cast_weights(scaling: str, pow2: bool, b: Tensor, both: bool, amax: Tensor | None = None) -> Operand:
    """Cast a weight b (E, K, N) of either order for the forward product, and with `both` for dX.

    amax: of `fp8_tensorwise_3d`; ignored under `rowwise`, and without `both` or pow2.
    """
    if not torch.compiler.is_compiling():
        _check_device(b)
    is_contiguous = b.is_contiguous()
    w, ops, options = b.mT if is_contiguous else b, torch.ops.kerneltune, {"pow2": pow2, "inverse": True}
    E, _, N = w.shape
    if both:
        if scaling == "rowwise":
            q, scale, q_t, scale_t = ops.fp8_rowwise_3d_both(w, **options)
            scale = scale.view(E, N)
        elif amax is not None and pow2:
            q, scale, q_t = expected_weights(w, amax)
            scale_t = scale
        else:
            q, q_t, scale = ops.fp8_tensorwise_3d(w, layout="both", **options)
            scale_t = scale
        return Operand(q_t, scale_t, q, scale) if is_contiguous else Operand(q, scale, q_t, scale_t)
    if scaling == "tensorwise":
        q, scale = ops.fp8_tensorwise_3d(w, layout="col" if is_contiguous else "row", **options)
    elif is_contiguous:
        q, scale = ops.fp8_rowwise_3d_transpose(w, **options)
    else:
        q, scale = ops.fp8_colwise_3d(w, **options)
        scale = scale.view(E, N)
    return Operand(q, scale)


def fp8_weights(b: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Fp8Weights:
    """Return a weight b (E, K, N) of either order in fp8, in both layouts; amax: of `cast_weights`."""
    return Fp8Weights(*cast_weights(recipe.scaling, recipe.pow2, b, True, amax))  # type: ignore[arg-type]


def write_weights(into: Fp8Weights, b: Tensor, recipe: Recipe, amax: Tensor) -> None:
    """Overwrite the tensors of an earlier cast of a weight of this size and recipe by b (E, K, N) of either order."""
    if b.is_contiguous():
        b, into = b.mT, into.transposed()
    if recipe.scaling == "tensorwise":
        out = fp8.SegmentOutput(into.q, into.q_t, into.scale)
        fp8.fp8_tensorwise_3d(b, layout="both", pow2=recipe.pow2, inverse=True, amax=amax, out=out)
    else:
        both = fp8.BothLayouts(into.q, into.scale.unsqueeze(1), into.q_t, into.scale_t)
        fp8.fp8_rowwise_3d_both(b, pow2=recipe.pow2, inverse=True, out=both)


def _check_device(w: Tensor) -> None:
    if not (w.is_cuda or INTERPRETED or w.is_meta):
        raise ValueError(f"weights must be on a GPU, or kernels interpreted (TRITON_INTERPRET=1), got weights on {w.device}")


@custom_op("kerneltune::fp8_expected_weights", mutates_args=("amax",))
def expected_weights(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast w (E, K, N) tensor-wise per expert and write its largest magnitudes to amax: q, scale and q_t."""
    made = fp8.fp8_tensorwise_3d(w, layout="both", inverse=True, amax=amax)
    assert made.q is not None and made.q_t is not None
    return made.q, made.scale, made.q_t


@expected_weights.register_fake
def _(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, q_t, scale = torch.ops.kerneltune.fp8_tensorwise_3d(w, layout="both", inverse=True)
    return q, scale, q_t


def multiply(x: Pair, w: Pair, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply rows (M, K), in groups that end at offs, with w (E, K, N), or all rows with w (1, K, N); q and scale of both."""
    q, scale, q_w, scale_w = *x[:2], *w[:2]
    assert q is not None and scale is not None and q_w is not None and scale_w is not None
    if offs is None:
        return _multiply_all(q, q_w[0], scale, scale_w, dtype)
    y: Tensor = torch.ops.kerneltune.fp8_grouped_gemm(q, q_w, scale, scale_w, offs, out_dtype=dtype)
    return y


def weight_gradient(dy: Pair, x: Pair, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dW (E, N, K), or (N, K) of all rows, of q_t and scale_t of dY and of X."""
    dy_t, scale_dy, x_t, scale_x = *dy[-2:], *x[-2:]
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
    return multiply((q, scale), cast_weights(scaling, pow2, b.mT, False), offs, dtype)


@input_gradient.register_fake
def _(q: Tensor, scale: Tensor, b: Tensor, offs: Tensor | None, scaling: str, pow2: bool, dtype: torch.dtype) -> Tensor:
    return q.new_empty((q.shape[0], b.shape[1]), dtype=dtype)


@custom_op("kerneltune::fp8_late_weight_gradient")
def late_weight_gradient(
    dy_t: Tensor, scale: Tensor, x: Tensor, scaling: str, pow2: bool, x_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return dW (N, K) of all rows, of the cast of dY and of x (…, K), which is cast here in x_dtype as in the forward pass."""
    cast = cast_rows(scaling, pow2, rows_of(x, x_dtype), None, False, True)
    return weight_gradient((dy_t, scale), cast, None, dtype)


@late_weight_gradient.register_fake
def _(dy_t: Tensor, scale: Tensor, x: Tensor, scaling: str, pow2: bool, x_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    return x.new_empty((dy_t.shape[1], x.shape[-1]), dtype=dtype)


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x (…, K) as rows (M, K) of a type."""
    return row_major(x.reshape(-1, x.shape[-1]).to(dtype))


class _Settings(NamedTuple):
    """Hold the plain values of a product.

    Attributes:
        scaling, pow2, keep: fields of the Recipe.
        delayed: a DelayedScaling in place of scaling and pow2, or None.
        dtype: type of the result.
        for_x, for_w, for_v: whether the backward pass computes the gradient of x, w or v.
    """

    scaling: str
    pow2: bool
    keep: bool
    delayed: Any
    dtype: torch.dtype
    for_x: bool
    for_w: bool
    for_v: bool


def _cast_rows(settings: _Settings, x: Tensor, offs: Tensor | None, along: bool, down: bool, is_gradient: bool) -> Operand:
    if settings.delayed is None:
        return cast_rows(settings.scaling, settings.pow2, x, offs, along, down)
    return settings.delayed.cast_rows(x, offs, is_gradient)  # type: ignore[no-any-return]


def _cast_weights(settings: _Settings, b: Tensor, both: bool) -> AnyOperand:
    if settings.delayed is None:
        return cast_weights(settings.scaling, settings.pow2, b, both)
    return settings.delayed.cast_weights(b.mT)  # type: ignore[no-any-return]


def _flat(tensors: Iterable[Tensor | None], settings: _Settings, operands: Iterable[AnyOperand | None]) -> list[Any]:
    """Return the arguments of `_Product`: torch.compile guards on tensors and plain values alone, and takes no tensor twice.

    Args:
        tensors: x, w, v, and pairs, places and offs of a Routing.
        settings: settings of the product.
        operands: x, w and v as far as they were cast before.
    """
    found = [*tensors, *settings]
    for operand in operands:
        q, scale, q_t, scale_t = operand or NOT_CAST
        found += (q, scale, q_t, None if scale_t is scale else scale_t)
    return found


def _unflat(flat: Sequence[Any]) -> tuple[Sequence[Any], _Settings, list[Operand]]:
    """Return the tensors, settings and operands of `_flat`."""
    tensors, settings, rest = flat[:6], _Settings(*flat[6:14]), flat[14:]
    operands = []
    for i in (0, 4, 8):
        q, scale, q_t, scale_t = rest[i : i + 4]
        operands.append(NOT_CAST if q is None else Operand(q, scale, q_t, scale if scale_t is None else scale_t))
    return tensors, settings, operands


class _Product(torch.autograd.Function):
    """Compute Y = X W, or Y = swiglu(X W) V, and the gradients, by the arguments of `_flat`.

    The backward pass releases each tensor at its last use, so that nothing else waits beside dW, the largest tensor.
    """

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Tensor:
        """Return Y, and keep the operands of the gradients."""
        (x, w, v, pairs, places, offs), settings, (rows, of_w, of_v) = _unflat(flat)
        _, _, keep, _, dtype, for_x, for_w, for_v = settings
        for_h = for_x or for_w
        if rows.q is None and places is not None:
            rows = _cast_tokens(settings, x, pairs, places, offs)
        elif rows.q is None:
            for_dw = for_w and (keep or offs is not None)
            rows = _cast_rows(settings, rows_of(x, dtype if offs is None else x.dtype), offs, True, for_dw, False)
        cast = _cast_weights(settings, w, for_x and keep) if of_w.q is None else of_w
        y = multiply(rows, cast, offs, dtype)
        kept = [*_kept(cast, w, for_x), *_kept(rows, x, for_w)]
        h = y if v is not None and for_h else None
        if v is not None:
            del rows, cast  # so that only the operands of the second product are alive, beside the kept tensors
            q, *q_t, scale = torch.ops.kerneltune.fp8_swiglu_2d(y, offs, layout="both" if for_v else "row")
            cast = _cast_weights(settings, v, for_h and keep) if of_v.q is None else of_v
            y = multiply((q, scale), cast, offs, dtype)
            kept += [*_kept(cast, v, for_h), *((*q_t, scale) if for_v else (None, None))]
        ctx.save_for_backward(offs, places, h, *kept)
        ctx.settings, ctx.shape, ctx.count = settings, x.shape, len(flat)
        ctx.dtypes = x.dtype, w.dtype, None if v is None else v.dtype
        # in the result's shape, because FSDP2 warns of views; and no view, because autograd lets no caller change that in place
        return unsafe_view(y, [*x.shape[:-1], y.shape[1]]) if offs is None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        offs, places, h, *kept = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # unless the graph is kept; torch itself clears them, but only after this function
        settings, (x_dtype, w_dtype, v_dtype), dv = ctx.settings, ctx.dtypes, None
        *_, for_x, for_w, for_v = settings
        last = (for_x, for_w) if v_dtype is None else (for_x or for_w, for_v)
        dy: list[Any] = list(_cast_rows(settings, row_major(grads[0].reshape(-1, grads[0].shape[-1])), offs, *last, True))
        if v_dtype is not None:
            v, gated, kept = kept[4:6], kept[6:], kept[:4]
            dh: list[Any] = []
            if for_x or for_w:
                of_gated = _input_gradient(settings, dy, v, offs, settings.dtype)
                q, *q_t, scale = torch.ops.kerneltune.fp8_swiglu_bwd_2d(of_gated, h, offs, layout="both" if for_w else "row")
                dh = [q, scale, *(q_t or [None]), scale]
                del of_gated, h, q, q_t
            dv = _weight_gradient(settings, dy, gated, offs, v_dtype) if for_v else None
            dy = dh
        w, x = kept[:2], kept[2:]
        del kept
        dx = _input_gradient(settings, dy, w, offs, x_dtype) if for_x else None
        if dx is not None:
            dx = dx.view(ctx.shape) if places is None else torch.ops.kerneltune.moe_combine(dx, places, offs, None)
        dw = _weight_gradient(settings, dy, x, offs, w_dtype) if for_w else None
        return (dx, dw, dv, *[None] * (ctx.count - 3))


def _cast_tokens(settings: _Settings, x: Tensor, pairs: Tensor, places: Tensor, offs: Tensor) -> Operand:
    """Cast tokens (T, K) with one scale and copy them to their experts, in both layouts."""
    q, scale, *_ = _cast_rows(settings, x, None, True, False, False)
    q, q_t = torch.ops.kerneltune.moe_permute_fp8(q, pairs, offs, places.shape[1])
    return Operand(q, scale, q_t, scale)


def _kept(cast: AnyOperand, source: Tensor, is_wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors that the backward pass reads: the cast for it and its scale, or the source, to be cast there."""
    if not is_wanted:
        return None, None
    return (source, None) if cast.q_t is None else (cast.q_t, cast.scale_t)


def _input_gradient(settings: _Settings, dy: list[Any], w: list[Any], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dX (M, K) of cast rows and of a weight as `_kept` returns it; both lists lose their first tensor."""
    (q, scale), (w_t, scale_w) = dy[:2], w
    if not torch.compiler.is_compiling():  # torch 2.11 lets traced code change no list of saved tensors
        dy[0] = w[0] = None
    if scale_w is not None:
        return multiply((q, scale), (w_t, scale_w), offs, dtype)
    made: Tensor = input_gradient(q, scale, w_t, offs, settings.scaling, settings.pow2, dtype)
    return made


def _weight_gradient(settings: _Settings, dy: list[Any], x: list[Any], offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dW (E, K, N), column-major, of cast rows and of rows as `_kept` returns them."""
    made: Tensor
    if x[1] is None:
        made = late_weight_gradient(*dy[2:], x[0], settings.scaling, settings.pow2, settings.dtype, dtype)
    else:
        made = weight_gradient(dy, x, offs, dtype)
    return made.t()[None] if offs is None else made.transpose(1, 2)


def fp8_product(
    x: Tensor,
    w: Tensor,
    recipe: Any,
    dtype: torch.dtype,
    *,
    v: Tensor | None = None,
    routing: Sequence[Tensor | None] = (None, None, None),
    casts: Sequence[AnyOperand | None] = (None, None, None),
) -> Tensor:
    """Multiply with autograd: Y = X W, or Y = swiglu(X W) V.

    Args:
        x: rows (M, K); tokens (T, K) with pairs and places; (…, K) without offs.
        w, v: (E, K, N) and (E, N / 2, N2), of either order.
        recipe: a Recipe or a DelayedScaling.
        dtype: type of the result.
        routing: pairs, places and offs of a Routing; offs alone for rows that are sorted; none of them for a single group.
        casts: earlier casts of x, w and v; None for an operand that is cast here.
    """
    is_fresh, with_grad = isinstance(recipe, Recipe), torch.is_grad_enabled()
    settings = _Settings(
        recipe.scaling if is_fresh else "",
        is_fresh and recipe.pow2,
        not is_fresh or recipe.keep_weights,
        None if is_fresh else recipe,
        dtype,
        with_grad and x.requires_grad,
        with_grad and w.requires_grad,
        with_grad and v is not None and v.requires_grad,
    )
    y: Tensor = _Product.apply(*_flat((x, w, v, *routing), settings, casts))  # type: ignore[no-untyped-call]
    return y


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the type of a product's result with x: the autocast type, or else x's type."""
    kind = x.device.type
    in_region = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has no autocast, and torch raises
    return torch.get_autocast_dtype(kind) if in_region else x.dtype


def in_autocast(x: Tensor) -> Tensor:
    """Return x in the type of the autocast region, or x itself outside of autocast."""
    return x.to(output_dtype(x))
