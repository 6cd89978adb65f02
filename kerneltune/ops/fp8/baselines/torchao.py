"""Published designs of torchao 0.18, written anew from their contract: the `baseline` variants of the casts with scales per row.

Rows: a program per row, which it reads twice in pieces. Weights: tiles that are read once for the scales, which they lower
by atomic min, and once more for the cast; `reduction` loops over a stripe twice instead. Token groups: a program per group
and block of columns, two passes. Left out: torchao's lost rows of uneven groups and its scales written beyond a group's
columns.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.arguments import ITEMSIZE
from kerneltune.kernel_lib.functions import constant
from kerneltune.kernel_lib.launch import too_much_shared
from kerneltune.kernel_lib.tl_lib import FP8_MAX, amax_to_scale, magnitude, magnitude_to_fp32, quantize, wide
from kerneltune.ops.fp8.contract import FP8
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Variant


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Config of a loop over a row.

    Attributes:
        block: elements per step.
        warps: warps of a program.
        stages: depth of the loop's load pipeline.
    """

    block: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class TorchaoTileConfig:
    """Config of a cast of tiles of the input as it lies in memory.

    Attributes:
        rows: rows of a tile.
        cols: columns of a tile.
        warps: warps of a program.
        stages: depth of the load pipeline of the loop over tiles, if the config has a loop.
    """

    rows: int
    cols: int
    warps: int
    stages: int


@triton.jit
def _rowwise(
    x_ptr, q_ptr, scale_ptr, K, stride, FP8_MAX: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    row = wide(tl.program_id(0))
    top = magnitude(tl.zeros((BLOCK,), dtype=x_ptr.dtype.element_ty))
    for first in tl.range(0, K, BLOCK, num_stages=STAGES):
        cols = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, magnitude(tl.load(x_ptr + row * stride + cols, mask=cols < K, other=0.0)))
    scale = amax_to_scale(magnitude_to_fp32(tl.max(top, axis=0), x_ptr.dtype.element_ty), FP8_MAX, POW2)
    tl.store(scale_ptr + row, scale)
    for first in tl.range(0, K, BLOCK, num_stages=STAGES):
        cols = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < K, other=0.0)
        q = quantize(x.to(tl.float32), scale, FP8_MAX, q_ptr.dtype.element_ty)
        tl.store(q_ptr + row * K + cols, q, mask=cols < K)


@triton.jit
def _load(x_ptr, first_row, rows, C, stride, first_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Load (ROWS, COLS) at a row and column; zeros from row `rows` on."""
    r = first_row + tl.arange(0, ROWS)
    c = first_col + tl.arange(0, COLS)
    mask = (r < rows)[:, None] & (c < C)[None, :]
    return tl.load(x_ptr + (r.to(tl.int64)[:, None] * stride + c[None, :]), mask=mask, other=0.0)


@triton.jit
def _colwise(
    x_ptr, q_ptr, scale_ptr, K, N,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cast rows of x [expert][N][K] into q; a program has ROWS of the N rows of an expert."""
    expert = wide(tl.program_id(0))
    first = tl.program_id(1) * ROWS
    rows = first + tl.arange(0, ROWS)
    x_ptr += expert * N * K
    q_ptr += expert * N * K
    top = tl.max(magnitude(tl.zeros((ROWS, COLS), dtype=x_ptr.dtype.element_ty)), axis=1)
    for k in tl.range(0, K, COLS, num_stages=STAGES):
        top = tl.maximum(top, tl.max(magnitude(_load(x_ptr, first, N, K, K, k, ROWS, COLS)), axis=1))
    scale = amax_to_scale(magnitude_to_fp32(top, x_ptr.dtype.element_ty), FP8_MAX, POW2)
    tl.store(scale_ptr + expert * N + rows, scale, mask=rows < N)
    for k in tl.range(0, K, COLS, num_stages=STAGES):
        x = _load(x_ptr, first, N, K, K, k, ROWS, COLS)
        q = quantize(x.to(tl.float32), scale[:, None], FP8_MAX, q_ptr.dtype.element_ty)
        cols = k + tl.arange(0, COLS)
        mask = (rows < N)[:, None] & (cols < K)[None, :]
        tl.store(q_ptr + (rows.to(tl.int64)[:, None] * K + cols[None, :]), q, mask=mask)


@triton.jit
def _store_transposed(q_ptr, x, scale, first_row, rows, ld, first_col, C, FP8_MAX: tl.constexpr):
    """Cast x (ROWS, COLS) to q[col, row], rows up to `rows`; the tile is transposed before the cast, as 16-bit elements."""
    r = first_row + tl.arange(0, x.shape[0])
    c = first_col + tl.arange(0, x.shape[1])
    q = quantize(tl.trans(x).to(tl.float32), scale[:, None], FP8_MAX, q_ptr.dtype.element_ty)
    tl.store(q_ptr + (c.to(tl.int64)[:, None] * ld + r[None, :]), q, mask=(c < C)[:, None] & (r < rows)[None, :])


@triton.jit
def _transpose_scales(
    x_ptr, scale_ptr, K, N, FP8_MAX: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Lower the scales of a tile's columns to the scales that the tile needs."""
    expert = wide(tl.program_id(0))
    first_k = tl.program_id(1) * COLS
    k = first_k + tl.arange(0, COLS)
    x = _load(x_ptr + expert * N * K, tl.program_id(2) * ROWS, N, K, K, first_k, ROWS, COLS)
    amax = magnitude_to_fp32(tl.max(magnitude(x), axis=0), x_ptr.dtype.element_ty)
    tl.atomic_min(scale_ptr + expert * K + k, amax_to_scale(amax, FP8_MAX, POW2), mask=k < K)


@triton.jit
def _transpose_cast(
    x_ptr, q_ptr, scale_ptr, K, N, FP8_MAX: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    expert = wide(tl.program_id(0))
    first_k = tl.program_id(1) * COLS
    first_n = tl.program_id(2) * ROWS
    k = first_k + tl.arange(0, COLS)
    x = _load(x_ptr + expert * N * K, first_n, N, K, K, first_k, ROWS, COLS)
    scale = tl.load(scale_ptr + expert * K + k, mask=k < K, other=0.0)
    _store_transposed(q_ptr + expert * N * K, x, scale, first_n, N, N, first_k, K, FP8_MAX)


@triton.jit
def _columns(
    x_ptr, q_ptr, scale_ptr, start, end, C, stride, ld, first_col,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cast COLS columns of the rows [start, end) to q[col, row], in two passes over the rows."""
    top = tl.max(magnitude(tl.zeros((ROWS, COLS), dtype=x_ptr.dtype.element_ty)), axis=0)
    for row in tl.range(start, end, ROWS, num_stages=STAGES):
        top = tl.maximum(top, tl.max(magnitude(_load(x_ptr, row, end, C, stride, first_col, ROWS, COLS)), axis=0))
    scale = amax_to_scale(magnitude_to_fp32(top, x_ptr.dtype.element_ty), FP8_MAX, POW2)
    cols = first_col + tl.arange(0, COLS)
    tl.store(scale_ptr + cols, scale, mask=cols < C)
    for row in tl.range(start, end, ROWS, num_stages=STAGES):
        x = _load(x_ptr, row, end, C, stride, first_col, ROWS, COLS)
        _store_transposed(q_ptr, x, scale, row, end, ld, first_col, C, FP8_MAX)


@triton.jit
def _transpose_stripe(
    x_ptr, q_ptr, scale_ptr, K, N,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert = wide(tl.program_id(0))
    _columns(
        x_ptr + expert * N * K, q_ptr + expert * N * K, scale_ptr + expert * K, 0, N, K, K, N, tl.program_id(1) * COLS,
        FP8_MAX, POW2, ROWS, COLS, STAGES,
    )  # fmt: skip


@triton.jit
def _group_colwise(
    x_ptr, x2_ptr, q_ptr, q2_ptr, scale_ptr, scale2_ptr, offs_ptr, M, C, C2, stride, stride2,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, DUAL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    first = tl.program_id(0) * COLS
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group)
    if first < C:
        s_ptr = scale_ptr + wide(group) * C
        _columns(x_ptr, q_ptr, s_ptr, start, end, C, stride, M, first, FP8_MAX, POW2, ROWS, COLS, STAGES)
    if DUAL:
        if first < C2:
            s_ptr = scale2_ptr + wide(group) * C2
            _columns(x2_ptr, q2_ptr, s_ptr, start, end, C2, stride2, M, first, FP8_MAX, POW2, ROWS, COLS, STAGES)


def run_rows(inputs: Inputs, config: LoopConfig) -> Outputs:
    """Run a program per row, two loops over it."""
    x = inputs["x"]
    M, K = x.shape
    q = torch.empty((M, K), dtype=FP8[inputs["fp8_format"]], device=x.device)
    scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    _rowwise[(M,)](
        x, q, scale, K, x.stride(0), FP8_MAX=FP8_MAX[inputs["fp8_format"]], POW2=inputs["pow2"],
        BLOCK=config.block, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return _outputs(inputs, q, scale)


def run_weights(inputs: Inputs, config: TorchaoTileConfig) -> Outputs:
    """Run a program per expert and block of N, two loops over K."""
    E, K, N = inputs["w"].shape
    q = torch.empty((E, N, K), dtype=FP8[inputs["fp8_format"]], device=inputs["w"].device)
    scale = torch.empty((E, 1, N), dtype=torch.float32, device=q.device)
    _colwise[(E, cdiv(N, config.rows))](
        inputs["w"], q, scale, K, N, FP8_MAX=FP8_MAX[inputs["fp8_format"]], POW2=inputs["pow2"],
        ROWS=config.rows, COLS=config.cols, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return _outputs(inputs, q.transpose(1, 2), scale)


def run_atomic(inputs: Inputs, config: TorchaoTileConfig) -> Outputs:
    """Fill with infinity, lower the scales tile by tile, read the tiles again to cast them."""
    E, K, N = inputs["w"].shape
    q = torch.empty((E, K, N), dtype=FP8[inputs["fp8_format"]], device=inputs["w"].device)
    scale = torch.full((E, K), torch.inf, dtype=torch.float32, device=q.device)
    grid = (E, cdiv(K, config.cols), cdiv(N, config.rows))
    top, tile = FP8_MAX[inputs["fp8_format"]], {"ROWS": config.rows, "COLS": config.cols, "num_warps": config.warps}
    _transpose_scales[grid](inputs["w"], scale, K, N, FP8_MAX=top, POW2=inputs["pow2"], **tile)
    _transpose_cast[grid](inputs["w"], q, scale, K, N, FP8_MAX=top, **tile)
    return _outputs(inputs, q.transpose(1, 2), scale)


def run_reduction(inputs: Inputs, config: TorchaoTileConfig) -> Outputs:
    """Run a program per expert and block of K, two loops over N."""
    E, K, N = inputs["w"].shape
    q = torch.empty((E, K, N), dtype=FP8[inputs["fp8_format"]], device=inputs["w"].device)
    scale = torch.empty((E, K), dtype=torch.float32, device=q.device)
    _transpose_stripe[(E, cdiv(K, config.cols))](
        inputs["w"], q, scale, K, N, FP8_MAX=FP8_MAX[inputs["fp8_format"]], POW2=inputs["pow2"],
        ROWS=config.rows, COLS=config.cols, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return _outputs(inputs, q.transpose(1, 2), scale)


def run_group(inputs: Inputs, config: TorchaoTileConfig) -> Outputs:
    """Run a program per group and block of columns, two loops over the group's rows."""
    q, scale = _groups((inputs["x"],), inputs, config)[0]
    return _outputs(inputs, q, scale)


def run_dual(inputs: Inputs, config: TorchaoTileConfig) -> Outputs:
    """Cast two matrices in one launch: a program has its block of both."""
    (q1, scale1), (q2, scale2) = _groups((inputs["x1"], inputs["x2"]), inputs, config)
    first, second = _outputs(inputs, q1, scale1), _outputs(inputs, q2, scale2)
    return {"q1": first["q"], "scale1": first["scale"], "q2": second["q"], "scale2": second["scale"]}


def _groups(xs: tuple[torch.Tensor, ...], inputs: Inputs, config: TorchaoTileConfig) -> list[tuple[torch.Tensor, torch.Tensor]]:
    offs, M = inputs["offs"], xs[0].shape[0]
    G, widest = offs.shape[0], max(x.shape[1] for x in xs)
    parts = []
    for x in xs:
        q = torch.empty((x.shape[1], M), dtype=FP8[inputs["fp8_format"]], device=x.device)
        parts.append((x, q, torch.empty(G * x.shape[1], dtype=torch.float32, device=x.device)))
    (x, q, scale), (x2, q2, scale2) = parts[0], parts[-1]
    _group_colwise[(cdiv(widest, config.cols), G)](
        x, x2, q, q2, scale, scale2, offs, M, x.shape[1], x2.shape[1], x.stride(0), x2.stride(0),
        FP8_MAX=FP8_MAX[inputs["fp8_format"]], POW2=inputs["pow2"], DUAL=len(xs) > 1,
        ROWS=config.rows, COLS=config.cols, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return [(q.t(), scale) for _, q, scale in parts]


def _outputs(inputs: Inputs, q: torch.Tensor, scale: torch.Tensor) -> Outputs:
    """Return q and the scales; inverses cost another launch, as they do after torchao's functions."""
    return {"q": q, "scale": scale.reciprocal() if inputs["inverse"] else scale}


def tile_default(case: Case) -> TorchaoTileConfig:
    """Return 128 x 128 tiles as torchao, half as many rows of fp32."""
    return TorchaoTileConfig(rows=64 if case.dtype == "float32" else 128, cols=128, warps=4, stages=4)


def weights_default(case: Case) -> TorchaoTileConfig:
    """Return one of torchao's eight."""
    return TorchaoTileConfig(rows=64, cols=128, warps=4 if case.dtype != "float32" else 8, stages=4)


def reduction_default(case: Case) -> TorchaoTileConfig:
    """Return torchao's, with half the columns of fp32."""
    return TorchaoTileConfig(rows=64, cols=64 if case.dtype == "float32" else 128, warps=8, stages=6)


def tile_invalid(case: Case, config: TorchaoTileConfig) -> str | None:
    """Say why a config of tiles cannot run."""
    per_thread = config.rows * config.cols / (32 * config.warps)
    words = per_thread * ITEMSIZE[case.dtype] / 4
    if words > 128:
        return f"{words:g} registers of input per thread"
    shared = config.rows * config.cols * ITEMSIZE[case.dtype] * config.stages
    return too_much_shared(shared)


def nothing_to_do(case: Case) -> str | None:
    """Refuse cases without elements: a grid cannot be empty."""
    return "no elements" if any(size == 0 for _, size in case.axes) else None


def atomics_pass_nan_over(case: Case) -> str | None:
    """Refuse NaN: an atomic min of floats does not propagate it."""
    return "passes NaN over" if case.option("special") else nothing_to_do(case)


_GROUP_SPACE = constant({"rows": (64, 128, 256), "cols": (32, 64, 128), "warps": (4, 8), "stages": (2, 3)})
"""torchao's 36 configs."""
_GROUP_DEFAULT = constant(TorchaoTileConfig(rows=128, cols=32, warps=4, stages=3))
"""torchao's config of before it searched."""
_ROW_SPACE = constant({"block": (128, 256), "warps": (4, 8), "stages": (2, 4)})
_ROW_DEFAULT = constant(LoopConfig(block=128, warps=4, stages=4))
"""torchao's configs on NVIDIA and AMD, and its only config on NVIDIA."""
_WEIGHT_SPACE = constant({"rows": (64, 128), "cols": (128, 256), "warps": (4, 8), "stages": (4,)})
"""torchao's configs."""
_ATOMIC_SPACE = constant({"rows": (64, 128), "cols": (64, 128), "warps": (4, 8), "stages": (4,)})
"""torchao's only config on NVIDIA, and the configs that the experiments of its pull requests list."""
_REDUCTION_SPACE = constant({"rows": (64,), "cols": (64, 128), "warps": (4, 8), "stages": (3, 6)})
"""torchao's configs, and half their pipeline."""

ROWS = Variant("baseline", run_rows, LoopConfig, _ROW_SPACE, default=_ROW_DEFAULT, unsupported=nothing_to_do)
COLUMNS_OF_WEIGHTS = Variant(
    "baseline", run_weights, TorchaoTileConfig, _WEIGHT_SPACE, tile_invalid, weights_default, nothing_to_do
)
TRANSPOSED_WEIGHTS = Variant(
    "baseline", run_atomic, TorchaoTileConfig, _ATOMIC_SPACE, tile_invalid, tile_default, atomics_pass_nan_over
)
TRANSPOSED_WEIGHTS_BY_REDUCTION = Variant(
    "reduction", run_reduction, TorchaoTileConfig, _REDUCTION_SPACE, tile_invalid, reduction_default, nothing_to_do
)
GROUPS = Variant("baseline", run_group, TorchaoTileConfig, _GROUP_SPACE, tile_invalid, _GROUP_DEFAULT, nothing_to_do)
TWO_OF_GROUPS = Variant("baseline", run_dual, TorchaoTileConfig, _GROUP_SPACE, tile_invalid, _GROUP_DEFAULT, nothing_to_do)
