"""Cast expert weights or token groups into both layouts, each with scales of its own, in one launch.

An expert or a group takes two passes. Row programs cast whole rows and publish the largest magnitudes of the columns by
atomic max; transpose programs cast the same elements by the scales of the columns and transpose the bytes. Row programs go
so far ahead of the transpose programs of their expert that nobody spins for long: programs begin in the order of their ids.
L2 still has a small expert when transpose programs read it; of large experts most of the gain is that the two passes
overlap.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.arguments import check_apart, in_pairs
from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.launch import resident
from kerneltune.kernel_lib.tl_exchange import (
    await_count,
    count_in,
    count_out_and_close,
    launch_tag,
    load_published,
    load_words,
    publish_if_larger,
    word_ptrs,
)
from kerneltune.kernel_lib.tl_lib import (
    INTERPRETED,
    amax_to_scale,
    is_cuda,
    larger_pairs,
    load_constant,
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
from kerneltune.kernel_lib.workspace import counters, workspace
from kerneltune.ops.fp8.contract import Cast
from kerneltune.ops.fp8.kernels.tiles import in_order, start_of
from kerneltune.rounding import cdiv

if TYPE_CHECKING:
    from kerneltune.ops.fp8.rowwise_3d_both import BothConfig

TILE_ROWS, TILE_COLS_OF_WARP = 128, 16
"""Tile of a transpose program: rows, and columns for each warp; 64 elements of a thread, 128 bytes of a row of the transpose."""

_ROWS_TOGETHER = tl.constexpr(2048)
"""Rows of x whose tiles follow each other: they write neighbouring pieces of the same rows of the transpose."""


def cast_into_both(
    x: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    groups: int,
    blocks: int,
    tile_blocks: int,
    cast: Cast,
    c: "BothConfig",
    ahead: int = 0,
    **arguments: Any,
) -> None:
    """Launch both passes together, or the row pass first where programs may not wait for each other.

    Args:
        x: rows of all groups.
        outputs: q, q_t, scale, scale_t by position; q_t is row-major here: (E, K, N), or (K, ld) of token groups.
        groups: experts, or token groups where `arguments` have offs_ptr.
        blocks: row programs.
        tile_blocks: transpose programs of every stripe.
        ahead: row programs that have the first ids, in addition to the config's lag.
        arguments: further arguments of the kernel that is launched.
    """
    check_apart("x", x, max(TILE_ROWS, c.rows))
    K, tile_cols = x.shape[1], TILE_COLS_OF_WARP * c.warps
    pairs = 2 if in_pairs(x) else 1
    tiles = tile_blocks * cdiv(K, tile_cols)
    lag = min(blocks, ahead + resident(x.device, c.lag))
    kernel = cast_both_groups if "offs_ptr" in arguments else cast_both
    together = is_cuda() or INTERPRETED
    with workspace(groups * K, x.device) as ws, counters(cdiv(groups, 2), x.device) as done:
        for phase, programs in ((0, lag + blocks + tiles),) if together else ((1, blocks), (2, tiles)):
            kernel[(programs,)](
                x, *outputs, ws_ptr=ws, done_ptr=done.view(torch.int32), G=groups, lag=lag, **arguments, K=K,
                SCALING=cast.scaling,
                ROW_PASS=RowPass.of(
                    rows=c.rows, step=c.step, abreast=min(c.step, abreast(c.warps, c.cols)), words=c.cols // pairs, pairs=pairs
                ),
                TILE=TransposeTile.of(rows=TILE_ROWS, cols=tile_cols), PHASE=phase, num_warps=c.warps,
            )  # fmt: skip


def abreast(warps: int, cols: int) -> int:
    """Return the rows that the warps of a program load side by side, 16 elements of a thread each, stored as 16 bytes."""
    return max(1, warps * 512 // cols)


@dataclass(frozen=True, eq=False, repr=False)
class RowPass(Constants):
    """Hold the work of a row program.

    Attributes:
        rows: rows of a program.
        step: rows that are cast at a time.
        abreast: rows that the warps load side by side.
        words: words of a load.
        pairs: elements of a word: 2 where 16-bit elements are loaded as int32, else 1.
    """

    rows: int
    step: int
    abreast: int
    words: int
    pairs: int


@dataclass(frozen=True, eq=False, repr=False)
class TransposeTile(Constants):
    """Hold the rows and columns of a transpose program's tile."""

    rows: int
    cols: int


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
def _place(rows, words, height, pitch: tl.constexpr, c: tl.constexpr, C: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr):
    """Return the offsets of load c of some rows, `pitch` words apart, and the mask of the words that exist."""
    word = c * COLS + words
    mask = tl.full((1, 1, 1), True, tl.int1)
    if not WHOLE:
        mask = mask & (rows < height)[:, :, None]
    if (c + 1) * COLS > C:
        mask = mask & (word < C)[None, None, :]
    return rows[:, :, None] * pitch + word[None, None, :], mask


@triton.jit
def _cast_rows(
    group, row, height, x_ptr, q_ptr, scale_ptr, ws_ptr, done_ptr,
    stride: tl.constexpr, K: tl.constexpr, SCALING: tl.constexpr,
    STEP: tl.constexpr, ABREAST: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Cast `height` rows from row `row` of x, STEP rows at a time, in loads of COLS words; 16-bit elements are in PAIRS.

    group: counter and maxima that the rows count for. Rows of x lie `stride` words apart. WHOLE: height is a multiple of STEP.

    A tile is (ABREAST, STEP / ABREAST, COLS): Triton spreads warps over COLS first and then over ABREAST, so that a thread
    holds all STEP / ABREAST rows of a word and finds the larger of them alone.
    """
    C: tl.constexpr = K // PAIRS
    CHUNKS: tl.constexpr = (C + COLS - 1) // COLS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    fp8: tl.constexpr = q_ptr.dtype.element_ty
    if PAIRS == 2:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
        q_ptr = q_ptr.to(tl.pointer_type(tl.int16))
    tag = launch_tag(ws_ptr)
    x_ptr += row * stride
    q_ptr += row * C
    words = tl.arange(0, COLS)
    lanes = tl.arange(0, ABREAST)[:, None] + tl.arange(0, STEP // ABREAST)[None, :] * ABREAST
    tops = ()
    for _ in tl.static_range(CHUNKS):
        tops = tops + (_magnitudes(tl.zeros((ABREAST, COLS), dtype=x_ptr.dtype.element_ty), PAIRS),)
    for at in tl.range(0, height, STEP, num_stages=1):
        rows = at + lanes
        xs, maxima = (), ()
        for c in tl.static_range(CHUNKS):
            offsets, mask = _place(rows, words, height, stride, c, C, COLS, WHOLE)
            xs = xs + (tl.load(x_ptr + offsets, mask=mask, other=0, eviction_policy="evict_last"),)
        top = _magnitudes(xs[0], PAIRS)
        for c in tl.static_range(CHUNKS):
            m = _magnitudes(xs[c], PAIRS)
            maxima = maxima + (_larger(tops[c], _largest(m, 1, PAIRS), PAIRS),)
            if c > 0:
                top = _larger(top, m, PAIRS)
        tops = maxima
        multiplier = amax_to_scale(_amax(_largest(top, 2, PAIRS), dtype, PAIRS), SCALING.fp8_max, SCALING.pow2)
        store_here(scale_ptr + row + rows, reciprocal(multiplier) if SCALING.inverse else multiplier, rows < height)
        for c in tl.static_range(CHUNKS):
            offsets, mask = _place(rows, words, height, C, c, C, COLS, WHOLE)
            if PAIRS == 2:
                low = values(xs[c], 0, PAIRS, dtype) * multiplier[:, :, None]
                q = to_fp8_pair(low, values(xs[c], 1, PAIRS, dtype) * multiplier[:, :, None], fp8)
            else:
                q = to_fp8(xs[c].to(tl.float32) * multiplier[:, :, None], fp8)
            tl.store(q_ptr + offsets, q, mask=mask, cache_modifier=".cs")
    _publish_columns(word_ptrs(ws_ptr, group * K + words), tops, words, tag, C, COLS, ABREAST, PAIRS, dtype)
    count_in(done_ptr + group)


@triton.jit
def _publish_columns(
    word_ptr, tops, words, tag,
    C: tl.constexpr, COLS: tl.constexpr, ABREAST: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Publish the largest magnitudes of all columns, `tops` of each load, by atomic max.

    word_ptr: the words of the first load, in which first halves of words lie together, then second halves.
    """
    CHUNKS: tl.constexpr = (C + COLS - 1) // COLS
    for first_c in tl.static_range(0, CHUNKS, ABREAST):  # a thread looks at 16 words at a time
        befores = ()
        for i in tl.static_range(ABREAST):
            if first_c + i < CHUNKS:
                for half in tl.static_range(PAIRS):
                    at = (first_c + i) * COLS
                    befores = befores + (load_words(word_ptr + (at + half * C), words < C - at),)
        for i in tl.static_range(ABREAST):
            if first_c + i < CHUNKS:
                at = (first_c + i) * COLS
                top = _largest(tops[first_c + i], 0, PAIRS)
                for half in tl.static_range(PAIRS):
                    amax = magnitude_to_fp32((top >> (16 * half)) & 0xFFFF if PAIRS == 2 else top, dtype)
                    publish_if_larger(word_ptr + (at + half * C), amax, tag, befores[i * PAIRS + half], words < C - at)


@triton.jit
def _place_of_tile(tile, blocks, STRIPES: tl.constexpr, ROWS: tl.constexpr):
    """Return the block of ROWS rows and the stripe of a group's tile: from the last rows to the first."""
    GROUP: tl.constexpr = (_ROWS_TOGETHER + ROWS - 1) // ROWS
    tile = blocks * STRIPES - 1 - tile
    above = tile // (GROUP * STRIPES) * GROUP
    height = tl.minimum(blocks - above, GROUP)
    inside = tile % (GROUP * STRIPES)
    return above + inside % height, inside // height


@triton.jit
def _transpose_end(row, lo, hi, live, multiplier, x_ptr, to_ptr, ld, stride: tl.constexpr, fp8: tl.constexpr):
    """Transpose the rows in [lo, hi) of a tile out of 16 from `row`, byte by byte."""
    rows, cols = row + tl.arange(0, 16), tl.arange(0, live.shape[0])
    mask = ((rows >= lo) & (rows < hi))[:, None] & live[None, :]
    x = tl.load(x_ptr + (rows[:, None] * stride + cols[None, :]), mask=mask, other=0.0)
    q = to_fp8(x.to(tl.float32) * multiplier[None, :], fp8).to(tl.uint8, bitcast=True)
    tl.store(to_ptr + (rows[:, None] + cols[None, :] * ld), q, mask=mask)


@triton.jit
def _transpose_tile(
    group, at, arrivals, waiters, x_ptr, to_ptr, ld, scale_t_ptr, ws_ptr, done_ptr, G,
    stride: tl.constexpr, K: tl.constexpr, SCALING: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
    WHOLE: tl.constexpr, JAGGED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Transpose a group's tile at x_ptr to to_ptr, whose rows lie `ld` apart, after `arrivals` row programs.

    at: whether the tile has the group's first rows, and so writes its scales; the tile's first column; its rows [lo, hi).
    waiters: tiles of the group. WHOLE: all rows of a tile are the group's; without JAGGED lo is 0. ALIGNED: all columns that
    the tile has in the transpose are the group's, zeros behind its rows.
    """
    first, col0, lo, hi = at
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    fp8: tl.constexpr = to_ptr.dtype.element_ty
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    live = cols < K - col0
    mask = tl.full((1, 1), True, tl.int1)
    if not WHOLE:
        mask = mask & (rows < hi)[:, None]
    if JAGGED:
        mask = mask & (rows >= lo)[:, None]
    if K % COLS != 0:
        mask = mask & live[None, :]
    x = tl.load(x_ptr + (rows[:, None] * stride + cols[None, :]), mask=mask, other=0.0, eviction_policy="evict_first")
    await_count(done_ptr + group, arrivals)
    column = tl.minimum(col0 + cols, K - 1)
    amax = load_published(ws_ptr, group * K + column % PAIRS * (K // PAIRS) + column // PAIRS)
    count_out_and_close(done_ptr + group, arrivals + waiters, ws_ptr, G)
    multiplier = amax_to_scale(amax, SCALING.fp8_max, SCALING.pow2)
    if first:
        tl.store(scale_t_ptr + group * K + col0 + cols, reciprocal(multiplier) if SCALING.inverse else multiplier, mask=live)
    q = to_fp8(x.to(tl.float32) * multiplier[None, :], fp8).to(tl.uint8, bitcast=True)
    to_ptr = to_ptr.to(tl.pointer_type(tl.uint8))
    offsets = cols[:, None] * ld + rows[None, :]
    if JAGGED:  # by sixteens, which the compiler sees to be stored all or none
        mask = ((rows // 16 >= (lo + 15) // 16) & (rows // 16 < hi // 16))[None, :]
        if K % COLS != 0:
            mask = mask & live[:, None]
        tl.store(to_ptr + offsets, tl.trans(q), mask=mask, cache_modifier=".cs")
        if (lo % 16 != 0) | (hi % 16 != 0):
            for end in range(2):
                _transpose_end(tl.where(end == 0, lo, hi) // 16 * 16, lo, hi, live, multiplier, x_ptr, to_ptr, ld, stride, fp8)
    elif ALIGNED:
        tl.store(to_ptr + offsets, tl.trans(q), mask=live[:, None], cache_modifier=".cs")
    else:
        tl.store(to_ptr + offsets, tl.trans(q), mask=tl.trans(mask), cache_modifier=".cs")


@triton.jit
def role_of(program, lag, BLOCKS: tl.constexpr, TILES: tl.constexpr):
    """Return a program's role: expert, row block among those of all experts, tile (-1 if the program casts rows), casts.

    A program casts (c) row block `block`, or transposes (t) tile `tile` of `expert`. With lag = BLOCKS = 2 and TILES = 3:

        ids        c c | t t c t c | t t c t c | …
        row block  0 1 |     2   3 |     4   5
        tile           | 0 1   2   | 0 1   2          of expert 0, of expert 1

    All of an expert's row blocks have smaller ids than its tiles, because lag is at least BLOCKS.
    """
    after = tl.maximum(program - lag, 0)
    expert = after // (BLOCKS + TILES)
    place = after % (BLOCKS + TILES)
    at = wide(place) if BLOCKS * (BLOCKS + TILES) >= 1 << 31 else place
    before = (at * BLOCKS // (BLOCKS + TILES)).to(tl.int32)
    casts = (program < lag) | (((at + 1) * BLOCKS // (BLOCKS + TILES)).to(tl.int32) > before)
    block = tl.where(program < lag, program, lag + expert * BLOCKS + before)
    return expert, block, tl.where(casts, -1, place - before), casts


@triton.jit
def cast_both(
    x_ptr, q_ptr, qt_ptr, scale_ptr, scale_t_ptr, ws_ptr, done_ptr, G, lag,
    N: tl.constexpr, K: tl.constexpr, SCALING: tl.constexpr, ROW_PASS: tl.constexpr, TILE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Write q (G, N, K) and scale (G, N) along the rows of x (G, N, K), qt (G, K, N) and scale_t (G, K) down its columns.

    lag: row programs that go first, at least an expert's; all other row programs come evenly between transpose programs.
    PHASE: 0 both passes in one launch, 1 the row programs, 2 the transpose programs.
    """
    ROWS: tl.constexpr = ROW_PASS.rows
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    TILE_BLOCKS: tl.constexpr = (N + TILE.rows - 1) // TILE.rows
    STRIPES: tl.constexpr = (K + TILE.cols - 1) // TILE.cols
    TILES: tl.constexpr = TILE_BLOCKS * STRIPES
    program = tl.program_id(0)
    if PHASE == 0:
        expert, block, tile, casts = role_of(program, lag, BLOCKS, TILES)
        casts = casts & (block < G * BLOCKS)
    else:
        block, expert, tile, casts = program, program // TILES, program % TILES, PHASE == 1
    if casts:
        first = block % BLOCKS * ROWS
        height = ROWS if N % ROWS == 0 else tl.minimum(N - first, ROWS)
        _cast_rows(
            block // BLOCKS, wide(block // BLOCKS) * N + first, height, x_ptr, q_ptr, scale_ptr, ws_ptr, done_ptr,
            K // ROW_PASS.pairs, K, SCALING, ROW_PASS.step, ROW_PASS.abreast, ROW_PASS.words, ROW_PASS.pairs,
            N % ROWS == 0 and ROWS % ROW_PASS.step == 0,
        )  # fmt: skip
    if PHASE != 1 and tile >= 0:
        block, stripe = _place_of_tile(tile, TILE_BLOCKS, STRIPES, TILE.rows)
        row0, col0 = block * TILE.rows, stripe * TILE.cols
        x_ptr += (wide(expert) * N + row0) * K + col0
        qt_ptr += (wide(expert) * K + col0) * N + row0
        _transpose_tile(
            expert, (row0 == 0, col0, 0, N - row0), BLOCKS, TILES, x_ptr, qt_ptr, N, scale_t_ptr, ws_ptr, done_ptr, G,
            K, K, SCALING, TILE, ROW_PASS.pairs, N % TILE.rows == 0, False, False,
        )  # fmt: skip


@triton.jit
def _slots_before(starts, ROWS: tl.constexpr):
    """Return the number of block slots before each group, whose first rows are `starts`.

    A group has one slot more than there are multiples of ROWS inside it, so that slots follow from `starts` without a table.
    The last slot may be empty.
    """
    return starts // ROWS + tl.arange(0, starts.shape[0])


@triton.jit
def _group_of(slot, before, G):
    """Return the last group with no more than `slot` slots `before` it."""
    return tl.sum(((before <= slot) & (tl.arange(0, before.shape[0]) < G)).to(tl.int32), axis=0) - 1


@triton.jit
def cast_both_groups(
    x_ptr, q_ptr, qt_ptr, scale_ptr, scale_t_ptr, offs_ptr, ws_ptr, done_ptr, M, ld, G, lag,
    stride: tl.constexpr, K: tl.constexpr, SCALING: tl.constexpr, ROW_PASS: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, ALIGNED: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Cast G ≤ GROUPS groups of rows of x (M, K), ends offs (G,), into q (M, K), scale (M,), qt (K, ld), scale_t (G, K).

    Row blocks begin with the group. Tiles begin at multiples of their rows, so that their bytes fill cache lines; if the
    columns of a group are ALIGNED, tiles begin with the group, too. If ends are in disorder, all groups count as empty. Rows
    of x are `stride` elements apart.
    """
    ROWS: tl.constexpr = ROW_PASS.rows
    ABREAST: tl.constexpr = ROW_PASS.abreast
    PAIRS: tl.constexpr = ROW_PASS.pairs
    TILE_ROWS: tl.constexpr = TILE.rows
    STRIPES: tl.constexpr = (K + TILE.cols - 1) // TILE.cols
    program = tl.program_id(0)
    # Count the blocks before each group: every program does so for itself, because a table would cost a launch.
    groups = tl.arange(0, GROUPS)
    starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < G), other=0)
    usable = in_order(starts, tl.load(offs_ptr + groups, mask=groups < G, other=0), groups, G, M)
    starts = tl.where(usable, starts, 0)
    blocks_before = _slots_before(starts, ROWS)
    tiles_before = _slots_before(starts, TILE_ROWS) * STRIPES
    # Find the program's role. The first `lag` ids cast rows. Then a group has `slots` ids that cast rows, `lag` row blocks
    # ahead of its own, and then an id for each tile. A row block's number counts the row blocks of all groups.
    after = tl.maximum(program - lag, 0)
    if PHASE == 0:
        group = _group_of(after, blocks_before + tiles_before, G)
    else:
        group = _group_of(program, tiles_before, G)
    start = tl.where(usable, start_of(offs_ptr, group), 0)
    end = tl.where(usable, load_constant(offs_ptr + group), 0)
    blocks = tl.maximum(tl.cdiv(end - start, ROWS), 1)
    tile_blocks = tl.maximum(tl.cdiv(end - start, TILE_ROWS), 1) if ALIGNED else end // TILE_ROWS - start // TILE_ROWS + 1
    tile_slot = (start // TILE_ROWS + group) * STRIPES
    if PHASE == 0:
        place = after - (start // ROWS + group) - tile_slot
        slots = end // ROWS - start // ROWS + 1
        block = tl.where(program < lag, program, after + lag - tile_slot)
        tile = tl.where(program < lag, -1, place - slots)
        casts = tile < 0
    else:
        block, tile, casts = program, program - tile_slot, PHASE == 1
    if casts:
        row_group = _group_of(block, blocks_before, G)
        row_start = tl.where(usable, start_of(offs_ptr, row_group), 0)
        row_end = tl.where(usable, load_constant(offs_ptr + row_group), 0)
        slot = block - row_start // ROWS - row_group
        if (row_end - row_start < ROWS) & (ROW_PASS.step > 1):
            if slot == 0:  # few rows at a time, because masks of more rows would take registers from all programs
                _cast_rows(
                    row_group, wide(row_start), row_end - row_start, x_ptr, q_ptr, scale_ptr, ws_ptr, done_ptr,
                    stride // PAIRS, K, SCALING, ABREAST, ABREAST, ROW_PASS.words, PAIRS, ABREAST == 1,
                )  # fmt: skip
        elif slot * ROWS < tl.maximum(row_end - row_start, 1):  # the last block may overlap the block before it
            _cast_rows(
                row_group, wide(tl.maximum(tl.minimum(row_start + slot * ROWS, row_end - ROWS), row_start)),
                tl.minimum(row_end - row_start, ROWS), x_ptr, q_ptr, scale_ptr, ws_ptr, done_ptr,
                stride // PAIRS, K, SCALING, ROW_PASS.step, ABREAST, ROW_PASS.words, PAIRS, True,
            )  # fmt: skip
    elif tile < tile_blocks * STRIPES:
        block, stripe = _place_of_tile(tile, tile_blocks, STRIPES, TILE_ROWS)
        col0 = stripe * TILE.cols
        column = (start // TILE_ROWS + block) * TILE_ROWS
        row0 = start + block * TILE_ROWS if ALIGNED else column
        if ALIGNED:
            column += group * TILE_ROWS
        lo, hi = tl.maximum(start - row0, 0), tl.minimum(end - row0, TILE_ROWS)
        x_ptr += wide(row0) * stride + col0
        qt_ptr += wide(col0) * ld + column
        _transpose_tile(
            group, (block == 0, col0, lo, hi), blocks, tile_blocks * STRIPES, x_ptr, qt_ptr, ld, scale_t_ptr, ws_ptr, done_ptr, G,
            stride, K, SCALING, TILE, PAIRS, False, not ALIGNED, ALIGNED,
        )  # fmt: skip
