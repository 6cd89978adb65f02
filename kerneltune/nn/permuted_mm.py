"""Multiply tokens by the experts that a router chose for them; tokens are cast before they are copied to their experts.

Under `tensorwise` one scale serves all copies of a token. So the copy moves bytes in place of bf16 values, a K-th of the rows is
cast, and results are those of `fp8_grouped_mm` on `permute_tokens`, to the bit, where every token has an expert.
"""

from typing import Any

import torch
from torch import Tensor

from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.nn.alignment import row_major
from kerneltune.nn.fp8_products import Fp8Weights, cast_for_product
from kerneltune.nn.grouped_mm import checked_weights, gradients, keep_casts
from kerneltune.nn.operands import check_operands, wants_gradient
from kerneltune.nn.recipes import Recipe
from kerneltune.nn.routing import Routing
from kerneltune.ops import fp8, moe_routing
from kerneltune.ops.fp8_grouped_gemm import fp8_grouped_gemm


def fp8_permuted_mm(
    x: Tensor,
    B_t: Tensor,
    routing: Routing,
    recipe: Recipe,
    *,
    weights: Fp8Weights | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """Multiply each token by the matrices of its experts, in fp8; differentiable once in x and B_t.

    Args:
        x: (T, K) bf16, fp16 or fp32, rows contiguous.
        B_t: (E, K, N) as `fp8_grouped_mm` takes it.
        routing: of the same tokens.
        recipe: with tensorwise scaling. The scale is of all tokens, also of those without an expert.
        weights, amax: as `fp8_grouped_mm` takes them.

    Returns:
        (T k, N) in the order of `routing`, of x's type.

    Raises:
        ValueError: a wrong shape, stride, dtype or device, which it names.
    """
    check_operands(x, B_t, routing.offs, recipe)
    given = checked_weights(x, B_t, recipe, weights, amax)
    y: Tensor = fp8_permuted_mm_fwd(
        row_major(x), B_t, *routing, [] if given is None else list(given), recipe.pow2, recipe.keep_weights,
        wants_gradient(x), wants_gradient(B_t),
    )[0]  # fmt: skip
    return y


@custom_op("kerneltune::fp8_permuted_mm_fwd")
def fp8_permuted_mm_fwd(
    x: Tensor,
    b_t: Tensor,
    pairs: Tensor,
    places: Tensor,
    offs: Tensor,
    weights: list[Tensor],
    pow2: bool,
    keep_weights: bool,
    for_da: bool,
    for_dw: bool,
) -> list[Tensor]:
    """Return Y (T k, N) and what the backward pass can use of the casts, as `fp8_grouped_mm_fwd` does.

    Args:
        x: (T, K), as `fp8_permuted_mm` takes it.
        b_t, weights, pow2, keep_weights, for_da, for_dw: as `fp8_grouped_mm_fwd` takes them.
        pairs, places, offs: of the routing.
    """
    cast = fp8.fp8_tensorwise_2d(x, pow2=pow2, inverse=True)
    assert cast.q is not None
    q, q_t = moe_routing.moe_permute_fp8(cast.q, pairs, offs, places.shape[1])
    if weights:
        (w, scale_w), w_t = weights[:2], []
    else:
        w, scale_w, *w_t = cast_for_product(b_t, "tensorwise", pow2, both=for_da and keep_weights)
    y = fp8_grouped_gemm(q, w, cast.scale, scale_w, offs, out_dtype=x.dtype)
    return [y, *([q_t, cast.scale] if for_dw else []), *w_t]


@fp8_permuted_mm_fwd.register_fake
def _(
    x: Tensor,
    b_t: Tensor,
    pairs: Tensor,
    places: Tensor,
    offs: Tensor,
    weights: list[Tensor],
    pow2: bool,
    keep_weights: bool,
    for_da: bool,
    for_dw: bool,
) -> list[Tensor]:
    M, (E, K, N) = pairs.shape[0], b_t.shape
    made = [x.new_empty((M, N))]
    if for_dw:
        made += [x.new_empty((K, aligned_size(M, E)), dtype=torch.float8_e4m3fn).t()]
        made += [x.new_empty((1,), dtype=torch.float32)]
    if for_da and keep_weights and not weights:
        made += [x.new_empty((E, K, N), dtype=torch.float8_e4m3fn).transpose(1, 2)]
        made += [x.new_empty((E,), dtype=torch.float32)]
    return made


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, b_t, _, places, offs, weights, pow2, keep_weights, for_da, for_dw = inputs
    keep_casts(ctx, (x, b_t), (places, offs), weights, ("tensorwise", pow2, keep_weights, x.dtype, for_da, for_dw), output)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    (places, offs), da, db_t = gradients(ctx, grads[0])
    dx = None if da is None else torch.ops.kerneltune.moe_add(da, places, offs)
    return (dx, db_t, *[None] * 3, [None] * ctx.given, *[None] * 4)


fp8_permuted_mm_fwd.register_autograd(_backward, setup_context=_save)
