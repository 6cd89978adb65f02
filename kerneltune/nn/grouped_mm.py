"""Grouped matrix products of mixture-of-experts training in fp8: a function with autograd.

Casts and products run on a GPU and in Triton's interpreter. May import its neighbours, ops.
"""

from typing import Any

import torch
from torch import Tensor

from kerneltune.kernel_lib.arguments import assert_group_ends, check_like, debugging
from kerneltune.nn.alignment import row_major
from kerneltune.nn.delayed import DelayedScaling, delayed_product
from kerneltune.nn.fp8_products import Fp8Weights, cast_expected_weights, fp8_grouped_mm_da, fp8_grouped_mm_fwd
from kerneltune.nn.operands import check_ends, check_operands, check_weights, wants_gradient
from kerneltune.nn.recipes import Recipe, recipe_of


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
    """Rows of A times their group's matrix, in fp8 with fp32 accumulation; differentiable once in A and B_t, also in fp8.

    Compiles without a graph break and can be captured: no step of it waits for the GPU.

    Args:
        A: (M, K) bf16, fp16 or fp32, rows contiguous.
        B_t: (E, K, N) bf16, fp16 or fp32, column-major, which is the transposed view of a contiguous (E, N, K), or contiguous. K
            and N multiples of 16. Its gradient is column-major.
        offs: (E,) int32, E to 1024, where each group's rows end, not decreasing, at most M. Groups may be empty and of any size.
            Rows behind the last have no part in scales and gradients; those of results are zeros.
        recipe: `tensorwise`, `rowwise`, or a Recipe; or a DelayedScaling, with which the graph breaks.
        out_dtype: of the result; None is A's.
        weights: B_t in fp8 by the same recipe, if it has been cast before, as GroupedLinear does.
        amax: (E,) fp32 that stays from step to step, zeros at first: under `tensorwise` what the largest magnitudes of B_t were,
            by which they are cast in one go while their scales stay; no result depends on it. Taken where the backward shall
            have the weights' transpose, with powers of two.
        check_offs: check what is said of offs, which waits for the GPU; on the CPU it is always checked. Under TRITON_DEBUG=1
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


def checked_weights(
    A: Tensor, B_t: Tensor, recipe: Recipe | DelayedScaling, weights: Fp8Weights | None, amax: Tensor | None
) -> Fp8Weights | None:
    """Return weights, checked; or B_t cast by `amax`, where `fp8_grouped_mm` takes that; None leaves the cast to the product.

    Raises:
        ValueError: weights or amax do not fit.
    """
    if weights is not None:
        check_weights(weights, B_t, recipe)
    elif amax is not None:
        check_like("amax", amax, (B_t.shape[0],), torch.float32, B_t.device)
        is_tensorwise = isinstance(recipe, Recipe) and recipe.scaling == "tensorwise" and recipe.pow2
        if is_tensorwise and recipe.keep_weights and wants_gradient(A):
            return cast_expected_weights(B_t, amax)
    return weights


def _product(
    A: Tensor, B_t: Tensor, offs: Tensor, recipe: Recipe | DelayedScaling, out_dtype: torch.dtype, weights: Fp8Weights | None
) -> Tensor:
    if isinstance(recipe, DelayedScaling):
        return delayed_product(A, B_t, offs, recipe, weights, out_dtype)
    y: Tensor = fp8_grouped_mm_fwd(
        A, B_t, offs, [] if weights is None else list(weights), recipe.scaling, recipe.pow2, recipe.keep_weights, out_dtype,
        wants_gradient(A), wants_gradient(B_t),
    )[0]  # fmt: skip
    return y


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, b_t, offs, weights, *rest = inputs
    keep_casts(ctx, (a, b_t), (offs,), weights, tuple(rest), output)


def keep_casts(
    ctx: Any,
    operands: tuple[Tensor, Tensor],
    index: tuple[Tensor, ...],
    weights: list[Tensor],
    options: tuple[Any, ...],
    output: list[Tensor],
) -> None:
    """Save what `gradients` needs of a forward product.

    Args:
        operands: the rows or tokens, and b_t.
        index: integers that the backward pass reads.
        weights: as `fp8_grouped_mm_fwd` takes them.
        options: of `fp8_grouped_mm_fwd`, from scaling on.
        output: of the forward product.
    """
    (a, b_t), (ctx.scaling, ctx.pow2, _, _, ctx.for_da, ctx.for_dw) = operands, options
    ctx.da_dtype, ctx.dw_dtype, ctx.given = a.dtype, b_t.dtype, len(weights)
    made = output[1:]
    ctx.mark_non_differentiable(*made)
    ctx.set_materialize_grads(False)  # else autograd fills zeros as large as what was kept
    kept_a, kept_w = [], list(weights[2:]) or [b_t]
    if ctx.for_dw:
        kept_a, made = made[:2], made[2:]
    if not ctx.for_da:
        kept_w = []
    elif made:
        kept_w = made
    ctx.num_index, ctx.kept = len(index), len(kept_a)
    ctx.save_for_backward(*index, *kept_a, *kept_w)


def gradients(ctx: Any, dy: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """Return the index that `keep_casts` saved, the last of which is offs, and the gradients of the rows and of b_t."""
    saved = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # unless the graph is kept; torch does so itself, but after this function
    index, kept = saved[: ctx.num_index], saved[ctx.num_index :]
    a, w = kept[: ctx.kept], kept[ctx.kept :]
    del saved, kept
    if dy is None:
        return index, None, None
    dy, offs = row_major(dy), index[-1]
    made = fp8_grouped_mm_da(dy, offs, w, ctx.scaling, ctx.pow2, ctx.da_dtype, ctx.for_da, ctx.for_dw)
    del w, dy
    da, db_t = made[0] if ctx.for_da else None, None
    if ctx.for_dw:
        q, scale = made[-2:]
        db_t = torch.ops.kerneltune.fp8_grouped_gemm(q, a[0], scale, a[1], offs, out_dtype=ctx.dw_dtype, aligned=True).transpose(
            1, 2
        )
    return index, da, db_t


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    _, da, db_t = gradients(ctx, grads[0])
    return (da, db_t, None, [None] * ctx.given, *[None] * 6)


fp8_grouped_mm_fwd.register_autograd(_backward, setup_context=_save)
