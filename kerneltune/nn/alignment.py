"""Give rows, and groups of rows, starts from which fp8 casts and products can read them."""

import torch
from torch import Tensor

from kerneltune.rounding import ALIGNED, cdiv


def is_row_major(x: Tensor) -> bool:
    """Return whether each row of x (M, K) is contiguous and no two rows overlap."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def row_major(x: Tensor) -> Tensor:
    """Return x (M, K), copied if it is not row-major; `contiguous` would keep any strides of an x with one row or none."""
    return x if is_row_major(x) else x.clone(memory_format=torch.contiguous_format)


def aligned_groups(offs: Tensor, M: int) -> tuple[Tensor, Tensor, int]:
    """Return where the rows of groups go so that every group begins at a multiple of 16, without waiting for the device.

    Args:
        offs: (E,) int32, where each group's rows end, not decreasing; the last is M.

    Returns:
        (M,) int64, the new place of each row; (E,) int32, the new ends of the groups; and the number of all rows, a multiple
        of 16 that M and E alone decide. Rows between groups are to be zero, which adds nothing to any product; rows after
        the last group count as rows of that group.
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
