"""A script whose kernel has no autotuner."""

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


results = []
for size in map(int, sys.argv[1:]):
    x = torch.arange(100 * size, device=DEVICE).float()
    y = torch.full_like(x, float("nan"))
    shifted[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 2.0, BLOCK=1024)
    assert torch.equal(y, x + 2.0)
    results.append(y)
report(*results)
