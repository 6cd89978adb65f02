"""Cast activations to fp8 with a scale per row, for the forward product.

Source: torchao's triton_fp8_rowwise_2d_scale_and_cast.
"""

from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_matrix
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device, too_much_shared
from kerneltune.ops.fp8 import contract, peers
from kerneltune.ops.fp8.baselines import torchao
from kerneltune.ops.fp8.contract import CALL_OPTIONS, CAST, Cast, Pair, fp8_dtype
from kerneltune.ops.fp8.kernels.rows import cast_rows
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Variant

_MOST_CHUNKS = 16
"""Loads of a row that a program holds: of 16 bytes a thread, 16 loads take the 64 registers that `_held_invalid` allows."""


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Hold the config of a cast of rows.

    Attributes:
        rows: rows of a tile.
        cols: columns of a load; a row takes several loads.
        warps: warps of a program.
        ctas: programs per SM, each looping over tiles; 0 for a program per tile.
        stages: depth of the load pipeline of the program's loop: over tiles or, with reload, over the loads of a row.
        reload: whether the program reads the row a second time, from L2, instead of holding it in registers.
    """

    rows: int
    cols: int
    warps: int
    ctas: int
    stages: int
    reload: bool


def space(case: Case) -> Space:
    """Offer loads from an eighth of a row to a whole row; up to four rows, or more rows if rows are short."""
    K = case["K"]
    padded = next_power_of_2(K)
    most = 8192 if padded > 16384 else 4096
    return {
        "rows": (4, 8, 16) if K <= 256 else (1, 2, 4) if K <= 4096 else (1, 2) if K <= 8192 else (1,),
        "cols": tuple(cols for cols in (8192, 4096, 2048, 1024, 512) if cols <= most and cols < 2 * K) or (max(16, padded),),
        "warps": (1, 2, 4, 8, 16),
        "ctas": (0, 2, 4, 6, 8),
        "stages": (1, 2, 3),
        "reload": (False, True) if padded >= 8192 else (False,),
    }


def invalid(case: Case, config: RowConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    K, itemsize = case["K"], ITEMSIZE[case.dtype]
    chunks = cdiv(K, config.cols)
    if chunks > 1 and chunks * config.cols > K * 1.15:
        return f"{chunks} loads of {config.cols} leave more than an eighth of the lanes idle"
    per_load = config.rows * config.cols / (32 * config.warps)
    if per_load * itemsize < 16 and config.warps > 1:
        return f"loads of {per_load * itemsize:g} bytes"
    why_invalid = _reload_invalid if config.reload else _held_invalid
    return why_invalid(config, chunks, per_load, itemsize)


def _reload_invalid(config: RowConfig, chunks: int, per_load: float, itemsize: int) -> str | None:
    if config.ctas or chunks < 2 or per_load > 64:
        return "reloading pays where a program has one long row, read by parts"
    if config.stages > 1 and config.ctas * config.stages * config.rows * config.cols * itemsize > 200_000:
        return "more shared memory than an SM has"
    return None


def _held_invalid(config: RowConfig, chunks: int, per_load: float, itemsize: int) -> str | None:
    if chunks > _MOST_CHUNKS:
        return f"{chunks} loads to a row"
    if (config.ctas == 0) != (config.stages == 1):
        return "a pipeline of loads needs a loop over tiles, and the loop needs the pipeline"
    words = per_load * chunks * itemsize / 4
    if words > 64:
        return f"{words:g} registers of input per thread"
    if not 8 <= config.ctas * config.warps <= 64 and config.ctas:
        return f"{config.ctas * config.warps} warps per SM"
    if config.ctas * config.warps * 32 * (words * 1.25 + 24) > 65536 + 8192:
        return "more registers than an SM has"
    return too_much_shared(config.ctas * (config.stages - 1) * config.rows * chunks * config.cols * itemsize)


def default(case: Case) -> RowConfig:
    """Return a config for any shape, by rule: 16 to 64 elements of a row in every thread, few idle lanes at its end."""
    K, itemsize = case["K"], ITEMSIZE[case.dtype]
    if K <= 256:
        cols = max(16, next_power_of_2(K))
        return RowConfig(rows=min(16, 1024 // cols), cols=cols, warps=1, ctas=0, stages=1, reload=False)
    held = 64 * 32 * 2 // itemsize  # elements that a warp can hold
    for cols in (1024, 2048, 4096, 8192, 512, 256):
        warps = max(1, cols // 256)
        chunks = cdiv(K, cols)
        if (chunks == 1 and cols >= 2 * K) or chunks > 8 or chunks * cols >= held * warps:
            continue
        if chunks * cols <= K * 1.1:
            return RowConfig(1, cols, warps, ctas=0, stages=1, reload=False)
    if K <= 8192:
        cols = next_power_of_2(K)
        return RowConfig(1, cols, warps=min(16, max(1, cols // 512)), ctas=0, stages=1, reload=False)
    cols = 2048 if K % 2048 == 0 or K > 20000 else 1024
    return RowConfig(1, cols, warps=cols // 256, ctas=0, stages=1, reload=True)


def reference(inputs: Inputs) -> Outputs:
    """Cast over the last axis."""
    q, scale = contract.quantized(inputs["x"], 1, inputs)
    return {"q": q, "scale": scale}


def _results(x: torch.Tensor, fp8_format: str) -> Pair:
    (M, K), device = x.shape, x.device
    q = torch.empty((M, K), dtype=fp8_dtype(fp8_format, device), device=device)
    return q, torch.empty((M, 1), dtype=torch.float32, device=device)


@torch_operator(_results)
@on_its_device
def fp8_rowwise_2d(
    x: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    config: RowConfig | None = None,
) -> Pair:
    """Cast activations to fp8 with one scale per row.

    Args:
        x: (M, K) bf16, fp16 or fp32; rows may be less than 2^27 elements apart, elements of a row must be adjacent.
        fp8_format: `e4m3`, `e5m2`, `e4m3fnuz` or `e5m2fnuz`.
        pow2: round scales down to powers of two.
        inverse: return 1 / scale, which scaled matrix products want, instead of the multiplier.
        config: None takes the best known config.

    Returns:
        q (M, K) fp8, contiguous; scales (M, 1) fp32. NaN makes its row's scale and values NaN; infinity makes its row's
        scale 0, its finite elements 0 and its infinite elements NaN.
    """
    check_matrix("x", x)
    cast, (M, K) = Cast(fp8_format, pow2, inverse), x.shape
    q, scale = _results(x, fp8_format)
    if config is None and x.numel():
        config = _choose((("M", M), ("K", K)), DTYPE_NAMES[x.dtype], "fp8", CALL_OPTIONS)
    cast_rows(x, q, scale, cast, config)
    return q, scale


OP = Op(
    name="fp8_rowwise_2d",
    axes=("M", "K"),
    free_axes=("M",),
    reference=reference,
    traffic=lambda case: contract.cast_traffic(case, scales=case["M"]),
    variants=(
        torchao.ROWS,
        Variant("optimized", run_of(fp8_rowwise_2d, "q", "scale"), RowConfig, space, invalid, default),
        *peers.ROWS,
    ),
    module=__name__,
    **CAST,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
