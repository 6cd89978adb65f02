"""Reductions and scans by a kernel's own function, and `and`, `or` and `not` of blocks."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kerneltune.interpreter.modes import corrected, strict

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton's interpreter computes these")


@triton.jit
def _larger(a, at_a, b, at_b):
    takes_b = (b > a) | ((b == a) & (at_b < at_a))
    return tl.where(takes_b, b, a), tl.where(takes_b, at_b, at_a)


@triton.jit
def _after(factor, term, next_factor, next_term):
    return factor * next_factor, term * next_factor + next_term


@triton.jit
def _last(_a, b):
    return b


@triton.jit
def _larger_by_if(a, b):
    larger = a
    if b > a:
        larger = b
    return larger


@triton.jit
def _larger_by_call(a, b):
    return _larger_by_if(a, b)


@triton.jit
def _reduced(x_ptr, largest_ptr, at_ptr, last_ptr, all_ptr, N: tl.constexpr):
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + row * N + column)
    largest, at = tl.reduce((x, tl.broadcast_to(column, 4, N)), 1, _larger)
    rows = tl.arange(0, 4)
    tl.store(largest_ptr + rows, largest)
    tl.store(at_ptr + rows, at)
    tl.store(last_ptr + row, tl.reduce(x, 1, _last, keep_dims=True))
    tl.store(all_ptr, tl.reduce(x, None, _larger_by_if))
    tl.store(all_ptr + 1, tl.reduce(x, None, _larger_by_call))


def test_reduction_by_a_function_gives_what_torch_gives_in_the_order_of_elements() -> None:
    x = torch.randn(4, 64).round(decimals=1)
    largest, at, last, of_all = torch.empty(4), torch.empty(4, dtype=torch.int32), torch.empty(4), torch.empty(2)
    with strict():
        _reduced[(1,)](x, largest, at, last, of_all, 64)
    torch.testing.assert_close((largest, last, of_all), (x.amax(1), x[:, -1], x.max().expand(2)), rtol=0, atol=0)
    assert at.tolist() == [row.tolist().index(row.max().item()) for row in x]


@triton.jit
def _scanned(x_ptr, y_ptr, N: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    _, y = tl.associative_scan((tl.full((N,), 0.5, tl.float32), x), 0, _after, reverse=REVERSE)
    tl.store(y_ptr + at, y)


@pytest.mark.parametrize("is_reverse", [False, True])
def test_scan_by_a_function_of_two_values_is_a_recurrence(is_reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers_of_elements, of_blocks = list[int](), _after.rewrite()

    def noted(*operands: Any) -> Any:
        numbers_of_elements.append(operands[0].handle.data.size)
        return of_blocks(*operands)

    monkeypatch.setattr(_after, "rewrite", lambda: noted)
    x, y, wanted, state = torch.randn(4096), torch.empty(4096), torch.empty(4096), 0.0
    for at in reversed(range(4096)) if is_reverse else range(4096):
        state = 0.5 * state + x[at].item()
        wanted[at] = state
    with corrected():
        _scanned[(1,)](x, y, 4096, is_reverse)
    assert numbers_of_elements == [4096] * 12, "log2(n) calls"
    torch.testing.assert_close(y, wanted)


@triton.jit
def _masked(x_ptr, y_ptr, M, N, flag, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    is_inside = row < M and column < N
    x = tl.load(x_ptr + row * N + column, is_inside and True, other=0.0)
    is_even = not column % 2
    wanted = (is_even or row == 0) and is_inside
    if flag and M > 1:
        x = -x
    tl.store(y_ptr + row * N + column, tl.where(wanted, x, 9.0), row < M and column < N)


@pytest.mark.parametrize("flag", [0, 2])
def test_logic_of_blocks_combines_elements_as_compiled_kernels_do(flag: int) -> None:
    x, y = torch.randn(3, 5), torch.empty(3, 5)
    with strict():
        _masked[(1,)](x, y, 3, 5, flag, 4, 8)
    wanted = torch.full((3, 5), 9.0)
    wanted[:, ::2], wanted[0] = x[:, ::2], x[0]
    wanted = torch.where(wanted == 9.0, wanted, -wanted) if flag else wanted
    assert torch.equal(y, wanted)
