"""y = x · wᵀ + bias with weights of four bits, for few tokens: w = (q - z) s, one scale s per row and group of k.

N tokens, M rows of w, K summed over. Layout of the weights: packing.py. Source: NVIDIA/cutlass issue 1549; the formula and
the plain packings, checkpoints.py, are GPTQ's and AWQ's.
"""

from kerneltune.ops.int4_gemm.checkpoints import from_awq, from_gptq, group_order, to_awq, to_gptq
from kerneltune.ops.int4_gemm.configs import Int4Config
from kerneltune.ops.int4_gemm.fastest import Fp8Weight, ProductConfig, fastest_gemm, to_fp8
from kerneltune.ops.int4_gemm.fp8_gemm import Fp8Tokens, Int4Fp8Config, cast_tokens, int4_fp8_gemm, norm_tokens
from kerneltune.ops.int4_gemm.gemm import int4_gemm
from kerneltune.ops.int4_gemm.grouped import Int4GroupedConfig, int4_fp8_grouped_gemm
from kerneltune.ops.int4_gemm.packing import Codes, Int4Weight, dequantise, pack, quantise, unpack

__all__ = [
    "Codes", "Fp8Tokens", "Fp8Weight", "Int4Config", "Int4Fp8Config", "Int4GroupedConfig", "Int4Weight", "ProductConfig",
    "cast_tokens", "dequantise", "fastest_gemm", "from_awq", "from_gptq", "group_order", "int4_fp8_gemm",
    "int4_fp8_grouped_gemm", "int4_gemm", "norm_tokens", "pack", "quantise", "to_awq", "to_fp8", "to_gptq", "unpack",
]  # fmt: skip
