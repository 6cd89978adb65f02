"""y = x · wᵀ for few tokens and weights of 16 or 8 bits: what weights of four bits are compared with, from one run.

N tokens, M rows of w, K summed over. Source: kerneltune; the formula is torch's `mm` and `_scaled_mm`.
"""

from collections.abc import Callable
from functools import partial

from kerneltune.ops.dense_gemm import reference
from kerneltune.ops.dense_gemm.gemm import (
    FREE_AXES,
    DenseConfig,
    TileConfig,
    default,
    fp8_gemm,
    fp16_gemm,
    space,
    tile_default,
    tile_space,
    tile_valid,
    valid,
)
from kerneltune.spec import Inputs, Op, Outputs, Variant

__all__ = ["OPS", "DenseConfig", "TileConfig", "fp8_gemm", "fp16_gemm"]


def _run_fp16(inputs: Inputs, config: DenseConfig | None) -> Outputs:
    return {"y": fp16_gemm(inputs["x"], inputs["w"], config=config)}


def _run_fp8(inputs: Inputs, config: DenseConfig | None) -> Outputs:
    return {"y": fp8_gemm(inputs["x"], inputs["w"], inputs["x_scale"], inputs["w_scale"], inputs["out_dtype"], config=config)}


def _run_tiles(run: Callable[[Inputs, DenseConfig | None], Outputs], inputs: Inputs, config: TileConfig) -> Outputs:
    return run(inputs, config.whole())


def _op(name: str, quant: str, run: Callable[[Inputs, DenseConfig | None], Outputs], peer: Variant) -> Op:
    return Op(
        name=name,
        axes=("N", "M", "K"),
        dtypes=("bfloat16", "float16"),
        quants=(quant,),
        free_axes=FREE_AXES,
        flops=reference.flops,
        inputs=reference.inputs,
        reference=reference.reference,
        compare=reference.compare,
        traffic=reference.traffic,
        module=__name__,
        variants=(
            Variant("baseline", partial(_run_tiles, run), TileConfig, tile_space, tile_valid, tile_default, reference.not_empty),
            Variant("optimized", run, DenseConfig, space, valid, default),
            peer,
        ),
    )


OPS = (
    _op(
        "fp16_gemm",
        "none",
        _run_fp16,
        Variant("torch", reference.torch_mm, unsupported=reference.not_empty, requires=("torch",)),
    ),
    _op(
        "fp8_gemm",
        "fp8",
        _run_fp8,
        Variant("scaled_mm", reference.torch_scaled_mm, unsupported=reference.not_scaled_mm, requires=("torch",)),
    ),
)
