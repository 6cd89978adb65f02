"""Cast expert weights into both layouts, for the products that give Y and dX, each with its own scales, in one launch.

Source: the idea is of torchao's pull request 4389, which has a single scale; here each row and each column has a scale.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import colwise_3d, contract, peers, rowwise_3d_transpose
from kerneltune.ops.fp8.contract import CALL_OPTIONS, CAST, Cast, check_weights, fp8_dtype
from kerneltune.ops.fp8.kernels.both import TILE_ROWS, abreast, cast_into_both
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Variant

_MOST_STEP = 16
"""Most rows that a program casts at a time; of short rows the registers would hold more."""

MANY_ROWS = 4 * 132 * 32
"""Rows of all experts with which four programs on each SM of an H200 have 32 rows each."""


@dataclass(frozen=True, slots=True)
class BothConfig:
    """Hold the config of a cast of weights into both layouts.

    Attributes:
        rows: rows of a row program.
        step: rows that a row program casts at a time.
        cols: columns of a load; a row may take several loads.
        warps: warps of a row program and of a transpose program, whose tile has 16 columns per warp.
        lag: row programs per SM with ids before the first transpose program; weights add the row programs of one expert.
    """

    rows: int
    step: int
    cols: int
    warps: int
    lag: int


def space(case: Case) -> Space:
    """Offer 16 to 64 rows per program; rows at a time that fill 17 to 64 registers; loads of 8 or 16 elements per thread."""
    return {
        "rows": (16, 32, 64),
        "step": (1, 2, 4, 8, 16),
        "cols": tuple(sorted({_at_most_a_row(case, cols) for cols in (1024, 2048, 4096)})),
        "warps": (4, 8),
        "lag": (1, 2, 4, 8),
    }


def invalid(case: Case, config: BothConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    c, K = config, case["K"]
    side_by_side = min(abreast(c.warps, c.cols), _MOST_STEP)
    if not side_by_side <= c.step <= c.rows:
        return f"{c.step} of {c.rows} rows at a time, where the warps hold {side_by_side} side by side"
    if not _at_most_a_row(case, 256 * c.warps) <= c.cols <= 512 * c.warps:
        return f"loads of {c.cols}, neither 8 nor 16 elements of a thread"
    if cdiv(K, c.cols) > 1 and cdiv(K, c.cols) * c.cols > K * 1.7:
        return f"loads of {c.cols} leave two lanes in five idle"
    words = _registers(case, c.step, c.cols, c.warps)
    if words > 64 and c.step > 1:
        return f"{words:g} registers of input per thread"
    if words <= 16 and c.step < _MOST_STEP:
        return f"no more than {words:g} registers of input per thread"
    return None


def default(case: Case) -> BothConfig:
    """Return a config for any shape: up to 32 registers of input, 64 where a load takes full rows and rows are few."""
    return config_for_rows(case, 64 if case["N"] <= 2500 or case["E"] * case["N"] < MANY_ROWS else 32)


def config_for_rows(case: Case, most_of_full_rows: int) -> BothConfig:
    """Return a config of few idle lanes and up to 32 registers of input, `most_of_full_rows` where a load takes full rows.

    A program has 16 rows where the matrix has few rows, or rows of at most 2048 bf16 elements: the rows that run ahead then
    stay in L2.
    """
    K, few = case["K"], case["E"] * case["N"] < MANY_ROWS
    if ITEMSIZE[case.dtype] == 2 and 2500 < K <= 32768:
        # up to 64 registers of input, four warps: H200, 2026-11-26, 22 cases of weights: 0.94 of the tuned speed -> 0.98
        return BothConfig(rows=16, step=max(1, 16384 // next_power_of_2(K)), cols=2048, warps=4, lag=2)
    warps = next((w for w in (4, 8) if _registers(case, 1, 512 * w, w) <= 32), 16)
    cols = _at_most_a_row(case, 512 * warps)
    padded_row = cdiv(K, cols) * cols
    if padded_row > max(cols, K * 1.7) or (padded_row > max(cols, K * 1.25) and _registers(case, 2, cols // 2, warps) <= 32):
        cols //= 2
    step, most_registers = min(max(1, warps * 512 // cols), _MOST_STEP), most_of_full_rows if cols >= K else 32
    while step < _MOST_STEP and _registers(case, 2 * step, cols, warps) <= most_registers:
        step *= 2
    return BothConfig(rows=16 if few or step == most_registers // 8 else 32, step=step, cols=cols, warps=warps, lag=2)


def _at_most_a_row(case: Case, cols: int) -> int:
    return min(cols, max(16, next_power_of_2(case["K"])))


def _registers(case: Case, step: int, cols: int, warps: int) -> float:
    """Return the registers of a thread for the input of so many rows at a time."""
    return step * cdiv(case["K"], cols) * cols * ITEMSIZE[case.dtype] / (128 * warps)


class BothLayouts(NamedTuple):
    """Hold the results of a cast into both layouts.

    Attributes:
        q: (E, K, N) of `fp8_colwise_3d`, or (M, K) of `fp8_rowwise_2d`.
        scale: (E, 1, N), or (M, 1).
        q_t: (E, N, K) of `fp8_rowwise_3d_transpose`, or (M, K) column-major of `fp8_group_colwise`.
        scale_t: (E, K), or (G K,).
    """

    q: torch.Tensor
    scale: torch.Tensor
    q_t: torch.Tensor
    scale_t: torch.Tensor


def reference(inputs: Inputs) -> Outputs:
    """Cast over the rows and over the columns of every expert."""
    along, down = colwise_3d.reference(inputs), rowwise_3d_transpose.reference(inputs)
    return {**along, "q_t": down["q"], "scale_t": down["scale"]}


def run_separately(inputs: Inputs, _config: None) -> Outputs:
    """Run the row-wise and the column-wise operator, each in its best config."""
    q, scale = colwise_3d.fp8_colwise_3d(**inputs)
    q_t, scale_t = rowwise_3d_transpose.fp8_rowwise_3d_transpose(**inputs)
    return {"q": q, "scale": scale, "q_t": q_t, "scale_t": scale_t}


def _results(w: torch.Tensor, fp8_format: str, out: BothLayouts | None = None) -> BothLayouts:
    (E, K, N), dtype, device = w.shape, fp8_dtype(fp8_format, w.device), w.device
    q, scale, q_t, scale_t = out or (None, None, None, None)
    return BothLayouts(
        contract.column_major_result("out.q", q, (E, K, N), dtype, device),
        contract.contiguous_result("out.scale", scale, (E, 1, N), torch.float32, device),
        contract.column_major_result("out.q_t", q_t, (E, N, K), dtype, device),
        contract.contiguous_result("out.scale_t", scale_t, (E, K), torch.float32, device),
    )


@torch_operator(_results)
@on_its_device
def fp8_rowwise_3d_both(
    w: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    out: BothLayouts | None = None,
    config: BothConfig | None = None,
) -> BothLayouts:
    """Cast as `fp8_colwise_3d` and `fp8_rowwise_3d_transpose` do the same weights, in one launch, bit for bit.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        out: tensors that receive the results, in place of new tensors.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.
    """
    check_weights("w", w)
    cast, (E, K, N) = Cast(fp8_format, pow2, inverse), w.shape
    results = _results(w, fp8_format, out)
    if not w.numel():
        for scales in (results.scale, results.scale_t):
            scales.fill_(cast.scale_of_nothing)
        return results
    if config is None:
        config = _choose((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", CALL_OPTIONS)
    x = w.transpose(1, 2).view(E * N, K)
    blocks, tile_blocks = cdiv(N, config.rows), E * cdiv(N, TILE_ROWS)
    outputs = (results.q, results.q_t, results.scale, results.scale_t)
    cast_into_both(x, outputs, E, E * blocks, tile_blocks, cast, config, ahead=blocks, N=N)
    return results


OP = Op(
    name="fp8_rowwise_3d_both",
    axes=("E", "K", "N"),
    free_axes=("E",),
    reference=reference,
    traffic=lambda case: contract.cast_traffic(case, scales=case["E"] * (case["K"] + case["N"]), copies=2),
    variants=(
        Variant("baseline", run_separately),
        Variant("optimized", run_of(fp8_rowwise_3d_both), BothConfig, space, invalid, default),
        *peers.BOTH_OF_WEIGHTS,
    ),
    module=__name__,
    **CAST,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
