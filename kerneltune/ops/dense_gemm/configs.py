"""The configs of products with dense weights: the knobs, which configs can run a case, and the default."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kerneltune.estimate import Estimated, Speeds, Work
from kerneltune.kernel_lib.launch import too_much_shared
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Space


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Config of a product that has a program per tile.

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
    """Config of a product: `TileConfig`, and two knobs.

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
    return TileConfig(16 if case["N"] <= 16 else 32, 64, 256 // weight_bytes(case), warps=4, stages=4)


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


def work(case: Case, config: DenseConfig) -> Work | None:
    """Return what a config does for a case; None where the tensor cores work by mma.sync, of which no estimate is made."""
    if not config.swap and config.tokens < 64:
        return None
    size = weight_bytes(case)
    tile = _Tile(config.tokens, config.rows, config.depth * size, config.warps, config.stages, config.swap)
    return _sizes(case).work(tile, tile.resident, config.splits)


class _Tile(NamedTuple):
    """A tile as in `DenseConfig`, with `depth_bytes` of k."""

    tokens: int
    rows: int
    depth_bytes: int
    warps: int
    stages: int
    swap: bool

    @property
    def resident(self) -> int:
        """Return the programs that fit on an SM, by their shared memory and their registers."""
        shared = self.stages * self.depth_bytes * (self.tokens + self.rows) + _SHARED_OF_PROGRAM
        registers = 32 * self.warps * _REGISTERS + self.tokens * self.rows
        return max(1, min(_SHARED_OF_SM // shared, _REGISTERS_OF_SM // registers))


class _Sizes(NamedTuple):
    """A case in numbers: sizes, and bytes of a weight and of a row of weights."""

    N: int
    M: int
    weight: int
    row_bytes: int

    def work(self, tile: _Tile, resident: int, splits: int) -> Work:
        """Return what a launch does."""
        N, M, _, row_bytes = self
        tokens, rows, depth_bytes, _, stages, _ = tile
        across, down, depth = -(-N // tokens), -(-M // rows), -(-row_bytes // depth_bytes)
        return Work(
            -(-depth // splits), depth_bytes * (tokens + rows), depth_bytes * tokens * rows, stages - 1,
            across * down * splits, resident,
            (M + N) * row_bytes + 2 * N * M, (across * M + down * N) * row_bytes, 8 * splits * N * M if splits > 1 else 0,
        )  # fmt: skip


def _sizes(case: Case) -> _Sizes:
    axes, weight = dict(case.axes), weight_bytes(case)
    return _Sizes(axes["N"], axes["M"], weight, axes["K"] * weight)


_SMS = 132
_SHARED_OF_SM, _SHARED_OF_PROGRAM = 233_472, 1024
_REGISTERS_OF_SM = 65_536
_REGISTERS = 48
"""Registers of a thread beside its sums."""
_TILES = tuple(
    (offered, offered.resident, some_splits)
    for offered, some_splits in (
        (_Tile(128, 128, 256, 8, 3, False), (1,)), (_Tile(128, 128, 128, 8, 4, True), (1,)),
        (_Tile(128, 64, 256, 4, 4, True), (1, 2)), (_Tile(128, 32, 256, 4, 4, False), (1, 2)),
        (_Tile(64, 128, 256, 8, 4, False), (1,)), (_Tile(64, 64, 256, 4, 6, True), (1, 2, 4)),
        (_Tile(64, 32, 512, 4, 4, False), (1,)),
        (_Tile(32, 64, 256, 4, 6, True), (1, 2, 4)), (_Tile(32, 64, 256, 4, 4, True), (1,)),
        (_Tile(32, 128, 256, 4, 4, True), (1,)),
        (_Tile(16, 64, 256, 4, 6, True), (1, 2, 4)), (_Tile(16, 64, 256, 4, 4, True), (1, 4)),
        (_Tile(16, 128, 256, 4, 4, True), (1,)),
    )
)  # fmt: skip
"""Tiles that were the fastest of a case, with the programs that fit on an SM and the splits that were the fastest.

H200, results' observations, 2026-11-23. Of tiles of equal time the first serves.
"""


def _offered(case: Case) -> Iterator[tuple[tuple[int, int, int, int, int, int, bool], Work]]:
    """Yield the knobs and the work of tiles that waste few tokens, by as many programs to a tile as leave few waves."""
    sizes = _sizes(case)
    N, M, weight, row_bytes = sizes
    for tile, resident, some_splits in _TILES:
        tokens, rows, depth_bytes, warps, stages, swap = tile
        if not (128 if N > 128 else min(N, 64)) <= tokens < max(2 * N, 17):
            continue
        programs, most = -(-N // tokens) * -(-M // rows), max(1, -(-row_bytes // depth_bytes) // 2)
        for splits in some_splits:
            if splits == 1 or (splits <= most and splits * programs <= 2 * _SMS):
                yield (tokens, rows, depth_bytes // weight, warps, stages, splits, swap), sizes.work(tile, resident, splits)


DEFAULT = Estimated(
    Speeds(
        sms=_SMS, launch_us=0.85, program_us=1.716, latency_us=0.766, join_us=1.33, read_tb_s=19.6, multiply_tflops=1107.0,
        memory_tb_s=4.75, cache_tb_s=18.4, parts_tb_s=4.82,
    ),
    _offered, work, DenseConfig, valid,
)  # fmt: skip
"""The config of the least estimated time, by speeds fitted to the times of both operators (H200, 2026-11-23)."""


def promising(case: Case) -> tuple[DenseConfig, ...]:
    """Return the configs of the least estimated times after the default."""
    return tuple(itertools.islice(DEFAULT.ranked(case), 1, 4))
