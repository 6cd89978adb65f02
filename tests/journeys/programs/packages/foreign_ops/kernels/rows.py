"""Autotuned kernels whose results do not depend on the config: sums are of integers."""

import triton
import triton.language as tl


def grid_of_rows(meta):
    """Return one program for each row."""
    return (meta["M"],)


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block in (128, 512, 2048) for warps in (1, 4, 8)],
    key=["N"],
)
@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@triton.jit
def scaled_sum_kernel(x_ptr, y_ptr, M, N, kind: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Write twice the sum of each row of x (M, N) to y (M,)."""
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), kind)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = tl.full((BLOCK,), True, tl.int1) if EVEN else columns < N
        total += tl.load(x_ptr + row * N + columns, mask=mask, other=0.0).to(kind)
    tl.store(y_ptr + row, 2 * tl.sum(total))


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024, 4096) for warps in (2, 4)],
    key=[],
    restore_value=["x_ptr"],
)
@triton.jit
def shift_kernel(x_ptr, count, by, BLOCK: tl.constexpr):
    """Add a number to every element of x in place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < count) + by, mask=at < count)
