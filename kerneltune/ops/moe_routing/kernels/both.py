"""Gather fp8 rows by expert into both layouts that grouped products take: rows, and aligned columns for the weight gradient."""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_groups import locate_aligned
from kerneltune.kernel_lib.tl_lib import wide


@triton.jit
def gather_both(
    x_ptr, q_ptr, qt_ptr, pairs_ptr, offs_ptr, T, M, blocks, ld, stride,
    K: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GROUPS_LOG2: tl.constexpr,
    ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write q[i] = x[pairs[i] // K], and the bytes of qᵀ to qt (H, ld), each group from its `aligned_start` on.

    x, q and qt are bytes; rows of x are `stride` bytes apart.

    Programs go down all rows of a stripe before the next stripe: L2 holds a stripe of x, which is read from memory once.
    """
    block = tl.program_id(0) % blocks
    stripe = tl.program_id(0) // blocks
    _group, row0, rows_left, column, columns_left = locate_aligned(block, offs_ptr, M, G, GROUPS_LOG2, ALIGNMENT, ROWS)
    if columns_left > 0:
        lanes = tl.arange(0, ROWS)
        rows = row0 + lanes
        cols = stripe * COLS + tl.arange(0, COLS)
        pair = tl.load(pairs_ptr + rows, mask=lanes < rows_left, other=-1)
        token = pair // K
        exists = (pair >= 0) & (token < T)
        x = tl.load(x_ptr + (wide(token)[:, None] * stride + cols[None, :]), mask=exists[:, None] & (cols < H)[None, :], other=0)
        mask = (lanes < rows_left)[:, None] & (cols < H)[None, :]
        tl.store(q_ptr + (wide(rows)[:, None] * H + cols[None, :]), x, mask=mask, cache_modifier=".cs")
        mask = (lanes < columns_left)[None, :] & (cols < H)[:, None]
        to = wide(cols)[:, None] * ld + (column + lanes)[None, :]
        tl.store(qt_ptr + to, tl.trans(x), mask=mask, cache_modifier=".cs")


@triton.jit
def clear_rest(q_ptr, offs_ptr, M, H: tl.constexpr, G: tl.constexpr, COLS: tl.constexpr):
    """Write zeros to the rows of q behind the last group, a row per program at a time."""
    total = tl.maximum(tl.load(offs_ptr + G - 1), 0)
    for row in range(total + tl.program_id(0), M, tl.num_programs(0)):
        for first in range(0, H, COLS):
            cols = first + tl.arange(0, COLS)
            tl.store(q_ptr + wide(row) * H + cols, tl.zeros((COLS,), dtype=tl.uint8), mask=cols < H)
