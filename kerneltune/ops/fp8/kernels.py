"""Quantise down the columns of groups of rows and transpose, reading the input from memory once. May import tl_lib.

A group's scale per column needs all rows of the group, and the output wants the rows side by side. A stripe, COLS columns of a
group, is cut into tiles of ROWS rows. Programs raise the stripe's largest magnitudes with their tiles, wait for the stripe, and
cast. A program raises with its tile AHEAD of the present one before it waits, so that the wait is over when it begins; it holds
that tile in registers, or reads it again from L2 (RELOAD). No stripe may have more than AHEAD + 1 times as many tiles as there
are programs.
"""

import triton
import triton.language as tl

from kerneltune.tl_lib import (
    amax_to_scale,
    arrive,
    await_arrivals,
    close_launch,
    launch_tag,
    load_constant,
    magnitude,
    magnitude_to_fp32,
    published,
    raise_published,
    reciprocal,
    store_transposed,
    wide,
)


@triton.jit
def _start(offs_ptr, group):
    """The first row of a token group."""
    return tl.where(group > 0, load_constant(offs_ptr + tl.maximum(group, 1) - 1), 0)


@triton.jit
def _locate(tile, total, offs_ptr, rows, stripes, G, JAGGED: tl.constexpr, GROUPS_LOG2: tl.constexpr, ROWS: tl.constexpr):
    """Where a tile lies: group, stripe of the group, tiles of the stripe, first row, and the group's rows [lo, hi) from there.

    Weights have `rows` rows in every group. Token groups end at offs (G,); their tiles begin at multiples of ROWS, so a group
    may share its first and last block with its neighbours. A tile without rows has hi <= lo or hi <= 0.
    """
    if JAGGED:
        slot = tile // stripes
        group = slot * 0
        for bit in tl.static_range(GROUPS_LOG2):
            ahead = group + (1 << (GROUPS_LOG2 - 1 - bit))
            first = load_constant(offs_ptr + tl.minimum(ahead, G) - 1) // ROWS + ahead
            group = tl.where((ahead < G) & (first <= slot), ahead, group)
        start = _start(offs_ptr, group)
        end = load_constant(offs_ptr + group)
        first = start // ROWS
        slots = end // ROWS - first + 1
        local = tile - (first + group) * stripes
        stripe = local // slots
        block = first + local % slots
        tiles = (end - 1) // ROWS - first + 1
        first_row = wide(block * ROWS)
        lo = start - block * ROWS
        hi = end - block * ROWS
    else:
        tiles = tl.cdiv(rows, ROWS)
        group = tile // (tiles * stripes)
        stripe = tile // tiles % stripes
        lo = -(tile % tiles) * ROWS
        hi = rows + lo
        first_row = wide(group) * rows - lo
    live = (tile < total) & (stripe < stripes) & (hi > lo)
    return group, stripe, tiles, first_row, lo, tl.where(live, hi, 0)


@triton.jit
def _load_quads(
    x_ptr, x2_ptr, stride, stride2, C, C2, stripe, stripes1, first_row, lo, hi,
    DUAL: tl.constexpr, QUADS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, JAGGED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """A tile as four (QUADS, COLS) sub-tiles; sub-tile k has the rows 4i + k. Zeros outside the group. AGAIN: keep it in L2."""
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    if DUAL:
        second = stripe >= stripes1
        x_ptr = tl.where(second, x2_ptr, x_ptr)
        stride = tl.where(second, stride2, stride)
        C = tl.where(second, C2, C)
        stripe = tl.where(second, stripe - stripes1, stripe)
    cols = stripe * COLS + tl.arange(0, COLS)
    tile_ptr = x_ptr + first_row * stride
    tiles = ()
    for k in tl.static_range(4):
        rows = tl.arange(0, QUADS) * 4 + k
        mask = (rows < hi)[:, None]
        if JAGGED:
            mask = mask & (rows >= lo)[:, None]
        if not EVEN:
            mask = mask & (cols < C)[None, :]
        offsets = rows[:, None] * stride + cols[None, :]
        tiles = tiles + (tl.load(tile_ptr + offsets, mask=mask, other=0.0, eviction_policy=policy),)
    return tiles


@triton.jit
def _publish_tile(
    tile, total, x_ptr, x2_ptr, offs_ptr, ws_ptr, rows, C, C2, G, stride, stride2, stripes, stripes1, tag,
    JAGGED: tl.constexpr, DUAL: tl.constexpr, GROUPS_LOG2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PHASE: tl.constexpr, EVEN: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Load a tile, raise its stripe's largest magnitudes with it and count it in; returns the tile."""
    group, stripe, _, first_row, lo, hi = _locate(tile, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS)
    xs = _load_quads(
        x_ptr, x2_ptr, stride, stride2, C, C2, stripe, stripes1, first_row, lo, hi,
        DUAL, ROWS // 4, COLS, EVEN, JAGGED, RELOAD,
    )  # fmt: skip
    if PHASE != 2:
        m01 = tl.maximum(magnitude(xs[0]), magnitude(xs[1]))
        m23 = tl.maximum(magnitude(xs[2]), magnitude(xs[3]))
        amax = magnitude_to_fp32(tl.max(tl.maximum(m01, m23), axis=0), xs[0].dtype)
        lanes = tl.arange(0, COLS)
        index = group * stripes + stripe
        raise_published(ws_ptr, G * stripes + index * COLS + lanes, amax, tag, (lanes >= 0) & (hi > 0))
        arrive(ws_ptr, index, tag, hi > 0)
    return xs


@triton.jit
def _cast_transpose_groups(
    x_ptr, x2_ptr, q_ptr, q2_ptr, scale_ptr, scale2_ptr, offs_ptr, ws_ptr,
    rows, C, C2, G, stride_x, stride_x2, total,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, INVERSE: tl.constexpr,
    JAGGED: tl.constexpr, DUAL: tl.constexpr, GROUPS_LOG2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PHASE: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """q[group, col, row] = fp8(x[group, row, col] * s[group, col]); DUAL: of two matrices with the same groups of rows.

    Weights (G * rows, C) give q (G, C, rows); token groups of (rows, C) give q (C, rows). Scales are (G, C) either way.
    """
    stripes1 = tl.cdiv(C, COLS)
    stripes = stripes1
    if DUAL:
        stripes += tl.cdiv(C2, COLS)
    counters = G * stripes
    lanes = tl.arange(0, COLS)
    tag = launch_tag(ws_ptr)
    step = tl.num_programs(0)

    xs_next = ()
    for ahead in tl.static_range(AHEAD):
        xs_next = _publish_tile(
            tl.program_id(0) + ahead * step, total, x_ptr, x2_ptr, offs_ptr, ws_ptr, rows, C, C2, G, stride_x, stride_x2, stripes,
            stripes1, tag, JAGGED, DUAL, GROUPS_LOG2, ROWS, COLS, PHASE, EVEN, RELOAD,
        )  # fmt: skip

    for tile in tl.range(tl.program_id(0), total, step, num_stages=STAGES, disable_licm=True):
        group, stripe, tiles, first_row, lo, hi = _locate(tile, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS)
        xs = xs_next
        xs_next = _publish_tile(
            tile + AHEAD * step, total, x_ptr, x2_ptr, offs_ptr, ws_ptr, rows, C, C2, G, stride_x, stride_x2, stripes,
            stripes1, tag, JAGGED, DUAL, GROUPS_LOG2, ROWS, COLS, PHASE, EVEN, RELOAD,
        )  # fmt: skip
        if PHASE != 1 and hi > 0:
            index = group * stripes + stripe
            if RELOAD:  # here, not above, where a pipeline would bring it in the layout of the store, half by half
                xs = _load_quads(
                    x_ptr, x2_ptr, stride_x, stride_x2, C, C2, stripe, stripes1, first_row, lo, hi,
                    DUAL, ROWS // 4, COLS, EVEN, JAGGED, False,
                )  # fmt: skip
            if PHASE == 0:
                await_arrivals(ws_ptr, index, tiles, tag)
            scale = amax_to_scale(published(ws_ptr, counters + index * COLS + lanes), FP8_MAX, POW2)
            width = C
            out_ptr = q_ptr
            out_scale_ptr = scale_ptr
            if DUAL:
                second = stripe >= stripes1
                width = tl.where(second, C2, C)
                out_ptr = tl.where(second, q2_ptr, q_ptr)
                out_scale_ptr = tl.where(second, scale2_ptr, scale_ptr)
                stripe = tl.where(second, stripe - stripes1, stripe)
            live = stripe * COLS + lanes < width
            if lo >= 0:
                kept = reciprocal(scale) if INVERSE else scale
                tl.store(out_scale_ptr + wide(group) * width + stripe * COLS + lanes, kept, mask=live)
            base = wide(stripe * COLS) * rows + first_row
            if not JAGGED:
                base += wide(group) * (C - 1) * rows
            qs = ()
            for k in tl.static_range(4):
                qs = qs + ((xs[k].to(tl.float32) * scale[None, :]).to(q_ptr.dtype.element_ty),)
            store_transposed(out_ptr, base, rows, tl.maximum(lo, 0), tl.minimum(hi, ROWS), live, qs, JAGGED, EVEN, PACKED)

    if JAGGED and PHASE != 1:
        empty = amax_to_scale(tl.zeros((COLS,), dtype=tl.float32), FP8_MAX, POW2)
        if INVERSE:
            empty = reciprocal(empty)
        for group in range(tl.program_id(0), G, step):
            if _start(offs_ptr, group) == load_constant(offs_ptr + group):
                for first in range(0, C, COLS):
                    tl.store(scale_ptr + wide(group) * C + first + lanes, empty, mask=first + lanes < C)
                if DUAL:
                    for first in range(0, C2, COLS):
                        tl.store(scale2_ptr + wide(group) * C2 + first + lanes, empty, mask=first + lanes < C2)
    if PHASE != 1:
        close_launch(ws_ptr, tag)
