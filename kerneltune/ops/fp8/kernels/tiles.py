"""Locate the tiles of expert weights and of token groups; publish the largest magnitudes of their columns.

A stripe is COLS columns of a group, a tile ROWS rows of a stripe. Tiles of a stripe follow each other, stripes of a group
too.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.tl_exchange import publish_max
from kerneltune.kernel_lib.tl_groups import group_bounds, locate_aligned
from kerneltune.kernel_lib.tl_lib import (
    aligned_start,
    load_constant,
    magnitude,
    magnitude_of_pairs,
    magnitude_to_fp32,
    only_if,
    wide,
)

_BLOCKS_TOGETHER = tl.constexpr(8)
"""Blocks of aligned groups whose tiles follow each other: they write neighbouring pieces of the same rows of the
transpose."""


@dataclass(frozen=True, eq=False, repr=False)
class Tile(Constants):
    """Describe the tile of a program.

    Attributes:
        rows: rows of the tile.
        cols: words of a row.
        pairs: elements of a word: 2 where 16-bit elements are loaded as int32, else 1.
        dtype: the type of an element.
    """

    rows: int
    cols: int
    pairs: int
    dtype: tl.dtype


@dataclass(frozen=True, eq=False, repr=False)
class Groups(Constants):
    """Describe the groups of rows.

    Attributes:
        jagged: whether groups are token groups, whose ends are `offs`; else all groups have the same number of rows.
        alignment: the multiple of rows at which a token group begins in the transpose; 0 if groups follow each other.
        one: whether all groups share a scale.
        log2: steps of the binary search for a group.
        even: whether the rows of each group are a multiple of a tile's rows.
    """

    jagged: bool
    alignment: int
    one: bool
    log2: int
    even: bool


@triton.jit
def start_of(offs_ptr, group):
    """Return the first row of a token group."""
    return tl.where(group > 0, load_constant(offs_ptr + tl.maximum(group, 1) - 1), 0)


@triton.jit
def locate_in_weights(tile, total, rows, stripes, ROWS: tl.constexpr):
    """Locate a tile of weights with `rows` rows in every group.

    Returns, as all functions that locate a tile: group; stripe within the group; number of tiles of the stripe; first row of
    the tile in the matrix; lo and hi, between which rows of the tile belong to the group. hi ≤ 0: the tile is empty.
    """
    tiles = tl.cdiv(rows, ROWS)
    inside = tl.minimum(tile, total - 1)
    group = inside // (tiles * stripes)
    stripe = inside // tiles % stripes
    lo = -(inside % tiles) * ROWS
    return group, stripe, tiles, wide(group) * rows - lo, lo, tl.where(tile < total, rows + lo, 0)


@triton.jit
def _locate_aligned_tile(
    tile, total, offs_ptr, rows, stripes, G, GROUPS_LOG2: tl.constexpr, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr
):  # fmt: skip
    """Locate a tile of aligned groups as `locate_block` does, with the tile's columns of the transpose as the third value."""
    blocks = total // stripes
    together = tl.full((), _BLOCKS_TOGETHER, tl.int32)
    above = tile // (together * stripes) * together
    height = tl.maximum(tl.minimum(blocks - above, together), 1)
    inside = tile % (together * stripes)
    block = tl.minimum(above + inside % height, blocks - 1)
    group, row, left, _, columns = locate_aligned(block, offs_ptr, rows, G, GROUPS_LOG2, ALIGNMENT, ROWS)
    start, _ = group_bounds(offs_ptr, group, rows)
    live = tile < total
    return group, inside // height, tl.where(live, columns, 0), wide(row), start - row, tl.where(live, tl.maximum(left, 0), 0)


@triton.jit
def aligned_column(first_row, group, lo, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return the column of the transpose at which a tile of an aligned group begins; the group begins `lo` rows behind the tile.

    The compiler cannot see that the column is a multiple of ROWS; without the hint it would store 4 bytes at a time, not 16.
    """
    column = aligned_start(first_row.to(tl.int32) + lo, group, ALIGNMENT) - lo
    return wide(tl.multiple_of(column, ROWS))


@triton.jit
def locate_block(tile, total, offs_ptr, rows, stripes, G, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Locate a tile of weights, or of token groups, which end at offs (G,) and are cut at multiples of ROWS.

    Blocks of ROWS rows at a group's ends may have rows of its neighbours. A group has a slot for each block, and an empty slot
    if the group ends at a multiple. With an alignment the first block begins with the group.

    Returns the values of `locate_in_weights`; with an alignment, columns of the transpose in place of the tiles of the stripe.
    """
    if not GROUPS.jagged:
        return locate_in_weights(tile, total, rows, stripes, ROWS)
    elif GROUPS.alignment:
        return _locate_aligned_tile(tile, total, offs_ptr, rows, stripes, G, GROUPS.log2, ROWS, GROUPS.alignment)
    else:
        slot = tile // stripes
        group = slot * 0
        for bit in tl.static_range(GROUPS.log2):
            ahead = group + (1 << (GROUPS.log2 - 1 - bit))
            first = load_constant(offs_ptr + tl.minimum(ahead, G) - 1) // ROWS + ahead
            group = tl.where((ahead < G) & (first <= slot), ahead, group)
        start, end = group_bounds(offs_ptr, group, rows)
        first = start // ROWS
        slots = end // ROWS - first + 1
        local = tile - (first + group) * stripes
        stripe = local // slots
        block = first + local % slots
        tiles = (end - 1) // ROWS - first + 1
        lo = start - block * ROWS
        hi = end - block * ROWS
        live = (tile < total) & (local >= 0) & (stripe < stripes) & (hi > lo)
        return group, stripe, tiles, wide(block * ROWS), lo, tl.where(live, hi, 0)


@triton.jit
def in_order(starts, ends, groups, G, M):
    """Return whether the first G of groups [starts, ends) follow each other in M rows."""
    wrong = (groups < G) & ((starts < 0) | (ends < starts) | (ends > M))
    return tl.sum(wrong.to(tl.int32), axis=0) == 0


@triton.jit
def number_tiles(
    table_ptr, offs_ptr, M, G, GROUPS_LOG2: tl.constexpr, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr
):  # fmt: skip
    """Write the table (G + 1,) int32 of `locate_fitted`: tiles per stripe in the groups before each group.

    Groups in disorder have no tiles. Every program writes the same table to the same place, and reads its own words.
    """
    groups = tl.arange(0, 1 << GROUPS_LOG2)
    start = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < G), other=0)
    end = tl.load(offs_ptr + groups, mask=groups < G, other=0)
    begin = start if ALIGNMENT else start // 4 * 4
    tiles = tl.where((groups < G) & (end > start) & in_order(start, end, groups, G, M), tl.cdiv(end - begin, ROWS), 0)
    numbers = tl.cumsum(tiles, axis=0)
    tl.store(table_ptr + groups + 1, numbers, mask=groups < G)
    tl.store(table_ptr, 0)
    tl.debug_barrier()


@triton.jit
def locate_fitted(
    tile, table_ptr, offs_ptr, stripes, G, GROUPS_LOG2: tl.constexpr, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr
):  # fmt: skip
    """Locate a tile of token groups whose tiles begin with the group, up to three rows before it for aligned words.

    With ALIGNMENT the tiles begin with the group itself, whose columns are aligned elsewhere.
    Returns the values of `locate_in_weights`.
    """
    slot = tile // stripes
    group = slot * 0
    for bit in tl.static_range(GROUPS_LOG2):
        ahead = group + (1 << (GROUPS_LOG2 - 1 - bit))
        group = tl.where((ahead < G) & (load_constant(table_ptr + tl.minimum(ahead, G)) <= slot), ahead, group)
    before = load_constant(table_ptr + group)
    tiles = tl.maximum(load_constant(table_ptr + group + 1) - before, 1)
    local = tile - before * stripes
    stripe = local // tiles
    start = start_of(offs_ptr, group)
    first_row = (start if ALIGNMENT else start // 4 * 4) + local % tiles * ROWS
    live = slot < load_constant(table_ptr + G)
    return (
        group,
        stripe,
        tiles,
        wide(first_row),
        start - first_row,
        tl.where(live, load_constant(offs_ptr + group) - first_row, 0),
    )


@triton.jit
def atomic_max_columns(xs, ws_ptr, first, tag, live, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Publish the largest magnitudes of a tile's columns by atomic max, from word `first`: first halves, then second halves."""
    lanes = tl.arange(0, COLS)
    if PAIRS == 2:
        pairs = magnitude_of_pairs(xs[0], xs[1], xs[2], xs[3])
        low = magnitude_to_fp32(tl.max(pairs & 0xFFFF, axis=0), dtype)
        high = magnitude_to_fp32(tl.max(pairs >> 16, axis=0), dtype)
        publish_max(ws_ptr, first + lanes, low, tag, only_if(lanes >= 0, live))
        publish_max(ws_ptr, first + COLS + lanes, high, tag, only_if(lanes >= 0, live))
    else:
        m01 = tl.maximum(magnitude(xs[0]), magnitude(xs[1]))
        m23 = tl.maximum(magnitude(xs[2]), magnitude(xs[3]))
        amax = magnitude_to_fp32(tl.max(tl.maximum(m01, m23), axis=0), dtype)
        publish_max(ws_ptr, first + lanes, amax, tag, only_if(lanes >= 0, live))
