"""What can be chosen about a grouped product: Triton's kernel and its tiles, or torch's CUTLASS kernel; the default.

Launches nothing. May import arguments and spec.
"""

from dataclasses import dataclass

from kerneltune.kernel_lib.arguments import ITEMSIZE
from kerneltune.spec import Case, Space

BACKENDS = ("triton", "cutlass")
_SHARED_BYTES = 232448 - 1024


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """backend: `triton`, or `cutlass` for torch's own kernel, to which the rest means nothing; rows, cols: of a tile; depth: of
    one step of the contraction; warps, stages: of a program; ctas: programs per multiprocessor; band: tiles that follow each
    other down the rows before the next column; run: tiles that a program takes at a time; parts: in which a tile's columns are
    stored."""

    backend: str
    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    ctas: int
    band: int
    run: int
    parts: int


CUTLASS = GemmConfig("cutlass", rows=64, cols=128, depth=128, warps=4, stages=4, ctas=1, band=1, run=1, parts=1)
"""The one config of that backend."""


def space(case: Case) -> Space:
    """Tiles of 64 x 128 to 128 x 256 and 256 x 128."""
    short = case.option("product") == "weights" and case["M"] <= 128 * case["E"]
    return {
        "backend": BACKENDS,
        "rows": (64, 128, 256),
        "cols": (128, 256),
        "depth": (128, 64) if short else (128,),
        "warps": (4, 8),
        "stages": (3, 4, 5, 6),
        "ctas": (1, 2),
        "band": (1, 4, 64),
        "run": (1, 8) if case.option("product") == "weights" else (1,),
        "parts": (1, 2, 4),
    }


def valid(case: Case, config: GemmConfig) -> str | None:
    """Return why a config cannot run, or cannot be worth running."""
    if config.backend == "cutlass":
        if case.option("product") == "weights":
            return "CUTLASS's kernel takes groups of multiples of 16 tokens, and else ends the CUDA context"
        if case.dtype != "bfloat16":
            return "CUTLASS's kernel gives bfloat16"
        return None if config == CUTLASS else "its tiles are its own"
    per_thread = config.rows * config.cols / (32 * config.warps)
    if not 32 <= per_thread <= 128:
        return f"{per_thread:g} accumulators per thread"
    if config.warps == 8 and config.rows == 64:
        return "64 rows are one warp group's"
    if config.ctas * config.warps * 32 * (per_thread + 64) > 65536:
        return "more registers than a multiprocessor has"
    if config.rows >= 256 and case.option("product") == "rows" and case["M"] <= 128 * case["E"]:
        return "most groups are shorter than a tile"
    if _shared_bytes(case, config) > _SHARED_BYTES // config.ctas:
        return f"{_shared_bytes(case, config)} bytes of shared memory"
    return None


def _shared_bytes(case: Case, config: GemmConfig) -> int:
    tiles = config.stages * (config.rows + config.cols) * config.depth
    return tiles + config.rows * config.cols * ITEMSIZE[case.dtype] // config.parts


def default(case: Case) -> GemmConfig:
    """A config for any shape, by rule: tiles as large as the rows of a group and the columns fill."""
    wide = 2 if case.dtype == "float32" else 1
    rows = case["N"] if case.option("product") == "weights" else case["M"] // max(1, case["E"])
    if rows <= 64:
        return GemmConfig("triton", 64, 128, 128, warps=4, stages=6, ctas=1, band=1, run=1, parts=1)
    columns = case["K"] if case.option("product") == "weights" else case["N"]
    if columns <= 128:
        return GemmConfig("triton", 128, 128, 128, warps=8, stages=4, ctas=1, band=4, run=1, parts=1)
    if rows >= 512 and 0 < columns % 256 <= 128:
        return GemmConfig("triton", 256, 128, 128, warps=8, stages=4, ctas=1, band=4, run=1, parts=2 * wide)
    return GemmConfig("triton", 128, 256, 128, warps=8, stages=4, ctas=1, band=4, run=1, parts=2 * wide)


def promising(case: Case) -> tuple[GemmConfig, ...]:
    """The other backend, and each kind of tile once."""
    tiles = (
        GemmConfig("triton", 128, 256, 128, warps=8, stages=4, ctas=1, band=64, run=1, parts=2),
        GemmConfig("triton", 256, 128, 128, warps=8, stages=4, ctas=1, band=4, run=1, parts=2),
        GemmConfig("triton", 128, 128, 128, warps=4, stages=3, ctas=2, band=4, run=1, parts=2),
        GemmConfig("triton", 64, 256, 128, warps=4, stages=5, ctas=1, band=1, run=1, parts=2),
        GemmConfig("triton", 64, 128, 128, warps=4, stages=4, ctas=2, band=1, run=1, parts=1),
    )
    return tuple(config for config in (CUTLASS, *tiles) if valid(case, config) is None)
