"""Multiply groups of rows, or tokens routed to experts, by expert weights in fp8, with autograd.

Casts and products run on a GPU and in Triton's interpreter.
"""

from typing import Any

import torch
from torch import Tensor

from kerneltune.compat import assert_group_ends
from kerneltune.kernel_lib.arguments import check_like, debugging
from kerneltune.nn.alignment import row_major
from kerneltune.nn.delayed import DelayedScaling, delayed_product
from kerneltune.nn.fp8_products import Fp8Weights, cast_traced_weights, fp8_grouped_mm_da, fp8_grouped_mm_fwd
from kerneltune.nn.operands import check_ends, check_operands, check_weights, wants_gradient
from kerneltune.nn.recipes import Recipe, recipe_of
from kerneltune.nn.routing import Routing


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
    weights = checked_weights(A, B_t, how, weights, amax)
    if (check_offs or offs.device.type == "cpu") and type(offs) is Tensor and not torch.compiler.is_compiling():
        check_ends(offs, A.shape[0])
    elif debugging():
        assert_group_ends(offs, A.shape[0])
    return _product(row_major(A), B_t, offs, how, out_dtype or A.dtype, weights)


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
    given = checked_weights(x, B_t, recipe, weights, amax)
    return fresh_product(row_major(x), B_t, routing.offs, [routing.pairs, routing.places], recipe, x.dtype, given)


def checked_weights(
    A: Tensor, B_t: Tensor, recipe: Recipe | DelayedScaling, weights: Fp8Weights | None, amax: Tensor | None
) -> Fp8Weights | None:
    """Return the checked weights, or B_t cast by `amax` where `fp8_grouped_mm` uses that; None leaves the cast to the product.

    Raises:
        ValueError: weights or amax do not fit.
    """
    if weights is not None:
        check_weights(weights, B_t, recipe)
    elif amax is not None:
        check_like("amax", amax, (B_t.shape[0],), torch.float32, B_t.device)
        if (
            isinstance(recipe, Recipe)
            and recipe.scaling == "tensorwise"
            and recipe.pow2
            and recipe.keep_weights
            and wants_gradient(A)
        ):
            return cast_traced_weights(B_t, recipe, amax)
    return weights


def _product(
    A: Tensor, B_t: Tensor, offs: Tensor, recipe: Recipe | DelayedScaling, out_dtype: torch.dtype, weights: Fp8Weights | None
) -> Tensor:
    if isinstance(recipe, DelayedScaling):
        return delayed_product(A, B_t, offs, recipe, weights, out_dtype)
    return fresh_product(A, B_t, offs, [], recipe, out_dtype, weights)


def fresh_product(
    a: Tensor,
    b_t: Tensor,
    offs: Tensor,
    index: list[Tensor],
    recipe: Recipe,
    out_dtype: torch.dtype,
    weights: Fp8Weights | None,
) -> Tensor:
    """Return Y of `fp8_grouped_mm_fwd`, with autograd; nothing is checked."""
    y: Tensor = fp8_grouped_mm_fwd(
        a, b_t, offs, index, [] if weights is None else list(weights), recipe.scaling, recipe.pow2, recipe.keep_weights,
        out_dtype, wants_gradient(a), wants_gradient(b_t),
    )[0]  # fmt: skip
    return y


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, b_t, offs, index, weights, ctx.scaling, ctx.pow2, _, _, ctx.for_da, ctx.for_dw = inputs
    ctx.da_dtype, ctx.dw_dtype, ctx.lengths = a.dtype, b_t.dtype, (len(index), len(weights))
    made = output[1:]
    ctx.mark_non_differentiable(*made)
    ctx.set_materialize_grads(False)  # else autograd fills zeros as large as the kept tensors
    kept_a, made = (made[:2], made[2:]) if ctx.for_dw else ([], made)
    kept_w = (made or list(weights[2:]) or [b_t]) if ctx.for_da else []
    places = index[1:]
    ctx.counts = len(places), len(kept_a)
    ctx.save_for_backward(offs, *places, *kept_a, *kept_w)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    da, db_t = (None, None) if grads[0] is None else _gradients(ctx, row_major(grads[0]))
    num_index, num_weights = ctx.lengths
    return (da, db_t, None, [None] * num_index, [None] * num_weights, *[None] * 6)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the rows or tokens, and of b_t."""
    offs, *kept = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # unless the graph is kept; torch itself clears them, but only after this function
    num_places, num_rows = ctx.counts
    places, kept = kept[:num_places], kept[num_places:]
    a, w = kept[:num_rows], kept[num_rows:]
    del kept
    made = fp8_grouped_mm_da(dy, offs, w, ctx.scaling, ctx.pow2, ctx.da_dtype, ctx.for_da, ctx.for_dw)
    del w, dy
    da, db_t, ops = made[0] if ctx.for_da else None, None, torch.ops.kerneltune
    if ctx.for_dw:
        q, scale = made[-2:]
        db_t = ops.fp8_grouped_gemm(q, a[0], scale, a[1], offs, out_dtype=ctx.dw_dtype, aligned=True).transpose(1, 2)
    return ops.moe_add(da, *places, offs) if da is not None and places else da, db_t


fp8_grouped_mm_fwd.register_autograd(_backward, setup_context=_save)
