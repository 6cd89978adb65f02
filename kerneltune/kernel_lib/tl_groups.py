"""Locate aligned token groups, defined in groups.py: every program computes their columns from the group ends."""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_lib import aligned_start, load_constant


@triton.jit
def group_bounds(offs_ptr, group, M):
    """Return the first row of a group and the row after its last, inside [0, M] whatever offs holds."""
    start = tl.where(group > 0, load_constant(offs_ptr + tl.maximum(group, 1) - 1), 0)
    start = tl.minimum(tl.maximum(start, 0), M)
    return start, tl.maximum(tl.minimum(load_constant(offs_ptr + group), M), start)


@triton.jit
def locate_aligned(
    block, offs_ptr, M, G, GROUPS_LOG2: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Locate a block of ROWS columns of a transpose with aligned groups; ROWS divides ALIGNMENT, a slot of columns.

    Returns the block's group, its first row, its number of rows, its first column, and the number of columns that a cast writes:
    the rows, and zeros up to a multiple of ALIGNMENT. A block between groups has numbers of at most 0.
    """
    PER_SLOT: tl.constexpr = ALIGNMENT // ROWS
    slot = block // PER_SLOT
    group = slot * 0
    for bit in tl.static_range(GROUPS_LOG2):
        ahead = group + (1 << (GROUPS_LOG2 - 1 - bit))
        first, _ = group_bounds(offs_ptr, tl.minimum(ahead, G - 1), M)
        group = tl.where((ahead < G) & (first // ALIGNMENT + ahead <= slot), ahead, group)
    start, end = group_bounds(offs_ptr, group, M)
    offset = block * ROWS - aligned_start(start, group, ALIGNMENT)
    row = start + offset
    left = tl.where(offset >= 0, end - row, 0)
    columns = (end - start + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT - offset
    return group, row, left, block * ROWS, tl.where(offset >= 0, columns, 0)
