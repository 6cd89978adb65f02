"""y = x · wᵀ for few tokens and weights of 8 bits: the product that weights of four bits have to beat, from one run.

Config, space, validity and default are those of `fp16_gemm`. Source: kerneltune; the formula is torch's `_scaled_mm`.
"""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.dense_gemm import peers, reference
from kerneltune.ops.dense_gemm.configs import (
    DEFAULT,
    DenseConfig,
    TileConfig,
    promising,
    space,
    tile_default,
    tile_space,
    tile_valid,
    valid,
    with_one_split,
)
from kerneltune.ops.dense_gemm.fp16 import check_operands
from kerneltune.ops.dense_gemm.kernels.tiles import multiply
from kerneltune.spec import Inputs, Op, Outputs, Variant

_FP8 = torch.float8_e4m3fn


@on_its_device
def fp8_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    config: DenseConfig | None = None,
) -> torch.Tensor:
    """Return x · wᵀ · x_scale · w_scale, in the tensor cores' accumulation of fp8.

    Args:
        x: (N, K) e4m3; rows may be any distance apart, elements of a row must be adjacent.
        w: (M, K) e4m3, contiguous.
        x_scale: one fp32 value, which undoes the quantization of x.
        w_scale: likewise of w.
        out_dtype: fp16 or bf16.
        config: None takes the best known config.

    Returns:
        (N, M) of out_dtype, contiguous. The same inputs and config give the same bits.

    Raises:
        ValueError: a shape, stride, type or device that does not fit.
    """
    if x.dtype != _FP8 or out_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x must be {_FP8} and out_dtype float16 or bfloat16, got {x.dtype} and {out_dtype}")
    check_operands(x, w)
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device:
            raise ValueError(
                f"{name} must be one float32 on {x.device}, got {tuple(scale.shape)} {scale.dtype} on {scale.device}"
            )
    (N, K), M = x.shape, w.shape[0]
    if not N:
        return torch.empty((N, M), dtype=out_dtype, device=x.device)
    if config is None:
        config = _choose((("N", N), ("M", M), ("K", K)), DTYPE_NAMES[out_dtype], "fp8")
    return multiply(x, w, (x_scale, w_scale), out_dtype, config)


def _run(inputs: Inputs, config: DenseConfig | None) -> Outputs:
    tensors = (inputs[name] for name in ("x", "w", "x_scale", "w_scale", "out_dtype"))
    return {"y": fp8_gemm(*tensors, config=config)}


def _run_tiles(inputs: Inputs, config: TileConfig) -> Outputs:
    return _run(inputs, with_one_split(config))


OP = Op(
    name="fp8_gemm",
    axes=("N", "M", "K"),
    free_axes=("N", "M"),
    dtypes=("bfloat16", "float16"),
    quants=("fp8",),
    flops=reference.flops,
    inputs=reference.inputs,
    reference=reference.reference,
    compare=reference.compare,
    traffic=reference.traffic,
    variants=(
        Variant("baseline", _run_tiles, TileConfig, tile_space, tile_valid, tile_default, reference.not_empty),
        Variant("optimized", _run, DenseConfig, space, valid, DEFAULT, promising=promising),
        peers.SCALED_MM,
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
