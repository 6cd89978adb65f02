"""Both layouts of expert weights, each with scales of its own, from one read of memory. May import tl_lib, tl_transpose.

A scale per row of the input for the layout it has, and one per column, over the expert's rows, for the transpose. Either needs
all of the expert, so programs publish largest magnitudes an expert ahead of the cast, which reads the tile again: from L2 where
experts are small enough, else from memory. 16-bit numbers come in PAIRS, as int32.
"""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_exchange import arrive, await_arrivals, close_launch, launch_tag, published, raise_published
from kerneltune.kernel_lib.tl_lib import (
    amax_to_scale,
    half_to_fp32,
    magnitude,
    magnitude_to_fp32,
    only_if,
    reciprocal,
    to_fp8,
    to_fp8_pair,
    to_fp8_words,
    values,
    wide,
)
from kerneltune.kernel_lib.tl_transpose import store_transposed, store_transposed_words
from kerneltune.ops.fp8.tiles import locate_in_weights, raise_columns


@triton.jit
def _load_quads(
    x_ptr, stripe, first_row, hi,
    C: tl.constexpr, QUADS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """A tile as four (QUADS, COLS) sub-tiles; sub-tile k has the rows 4i + k. Zeros outside. AGAIN: keep it in L2."""
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    cols = tl.arange(0, COLS)
    tiles = ()
    for k in tl.static_range(4):
        rows = tl.arange(0, QUADS) * 4 + k
        mask = tl.full((1, 1), True, tl.int1)
        if not EVEN_ROWS:
            mask = mask & (rows < hi)[:, None]
        if not EVEN:
            mask = mask & (stripe * COLS + cols < C)[None, :]
        offsets = rows[:, None] * C + cols[None, :]
        tiles = tiles + (tl.load(x_ptr + first_row * C + stripe * COLS + offsets, mask=mask, other=0.0, eviction_policy=policy),)
    return tiles


@triton.jit
def _amax_of_rows(x, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """The largest magnitude of every row of a sub-tile, fp32 (QUADS,)."""
    if PAIRS == 2:
        m = x & 0x7FFF7FFF
        return magnitude_to_fp32(tl.max(tl.maximum(m & 0xFFFF, m >> 16), axis=1), dtype)
    else:
        return magnitude_to_fp32(tl.max(magnitude(x), axis=1), dtype)


@triton.jit
def _publish_tile(
    tile, total, x_ptr, ws_ptr, G, tag,
    N: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Raise the largest magnitudes of a tile's rows and columns and count it in for its expert."""
    QUADS: tl.constexpr = ROWS // 4
    STRIPES: tl.constexpr = (C + COLS - 1) // COLS
    group, stripe, _, first_row, lo, hi = locate_in_weights(tile, total, N, STRIPES, ROWS)
    xs = _load_quads(x_ptr, stripe, first_row, hi, C, QUADS, COLS, C % COLS == 0, N % ROWS == 0, True)
    live = hi > 0
    quads = tl.arange(0, QUADS)
    for k in tl.static_range(4):
        rows = quads * 4 + k
        amax = _amax_of_rows(xs[k], PAIRS, dtype)
        raise_published(ws_ptr, G + first_row + rows, amax, tag, only_if(rows < hi, live))
    columns = G + wide(G) * N + (wide(group) * STRIPES + stripe) * (COLS * PAIRS)
    raise_columns(xs, ws_ptr, columns, tag, live, COLS, PAIRS, dtype)
    arrive(ws_ptr, group, tag, live)


@triton.jit
def cast_both(
    x_ptr, q_ptr, qt_ptr, scale_ptr, scale_t_ptr, ws_ptr, G, total,
    N: tl.constexpr, C: tl.constexpr, FP8_MAX: tl.constexpr, POW2: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, PHASE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """q (G, N, C) and scale (G, N) along the rows of x (G, N, C); qt (G, C, N) and scale_t (G, C) down its columns.

    In PAIRS x is int32, q int16, and C and COLS count words of two numbers of `dtype`. The loops may not be pipelined: a pipeline
    would load the published magnitudes before the wait for them.
    """
    QUADS: tl.constexpr = ROWS // 4
    STRIPES: tl.constexpr = (C + COLS - 1) // COLS
    TILES: tl.constexpr = (N + ROWS - 1) // ROWS * STRIPES
    EVEN: tl.constexpr = C % COLS == 0
    EVEN_ROWS: tl.constexpr = N % ROWS == 0
    fp8: tl.constexpr = qt_ptr.dtype.element_ty
    lanes = tl.arange(0, COLS)
    quads = tl.arange(0, QUADS)
    tag = launch_tag(ws_ptr)
    step = tl.num_programs(0)
    ahead = tl.cdiv(TILES, step) * step  # all of an expert is published before any of it is awaited
    if PHASE == 0:
        for tile in tl.range(tl.program_id(0), tl.minimum(ahead, total), step, num_stages=1):
            _publish_tile(tile, total, x_ptr, ws_ptr, G, tag, N, C, ROWS, COLS, PAIRS, dtype)
    if PHASE == 1:
        ahead = 0
    for tile in tl.range(tl.program_id(0), total, step, num_stages=1, disable_licm=True):
        if PHASE != 2:
            _publish_tile(tile + ahead, total, x_ptr, ws_ptr, G, tag, N, C, ROWS, COLS, PAIRS, dtype)
        if PHASE != 1:
            group, stripe, _, first_row, lo, hi = locate_in_weights(tile, total, N, STRIPES, ROWS)
            xs = _load_quads(x_ptr, stripe, first_row, hi, C, QUADS, COLS, EVEN, EVEN_ROWS, False)
            if PHASE == 0:
                await_arrivals(ws_ptr, group, TILES, tag)
            live = stripe * COLS + lanes < C
            for k in tl.static_range(4):
                rows = quads * 4 + k
                inside = rows < hi
                amax = published(ws_ptr, G + first_row + tl.minimum(rows, hi - 1))
                scale = amax_to_scale(amax, FP8_MAX, POW2)
                if stripe == 0:
                    tl.store(scale_ptr + first_row + rows, reciprocal(scale) if INVERSE else scale, mask=inside)
                mask = tl.full((1, 1), True, tl.int1)
                if not EVEN_ROWS:
                    mask = mask & inside[:, None]
                if not EVEN:
                    mask = mask & live[None, :]
                if PAIRS == 2:
                    low = half_to_fp32(xs[k], 0, dtype) * scale[:, None]
                    high = half_to_fp32(xs[k], 1, dtype) * scale[:, None]
                    q = to_fp8_pair(low, high, fp8)
                else:
                    q = to_fp8(xs[k].to(tl.float32) * scale[:, None], fp8)
                tile_ptr = q_ptr + first_row * C + stripe * COLS
                tl.store(tile_ptr + (rows[:, None] * C + lanes[None, :]), q, mask=mask, cache_modifier=".cs")
            columns = G + wide(G) * N + (wide(group) * STRIPES + stripe) * (COLS * PAIRS)
            base = (wide(group) * C + stripe * COLS) * PAIRS * N - lo
            end = ROWS if EVEN_ROWS else tl.minimum(hi, ROWS)
            for half in tl.static_range(PAIRS):
                scale = amax_to_scale(published(ws_ptr, columns + half * COLS + lanes), FP8_MAX, POW2)
                if lo == 0:
                    to = (wide(group) * C + stripe * COLS + lanes) * PAIRS + half
                    tl.store(scale_t_ptr + to, reciprocal(scale) if INVERSE else scale, mask=live)
                y0 = values(xs[0], half, PAIRS, dtype) * scale[None, :]
                y1 = values(xs[1], half, PAIRS, dtype) * scale[None, :]
                y2 = values(xs[2], half, PAIRS, dtype) * scale[None, :]
                y3 = values(xs[3], half, PAIRS, dtype) * scale[None, :]
                at = base + half * N
                if PACKED:
                    words = to_fp8_words(y0, y1, y2, y3, fp8)
                    store_transposed_words(qt_ptr, at, N * PAIRS, 0, end, live, words, False, EVEN)
                else:
                    qs = (to_fp8(y0, fp8), to_fp8(y1, fp8), to_fp8(y2, fp8), to_fp8(y3, fp8))
                    store_transposed(qt_ptr, at, N * PAIRS, 0, end, live, qs, False, EVEN, PACKED)
    if PHASE != 1:
        close_launch(ws_ptr, tag)
