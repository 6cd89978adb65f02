"""Register the products of an expert layer in fp8, casts included, as torch operators: one for Y, one for dA.

    Y = A W      dA = dY Wᵀ      dW = Aᵀ dY      for every group of rows with its own W

Launches, forward and backward: tensorwise 9, rowwise 6; with weights already cast 7 and 5. Arguments are not checked.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.kernel_lib.tl_lib import INTERPRETED
from kerneltune.nn.recipes import Recipe
from kerneltune.ops import fp8, moe_routing
from kerneltune.ops.fp8_grouped_gemm import fp8_grouped_gemm


class Fp8Weights(NamedTuple):
    """Hold expert weights (E, K, N) in fp8 for the forward product, and transposed for dA.

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
        given = None if into is None else fp8.SegmentOutput(into.q, into.q_t, into.scale)
        out = fp8.fp8_tensorwise_3d(b_t, layout="both", pow2=recipe.pow2, inverse=True, amax=amax, out=given)
        assert out.q is not None and out.q_t is not None
        return into or Fp8Weights(out.q, out.scale, out.q_t, out.scale)
    there = None if into is None else fp8.BothLayouts(into.q, into.scale.view(E, 1, N), into.q_t, into.scale_t)
    q, scale, q_t, scale_t = fp8.fp8_rowwise_3d_both(b_t, pow2=recipe.pow2, inverse=True, out=there)
    return into or Fp8Weights(q, scale.view(E, N), q_t, scale_t)


def _check_device(w: Tensor) -> None:
    if not (w.is_cuda or INTERPRETED or w.is_meta):
        raise ValueError(f"weights must be on a GPU, or kernels interpreted (TRITON_INTERPRET=1), got weights on {w.device}")


def cast_traced_weights(b_t: Tensor, recipe: Recipe, amax: Tensor) -> Fp8Weights:
    """Return the result of `cast_weights` by operators that torch.compile traces. No gradient."""
    if not torch.compiler.is_compiling():
        _check_device(b_t)
    contiguous = b_t.is_contiguous()
    w = (b_t.mT if contiguous else b_t).detach()
    ops = torch.ops.kerneltune
    if recipe.scaling == "tensorwise" and recipe.pow2:
        q, scale, q_t = expected_weights(w, amax)
        weights = Fp8Weights(q, scale, q_t, scale)
    elif recipe.scaling == "tensorwise":
        q, q_t, scale = ops.fp8_tensorwise_3d(w, layout="both", pow2=recipe.pow2, inverse=True)
        weights = Fp8Weights(q, scale, q_t, scale)
    else:
        q, scale, q_t, scale_t = ops.fp8_rowwise_3d_both(w, pow2=recipe.pow2, inverse=True)
        weights = Fp8Weights(q, scale.view(w.shape[0], w.shape[2]), q_t, scale_t)
    return weights.transposed() if contiguous else weights


def cast_traced_for_product(b_t: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return b_t (E, K, N), column-major, in fp8 for the forward product alone, and its scale, by operators that torch traces."""
    if not torch.compiler.is_compiling():
        _check_device(b_t)
    ops = torch.ops.kerneltune
    if recipe.scaling == "tensorwise":
        q, scale = ops.fp8_tensorwise_3d(b_t.detach(), layout="row", pow2=recipe.pow2, inverse=True)
        return q, scale
    q, scale = ops.fp8_colwise_3d(b_t.detach(), pow2=recipe.pow2, inverse=True)
    return q, scale.view(b_t.shape[0], b_t.shape[2])


@custom_op("kerneltune::fp8_expected_weights", mutates_args=("amax",))
def expected_weights(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast w (E, K, N) tensor-wise per expert and write its largest magnitudes to amax: q, scale and q_t."""
    q, scale, q_t, _ = cast_weights(w, Recipe("tensorwise"), amax=amax)
    return q, scale, q_t


@expected_weights.register_fake
def _(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    E, K, N = w.shape
    q, q_t = (w.new_empty(shape, dtype=torch.float8_e4m3fn).transpose(1, 2) for shape in ((E, N, K), (E, K, N)))
    return q, w.new_empty((E,), dtype=torch.float32), q_t


@custom_op("kerneltune::fp8_grouped_mm_fwd")
def fp8_grouped_mm_fwd(
    a: Tensor,
    b_t: Tensor,
    offs: Tensor,
    index: list[Tensor],
    weights: list[Tensor],
    scaling: str,
    pow2: bool,
    keep_weights: bool,
    out_dtype: torch.dtype,
    for_da: bool,
    for_dw: bool,
) -> list[Tensor]:
    """Return Y, and the casts that the backward pass reads.

    Args:
        a, b_t, offs: as in `grouped_mm.fp8_grouped_mm`, or tokens (T, K) in place of rows.
        index: nothing; or pairs and places of a Routing, by which tokens are copied after a tensorwise cast: M = T k.
        weights: the fields of Fp8Weights, where b_t has been cast before, or none.
        scaling, pow2, keep_weights: the fields of Recipe.
        for_da, for_dw: which gradients will be asked for.

    Returns:
        Y (M, N); for_dw then A in fp8 as aligned groups, (aligned_size, K), strides (1, aligned_size), and its scale, (1,) or
        rowwise (E, K); for_da, where the weights are
        cast here and kept, then q_t and scale_t of Fp8Weights.
    """
    if index:
        (q, scale_a), kept = _cast_and_permute(a, offs, index, pow2, columns=for_dw)
    else:
        (q, scale_a), kept = cast_tokens(a, offs, scaling, pow2, rows=True, columns=for_dw)
    if weights:
        w, scale_w = weights[:2]
    else:
        w, scale_w, *w_t = cast_for_product(b_t, scaling, pow2, both=for_da and keep_weights)
        kept += w_t
    return [fp8_grouped_gemm(q, w, scale_a, scale_w, offs, out_dtype=out_dtype), *kept]


@fp8_grouped_mm_fwd.register_fake
def _(
    a: Tensor,
    b_t: Tensor,
    offs: Tensor,
    index: list[Tensor],
    weights: list[Tensor],
    scaling: str,
    pow2: bool,
    keep_weights: bool,
    out_dtype: torch.dtype,
    for_da: bool,
    for_dw: bool,
) -> list[Tensor]:
    (E, K, N), rowwise, M = b_t.shape, scaling == "rowwise", index[0].shape[0] if index else a.shape[0]
    made = [a.new_empty((M, N), dtype=out_dtype)]
    if for_dw:
        made += [a.new_empty((K, aligned_size(M, E)), dtype=torch.float8_e4m3fn).t()]
        made += [a.new_empty((E, K) if rowwise else (1,), dtype=torch.float32)]
    if for_da and keep_weights and not weights:
        made += [a.new_empty((E, K, N), dtype=torch.float8_e4m3fn).transpose(1, 2)]
        made += [a.new_empty((E, K) if rowwise else (E,), dtype=torch.float32)]
    return made


@custom_op("kerneltune::fp8_grouped_mm_da")
def fp8_grouped_mm_da(
    dy: Tensor, offs: Tensor, w: list[Tensor], scaling: str, pow2: bool, da_dtype: torch.dtype, for_da: bool, for_dw: bool
) -> list[Tensor]:
    """Return dA, and dY cast for dW. As an operator of its own it frees its temporaries before dW, the largest tensor, is made.

    Args:
        dy: (M, N), rows any distance apart, for `rowwise` less than 2^24 numbers.
        w: q_t and scale_t of Fp8Weights, or b_t alone, to be cast here; anything where dA is not asked for.

    Returns:
        for_da dA (M, K) of da_dtype; for_dw then dY in fp8 as aligned groups, (N, aligned_size) row-major, and its scale, (1,)
        or rowwise (E, N).
    """
    along, down = cast_tokens(dy, offs, scaling, pow2, rows=for_da, columns=for_dw)
    da = []
    if for_da:
        w_t, scale_w = w if len(w) == 2 else cast_for_product(w[0].transpose(1, 2), scaling, pow2)
        da.append(fp8_grouped_gemm(along[0], w_t, along[1], scale_w, offs, out_dtype=da_dtype))
    return [*da, down[0].t(), down[1]] if for_dw else da


@fp8_grouped_mm_da.register_fake
def _(
    dy: Tensor, offs: Tensor, w: list[Tensor], scaling: str, pow2: bool, da_dtype: torch.dtype, for_da: bool, for_dw: bool
) -> list[Tensor]:
    M, N = dy.shape
    made = []
    if for_da:
        made.append(dy.new_empty((M, w[0].shape[2] if len(w) == 2 else w[0].shape[1]), dtype=da_dtype))
    if for_dw:
        made.append(dy.new_empty((N, aligned_size(M, offs.shape[0])), dtype=torch.float8_e4m3fn))
        made.append(dy.new_empty((offs.shape[0], N) if scaling == "rowwise" else (1,), dtype=torch.float32))
    return made


def _cast_and_permute(
    x: Tensor, offs: Tensor, index: list[Tensor], pow2: bool, columns: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Cast tokens (T, K) and copy them to their experts, with results as of `cast_tokens`."""
    cast, (pairs, places) = fp8.fp8_tensorwise_2d(x, pow2=pow2, inverse=True), index
    assert cast.q is not None
    q, q_t = moe_routing.moe_permute_fp8(cast.q, pairs, offs, places.shape[1])
    return [q, cast.scale], [q_t, cast.scale] if columns else []


def cast_tokens(
    x: Tensor, offs: Tensor, scaling: str, pow2: bool, rows: bool, columns: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Cast x (M, K) for the product with the weights, and as aligned groups for dW, each with its scale; empty if not asked for.

    Rows behind the last group have no part in any scale.
    """
    options: dict[str, Any] = {"pow2": pow2, "inverse": True}
    found: tuple[tuple[Tensor | None, ...], ...]
    if scaling == "tensorwise":
        cast = fp8.fp8_tensorwise_2d(x, layout="both" if rows and columns else "row" if rows else "col", offs=offs, **options)
        found = (cast.q, cast.scale), (cast.q_t, cast.scale)
    elif rows and columns:
        q, scale, q_t, scale_t = fp8.fp8_group_both(x, offs, aligned=True, **options)
        found = (q, scale.view(-1)), (q_t, scale_t.view(offs.shape[0], x.shape[1]))
    elif rows:
        q, scale = fp8.fp8_rowwise_2d(x, **options)
        found = (q, scale.view(-1)), ()
    else:
        q_t, scale_t = fp8.fp8_group_colwise(x, offs, aligned=True, **options)
        found = (), (q_t, scale_t.view(offs.shape[0], x.shape[1]))
    row, column = ([t for t in part if t is not None] for part in found)
    return row if rows else [], column if columns else []


def cast_for_product(b: Tensor, scaling: str, pow2: bool, both: bool = False) -> list[Tensor]:
    """Return b (E, K, N) of either order as q (E, K, N), column-major, and its scale.

    With `both` q_t (E, N, K) and its scale follow.
    """
    if both:
        return list(cast_weights(b, Recipe(scaling, pow2)))
    options: dict[str, Any] = {"pow2": pow2, "inverse": True}
    column_major = b.stride(1) == 1
    w = b if column_major else b.transpose(1, 2)
    if scaling == "tensorwise":
        cast = fp8.fp8_tensorwise_3d(w, layout="row" if column_major else "col", **options)
        made = cast.q if column_major else cast.q_t
        assert made is not None
        return [made, cast.scale]
    if column_major:
        q, scale = fp8.fp8_colwise_3d(w, **options)
        return [q, scale.view(w.shape[0], w.shape[2])]
    return list(fp8.fp8_rowwise_3d_transpose(w, **options))
