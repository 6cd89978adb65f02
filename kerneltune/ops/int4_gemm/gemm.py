"""y = x · wᵀ + bias with weights of four bits, for few tokens: w = (q - z) s, one scale s per row and group of k.

N tokens, M rows of w, K summed over. Layout of the weights: packing.py; formula: reference.py; kernels: kernels/warps.py and
kernels/warpgroups.py. Source: NVIDIA/cutlass issue 1549.
"""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like, check_matrix
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.kernel_lib.tl_lib import INTERPRETED, is_cuda, since_sm_90
from kerneltune.kernel_lib.workspace import counters
from kerneltune.ops.int4_gemm import peers, reference
from kerneltune.ops.int4_gemm.baselines import plain
from kerneltune.ops.int4_gemm.kernels.warpgroups import int4_gemm_by_warpgroups
from kerneltune.ops.int4_gemm.kernels.warps import int4_gemm_by_warps
from kerneltune.ops.int4_gemm.packing import DEPTH, GROUPS, ROWS, Int4Weight, block_shape, check_sizes, scale_shape
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Option, Outputs, Space, Variant

BANDS = {"N": (8, 16, 32)}
"""Of 32 and 64 tokens a config for half or twice as many took 1.10 to 1.45 times as long as the default in 15 of 16 cases, 0.95
times in one (H200, trials of `tune weight_only --case '*-n32' --case '*-n64'`, 2026-11-22, commits 5ec71b3 to 244df5b)."""
FREE_OPTIONS = ("group", "zeros", "bias")
"""Zero points and bias add little to a tile. A config takes as long for groups of 128 as for those of 64, within 7 % (H200,
weight_only's records, 2026-11-22). `valid` refuses what lacks registers."""
_ALONG = (1, 2, 4, 8)
_SPLITS = (1, 2, 3, 4, 8)
_BLOCKS = (1, 2, 4)
_SPLITS_OF_SEVERAL_BLOCKS = (1, 2, 3, 4, 5, 6, 8, 12)
"""A split has fewer programs: it takes more splits, and finer counts, to give every SM a program."""
_SMS = 132
"""Of the GPUs for which the rule of `default` was found."""
_MOST_PROGRAMS = 1024
"""Of several splits, each of which has memory for its part."""
_HALF_THE_REGISTERS = 128
"""Registers per thread with which two programs of eight warps fit on an SM."""
_WARPGROUPS_AT_ONCE = 4 * _SMS
"""Warpgroups of such programs that the chip holds."""
_ROWS_OF_WARPGROUP = 64


@dataclass(frozen=True, slots=True)
class Int4Config:
    """How a product is computed.

    Attributes:
        tokens: rows of x per program.
        rows: of w per warp, 64 or 32; per warpgroup 64.
        along: warps one behind the other along k.
        splits: programs that share a row of w.
        prefetch: ask L2 for x and w while the previous kernel on the stream still runs, if it lets the next one begin, as this
            kernel does; all reads come after its end.
        blocks: of 64 rows of w per program, whose warps read the same x at the same time.
        warpgroup: multiply by wgmma, four warps together that read x from shared memory, instead of each warp by mma.sync.
    """

    tokens: int
    rows: int
    along: int
    splits: int
    prefetch: bool
    blocks: int = 1
    warpgroup: bool = False


@lru_cache(maxsize=1024)
def space(case: Case) -> Space:
    """Offer tiles of as many tokens as there are, or fewer; programs enough for every SM, and not many times more."""
    N, depth = case["N"], cdiv(case["K"], DEPTH)
    able = _BLOCKS if N > 8 else (1,)
    return {
        "tokens": (8,) if N <= 8 else (16,) if N <= 16 else (16, 32) if N <= 32 else (16, 32, 64),
        "rows": (32, 64),
        "along": _alongs(depth, 2) if N <= 8 else tuple(along for along in _ALONG if along <= depth),
        "splits": tuple(sorted({splits for blocks in able for splits in _splits(case, blocks)})),
        "prefetch": (False, True),
        "blocks": able,
        "warpgroup": (False,) if N <= 8 else (False, True),
    }


def _alongs(blocks: int, count: int) -> tuple[int, ...]:
    """Return the largest counts of warps along k that blocks of k allow."""
    return tuple(along for along in _ALONG if along <= blocks)[-count:]


@lru_cache(maxsize=4096)
def _splits(case: Case, blocks: int) -> tuple[int, ...]:
    """Return the counts of programs that may share a row, if a program has this many blocks of rows."""
    depth, tiles = cdiv(case["K"], DEPTH), cdiv(case["M"], ROWS * blocks) * cdiv(max(case["N"], 1), 32)
    some = _SPLITS if blocks == 1 else _SPLITS_OF_SEVERAL_BLOCKS
    return tuple(s for s in some if s <= depth and (s <= 2 or s * tiles <= _MOST_PROGRAMS))


def valid(case: Case, config: Int4Config) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    depth = cdiv(case["K"], DEPTH)
    if config.tokens not in space(case)["tokens"]:
        return f"programs of {config.tokens} tokens where there are {case['N']}"
    if config.along > depth or (config.splits - 1) * config.along * steps_of(case["K"], config) >= depth:
        return f"{config.splits} programs of {config.along} warps along {depth} blocks of k"
    programs = _programs(case, config)
    if config.splits > 1 and programs > 2 * _MOST_PROGRAMS:
        return f"{programs} programs whose parts are added up"
    return _no_warpgroups(case, config) if config.warpgroup else _no_warps(case, config)


def _no_warps(case: Case, config: Int4Config) -> str | None:
    """Say what `valid` has against warps by themselves."""
    depth, warps = cdiv(case["K"], DEPTH), _warps(config)
    if config.rows not in (32, 64):
        return f"{config.rows} rows of w per warp"
    if config.rows * config.tokens > 1024 or config.tokens > 32 or warps > (16 if _in_pairs(config) else 8):
        return f"{config.rows}x{config.tokens} sums in each of {warps} warps"
    if config.blocks > 1:
        return _no_several_blocks(case, config)
    if config.along < _alongs(depth, 2 if config.tokens < 32 else 3)[0]:
        return f"{config.along} warps along k"
    if config.splits not in _splits(case, 1):
        return f"{config.splits} programs to a block of rows"
    if _in_pairs(config) and config.tokens == 16 and _many_values(case):
        return f"more scales and zero points than {_HALF_THE_REGISTERS} registers hold"
    return None


def _no_warpgroups(case: Case, config: Int4Config) -> str | None:
    """Say what `valid` has against warpgroups."""
    if wrong := _wrong_for_warpgroups(case["K"], case.option("group"), config):
        return wrong
    knobs = space(case)
    if config.warpgroup not in knobs["warpgroup"] or config.blocks not in knobs["blocks"]:
        return f"{config.blocks} blocks of rows of warpgroups where there are {case['N']} tokens"
    if config.tokens < min(case["N"], 32) or (config.tokens == 64 and config.blocks == 1):
        return f"programs of {config.tokens} tokens and {config.blocks} blocks of rows where there are {case['N']} tokens"
    if config.splits not in _splits(case, config.blocks):
        return f"{config.splits} programs to {config.blocks} blocks of rows"
    programs = _programs(case, config)
    if config.splits > 1 and programs * config.blocks > 2 * _WARPGROUPS_AT_ONCE:
        return f"{programs} programs of {config.blocks} blocks, of which the chip holds {_WARPGROUPS_AT_ONCE // config.blocks}"
    return None


def _wrong_for_warpgroups(depth: int, group: Option, config: Int4Config) -> str | None:
    """Say what would hang, read past an end or multiply wrongly. group: 0, or `depth`, is one for all of k."""
    blocks = cdiv(depth, DEPTH)
    if config.rows != _ROWS_OF_WARPGROUP:
        return f"{config.rows} rows of a warpgroup, which has {_ROWS_OF_WARPGROUP}"
    if 32 in (group, depth):
        return "groups of 32, of which half a block of k has two"
    if config.along > 1:
        return f"{config.along} warps along k, of which each multiplies with three other warps"
    if (config.splits - 1) * steps_of(depth, config) >= blocks:
        return f"{config.splits} programs along {blocks} blocks of k"
    return None


def _no_several_blocks(case: Case, config: Int4Config) -> str | None:
    """Say what `valid` has against programs of several blocks of rows."""
    most = 16 if _in_pairs(config) else 8
    if config.blocks not in space(case)["blocks"]:
        return f"{config.blocks} blocks of rows where there are {case['N']} tokens"
    if _warps(config) < most // 2:
        return f"{_warps(config)} warps, of which too few have a place at once"
    if 3 * _programs(case, config) < 2 * _SMS * (most // _warps(config)):
        return f"{_programs(case, config)} programs of {_warps(config)} warps"
    if config.splits not in _splits(case, config.blocks):
        return f"{config.splits} programs to {config.blocks} blocks of rows"
    if _in_pairs(config) and _many_values(case):
        return f"more scales and zero points than {_HALF_THE_REGISTERS} registers hold"
    return None


def default(case: Case) -> Int4Config:
    """Return a config for any shape, by rule.

    Its estimated time is the shortest among programs of few rows per warp and few tokens, and among warpgroups. With eight
    tokens programs of 16 warps lost to twice as many of eight. Several blocks of rows of single warps are left to a search.
    """
    knobs = space(case)
    tiles = itertools.product(knobs["rows"], knobs["tokens"])
    of_tiles = (_able(case, rows=(rows,), tokens=(tokens,), blocks=(1,), warpgroup=(False,)) for rows, tokens in tiles)
    single = [config for config in next(filter(None, of_tiles), []) if config.tokens > 8 or config.along <= 4]
    several = [
        config
        for tokens in knobs["tokens"] * (True in knobs["warpgroup"])
        for config in _able(
            case, tokens=(tokens,), rows=(_ROWS_OF_WARPGROUP,), along=(1,), blocks=(2 if tokens <= 32 else 4,), warpgroup=(True,)
        )
    ]
    return min([*single, *several], key=lambda config: _length(case, config))


def promising(case: Case) -> tuple[Int4Config, ...]:
    """Return for every shape of program the splits of the shortest time by the rule of `default`, the shortest first."""
    shapes: dict[tuple[bool, int, int, int, int], list[Int4Config]] = {}
    for config in _able(case):
        shape = config.warpgroup, config.blocks, config.tokens, config.rows, config.along
        shapes.setdefault(shape, []).append(config)
    best = (min(alike, key=lambda c: _length(case, c)) for alike in shapes.values())
    return tuple(sorted(best, key=lambda c: _length(case, c)))


def _able(case: Case, **knobs: tuple[Any, ...]) -> list[Int4Config]:
    """Return the valid configs that prefetch, with these values of some knobs, those of few splits first."""
    values = {**space(case), "prefetch": (True,), **knobs}.values()
    return [config for config in itertools.starmap(Int4Config, itertools.product(*values)) if valid(case, config) is None]


def _length(case: Case, config: Int4Config) -> float:
    """Estimate the time of a config, in blocks of k of a warp.

    It sums the waves of programs, the loss between two waves, half as much if another program has the other half of the SM, and
    the time of parts. Of warpgroups in µs: 0.85 to 1.11 times the 42 records of weight_only (H200, 2026-11-22, commit fd9ec0b).
    """
    if config.warpgroup:
        programs, chip = _programs(case, config), _WARPGROUPS_AT_ONCE // config.blocks
        waves = cdiv(programs, chip)
        step = (0.4 + 0.0135 * config.tokens) * (0.5 + 0.5 * programs / (waves * chip))
        return 2 + waves * steps_of(case["K"], config) * step + config.splits * config.tokens / 55
    at_once = (16 if _in_pairs(config) else 8) // _warps(config)
    waves = cdiv(_programs(case, config), _SMS * at_once)
    return waves * steps_of(case["K"], config) + (waves - 1) * 6 / at_once + config.splits * config.tokens / 20


def _programs(case: Case, config: Int4Config) -> int:
    return config.splits * cdiv(case["M"], ROWS * config.blocks) * cdiv(max(case["N"], 1), config.tokens)


def _many_values(case: Case) -> bool:
    """Say whether a block of k has more for every row than two scales."""
    return bool(case.option("zeros")) or case.option("group") == 32


def _most_registers(config: Int4Config) -> int | None:
    """Return the registers per thread; None leaves them to the compiler."""
    return _HALF_THE_REGISTERS if _in_pairs(config) or config.warpgroup else None


def _in_pairs(config: Int4Config) -> bool:
    """Say whether two programs of eight warps can have the registers that they need on one SM."""
    return config.rows == 32 and config.tokens <= 16


def _warps(config: Int4Config) -> int:
    if config.warpgroup:
        return 4 * config.blocks
    return ROWS // config.rows * config.blocks * config.along


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

    Raises:
        ValueError: a shape, stride, type or device that does not fit, or a config that does not fit the weight.
    """
    check(x, weight, bias)
    (N, K), M = x.shape, weight.rows
    y = torch.empty((N, M), dtype=x.dtype, device=x.device)
    if not N:
        return y
    c: Int4Config = best_config(x, weight, bias is not None) if config is None else config
    if c.splits > 1 and not (is_cuda() or INTERPRETED):
        c = replace(c, splits=1)  # programs wait for each other's parts
    zeros, steps = weight.zeros, steps_of(K, c)
    tiles, token_tiles = cdiv(M, ROWS * c.blocks), cdiv(N, c.tokens)
    words = (c.splits - 1) * tiles * token_tiles * (ROWS * c.blocks * c.tokens)  # of four bytes
    prefetch = c.prefetch and since_sm_90() and _aligned(x, weight)
    operands = (x, weight.packed, weight.scales, weight.scales if zeros is None else zeros, y if bias is None else bias, y)
    sizes = (N, M, K, x.stride(0))
    common = {
        "GROUPS": weight.scales.shape[3], "ONE_GROUP": weight.group not in GROUPS, "ZEROS": zeros is not None,
        "BIAS": bias is not None, "PREFETCH": prefetch, "TOKENS": c.tokens, "STEPS": steps, "SPLITS": c.splits,
        "BLOCKS": c.blocks, "LEAD": _lead(c), "num_warps": _warps(c), "num_stages": 1,
        **({"launch_pdl": True} if prefetch else {}),
        **({"maxnreg": _most_registers(c)} if is_cuda() and _most_registers(c) else {}),
    }  # fmt: skip
    grid = (c.splits, tiles, token_tiles)
    if c.warpgroup:
        if wrong := _wrong_for_warpgroups(K, weight.group, c):
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
            *operands, parts, *sizes, FULL=full, EVEN=even, LAST_SHORTER=shorter, ROWS=c.rows, ALONG=c.along, AHEAD=ahead,
            LAST_APART=ahead and c.tokens == 16 and steps > 2, **common,
        )  # fmt: skip
    return y


def _aligned(x: torch.Tensor, weight: Int4Weight) -> bool:
    """Say whether rows of x and blocks of w begin where a prefetch into L2 can."""
    tensors = (x, weight.packed, weight.scales) if weight.zeros is None else (x, weight.packed, weight.scales, weight.zeros)
    return x.stride(0) % 8 == 0 and not any(t.data_ptr() % 16 for t in tensors)


def _reads_ahead(config: Int4Config, weight: Int4Weight, whole: bool) -> bool:
    """Say whether there are registers for the x of two steps. whole: nothing is past an end."""
    if weight.scales.shape[3] == 4:
        return False
    if config.tokens == 32:
        return True
    alone = config.rows == 32 and config.blocks == 1  # of several blocks of rows most warps find x in L1
    return alone and whole and weight.zeros is None and weight.group in GROUPS


def _last_shorter(depth: int, config: Int4Config) -> bool:
    """Say whether programs of the last split count their steps, if these are fewer, and compare no x with the end.

    With 32 tokens the comparison takes 150 of 550 instructions of a step; it pays with several blocks of rows, too.
    """
    if config.tokens < 32 and config.blocks == 1:
        return False
    return depth % (DEPTH * config.along) == 0 and (config.splits - 1) * config.along * steps_of(depth, config) < depth // DEPTH


def _lead(config: Int4Config) -> int:
    """Return the steps of every warp that L2 is asked for in advance.

    More if half as many warps wait for memory; of these fewer with several blocks of rows.
    """
    if _in_pairs(config) or config.warpgroup:
        return 4
    if config.blocks > 1:
        return 8
    return 16 if config.tokens == 32 else 4


def steps_of(depth: int, config: Int4Config) -> int:
    """Return the blocks of k per warp."""
    return cdiv(depth, DEPTH * config.along * config.splits)


def check(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> None:
    """Check the arguments of `int4_gemm`.

    Raises:
        ValueError: arguments that do not fit each other.
    """
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


def best_config(x: torch.Tensor, weight: Int4Weight, bias: bool) -> Any:
    """Return the cached config for these sizes, or the default."""
    axes = (("N", x.shape[0]), ("M", weight.rows), ("K", weight.depth))
    options = (("group", group_option(weight)), ("zeros", weight.zeros is not None), ("bias", bias))
    return _choose(axes, DTYPE_NAMES[x.dtype], "int4", options)


def group_option(weight: Int4Weight) -> int:
    """Return the group size as a case gives it: 0 for one group that is all of k."""
    return weight.group if weight.group in GROUPS else 0


def run(inputs: Inputs, config: Int4Config | None) -> Outputs:
    """Run `int4_gemm` on a case's inputs."""
    return {"y": int4_gemm(inputs["x"], inputs["weight"], inputs.get("bias"), config=config)}


OP = Op(
    name="int4_gemm",
    axes=("N", "M", "K"),
    dtypes=("bfloat16", "float16"),
    quants=("int4",),
    options=reference.OPTIONS,
    free_axes=("N",),  # splits that suit one weight leave the last programs of another alone on the chip
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
        Variant("optimized", run, Int4Config, space, valid, default, promising=promising),
        *peers.VARIANTS,
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
