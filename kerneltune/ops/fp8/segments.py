"""What may be tuned of the tensorwise casts: knobs, space, constraints, default. Launches nothing."""

from dataclasses import dataclass

from kerneltune.kernel_lib.arguments import ITEMSIZE
from kerneltune.kernel_lib.launch import too_much_shared
from kerneltune.spec import Case, Space


@dataclass(frozen=True, slots=True)
class SegmentConfig:
    """rows, cols: of a tile; warps: of a program; ctas: programs per multiprocessor, each looping over tiles, or 0 for a
    program per tile; stages: depth of that loop's load pipeline; staged: of scales that are no powers of two, every tile
    leaves its largest magnitude in a word of its own for the second launch to reduce, instead of raising its segment's."""

    rows: int
    cols: int
    warps: int
    ctas: int
    stages: int
    staged: bool


def space(case: Case) -> Space:
    """Wide tiles where rows go out as rows, tall ones where they go out transposed."""
    wide = tuple(cols for cols in (128, 256, 512, 1024) if cols == 128 or cols < 2 * case["K"])
    return {
        "rows": (8, 16, 32, 64) if case.option("layout") == "row" else (64, 128),
        "cols": wide[-3:] if case.option("layout") == "row" else (64, 128, 256),
        "warps": (2, 4, 8),
        "ctas": (0, 2, 4, 6, 8),
        "stages": (1, 2, 3),
        "staged": (False,) if case.option("pow2") else (False, True),
    }


def valid(case: Case, config: SegmentConfig) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    if config.rows % 4:
        return "tiles are of four interleaved parts: rows must be a multiple of 4"
    per_thread = config.rows * config.cols / (32 * config.warps)
    if not 16 <= per_thread <= 128:
        return f"{per_thread:g} elements per thread"
    if (config.ctas == 0) != (config.stages == 1):
        return "a pipeline of loads needs a loop over tiles, and the loop needs the pipeline"
    if config.staged and case.option("pow2"):
        return "tiles are cast at once by the largest magnitude so far, which nobody knows of words of their own"
    if config.staged and not config.ctas:
        return "a program would reduce all of a segment's words for a single tile"
    words = per_thread * ITEMSIZE[case.dtype] / 4
    if 32 * config.warps * config.ctas * (words * 1.25 + 32) > 65536:
        return "more registers than a multiprocessor has"
    shared = max(1, config.ctas) * config.rows * config.cols * ((config.stages - 1) * ITEMSIZE[case.dtype] + 1)
    return too_much_shared(shared)


def at_most(config: SegmentConfig, itemsize: int) -> int:
    """Programs whose registers a multiprocessor has: each its tile, half as much again, and 32 for addresses."""
    words = config.rows * config.cols * itemsize / (128 * config.warps)
    return int(65536 / (32 * config.warps * (1.5 * words + 32)))


def default(case: Case) -> SegmentConfig:
    """A config for any shape, by rule."""
    if case.option("layout") == "row":
        cols = 512 if case["K"] > 256 else 256 if case["K"] > 64 else 128
        rows = 8192 // cols
        return SegmentConfig(rows=rows, cols=cols, warps=8 if case.dtype == "float32" else 4, ctas=0, stages=1, staged=False)
    return SegmentConfig(rows=64 if case.dtype == "float32" else 128, cols=64, warps=8, ctas=0, stages=1, staged=False)
