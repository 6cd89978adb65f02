"""Quantise segments of rows with one scale each, in two launches: sanitise and take amax, then sanitise, scale and cast.

A segment is a tensor, an expert or a token group. Tiles of ROWS x COLS are numbered segment by segment; every tile is of one
segment. The first launch leaves the largest magnitudes in a workspace, the second walks the tiles in reverse, so that it finds
the end of what the first has read in L2, and closes the launch. May import cast, kernels, tl_lib, tl_transpose.
"""

import triton
import triton.language as tl

from kerneltune.ops.fp8.tiles import locate_block, start_of
from kerneltune.tl_exchange import close_launch, launch_tag, publish, published, raise_published
from kerneltune.tl_lib import amax_to_scale, load_constant, magnitude, magnitude_to_fp32, reciprocal, to_fp8, wide
from kerneltune.tl_transpose import store_transposed


@triton.jit
def finite_magnitude(x):
    """`magnitude` of x without NaN, which becomes 0, and infinity, which becomes the largest finite number."""
    infinite: tl.constexpr = 0x7F800000 if x.dtype.primitive_bitwidth == 32 else 0x7C00 if x.dtype == tl.float16 else 0x7F80
    m = magnitude(x)
    return tl.where(m > infinite, tl.zeros_like(m), tl.minimum(m, tl.full(m.shape, infinite - 1, m.dtype)))


@triton.jit
def sanitised(x):
    """x in fp32: 0 for NaN, the largest finite number of x's type, with its sign, for infinity."""
    bits: tl.constexpr = 0x7F7FFFFF if x.dtype.primitive_bitwidth == 32 else 0x7BFF if x.dtype == tl.float16 else 0x7F7F
    most = magnitude_to_fp32(tl.full((), bits, tl.int32), x.dtype)
    y = x.to(tl.float32)
    return tl.where(y == y, tl.minimum(tl.maximum(y, -most), most), 0.0)


@triton.jit
def _load_quads(
    x_ptr, stride, C, stripe, first_row, lo, hi,
    QUADS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Rows [lo, hi) of a tile as four (QUADS, COLS) sub-tiles; sub-tile k has the rows 4i + k. Zeros elsewhere."""
    policy: tl.constexpr = "" if AGAIN else "evict_first"
    cols = stripe * COLS + tl.arange(0, COLS)
    tiles = ()
    for k in tl.static_range(4):
        rows = tl.arange(0, QUADS) * 4 + k
        mask = ((rows >= lo) & (rows < hi))[:, None]
        if not EVEN:
            mask = mask & (cols < C)[None, :]
        offsets = rows[:, None] * stride + cols[None, :]
        tiles = tiles + (tl.load(x_ptr + first_row * stride + offsets, mask=mask, other=0.0, eviction_policy=policy),)
    return tiles


@triton.jit
def _amax_segments(
    x_ptr, offs_ptr, ws_ptr, rows, C, G, stride, total,
    JAGGED: tl.constexpr, STAGED: tl.constexpr, GROUPS_LOG2: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of every tile to its own word of the workspace, or by an atomic maximum to its segment's."""
    tag = launch_tag(ws_ptr)
    stripes = tl.cdiv(C, COLS)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        group, stripe, _tiles, first_row, lo, hi = locate_block(
            tile, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS
        )  # fmt: skip
        xs = _load_quads(x_ptr, stride, C, stripe, first_row, lo, hi, ROWS // 4, COLS, EVEN, True)
        m01 = tl.maximum(finite_magnitude(xs[0]), finite_magnitude(xs[1]))
        m23 = tl.maximum(finite_magnitude(xs[2]), finite_magnitude(xs[3]))
        amax = magnitude_to_fp32(tl.max(tl.max(tl.maximum(m01, m23), axis=1), axis=0), x_ptr.dtype.element_ty)
        if STAGED:
            publish(ws_ptr, tile, amax, tag, hi == hi)
        else:
            raise_published(ws_ptr, group, amax, tag, hi > 0)


@triton.jit
def _segment_scale(
    ws_ptr, offs_ptr, group, rows, stripes, G,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, JAGGED: tl.constexpr, STAGED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The scale of a segment out of what the first launch left."""
    if STAGED:
        if JAGGED:
            start = start_of(offs_ptr, group)
            end = load_constant(offs_ptr + group)
            first = (start // ROWS + group) * stripes
            last = (end // ROWS + group + 1) * stripes
        else:
            first = group * tl.cdiv(rows, ROWS) * stripes
            last = first + tl.cdiv(rows, ROWS) * stripes
        lanes = tl.arange(0, 512)
        amaxes = tl.zeros((512,), dtype=tl.float32)
        for at in tl.range(first, last, 512):
            live = at + lanes < last
            amaxes = tl.maximum(amaxes, tl.where(live, published(ws_ptr, tl.where(live, at + lanes, first)), 0.0))
        amax = tl.max(amaxes, axis=0)
    else:
        amax = published(ws_ptr, group)
    return amax_to_scale(amax, FP8_MAX, POW2)


@triton.jit
def _cast_segments(
    x_ptr, q_ptr, qt_ptr, scale_ptr, offs_ptr, ws_ptr, rows, C, G, stride, total,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, INVERSE: tl.constexpr,
    JAGGED: tl.constexpr, STAGED: tl.constexpr, GROUPS_LOG2: tl.constexpr,
    ROWMAJOR: tl.constexpr, COLMAJOR: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q (all rows, C) and its transpose, segment by segment (G, C, rows), or under JAGGED as a whole (C, rows)."""
    stripes = tl.cdiv(C, COLS)
    lanes = tl.arange(0, COLS)
    scale = 0.0
    of = -1
    for turn in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        group, stripe, _tiles, first_row, lo, hi = locate_block(
            total - 1 - turn, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS
        )  # fmt: skip
        xs = _load_quads(x_ptr, stride, C, stripe, first_row, lo, hi, ROWS // 4, COLS, EVEN, False)
        if group != of:
            scale = _segment_scale(ws_ptr, offs_ptr, group, rows, stripes, G, FP8_MAX, POW2, JAGGED, STAGED, ROWS)
            of = group
        if hi > 0:
            if (lo >= 0) & (stripe == 0):
                tl.store(scale_ptr + group, reciprocal(scale) if INVERSE else scale)
            live = stripe * COLS + lanes < C
            qs = ()
            for k in tl.static_range(4):
                q = to_fp8(sanitised(xs[k]) * scale, q_ptr.dtype.element_ty)
                if ROWMAJOR:
                    r = tl.arange(0, ROWS // 4) * 4 + k
                    mask = ((r >= lo) & (r < hi))[:, None]
                    if not EVEN:
                        mask = mask & live[None, :]
                    q_tile = q_ptr + first_row * C + stripe * COLS
                    tl.store(q_tile + (r[:, None] * C + lanes[None, :]), q, mask=mask, cache_modifier=".cs")
                qs = qs + (q,)
            if COLMAJOR:
                base = wide(stripe * COLS) * rows + first_row
                if not JAGGED:
                    base += wide(group) * (C - 1) * rows
                store_transposed(qt_ptr, base, rows, tl.maximum(lo, 0), tl.minimum(hi, ROWS), live, qs, JAGGED, EVEN, PACKED)
    if JAGGED:
        empty = amax_to_scale(tl.zeros((), dtype=tl.float32), FP8_MAX, POW2)
        for group in range(tl.program_id(0), G, tl.num_programs(0)):
            if start_of(offs_ptr, group) == load_constant(offs_ptr + group):
                tl.store(scale_ptr + group, reciprocal(empty) if INVERSE else empty)
    close_launch(ws_ptr, launch_tag(ws_ptr))
