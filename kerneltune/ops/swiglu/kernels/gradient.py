"""Write the gradients of both halves of a row of SwiGLU's operand, and load each value once."""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_lib import wide


@triton.jit
def gate_gradient(
    dy_ptr, x_ptr, dx_ptr, M, stride_dy, stride_x, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write dx (M, 2N) of y = silu(x[:, :N]) * x[:, N:], in fp32; a program takes ROWS rows and COLS columns of both halves."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows < M)[:, None]
    if N % COLS != 0:
        mask = mask & (cols < N)[None, :]
    at = wide(rows)[:, None] * stride_x + cols[None, :]
    gate = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(x_ptr + at + N, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    from_dy = dy_ptr + (wide(rows)[:, None] * stride_dy + cols[None, :])
    dy = tl.load(from_dy, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    to = dx_ptr + (wide(rows)[:, None] * (2 * N) + cols[None, :])
    tl.store(to, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(to + N, (dy * silu).to(dx_ptr.dtype.element_ty), mask=mask)
