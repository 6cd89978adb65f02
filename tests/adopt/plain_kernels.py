"""Kernels without an autotuner, and captures of their launches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from kerneltune.adopt import startup
from kerneltune.adopt.folder import LaunchClass
from kerneltune.adopt.overview import read_capture

SOURCE = """
import triton
import triton.language as tl
@triton.jit
def doubled(x_ptr, y_ptr, N, scale, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, scale * tl.load(x_ptr + places, mask=places < N), mask=places < N)
"""
COUPLED = """
@triton.jit
def padded(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places))
@triton.jit
def partial(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + places, mask=places < N, other=0.0)))
@triton.jit
def named(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N) + BLOCK, mask=places < N)
@triton.jit
def looped(x_ptr, y_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    for start in range(0, N, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N), mask=places < N)
@triton.jit
def biased(x_ptr, bias_ptr, y_ptr, N, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N)
    if HAS_BIAS:
        x += tl.load(bias_ptr + places, mask=places < N)
    tl.store(y_ptr + places, x, mask=places < N)
@triton.jit
def product(x_ptr, y_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + places, tl.dot(tl.load(x_ptr + places), tl.load(x_ptr + places)))
@triton.jit
def listed(x_ptr, blocks_ptr, y_ptr, N, BLOCK: tl.constexpr):
    places = tl.load(blocks_ptr + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N), mask=places < N)
@triton.jit
def stepped(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0) * N
    for start in range(0, N, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + row + places, 2 * tl.load(x_ptr + row + places, mask=places < N), mask=places < N)
@triton.jit
def staged(x_ptr, y_ptr, N, BLOCK: tl.constexpr, num_stages: tl.constexpr = 7):
    places = tl.arange(0, BLOCK)
    for step in tl.range(0, N // BLOCK, num_stages=num_stages):
        x = tl.load(x_ptr + step * BLOCK + places)
        tl.store(y_ptr + step * BLOCK + places, x * num_stages)
@triton.jit
def strided(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N), mask=places < N)
@triton.jit
def turned(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + N - 1 - places, tl.load(x_ptr + places, mask=places < N), mask=places < N)
@triton.jit
def flagged(x_ptr, y_ptr, N, flag, eps, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N)
    if flag > 0.0:
        x *= BLOCK
    tl.store(y_ptr + places, x + eps, mask=places < N)
@triton.jit
def shared(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    for start in range(first, first + BLOCK, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N), mask=places < N)
even = triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})(looped)
"""
SOURCE += COUPLED


def launch(module: Any, size: int = 96, scale: float = 2.0, **options: Any) -> torch.Tensor:
    """Launch the kernel; returns its result."""
    y = torch.empty(size)
    module.doubled[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](
        torch.arange(float(size)), y, size, scale, BLOCK=32, **options
    )
    return y


def captured(folder: Path, module: Any, *sizes: int, **options: Any) -> list[LaunchClass]:
    """Capture launches of these sizes."""
    startup.capture(folder, plain=True)
    for size in sizes:
        launch(module, size, **options)
    startup.recorder().flush()
    startup.uninstall()
    return sorted(read_capture(folder).classes, key=lambda one: one.sizes["N"])


def cdiv_grid(size: int) -> Any:
    """Return a grid that reads the block."""
    return lambda meta: (triton.cdiv(size, meta["BLOCK"]),)


def captured_call(folder: Path, call: Callable[[], Any]) -> LaunchClass:
    """Capture a call that launches a single class."""
    startup.capture(folder, plain=True)
    call()
    startup.recorder().flush()
    startup.uninstall()
    (launch,) = read_capture(folder).classes
    return launch
