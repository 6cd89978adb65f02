"""Operators that numpy computes give the interpreter's values, types and errors."""

import json
import operator
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from subprocesses import environment
from warm_python import python

from kerneltune.interpreter.modes import corrected, read_sources
from kerneltune.interpreter.quick import OPERATORS, with_quick_accesses

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")

KINDS = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
NAMES = ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne")


@triton.jit
def _is_number(x):
    return x == x


@triton.jit
def _operate(a_ptr, b_ptr, OPERATE: tl.constexpr):
    OPERATE(tl.load(a_ptr + tl.arange(0, 4)), tl.load(b_ptr), tl.load(b_ptr + tl.arange(0, 1)), a_ptr, _is_number)


def answers(function: Callable[[Any, Any], Any], kind: torch.dtype) -> list[str]:
    """Return type and values, or the error, of a function of operands of each form."""
    lines: list[str] = []

    def operate(block: Any, scalar: Any, single: Any, pointer: Any, is_number: Any) -> None:
        offsets = block.to(tl.int64)
        row, column = block[None, :], block[:, None]
        for a, b in (
            (block, block), (block, scalar), (scalar, block), (scalar, scalar), (row, column), (block, offsets),
            (pointer, offsets), (offsets, pointer), (pointer + offsets, block.to(tl.int32)), (pointer + offsets, scalar),
            (pointer, block.to(tl.uint8)), (pointer + offsets, row), (pointer, 3),
            (block, 3), (3, block), (block, 2.5), (2.5, scalar), (block, 2**40), (block, True), (block, None),
            (offsets, block), (offsets, scalar), (scalar.to(tl.int64), block), (single, block), (block, single),
            (single[None, :], row), (row, single[None, :]), (single, row), (row, single),
            (pointer + single.to(tl.int64), offsets),
            (scalar, offsets), (row, offsets[:, None]), (pointer, -3), (pointer + offsets[None, :], offsets[:, None]),
            (pointer + offsets[None, :], block.to(tl.int32)[:, None]), (block, float("inf")), (block, -0.0), (block > 1, True),
            (block.to(tl.int16), 3), (block.to(tl.int16), 2**15), (block.to(tl.uint32), 3), (block.to(tl.uint32), -1),
            (block.to(tl.uint64), 3), (3, block.to(tl.uint64)),
            (single.to(tl.int64), block), (offsets, single), (is_number(scalar), block),
        ):  # fmt: skip
            try:
                result = function(a, b)
                handle = result.handle
                data = handle.data - pointer.handle.data if result.dtype.is_ptr() else handle.data
                lines.append(f"{result.type} {result.shape} {handle.dtype} {handle.data.dtype} {data.shape} {data}")
            except Exception as error:
                lines.append(f"{type(error).__name__}: {error}")

    a, b = torch.tensor([0, 1, 100, 127]).to(kind), torch.tensor([2]).to(kind)
    with corrected():
        _operate[(1,)](a, b, operate)
    return lines


def all_answers(is_checked: bool) -> dict[str, list[str]]:
    """Return the answers of every operator and type, with checks of overflow or without."""
    from triton.runtime.interpreter import interpreter_builder

    before = interpreter_builder.options
    interpreter_builder.options = replace(before, debug=is_checked)
    try:
        functions = {name: getattr(operator, f"{name}_" if name in ("and", "or") else name) for name in NAMES}
        return {f"{name} {kind}": answers(function, kind) for name, function in functions.items() for kind in KINDS}
    finally:
        interpreter_builder.options = before


def test_quick_operators_give_values_types_and_errors_of_the_interpreter() -> None:
    assert set(OPERATORS) == set(NAMES)
    code = f"""
import sys, json
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from kerneltune.interpreter.quick import OPERATORS
OPERATORS.clear()
from test_quick import all_answers
print(json.dumps([all_answers(False), all_answers(True)]))
"""
    done = subprocess.run([python(), "-c", code], env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for is_checked, want in enumerate(json.loads(done.stdout)):
        assert all_answers(bool(is_checked)) == want
        assert any("overflow detected" in line for line in want["mul torch.int8"]) == is_checked


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32, np.int64])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("distance", [1, 3])
def test_accesses_by_numpy_load_and_store_what_the_native_module_does(kind: Any, share: float, distance: int) -> None:
    from triton._C.libtriton import interpreter as native

    random = np.random.default_rng(0)
    quick, memory, kept = with_quick_accesses(native), *(random.integers(0, 200, 9000).astype(kind) for _ in range(2))
    bytes_at = distance * (kind().itemsize if distance == 1 else 1)  # 3 bytes apart elements overlap, unless they are bytes
    addresses = np.uint64(memory.ctypes.data) + (random.integers(0, 2900, (2, 1000)) * bytes_at).astype(np.uint64)
    mask, values = random.random((2, 1000)) < share, random.integers(0, 200, (2, 1000)).astype(kind)
    got, want = (it.load(addresses, mask, values, np.dtype(kind)) for it in (quick, native))
    assert got.dtype == want.dtype
    assert (got == want).all()
    stored = []
    for module in (quick, native):
        memory[:] = kept
        module.store(addresses, values, mask)
        stored.append(memory.copy())
    assert (stored[0] == stored[1]).all()


def test_sources_that_are_read_hold_the_rewritten_kernels_of_the_folder() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    InterpretedFunction.rewritten_fn.pop(_operate.fn, None)
    read_sources(f"{Path(__file__).parent}/")
    assert _operate.fn in InterpretedFunction.rewritten_fn
