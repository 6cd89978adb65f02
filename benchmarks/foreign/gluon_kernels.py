"""Launch kernels of Gluon, which Triton's interpreter does not run: `python gluon_kernels.py`."""

import functools
from typing import Any

import torch
import triton
from measured_step import leaf, run
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS, WIDTH = 8192, 2048
CONFIGS = [triton.Config({"ROWS": rows}, num_warps=warps) for rows in (1, 2, 4) for warps in (4, 8)]
LAYOUT = gl.BlockedLayout([8], [32], [4], [0])


@gluon.jit
def squares(x):
    """Return squares in fp32."""
    x = x.to(gl.float32)
    return x * x


@triton.autotune(CONFIGS, key=["rows"])
@gluon.jit
def normed(x_ptr, y_ptr, rows, WIDTH: gl.constexpr, ROWS: gl.constexpr):
    """Divide each row by its root mean square, in a layout made of the number of warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, gl.num_warps()], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    at = row[:, None] * WIDTH + column[None, :]
    mask = (row < rows)[:, None]
    x = gl.load(x_ptr + at, mask=mask, other=0.0)
    scale = gl.rsqrt(gl.sum(squares(x), 1) / WIDTH + 1e-6)
    y = x.to(gl.float32) * scale[:, None]
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.autotune([triton.Config({"BLOCK": block}, num_warps=4) for block in (1024, 4096)], key=["n"])
@gluon.jit
def doubled(x_ptr, y_ptr, n, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Double values, in a layout that the host gives."""
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(y_ptr + at, gl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


@gluon.jit
def added(x_ptr, y_ptr, n, BLOCK: gl.constexpr):
    """Add values to those of an output, in a layout of four warps."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    x = gl.load(x_ptr + at, mask=at < n) + gl.load(y_ptr + at, mask=at < n)
    gl.store(y_ptr + at, x, mask=at < n)


@functools.cache
def values() -> torch.Tensor:
    """Return values that live as long as the program."""
    return leaf(ROWS, WIDTH).detach()


def step() -> Any:
    """Launch each kernel."""
    x = values()
    y, z = torch.empty_like(x), torch.empty_like(x)
    normed[lambda meta: (triton.cdiv(ROWS, meta["ROWS"]),)](x, y, ROWS, WIDTH=WIDTH)
    doubled[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, z, x.numel(), layout=LAYOUT)
    added[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](y, z, x.numel(), BLOCK=2048)
    return y, z


if __name__ == "__main__":
    run(step)
