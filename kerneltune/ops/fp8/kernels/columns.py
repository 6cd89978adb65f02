"""Quantize down the columns of groups of rows and transpose, reading the input from memory once.

The scale of a column needs all rows of the group, and the output wants the rows side by side. A stripe, COLS columns of a
group, is cut into tiles of ROWS rows. Programs publish the largest magnitudes of their tiles by atomic max, spin until the
stripe is complete, and cast. A program publishes a tile AHEAD of the present tile before it spins, so that the stripe is
complete when it begins to spin; it holds that tile in registers, or reads it again from L2 (RELOAD). No stripe may have more
than AHEAD + 1 times as many tiles as there are programs. 16-bit elements come in PAIRS, as int32: a 16-bit element that a
loop holds takes a register of its own.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.arguments import check_apart, in_pairs
from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT, aligned_size
from kerneltune.kernel_lib.launch import phases, resident
from kerneltune.kernel_lib.tl_exchange import arrive, await_arrivals, close_launch, launch_tag, load_published
from kerneltune.kernel_lib.tl_groups import group_bounds
from kerneltune.kernel_lib.tl_lib import TL_DTYPES, amax_to_scale, reciprocal, to_fp8, to_fp8_words, values, wide
from kerneltune.kernel_lib.tl_transpose import store_transposed, store_transposed_words
from kerneltune.kernel_lib.workspace import workspace
from kerneltune.ops.fp8.contract import Cast
from kerneltune.ops.fp8.kernels.tiles import (
    Tile,
    aligned_column,
    atomic_max_columns,
    locate_fitted,
    locate_in_weights,
    number_tiles,
)
from kerneltune.rounding import cdiv

if TYPE_CHECKING:
    from kerneltune.ops.fp8.group_colwise import GroupConfig

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Input rows, output, scales."""


def cast_columns(
    parts: tuple[Part, ...],
    offs: torch.Tensor | None,
    groups: int,
    rows: int,
    cast: Cast,
    c: "GroupConfig",
    aligned: bool = False,
) -> None:
    """Cast the columns of every group of one or two matrices in one launch.

    Args:
        parts: one or two matrices with their outputs.
        offs: group ends; None for weights.
        groups: number of groups.
        rows: rows of each group of weights; with offs, rows of all groups together.
        aligned: whether outputs hold aligned groups.
    """
    if aligned and c.rows < GROUP_ALIGNMENT:  # a tile writes all zeros behind its group
        c = replace(c, rows=GROUP_ALIGNMENT, cols=c.cols * c.rows // GROUP_ALIGNMENT)
    ld = aligned_size(rows, groups) if aligned else rows
    (x, q, scale), (x2, q2, scale2) = parts[0], parts[-1]
    stripes = sum(cdiv(part[0].shape[1], c.cols) for part in parts)
    # The first tile of a token group begins up to three rows before the group, the last tile ends anywhere behind it.
    blocks = groups * cdiv(rows, c.rows) if offs is None else (rows + groups * (c.rows + 2)) // c.rows
    most_tiles_of_stripe = cdiv(rows + 3, c.rows)
    total = blocks * stripes
    programs = max(1, min(total, resident(x.device, c.ctas)))
    table = None if offs is None else torch.empty(groups + 1, dtype=torch.int32, device=x.device)
    pairs = 2 if all(in_pairs(part[0]) for part in parts) else 1
    dtype = TL_DTYPES[x.dtype]
    for part in parts:
        check_apart("x", part[0], c.rows, pairs)
    if pairs == 2:
        x, x2 = x.view(torch.int32), x2.view(torch.int32)
    with workspace(groups * stripes * (c.cols + 1), x.device) as ws:
        for phase, options in phases(c.warps, c.ctas, together=most_tiles_of_stripe <= (c.ahead + 1) * programs):
            _cast_transpose_groups[(programs,)](
                x, x2, q, q2, scale, scale2, offs, table, ws, rows, ld, groups, total,
                MATRICES=Matrices.of(
                    width=x.shape[1], width2=x2.shape[1], stride=x.stride(0), stride2=x2.stride(0), dual=len(parts) > 1,
                ),
                GROUPS=RowGroups.of(
                    weight_rows=rows if offs is None else 0, log2=max(0, (groups - 1).bit_length()),
                    alignment=GROUP_ALIGNMENT if aligned else 0,
                ),
                TILE=Tile.of(rows=c.rows, cols=c.cols // pairs, pairs=pairs, dtype=dtype),
                SCALING=cast.scaling, PACKED=ld % 4 == 0, PHASE=phase,
                LOOP=TileLoop.of(stages=c.stages, ahead=c.ahead, reload=c.reload), num_warps=c.warps, **options,
            )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Matrices(Constants):
    """Describe one or two matrices with the same groups of rows; stripes of the second follow the stripes of the first.

    Attributes:
        width, width2: words of a row of the first and of the second matrix.
        stride, stride2: words from row to row.
        dual: whether there are two matrices.
    """

    width: int
    width2: int
    stride: int
    stride2: int
    dual: bool


@dataclass(frozen=True, eq=False, repr=False)
class RowGroups(Constants):
    """Describe the groups of rows.

    Attributes:
        weight_rows: rows of each expert's weights; 0 for token groups, whose ends are `offs`.
        log2: steps of the binary search for a token group.
        alignment: the multiple of rows at which a token group begins in the transpose; 0 where groups follow each other.
    """

    weight_rows: int
    log2: int
    alignment: int


@dataclass(frozen=True, eq=False, repr=False)
class TileLoop(Constants):
    """Describe the loop over tiles.

    Attributes:
        stages: stages of the load pipeline.
        ahead: tiles that a program publishes before it casts the present tile.
        reload: whether a tile is read again, from L2, when it is cast, in place of being held.
    """

    stages: int
    ahead: int
    reload: bool


@triton.jit
def _load_quads(
    x_ptr, x2_ptr, at, MATRICES: tl.constexpr, TILE: tl.constexpr,
    EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, JAGGED: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Load the tile `at` as four (rows / 4, cols) sub-tiles; sub-tile k has the rows 4i + k. Zeros outside the group.

    AGAIN: keep the tile in L2.
    """
    _group, stripe, _tiles, first_row, lo, hi = at
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    C: tl.constexpr = MATRICES.width
    COLS: tl.constexpr = TILE.cols
    width = C
    pitch = MATRICES.stride
    if MATRICES.dual:
        second = stripe >= (C + COLS - 1) // COLS
        x_ptr = tl.where(second, x2_ptr, x_ptr)
        pitch = tl.where(second, MATRICES.stride2, MATRICES.stride)
        width = tl.where(second, MATRICES.width2, C)
        stripe = tl.where(second, stripe - (C + COLS - 1) // COLS, stripe)
    cols = tl.arange(0, COLS)
    tile_ptr = x_ptr + first_row * pitch + stripe * COLS
    tiles = ()
    for k in tl.static_range(4):
        rows = tl.arange(0, TILE.rows // 4) * 4 + k
        mask = tl.full((1, 1), True, tl.int1)
        if not EVEN_ROWS:
            mask = mask & (rows < hi)[:, None]
        if JAGGED:
            mask = mask & (rows >= lo)[:, None]
        if not EVEN:
            mask = mask & (stripe * COLS + cols < width)[None, :]
        offsets = rows[:, None] * pitch + cols[None, :]
        tiles = tiles + (tl.load(tile_ptr + offsets, mask=mask, other=0.0, eviction_policy=policy),)
    return tiles


@triton.jit
def _locate(tile, total, table_ptr, offs_ptr, G, STRIPES: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    if GROUPS.weight_rows:
        return locate_in_weights(tile, total, GROUPS.weight_rows, STRIPES, ROWS)
    else:
        return locate_fitted(tile, table_ptr, offs_ptr, STRIPES, G, GROUPS.log2, ROWS, GROUPS.alignment)


@triton.jit
def _publish_stripe(xs, ws_ptr, index, num_counters, tag, live, TILE: tl.constexpr):
    """Publish the largest magnitudes of a tile by atomic max, and add 1 to its stripe's counter.

    Words of the workspace: a counter for each stripe, num_counters in all, then the magnitudes of each stripe's columns.
    """
    atomic_max_columns(xs, ws_ptr, num_counters + index * (TILE.cols * TILE.pairs), tag, live, TILE.cols, TILE.pairs, TILE.dtype)
    arrive(ws_ptr, index, tag, live)


@triton.jit
def _cast_tile(
    xs, at, lanes, index, num_counters, q_ptr, q2_ptr, scale_ptr, scale2_ptr, ws_ptr, columns,
    MATRICES: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, SCALING: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr,
):  # fmt: skip
    """Cast a tile by the published magnitudes of its stripe and store its transpose; the group's first tile stores the scales.

    index: the stripe among the stripes of all groups.
    """
    group, stripe, _tiles, first_row, lo, hi = at
    fp8: tl.constexpr = q_ptr.dtype.element_ty
    C: tl.constexpr = MATRICES.width
    COLS: tl.constexpr = TILE.cols
    PAIRS: tl.constexpr = TILE.pairs
    dtype: tl.constexpr = TILE.dtype
    ALIGNMENT: tl.constexpr = GROUPS.alignment
    JAGGED: tl.constexpr = GROUPS.weight_rows == 0
    STRIPES1: tl.constexpr = (C + COLS - 1) // COLS
    width = C
    out_ptr = q_ptr
    out_scale_ptr = scale_ptr
    if MATRICES.dual:
        second = stripe >= STRIPES1
        width = tl.where(second, MATRICES.width2, C)
        out_ptr = tl.where(second, q2_ptr, q_ptr)
        out_scale_ptr = tl.where(second, scale2_ptr, scale_ptr)
        stripe = tl.where(second, stripe - STRIPES1, stripe)
    live = stripe * COLS + lanes < width
    if JAGGED:
        ld = columns
        column = aligned_column(first_row, group, lo, ALIGNMENT, ALIGNMENT) if ALIGNMENT else first_row
        base = wide(stripe * (COLS * PAIRS)) * ld + column
    else:
        ld = GROUPS.weight_rows
        base = wide(stripe * (COLS * PAIRS)) * ld + first_row + wide(group) * ((C * PAIRS - 1) * ld)
    EDGES: tl.constexpr = JAGGED and ALIGNMENT == 0
    if ALIGNMENT:
        start = 0
        end = tl.minimum((hi + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, TILE.rows)
    else:
        start = tl.maximum(lo, 0)
        end = TILE.rows if EVEN_ROWS else tl.minimum(hi, TILE.rows)
    for half in tl.static_range(PAIRS):
        amax = load_published(ws_ptr, num_counters + (index * PAIRS + half) * COLS + lanes)
        multiplier = amax_to_scale(amax, SCALING.fp8_max, SCALING.pow2)
        if lo >= 0:
            scale = reciprocal(multiplier) if SCALING.inverse else multiplier
            to = (wide(group) * width + stripe * COLS + lanes) * PAIRS + half
            tl.store(out_scale_ptr + to, scale, mask=live)
        y0 = values(xs[0], half, PAIRS, dtype) * multiplier[None, :]
        y1 = values(xs[1], half, PAIRS, dtype) * multiplier[None, :]
        y2 = values(xs[2], half, PAIRS, dtype) * multiplier[None, :]
        y3 = values(xs[3], half, PAIRS, dtype) * multiplier[None, :]
        to_column = base + half * ld
        if PACKED:
            words = to_fp8_words(y0, y1, y2, y3, fp8)
            store_transposed_words(out_ptr, to_column, ld * PAIRS, start, end, live, words, EDGES, EVEN)
        else:
            qs = (to_fp8(y0, fp8), to_fp8(y1, fp8), to_fp8(y2, fp8), to_fp8(y3, fp8))
            store_transposed(out_ptr, to_column, ld * PAIRS, start, end, live, qs, EDGES, EVEN, PACKED)


@triton.jit
def _store_scales_of_empty_groups(
    scale_ptr, scale2_ptr, offs_ptr, lanes, rows, G, MATRICES: tl.constexpr, TILE: tl.constexpr, SCALING: tl.constexpr
):  # fmt: skip
    """Store the scales of token groups without rows, which have no tile that would store them."""
    COLS: tl.constexpr = TILE.cols
    WIDTH: tl.constexpr = MATRICES.width * TILE.pairs
    WIDTH2: tl.constexpr = MATRICES.width2 * TILE.pairs
    empty = amax_to_scale(tl.zeros((COLS,), dtype=tl.float32), SCALING.fp8_max, SCALING.pow2)
    if SCALING.inverse:
        empty = reciprocal(empty)
    for group in range(tl.program_id(0), G, tl.num_programs(0)):
        first, last = group_bounds(offs_ptr, group, rows)
        if first == last:
            for first in range(0, WIDTH, COLS):
                tl.store(scale_ptr + wide(group) * WIDTH + first + lanes, empty, mask=first + lanes < WIDTH)
            if MATRICES.dual:
                for first in range(0, WIDTH2, COLS):
                    tl.store(scale2_ptr + wide(group) * WIDTH2 + first + lanes, empty, mask=first + lanes < WIDTH2)


@triton.jit
def _cast_transpose_groups(
    x_ptr, x2_ptr, q_ptr, q2_ptr, scale_ptr, scale2_ptr, offs_ptr, table_ptr, ws_ptr, rows, columns, G, total,
    MATRICES: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, SCALING: tl.constexpr, PACKED: tl.constexpr,
    PHASE: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Write q[group, col, row] = fp8(x[group, row, col] * s[group, col]) of one or two matrices.

    Weights (G * weight_rows, C) give q (G, C, weight_rows); token groups of (rows, C) give q (C, columns): columns is rows,
    or with an alignment holds aligned groups, zeros behind each. Scales are (G, C) either way. In pairs x is int32.
    """
    ROWS: tl.constexpr = TILE.rows
    COLS: tl.constexpr = TILE.cols
    AHEAD: tl.constexpr = LOOP.ahead
    RELOAD: tl.constexpr = LOOP.reload
    JAGGED: tl.constexpr = GROUPS.weight_rows == 0
    EVEN: tl.constexpr = MATRICES.width % COLS == 0 and (not MATRICES.dual or MATRICES.width2 % COLS == 0)
    EVEN_ROWS: tl.constexpr = not JAGGED and GROUPS.weight_rows % ROWS == 0
    STRIPES1: tl.constexpr = (MATRICES.width + COLS - 1) // COLS
    STRIPES: tl.constexpr = STRIPES1 + ((MATRICES.width2 + COLS - 1) // COLS if MATRICES.dual else 0)
    num_counters = G * STRIPES
    lanes = tl.arange(0, COLS)
    tag = launch_tag(ws_ptr)
    step = tl.num_programs(0)
    if JAGGED:
        number_tiles(table_ptr, offs_ptr, rows, G, GROUPS.log2, ROWS, GROUPS.alignment)

    # Publish the first tile before the loop, so that each iteration begins with a tile that the iteration before has
    # published.
    xs_next = ()
    for nth in tl.static_range(AHEAD):
        next_at = _locate(tl.program_id(0) + nth * step, total, table_ptr, offs_ptr, G, STRIPES, GROUPS, ROWS)
        xs_next = _load_quads(x_ptr, x2_ptr, next_at, MATRICES, TILE, EVEN, EVEN_ROWS, JAGGED, RELOAD)
        if PHASE != 2:
            _publish_stripe(xs_next, ws_ptr, next_at[0] * STRIPES + next_at[1], num_counters, tag, next_at[5] > 0, TILE)

    for tile in tl.range(tl.program_id(0), total, step, num_stages=LOOP.stages, disable_licm=True):
        xs = xs_next
        if AHEAD == 1:
            at = next_at
        else:
            at = _locate(tile, total, table_ptr, offs_ptr, G, STRIPES, GROUPS, ROWS)
        next_at = _locate(tile + AHEAD * step, total, table_ptr, offs_ptr, G, STRIPES, GROUPS, ROWS)
        xs_next = _load_quads(x_ptr, x2_ptr, next_at, MATRICES, TILE, EVEN, EVEN_ROWS, JAGGED, RELOAD)
        if PHASE != 2:
            _publish_stripe(xs_next, ws_ptr, next_at[0] * STRIPES + next_at[1], num_counters, tag, next_at[5] > 0, TILE)
        if PHASE != 1 and at[5] > 0:  # Triton's pipelining moves no load of the magnitudes out of this branch
            index = at[0] * STRIPES + at[1]
            if RELOAD:  # here, not above, where a pipeline would bring it in the layout of the store, half by half
                xs = _load_quads(x_ptr, x2_ptr, at, MATRICES, TILE, EVEN, EVEN_ROWS, JAGGED, False)
            if PHASE == 0:
                await_arrivals(ws_ptr, index, at[2], tag)
            _cast_tile(
                xs, at, lanes, index, num_counters, q_ptr, q2_ptr, scale_ptr, scale2_ptr, ws_ptr, columns,
                MATRICES, GROUPS, TILE, SCALING, PACKED, EVEN, EVEN_ROWS,
            )  # fmt: skip

    if JAGGED and PHASE != 1:
        _store_scales_of_empty_groups(scale_ptr, scale2_ptr, offs_ptr, lanes, rows, G, MATRICES, TILE, SCALING)
    if PHASE != 1:
        close_launch(ws_ptr, tag)
