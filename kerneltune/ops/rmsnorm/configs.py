"""What can be chosen about the `optimized` variants: their configs, what makes a config valid, the defaults.

Launches nothing. May import arguments and spec.
"""

from dataclasses import dataclass
from typing import Any

from kerneltune.kernel_lib.arguments import ITEMSIZE
from kerneltune.kernel_lib.launch import too_much_shared
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Space

_MAX_PARTS = 64
_MAX_PARTS_OF_TILE = 128
FUSED_ROWS = 16
"""With a transpose, tiles of as many rows are written both ways by one kernel; smaller ones leave the transpose to a second."""
_L2_SHARE_BYTES = 400_000
"""What the L2 holds for each multiprocessor."""


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
    that loop's load pipeline; reload: read x once more, from L2, instead of holding it (always so with a transpose).
    """

    reload: bool


@dataclass(frozen=True, slots=True)
class BwdConfig(_Tiles):
    """Backward: reduce_cols, columns per program of the dγ reduction; all others as in FwdConfig."""

    reduce_cols: int


def space_fwd(case: Case) -> Space:
    """What there is for rows; with a transpose that a second kernel makes, or that one kernel makes of larger tiles."""
    rows = _space_of_rows(case)
    if case.quant != "fp8_t":
        return rows
    fused = _space_of_fused_transposes(case)
    return {name: tuple(dict.fromkeys((*rows[name], *fused[name]))) for name in rows}


def _space_of_fused_transposes(case: Case) -> Space:
    """Tiles of 16 to 128 rows, of which a row of the transposed tile is half a memory sector to four."""
    cols = (128, 256, 512) if _power_of_two(case["N"]) <= 16384 else (256, 512, 1024)
    split = (True, False) if case["M"] * 8 >= case["N"] else (True,)
    rows = (16, 32, 64) if case["M"] <= 512 else (32, 64, 128)
    shape: Space = {"rows": rows, "cols": cols, "split": split, "warps": (2, 4, 8, 16)}
    return {**shape, "ctas": (1, 2, 3, 4), "stages": (1, 2, 3), "reload": (False, True)}


def _space_of_rows(case: Case) -> Space:
    """Loads from a quarter of a row to a whole row."""
    whole = _power_of_two(case["N"])
    long = whole > 8192
    smallest = max(512, whole >> 3 if case["N"] % 8 or long else whole >> 1)
    return {
        "rows": (1, 2, 4) if whole <= 2048 else (1,) if long else (1, 2),
        "cols": tuple(cols for cols in (whole >> k for k in range(5)) if smallest <= cols <= 16384 or cols == whole <= 32768),
        "split": (False, True) if long else (False,),
        "warps": (2, 4, 8, 16, 32) if whole > 1024 else (1, 2, 4, 8),
        "ctas": (0, 2, 4) if whole <= 16384 else (0, 1, 2, 4),
        "stages": (1, 2, 3),
        "reload": (False, True) if whole >= 2048 else (False,),
    }


def space_bwd(case: Case) -> Space:
    """Tiles of up to four rows, one program to a row or several."""
    whole = _power_of_two(case["N"])
    smallest = max(1024, whole >> 3 if whole > 4096 else whole >> 2)
    cols = tuple(cols for cols in (whole >> k for k in range(5)) if smallest <= cols <= 16384 or cols == whole <= 4096)
    return {
        "rows": (1, 2, 4),
        "cols": cols,
        "split": (False, True) if whole > 4096 else (False,),
        "warps": (4, 8, 16, 32) if whole > 8192 else (4, 8, 16),
        "ctas": (1, 2, 4),
        "stages": (2, 3, 4),
        "reduce_cols": (32,),
    }


def valid_fwd(case: Case, config: FwdConfig) -> str | None:
    """Why a forward config cannot run, or cannot be worth running."""
    loads = cdiv(case["N"], config.cols)
    if case.quant == "fp8_t" and config.rows >= FUSED_ROWS:
        return _invalid_transpose(case, loads, config)
    if case.quant == "fp8_t" and config.cols not in _space_of_rows(case)["cols"]:
        return "loads as short as those of a fused transpose"
    if config.split and loads == 1:
        return "one load holds the row: nothing to split"
    if not config.split and loads > 1 and loads * config.cols * 3 > _power_of_two(case["N"]) * 4:
        return f"{loads} loads of {config.cols} leave a quarter of the lanes idle"
    if not config.split and loads > 16:
        return f"{loads} loads to a row"
    if (config.ctas == 0) != (config.stages == 1):
        return "a pipeline of loads needs a loop over tiles, and the loop needs the pipeline"
    if config.reload and (config.split or config.ctas):
        return "reloading pays where one program has the whole row, and there are many programs"
    elements = config.rows * config.cols * (1 if config.split or config.reload else loads)
    return _invalid_tile(case, elements, loads if config.split else 1, config, tensors=1)


def promising_fwd(case: Case) -> tuple[FwdConfig, ...]:
    """With a transpose, what a row-wise kernel and a second one do best in most shapes."""
    if case.quant != "fp8_t":
        return ()
    whole = min(8192, _power_of_two(case["N"]))
    once = [FwdConfig(1, whole, False, warps, 0, 1, False) for warps in (2, 4, 8, 16, 32)]
    loops = [
        FwdConfig(1, whole >> k, False, warps, ctas, 3, False) for k in range(3) for warps, ctas in ((4, 4), (8, 2), (16, 1))
    ]
    return tuple(c for c in (*once, *loops) if valid_fwd(case, c) is None)


def valid_bwd(case: Case, config: BwdConfig) -> str | None:
    """Why a backward config cannot run, or cannot be worth running."""
    loads = cdiv(case["N"], config.cols)
    if config.split and loads == 1:
        return "one load holds the row: nothing to split"
    if not config.split and loads > 1 and loads * config.cols * 3 > _power_of_two(case["N"]) * 4:
        return f"{loads} loads of {config.cols} leave a quarter of the lanes idle"
    if not config.split and loads > 8:
        return f"{loads} loads to a row"
    elements = config.rows * config.cols * (1 if config.split else loads)
    return _invalid_tile(case, elements, loads if config.split else 1, config, tensors=2)


def _invalid_transpose(case: Case, parts: int, c: FwdConfig) -> str | None:
    itemsize = ITEMSIZE[case.dtype]
    elements = c.rows * c.cols
    per_thread = elements / (32 * c.warps)
    if c.rows % 4 or not c.ctas:
        return "a transpose needs tiles of a multiple of 4 rows, in a loop"
    if c.reload == (c.stages > 1):
        return "tiles that are held need the next one on its way, tiles that are read again have been fetched before"
    if c.split and parts > _MAX_PARTS_OF_TILE:
        return f"{parts} programs share a row, at most {_MAX_PARTS_OF_TILE} may"
    if not c.split and not c.reload:
        return "whole rows are read again"
    if not c.split and (window := c.ctas * c.rows * case["N"] * itemsize) > _L2_SHARE_BYTES:
        return f"{window} bytes of x per multiprocessor are read before they are read again: more than the L2 holds"
    if not 16 <= per_thread <= 128:
        return f"{per_thread:g} elements per thread"
    paired = _paired(case)
    if not paired and case["M"] % 4 and c.cols >= 128 * c.warps:
        return "ptxas 12.8 makes wrong bytes of the transpose where a thread turns them by itself"
    if c.ctas * c.warps > 48 or c.ctas * c.warps < 4:
        return f"{c.ctas * c.warps} warps per multiprocessor"
    words = per_thread / 2 if paired else per_thread  # 16-bit numbers that are not in pairs take a register each
    if c.ctas * c.warps * 32 * ((1 if c.reload else 2) * words + 32) > 65536 + (8192 if c.reload else 0):
        return "more registers than a multiprocessor has"
    return too_much_shared(c.ctas * elements * ((c.stages - 1) * itemsize + 1))


def _invalid_tile(case: Case, elements: int, parts: int, c: Any, tensors: int) -> str | None:
    per_thread = elements / (32 * c.warps)
    if parts > _MAX_PARTS:
        return f"{parts} programs share a row, at most {_MAX_PARTS} may"
    if parts > 1 and not c.ctas:
        return "programs that share rows must be resident together: ctas must not be 0"
    if per_thread > 64 // tensors:
        return f"{per_thread:g} elements per thread"
    if per_thread < 8 and c.warps > 4:
        return f"{per_thread:g} elements per thread"
    if c.ctas * c.warps > 32 or 0 < c.ctas * c.warps < 4:
        return f"{c.ctas * c.warps} warps per multiprocessor"
    if c.ctas * c.warps * 32 * (per_thread * 1.5 * tensors + 16) > 65536 + 8192:
        return "more registers than a multiprocessor has"
    shared = max(1, c.ctas) * max(0, c.stages - 1) * elements * ITEMSIZE[case.dtype] * tensors
    return too_much_shared(shared)


def default_fwd(case: Case) -> FwdConfig:
    """A config for any shape, by rule."""
    whole = _power_of_two(case["N"])
    if case.quant == "fp8_t":
        cols = max(256, whole // _MAX_PARTS_OF_TILE)
        rows, ctas = (16384 // cols, 2) if _paired(case) else (8192 // cols, 1)
        return FwdConfig(rows, cols, split=True, warps=8, ctas=ctas, stages=2, reload=False)
    split = whole > 16384
    cols = max(8192, whole // _MAX_PARTS) if split else whole
    return FwdConfig(1, cols, split, warps=min(16, max(1, cols // 512)), ctas=int(split), stages=1 + split, reload=False)


def default_bwd(case: Case) -> BwdConfig:
    """A config for any shape, by rule."""
    whole = _power_of_two(case["N"])
    cols = whole if whole <= 8192 else max(2048, whole // _MAX_PARTS)
    split = cols < case["N"]
    return BwdConfig(rows=1, cols=cols, split=split, warps=min(16, max(4, cols // 512)), ctas=1, stages=2, reduce_cols=32)


def _paired(case: Case) -> bool:
    """Whether kernels read numbers of 16 bits two at a time."""
    return ITEMSIZE[case.dtype] == 2 and case["N"] % 2 == 0


def _power_of_two(n: int) -> int:
    return max(16, next_power_of_2(n))
