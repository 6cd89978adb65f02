"""What may be tuned of the tensorwise casts: knobs, space, constraints, default. Launches nothing."""

from dataclasses import dataclass

from kerneltune.kernel_lib.arguments import ITEMSIZE
from kerneltune.kernel_lib.launch import too_much_shared
from kerneltune.spec import Case, Space


@dataclass(frozen=True, slots=True)
class SegmentConfig:
    """rows, cols: of a tile; warps: of a program; ctas: programs per multiprocessor, each looping over tiles, or 0 for a
    program per tile; stages: depth of that loop's load pipeline."""

    rows: int
    cols: int
    warps: int
    ctas: int
    stages: int


def space(case: Case) -> Space:
    """Wide tiles where rows go out as rows, tall ones where they go out transposed."""
    wide = tuple(cols for cols in (128, 256, 512, 1024) if cols == 128 or cols < 2 * case["K"])
    return {
        "rows": (8, 16, 32, 64) if case.option("layout") == "row" else (64, 128),
        "cols": wide[-3:] if case.option("layout") == "row" else (64, 128, 256),
        "warps": (2, 4, 8),
        "ctas": (0, 2, 4, 6, 8),
        "stages": (1, 2, 3),
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
    words = per_thread * ITEMSIZE[case.dtype] / 4
    if 32 * config.warps * config.ctas * (words * 1.25 + 32) > 65536:
        return "more registers than a multiprocessor has"
    shared = max(1, config.ctas) * config.rows * config.cols * ((config.stages - 1) * ITEMSIZE[case.dtype] + 1)
    return too_much_shared(shared)


def at_most(config: SegmentConfig, itemsize: int) -> int:
    """Programs whose registers a multiprocessor has: each its tile, half as much again, and 32 for addresses."""
    words = config.rows * config.cols * itemsize / (128 * config.warps)
    return max(1, int(65536 / (32 * config.warps * (1.5 * words + 32))))


def default(case: Case) -> SegmentConfig:
    """A config for any shape, by rule."""
    if case.option("layout") == "row":
        cols = 512 if case["K"] > 256 else 256 if case["K"] > 64 else 128
        rows = 8192 // cols
        return SegmentConfig(rows=rows, cols=cols, warps=8 if case.dtype == "float32" else 4, ctas=0, stages=1)
    return SegmentConfig(rows=64 if case.dtype == "float32" else 128, cols=64, warps=8, ctas=0, stages=1)
