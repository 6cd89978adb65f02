"""Functions of tensors."""

import torch
import triton
import triton.language as tl

from .kernels.rows import grid_of_rows, scaled_sum_kernel, shift_kernel


def scaled_sum(x):
    """Return twice the sum of each row."""
    y = torch.empty(x.shape[0], device=x.device)
    scaled_sum_kernel[grid_of_rows](x, y, x.shape[0], x.shape[1], tl.float32)
    return y


def shifted(x, by):
    """Add a number in place."""
    shift_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel(), by)
    return x
