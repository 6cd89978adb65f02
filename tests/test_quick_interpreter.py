"""Operators that take the short way give what the interpreter gives: values, types and errors."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from quick_interpreter import OPERATORS, quick_interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels that Triton's interpreter runs")

KINDS = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _is_number(x):
    return x == x


@triton.jit
def _operate(a_ptr, b_ptr, OPERATE: tl.constexpr):
    OPERATE(tl.load(a_ptr + tl.arange(0, 4)), tl.load(b_ptr), a_ptr, _is_number)


def answers(function: Callable[[Any, Any], Any], kind: torch.dtype) -> list[Any]:
    """Return type and values, or the error, of a function of operands of each form."""
    found: list[Any] = []

    def operate(block: Any, scalar: Any, pointer: Any, is_number: Any) -> None:
        other = block.to(tl.int64)
        row, column = block[None, :], block[:, None]
        for left, right in (
            (block, block), (block, scalar), (scalar, block), (scalar, scalar), (row, column), (block, other), (pointer, other),
            (block, 3), (3, block), (block, 2.5), (2.5, scalar), (block, 2**40), (block, True), (block, None),
            (is_number(scalar), block),
        ):  # fmt: skip
            try:
                result = function(left, right)
                found.append((str(result.type), str(result.handle.dtype), result.handle.data.dtype, str(result.handle.data)))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")

    a, b = torch.tensor([0, 1, 100, 127]).to(kind), torch.tensor([2]).to(kind)
    _operate[(1,)](a, b, operate)
    return [line if "pointer" not in str(line) else line[:3] for line in found]


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_short_way_gives_values_types_and_errors_of_the_interpreter(
    kind: torch.dtype, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=is_checked))
    functions = [getattr(operator, f"{name}_" if name in ("and", "or") else name) for name in OPERATORS]
    want = [answers(function, kind) for function in functions]
    with quick_interpreter():
        got = [answers(function, kind) for function in functions]
    assert got == want
    overflows = sum("overflow detected" in str(line) for lines in want for line in lines)
    assert (overflows > 0) == (is_checked and kind in (torch.bool, torch.int8, torch.uint8))
