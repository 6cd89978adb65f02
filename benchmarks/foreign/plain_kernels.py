"""Run two plain kernels on sequences of several lengths, with a seed: `python plain_kernels.py`."""

import torch
import triton
import triton.language as tl
from measured_step import DEVICE, leaf, run, sized

LENGTHS = (sized(3000, 30), sized(7001, 70), sized(12_345, 45))
WIDTH = sized(2048, 64)


@triton.jit
def dropped(x_ptr, y_ptr, elements, rate, seed, BLOCK: tl.constexpr):
    """Drop elements at random."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < elements)
    kept = tl.rand(seed, at) > rate
    tl.store(y_ptr + at, tl.where(kept, x / (1 - rate), 0.0), mask=at < elements)


@triton.jit
def row_sums(x_ptr, sums_ptr, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Add up the squares of each row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = tl.load(x_ptr + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=row[:, None] < rows, other=0.0).to(tl.float32)
    tl.store(sums_ptr + row, tl.sum(x * x, axis=1), mask=row < rows)


def step() -> list[torch.Tensor]:
    """Return both kernels' results of each length."""
    found = []
    for number, length in enumerate(LENGTHS):
        x = leaf(length, WIDTH).detach()
        y, sums = torch.empty_like(x), torch.empty(length, device=DEVICE)
        elements = x.numel()
        dropped[lambda meta, n=elements: (triton.cdiv(n, meta["BLOCK"]),)](x, y, elements, 0.1, 40 + number, BLOCK=1024)
        row_sums[lambda meta, n=length: (triton.cdiv(n, meta["ROWS"]),)](y, sums, length, WIDTH=WIDTH, ROWS=2)
        found += [y, sums]
    return found


if __name__ == "__main__":
    run(step)
