"""Quantize along rows that live in registers: every element is read from memory once."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.arguments import check_apart
from kerneltune.kernel_lib.launch import resident
from kerneltune.kernel_lib.tl_lib import amax_to_scale, magnitude, magnitude_to_fp32, reciprocal, to_fp8, wide
from kerneltune.ops.fp8.contract import Cast
from kerneltune.rounding import cdiv

if TYPE_CHECKING:
    from kerneltune.ops.fp8.rowwise_2d import RowConfig


def cast_rows(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, cast: Cast, config: "RowConfig | None") -> None:
    """Cast the rows of x (M, K) with a scale each into q and scale; config: None where x is empty."""
    if config is None or not x.numel():
        scale.fill_(cast.scale_of_nothing)
        return
    (M, K), c = x.shape, config
    check_apart("x", x, c.rows)
    tiles = cdiv(M, c.rows)
    programs = min(tiles, resident(x.device, c.ctas)) if c.ctas else tiles
    _cast_rows[(programs,)](
        x, q, scale, M, K, x.stride(0),
        ROWS=c.rows, COLS=c.cols, CHUNKS=cdiv(K, c.cols), EVEN=K % c.cols == 0, STAGES=c.stages, RELOAD=c.reload,
        SCALING=cast.scaling, num_warps=c.warps,
    )  # fmt: skip


@triton.jit
def _load_rows(
    x_ptr, tile, stride, cols, M, K,
    ROWS: tl.constexpr, EVEN: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Load (ROWS, COLS) of a matrix; zeros outside of it. AGAIN: keep it in L2."""
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    lanes = tl.arange(0, ROWS)
    mask = (lanes < M - tile * ROWS)[:, None]
    if not EVEN:
        mask = mask & (cols < K)[None, :]
    base = wide(tile * ROWS) * stride
    return tl.load(x_ptr + base + (lanes[:, None] * stride + cols[None, :]), mask=mask, other=0.0, eviction_policy=policy)


@triton.jit
def _store_rows(q_ptr, tile, cols, M, K, x, multiplier, ROWS: tl.constexpr, EVEN: tl.constexpr):
    lanes = tl.arange(0, ROWS)
    mask = (lanes < M - tile * ROWS)[:, None]
    if not EVEN:
        mask = mask & (cols < K)[None, :]
    q = to_fp8(x.to(tl.float32) * multiplier[:, None], q_ptr.dtype.element_ty)
    tl.store(q_ptr + wide(tile * ROWS) * K + (lanes[:, None] * K + cols[None, :]), q, mask=mask, cache_modifier=".cs")


@triton.jit
def _cast_rows(
    x_ptr, q_ptr, scale_ptr,
    M, K, stride_xm,
    SCALING: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Write q[m, k] = fp8(x[m, k] * s[m]).

    A program holds ROWS x (CHUNKS * COLS) of x, or under RELOAD reads it twice, the second time from L2.
    EVEN: K is a multiple of COLS. Rows of x lie `stride_xm` apart, rows of q side by side.
    """
    lanes = tl.arange(0, ROWS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=1 if RELOAD else STAGES):
        xs = ()
        if RELOAD:
            top = magnitude(tl.zeros((ROWS, COLS), dtype=x_ptr.dtype.element_ty))
            for c in tl.range(0, CHUNKS, num_stages=STAGES):
                cols = c * COLS + tl.arange(0, COLS)
                top = tl.maximum(top, magnitude(_load_rows(x_ptr, tile, stride_xm, cols, M, K, ROWS, EVEN, True)))
        else:
            for c in tl.static_range(CHUNKS):
                cols = c * COLS + tl.arange(0, COLS)
                xs = xs + (_load_rows(x_ptr, tile, stride_xm, cols, M, K, ROWS, EVEN or c < CHUNKS - 1, False),)
            top = magnitude(xs[0])
            for c in tl.static_range(1, CHUNKS):
                top = tl.maximum(top, magnitude(xs[c]))
        multiplier = amax_to_scale(magnitude_to_fp32(tl.max(top, axis=1), x_ptr.dtype.element_ty), SCALING.fp8_max, SCALING.pow2)
        scale = reciprocal(multiplier) if SCALING.inverse else multiplier
        tl.store(scale_ptr + tile * ROWS + lanes, scale, mask=lanes < M - tile * ROWS)
        if RELOAD:
            for c in tl.range(0, CHUNKS, num_stages=STAGES):
                cols = c * COLS + tl.arange(0, COLS)
                x = _load_rows(x_ptr, tile, stride_xm, cols, M, K, ROWS, EVEN, False)
                _store_rows(q_ptr, tile, cols, M, K, x, multiplier, ROWS, EVEN)
        else:
            for c in tl.static_range(CHUNKS):
                cols = c * COLS + tl.arange(0, COLS)
                _store_rows(q_ptr, tile, cols, M, K, xs[c], multiplier, ROWS, EVEN or c < CHUNKS - 1)
