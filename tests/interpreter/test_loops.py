"""Long loops in launches without memory, whose middle iterations do not run."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kerneltune.interpreter.faults import KernelFaultError
from kerneltune.interpreter.modes import noting, strict

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a GPU runs every iteration")


@triton.jit
def _sums_by_pointers(x_ptr, y_ptr, N, excess, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptrs = x_ptr + row.to(tl.int64) * N + tl.arange(0, BLOCK)
    total, left = tl.zeros((BLOCK,), tl.float32), N
    for _ in range(0, tl.cdiv(N, BLOCK) + excess):
        total += tl.load(x_ptrs, tl.arange(0, BLOCK) < left, other=0.0)
        x_ptrs += BLOCK
        left -= BLOCK * (1 - excess)
    tl.store(y_ptr + row, tl.sum(total, 0))


@triton.jit
def _sums_by_block_pointers(x_ptr, y_ptr, N, excess, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    block = tl.make_block_ptr(x_ptr + row.to(tl.int64) * N, (N,), (1,), (0,), (BLOCK,), (0,))
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, tl.cdiv(N, BLOCK) + excess):
        if excess:
            total += tl.load(block)
        else:
            total += tl.load(block, boundary_check=(0,), padding_option="zero")
        block = tl.advance(block, (BLOCK,))
    tl.store(y_ptr + row, tl.sum(total, 0))


@triton.jit
def _sums_by_rows(x_ptr, y_ptr, M, stride, BLOCK: tl.constexpr):
    total, offset = 0.0, 0
    for _ in range(0, M):
        total += tl.load(x_ptr + offset)
        offset += stride
    tl.store(y_ptr, total)


_HAS_BLOCK_POINTERS = pytest.mark.skipif(
    not hasattr(interpreter, "BlockPointerHandle"), reason="Triton 3.9 has no block pointers"
)


@pytest.mark.parametrize("kernel", [_sums_by_pointers, pytest.param(_sums_by_block_pointers, marks=_HAS_BLOCK_POINTERS)])
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_pointer_of_a_long_loop_reaches_the_last_element(kernel: Any) -> None:
    x, y = torch.empty(3, 64 * 1000 - 1, device="meta"), torch.empty(3, device="meta")
    with strict(device="meta"), noting() as facts:
        kernel[(3,)](x, y, x.shape[1], 0, 64)
    assert {(fact.kind, fact.text) for fact in facts if fact.kind.startswith("last")} == {
        ("last loaded", "x_ptr"), ("last stored", "y_ptr"),
    }  # fmt: skip
    with strict(device="meta"), pytest.raises(KernelFaultError, match="load outside of x_ptr"):
        kernel[(3,)](x, y, x.shape[1], 1, 64)


@pytest.mark.parametrize("rows", [100, 100_000])
def test_offset_that_overflows_in_the_middle_of_a_long_loop_is_found(rows: int) -> None:
    x, y = torch.empty(rows, 50_000, device="meta"), torch.empty(1, device="meta")
    with strict(device="meta"):
        if rows == 100:
            _sums_by_rows[(1,)](x, y, rows, 50_000, 64)
            return
        with pytest.raises(
            KernelFaultError, match=r"int32 overflow detected for operation add, test_loops.py:\d+, in a long loop"
        ):
            _sums_by_rows[(1,)](x, y, rows, 50_000, 64)
