"""y = x · wᵀ + bias with weights of four bits, for few tokens: w = (q - z) s, one scale s per row and group of k.

N tokens, M rows of w, K summed over. Layout of the weights: packing.py. Source: NVIDIA/cutlass issue 1549; the formula and the
plain packings, checkpoints.py, are GPTQ's and AWQ's.
"""

from kerneltune.ops.int4_gemm import gemm, peers, plain, reference
from kerneltune.ops.int4_gemm.checkpoints import from_awq, from_gptq, to_awq, to_gptq
from kerneltune.ops.int4_gemm.gemm import Int4Config, int4_gemm
from kerneltune.ops.int4_gemm.packing import Codes, Int4Weight, dequantise, pack, quantise, unpack
from kerneltune.spec import Op, Variant

__all__ = [
    "OPS",
    "Codes",
    "Int4Config",
    "Int4Weight",
    "dequantise",
    "from_awq",
    "from_gptq",
    "int4_gemm",
    "pack",
    "quantise",
    "to_awq",
    "to_gptq",
    "unpack",
]

OPS = (
    Op(
        name="int4_gemm",
        axes=("N", "M", "K"),
        dtypes=("bfloat16", "float16"),
        quants=("int4",),
        options=reference.OPTIONS,
        free_axes=gemm.FREE_AXES,
        bands=gemm.BANDS,
        free_options=gemm.FREE_OPTIONS,
        unseen_options=(),
        flops=reference.flops,
        inputs=reference.inputs,
        reference=reference.reference,
        compare=reference.compare,
        traffic=reference.traffic,
        module=__name__,
        variants=(
            Variant(
                "baseline",
                plain.run_baseline,
                plain.PlainConfig,
                plain.baseline_space,
                plain.valid,
                plain.baseline_default,
                peers.not_empty,
            ),
            Variant(
                "splitk",
                plain.run_splitk,
                plain.SplitConfig,
                plain.split_space,
                plain.valid,
                plain.split_default,
                peers.not_empty,
            ),
            Variant(
                "streamk",
                plain.run_streamk,
                plain.StreamConfig,
                plain.stream_space,
                plain.valid,
                plain.stream_default,
                peers.not_empty,
            ),
            Variant("optimized", gemm.run, Int4Config, gemm.space, gemm.valid, gemm.default, promising=gemm.promising),
            Variant("dequantised", peers.dequantised, unsupported=peers.not_empty, requires=("torch",)),
            Variant("tinygemm", peers.tinygemm, unsupported=peers.not_tinygemm, requires=("torch",)),
            Variant("humming", peers.humming, unsupported=peers.not_humming, requires=("humming",)),
            Variant("gemlite", peers.gemlite, unsupported=peers.not_gemlite, requires=("gemlite",)),
        ),
    ),
)
