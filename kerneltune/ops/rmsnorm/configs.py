"""The configs of the `optimized` variants: their knobs, what makes a config valid, the defaults. Launches nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from kerneltune.kernel_lib.arguments import ITEMSIZE
from kerneltune.kernel_lib.launch import too_much_shared
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Space

_MAX_PARTS = 64
_WARP_BYTES = 512
"""That a warp loads at once."""

SHARING = 2
"""Programs that share a multiprocessor's registers where they hold a part of a row: one waits for its sum, the other reads."""

_REGISTERS = 65536
"""Of a multiprocessor."""

_LONG = 16384
"""Elements of a row beyond which a program may hold a part of it."""

_SHORT = 512
"""Elements of a row up to which a row is less than what a program should load at a time: a tile has many rows."""

_MANY_ROWS = (1024, 16384)
"""The fewest and the most elements of such a tile: 16 KiB at most of 16-bit elements, beyond which too few programs fit an SM."""


_FEW_ROWS = 128
"""Rows below which a program per row leaves SMs idle."""

_LARGE = 1 << 25
"""Elements of x from which on a program reads x again instead of holding it, so that more programs fit an SM. Because at 4096
rows of 2304 to 5120 elements holding x was level or faster (H200, 2026-11-23)."""

_TILES = 1024
"""Tiles that fill the SMs of a large GPU, several each."""


_Config = TypeVar("_Config")


@dataclass(frozen=True, slots=True)
class _Tiles:
    """What both directions have; FwdConfig says what it means."""

    rows: int
    cols: int
    split: bool
    warps: int
    ctas: int
    stages: int


@dataclass(frozen=True, slots=True)
class FwdConfig(_Tiles):
    """Forward.

    rows: of a tile; cols: of a load; split: programs share a row, one load each, or one program loops over it; warps: of
    a program; ctas: programs per multiprocessor, each looping over tiles, or 0 for a program per tile; stages: depth of
    that loop's load pipeline; reload: read x once more, from L2, instead of holding it; with stages over 1 and no loop,
    one load less than stages is held, and the others are read that many ahead.
    """

    reload: bool


@dataclass(frozen=True, slots=True)
class BwdConfig(_Tiles):
    """Backward: as in FwdConfig."""

    def sum_rows(self, itemsize: int) -> int:
        """Return how many rows a program's sums for dγ have: as many as its warps load at once.

        A thread holds every such row of its columns, so that the sum over them moves nothing. It is 1 if the warps lie side by
        side along a row.
        """
        return min(self.rows, max(1, _WARP_BYTES * self.warps // (self.cols * itemsize)))


def check_config(config: Any, kind: type[_Tiles], least_ctas: int) -> None:
    """A config of this class whose tiles a kernel can have: sizes that are powers of two, 16 columns at least.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(config, kind):
        raise ValueError(f"config must be a {kind.__name__} or None, got {config!r}")
    for name, least in (("rows", 1), ("cols", 16), ("warps", 1)):
        size = getattr(config, name)
        if size < least or size & (size - 1):
            raise ValueError(f"config: {name} must be a power of two of at least {least}, got {config}")
    for name, least in (("ctas", least_ctas), ("stages", 1)):
        if getattr(config, name) < least:
            raise ValueError(f"config: {name} must be at least {least}, got {config}")


def space_fwd(case: Case) -> Space:
    """Offer loads from half a row, an eighth of a long or uneven one, to a whole row; tiles of many rows that are short."""
    whole = _power_of_two(case["N"])
    if whole <= _SHORT:
        return {
            "rows": _rows_of_short(whole, _MANY_ROWS[1]),
            "cols": (whole,),
            "split": (False,),
            "warps": (1, 2, 4, 8),
            "ctas": (0, 2, 4, 8),
            "stages": (1, 2, 3),
            "reload": (False,),
        }
    long = whole > 8192
    in_part = whole > _LONG
    smallest = max(4096, whole >> 4) if in_part else max(512, whole >> 3 if case["N"] % 8 or long else whole >> 1)
    return {
        "rows": (1, 2, 4, 8) if whole <= 1024 else (1, 2, 4) if whole <= 2048 else (1,) if long else (1, 2),
        "cols": tuple(cols for cols in (whole >> k for k in range(5)) if smallest <= cols <= 16384 or cols == whole <= 32768),
        "split": (False, True) if long else (False,),
        "warps": (2, 4, 8, 16, 32) if whole > 1024 else (1, 2, 4, 8),
        "ctas": (0, 2, 4) if whole <= 16384 else (0, 1, 2, 4),
        "stages": (1, 2, 3, 5, 7) if in_part else (1, 2, 3),
        "reload": (False, True) if whole >= 2048 else (False,),
    }


def space_bwd(case: Case) -> Space:
    """Offer tiles of up to four rows, of many rows that are short; one program to a row or several."""
    whole = _power_of_two(case["N"])
    if whole <= _SHORT:
        return {
            "rows": _rows_of_short(whole, _MANY_ROWS[1] // 2),
            "cols": (whole,),
            "split": (False,),
            "warps": (2, 4, 8),
            "ctas": (2, 4, 8),
            "stages": (1, 2, 3),
        }
    smallest = 1024 if whole <= 8192 else 2048
    cols = tuple(cols for cols in (whole >> k for k in range(6)) if smallest <= cols <= 16384 or cols == whole <= 4096)
    return {
        "rows": (1, 2, 4, 8) if whole <= 1024 else (1, 2, 4),
        "cols": cols,
        "split": (False, True) if whole > 4096 else (False,),
        "warps": (4, 8, 16, 32) if whole > 8192 else (4, 8, 16),
        "ctas": (1, 2, 4),
        "stages": (2, 3, 4),
    }


def _rows_of_short(whole: int, most: int) -> tuple[int, ...]:
    """Return how many rows of `whole` elements a tile may have."""
    return tuple(1 << k for k in range(9) if _MANY_ROWS[0] <= whole << k <= most)


def space_add_fwd(case: Case) -> Space:
    """Offer what `space_fwd` does, without rows that are read again: the sum has only just been written."""
    return {**space_fwd(case), "reload": (False,)}


def space_add_bwd(case: Case) -> Space:
    """Offer what `space_bwd` does, and fewer stages: there is half as much again to load."""
    return {**space_bwd(case), "stages": (1, 2, 3, 4)}


def valid_fwd(case: Case, config: FwdConfig) -> str | None:
    """Say why a forward config cannot run, or cannot be worth running."""
    loads = cdiv(case["N"], config.cols)
    if config.cols > _power_of_two(case["N"]):
        return f"loads of {config.cols} for rows of {case['N']}"
    if config.split and loads == 1:
        return "one load holds the row: nothing to split"
    if not config.split and loads > 1 and loads * config.cols * 3 > _power_of_two(case["N"]) * 4:
        return f"{loads} loads of {config.cols} leave a quarter of the lanes idle"
    in_part = config.reload and not config.ctas and config.stages > 1
    if loads > (16 if in_part else 8) and (not config.split or config.cols < 8192):
        return f"{loads} loads to a row"
    if config.reload and (config.split or config.ctas):
        return "reloading pays where one program has the whole row, and there are many programs"
    if in_part:
        return _invalid_in_part(case, config, loads)
    if (config.ctas == 0) != (config.stages == 1):
        return "a pipeline of loads needs a loop over tiles, and the loop needs the pipeline"
    if config.stages > 3:
        return f"{config.stages} tiles in the pipeline"
    elements = config.rows * config.cols * (1 if config.split or config.reload else loads)
    return _invalid_tile(case, elements, loads if config.split else 1, config, tensors=1, most=64)


def valid_add_fwd(case: Case, config: FwdConfig) -> str | None:
    """Say why a config of the forward of a sum cannot run, or cannot be worth running."""
    if config.reload:
        return "the sum has only just been written: it is not read again"
    loaded = config.rows * config.cols * (1 if config.split else cdiv(case["N"], config.cols))
    return valid_fwd(case, config) or _too_much_loaded(case, loaded, config, tensors=2)


def _invalid_in_part(case: Case, c: FwdConfig, loads: int) -> str | None:
    """The same where a program holds a part of its rows, and there is no loop.

    On an H200 (2026-11-22) that won with wide programs, two to a multiprocessor, that load 8 numbers to a thread, at long rows.
    """
    registers = 2 * ITEMSIZE[case.dtype] * (c.stages + 2)  # of what is held, the load ahead and the weight
    if case["N"] <= _LONG:
        return f"rows of at most {_LONG} are held or read again as a whole"
    if c.stages > loads:
        return f"{c.stages - 1} of {loads} loads held leave none to read again"
    if c.warps < 16 or c.rows * c.cols != 256 * c.warps:
        return "rows are held in part by at least 16 warps, 8 numbers of a load to a thread"
    if registers * 8 > _REGISTERS // (SHARING * 32 * c.warps) * 5:
        return f"{registers} registers per thread for loads"
    return None


def valid_add_bwd(case: Case, config: BwdConfig) -> str | None:
    """Say why a config of the backward of a sum cannot run, or cannot be worth running."""
    loaded = config.rows * config.cols * (1 if config.split else cdiv(case["N"], config.cols))
    return valid_bwd(case, config) or _too_much_loaded(case, loaded, config, tensors=3)


def valid_bwd(case: Case, config: BwdConfig) -> str | None:
    """Say why a backward config cannot run, or cannot be worth running."""
    loads = cdiv(case["N"], config.cols)
    if not config.ctas:
        return "dγ takes programs that loop over tiles: ctas must not be 0"
    if config.cols > _power_of_two(case["N"]):
        return f"loads of {config.cols} for rows of {case['N']}"
    if config.split and loads == 1:
        return "one load holds the row: nothing to split"
    if not config.split and loads > 1 and loads * config.cols * 3 > _power_of_two(case["N"]) * 4:
        return f"{loads} loads of {config.cols} leave a quarter of the lanes idle"
    if not config.split and loads > 8:
        return f"{loads} loads to a row"
    elements = config.rows * config.cols * (1 if config.split else loads)
    most = 64 if config.sum_rows(ITEMSIZE[case.dtype]) * 4 <= config.rows else 32  # the sums take registers too
    return _invalid_tile(case, elements, loads if config.split else 1, config, tensors=2, most=most)


def _invalid_tile(case: Case, elements: int, parts: int, c: Any, tensors: int, most: int) -> str | None:
    per_thread = elements / (32 * c.warps)
    if parts > _MAX_PARTS:
        return f"{parts} programs share a row, at most {_MAX_PARTS} may"
    if parts > 1 and not c.ctas:
        return "programs that share rows must be resident together: ctas must not be 0"
    if per_thread > most:
        return f"{per_thread:g} elements per thread"
    if per_thread < 8 and c.warps > 4:
        return f"{per_thread:g} elements per thread"
    if c.ctas * c.warps > 32 or 0 < c.ctas * c.warps < 4:
        return f"{c.ctas * c.warps} warps per multiprocessor"
    if c.ctas * c.warps * 32 * (per_thread * 1.5 * tensors + 16) > _REGISTERS + 8192:
        return "more registers than a multiprocessor has"
    return _too_much_loaded(case, elements, c, tensors)


def _too_much_loaded(case: Case, elements: int, c: Any, tensors: int) -> str | None:
    """Say why tiles of `elements` of so many tensors, all stages but one of them in shared memory, do not fit."""
    return too_much_shared(max(1, c.ctas) * max(0, c.stages - 1) * elements * ITEMSIZE[case.dtype] * tensors)


def default_fwd(case: Case) -> FwdConfig:
    """Return a config for any shape, by rule: the first valid one of what was fastest at rows of about this length."""
    return _first_valid(case, _likely_fwd(case, reload=True), valid_fwd)


def default_add_fwd(case: Case) -> FwdConfig:
    """Return a config for any shape, by rule, as `default_fwd` does."""
    return _first_valid(case, _likely_fwd(case, reload=False), valid_add_fwd)


def default_bwd(case: Case) -> BwdConfig:
    """Return a config for any shape, by rule, as `default_fwd` does."""
    return _first_valid(case, _likely_bwd(case), valid_bwd)


def default_add_bwd(case: Case) -> BwdConfig:
    """Return a config for any shape, by rule, as `default_fwd` does."""
    return _first_valid(case, _likely_bwd(case), valid_add_bwd)


def _first_valid(case: Case, likely: Iterator[_Config], valid: Callable[[Case, _Config], str | None]) -> _Config:
    """Return the first valid config, or the last one."""
    config = next(likely)
    while valid(case, config) is not None and (following := next(likely, None)) is not None:
        config = following
    return config


def _likely_fwd(case: Case, reload: bool) -> Iterator[FwdConfig]:
    """Generate configs, the likeliest first; the last runs anything. reload: whether x may be read again."""
    M, whole = case["M"], _power_of_two(case["N"])
    if whole <= 1024:
        rows = _tile_rows(M, max(1, 2048 // whole))
        warps = 2 if case.quant != "none" or 128 < whole <= _SHORT else 4
        yield FwdConfig(rows, whole, False, min(warps, max(1, rows * whole // 512)), ctas=0, stages=1, reload=False)
    if M < _FEW_ROWS and whole > 4096:
        yield FwdConfig(1, max(4096, whole // _MAX_PARTS), True, warps=8, ctas=2, stages=2, reload=False)
    if case.quant != "none" and whole <= 8192:
        cols = 4096 if whole == 8192 else 2048
        yield FwdConfig(2 if 2 * _TILES <= M else 1, cols, False, cols // 1024, ctas=0, stages=1, reload=reload and whole > 2048)
    if whole > _LONG and reload:
        for cols, stages in ((4096, 5), (4096, 3), (8192, 2)):
            yield FwdConfig(1, cols, False, cols // 256, ctas=0, stages=stages, reload=True)
    if whole > _LONG:
        for cols in (4096, 8192):
            yield FwdConfig(1, max(cols, whole // _MAX_PARTS), True, warps=cols // 512, ctas=1, stages=2, reload=False)
    cols, warps = (min(whole, 2048), 4) if whole <= 4096 else (4096, 8 if whole <= 8192 else 16)
    large = M * case["N"] >= _LARGE
    for again in (True, False) if reload and large and whole > 2048 else (False,):
        yield FwdConfig(1, cols, False, warps, ctas=0, stages=1, reload=again)
    yield FwdConfig(1, whole, False, warps=1 if whole <= 512 else 4, ctas=0, stages=1, reload=False)


def _likely_bwd(case: Case) -> Iterator[BwdConfig]:
    """Generate configs, the likeliest first; the last runs anything."""
    M, N, whole = case["M"], case["N"], _power_of_two(case["N"])
    if whole <= 1024:
        for elements, ctas in ((2048, 4), (1024, 2)):
            yield BwdConfig(_tile_rows(M, max(1, elements // whole)), whole, False, warps=4, ctas=ctas, stages=3)
    if whole == 2048:
        yield BwdConfig(_tile_rows(M, 2), 2048, False, warps=4, ctas=2, stages=3)
    if 3584 < N <= 4096:
        yield BwdConfig(_tile_rows(M, 2), 4096, False, warps=8, ctas=1, stages=3)
    if 1024 < whole <= 4096:
        for stages in (4, 3, 2):
            yield BwdConfig(1, 1024, False, warps=4, ctas=2, stages=stages)
    if 4096 < N <= 6144:
        yield BwdConfig(1, 2048, False, warps=8, ctas=2, stages=4)
    if 4096 < N <= 8192:
        yield BwdConfig(1, 8192, False, warps=8, ctas=1, stages=3)
        yield BwdConfig(1, 2048, False, warps=8, ctas=1, stages=3)
    if 8192 < N <= 12288:
        yield BwdConfig(1, 4096, False, warps=16, ctas=1, stages=3)
    for rows in (4, 2, 1) if M >= 4 * _FEW_ROWS else (2, 1):
        for stages in (3, 2):
            cols = max(2048, whole // _MAX_PARTS)
            yield BwdConfig(rows, cols, cols < N, max(4 if whole > _LONG else 8, cols // 512), ctas=2, stages=stages)
    for cols, warps in ((4096, 16), (8192, 16)):
        yield BwdConfig(1, max(cols, whole // _MAX_PARTS), cols < N, warps, ctas=1, stages=2)
    yield BwdConfig(1, whole, False, warps=4, ctas=1, stages=2)


def _tile_rows(M: int, most: int) -> int:
    """Return how many rows a tile takes, a power of two: fewer than the most where there would not be tiles for all SMs."""
    while most > 1 and most * _TILES > M:
        most //= 2
    return most


def _power_of_two(n: int) -> int:
    return max(16, next_power_of_2(n))
