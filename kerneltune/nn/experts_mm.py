"""Run experts in fp8 in a single function, from tokens to the rows of the second product.

    Y = swiglu(X W) V      for every group of rows with its own W and V

The function supports `tensorwise` scales that are powers of two. It writes neither the rows that SwiGLU gates nor their gradient
in 16 bits: both are cast while they are computed. `fp8_permuted_mm`, `swiglu` and `fp8_grouped_mm` in turn give the same results
up to a rounding of the gate.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.nn.alignment import row_major
from kerneltune.nn.fp8_products import Fp8Weights, cast_for_product, fp8_grouped_mm_da
from kerneltune.nn.grouped_mm import checked_weights
from kerneltune.nn.operands import check_operands, wants_gradient
from kerneltune.nn.recipes import Recipe
from kerneltune.nn.routing import Routing
from kerneltune.ops import fp8, moe_routing
from kerneltune.ops.fp8_grouped_gemm import fp8_grouped_gemm


class ExpertWeights(NamedTuple):
    """Hold the weight of a product, its fp8 cast and its expected magnitudes.

    Attributes:
        b_t: (E, K, N) as `fp8_grouped_mm` takes it.
        weights: b_t in fp8, or None.
        amax: the largest magnitudes expected of b_t, or None.
    """

    b_t: Tensor
    weights: Fp8Weights | None = None
    amax: Tensor | None = None


def fp8_experts_mm(x: Tensor, up: ExpertWeights, down: ExpertWeights, routing: Routing, recipe: Recipe) -> Tensor:
    """Send tokens through experts with SwiGLU, in fp8; differentiable once in x and both b_t.

    Args:
        x: (T, K) bf16, fp16 or fp32, rows contiguous.
        up: b_t (E, K, 2I), whose columns hold gate, then up.
        down: b_t (E, I, N).
        routing: of the same tokens.
        recipe: with tensorwise scaling and powers of two. The scale of the tokens covers tokens without an expert, too.

    Returns:
        (T k, N) in the order of `routing`, of x's type.

    Raises:
        ValueError: a wrong shape, stride, dtype or device, which it names.
    """
    check_operands(x, up.b_t, routing.offs, recipe, x.dtype)
    half = x.new_empty((0, up.b_t.shape[2] // 2))
    if up.b_t.shape[2] % 2 or down.b_t.shape[1] != half.shape[1]:
        raise ValueError(f"weights must be (E, K, 2I) and (E, I, N), got {tuple(up.b_t.shape)} and {tuple(down.b_t.shape)}")
    check_operands(half, down.b_t, routing.offs, recipe, x.dtype)
    given = [checked_weights(x, w.b_t, recipe, w.weights, w.amax) for w in (up, down)]
    y: Tensor = fp8_experts_mm_fwd(
        row_major(x), up.b_t, down.b_t, *routing, *([] if w is None else list(w) for w in given), recipe.keep_weights,
        wants_gradient(x), wants_gradient(up.b_t), wants_gradient(down.b_t),
    )[0]  # fmt: skip
    return y


@custom_op("kerneltune::fp8_experts_mm_fwd")
def fp8_experts_mm_fwd(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    pairs: Tensor,
    places: Tensor,
    offs: Tensor,
    given_up: list[Tensor],
    given_down: list[Tensor],
    keep_weights: bool,
    for_x: bool,
    for_up: bool,
    for_down: bool,
) -> list[Tensor]:
    """Return Y (T k, N), and the operands of the backward pass in the order of `_save`.

    Args:
        x, up, down: (T, K), (E, K, 2I) and (E, I, N).
        pairs, places, offs: of the routing.
        given_up, given_down: the fields of Fp8Weights, where the weight has been cast before, or none.
        keep_weights: of the recipe.
        for_x, for_up, for_down: which gradients will be asked for.
    """
    tokens = fp8.fp8_tensorwise_2d(x, inverse=True)
    assert tokens.q is not None
    q, q_t = moe_routing.moe_permute_fp8(tokens.q, pairs, offs, places.shape[1])
    w, scale_w, *w_t = given_up[:2] or cast_for_product(up, "tensorwise", True, both=for_x and keep_weights)
    h = fp8_grouped_gemm(q, w, tokens.scale, scale_w, offs, out_dtype=x.dtype)
    del q, w  # so that only the operands of the current product are alive, beside the kept tensors
    v, scale_v, *v_t = given_down[:2] or cast_for_product(down, "tensorwise", True, both=(for_x or for_up) and keep_weights)
    gated = fp8.fp8_swiglu_2d(h, offs, layout="both" if for_down else "row")
    assert gated.q is not None
    y = fp8_grouped_gemm(gated.q, v, gated.scale, scale_v, offs, out_dtype=x.dtype)
    kept = [h] if for_x or for_up else []
    kept += [q_t, tokens.scale] if for_up else []
    kept += [gated.q_t, gated.scale] if gated.q_t is not None else []
    return [y, *kept, *w_t, *v_t]


@fp8_experts_mm_fwd.register_fake
def _(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    pairs: Tensor,
    places: Tensor,
    offs: Tensor,
    given_up: list[Tensor],
    given_down: list[Tensor],
    keep_weights: bool,
    for_x: bool,
    for_up: bool,
    for_down: bool,
) -> list[Tensor]:
    M, (E, K, width), (_, inner, N), fp8_type = pairs.shape[0], up.shape, down.shape, torch.float8_e4m3fn
    made = [x.new_empty((M, N))]
    made += [x.new_empty((M, width))] if for_x or for_up else []
    for columns, wanted in ((K, for_up), (inner, for_down)):
        if wanted:
            made += [x.new_empty((columns, aligned_size(M, E)), dtype=fp8_type).t(), x.new_empty((1,), dtype=torch.float32)]
    for weight, given, wanted in ((up, given_up, for_x), (down, given_down, for_x or for_up)):
        if wanted and keep_weights and not given:
            made += [x.new_empty(weight.shape, dtype=fp8_type).transpose(1, 2), x.new_empty((E,), dtype=torch.float32)]
    return made


@custom_op("kerneltune::fp8_rows_mm")
def fp8_rows_mm(q: Tensor, scale: Tensor, weight: list[Tensor], offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply cast rows q (M, N) by cast weights (E, N, K) and their scale, or by the transpose of weights to be cast here."""
    w, scale_w = weight if len(weight) == 2 else cast_for_product(weight[0].transpose(1, 2), "tensorwise", True)
    return fp8_grouped_gemm(q, w, scale, scale_w, offs, out_dtype=out_dtype)


@fp8_rows_mm.register_fake
def _(q: Tensor, scale: Tensor, weight: list[Tensor], offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty((q.shape[0], weight[0].shape[2 if len(weight) == 2 else 1]), dtype=out_dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, up, down, _, places, offs, given_up, given_down, _, ctx.for_x, ctx.for_up, ctx.for_down = inputs
    ctx.dtype, ctx.dtypes, ctx.given = x.dtype, (up.dtype, down.dtype), (len(given_up), len(given_down))
    made = output[1:]
    ctx.mark_non_differentiable(*made)
    ctx.set_materialize_grads(False)  # else autograd fills zeros as large as the kept tensors
    num_rows = (ctx.for_x or ctx.for_up) + 2 * ctx.for_up + 2 * ctx.for_down
    rows, cast = made[:num_rows], made[num_rows:]
    weights = []
    for weight, given, wanted in ((up, given_up, ctx.for_x), (down, given_down, ctx.for_x or ctx.for_up)):
        kept = [] if not wanted else given[2:] or cast[:2] or [weight]
        cast = cast if given or not wanted else cast[2:]
        weights.append(kept)
    ctx.counts = num_rows, len(weights[0])
    ctx.save_for_backward(places, offs, *rows, *weights[0], *weights[1])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    places, offs, *kept = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # unless the graph is kept; torch itself clears them, but only after this function
    dx, d_up, d_down = (None, None, None) if grads[0] is None else _gradients(ctx, row_major(grads[0]), places, offs, kept)
    return (dx, d_up, d_down, *[None] * 3, [None] * ctx.given[0], [None] * ctx.given[1], *[None] * 4)


def _gradients(ctx: Any, dy: Tensor, places: Tensor, offs: Tensor, kept: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, up and down. The list `kept` loses each tensor at its last use, so that its memory is free."""
    ops, for_rows = torch.ops.kerneltune, ctx.for_x or ctx.for_up
    num_rows, num_up = ctx.counts
    w, v = kept[num_rows : num_rows + num_up], kept[num_rows + num_up :]
    rows = kept[:num_rows]
    kept.clear()
    made = fp8_grouped_mm_da(dy, offs, v, "tensorwise", True, ctx.dtype, for_rows, ctx.for_down)
    del v, dy
    dx, d_up, d_down, cast = None, None, None, []
    if for_rows:
        cast = list(ops.fp8_swiglu_bwd_2d(made.pop(0), rows.pop(0), offs, layout="both" if ctx.for_up else "row"))
    if ctx.for_down:
        q_t, scale = rows[-2:]
        del rows[-2:]
        d_down = ops.fp8_grouped_gemm(made[0], q_t, made[1], scale, offs, out_dtype=ctx.dtypes[1], aligned=True).transpose(1, 2)
        del q_t
    made.clear()
    if ctx.for_x:
        dx = ops.moe_add(fp8_rows_mm(cast[0], cast[-1], w, offs, ctx.dtype), places, offs)
    del w
    if ctx.for_up:
        dq_t, d_scale = cast[1:]
        cast.clear()  # the rows of dH, before the gradient of up, the largest of all, is made
        d_up = ops.fp8_grouped_gemm(dq_t.t(), rows[0], d_scale, rows[1], offs, out_dtype=ctx.dtypes[0], aligned=True)
        d_up = d_up.transpose(1, 2)
    return dx, d_up, d_down


fp8_experts_mm_fwd.register_autograd(_backward, setup_context=_save)
