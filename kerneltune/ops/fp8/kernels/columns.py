"""Quantize down the columns of groups of rows and transpose, reading the input from memory once.

The scale of a column needs all rows of the group, and the output wants the rows side by side. A stripe, COLS columns of a group,
is cut into tiles of ROWS rows. Programs publish the largest magnitudes of their tiles by atomic max, spin until the stripe is
complete, and cast. A program publishes its tile AHEAD of the present one before it spins, so that the stripe is complete when it
begins to spin; it holds that tile in registers, or reads it again from L2 (RELOAD). No stripe may have more than AHEAD + 1 times
as many tiles as there are programs. 16-bit elements come in PAIRS, as int32: what a loop holds as 16-bit tensors takes a register
each.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.arguments import check_apart, in_pairs
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT, aligned_size
from kerneltune.kernel_lib.launch import phases, resident
from kerneltune.kernel_lib.tl_exchange import arrive, await_arrivals, close_launch, launch_tag, published
from kerneltune.kernel_lib.tl_groups import group_bounds
from kerneltune.kernel_lib.tl_lib import TL_DTYPES, amax_to_scale, reciprocal, to_fp8, to_fp8_words, values, wide
from kerneltune.kernel_lib.tl_transpose import store_transposed, store_transposed_words
from kerneltune.kernel_lib.workspace import workspace
from kerneltune.ops.fp8.contract import Cast
from kerneltune.ops.fp8.kernels.tiles import (
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
    """Cast the columns of every group in one launch, of one matrix or of two.

    Args:
        parts: one or two.
        offs: group ends; None for groups of `rows` rows each, else there are `rows` rows in all.
        groups: their count.
        aligned: outputs hold aligned groups.
    """
    if aligned and c.rows < GROUP_ALIGNMENT:  # a tile writes all zeros behind its group
        c = replace(c, rows=GROUP_ALIGNMENT, cols=c.cols * c.rows // GROUP_ALIGNMENT)
    ld = aligned_size(rows, groups) if aligned else rows
    (x, q, scale), (x2, q2, scale2) = parts[0], parts[-1]
    stripes = sum(cdiv(part[0].shape[1], c.cols) for part in parts)
    # a token group begins up to three rows before its first and may end anywhere in a tile
    blocks = groups * cdiv(rows, c.rows) if offs is None else (rows + groups * (c.rows + 2)) // c.rows
    longest = cdiv(rows + 3, c.rows)
    total = blocks * stripes
    programs = max(1, min(total, resident(x.device, c.ctas)))
    table = None if offs is None else torch.empty(groups + 1, dtype=torch.int32, device=x.device)
    # 16-bit elements in pairs, where widths and addresses allow
    pairs = 2 if all(in_pairs(part[0]) for part in parts) else 1
    dtype = TL_DTYPES[x.dtype]
    for part in parts:
        check_apart("x", part[0], c.rows, pairs)
    if pairs == 2:
        x, x2 = x.view(torch.int32), x2.view(torch.int32)
    with workspace(groups * stripes * (c.cols + 1), x.device) as ws:
        for phase, options in phases(c.warps, c.ctas, together=longest <= (c.ahead + 1) * programs):
            _cast_transpose_groups[(programs,)](
                x, x2, q, q2, scale, scale2, offs, table, ws, rows, ld, groups, total,
                WEIGHT_ROWS=rows if offs is None else 0, C=x.shape[1], C2=x2.shape[1], stride=x.stride(0), stride2=x2.stride(0),
                DUAL=len(parts) > 1, GROUPS_LOG2=max(0, (groups - 1).bit_length()), ROWS=c.rows, COLS=c.cols // pairs,
                ALIGNMENT=GROUP_ALIGNMENT if aligned else 0, PAIRS=pairs, dtype=dtype, PHASE=phase, PACKED=ld % 4 == 0,
                STAGES=c.stages, AHEAD=c.ahead, RELOAD=c.reload, num_warps=c.warps, **cast.constants, **options,
            )  # fmt: skip


@triton.jit
def _load_quads(
    x_ptr, x2_ptr, stripe, first_row, lo, hi,
    stride: tl.constexpr, stride2: tl.constexpr, C: tl.constexpr, C2: tl.constexpr, DUAL: tl.constexpr,
    QUADS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, JAGGED: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Load a tile as four (QUADS, COLS) sub-tiles; sub-tile k has the rows 4i + k. Zeros outside the group.

    AGAIN: keep it in L2.
    """
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    width = C
    pitch = stride
    if DUAL:
        second = stripe >= (C + COLS - 1) // COLS
        x_ptr = tl.where(second, x2_ptr, x_ptr)
        pitch = tl.where(second, stride2, stride)
        width = tl.where(second, C2, C)
        stripe = tl.where(second, stripe - (C + COLS - 1) // COLS, stripe)
    cols = tl.arange(0, COLS)
    tile_ptr = x_ptr + first_row * pitch + stripe * COLS
    tiles = ()
    for k in tl.static_range(4):
        rows = tl.arange(0, QUADS) * 4 + k
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
def _locate(
    tile, total, table_ptr, offs_ptr, G,
    WEIGHT_ROWS: tl.constexpr, STRIPES: tl.constexpr, GROUPS_LOG2: tl.constexpr, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    if WEIGHT_ROWS:
        return locate_in_weights(tile, total, WEIGHT_ROWS, STRIPES, ROWS)
    else:
        return locate_fitted(tile, table_ptr, offs_ptr, STRIPES, G, GROUPS_LOG2, ROWS, ALIGNMENT)


@triton.jit
def _publish_stripe(xs, ws_ptr, index, counters, tag, live, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Publish the largest magnitudes of a tile by atomic max, and count the tile in."""
    atomic_max_columns(xs, ws_ptr, counters + index * (COLS * PAIRS), tag, live, COLS, PAIRS, dtype)
    arrive(ws_ptr, index, tag, live)


@triton.jit
def _cast_transpose_groups(
    x_ptr, x2_ptr, q_ptr, q2_ptr, scale_ptr, scale2_ptr, offs_ptr, table_ptr, ws_ptr, rows, columns, G, total,
    WEIGHT_ROWS: tl.constexpr, C: tl.constexpr, C2: tl.constexpr, stride: tl.constexpr, stride2: tl.constexpr,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, INVERSE: tl.constexpr,
    DUAL: tl.constexpr, GROUPS_LOG2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PAIRS: tl.constexpr, dtype: tl.constexpr, ALIGNMENT: tl.constexpr,
    PHASE: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Write q[group, col, row] = fp8(x[group, row, col] * s[group, col]); DUAL: of two matrices with the same groups of rows.

    Weights (G * WEIGHT_ROWS, C) give q (G, C, WEIGHT_ROWS); token groups of (rows, C), WEIGHT_ROWS = 0, give q (C, columns):
    columns is rows, or with ALIGNMENT holds aligned groups, zeros behind each. Scales are (G, C) either way. In PAIRS x is int32
    and C, COLS and stride count words of two elements of `dtype`.
    """
    JAGGED: tl.constexpr = WEIGHT_ROWS == 0
    fp8: tl.constexpr = q_ptr.dtype.element_ty
    EVEN: tl.constexpr = C % COLS == 0 and (not DUAL or C2 % COLS == 0)
    EVEN_ROWS: tl.constexpr = not JAGGED and WEIGHT_ROWS % ROWS == 0
    STRIPES1: tl.constexpr = (C + COLS - 1) // COLS
    STRIPES: tl.constexpr = STRIPES1 + ((C2 + COLS - 1) // COLS if DUAL else 0)
    counters = G * STRIPES
    lanes = tl.arange(0, COLS)
    tag = launch_tag(ws_ptr)
    step = tl.num_programs(0)
    if JAGGED:
        number_tiles(table_ptr, offs_ptr, rows, G, GROUPS_LOG2, ROWS, ALIGNMENT)

    xs_next = ()
    for early in tl.static_range(AHEAD):
        group_n, stripe_n, tiles_n, first_row_n, lo_n, hi_n = _locate(
            tl.program_id(0) + early * step, total, table_ptr, offs_ptr, G, WEIGHT_ROWS, STRIPES, GROUPS_LOG2, ROWS, ALIGNMENT
        )
        xs_next = _load_quads(
            x_ptr, x2_ptr, stripe_n, first_row_n, lo_n, hi_n,
            stride, stride2, C, C2, DUAL, ROWS // 4, COLS, EVEN, EVEN_ROWS, JAGGED, RELOAD,
        )  # fmt: skip
        if PHASE != 2:
            _publish_stripe(xs_next, ws_ptr, group_n * STRIPES + stripe_n, counters, tag, hi_n > 0, COLS, PAIRS, dtype)

    for tile in tl.range(tl.program_id(0), total, step, num_stages=STAGES, disable_licm=True):
        xs = xs_next
        if AHEAD == 1:
            group, stripe, tiles, first_row, lo, hi = group_n, stripe_n, tiles_n, first_row_n, lo_n, hi_n
        else:
            group, stripe, tiles, first_row, lo, hi = _locate(
                tile, total, table_ptr, offs_ptr, G, WEIGHT_ROWS, STRIPES, GROUPS_LOG2, ROWS, ALIGNMENT
            )
        group_n, stripe_n, tiles_n, first_row_n, lo_n, hi_n = _locate(
            tile + AHEAD * step, total, table_ptr, offs_ptr, G, WEIGHT_ROWS, STRIPES, GROUPS_LOG2, ROWS, ALIGNMENT
        )
        xs_next = _load_quads(
            x_ptr, x2_ptr, stripe_n, first_row_n, lo_n, hi_n,
            stride, stride2, C, C2, DUAL, ROWS // 4, COLS, EVEN, EVEN_ROWS, JAGGED, RELOAD,
        )  # fmt: skip
        if PHASE != 2:
            _publish_stripe(xs_next, ws_ptr, group_n * STRIPES + stripe_n, counters, tag, hi_n > 0, COLS, PAIRS, dtype)
        if PHASE != 1 and hi > 0:  # in a branch, out of which no pipeline loads the magnitudes before the wait for them
            index = group * STRIPES + stripe
            if RELOAD:  # here, not above, where a pipeline would bring it in the layout of the store, half by half
                xs = _load_quads(
                    x_ptr, x2_ptr, stripe, first_row, lo, hi,
                    stride, stride2, C, C2, DUAL, ROWS // 4, COLS, EVEN, EVEN_ROWS, JAGGED, False,
                )  # fmt: skip
            if PHASE == 0:
                await_arrivals(ws_ptr, index, tiles, tag)
            width = C
            out_ptr = q_ptr
            out_scale_ptr = scale_ptr
            if DUAL:
                second = stripe >= STRIPES1
                width = tl.where(second, C2, C)
                out_ptr = tl.where(second, q2_ptr, q_ptr)
                out_scale_ptr = tl.where(second, scale2_ptr, scale_ptr)
                stripe = tl.where(second, stripe - STRIPES1, stripe)
            live = stripe * COLS + lanes < width
            if JAGGED:
                ld = columns
                column = aligned_column(first_row, group, lo, ALIGNMENT, ALIGNMENT) if ALIGNMENT else first_row
                base = wide(stripe * (COLS * PAIRS)) * ld + column
            else:
                ld = WEIGHT_ROWS
                base = wide(stripe * (COLS * PAIRS)) * ld + first_row + wide(group) * ((C * PAIRS - 1) * ld)
            EDGES: tl.constexpr = JAGGED and ALIGNMENT == 0
            if ALIGNMENT:
                start = 0
                end = tl.minimum((hi + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, ROWS)
            else:
                start = tl.maximum(lo, 0)
                end = ROWS if EVEN_ROWS else tl.minimum(hi, ROWS)
            for half in tl.static_range(PAIRS):
                amax = published(ws_ptr, counters + (index * PAIRS + half) * COLS + lanes)
                scale = amax_to_scale(amax, FP8_MAX, POW2)
                if lo >= 0:
                    kept = reciprocal(scale) if INVERSE else scale
                    to = (wide(group) * width + stripe * COLS + lanes) * PAIRS + half
                    tl.store(out_scale_ptr + to, kept, mask=live)
                y0 = values(xs[0], half, PAIRS, dtype) * scale[None, :]
                y1 = values(xs[1], half, PAIRS, dtype) * scale[None, :]
                y2 = values(xs[2], half, PAIRS, dtype) * scale[None, :]
                y3 = values(xs[3], half, PAIRS, dtype) * scale[None, :]
                at = base + half * ld
                if PACKED:
                    words = to_fp8_words(y0, y1, y2, y3, fp8)
                    store_transposed_words(out_ptr, at, ld * PAIRS, start, end, live, words, EDGES, EVEN)
                else:
                    qs = (to_fp8(y0, fp8), to_fp8(y1, fp8), to_fp8(y2, fp8), to_fp8(y3, fp8))
                    store_transposed(out_ptr, at, ld * PAIRS, start, end, live, qs, EDGES, EVEN, PACKED)

    if JAGGED and PHASE != 1:
        empty = amax_to_scale(tl.zeros((COLS,), dtype=tl.float32), FP8_MAX, POW2)
        if INVERSE:
            empty = reciprocal(empty)
        for group in range(tl.program_id(0), G, step):
            first, last = group_bounds(offs_ptr, group, rows)
            if first == last:
                for first in range(0, C * PAIRS, COLS):
                    tl.store(scale_ptr + wide(group) * (C * PAIRS) + first + lanes, empty, mask=first + lanes < C * PAIRS)
                if DUAL:
                    for first in range(0, C2 * PAIRS, COLS):
                        tl.store(scale2_ptr + wide(group) * (C2 * PAIRS) + first + lanes, empty, mask=first + lanes < C2 * PAIRS)
    if PHASE != 1:
        close_launch(ws_ptr, tag)
