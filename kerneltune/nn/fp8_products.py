"""The three products of an expert layer in fp8, casts included, as torch operators: one for the forward, one for the backward.

    Y = A W      dA = dY Wᵀ      dW = Aᵀ dY      for every group of rows with its own W

Launches, forward and backward: tensorwise 9, rowwise 8; with weights already cast 7 and 6. Trusts what it is given. May import
recipes, ops.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kerneltune.nn.recipes import Recipe
from kerneltune.ops import fp8
from kerneltune.ops.fp8_grouped_gemm import fp8_grouped_gemm


class Fp8Weights(NamedTuple):
    """Expert weights (E, K, N) in fp8 for the forward product, and transposed for dA.

    Attributes:
        q: (E, K, N), strides (K N, 1, K).
        scale: what values of q are multiplied by: (E,) or (E, N) fp32.
        q_t: (E, N, K), strides (N K, 1, N).
        scale_t: what values of q_t are multiplied by: (E,) or (E, K) fp32.
    """

    q: Tensor
    scale: Tensor
    q_t: Tensor
    scale_t: Tensor

    def turned(self) -> "Fp8Weights":
        """The transposed weights."""
        return Fp8Weights(self.q_t, self.scale_t, self.q, self.scale)


def cast_weights(b_t: Tensor, recipe: Recipe, into: Fp8Weights | None = None) -> Fp8Weights:
    """b_t (E, K, N), column-major, in both layouts, in two launches; scale_t is scale where an expert has one scale.

    into: what an earlier call for a weight of this size and recipe returned, to be written in its place.
    """
    E, K, N = b_t.shape
    if recipe.scaling == "tensorwise":
        given = None if into is None else fp8.SegmentOutput(into.q, into.q_t, into.scale)
        out = fp8.fp8_tensorwise_3d(b_t, layout="both", pow2=recipe.pow2, inverse=True, out=given)
        assert out.q is not None and out.q_t is not None
        return into or Fp8Weights(out.q, out.scale, out.q_t, out.scale)
    forward = None if into is None else (into.q, into.scale.view(E, 1, N))
    backward = None if into is None else (into.q_t, into.scale_t)
    q, scale = fp8.fp8_colwise_3d(b_t, pow2=recipe.pow2, inverse=True, out=forward)
    q_t, scale_t = fp8.fp8_rowwise_3d_transpose(b_t, pow2=recipe.pow2, inverse=True, out=backward)
    return into or Fp8Weights(q, scale.view(E, N), q_t, scale_t)


@torch.library.custom_op("kerneltune::fp8_grouped_mm_fwd", mutates_args=())
def fp8_grouped_mm_fwd(
    a: Tensor,
    b_t: Tensor,
    offs: Tensor,
    weights: list[Tensor],
    scaling: str,
    pow2: bool,
    keep_weights: bool,
    out_dtype: torch.dtype,
    for_da: bool,
    for_dw: bool,
) -> list[Tensor]:
    """Y, and what the backward can use of the casts.

    Args:
        a, b_t, offs: as in `grouped_mm.fp8_grouped_mm`.
        weights: the fields of Fp8Weights, where b_t has been cast before, or none.
        scaling, pow2, keep_weights: the fields of Recipe.
        for_da, for_dw: which gradients will be asked for.

    Returns:
        Y (M, N); tensorwise for_dw then A (M, K) fp8, strides (1, M), and its scale (1,); tensorwise for_da, where the weights
        are cast here and kept, then q_t and scale_t of Fp8Weights.
    """
    if scaling == "rowwise":
        q, scale_a = fp8.fp8_rowwise_2d(a, pow2=pow2, inverse=True)
        w, scale_w = weights[:2] or _rowwise_weights(b_t, pow2)
        return [fp8_grouped_gemm(q, w, scale_a.view(-1), scale_w, offs, out_dtype=out_dtype)]
    layout = "both" if for_dw else "row"
    *acts, scale_a = _present(fp8.fp8_tensorwise_2d(a, layout=layout, pow2=pow2, inverse=True))
    kept = [acts[1], scale_a] if for_dw else []
    if weights:
        w, scale_w = weights[:2]
    else:
        w, *w_t, scale_w = _tensorwise_weights(b_t, pow2, both=for_da and keep_weights)
        kept += [*w_t, scale_w] if w_t else []
    return [fp8_grouped_gemm(acts[0], w, scale_a, scale_w, offs, out_dtype=out_dtype), *kept]


@fp8_grouped_mm_fwd.register_fake
def _(
    a: Tensor,
    b_t: Tensor,
    offs: Tensor,
    weights: list[Tensor],
    scaling: str,
    pow2: bool,
    keep_weights: bool,
    out_dtype: torch.dtype,
    for_da: bool,
    for_dw: bool,
) -> list[Tensor]:
    (M, K), (E, _, N) = a.shape, b_t.shape
    made = [a.new_empty((M, N), dtype=out_dtype)]
    if scaling == "tensorwise" and for_dw:
        made += [a.new_empty((K, M), dtype=torch.float8_e4m3fn).t(), a.new_empty(1, dtype=torch.float32)]
    if scaling == "tensorwise" and for_da and keep_weights and not weights:
        made += [a.new_empty((E, K, N), dtype=torch.float8_e4m3fn).transpose(1, 2), a.new_empty(E, dtype=torch.float32)]
    return made


@torch.library.custom_op("kerneltune::fp8_grouped_mm_bwd", mutates_args=())
def fp8_grouped_mm_bwd(
    dy: Tensor,
    offs: Tensor,
    a: list[Tensor],
    w: list[Tensor],
    scaling: str,
    pow2: bool,
    da_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    for_da: bool,
    for_dw: bool,
) -> list[Tensor]:
    """The gradients asked for: dA (M, K) of da_dtype, dW (E, N, K) of dw_dtype, in this order.

    Args:
        dy: (M, N), rows any distance apart.
        a: rowwise A itself, tensorwise its fp8 and scale from the forward; anything where dW is not asked for.
        w: q_t and scale_t of Fp8Weights, or b_t alone, to be cast here; anything where dA is not asked for.
    """
    options: dict[str, Any] = {"pow2": pow2, "inverse": True}
    grads = []
    if scaling == "rowwise":
        if for_da:
            q, scale = fp8.fp8_rowwise_2d(dy, **options)
            w_t, scale_w = w if len(w) == 2 else _rowwise_weights(w[0].transpose(1, 2), pow2)
            grads.append(fp8_grouped_gemm(q, w_t, scale.view(-1), scale_w, offs, out_dtype=da_dtype))
        if for_dw:
            groups = (offs.shape[0], -1)
            if dy.dtype == a[0].dtype:
                (q, scale), (a_t, scale_a) = fp8.fp8_group_colwise_dual(dy, a[0], offs, **options)
            else:
                (q, scale), (a_t, scale_a) = (fp8.fp8_group_colwise(x, offs, **options) for x in (dy, a[0]))
            grads.append(fp8_grouped_gemm(q.t(), a_t, scale.view(groups), scale_a.view(groups), offs, out_dtype=dw_dtype))
        return grads
    layout = "both" if for_da and for_dw else "row" if for_da else "col"
    *qs, scale = _present(fp8.fp8_tensorwise_2d(dy, layout=layout, **options))
    if for_da:
        w_t, scale_w = w if len(w) == 2 else _tensorwise_weights(w[0].transpose(1, 2), pow2)
        grads.append(fp8_grouped_gemm(qs[0], w_t, scale, scale_w, offs, out_dtype=da_dtype))
    if for_dw:
        grads.append(fp8_grouped_gemm(qs[-1].t(), a[0], scale, a[1], offs, out_dtype=dw_dtype))
    return grads


@fp8_grouped_mm_bwd.register_fake
def _(
    dy: Tensor,
    offs: Tensor,
    a: list[Tensor],
    w: list[Tensor],
    scaling: str,
    pow2: bool,
    da_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    for_da: bool,
    for_dw: bool,
) -> list[Tensor]:
    M, N = dy.shape
    grads = []
    if for_da:
        grads.append(dy.new_empty((M, w[0].shape[2] if len(w) == 2 else w[0].shape[1]), dtype=da_dtype))
    if for_dw:
        grads.append(dy.new_empty((offs.shape[0], N, a[0].shape[1]), dtype=dw_dtype))
    return grads


def _rowwise_weights(b: Tensor, pow2: bool) -> list[Tensor]:
    """b (E, K, N) of either order as q (E, K, N), column-major, and scales (E, N)."""
    if b.stride(1) == 1:
        q, scale = fp8.fp8_colwise_3d(b, pow2=pow2, inverse=True)
    else:
        q, scale = fp8.fp8_rowwise_3d_transpose(b.transpose(1, 2), pow2=pow2, inverse=True)
    return [q, scale.view(b.shape[0], b.shape[2])]


def _tensorwise_weights(b: Tensor, pow2: bool, both: bool = False) -> list[Tensor]:
    """b (E, K, N) of either order as q (E, K, N), if both are asked for q_t (E, N, K), both column-major, and scales (E,)."""
    column_major = b.stride(1) == 1
    layout = "both" if both else "row" if column_major else "col"
    out = fp8.fp8_tensorwise_3d(b if column_major else b.transpose(1, 2), layout=layout, pow2=pow2, inverse=True)
    *qs, scale = _present(out)
    return [*(qs if column_major else reversed(qs)), scale]


def _present(out: fp8.SegmentOutput) -> list[Tensor]:
    return [t for t in out if t is not None]
