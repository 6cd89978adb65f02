"""The configs of `int4_gemm`: the knobs, which configs can run a case, and the default.

The default is found at the first call of a shape: it compares estimates of plain integers, and makes and checks few configs.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from kerneltune.ops.int4_gemm.packing import DEPTH, ROWS, check_sizes
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Option, Space

BANDS = {"N": (8, 16, 32)}
"""Bounds of the tokens that share configs. At 32 and 64 tokens, a config for half or twice as many tokens took 1.10 to 1.45
times as long as the default in 15 of 16 cases, and 0.95 times as long in the sixteenth case (H200, trials of
`tune weight_only --case '*-n32' --case '*-n64'`, 2026-11-22, commits 5ec71b3 to 244df5b)."""
FREE_OPTIONS = ("group", "zeros", "bias")
"""Zero points and bias add little to a tile. A config takes as long for groups of 128 as for groups of 64, within 7 % (H200,
weight_only's records, 2026-11-22). `invalid` refuses what lacks registers."""
_ALONG = (1, 2, 4, 8)
_SPLITS = (1, 2, 3, 4, 8)
_BLOCKS = (1, 2, 4)
_SPLITS_OF_SEVERAL_BLOCKS = (1, 2, 3, 4, 5, 6, 8, 12)
"""Programs of several blocks are fewer, so that more splits, in finer steps, are offered to give every SM a program."""
_SMS = 132
"""SMs of the GPU for which the rule of `default` was found."""
_MOST_PROGRAMS = 1024
"""Most programs of a product of several splits, because each split has memory for its part."""
_HALF_THE_REGISTERS = 128
"""Registers per thread with which two programs of eight warps fit on an SM."""
_WARPGROUPS_AT_ONCE = 4 * _SMS
"""Warpgroups on the chip if every SM holds two programs of eight warps."""
_READ_AGAIN = 1.05
"""Factor of `_us_of_warps` where several programs read a weight. With the factor, warpgroups serve 32 tokens of
8192x28672: 67.9 -> 55.6 µs (H200, 2026-11-23)."""
_BEGIN_AGAIN = 2
"""µs added to `_us_of_warps` where several programs read a weight, as `_us_of_warpgroups` adds.
H100, 2026-11-26: 48 tokens of 3200x3200 11.1 -> 9.1 µs."""
_ROWS_OF_WARPGROUP = 64
"""Rows of w that wgmma takes as its first operand."""


@dataclass(frozen=True, slots=True)
class Int4Config:
    """Config of a product.

    Attributes:
        tokens: rows of x per program.
        rows: rows of w per warp, 64 or 32; per warpgroup 64.
        along: warps that share the k of a program.
        splits: programs that share a row of w.
        prefetch: ask L2 for x and w while the previous kernel on the stream still runs, if the previous kernel lets the
            next kernel begin early, as this kernel does; all reads come after the end of the previous kernel.
        blocks: blocks of 64 rows of w per program, whose warps read the same x at the same time.
        warpgroup: multiply by wgmma, four warps together that read x from shared memory, instead of each warp by mma.sync.
    """

    tokens: int
    rows: int
    along: int
    splits: int
    prefetch: bool
    blocks: int = 1
    warpgroup: bool = False


_Estimate = tuple[float, tuple[int, int, int, int, bool, int, bool]]
"""The estimated µs of a config, and its knobs in order."""
_BY_TIME = itemgetter(0)
"""Give the time of an estimate."""


class _Sizes(NamedTuple):
    """Hold the sizes of a case.

    Attributes:
        N, M, K: as in the case.
        depth: blocks of k.
        group: elements of k that share a scale, 0 for all.
        has_many_values: whether the case has zero points or groups of 32, more values per row than `_HALF_THE_REGISTERS` hold.
    """

    N: int
    M: int
    K: int
    depth: int
    group: Option
    has_many_values: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens that a program may have."""
        N = self.N
        return (8,) if N <= 8 else (16,) if N <= 16 else (16, 32) if N <= 32 else (16, 32, 64)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the blocks of rows that a program may have."""
        return _BLOCKS if self.N > 8 else (1,)

    def alongs(self, count: int) -> tuple[int, ...]:
        """Return the largest counts of warps along k that the blocks of k allow."""
        return tuple([along for along in _ALONG if along <= self.depth][-count:])

    def splits(self, blocks: int) -> list[int]:
        """Return the counts of programs that may share a row, if a program has this many blocks of rows."""
        tiles = cdiv(self.M, ROWS * blocks) * cdiv(max(self.N, 1), 32)
        some = _SPLITS if blocks == 1 else _SPLITS_OF_SEVERAL_BLOCKS
        return [s for s in some if s <= self.depth and (s <= 2 or s * tiles <= _MOST_PROGRAMS)]

    def programs(self, tokens: int, splits: int, blocks: int) -> int:
        """Return the programs of a launch."""
        return splits * cdiv(self.M, ROWS * blocks) * cdiv(max(self.N, 1), tokens)


@lru_cache(maxsize=4096)
def _sizes(case: Case) -> _Sizes:
    axes, options = dict(case.axes), dict(case.options)
    depth, group = cdiv(axes["K"], DEPTH), options["group"]
    return _Sizes(axes["N"], axes["M"], axes["K"], depth, group, bool(options["zeros"]) or group == 32)


def unsupported(case: Case) -> str | None:
    """Say which sizes cannot be packed."""
    try:
        check_sizes(case["M"], case["K"], int(case.option("group")) or case["K"])
    except ValueError as error:
        return str(error)
    return None


def space(case: Case) -> Space:
    """Offer tiles of as many tokens as there are, or fewer; programs enough for every SM, and not many times more."""
    sizes = _sizes(case)
    return {
        "tokens": sizes.tokens,
        "rows": (32, 64),
        "along": sizes.alongs(2 if sizes.N <= 8 else len(_ALONG)),
        "splits": tuple(sorted({splits for blocks in sizes.blocks for splits in sizes.splits(blocks)})),
        "prefetch": (False, True),
        "blocks": sizes.blocks,
        "warpgroup": (False,) if sizes.N <= 8 else (False, True),
    }


def invalid(case: Case, config: Int4Config) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    return _wrong(_sizes(case), config)


def _wrong(sizes: _Sizes, config: Int4Config) -> str | None:
    """Say why `invalid` refuses a config."""
    if config.tokens not in sizes.tokens:
        return f"programs of {config.tokens} tokens where there are {sizes.N}"
    if config.along > sizes.depth or (config.splits - 1) * config.along * steps_of(sizes.K, config) >= sizes.depth:
        return f"{config.splits} programs of {config.along} warps along {sizes.depth} blocks of k"
    programs = sizes.programs(config.tokens, config.splits, config.blocks)
    if config.splits > 1 and programs > 2 * _MOST_PROGRAMS:
        return f"{programs} programs whose parts are added up"
    return _invalid_warpgroups(sizes, config) if config.warpgroup else _invalid_warps(sizes, config)


def _invalid_warps(sizes: _Sizes, config: Int4Config) -> str | None:
    """Say why `invalid` refuses a config of single warps."""
    warps = warps_of(config)
    if config.rows not in (32, 64):
        return f"{config.rows} rows of w per warp"
    if config.rows * config.tokens > 1024 or config.tokens > 32 or warps > _warps_at_once(config.rows, config.tokens):
        return f"{config.rows}x{config.tokens} sums in each of {warps} warps"
    if config.blocks > 1:
        return _invalid_blocks(sizes, config)
    if config.along < sizes.alongs(2 if config.tokens < 32 else 3)[0]:
        return f"{config.along} warps along k"
    if config.splits not in sizes.splits(1):
        return f"{config.splits} programs to a block of rows"
    if is_paired(config) and config.tokens == 16 and sizes.has_many_values:
        return f"more scales and zero points than {_HALF_THE_REGISTERS} registers hold"
    return None


def _invalid_warpgroups(sizes: _Sizes, config: Int4Config) -> str | None:
    """Say why `invalid` refuses a config of warpgroups."""
    if wrong := wrong_for_warpgroups(sizes.K, sizes.group, config):
        return wrong
    if sizes.N <= 8 or config.blocks not in sizes.blocks:
        return f"{config.blocks} blocks of rows of warpgroups where there are {sizes.N} tokens"
    if config.tokens < min(sizes.N, 32) or (config.tokens == 64 and config.blocks == 1):
        return f"programs of {config.tokens} tokens and {config.blocks} blocks of rows where there are {sizes.N} tokens"
    if config.splits not in sizes.splits(config.blocks):
        return f"{config.splits} programs to {config.blocks} blocks of rows"
    programs = sizes.programs(config.tokens, config.splits, config.blocks)
    if config.splits > 1 and programs * config.blocks > 2 * _WARPGROUPS_AT_ONCE:
        return f"{programs} programs of {config.blocks} blocks, of which the chip holds {_WARPGROUPS_AT_ONCE // config.blocks}"
    return None


def wrong_for_warpgroups(depth: int, group: Option, config: Int4Config) -> str | None:
    """Say why a config would hang, read past an end or multiply wrongly. group: 0, or `depth`, is one for all of k."""
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


def _invalid_blocks(sizes: _Sizes, config: Int4Config) -> str | None:
    """Say why `invalid` refuses programs of several blocks of rows."""
    warps, most = warps_of(config), _warps_at_once(config.rows, config.tokens)
    programs = sizes.programs(config.tokens, config.splits, config.blocks)
    if config.blocks not in sizes.blocks:
        return f"{config.blocks} blocks of rows where there are {sizes.N} tokens"
    if warps < most // 2:
        return f"{warps} warps, of which too few have a place at once"
    if 3 * programs < 2 * _SMS * (most // warps):
        return f"{programs} programs of {warps} warps"
    if config.splits not in sizes.splits(config.blocks):
        return f"{config.splits} programs to {config.blocks} blocks of rows"
    if is_paired(config) and sizes.has_many_values:
        return f"more scales and zero points than {_HALF_THE_REGISTERS} registers hold"
    return None


def default(case: Case) -> Int4Config:
    """Return a config for any shape, by rule.

    Its estimated time is the shortest among programs of few rows per warp and few tokens, and among warpgroups. Several blocks
    of rows of single warps are left to a search. H200, 2026-11-26: 0.989 of the tuned speed over 141 cases, worst 0.861.
    """
    sizes = _sizes(case)
    return _default(sizes._replace(N=8 if sizes.N <= 8 else cdiv(sizes.N, 16) * 16))


@lru_cache(maxsize=4096)
def _default(sizes: _Sizes) -> Int4Config:
    """Return the default for all numbers of tokens that need as many programs as the largest, `sizes.N`."""
    by_tile = (_by_warps(sizes, rows, tokens) for rows in (32, 64) for tokens in sizes.tokens if rows * tokens <= 1024)
    us, knobs = next(filter(None, (min(estimates, default=None, key=_BY_TIME) for estimates in by_tile)))
    if knobs[0] < sizes.N:
        us = us * _READ_AGAIN + _BEGIN_AGAIN
    candidates = [(us, knobs), *(_by_warpgroups(sizes) if sizes.N > 8 else ())]
    return Int4Config(*min(candidates, key=_BY_TIME)[1])


def _by_warps(sizes: _Sizes, rows: int, tokens: int) -> Iterable[_Estimate]:
    """Yield the valid configs of single warps that have a block of rows to a program."""
    if rows == 32 and tokens == 16 and sizes.has_many_values:
        return
    tiles, depth, warps_at_once = sizes.programs(tokens, 1, 1), sizes.depth, _warps_at_once(rows, tokens)
    splits_of = sizes.splits(1)
    for along in sizes.alongs(2 if tokens < 32 else 3):
        resident = warps_at_once * rows // (ROWS * along)
        if resident:
            for splits in splits_of:
                k_parts = along * splits
                if -(-depth // k_parts) * (k_parts - along) < depth and (splits == 1 or splits * tiles <= 2 * _MOST_PROGRAMS):
                    us = _us_of_warps(splits * tiles, depth, along, splits, tokens, resident)
                    yield us, (tokens, rows, along, splits, True, 1, False)


def _by_warpgroups(sizes: _Sizes) -> Iterable[_Estimate]:
    """Yield valid configs of warpgroups."""
    depth = sizes.depth
    for tokens in sizes.tokens if 32 not in (sizes.group, sizes.K) else ():
        if tokens >= min(sizes.N, 32):
            blocks = 2 if tokens <= 32 else 4
            tiles = sizes.programs(tokens, 1, blocks)
            for splits in sizes.splits(blocks):
                is_resident = splits == 1 or splits * tiles * blocks <= 2 * _WARPGROUPS_AT_ONCE
                if is_resident and -(-depth // splits) * (splits - 1) < depth:
                    us = _us_of_warpgroups(splits * tiles, depth, splits, tokens, blocks)
                    yield us, (tokens, _ROWS_OF_WARPGROUP, 1, splits, True, blocks, True)


def promising(case: Case) -> tuple[Int4Config, ...]:
    """Return for every shape of program the splits of the shortest time by the rule of `default`, the shortest first."""
    sizes = _sizes(case)
    shapes: dict[tuple[bool, int, int, int, int], list[Int4Config]] = {}
    for knobs in itertools.product(*({**space(case), "prefetch": (True,)}.values())):
        config = Int4Config(*knobs)
        if _wrong(sizes, config) is None:
            shape = config.warpgroup, config.blocks, config.tokens, config.rows, config.along
            shapes.setdefault(shape, []).append(config)

    def time_us(config: Int4Config) -> float:
        return _estimated_us(sizes, config)

    return tuple(sorted((min(alike, key=time_us) for alike in shapes.values()), key=time_us))


def _estimated_us(sizes: _Sizes, config: Int4Config) -> float:
    """Estimate the time of a config."""
    programs = sizes.programs(config.tokens, config.splits, config.blocks)
    if config.warpgroup:
        return _us_of_warpgroups(programs, sizes.depth, config.splits, config.tokens, config.blocks)
    resident = _warps_at_once(config.rows, config.tokens) // warps_of(config)
    return _us_of_warps(programs, sizes.depth, config.along, config.splits, config.tokens, resident)


def _us_of_warps(programs: int, depth: int, along: int, splits: int, tokens: int, resident: int) -> float:
    """Estimate the time of single warps in µs, as that of a warpgroup is: a block of k of a warp takes about 1 µs.

    An H200 took 1.09 times the estimate in the median of 168 records, 1.00 and 1.20 times at the quartiles (2026-11-27).
    The sum: blocks of k of all waves; 6 for each change of waves, 3 if an SM holds two programs; parts of other splits to add
    up; 1 for a wait for other splits, 1 for a wait for eight warps along k. depth: blocks of k; resident: programs of an SM.
    """
    waves = -(-programs // (_SMS * resident))
    waits = (splits > 1) + (along == 8)
    return -(-depth // (along * splits)) * waves + (waves - 1) * 6 / resident + splits * tokens / 20 + waits


def _us_of_warpgroups(programs: int, depth: int, splits: int, tokens: int, blocks: int) -> float:
    """Estimate the time of warpgroups, in µs.

    45 configs took 0.91 to 1.15 times as long (H200, 2026-11-23, records and observations).
    """
    resident = _WARPGROUPS_AT_ONCE // blocks
    waves = -(-programs // resident)
    us_of_step = (0.6 + 0.011 * tokens) * (0.5 + 0.5 * programs / (waves * resident))
    return 2 - (-depth // splits) * waves * us_of_step + splits * tokens / 55  # 2 µs, then cdiv(depth, splits) steps a wave


def _warps_at_once(rows: int, tokens: int) -> int:
    """Return how many single warps an SM holds."""
    return 16 if rows == 32 and tokens <= 16 else 8


def most_registers(config: Int4Config) -> int | None:
    """Return the registers per thread; None leaves them to the compiler."""
    return _HALF_THE_REGISTERS if is_paired(config) or config.warpgroup else None


def is_paired(config: Int4Config) -> bool:
    """Return whether the registers of two programs of eight warps fit on an SM."""
    return config.rows == 32 and config.tokens <= 16


def warps_of(config: Int4Config) -> int:
    """Return the warps of a program."""
    if config.warpgroup:
        return 4 * config.blocks
    return ROWS // config.rows * config.blocks * config.along


def steps_of(depth: int, config: Int4Config) -> int:
    """Return the blocks of k per warp."""
    return cdiv(depth, DEPTH * config.along * config.splits)
