"""Define tiles of rows: the knobs of forward and backward, their checks, and the functions that defaults and launches share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kerneltune.kernel_lib.arguments import ITEMSIZE
from kerneltune.kernel_lib.launch import phases, registers, resident, too_much_shared
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case

MAX_PARTS = 64
"""The most programs that share a row."""

REGISTERS = 65536
"""Registers of an SM."""

SHARING = 2
"""Programs that share an SM's registers if they hold parts of rows: a program reads while the other program waits for its
sum."""

LONG = 16384
"""Elements of a row beyond which a program may hold a part of the row."""

SHORT = 512
"""Elements of a row up to which a tile has so many rows as fill `_MIN_SHORT_TILE`: a row is shorter than the best load."""

TRANSPOSED_ROWS = 32
"""The fewest rows of a tile that its program transposes from registers: a row of the transpose is written by sectors of 32
bytes."""

FEW_ROWS = 128
"""Rows below which a program per row leaves SMs idle."""

_MIN_SHORT_TILE = 1024
"""Fewest elements of a tile of rows up to `SHORT`."""

MIN_TILES = 1024
"""Fewest tiles that give every SM of a large GPU several."""

_Config = TypeVar("_Config")


@dataclass(frozen=True, slots=True)
class Tiles:
    """Hold the knobs that divide rows into loads and programs.

    Attributes:
        rows: rows of a tile.
        cols: columns of a load.
        split: whether programs share a row, a load each; else a program loops over the loads of its row.
        warps: warps of a program.
        ctas: programs per SM, each looping over tiles; 0 for a program per tile.
        stages: depth of the load pipeline in the loop over tiles.
    """

    rows: int
    cols: int
    split: bool
    warps: int
    ctas: int
    stages: int

    def parts(self, columns: int) -> tuple[int, int]:
        """Return the number of programs that share a row of `columns` elements, and the number of loads of each program."""
        loads = cdiv(columns, self.cols)
        return (loads, 1) if self.split else (1, loads)


def check_config(config: Any, kind: type[Tiles], least_ctas: int) -> None:
    """Check that a config is of this class, and its sizes powers of two, 16 columns at least."""
    if not isinstance(config, kind):
        raise ValueError(f"config must be a {kind.__name__} or None, got {config!r}")
    for name, least in (("rows", 1), ("cols", 16), ("warps", 1)):
        size = getattr(config, name)
        if size < least or size & (size - 1):
            raise ValueError(f"config: {name} must be a power of two of at least {least}, got {config}")
    for name, least in (("ctas", least_ctas), ("stages", 1)):
        if getattr(config, name) < least:
            raise ValueError(f"config: {name} must be at least {least}, got {config}")


def rows_of_short(padded: int, most: int) -> tuple[int, ...]:
    """Return the possible numbers of rows of `padded` elements in a tile of at most `most` elements."""
    return tuple(1 << k for k in range(9) if _MIN_SHORT_TILE <= padded << k <= most)


def invalid_loads(case: Case, config: Tiles) -> str | None:
    """Say why the loads of a row do not fit its length."""
    padded, loads = padded_length(case["N"]), cdiv(case["N"], config.cols)
    if config.cols > padded:
        return f"loads of {config.cols} for rows of {case['N']}"
    if config.split and loads == 1:
        return "one load holds the row: nothing to split"
    if not config.split and loads > 1 and loads * config.cols * 3 > padded * 4:
        return f"{loads} loads of {config.cols} leave a quarter of the lanes idle"
    return None


def invalid_tile(case: Case, c: Tiles, tensors: int, most: int, held: int | None = None) -> str | None:
    """Say why programs that hold their tiles cannot run together, or cannot be worth running.

    Args:
        tensors: number of matrices that a program loads.
        most: most elements per thread.
        held: number of loads that a program holds in registers; None for all.
    """
    parts, loads = c.parts(case["N"])
    elements = c.rows * c.cols * (loads if held is None else held)
    per_thread = elements / (32 * c.warps)
    if parts > MAX_PARTS:
        return f"{parts} programs share a row, at most {MAX_PARTS} may"
    if parts > 1 and not c.ctas:
        return "programs that share rows must be resident together: ctas must not be 0"
    if per_thread > most:
        return f"{per_thread:g} elements per thread"
    if per_thread < 8 and c.warps > 4:
        return f"{per_thread:g} elements per thread"
    if c.ctas * c.warps > 32 or 0 < c.ctas * c.warps < 4:
        return f"{c.ctas * c.warps} warps per SM"
    if c.ctas * c.warps * 32 * (per_thread * 1.5 * tensors + 16) > REGISTERS + 8192:
        return "more registers than an SM has"
    return _too_much_loaded(case, elements, c, tensors)


def sum_too_large(case: Case, config: Tiles, tensors: int) -> str | None:
    """Say why the tiles of `tensors` matrices, the added matrix included, do not fit shared memory."""
    _, loads = config.parts(case["N"])
    return _too_much_loaded(case, config.rows * config.cols * loads, config, tensors)


def _too_much_loaded(case: Case, elements: int, c: Tiles, tensors: int) -> str | None:
    """Say why the stages of a pipeline, all but the first in shared memory, do not fit; `elements` of each of `tensors`."""
    return too_much_shared(max(1, c.ctas) * max(0, c.stages - 1) * elements * ITEMSIZE[case.dtype] * tensors)


def first_valid(case: Case, likely: Iterator[_Config], invalid: Callable[[Case, _Config], str | None]) -> _Config:
    """Return the first valid config, or the last config."""
    config = next(likely)
    while invalid(case, config) is not None and (following := next(likely, None)) is not None:
        config = following
    return config


def groups_of(where: torch.device, tiles: int, parts: int, c: Tiles) -> int:
    """Return how many groups of `parts` programs to launch: a group per tile, but with `ctas` only as many as are resident."""
    return max(1, min(tiles, resident(where, c.ctas) // parts)) if c.ctas else tiles


def phases_of(parts: int, c: Tiles) -> list[tuple[int, dict[str, Any]]]:
    """Return the launches and their options: only programs that share rows wait for each other."""
    return [(0, registers(c.warps, c.ctas))] if parts == 1 else phases(c.warps, c.ctas)


def tile_rows(M: int, most: int) -> int:
    """Return the rows of a tile: `most`, a power of two, halved until there are `MIN_TILES` tiles."""
    while most > 1 and most * MIN_TILES > M:
        most //= 2
    return most


def padded_length(n: int) -> int:
    """Return the length of a row of n elements, padded to a power of two, at least 16."""
    return max(16, next_power_of_2(n))
