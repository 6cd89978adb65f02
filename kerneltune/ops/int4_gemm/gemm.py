"""x · dequantised(w)ᵀ by the kernels in kernels.py and wide.py: the function, its configs, what they may be.

May import cache, spec, arguments, workspace.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.kernel_lib.tl_lib import is_cuda
from kerneltune.kernel_lib.workspace import counters
from kerneltune.ops.int4_gemm import kernels
from kerneltune.ops.int4_gemm.packing import DEPTH, GROUPS, ROWS, Int4Weight, block_shape, check_sizes, scale_shape
from kerneltune.ops.int4_gemm.wide import _int4_gemm_wide
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Space

FREE_AXES = ("N", "M")
_ALONG = (1, 2, 4, 8)
_SPLITS = (1, 2, 4, 8, 16)
_SPLITS_OF_WIDE = (1, 2, 3, 4, 6, 8, 16)
_ENOUGH_PROGRAMS = 192
_MOST_PROGRAMS = 1024
_HALF_THE_REGISTERS = 128
"""Registers per thread with which two programs of eight warps fit on a multiprocessor."""
_WIDE = (128, 256)
"""Rows per program of the kernel in wide.py."""
_MOST_TOKENS = 64
"""Per program of that kernel."""
_ENOUGH_WIDE_PROGRAMS = 96
_MOST_ROWS_TO_ADD = 1024
"""Rows of parts that the last program of a tile adds."""
_STAGES = 4
"""Of its load pipeline: three blocks of k of every warp in shared memory."""


@dataclass(frozen=True, slots=True)
class Int4Config:
    """tokens: rows of x per program; rows: of w, 64 or 32 per warp and 64 per program, or 128 or 256 per program and 32 per warp,
    with x and w in shared memory and weights rounded to the type of x, as those of `dequantise`; along: warps one behind the
    other along k; splits: programs that share a row of w. prefetch: ask L2 for x and w while the kernel in front on the stream
    still runs, where that lets the next begin, as this one does; all reads come after its end."""

    tokens: int
    rows: int
    along: int
    splits: int
    prefetch: bool


@on_its_device
def int4_gemm(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, *, config: Int4Config | None = None
) -> torch.Tensor:
    """x · wᵀ + bias with weights of four bits, fp32 inside.

    Args:
        x: (N, K) fp16 or bf16, the scales' type; rows may be any distance apart, elements of a row must be adjacent.
        weight: w (M, K), from `pack`.
        bias: (M,) of x's type, or None.
        config: None takes the best known config.

    Returns:
        (N, M) of x's type, contiguous. The same inputs and config give the same bits.

    Raises:
        ValueError: a shape, stride, type or device that does not fit.
    """
    check(x, weight, bias)
    (N, K), M = x.shape, weight.rows
    y = torch.empty((N, M), dtype=x.dtype, device=x.device)
    if not N:
        return y
    c: Int4Config = best_config(x, weight, bias is not None) if config is None else config
    is_wide = c.rows in _WIDE
    zeros, steps, rows = weight.zeros, steps_of(K, c), c.rows if is_wide else ROWS
    row_blocks, token_tiles = cdiv(M, rows), cdiv(N, c.tokens)
    parts = torch.empty((c.splits, N, M), dtype=torch.float32, device=x.device) if c.splits > 1 else y
    prefetch = c.prefetch and is_cuda() and _aligned(x, weight)
    kernel = _int4_gemm_wide if is_wide else kernels._int4_gemm
    kernel[(c.splits, row_blocks, token_tiles)](
        x, weight.packed, weight.scales, weight.scales if zeros is None else zeros, y if bias is None else bias, y, parts,
        counters(row_blocks * token_tiles, x.device) if c.splits > 1 else y, N, M, K, x.stride(0),
        GROUPS=weight.scales.shape[3], ONE_GROUP=weight.group not in GROUPS, ZEROS=zeros is not None,
        BIAS=bias is not None, FULL=N % c.tokens == 0, EVEN=DEPTH * steps * c.along * c.splits == K, PREFETCH=prefetch,
        TOKENS=c.tokens, ROWS=c.rows, ALONG=c.along, STEPS=steps, SPLITS=c.splits, num_warps=_warps(c), num_stages=1,
        **({"STAGES": _STAGES} if is_wide else {}),
        **({"launch_pdl": True} if prefetch else {}),
        **({"maxnreg": _HALF_THE_REGISTERS} if is_cuda() and _in_pairs(c) else {}),
    )  # fmt: skip
    return y


def _aligned(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Whether rows of x and blocks of w begin where a prefetch into L2 can."""
    tensors = (x, weight.packed, weight.scales) if weight.zeros is None else (x, weight.packed, weight.scales, weight.zeros)
    return x.stride(0) % 8 == 0 and not any(t.data_ptr() % 16 for t in tensors)


def steps_of(depth: int, config: Int4Config) -> int:
    """Blocks of k per warp."""
    return cdiv(depth, DEPTH * config.along * config.splits)


def check(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> None:
    """Arguments of `int4_gemm`.

    Raises:
        ValueError: they do not fit each other.
    """
    check_sizes(weight.rows, weight.depth, weight.group)
    if x.ndim != 2 or x.dtype not in (torch.float16, torch.bfloat16) or x.shape[1] != weight.depth:
        raise ValueError(f"x must be (N, {weight.depth}) float16 or bfloat16, got {tuple(x.shape)} {x.dtype}")
    if x.shape[0] > 1 and x.stride(0) < x.shape[1] or x.stride(1) != 1:
        raise ValueError(f"elements of a row of x must be adjacent, got strides {x.stride()}")
    scales = scale_shape(weight.rows, weight.depth, weight.group)
    wanted = [
        ("packed", weight.packed, block_shape(weight.rows, weight.depth), torch.int32),
        ("scales", weight.scales, scales, x.dtype),
    ]
    wanted += [("zeros", weight.zeros, scales, x.dtype)] if weight.zeros is not None else []
    wanted += [("bias", bias, (weight.rows,), x.dtype)] if bias is not None else []
    for name, t, shape, dtype in wanted:
        if tuple(t.shape) != shape or t.dtype != dtype or t.device != x.device or not t.is_contiguous():
            raise ValueError(
                f"{name} must be {shape} {dtype}, contiguous, on {x.device}, "
                f"got {tuple(t.shape)} {t.dtype} {t.stride()} on {t.device}"
            )


def best_config(x: torch.Tensor, weight: Int4Weight, bias: bool) -> Any:
    """The cached config for these sizes, or the default."""
    axes = (("N", x.shape[0]), ("M", weight.rows), ("K", weight.depth))
    options = (("group", group_option(weight)), ("zeros", weight.zeros is not None), ("bias", bias))
    return _choose(axes, DTYPE_NAMES[x.dtype], "int4", options)


def group_option(weight: Int4Weight) -> int:
    """The group size as a case gives it: 0 for one group that is all of k."""
    return weight.group if weight.group in GROUPS else 0


def space(case: Case) -> Space:
    """Tiles of as many tokens as there are, or fewer; programs enough for every multiprocessor, and not many times more."""
    N, blocks, row_blocks = case["N"], cdiv(case["K"], DEPTH), cdiv(case["M"], ROWS)
    splits = _SPLITS if N <= 8 else _SPLITS_OF_WIDE
    return {
        "tokens": (8,) if N <= 8 else (16,) if N <= 16 else (16, 32) if N <= 32 else (16, 32, 64),
        "rows": (32, 64) if N <= 8 else (32, 64, 128) if N <= 16 else (32, 64, 128, 256),
        "along": _alongs(blocks) if N <= 8 else tuple(along for along in _ALONG if along <= blocks),
        "splits": tuple(s for s in splits if s == 1 or (s <= blocks and s * row_blocks <= _MOST_PROGRAMS)),
        "prefetch": (False, True),
    }


def _alongs(blocks: int) -> tuple[int, ...]:
    """Warps along k worth having in programs of 64 rows."""
    return tuple(along for along in _ALONG if along <= blocks)[-2:]


def valid(case: Case, config: Int4Config) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    blocks = cdiv(case["K"], DEPTH)
    if config.along > blocks or (config.splits - 1) * config.along * steps_of(case["K"], config) >= blocks:
        return f"{config.splits} programs of {config.along} warps along {blocks} blocks of k"
    return _not_wide(case, config) if config.rows in _WIDE else _not_narrow(case, config)


def _not_wide(case: Case, config: Int4Config) -> str | None:
    """Why a config of 128 or more rows per program cannot run, or cannot be worth running."""
    warps = _warps(config)
    if config.tokens < max(16, min(case["N"], 32)):
        return f"tiles of {config.tokens} of {case['N']} tokens"
    if config.tokens > _MOST_TOKENS or warps > (16 if _in_pairs(config) else 8):
        return f"32x{config.tokens} sums in each of {warps} warps"
    if config.tokens <= 32 and warps < 8:
        return f"{warps} warps, as if more than two programs fit a multiprocessor"
    if config.rows * config.splits > _MOST_ROWS_TO_ADD:
        return f"{config.splits} parts of {config.rows} rows for one program to add"
    return None


def _not_narrow(case: Case, config: Int4Config) -> str | None:
    """Why a config of 64 rows per program cannot run, or cannot be worth running."""
    warps, least = _warps(config), _alongs(cdiv(case["K"], DEPTH))[0]
    if config.along < least or config.splits not in _SPLITS:
        return f"{config.along} warps along k in {config.splits} programs"
    if config.rows * config.tokens > 1024 or warps > (16 if _in_pairs(config) else 8):
        return f"{config.rows}x{config.tokens} sums in each of {warps} warps"
    if config.rows == 32 and config.tokens == 16 and _many_values(case):
        return f"more scales and zero points than {_HALF_THE_REGISTERS} registers hold"
    return None


def default(case: Case) -> Int4Config:
    """A config for any shape, by rule: the fewest programs that keep a chip of 132 multiprocessors busy."""
    N, limits = case["N"], space(case)
    tokens, along = min(32, limits["tokens"][-1]), min(4, limits["along"][-1])
    rows = 64 if tokens == 16 and _many_values(case) else 32
    configs = [Int4Config(tokens, rows, along, splits, prefetch=True) for splits in limits["splits"]]
    able = [c for c in configs if valid(case, c) is None]
    tiles = cdiv(case["M"], ROWS) * cdiv(max(N, 1), tokens)
    return next((c for c in able if tiles * c.splits >= _ENOUGH_PROGRAMS), able[-1])


def promising(case: Case) -> tuple[Int4Config, ...]:
    """For more tokens than eight: programs of many rows, as few as keep the chip busy, and the next more."""
    N, limits, found = case["N"], space(case), []
    for tokens, rows, along in ((16, 128, 2), (16, 128, 4), (32, 128, 2), (32, 128, 4), (32, 256, 2), (64, 128, 2), (64, 256, 1)):
        if tokens in limits["tokens"] and rows in limits["rows"]:
            configs = [Int4Config(tokens, rows, along, splits, prefetch=True) for splits in limits["splits"]]
            able = [c for c in configs if valid(case, c) is None]
            tiles = cdiv(case["M"], rows) * cdiv(N, tokens)
            enough = [c for c in able if tiles * c.splits >= _ENOUGH_WIDE_PROGRAMS]
            found += enough[: 2 if along == 2 and rows == 128 else 1] or able[-1:]
    return tuple(found)


def _many_values(case: Case) -> bool:
    """Whether a block of k has more for every row than two scales."""
    return bool(case.option("zeros")) or case.option("group") == 32


def _in_pairs(config: Int4Config) -> bool:
    """Whether two programs of eight warps can have the registers that they need on one multiprocessor."""
    return config.tokens <= 32 if config.rows in _WIDE else config.rows == 32 and config.tokens <= 16


def _warps(config: Int4Config) -> int:
    return (config.rows // 32 if config.rows in _WIDE else ROWS // config.rows) * config.along


_choose = cache.Chooser("int4_gemm", Int4Config, valid, default, FREE_AXES)


def run(inputs: Inputs, config: Int4Config | None) -> Outputs:
    """`int4_gemm` on a case's inputs."""
    return {"y": int4_gemm(inputs["x"], inputs["weight"], inputs.get("bias"), config=config)}
