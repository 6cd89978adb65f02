"""Two autotuned kernels as a package might ship them: a row sum with a grid function, and an in-place scale with a heuristic.

Nothing here knows kerneltune. `python two_kernels.py` launches both at two sizes, on the GPU or in Triton's interpreter.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128, 256) for warps in (2, 4)],
    key=["N"],
    do_bench=None if torch.cuda.is_available() else lambda call, quantiles: [1.0, 1.0, 1.0],
)
@triton.jit
def row_sum(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    """Sum each row of x (M, N) into y (M,)."""
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, tl.sum(total))


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}) for block in (32, 128)],
    key=[],
    restore_value=["x_ptr"],
    do_bench=None if torch.cuda.is_available() else lambda call, quantiles: [1.0, 1.0, 1.0],
)
@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@triton.jit
def scale_chosen(x_ptr, rows_ptr, N, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Multiply the chosen rows of x (M, N) by a factor, in place."""
    row = tl.load(rows_ptr + tl.program_id(0))
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.full((BLOCK,), True, tl.int1) if EVEN else columns < N
    x = tl.load(x_ptr + row * N + columns, mask=mask, other=0.0)
    tl.store(x_ptr + row * N + columns, x * factor, mask=mask)


def step(rows: int, columns: int) -> torch.Tensor:
    """Run both kernels on x (rows, columns); returns the sum of each row, the even rows doubled."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.arange(rows * columns, dtype=torch.float32, device=device).reshape(rows, columns) % 7
    chosen = torch.arange(0, rows, 2, device=device)
    scale_chosen[lambda meta: (len(chosen), triton.cdiv(columns, meta["BLOCK"]))](x, chosen, columns, 2.0)
    sums = torch.empty(rows, dtype=torch.float32, device=device)
    row_sum[(rows,)](x, sums, rows, columns)
    return sums


if __name__ == "__main__":
    for columns in (96, 256):
        print(f"{columns} columns: sums {step(4, columns).tolist()}")
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
