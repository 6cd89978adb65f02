"""A kernel that ptxas 12.8 compiles into wrong code, for test_compiler.py: a tile of fp8, stored row by row and transposed."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from pool_jobs import op_of


@triton.jit
def _twice(x_ptr, q_ptr, qt_ptr, M, N, BLOCK: tl.constexpr):
    rows, cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    q = tl.clamp(x * 3.0, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows[:, None] * N + cols[None, :], q, mask=mask)
    tl.store(qt_ptr + cols[None, :] * M + rows[:, None], q, mask=mask)


def tile(_case: object, *, device: str) -> Mapping[str, Any]:
    """Return rows of an odd width, which are stored byte by byte; the height of columns is a multiple of 16."""
    return {"x": torch.empty(64, 20, device=device)}


def run(inputs: Mapping[str, Any], _config: object) -> None:
    """Launch it."""
    x = inputs["x"]
    q, qt = (torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device) for shape in (x.shape, x.shape[::-1]))
    _twice[1, 1](x, q, qt, *x.shape, BLOCK=64)


OP = op_of(__name__, tile, run)
