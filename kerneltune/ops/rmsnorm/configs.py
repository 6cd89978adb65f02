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
_WARP_BYTES = 512
"""That a warp loads at once."""

SHARING = 2
"""Programs that share a multiprocessor's registers where they hold a part of a row: one waits for its sum, the other reads."""

_REGISTERS = 65536
"""Of a multiprocessor."""

_LONG = 16384
"""Numbers of a row beyond which a program may hold a part of it."""


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
        """Rows of a program's sums for dγ: 1 where its warps lie side by side, so that a thread has all rows of its columns."""
        return 1 if self.cols * itemsize >= _WARP_BYTES * self.warps else self.rows


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
    """Loads from half a row, an eighth of a long or uneven one, to a whole row; a sixteenth of one that may be held in part."""
    whole = _power_of_two(case["N"])
    long = whole > 8192
    in_part = whole > _LONG
    smallest = max(4096, whole >> 4) if in_part else max(512, whole >> 3 if case["N"] % 8 or long else whole >> 1)
    return {
        "rows": (1, 2, 4) if whole <= 2048 else (1,) if long else (1, 2),
        "cols": tuple(cols for cols in (whole >> k for k in range(5)) if smallest <= cols <= 16384 or cols == whole <= 32768),
        "split": (False, True) if long else (False,),
        "warps": (2, 4, 8, 16, 32) if whole > 1024 else (1, 2, 4, 8),
        "ctas": (0, 2, 4) if whole <= 16384 else (0, 1, 2, 4),
        "stages": (1, 2, 3, 5, 7) if in_part else (1, 2, 3),
        "reload": (False, True) if whole >= 2048 else (False,),
    }


def space_bwd(case: Case) -> Space:
    """Tiles of up to four rows, one program to a row or several."""
    whole = _power_of_two(case["N"])
    smallest = 1024 if whole <= 8192 else 2048
    cols = tuple(cols for cols in (whole >> k for k in range(6)) if smallest <= cols <= 16384 or cols == whole <= 4096)
    return {
        "rows": (1, 2, 4),
        "cols": cols,
        "split": (False, True) if whole > 4096 else (False,),
        "warps": (4, 8, 16, 32) if whole > 8192 else (4, 8, 16),
        "ctas": (1, 2, 4),
        "stages": (2, 3, 4),
    }


def valid_fwd(case: Case, config: FwdConfig) -> str | None:
    """Why a forward config cannot run, or cannot be worth running."""
    loads = cdiv(case["N"], config.cols)
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


def valid_bwd(case: Case, config: BwdConfig) -> str | None:
    """Why a backward config cannot run, or cannot be worth running."""
    loads = cdiv(case["N"], config.cols)
    if not config.ctas:
        return "dγ takes programs that loop over tiles: ctas must not be 0"
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
    shared = max(1, c.ctas) * max(0, c.stages - 1) * elements * ITEMSIZE[case.dtype] * tensors
    return too_much_shared(shared)


def default_fwd(case: Case) -> FwdConfig:
    """A config for any shape, by rule."""
    whole = _power_of_two(case["N"])
    split = whole > 16384
    cols = max(8192, whole // _MAX_PARTS) if split else whole
    return FwdConfig(1, cols, split, warps=min(16, max(1, cols // 512)), ctas=int(split), stages=1 + split, reload=False)


def default_bwd(case: Case) -> BwdConfig:
    """A config for any shape, by rule."""
    whole = _power_of_two(case["N"])
    cols = whole if whole <= 8192 else max(2048, whole // _MAX_PARTS)
    split = cols < case["N"]
    return BwdConfig(rows=1, cols=cols, split=split, warps=min(16, max(4, cols // 512)), ctas=1, stages=2)


def _power_of_two(n: int) -> int:
    return max(16, next_power_of_2(n))
