"""Run the published designs: `baseline`, TransformerEngine's Triton RMSNorm, and `pr593`, its pull request 593.

Source: ROCm/TransformerEngine pull request 593; written anew from its contract. One kernel serves both, told apart by
constexprs: gamma hoisted out of the row loop, the transpose written by the norm kernel itself or by a tiled second kernel,
the backward's warps and reduce tile tuned, dγ of a single row of partials written at once.

Differences from the published code: 1 / N is hoisted with gamma alone, elsewhere a sum is divided by N; c = r² s / N is one
value per row in both backwards, where the baseline had r³ x (s / N); the default is eight warps, where the published forward
without tuning has four; the baseline always reduces its partials; no SMs are left free (sm_margin), outputs are not handed
in (ln_out) or of another type (otype). Triton finds out by itself which addresses are aligned.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kerneltune.device import sm_count
from kerneltune.kernel_lib.functions import constant
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES, FP8_MAX, quantize, reciprocal, wide
from kerneltune.ops.rmsnorm.contract import EPS
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Outputs, Space, Variant


@dataclass(frozen=True, slots=True)
class TeFwdConfig:
    """Config of the norm kernel.

    Attributes:
        warps: warps of a program.
    """

    warps: int


@dataclass(frozen=True, slots=True)
class TePr593FwdConfig:
    """Config of the norm kernel and the transpose.

    Attributes:
        warps: warps of a program of the norm kernel.
        tile_rows: rows of the transpose tile.
        tile_cols: columns of the transpose tile.
        tile_warps: warps of a program of the transpose.
    """

    warps: int
    tile_rows: int
    tile_cols: int
    tile_warps: int


@dataclass(frozen=True, slots=True)
class TeBwdConfig:
    """Config of the main kernel and the reduction.

    Attributes:
        warps: warps of a program of the main kernel.
        reduce_rows: rows of the reduce tile.
        reduce_cols: columns of the reduce tile.
        reduce_warps: warps of a program of the reduction.
    """

    warps: int
    reduce_rows: int
    reduce_cols: int
    reduce_warps: int


@triton.jit
def _gamma_block(g_ptr, cols, mask, ZERO_CENTERED: tl.constexpr):
    g = tl.load(g_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        g += 1.0
    return g


@triton.jit
def _write_block(
    y, y_ptr, yt_ptr, row, cols, mask, amax, scale, M, N, FP8: tl.constexpr, FP8_MAX: tl.constexpr, TRANSPOSE: tl.constexpr
):
    if FP8:
        amax = tl.maximum(amax, tl.max(tl.where(mask, tl.abs(y), 0.0)))
        y = quantize(y, scale, FP8_MAX, y_ptr.dtype.element_ty)
    tl.store(y_ptr + wide(row) * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    if TRANSPOSE:
        tl.store(yt_ptr + wide(cols) * M + row, y.to(y_ptr.dtype.element_ty), mask=mask)
    return amax


@triton.jit
def _rmsnorm_fwd_te(
    x_ptr, g_ptr, y_ptr, yt_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr,
    M, N, stride_xm, eps,
    ZERO_CENTERED: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, TRANSPOSE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKED: tl.constexpr, HOIST: tl.constexpr,
):  # fmt: skip
    scale = 1.0
    if FP8:
        scale = tl.load(scale_ptr)
        if tl.program_id(0) == 0:
            tl.store(scale_inv_ptr, reciprocal(scale))
    amax = 0.0
    lanes = tl.arange(0, BLOCK)
    if HOIST:
        inv_n = 1.0 / N
        g_row = _gamma_block(g_ptr, lanes, lanes < N, ZERO_CENTERED)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=1 if BLOCKED else 2):
        x_row = x_ptr + wide(row) * stride_xm
        if BLOCKED:
            full = tl.cdiv(N, BLOCK) - 1
            squares = tl.zeros((BLOCK,), dtype=tl.float32)
            for block in tl.range(0, full, num_stages=2):
                x = tl.load(x_row + block * BLOCK + lanes).to(tl.float32)
                squares += x * x
            cols = full * BLOCK + lanes
            x = tl.load(x_row + cols, mask=cols < N, other=0.0, cache_modifier=".cg").to(tl.float32)
            total = tl.sum(squares + x * x)
        else:
            x = tl.load(x_row + lanes, mask=lanes < N, other=0.0, cache_modifier=".cg").to(tl.float32)
            total = tl.sum(x * x)
        mean = total * inv_n if HOIST else total / N
        r = tl.rsqrt(mean + eps)
        tl.store(rsigma_ptr + row, r)
        if BLOCKED:
            for block in tl.range(0, tl.cdiv(N, BLOCK), num_stages=2):
                cols = block * BLOCK + lanes
                mask = cols < N
                y = (
                    tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
                    * r
                    * _gamma_block(g_ptr, cols, mask, ZERO_CENTERED)
                )
                amax = _write_block(y, y_ptr, yt_ptr, row, cols, mask, amax, scale, M, N, FP8, FP8_MAX, TRANSPOSE)
        else:
            mask = lanes < N
            g = g_row if HOIST else _gamma_block(g_ptr, lanes, mask, ZERO_CENTERED)
            amax = _write_block(x * r * g, y_ptr, yt_ptr, row, lanes, mask, amax, scale, M, N, FP8, FP8_MAX, TRANSPOSE)
    if FP8:
        tl.atomic_max(amax_ptr, amax, sem="relaxed")


@triton.jit
def _transpose_te(q_ptr, qt_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Transpose (M, N) bytes to (N, M), tile by tile."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tile = tl.load(q_ptr + wide(rows)[:, None] * N + cols[None, :], mask=mask)
    tl.store(qt_ptr + wide(cols)[:, None] * M + rows[None, :], tl.trans(tile), mask=tl.trans(mask))


@triton.jit
def _rmsnorm_bwd_te(
    dz_ptr, x_ptr, rsigma_ptr, g_ptr, dx_ptr, dg_ptr,
    M, N,
    ZERO_CENTERED: tl.constexpr, BLOCK: tl.constexpr, BLOCKED: tl.constexpr, PR593: tl.constexpr,
):  # fmt: skip
    """Write dx, and dγ partials: a row per program, or where rows are blocked a row per row of x."""
    lanes = tl.arange(0, BLOCK)
    if not BLOCKED:
        dg = tl.zeros((BLOCK,), dtype=tl.float32)
        if PR593:
            g_row = _gamma_block(g_ptr, lanes, lanes < N, ZERO_CENTERED)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=2 if PR593 or not BLOCKED else 1):
        base = wide(row) * N
        r = tl.load(rsigma_ptr + row)
        if BLOCKED:
            sums = tl.zeros((BLOCK,), dtype=tl.float32)
            for block in tl.range(0, tl.cdiv(N, BLOCK), num_stages=2):
                cols = block * BLOCK + lanes
                mask = cols < N
                x = tl.load(x_ptr + base + cols, mask=mask, other=0.0).to(tl.float32)
                dz = tl.load(dz_ptr + base + cols, mask=mask, other=0.0).to(tl.float32)
                sums += dz * x * _gamma_block(g_ptr, cols, mask, ZERO_CENTERED)
            c = r * r * tl.sum(sums) / N
            for block in tl.range(0, tl.cdiv(N, BLOCK), num_stages=2):
                cols = block * BLOCK + lanes
                mask = cols < N
                x = tl.load(x_ptr + base + cols, mask=mask, other=0.0).to(tl.float32)
                dz = tl.load(dz_ptr + base + cols, mask=mask, other=0.0).to(tl.float32)
                dx = r * (dz * _gamma_block(g_ptr, cols, mask, ZERO_CENTERED) - c * x)
                tl.store(dx_ptr + base + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                tl.store(dg_ptr + base + cols, dz * x * r, mask=mask)
        else:
            mask = lanes < N
            x = tl.load(x_ptr + base + lanes, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            dz = tl.load(dz_ptr + base + lanes, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            g = g_row if PR593 else _gamma_block(g_ptr, lanes, mask, ZERO_CENTERED)
            c = r * r * tl.sum(dz * x * g) / N
            tl.store(dx_ptr + base + lanes, (r * (dz * g - c * x)).to(dx_ptr.dtype.element_ty), mask=mask)
            dg += dz * x * r
    if not BLOCKED:
        tl.store(dg_ptr + wide(tl.program_id(0)) * N + lanes, dg, mask=lanes < N)


@triton.jit
def _reduce_te(dg_ptr, dgamma_ptr, P, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, P, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(dg_ptr + wide(rows)[:, None] * N + cols[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(dgamma_ptr + cols, tl.sum(total, axis=0).to(dgamma_ptr.dtype.element_ty), mask=cols < N)


def _blocks(n: int, itemsize: int, limit: int) -> tuple[int, bool]:
    """Return the block size, at most `limit` bytes of a row, and whether a row is blocked: above 16 KiB."""
    return min(limit // itemsize, next_power_of_2(n)), n > 16384 // itemsize


def _programs(x: torch.Tensor) -> int:
    return max(1, min(x.shape[0], sm_count(x.device.type, x.device.index)))


def _fwd(inputs: Inputs, warps: int, transpose_in_kernel: bool, pr593: bool) -> dict[str, torch.Tensor]:
    x, weight, quant = inputs["x"], inputs["weight"], inputs["quant"]
    M, N = x.shape
    fp8 = FP8_DTYPES[inputs["fp8_format"]]
    block, blocked = _blocks(N, x.element_size(), 65536)
    y = torch.empty((M, N), dtype=x.dtype if quant == "none" else fp8, device=x.device)
    rsigma = torch.empty((M,), dtype=torch.float32, device=x.device)
    outputs = {"y": y, "rsigma": rsigma}
    if quant != "none":
        outputs["scale_inv"] = torch.empty((1,), dtype=torch.float32, device=x.device)
    if quant == "fp8_t":
        outputs["y_t"] = torch.empty((N, M), dtype=fp8, device=x.device)
    _rmsnorm_fwd_te[(_programs(x),)](
        x, weight, y, outputs.get("y_t"), rsigma, inputs.get("scale"), inputs.get("amax"), outputs.get("scale_inv"),
        M, N, x.stride(0), EPS,
        ZERO_CENTERED=inputs["zero_centered"], FP8=quant != "none", FP8_MAX=FP8_MAX[inputs["fp8_format"]],
        TRANSPOSE=quant == "fp8_t" and transpose_in_kernel, BLOCK=block, BLOCKED=blocked, HOIST=pr593 and not blocked,
        num_warps=warps,
    )  # fmt: skip
    return outputs


def run_baseline_fwd(inputs: Inputs, config: TeFwdConfig) -> Outputs:
    """Run the forward before the pull request: the transpose is stored byte by byte from the norm kernel."""
    return _fwd(inputs, config.warps, transpose_in_kernel=True, pr593=False)


def run_pr593_fwd(inputs: Inputs, config: TePr593FwdConfig) -> Outputs:
    """Run the pull request's forward: gamma hoisted, the transpose by a second, tiled kernel."""
    outputs = _fwd(inputs, config.warps, transpose_in_kernel=False, pr593=True)
    if inputs["quant"] == "fp8_t":
        M, N = inputs["x"].shape
        grid = (cdiv(M, config.tile_rows), cdiv(N, config.tile_cols))
        q, q_t = outputs["y"].view(torch.uint8), outputs["y_t"].view(torch.uint8)
        _transpose_te[grid](q, q_t, M, N, ROWS=config.tile_rows, COLS=config.tile_cols, num_warps=config.tile_warps)
    return outputs


def _bwd(inputs: Inputs, config: TeBwdConfig, pr593: bool) -> dict[str, torch.Tensor]:
    dz, x, weight = inputs["dz"].contiguous(), inputs["x"].contiguous(), inputs["weight"]
    M, N = x.shape
    block, blocked = _blocks(N, x.element_size(), 16384)
    programs = _programs(x)
    dx = torch.empty_like(x)
    dgamma = torch.empty_like(weight)
    partials = M if blocked else programs
    reduced = partials > 1 or not pr593
    dg = torch.empty((partials, N), dtype=torch.float32, device=x.device) if reduced else dgamma
    _rmsnorm_bwd_te[(programs,)](
        dz, x, inputs["rsigma"], weight, dx, dg, M, N,
        ZERO_CENTERED=inputs["zero_centered"], BLOCK=block, BLOCKED=blocked, PR593=pr593, num_warps=config.warps,
    )  # fmt: skip
    if reduced:
        _reduce_te[(cdiv(N, config.reduce_cols),)](
            dg, dgamma, partials, N, ROWS=config.reduce_rows, COLS=config.reduce_cols, num_warps=config.reduce_warps
        )
    return {"dx": dx, "dgamma": dgamma}


def run_baseline_bwd(inputs: Inputs, config: TeBwdConfig) -> Outputs:
    """Run the backward before the pull request: eight warps, a 128 x 64 reduce tile."""
    return _bwd(inputs, config, pr593=False)


def run_pr593_bwd(inputs: Inputs, config: TeBwdConfig) -> Outputs:
    """Run the pull request's backward: gamma hoisted, warps and reduce tile tuned, one row of partials written as dγ."""
    return _bwd(inputs, config, pr593=True)


def _pr593_fwd_space(case: Case) -> Space:
    """Offer the published configs; the transpose tile matters under fp8_t only."""
    if case.quant != "fp8_t":
        return {"warps": (4, 8, 16), "tile_rows": (64,), "tile_cols": (64,), "tile_warps": (4,)}
    return {"warps": (4, 8, 16), "tile_rows": (32, 64, 128), "tile_cols": (64, 128), "tile_warps": (4, 8)}


_TRANSPOSE_TILES = {(32, 64, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (64, 64, 8)}
_REDUCE_TILES = {(64, 64, 4), (128, 64, 4), (128, 128, 4), (128, 64, 8), (256, 64, 8), (256, 128, 8)}
"""Rows, columns and warps of the tiles that the pull request of Transformer Engine lists for the transpose and the
reduction."""


def _pr593_fwd_invalid(_case: Case, config: TePr593FwdConfig) -> str | None:
    """Refuse transpose tiles that were not published."""
    tile = (config.tile_rows, config.tile_cols, config.tile_warps)
    return None if tile in _TRANSPOSE_TILES else f"transpose tile {tile} is not in the published list"


def _pr593_bwd_invalid(_case: Case, config: TeBwdConfig) -> str | None:
    """Refuse reduce tiles that were not published."""
    tile = (config.reduce_rows, config.reduce_cols, config.reduce_warps)
    return None if tile in _REDUCE_TILES else f"reduce tile {tile} is not in the published list"


def _nothing_to_do(case: Case) -> str | None:
    """Say that the published kernels do not take empty tensors."""
    return "no rows" if case["M"] == 0 else None


_FWD_SPACE = constant({"warps": (4, 8, 16)})
_BWD_SPACE = constant({"warps": (8,), "reduce_rows": (128,), "reduce_cols": (64,), "reduce_warps": (4,)})
_PR593_BWD_SPACE = constant(
    {"warps": (4, 8, 16), "reduce_rows": (64, 128, 256), "reduce_cols": (64, 128), "reduce_warps": (4, 8)}
)
"""The published lists, without waves_per_eu, which exists on AMD only."""
_PR593_FWD_DEFAULT = constant(TePr593FwdConfig(8, 64, 64, 4))
_BWD_DEFAULT = constant(TeBwdConfig(8, 128, 64, 4))
"""Eight warps, and a tile of the published lists."""
FORWARD = (
    Variant("baseline", run_baseline_fwd, TeFwdConfig, _FWD_SPACE, default=constant(TeFwdConfig(8)), unsupported=_nothing_to_do),
    Variant("pr593", run_pr593_fwd, TePr593FwdConfig, _pr593_fwd_space, _pr593_fwd_invalid, _PR593_FWD_DEFAULT, _nothing_to_do),
)
BACKWARD = (
    Variant("baseline", run_baseline_bwd, TeBwdConfig, _BWD_SPACE, default=_BWD_DEFAULT, unsupported=_nothing_to_do),
    Variant("pr593", run_pr593_bwd, TeBwdConfig, _PR593_BWD_SPACE, _pr593_bwd_invalid, _BWD_DEFAULT, _nothing_to_do),
)
