"""y = x · wᵀ for few tokens and weights of 16 bits: the product that weights of four bits have to beat, from one run.

N tokens, M rows of w, K summed over. Source: kerneltune; the formula is torch's `mm`.
"""

from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.kernel_lib.launch import on_its_device, too_much_shared
from kerneltune.ops.dense_gemm import peers, reference
from kerneltune.ops.dense_gemm.kernels.tiles import multiply
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Variant


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a product is computed by a program per tile.

    Attributes:
        tokens: rows of a tile of x.
        rows: of a tile of w.
        depth: k of both tiles.
        warps: of a program.
        stages: of the load pipeline.
    """

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class DenseConfig(TileConfig):
    """How a product is computed: `TileConfig`, and two knobs.

    Attributes:
        splits: programs that share a tile's k.
        swap: whether w is the first operand of the tensor cores, and x the second.
    """

    splits: int
    swap: bool


def with_one_split(tile: TileConfig) -> DenseConfig:
    """Return the config of a program for every tile."""
    return DenseConfig(tile.tokens, tile.rows, tile.depth, tile.warps, tile.stages, splits=1, swap=False)


def weight_bytes(case: Case) -> int:
    """Return the bytes of one weight."""
    return 1 if case.quant == "fp8" else 2


def tile_space(case: Case) -> Space:
    """Offer tiles of 128 to 512 bytes of k."""
    N, size = case["N"], weight_bytes(case)
    return {
        "tokens": tuple(t for t in (16, 32, 64, 128) if t == 16 or t < 2 * N),
        "rows": (32, 64, 128),
        "depth": (128 // size, 256 // size, 512 // size),
        "warps": (4, 8),
        "stages": (3, 4, 5, 6),
    }


def space(case: Case) -> Space:
    """Offer tiles of 128 to 512 bytes of k, a row's k among up to sixteen programs, and either operand first."""
    return {**tile_space(case), "splits": (1, 2, 4, 8, 16), "swap": (False, True)}


def tile_valid(case: Case, config: TileConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    return valid(case, with_one_split(config))


def tile_default(case: Case) -> TileConfig:
    """Return a config for any shape, by rule."""
    c = default(case)
    return TileConfig(c.tokens, c.rows, c.depth, c.warps, c.stages)


def valid(case: Case, config: DenseConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    size = weight_bytes(case)
    if config.swap and config.rows < 64:
        return "the tensor cores take 64 rows of a first operand in shared memory"
    if config.tokens * config.rows > 16384 or config.tokens * config.rows < 16 * 8 * config.warps:
        return f"{config.tokens}x{config.rows} sums for {config.warps} warps"
    shared = config.stages * config.depth * size * (config.tokens + config.rows)
    tiles = cdiv(case["K"], config.depth)
    if config.splits > max(1, tiles // 2):
        return f"{config.splits} parts of {tiles} tiles"
    return too_much_shared(shared)


def default(case: Case) -> DenseConfig:
    """Return a config for any shape, by rule."""
    depth = 256 // weight_bytes(case)
    tiles = cdiv(case["K"], depth)
    splits = 4 if tiles >= 16 else 1
    return DenseConfig(16 if case["N"] <= 16 else 32, 64, depth, warps=4, stages=4, splits=splits, swap=False)


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
        Variant("optimized", _run, DenseConfig, space, valid, default),
        peers.MM,
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
