"""Multiply tokens by the experts that a router chose for them; tokens are cast before they are copied to their experts.

Under `tensorwise` one scale serves all copies of a token. So the copy moves bytes in place of bf16 values, a K-th of the rows is
cast, and results are those of `fp8_grouped_mm` on `permute_tokens`, to the bit, where every token has an expert.
"""

from torch import Tensor

from kerneltune.nn.alignment import row_major
from kerneltune.nn.fp8_products import Fp8Weights
from kerneltune.nn.grouped_mm import checked_weights, fresh_product
from kerneltune.nn.operands import check_operands
from kerneltune.nn.recipes import Recipe
from kerneltune.nn.routing import Routing


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
    return fresh_product(row_major(x), B_t, routing.offs, [routing.pairs, routing.places], recipe, x.dtype, given)
