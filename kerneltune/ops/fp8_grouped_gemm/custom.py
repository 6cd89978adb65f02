"""`fp8_grouped_gemm` as the torch operator `kerneltune::fp8_grouped_gemm`, with a fake: what torch.compile and export can trace.

It has no gradient of its own, and neither `out` nor `config`.
"""

import torch
from torch import Tensor

from kerneltune.ops.fp8_grouped_gemm import product


@torch.library.custom_op("kerneltune::fp8_grouped_gemm", mutates_args=())
def fp8_grouped_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    aligned: bool = False,
) -> Tensor:
    """Multiply a (M, K) and b (E, K, N) to (M, N), or a (N, M) and b (M, K) to (E, N, K)."""
    return product.fp8_grouped_gemm(a, b, scale_a, scale_b, offs, out_dtype=out_dtype, aligned=aligned)


@fp8_grouped_gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    aligned: bool = False,
) -> Tensor:
    shape = (a.shape[0], b.shape[-1])
    return a.new_empty(shape if b.ndim == 3 else (offs.shape[0], *shape), dtype=out_dtype)
