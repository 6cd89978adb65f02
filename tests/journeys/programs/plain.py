"""A script of three kernels without an autotuner.

The grid of the first two reads a block, by which the host allocates for the second; a loop of the third steps by a block.
"""

import sys

import torch
import triton
import triton.language as tl
from observed import report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def shifted(x_ptr, y_ptr, N, by, BLOCK: tl.constexpr):
    """Write x + by (N,) to y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < N) + by, mask=at < N)


@triton.jit
def summed(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Write the sum of each block of x (N,) to y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at, mask=at < N, other=0.0)))


@triton.jit
def walked(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Write the sum of each row of x (rows, N) to y."""
    x_ptr += tl.program_id(0) * N
    total = 0.0
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + at, mask=at < N, other=0.0))
    tl.store(y_ptr + tl.program_id(0), total)


def blocks_of(count):
    """Return a grid that has a program for each block."""
    return lambda meta: (triton.cdiv(count, meta["BLOCK"]),)


results = []
for size in map(int, sys.argv[1:]):
    x = torch.arange(100 * size, device=DEVICE).float()
    y = torch.full_like(x, float("nan"))
    grid = blocks_of(x.numel())
    shifted[grid](x, y, x.numel(), 2.0, BLOCK=1024)
    assert torch.equal(y, x + 2.0)
    rest = x.remainder(8)  # sums are exact in any order
    sums = torch.empty(triton.cdiv(x.numel(), 1024), device=DEVICE)
    summed[grid](rest, sums, x.numel(), BLOCK=1024)
    assert sums.sum() == rest.sum()
    rows = torch.empty(100, device=DEVICE)
    walked[(100,)](rest, rows, size, BLOCK=256)
    assert torch.equal(rows, rest.view(100, size).sum(dim=1))
    results += [y, sums, rows]
report(*results)
