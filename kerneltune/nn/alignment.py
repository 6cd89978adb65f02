"""Rows, and groups of them moved apart, so that every one begins where fp8 casts and products can read it. May import torch."""

import torch
from torch import Tensor

from kerneltune.rounding import cdiv

ALIGNED = 16


def is_row_major(x: Tensor) -> bool:
    """Return whether rows of x (M, K) are contiguous, one after the other."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def row_major(x: Tensor) -> Tensor:
    """Return x (M, K), copied if it is not row-major; `contiguous` would keep any strides of an x with one row or none."""
    return x if is_row_major(x) else x.clone(memory_format=torch.contiguous_format)


def aligned_groups(offs: Tensor, M: int) -> tuple[Tensor, Tensor, int]:
    """Return where the rows of groups go so that every group begins at a multiple of 16, without waiting for the device.

    Args:
        offs: (E,) int32, where each group's rows end, not decreasing; the last is M.

    Returns:
        (M,) int64, the place of each row; (E,) int32, where the groups end there; and the rows in all, a multiple of 16 that M
        and E alone decide. Rows between are to be zero, which adds nothing to any product; those after the last group are its.
    """
    E = offs.shape[0]
    total = cdiv(M + (ALIGNED - 1) * E, ALIGNED) * ALIGNED
    starts = torch.cat([offs.new_zeros(1), offs[:-1]])
    padded = (offs - starts + (ALIGNED - 1)) // ALIGNED * ALIGNED
    ends = padded.cumsum(0, dtype=torch.int32)
    shift = ends - padded - starts
    rows = torch.arange(M, device=offs.device)
    group = torch.bucketize(rows, offs, right=True).clamp_(max=E - 1)
    return rows + shift[group], torch.cat([ends[:-1], ends.new_full((1,), total)]), total
