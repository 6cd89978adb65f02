"""A script without a guard, whose kernel reads a global that depends on its arguments and on SCRIPT_STEP."""

import os
import sys

import torch
import triton
import triton.language as tl
from observed import report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = [int(text) for text in sys.argv[1:]]
STEP = tl.constexpr(len(WIDTHS) + int(os.environ["SCRIPT_STEP"]))


@triton.autotune(
    configs=[triton.Config({"ROWS": rows}, num_warps=warps) for rows in (1, 2, 8) for warps in (1, 2, 4)],
    key=["N"],
)
@triton.jit
def double(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply x (M, N) by a global."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < M) & (column < N)
    tl.store(y_ptr + row * N + column, tl.load(x_ptr + row * N + column, mask=mask) * STEP, mask=mask)


results = []
for width in WIDTHS:
    x = torch.arange(100 * width, device=DEVICE).float().view(100, width)
    y = torch.full_like(x, float("nan"))
    double[lambda meta: (triton.cdiv(100, meta["ROWS"]),)](x, y, 100, width, COLUMNS=triton.next_power_of_2(width))
    assert torch.equal(y, STEP.value * x)
    results.append(y)
report(*results)
