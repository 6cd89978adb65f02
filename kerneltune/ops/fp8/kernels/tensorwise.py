"""Quantize segments of rows with one scale each, reading twice: make finite and take amax, then make finite, scale and cast.

A segment is a tensor, an expert or a token group. Tiles of ROWS x COLS are numbered segment by segment; no tile has rows of
two segments. The first launch leaves the largest magnitudes in a workspace. The second launch walks the tiles in reverse,
because L2 still holds the tiles that the first launch read last, and closes the launch. 16-bit elements come in PAIRS, as
int32: made finite and cast two by two, and rows of four bytes transposed with byte permutes.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.tl_exchange import close_launch, launch_tag, load_published, publish_max
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


@dataclass(frozen=True, eq=False, repr=False)
class Out(Constants):
    """Describe the outputs of a cast.

    Attributes:
        fp8: the type of the cast.
        fp8_max: the largest finite value of that type.
        inverse: whether the written scale is a factor, 1 / multiplier.
        rowmajor, colmajor: whether q, and whether the bytes of its transpose, are written.
        packed: whether rows of the transpose are a multiple of four bytes long, so that they are written as words.
    """

    fp8: tl.dtype
    fp8_max: float
    inverse: bool
    rowmajor: bool
    colmajor: bool
    packed: bool


@triton.jit
def finite_magnitude(x):
    """Return `magnitude` of x: 0 for NaN, the magnitude of the largest finite value for infinity."""
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
def load_quads(x_ptr, stride: tl.constexpr, C: tl.constexpr, at, GROUPS: tl.constexpr, TILE: tl.constexpr, AGAIN: tl.constexpr):
    """Load the tile `at` as four (rows / 4, cols) sub-tiles; sub-tile k has the rows 4i + k. Zeros outside the group.

    AGAIN: leave the tile in L2, because the next launch reads it again.
    """
    _group, stripe, _tiles, first_row, lo, hi = at
    policy: tl.constexpr = "" if AGAIN else "evict_first"
    cols = tl.arange(0, TILE.cols)
    tile_ptr = x_ptr + first_row * stride + stripe * TILE.cols
    tiles = ()
    for k in tl.static_range(4):
        rows = tl.arange(0, TILE.rows // 4) * 4 + k
        mask = _inside(rows, lo, hi, stripe * TILE.cols + cols, C, GROUPS, TILE)
        offsets = rows[:, None] * stride + cols[None, :]
        tiles = tiles + (tl.load(tile_ptr + offsets, mask=mask, other=0, eviction_policy=policy),)
    return tiles


@triton.jit
def _inside(rows, lo, hi, cols, C: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Return the mask of a tile's elements that its group has.

    Where groups are even, tiles past the last tile repeat the last tile.
    """
    mask = tl.full((1, 1), True, tl.int1)
    if not GROUPS.even:
        mask = mask & (rows < hi)[:, None]
    if GROUPS.jagged and not GROUPS.alignment:
        mask = mask & (rows >= lo)[:, None]
    if C % TILE.cols != 0:
        mask = mask & (cols < C)[None, :]
    return mask


@triton.jit
def finite_words(xs, TILE: tl.constexpr):
    """Make the pairs of a tile out of `load_quads` finite; `store_tile` makes single elements finite."""
    dtype: tl.constexpr = TILE.dtype
    if TILE.pairs == 2:
        xs = finite_pairs(xs[0], dtype), finite_pairs(xs[1], dtype), finite_pairs(xs[2], dtype), finite_pairs(xs[3], dtype)
    return xs


@triton.jit
def largest_magnitude(xs, TILE: tl.constexpr):
    """Return the largest `magnitude` of a tile.

    In pairs it is the magnitude of NaN or infinity, unless `finite_words` made the tile finite.
    """
    if TILE.pairs == 2:
        pairs = magnitude_of_pairs(xs[0], xs[1], xs[2], xs[3])
        largest = tl.maximum(pairs & 0xFFFF, pairs >> 16)
    else:
        m01 = tl.maximum(finite_magnitude(xs[0]), finite_magnitude(xs[1]))
        m23 = tl.maximum(finite_magnitude(xs[2]), finite_magnitude(xs[3]))
        largest = tl.maximum(m01, m23)
    return tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit
def finite_tile(x0, x1, x2, x3, TILE: tl.constexpr):
    """Return the four sub-tiles of a tile, made finite as `store_tile` needs them, and their largest magnitude."""
    largest = largest_magnitude((x0, x1, x2, x3), TILE)
    if TILE.pairs == 2:
        infinite: tl.constexpr = 0x7C00 if TILE.dtype == tl.float16 else 0x7F80
        if largest >= infinite:  # the tile holds NaN or infinity; no other tile pays for making it finite
            x0, x1, x2, x3 = finite_words((x0, x1, x2, x3), TILE)
            largest = largest_magnitude((x0, x1, x2, x3), TILE)
    return x0, x1, x2, x3, largest


@triton.jit
def segment_of(group, ONE: tl.constexpr):
    """Return the segment of a group, which has the scale: the group itself, or 0 if all groups share ONE scale."""
    return group * 0 if ONE else group


@triton.jit
def without_rows(offs_ptr, group, rows, G, ONE: tl.constexpr):
    """Return whether a segment has no rows: a group or, if `ONE`, the union of all groups."""
    start, end = group_bounds(offs_ptr, group, rows)
    if ONE:
        end = tl.minimum(load_constant(offs_ptr + G - 1), rows)
        start = tl.minimum(end, 0)
    return start >= end


@triton.jit
def amax_segments(
    x_ptr, offs_ptr, ws_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    GROUPS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Publish the largest magnitude of every segment in its word of the workspace, by atomic max of its tiles.

    In pairs x is int32, and C and stride count words.
    """
    tag = launch_tag(ws_ptr)
    stripes = tl.cdiv(C, TILE.cols)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        at = locate_block(tile, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
        group, _stripe, _tiles, _first_row, _lo, hi = at
        xs = load_quads(x_ptr, stride, C, at, GROUPS, TILE, True)
        amax = magnitude_to_fp32(largest_magnitude(finite_words(xs, TILE), TILE), TILE.dtype)
        publish_max(ws_ptr, segment_of(group, GROUPS.one), amax, tag, hi > 0)


@triton.jit
def store_tile(
    xs, multiplier, q_ptr, qt_ptr, ld, at, C: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Multiply and cast a tile out of `finite_words` into q and its transpose, whose rows are `ld` apart.

    With an alignment all columns that the tile has in the transpose are written: a group's, and zeros.
    """
    group, stripe, _tiles, first_row, lo, hi = at
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    PAIRS: tl.constexpr = TILE.pairs
    dtype: tl.constexpr = TILE.dtype
    ALIGNMENT: tl.constexpr = GROUPS.alignment
    lanes = tl.arange(0, COLS)
    live = stripe * COLS + lanes < C
    ys, qs = (), ()
    for k in tl.static_range(4):
        if PAIRS == 2:
            q = to_fp8_pair(values(xs[k], 0, PAIRS, dtype) * multiplier, values(xs[k], 1, PAIRS, dtype) * multiplier, OUT.fp8)
        else:
            y = finite(xs[k]) * multiplier
            q = to_fp8(y, OUT.fp8)
            ys = ys + (y,)
        if OUT.rowmajor:
            r = tl.arange(0, ROWS // 4) * 4 + k
            mask = _inside(r, lo, hi, stripe * COLS + lanes, C, GROUPS, TILE)
            q_tile = q_ptr + first_row * C + stripe * COLS
            tl.store(q_tile + (r[:, None] * C + lanes[None, :]), q, mask=mask, cache_modifier=".cs")
        qs = qs + (q,)
    if OUT.colmajor:
        column = aligned_column(first_row, group, lo, ROWS, ALIGNMENT) if ALIGNMENT else first_row
        base = wide(stripe * (COLS * PAIRS)) * ld + column
        if not GROUPS.jagged:
            base += wide(group) * (C * PAIRS - 1) * ld
        EDGES: tl.constexpr = GROUPS.jagged and not ALIGNMENT
        end = ROWS if GROUPS.even or ALIGNMENT else tl.minimum(hi, ROWS)
        begin = 0 if ALIGNMENT else tl.maximum(lo, 0)
        if PAIRS == 1 and OUT.packed:  # cast once more: ptxas 12.8 gets q wrong where these words are made of it
            words = to_fp8_words(ys[0], ys[1], ys[2], ys[3], OUT.fp8)
            store_transposed_words(qt_ptr, base, ld, begin, end, live, words, EDGES, C % COLS == 0)
        else:
            store_transposed_tile(qt_ptr, base, ld, begin, end, live, qs, EDGES, C % COLS == 0, OUT.packed, PAIRS)


@triton.jit
def cast_segments(
    x_ptr, q_ptr, qt_ptr, scale_ptr, offs_ptr, ws_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write q (all rows, C) and its transpose, segment by segment (G, C, rows), or of token groups as a whole (C, rows).

    In pairs x is int32 and q int16, and C and stride count words.
    """
    stripes = tl.cdiv(C, TILE.cols)
    multiplier = 0.0
    of = -1  # the segment of `multiplier`
    # from the last tile to the first: L2 still holds the tiles that `amax_segments` has read last
    for back in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        at = locate_block(total - 1 - back, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
        group, stripe, columns, _first_row, lo, hi = at
        xs = load_quads(x_ptr, stride, C, at, GROUPS, TILE, False)
        segment = segment_of(group, GROUPS.one)
        if segment != of:
            multiplier = amax_to_scale(load_published(ws_ptr, segment), OUT.fp8_max, False)
            of = segment
        if (hi > 0) | (columns > 0 if GROUPS.alignment else False):
            if (lo >= 0) & (stripe == 0):
                tl.store(scale_ptr + segment, reciprocal(multiplier) if OUT.inverse else multiplier)
            store_tile(finite_words(xs, TILE), multiplier, q_ptr, qt_ptr, ld, at, C, GROUPS, OUT, TILE)
    # Because a segment without rows has no tile, its scale is written here.
    if GROUPS.jagged:
        empty = amax_to_scale(tl.zeros((), dtype=tl.float32), OUT.fp8_max, False)
        for group in range(tl.program_id(0), 1 if GROUPS.one else G, tl.num_programs(0)):
            if without_rows(offs_ptr, group, rows, G, GROUPS.one):
                tl.store(scale_ptr + group, reciprocal(empty) if OUT.inverse else empty)
    close_launch(ws_ptr, launch_tag(ws_ptr))
