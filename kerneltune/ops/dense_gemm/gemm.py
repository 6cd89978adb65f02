"""x · wᵀ for few rows of x and weights of 16 or 8 bits: kernel, function, configs. What `int4_gemm` has to beat.

May import cache, spec, arguments, tl_gemm, tl_lib, workspace.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.kernel_lib.launch import on_its_device, too_much_shared
from kerneltune.kernel_lib.tl_gemm import dot, is_last, sum_of_parts
from kerneltune.kernel_lib.tl_lib import wide
from kerneltune.kernel_lib.workspace import counters
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Space

FREE_AXES = ("N", "M")
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class TileConfig:
    """tokens, rows, depth: of a tile of x, w and k; warps; stages: of the load pipeline."""

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int

    def whole(self) -> "DenseConfig":
        """A program for every tile."""
        return DenseConfig(self.tokens, self.rows, self.depth, self.warps, self.stages, splits=1, swap=False)


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """As TileConfig; splits: programs that share a tile's k; swap: w is the first operand of the product, and x the second."""

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int
    splits: int
    swap: bool


@triton.jit(do_not_specialize=["N"])
def _dense_gemm(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, y_ptr, part_ptr, counter_ptr, N, M, K, stride_xn,
    SCALED: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """FULL: N is a multiple of TOKENS, and M of ROWS. EVEN: K is a multiple of DEPTH."""
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    row_tiles = tl.cdiv(M, ROWS)
    tokens = tile // row_tiles * TOKENS + tl.arange(0, TOKENS)
    rows = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    ks = tl.arange(0, DEPTH)
    depth = tl.cdiv(K, DEPTH)
    share = tl.cdiv(depth, SPLITS)
    x_ptrs = x_ptr + wide(tokens)[:, None] * stride_xn + ks[None, :]
    w_ptrs = w_ptr + wide(rows)[:, None] * K + ks[None, :]
    acc = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), dtype=tl.float32)
    for piece in tl.range(split * share, tl.minimum(split * share + share, depth), num_stages=STAGES):
        k = piece * DEPTH
        x_mask, w_mask = (tokens < N)[:, None], (rows < M)[:, None]
        if not EVEN:
            x_mask, w_mask = x_mask & (ks + k < K)[None, :], w_mask & (ks + k < K)[None, :]
        if FULL and EVEN:
            x = tl.load(x_ptrs + k)
            w = tl.load(w_ptrs + k, eviction_policy="evict_first")
        else:
            x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            w = tl.load(w_ptrs + k, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if SWAP:
            acc = dot(w, tl.trans(x), acc)
        else:
            acc = dot(x, tl.trans(w), acc)
    if SCALED:
        acc *= tl.load(x_scale_ptr) * tl.load(w_scale_ptr)
    if SWAP:
        acc = tl.trans(acc)
    mask = (tokens < N)[:, None] & (rows < M)[None, :]
    offsets = wide(tokens)[:, None] * M + rows[None, :]
    if SPLITS == 1:
        tl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(part_ptr + wide(split) * N * M + offsets, acc, mask=mask, cache_modifier=".cg")
        if is_last(counter_ptr + tile, SPLITS):
            acc = sum_of_parts(part_ptr + offsets, wide(N) * M, mask, SPLITS)
            tl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)


@on_its_device
def fp16_gemm(x: torch.Tensor, w: torch.Tensor, *, config: DenseConfig | None = None) -> torch.Tensor:
    """x · wᵀ, fp32 inside.

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
    _check(x, w)
    return _launch("fp16_gemm", "none", x, w, None, None, x.dtype, config)


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
    """x · wᵀ · x_scale · w_scale, in the tensor cores' accumulation of fp8.

    Args:
        x: (N, K) e4m3; rows may be any distance apart, elements of a row must be adjacent.
        w: (M, K) e4m3, contiguous.
        x_scale, w_scale: one fp32 number each, which undoes the quantisation.
        out_dtype: fp16 or bf16.
        config: None takes the best known config.

    Returns:
        (N, M) of out_dtype, contiguous. The same inputs and config give the same bits.

    Raises:
        ValueError: a shape, stride, type or device that does not fit.
    """
    if x.dtype != _FP8 or out_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x must be {_FP8} and out_dtype float16 or bfloat16, got {x.dtype} and {out_dtype}")
    _check(x, w)
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device:
            raise ValueError(
                f"{name} must be one float32 on {x.device}, got {tuple(scale.shape)} {scale.dtype} on {scale.device}"
            )
    return _launch("fp8_gemm", "fp8", x, w, x_scale, w_scale, out_dtype, config)


def _check(x: torch.Tensor, w: torch.Tensor) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or not w.numel():
        raise ValueError(f"x and w must be (N, K) and (M, K), got {tuple(x.shape)} and {tuple(w.shape)}")
    if w.dtype != x.dtype or w.device != x.device:
        raise ValueError(f"x and w must be of one type on one device, got {x.dtype} on {x.device} and {w.dtype} on {w.device}")
    if x.stride(1) != 1 or not w.is_contiguous():
        raise ValueError(f"rows of x and w must be contiguous, got strides {x.stride()} and {w.stride()}")


def _launch(op, quant, x, w, x_scale, w_scale, out_dtype, config: DenseConfig | None) -> torch.Tensor:
    (N, K), M = x.shape, w.shape[0]
    y = torch.empty((N, M), dtype=out_dtype, device=x.device)
    if not N:
        return y
    if config is None:
        choose = _choose_fp8 if op == "fp8_gemm" else _choose_fp16
        config = choose((("N", N), ("M", M), ("K", K)), DTYPE_NAMES[out_dtype], quant)
    c: DenseConfig = config
    tiles = cdiv(N, c.tokens) * cdiv(M, c.rows)
    parts = torch.empty((c.splits, N, M), dtype=torch.float32, device=x.device) if c.splits > 1 else y
    with counters(tiles, x.device) if c.splits > 1 else nullcontext(y) as counts:
        _dense_gemm[(tiles * c.splits,)](
            x, w, x if x_scale is None else x_scale, x if w_scale is None else w_scale, y, parts, counts,
            N, M, K, x.stride(0),
            SCALED=x_scale is not None, FULL=N % c.tokens == 0 and M % c.rows == 0, EVEN=K % c.depth == 0, SWAP=c.swap,
            TOKENS=c.tokens, ROWS=c.rows, DEPTH=c.depth, STAGES=c.stages, SPLITS=c.splits, num_warps=c.warps,
        )  # fmt: skip
    return y


def weight_bytes(case: Case) -> int:
    """Bytes of one weight."""
    return 1 if case.quant == "fp8" else 2


def tile_space(case: Case) -> Space:
    """Tiles of 128 to 512 bytes of k."""
    N, size = case["N"], weight_bytes(case)
    return {
        "tokens": tuple(t for t in (16, 32, 64, 128) if t == 16 or t < 2 * N),
        "rows": (32, 64, 128),
        "depth": (128 // size, 256 // size, 512 // size),
        "warps": (4, 8),
        "stages": (3, 4, 5, 6),
    }


def space(case: Case) -> Space:
    """The same, with a row's k among up to sixteen programs, and either operand first."""
    return {**tile_space(case), "splits": (1, 2, 4, 8, 16), "swap": (False, True)}


def tile_valid(case: Case, config: TileConfig) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    return valid(case, config.whole())


def tile_default(case: Case) -> TileConfig:
    """A config for any shape, by rule."""
    c = default(case)
    return TileConfig(c.tokens, c.rows, c.depth, c.warps, c.stages)


def valid(case: Case, config: DenseConfig) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
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
    """A config for any shape, by rule."""
    depth = 256 // weight_bytes(case)
    tiles = cdiv(case["K"], depth)
    splits = 4 if tiles >= 16 else 1
    return DenseConfig(16 if case["N"] <= 16 else 32, 64, depth, warps=4, stages=4, splits=splits, swap=False)


_choose_fp8 = cache.Chooser("fp8_gemm", DenseConfig, valid, default, FREE_AXES, space=space)
_choose_fp16 = cache.Chooser("fp16_gemm", DenseConfig, valid, default, FREE_AXES, space=space)
