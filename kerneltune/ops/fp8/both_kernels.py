"""Both layouts of expert weights, each with scales of its own, in one launch. May import tl_lib, tl_exchange.

An expert takes two passes. Row programs cast whole rows and raise the largest magnitudes of the expert's columns; turn programs
cast the same numbers by the scales of the columns and transpose the bytes. Ids follow each other expert by expert, but for some
row programs that go ahead of the turn programs before them, so that nobody waits long for them: programs begin in the order of
their ids. What turn programs read was read a little before, and L2 may still have some of it, most likely the rows read last,
with which they begin; most of what is gained is that the two passes overlap.
"""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_exchange import await_done, close_done, launch_tag, leave_done, places, published, raise_seen, seen
from kerneltune.kernel_lib.tl_lib import (
    amax_to_scale,
    larger_pairs,
    magnitude,
    magnitude_to_fp32,
    reciprocal,
    since_sm_90,
    store_here,
    to_fp8,
    to_fp8_pair,
    values,
    wide,
)

_ROWS_IN_TURN = tl.constexpr(2048)
"""Rows of x whose tiles follow each other: they write neighbouring pieces of the same rows of the transpose."""


@triton.jit
def _magnitudes(x, PAIRS: tl.constexpr):
    return x & 0x7FFF7FFF if PAIRS == 2 else magnitude(x).to(tl.int32)


@triton.jit
def _larger(m, n, PAIRS: tl.constexpr):
    return larger_pairs(m, n) if PAIRS == 2 else tl.maximum(m, n)


@triton.jit
def _largest(m, axis: tl.constexpr, PAIRS: tl.constexpr):
    if PAIRS == 1:
        return tl.max(m, axis=axis)
    elif since_sm_90():
        return tl.reduce(m, axis, larger_pairs)
    else:
        return tl.max(m & 0xFFFF, axis=axis) | (tl.max(m >> 16, axis=axis) << 16)


@triton.jit
def _amax(m, dtype: tl.constexpr, PAIRS: tl.constexpr):
    return magnitude_to_fp32(tl.maximum(m & 0xFFFF, m >> 16) if PAIRS == 2 else m, dtype)


@triton.jit
def _place(rows, words, height, c: tl.constexpr, C: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr):
    """Offsets of load c of some rows, and which there are."""
    word = c * COLS + words
    mask = tl.full((1, 1, 1), True, tl.int1)
    if not WHOLE:
        mask = mask & (rows < height)[:, :, None]
    if (c + 1) * COLS > C:
        mask = mask & (word < C)[None, None, :]
    return rows[:, :, None] * C + word[None, None, :], mask


@triton.jit
def _cast_rows(
    block, x_ptr, q_ptr, scale_ptr, ws_ptr, done_ptr,
    N: tl.constexpr, K: tl.constexpr, FP8_MAX: tl.constexpr, POW2: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, ABREAST: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of an expert, STEP at a time, in loads of COLS words; 16-bit numbers come in PAIRS, as int32.

    A tile is (ABREAST, STEP / ABREAST, COLS): Triton gives its warps COLS first and then what lies ABREAST, so that a thread
    holds all STEP / ABREAST rows of a word and finds the larger of them alone.
    """
    C: tl.constexpr = K // PAIRS
    CHUNKS: tl.constexpr = (C + COLS - 1) // COLS
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    WHOLE: tl.constexpr = N % ROWS == 0 and ROWS % STEP == 0
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    fp8: tl.constexpr = q_ptr.dtype.element_ty
    if PAIRS == 2:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
        q_ptr = q_ptr.to(tl.pointer_type(tl.int16))
    expert = block // BLOCKS
    first = block % BLOCKS * ROWS
    tag = launch_tag(ws_ptr)
    row = wide(expert) * N + first
    x_ptr += row * C
    q_ptr += row * C
    words = tl.arange(0, COLS)
    inside = tl.arange(0, ABREAST)[:, None] + tl.arange(0, STEP // ABREAST)[None, :] * ABREAST
    height = ROWS if N % ROWS == 0 else tl.minimum(N - first, ROWS)
    tops = ()
    for _ in tl.static_range(CHUNKS):
        tops = tops + (_magnitudes(tl.zeros((ABREAST, COLS), dtype=x_ptr.dtype.element_ty), PAIRS),)
    for at in tl.range(0, height, STEP, num_stages=1):
        rows = at + inside
        xs, raised = (), ()
        for c in tl.static_range(CHUNKS):
            offsets, mask = _place(rows, words, height, c, C, COLS, WHOLE)
            xs = xs + (tl.load(x_ptr + offsets, mask=mask, other=0, eviction_policy="evict_last"),)
        top = _magnitudes(xs[0], PAIRS)
        for c in tl.static_range(CHUNKS):
            m = _magnitudes(xs[c], PAIRS)
            raised = raised + (_larger(tops[c], _largest(m, 1, PAIRS), PAIRS),)
            if c > 0:
                top = _larger(top, m, PAIRS)
        tops = raised
        scale = amax_to_scale(_amax(_largest(top, 2, PAIRS), dtype, PAIRS), FP8_MAX, POW2)
        store_here(scale_ptr + row + rows, reciprocal(scale) if INVERSE else scale, rows < height)
        for c in tl.static_range(CHUNKS):
            offsets, mask = _place(rows, words, height, c, C, COLS, WHOLE)
            if PAIRS == 2:
                low = values(xs[c], 0, PAIRS, dtype) * scale[:, :, None]
                q = to_fp8_pair(low, values(xs[c], 1, PAIRS, dtype) * scale[:, :, None], fp8)
            else:
                q = to_fp8(xs[c].to(tl.float32) * scale[:, :, None], fp8)
            tl.store(q_ptr + offsets, q, mask=mask, cache_modifier=".cs")
    word_ptr = places(ws_ptr, expert * K + words)  # first halves of words lie together, then second ones
    for first_c in tl.static_range(0, CHUNKS, ABREAST):  # a thread looks at 16 words at a time
        befores = ()
        for i in tl.static_range(ABREAST):
            if first_c + i < CHUNKS:
                for half in tl.static_range(PAIRS):
                    at = (first_c + i) * COLS
                    befores = befores + (seen(word_ptr + (at + half * C), words < C - at),)
        for i in tl.static_range(ABREAST):
            if first_c + i < CHUNKS:
                at = (first_c + i) * COLS
                top = _largest(tops[first_c + i], 0, PAIRS)
                for half in tl.static_range(PAIRS):
                    amax = magnitude_to_fp32((top >> (16 * half)) & 0xFFFF if PAIRS == 2 else top, dtype)
                    raise_seen(word_ptr + (at + half * C), amax, tag, befores[i * PAIRS + half], words < C - at)
    leave_done(done_ptr + expert)


@triton.jit
def _turn_tile(
    expert, tile, x_ptr, qt_ptr, scale_t_ptr, ws_ptr, done_ptr, G,
    N: tl.constexpr, K: tl.constexpr, FP8_MAX: tl.constexpr, POW2: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, ARRIVALS: tl.constexpr,
):  # fmt: skip
    """A tile of an expert, from its last rows to its first, after its ARRIVALS row programs."""
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    STRIPES: tl.constexpr = (K + COLS - 1) // COLS
    GROUP: tl.constexpr = (_ROWS_IN_TURN + ROWS - 1) // ROWS
    fp8: tl.constexpr = qt_ptr.dtype.element_ty
    tile = BLOCKS * STRIPES - 1 - tile
    above = tile // (GROUP * STRIPES) * GROUP
    height = tl.minimum(BLOCKS - above, GROUP)
    inside = tile % (GROUP * STRIPES)
    row0 = (above + inside % height) * ROWS
    col0 = inside // height * COLS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    live = cols < K - col0
    mask = tl.full((1, 1), True, tl.int1)
    if N % ROWS != 0:
        mask = mask & (rows < N - row0)[:, None]
    if K % COLS != 0:
        mask = mask & live[None, :]
    x_ptr += (wide(expert) * N + row0) * K + col0
    x = tl.load(x_ptr + (rows[:, None] * K + cols[None, :]), mask=mask, other=0.0, eviction_policy="evict_first")
    await_done(done_ptr + expert, ARRIVALS)
    column = tl.minimum(col0 + cols, K - 1)
    amax = published(ws_ptr, expert * K + column % PAIRS * (K // PAIRS) + column // PAIRS)
    close_done(done_ptr + expert, ARRIVALS + BLOCKS * STRIPES, ws_ptr, G)
    scale = amax_to_scale(amax, FP8_MAX, POW2)
    if row0 == 0:
        tl.store(scale_t_ptr + expert * K + col0 + cols, reciprocal(scale) if INVERSE else scale, mask=live)
    q = to_fp8(x.to(tl.float32) * scale[None, :], fp8).to(tl.uint8, bitcast=True)
    to_ptr = qt_ptr.to(tl.pointer_type(tl.uint8)) + (wide(expert) * K + col0) * N + row0
    tl.store(to_ptr + (cols[:, None] * N + rows[None, :]), tl.trans(q), mask=tl.trans(mask), cache_modifier=".cs")


@triton.jit
def cast_both(
    x_ptr, q_ptr, qt_ptr, scale_ptr, scale_t_ptr, ws_ptr, done_ptr, G, lag,
    N: tl.constexpr, K: tl.constexpr, FP8_MAX: tl.constexpr, POW2: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, ABREAST: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """q (G, N, K) and scale (G, N) along the rows of x (G, N, K); qt (G, K, N) and scale_t (G, K) down its columns.

    lag: by how many row programs those run ahead. PHASE: 0 both passes in one launch, 1 the row programs, 2 the turn programs.
    """
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    TILES: tl.constexpr = (N + TILE_ROWS - 1) // TILE_ROWS * ((K + TILE_COLS - 1) // TILE_COLS)
    program = tl.program_id(0)
    if PHASE == 0:
        turn = tl.maximum(program - lag, 0)
        expert = turn // (BLOCKS + TILES)
        place = turn % (BLOCKS + TILES)
        block = tl.where(program < lag, program, lag + expert * BLOCKS + place)
        tile = tl.where(program < lag, -1, place - BLOCKS)
        casts = (tile < 0) & (block < G * BLOCKS)
    else:
        block, expert, tile, casts = program, program // TILES, program % TILES, PHASE == 1
    if casts:
        _cast_rows(
            block, x_ptr, q_ptr, scale_ptr, ws_ptr, done_ptr, N, K, FP8_MAX, POW2, INVERSE,
            ROWS, STEP, ABREAST, LANES, PAIRS,
        )  # fmt: skip
    if PHASE != 1 and tile >= 0:
        _turn_tile(
            expert, tile, x_ptr, qt_ptr, scale_t_ptr, ws_ptr, done_ptr, G, N, K, FP8_MAX, POW2, INVERSE,
            TILE_ROWS, TILE_COLS, PAIRS, BLOCKS,
        )  # fmt: skip
