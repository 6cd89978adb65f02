"""Quantize segments of rows with one scale each, reading twice: make finite and take amax, then make finite, scale and cast.

A segment is a tensor, an expert or a token group. Tiles of ROWS x COLS are numbered segment by segment; every tile is of one
segment. The first launch leaves the largest magnitudes in a workspace, the second walks the tiles in reverse, so that it finds
the end of what the first has read in L2, and closes the launch. 16-bit elements come in PAIRS, as int32: made finite and cast two
by two, and rows of four bytes transposed with byte permutes.
"""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_exchange import close_launch, launch_tag, published, raise_published
from kerneltune.kernel_lib.tl_groups import group_bounds
from kerneltune.kernel_lib.tl_lib import (
    amax_to_scale,
    is_cuda,
    load_constant,
    magnitude,
    magnitude_of_pairs,
    magnitude_to_fp32,
    reciprocal,
    to_fp8,
    to_fp8_pair,
    to_fp8_words,
    values,
    wide,
)
from kerneltune.kernel_lib.tl_transpose import store_transposed_tile, store_transposed_words
from kerneltune.ops.fp8.kernels.tiles import aligned_column, locate_block


@triton.jit
def finite_magnitude(x):
    """Return `magnitude` of x: that of 0 for NaN, that of the largest finite value for infinity."""
    infinite: tl.constexpr = 0x7F800000 if x.dtype.primitive_bitwidth == 32 else 0x7C00 if x.dtype == tl.float16 else 0x7F80
    m = magnitude(x)
    return tl.where(m > infinite, tl.zeros_like(m), tl.minimum(m, tl.full(m.shape, infinite - 1, m.dtype)))


@triton.jit
def finite(x):
    """Return x in fp32: 0 for NaN, the largest finite value of x's type, with its sign, for infinity."""
    bits: tl.constexpr = 0x7F7FFFFF if x.dtype.primitive_bitwidth == 32 else 0x7BFF if x.dtype == tl.float16 else 0x7F7F
    most = magnitude_to_fp32(tl.full((), bits, tl.int32), x.dtype)
    y = x.to(tl.float32)
    return tl.where(y == y, tl.minimum(tl.maximum(y, -most), most), 0.0)


# 0x7FFF - infinite, added to a NaN, carries into the sign, from where a permute copies it over the element.
_FINITE_PAIRS = """{
                .reg .b32 m, t, s, most;
                and.b32 m, $1, 0x7fff7fff;
                add.u32 t, m, CARRY;
                prmt.b32 s, t, t, 0xbb99;
                not.b32 s, s;
                and.b32 t, $1, s;
                and.b32 m, m, s;
                mov.b32 most, MOST;
                min.s16x2 m, m, most;
                and.b32 t, t, 0x80008000;
                or.b32 $0, m, t;
                }"""
_FINITE_PAIRS_FP16 = tl.constexpr(_FINITE_PAIRS.replace("CARRY", "0x03ff03ff").replace("MOST", "0x7bff7bff"))
_FINITE_PAIRS_BF16 = tl.constexpr(_FINITE_PAIRS.replace("CARRY", "0x007f007f").replace("MOST", "0x7f7f7f7f"))


@triton.jit
def finite_pairs(w, dtype: tl.constexpr):
    """Make words of two 16-bit elements finite: 0 for NaN, the largest finite value, with its sign, for infinity."""
    if is_cuda():
        text: tl.constexpr = _FINITE_PAIRS_FP16 if dtype == tl.float16 else _FINITE_PAIRS_BF16
        return tl.inline_asm_elementwise(text, "=r,r", [w], dtype=tl.int32, is_pure=True, pack=1)
    else:
        infinite: tl.constexpr = 0x7C00 if dtype == tl.float16 else 0x7F80
        low = _finite_half(w & 0xFFFF, infinite)
        high = _finite_half((w >> 16) & 0xFFFF, infinite)
        return (high << 16) | low


@triton.jit
def _finite_half(bits, infinite: tl.constexpr):
    m = bits & 0x7FFF
    return tl.where(m > infinite, 0, (bits & 0x8000) | tl.minimum(m, infinite - 1))


@triton.jit
def load_quads(
    x_ptr, stride: tl.constexpr, C: tl.constexpr, stripe, first_row, lo, hi,
    QUADS: tl.constexpr, COLS: tl.constexpr, EVEN_ROWS: tl.constexpr, JAGGED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Load rows [lo, hi) of a tile as four (QUADS, COLS) sub-tiles; sub-tile k has the rows 4i + k. Zeros elsewhere."""
    policy: tl.constexpr = "" if AGAIN else "evict_first"
    cols = tl.arange(0, COLS)
    tile_ptr = x_ptr + first_row * stride + stripe * COLS
    tiles = ()
    for k in tl.static_range(4):
        rows = tl.arange(0, QUADS) * 4 + k
        mask = _inside(rows, lo, hi, stripe * COLS + cols, C, COLS, EVEN_ROWS, JAGGED)
        offsets = rows[:, None] * stride + cols[None, :]
        tiles = tiles + (tl.load(tile_ptr + offsets, mask=mask, other=0, eviction_policy=policy),)
    return tiles


@triton.jit
def _inside(
    rows, lo, hi, cols, C: tl.constexpr, COLS: tl.constexpr, EVEN_ROWS: tl.constexpr, JAGGED: tl.constexpr
):  # fmt: skip
    """Return the mask of a tile's elements that its segment has. Under EVEN_ROWS tiles past the last one repeat it."""
    mask = tl.full((1, 1), True, tl.int1)
    if not EVEN_ROWS:
        mask = mask & (rows < hi)[:, None]
    if JAGGED:
        mask = mask & (rows >= lo)[:, None]
    if C % COLS != 0:
        mask = mask & (cols < C)[None, :]
    return mask


@triton.jit
def finite_words(xs, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Make the pairs of a tile out of `load_quads` finite; single elements are made finite where they are used."""
    if PAIRS == 2:
        xs = finite_pairs(xs[0], dtype), finite_pairs(xs[1], dtype), finite_pairs(xs[2], dtype), finite_pairs(xs[3], dtype)
    return xs


@triton.jit
def largest_magnitude(xs, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Return the largest `magnitude` of a tile; under PAIRS that of NaN or infinity, unless `finite_words` made it finite."""
    if PAIRS == 2:
        pairs = magnitude_of_pairs(xs[0], xs[1], xs[2], xs[3])
        largest = tl.maximum(pairs & 0xFFFF, pairs >> 16)
    else:
        m01 = tl.maximum(finite_magnitude(xs[0]), finite_magnitude(xs[1]))
        m23 = tl.maximum(finite_magnitude(xs[2]), finite_magnitude(xs[3]))
        largest = tl.maximum(m01, m23)
    return tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit
def segment_of(group, ONE: tl.constexpr):
    """Return the scale of a group; ONE: all groups share the first."""
    return group * 0 if ONE else group


@triton.jit
def without_rows(offs_ptr, group, rows, G, ONE: tl.constexpr):
    """Return whether a segment has no rows: a group, or under ONE all of them."""
    start, end = group_bounds(offs_ptr, group, rows)
    if ONE:
        end = tl.minimum(load_constant(offs_ptr + G - 1), rows)
        start = tl.minimum(end, 0)
    return start >= end


@triton.jit
def amax_segments(
    x_ptr, offs_ptr, ws_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    JAGGED: tl.constexpr, ALIGNMENT: tl.constexpr, ONE: tl.constexpr, GROUPS_LOG2: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr,
    EVEN_ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Publish the largest magnitude of every segment in its word of the workspace, by atomic max of its tiles.

    In PAIRS x is int32, and C, COLS and stride count words of two elements of `dtype`.
    """
    tag = launch_tag(ws_ptr)
    stripes = tl.cdiv(C, COLS)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        group, stripe, _tiles, first_row, lo, hi = locate_block(
            tile, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS, ALIGNMENT
        )  # fmt: skip
        xs = load_quads(
            x_ptr, stride, C, stripe, first_row, lo, hi, ROWS // 4, COLS, EVEN_ROWS, JAGGED and not ALIGNMENT, True
        )  # fmt: skip
        amax = magnitude_to_fp32(largest_magnitude(finite_words(xs, PAIRS, dtype), PAIRS, dtype), dtype)
        raise_published(ws_ptr, segment_of(group, ONE), amax, tag, hi > 0)


@triton.jit
def store_tile(
    xs, scale, q_ptr, qt_ptr, ld, group, stripe, first_row, lo, hi, C: tl.constexpr,
    JAGGED: tl.constexpr, ALIGNMENT: tl.constexpr, ROWMAJOR: tl.constexpr, COLMAJOR: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr,
    EVEN_ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Scale and cast a tile out of `finite_words` into q and its transpose, whose rows are `ld` apart.

    With ALIGNMENT all ROWS columns of the transpose are written: a group's, and zeros.
    """
    lanes = tl.arange(0, COLS)
    live = stripe * COLS + lanes < C
    ys, qs = (), ()
    for k in tl.static_range(4):
        if PAIRS == 2:
            q = to_fp8_pair(values(xs[k], 0, PAIRS, dtype) * scale, values(xs[k], 1, PAIRS, dtype) * scale, fp8)
        else:
            y = finite(xs[k]) * scale
            q = to_fp8(y, fp8)
            ys = ys + (y,)
        if ROWMAJOR:
            r = tl.arange(0, ROWS // 4) * 4 + k
            mask = _inside(r, lo, hi, stripe * COLS + lanes, C, COLS, EVEN_ROWS, JAGGED and not ALIGNMENT)
            q_tile = q_ptr + first_row * C + stripe * COLS
            tl.store(q_tile + (r[:, None] * C + lanes[None, :]), q, mask=mask, cache_modifier=".cs")
        qs = qs + (q,)
    if COLMAJOR:
        column = aligned_column(first_row, group, lo, ROWS, ALIGNMENT) if ALIGNMENT else first_row
        base = wide(stripe * (COLS * PAIRS)) * ld + column
        if not JAGGED:
            base += wide(group) * (C * PAIRS - 1) * ld
        EDGES: tl.constexpr = JAGGED and not ALIGNMENT
        end = ROWS if EVEN_ROWS or ALIGNMENT else tl.minimum(hi, ROWS)
        begin = 0 if ALIGNMENT else tl.maximum(lo, 0)
        if PAIRS == 1 and PACKED:  # cast once more: ptxas 12.8 gets q wrong where these words are made of it
            words = to_fp8_words(ys[0], ys[1], ys[2], ys[3], fp8)
            store_transposed_words(qt_ptr, base, ld, begin, end, live, words, EDGES, C % COLS == 0)
        else:
            store_transposed_tile(qt_ptr, base, ld, begin, end, live, qs, EDGES, C % COLS == 0, PACKED, PAIRS)


@triton.jit
def cast_segments(
    x_ptr, q_ptr, qt_ptr, scale_ptr, offs_ptr, ws_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    FP8_MAX: tl.constexpr, INVERSE: tl.constexpr,
    JAGGED: tl.constexpr, ALIGNMENT: tl.constexpr, ONE: tl.constexpr, GROUPS_LOG2: tl.constexpr,
    ROWMAJOR: tl.constexpr, COLMAJOR: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr,
    EVEN_ROWS: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write q (all rows, C) and its transpose, segment by segment (G, C, rows), or under JAGGED as a whole (C, rows).

    In PAIRS x is int32 and q int16, and C, COLS and stride count words of two elements of `dtype`.
    """
    stripes = tl.cdiv(C, COLS)
    scale = 0.0
    of = -1
    for back in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        group, stripe, columns, first_row, lo, hi = locate_block(
            total - 1 - back, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS, ALIGNMENT
        )  # fmt: skip
        xs = load_quads(
            x_ptr, stride, C, stripe, first_row, lo, hi, ROWS // 4, COLS, EVEN_ROWS, JAGGED and not ALIGNMENT, False
        )  # fmt: skip
        segment = segment_of(group, ONE)
        if segment != of:
            scale = amax_to_scale(published(ws_ptr, segment), FP8_MAX, False)
            of = segment
        if (hi > 0) | (columns > 0 if ALIGNMENT else False):
            if (lo >= 0) & (stripe == 0):
                tl.store(scale_ptr + segment, reciprocal(scale) if INVERSE else scale)
            store_tile(
                finite_words(xs, PAIRS, dtype), scale, q_ptr, qt_ptr, ld, group, stripe, first_row, lo, hi, C,
                JAGGED, ALIGNMENT, ROWMAJOR, COLMAJOR, ROWS, COLS, PAIRS, dtype, fp8, EVEN_ROWS, PACKED,
            )  # fmt: skip
    if JAGGED:
        empty = amax_to_scale(tl.zeros((), dtype=tl.float32), FP8_MAX, False)
        for group in range(tl.program_id(0), 1 if ONE else G, tl.num_programs(0)):
            if without_rows(offs_ptr, group, rows, G, ONE):
                tl.store(scale_ptr + group, reciprocal(empty) if INVERSE else empty)
    close_launch(ws_ptr, launch_tag(ws_ptr))
