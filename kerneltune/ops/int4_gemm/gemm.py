"""y = x · wᵀ + bias with weights of four bits, for few tokens: w = (q - z) s, one scale s per row and group of k.

N tokens, M rows of w, K summed over. Layout of the weights: packing.py; configs: configs.py; formula: reference.py;
kernels: kernels/warps.py and kernels/warpgroups.py. Source: NVIDIA/cutlass issue 1549.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like, check_matrix
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.kernel_lib.tl_lib import INTERPRETED, is_cuda, since_sm_90
from kerneltune.kernel_lib.workspace import counters
from kerneltune.ops.int4_gemm import peers, reference
from kerneltune.ops.int4_gemm.baselines import plain
from kerneltune.ops.int4_gemm.configs import (
    BANDS,
    FREE_OPTIONS,
    Int4Config,
    default,
    invalid,
    is_paired,
    most_registers,
    promising,
    space,
    steps_of,
    unsupported,
    warps_of,
    wrong_for_warpgroups,
)
from kerneltune.ops.int4_gemm.kernels.warpgroups import int4_gemm_by_warpgroups
from kerneltune.ops.int4_gemm.kernels.warps import Weight, Work, int4_gemm_by_warps
from kerneltune.ops.int4_gemm.packing import DEPTH, GROUPS, ROWS, Int4Weight, block_shape, check_sizes, scale_shape
from kerneltune.rounding import cdiv
from kerneltune.spec import Inputs, Op, Option, Outputs, Variant


@on_its_device
def int4_gemm(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, *, config: Int4Config | None = None
) -> torch.Tensor:
    """Return x · wᵀ + bias with weights of four bits, fp32 inside.

    Args:
        x: (N, K) fp16 or bf16, the scales' type; rows may be any distance apart, elements of a row must be adjacent.
        weight: w (M, K), from `pack`.
        bias: (M,) of x's type, or None.
        config: None takes the best known config.

    Returns:
        (N, M) of x's type, contiguous. The same inputs and config give the same bits.
    """
    check(x, weight, bias)
    (N, K), M = x.shape, weight.rows
    y = torch.empty((N, M), dtype=x.dtype, device=x.device)
    if not N:
        return y
    c: Int4Config = look_up(_choose, N, weight, x.dtype, bias=bias is not None) if config is None else config
    if c.splits > 1 and not (is_cuda() or INTERPRETED):
        c = replace(c, splits=1)  # programs wait for each other's parts
    zeros, steps = weight.zeros, steps_of(K, c)
    tiles, token_tiles = cdiv(M, ROWS * c.blocks), cdiv(N, c.tokens)
    words = (c.splits - 1) * tiles * token_tiles * (ROWS * c.blocks * c.tokens)  # of four bytes
    prefetch = c.prefetch and since_sm_90() and _aligned(x, weight)
    operands = (x, weight.packed, weight.scales, weight.scales if zeros is None else zeros, y if bias is None else bias, y)
    sizes = (N, M, K, x.stride(0))
    rows, along = (16, 1) if c.warpgroup else (c.rows, c.along)
    common = {
        "WEIGHT": constants(weight, bias is not None),
        "WORK": Work.of(tokens=c.tokens, rows=rows, along=along, steps=steps, splits=c.splits, blocks=c.blocks),
        "LEAD": _lead(c) if prefetch else 0, "num_warps": warps_of(c), "num_stages": 1,
        **({"launch_pdl": True} if prefetch else {}),
        **({"maxnreg": most_registers(c)} if is_cuda() and most_registers(c) else {}),
    }  # fmt: skip
    grid = (c.splits, tiles, token_tiles)
    if c.warpgroup:
        if wrong := wrong_for_warpgroups(K, weight.group, c):
            raise ValueError(f"config={c}: {wrong}")
        with counters(cdiv(words, 2), x.device) if words else nullcontext(y) as parts:
            int4_gemm_by_warpgroups[grid](*operands, parts, *sizes, **common)
        return y
    full, even = N % c.tokens == 0, DEPTH * steps * c.along * c.splits == K
    shorter = not even and _last_shorter(K, c)
    even = even or shorter
    ahead = _reads_ahead(c, weight, full and even)
    with counters(cdiv(words, 2), x.device) if words else nullcontext(y) as parts:
        int4_gemm_by_warps[grid](
            *operands, parts, *sizes, FULL=full, EVEN=even, LAST_SHORTER=shorter, AHEAD=ahead,
            LAST_APART=ahead and c.tokens == 16 and steps > 2, **common,
        )  # fmt: skip
    return y


def _aligned(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Say whether rows of x and blocks of w begin where a prefetch into L2 can."""
    tensors = (x, weight.packed, weight.scales) if weight.zeros is None else (x, weight.packed, weight.scales, weight.zeros)
    return x.stride(0) % 8 == 0 and not any(t.data_ptr() % 16 for t in tensors)


def _reads_ahead(config: Int4Config, weight: Int4Weight, is_even: bool) -> bool:
    """Return whether there are registers for the x of two steps. is_even: the programs take exactly N and K."""
    if weight.scales.shape[3] == 4:
        return False
    if config.tokens == 32:
        return True
    alone = config.rows == 32 and config.blocks == 1  # of several blocks of rows most warps find x in L1
    return alone and is_even and weight.zeros is None and weight.group in GROUPS


def _last_shorter(depth: int, config: Int4Config) -> bool:
    """Say whether programs of the last split count their steps, if these are fewer, and compare no x with the end.

    With 32 tokens the comparison takes 150 of 550 instructions of a step; it pays with several blocks of rows, too.
    """
    if config.tokens < 32 and config.blocks == 1:
        return False
    return depth % (DEPTH * config.along) == 0 and (config.splits - 1) * config.along * steps_of(depth, config) < depth // DEPTH


def _lead(config: Int4Config) -> int:
    """Return the steps of every warp that L2 is asked for in advance.

    An SM that holds eight warps asks for more steps than an SM of 16 warps, with several blocks of rows for fewer.
    """
    if is_paired(config) or config.warpgroup:
        return 4
    if config.blocks > 1:
        return 8
    return 16 if config.tokens == 32 else 4


def check(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> None:
    """Check the arguments of `int4_gemm`."""
    check_matrix("x", x)
    if not isinstance(weight, Int4Weight):
        raise ValueError(f"weight must be an Int4Weight, as `pack` makes it, got {type(weight).__name__}")
    check_sizes(weight.rows, weight.depth, weight.group)
    if x.dtype == torch.float32 or x.shape[1] != weight.depth:
        raise ValueError(f"x must be (N, {weight.depth}) float16 or bfloat16, got {tuple(x.shape)} {x.dtype}")
    if x.shape[0] > 1 and x.stride(0) < x.shape[1]:
        raise ValueError(f"rows of x must not overlap, got strides {x.stride()}")
    scales = scale_shape(weight.rows, weight.depth, weight.group)
    wanted = [
        ("packed", weight.packed, block_shape(weight.rows, weight.depth), torch.int32),
        ("scales", weight.scales, scales, x.dtype),
    ]
    wanted += [("zeros", weight.zeros, scales, x.dtype)] if weight.zeros is not None else []
    wanted += [("bias", bias, (weight.rows,), x.dtype)] if bias is not None else []
    for name, t, shape, dtype in wanted:
        check_like(name, t, shape, dtype, x.device)
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")


def look_up(
    choose: cache.Chooser, tokens: int, weight: Int4Weight, dtype: torch.dtype, *, experts: int = 0, **options: Option
) -> Any:
    """Return the cached config of an operator for tokens and a weight, or the default.

    Args:
        experts: weights that `weight` has one below the other; 0 for an operator without groups of tokens.
        options: the operator's options behind group and zeros, in order.
    """
    axes = (("N", tokens), ("M", weight.rows // (experts or 1)), ("K", weight.depth), ("E", experts))
    group = weight.group if weight.group in GROUPS else 0
    of_weight = ("group", group), ("zeros", weight.zeros is not None)
    return choose(axes if experts else axes[:3], DTYPE_NAMES[dtype], "int4", (*of_weight, *options.items()))


def constants(weight: Int4Weight, bias: bool) -> Weight:
    """Return the compile-time constants of a weight."""
    one_group = weight.group not in GROUPS
    return Weight.of(groups=weight.scales.shape[3], one_group=one_group, zeros=weight.zeros is not None, bias=bias)


def run(inputs: Inputs, config: Int4Config | None) -> Outputs:
    """Run `int4_gemm` on a case's inputs."""
    return {"y": int4_gemm(inputs["x"], inputs["weight"], inputs.get("bias"), config=config)}


OP = Op(
    name="int4_gemm",
    axes=("N", "M", "K"),
    dtypes=("bfloat16", "float16"),
    quants=("int4",),
    options=reference.OPTIONS,
    free_axes=("N",),  # splits that suit a weight leave the last programs of another weight alone on the chip
    max_distance=0.5,  # shapes left out, H200, 2026-11-26: worst 0.87 of the tuned speed, and 0.83 with a distance of 4
    bands=BANDS,
    free_options=FREE_OPTIONS,
    unseen_options=(),
    flops=reference.flops,
    inputs=reference.inputs,
    reference=reference.reference,
    compare=reference.compare,
    traffic=reference.traffic,
    variants=(
        *plain.VARIANTS,
        Variant("optimized", run, Int4Config, space, invalid, default, unsupported, promising=promising),
        *peers.VARIANTS,
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
