"""Multiply groups of rows, or tokens routed to experts, by expert weights in fp8, with autograd.

Casts and products run on a GPU and in Triton's interpreter.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kerneltune.compat import assert_group_ends, untraced
from kerneltune.kernel_lib.arguments import check_like, debugging
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.fp8_products import Fp8Weights, Operand, cast_product_weights, fp8_product, wants_gradient
from kerneltune.nn.operands import check_ends, check_operands, check_weights
from kerneltune.nn.recipes import Recipe, recipe_of
from kerneltune.nn.routing import Routing

_untraced_product: Callable[..., Tensor] = untraced(fp8_product)


def fp8_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    *,
    recipe: str | Recipe | DelayedScaling = "tensorwise",
    out_dtype: torch.dtype | None = None,
    weights: Fp8Weights | None = None,
    amax: Tensor | None = None,
    check_offs: bool = False,
) -> Tensor:
    """Multiply the rows of A by their group's matrix, in fp8 with fp32 accumulation; differentiable once in A and B_t, in fp8.

    Compiles without a graph break and can be captured: no step of it waits for the GPU.

    Args:
        A: (M, K) bf16, fp16 or fp32, rows contiguous.
        B_t: (E, K, N) bf16, fp16 or fp32, column-major, which is the transposed view of a contiguous (E, N, K), or contiguous. K
            and N multiples of 16. Its gradient is column-major.
        offs: (E,) int32, E to 1024, where each group's rows end, not decreasing, at most M. Groups may be empty and of any size.
            Rows behind the last group have no part in scales and gradients; the result has zeros there.
        recipe: `tensorwise`, `rowwise`, or a Recipe; or a DelayedScaling, with which the graph breaks.
        out_dtype: of the result; None is A's.
        weights: B_t in fp8 by the same recipe, if it has been cast before, as GroupedLinear does.
        amax: (E,) fp32, the largest magnitudes of B_t at the last cast, zeros at first; the caller keeps the tensor from step to
            step, and the cast updates it. Under `tensorwise` with powers of two, a cast reads B_t once instead of twice while
            the scales stay. No result depends on it. Used only where the backward pass needs the weights' transpose.
        check_offs: whether to check the order of offs, which waits for the GPU. The CPU always checks it. Under TRITON_DEBUG=1
            the GPU asserts it.

    Returns:
        (M, N), contiguous. Of A the backward keeps M K bytes; of the weights E K N bytes with `Recipe.keep_weights`, unless they
        are passed in.

    Raises:
        ValueError: a wrong shape, stride, dtype, device or recipe, which it names; a DTensor; offs that were checked.

    Source: torchao's rowwise grouped product for MoE training and its pull requests 4179 and 4389, from their contract.
    """
    how = recipe if isinstance(recipe, DelayedScaling) else recipe_of(recipe)
    check_operands(A, B_t, offs, how, out_dtype)
    given = _checked_weights(A, B_t, how, weights, amax)
    if (check_offs or offs.device.type == "cpu") and type(offs) is Tensor and not torch.compiler.is_compiling():
        check_ends(offs, A.shape[0])
    elif debugging():
        assert_group_ends(offs, A.shape[0])
    dtype = out_dtype or A.dtype
    multiply = _untraced_product if isinstance(how, DelayedScaling) else fp8_product
    return multiply(A, B_t, how, dtype, routing=(None, None, offs), given=(None, given, None))


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

    Because one `tensorwise` scale serves all copies of a token, tokens are cast before they are copied to their experts: the copy
    moves bytes in place of bf16 values, and a K-th of the rows is cast. Where every token has an expert, results have the bits
    of `fp8_grouped_mm` on `permute_tokens`.

    Args:
        x: (T, K) bf16, fp16 or fp32, rows contiguous.
        B_t: (E, K, N) as `fp8_grouped_mm` takes it.
        routing: of the same tokens.
        recipe: with tensorwise scaling. The scale covers tokens without an expert, too.
        weights, amax: as `fp8_grouped_mm` takes them.

    Returns:
        (T k, N) in the order of `routing`, of x's type.

    Raises:
        ValueError: a wrong shape, stride, dtype or device, which it names.
    """
    check_operands(x, B_t, routing.offs, recipe)
    given = _checked_weights(x, B_t, recipe, weights, amax)
    return fp8_product(x, B_t, recipe, x.dtype, routing=routing, given=(None, given, None))


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
    """Send tokens through experts with SwiGLU, in fp8, swiglu(X W) V; differentiable once in x and both b_t.

    The rows that SwiGLU gates and their gradient are never written in 16 bits. `fp8_permuted_mm`, `swiglu` and `fp8_grouped_mm`
    in turn give the same results up to a rounding of the gate.

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
    given = [_checked_weights(x, w.b_t, recipe, w.weights, w.amax) for w in (up, down)]
    return fp8_product(x, up.b_t, recipe, x.dtype, v=down.b_t, routing=routing, given=(None, *given))


def _checked_weights(
    A: Tensor, B_t: Tensor, recipe: Recipe | DelayedScaling, weights: Fp8Weights | None, amax: Tensor | None
) -> Operand | None:
    """Return the checked weights, or B_t cast by `amax` where `fp8_grouped_mm` uses that; None leaves the cast to the product.

    Raises:
        ValueError: weights or amax do not fit.
    """
    if weights is not None:
        check_weights(weights, B_t, recipe)
    elif amax is not None:
        check_like("amax", amax, (B_t.shape[0],), torch.float32, B_t.device)
        is_used = isinstance(recipe, Recipe) and recipe.scaling == "tensorwise" and recipe.pow2 and recipe.keep_weights
        if is_used and wants_gradient(A):
            return cast_product_weights("tensorwise", True, B_t.detach(), True, amax)
    return weights
