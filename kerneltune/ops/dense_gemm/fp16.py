"""y = x · wᵀ for few tokens and weights of 16 bits: the product that weights of four bits have to beat, from one run.

N tokens, M rows of w, K summed over. Source: kerneltune; the formula is torch's `mm`.
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
from kerneltune.ops.dense_gemm.kernels.tiles import multiply
from kerneltune.spec import Inputs, Op, Outputs, Variant


def check_operands(x: torch.Tensor, w: torch.Tensor) -> None:
    """Check x (N, K) and w (M, K), of one type on one device, with contiguous rows.

    Raises:
        ValueError: a shape, stride, type or device that does not fit.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or not w.numel():
        raise ValueError(f"x and w must be (N, K) and (M, K), got {tuple(x.shape)} and {tuple(w.shape)}")
    if w.dtype != x.dtype or w.device != x.device:
        raise ValueError(f"x and w must be of one type on one device, got {x.dtype} on {x.device} and {w.dtype} on {w.device}")
    if x.stride(1) != 1 or not w.is_contiguous():
        raise ValueError(f"rows of x and w must be contiguous, got strides {x.stride()} and {w.stride()}")


@on_its_device
def fp16_gemm(x: torch.Tensor, w: torch.Tensor, *, config: DenseConfig | None = None) -> torch.Tensor:
    """Return x · wᵀ, accumulated in fp32.

    Args:
        x: (N, K) fp16 or bf16; rows may be any distance apart, elements of a row must be adjacent.
        w: (M, K) of x's type, contiguous.
        config: None takes the best known config.

    Returns:
        (N, M) of x's type, contiguous. The same inputs and config give the same bits.

    Raises:
        ValueError: a shape, stride, type or device that does not fit.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x must be float16 or bfloat16, got {x.dtype}")
    check_operands(x, w)
    (N, K), M = x.shape, w.shape[0]
    if not N:
        return torch.empty((N, M), dtype=x.dtype, device=x.device)
    if config is None:
        config = _choose((("N", N), ("M", M), ("K", K)), DTYPE_NAMES[x.dtype], "none")
    return multiply(x, w, None, x.dtype, config)


def _run(inputs: Inputs, config: DenseConfig | None) -> Outputs:
    return {"y": fp16_gemm(inputs["x"], inputs["w"], config=config)}


def _run_tiles(inputs: Inputs, config: TileConfig) -> Outputs:
    return _run(inputs, with_one_split(config))


OP = Op(
    name="fp16_gemm",
    axes=("N", "M", "K"),
    free_axes=("N", "M"),
    dtypes=("bfloat16", "float16"),
    quants=("none",),
    flops=reference.flops,
    inputs=reference.inputs,
    reference=reference.reference,
    compare=reference.compare,
    traffic=reference.traffic,
    variants=(
        Variant("baseline", _run_tiles, TileConfig, tile_space, tile_valid, tile_default, reference.not_empty),
        Variant("optimized", _run, DenseConfig, space, valid, DEFAULT, promising=promising),
        peers.MM,
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
