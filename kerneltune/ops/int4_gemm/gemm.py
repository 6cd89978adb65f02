"""x · dequantised(w)ᵀ by the kernel in kernels.py: the function, its configs, what they may be.

May import cache, device, spec, arguments, workspace.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from kerneltune import cache, device
from kerneltune.arguments import DTYPE_NAMES
from kerneltune.ops.int4_gemm import kernels
from kerneltune.ops.int4_gemm.packing import DEPTH, GROUPS, ROWS, Int4Weight, block_shape, check_sizes, scale_shape
from kerneltune.spec import Case, Inputs, Outputs, Space
from kerneltune.tl_lib import is_cuda
from kerneltune.workspace import counters

FREE_AXES = ("N", "M")
_REGISTERS = 65536
_MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Int4Config:
    """tokens: rows of x per program; across, along: warps side by side, 64 rows of w each, and one behind the other along k;
    steps: blocks of 128 k per warp, all in flight together. As many programs share a row of w as k then needs. early: read w
    while the kernel in front on the stream may still be running; wrong where that is the one that writes w, so no search tries
    it unless `--knob early=true` asks for it."""

    tokens: int
    across: int
    along: int
    steps: int
    early: bool


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
    splits, zeros = splits_of(K, c), weight.zeros
    row_blocks, k_blocks = triton.cdiv(M, ROWS), triton.cdiv(K, DEPTH)
    tiles = triton.cdiv(row_blocks, c.across) * triton.cdiv(N, c.tokens)
    parts = torch.empty((splits, N, M), dtype=torch.float32, device=x.device) if splits > 1 else y
    kernels._int4_gemm[(tiles * splits,)](
        x, weight.packed, weight.scales, weight.scales if zeros is None else zeros, y if bias is None else bias, y, parts,
        counters(tiles, x.device) if splits > 1 else y, N, M, K, x.stride(0),
        GROUPS=weight.scales.shape[3], ONE_GROUP=weight.group not in GROUPS, ZEROS=zeros is not None,
        BIAS=bias is not None, FULL=N % c.tokens == 0,
        EVEN=K % DEPTH == 0 and k_blocks % (c.along * c.steps) == 0 and row_blocks % c.across == 0,
        TOKENS=c.tokens, ACROSS=c.across, ALONG=c.along, STEPS=c.steps, SPLITS=splits,
        EARLY=c.early, num_warps=c.across * c.along, num_stages=1, **({"launch_pdl": True} if c.early and is_cuda() else {}),
    )  # fmt: skip
    return y


def splits_of(depth: int, config: Int4Config) -> int:
    """Programs that share a row of w."""
    blocks = config.along * config.steps * DEPTH
    return -(-depth // blocks)


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
    slug = device.current_slug()
    return cache.best(
        "int4_gemm", "optimized", slug, axes, DTYPE_NAMES[x.dtype], "int4", options, "cold", FREE_AXES, None, _resolve
    )


def group_option(weight: Int4Weight) -> int:
    """The group size as a case gives it: 0 for one group that is all of k."""
    return weight.group if weight.group in GROUPS else 0


def space(case: Case) -> Space:
    """Tiles of as many tokens as there are, or fewer; up to 16 warps."""
    N = case["N"]
    return {
        "tokens": (16,) if N <= 16 else (16, 32),
        "across": (1, 2, 4),
        "along": (1, 2, 4, 8),
        "steps": (1, 2, 3, 4),
        "early": (False,),
    }


def valid(case: Case, config: Int4Config) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    warps, blocks = config.across * config.along, triton.cdiv(case["K"], DEPTH)
    if config.along * config.steps >= 2 * blocks and config.along * config.steps > 1:
        return f"{config.along * config.steps} blocks of k at a time, of {blocks}"
    if warps > 16:
        return f"{warps} warps"
    if config.across > 1 and config.across >= 2 * triton.cdiv(case["M"], ROWS):
        return f"{config.across} blocks of rows at a time"
    registers = 34 * config.steps + 4 * config.tokens + 40
    if registers > 255 or registers * warps * 32 > _REGISTERS:
        return f"about {registers} registers in each of {warps} warps"
    splits = splits_of(case["K"], config)
    return f"{splits} programs to a row" if splits > _MOST_SPLITS else None


def default(case: Case) -> Int4Config:
    """A config for any shape, by rule: eight warps with as much in flight as their registers hold."""
    blocks, row_blocks = triton.cdiv(case["K"], DEPTH), triton.cdiv(case["M"], ROWS)
    tokens = 16 if case["N"] <= 16 else 32
    along = min(4, 1 << (blocks.bit_length() - 1))
    steps = max(1, min(4 if tokens == 16 else 2, blocks // along))
    while splits_of(case["K"], Int4Config(tokens, 1, along, steps, early=False)) > _MOST_SPLITS:
        along *= 2
    return Int4Config(tokens, min(2 if row_blocks > 1 else 1, 8 // along), along, steps, early=False)


_resolve = cache.resolver(Int4Config, valid, default)


def run(inputs: Inputs, config: Int4Config | None) -> Outputs:
    """`int4_gemm` on a case's inputs."""
    return {"y": int4_gemm(inputs["x"], inputs["weight"], inputs.get("bias"), config=config)}
