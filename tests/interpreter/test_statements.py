"""Count the statements of a program: loops whose bounds arguments tell, device functions, branches, and loaded bounds."""

import pytest
import torch
import triton
import triton.language as tl

from kerneltune.interpreter.modes import unlaunched

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the interpreter's launches are counted")
_TURNS = tl.constexpr(3)


@triton.jit
def _block_sum(x_ptr, BLOCK: tl.constexpr):
    total = 0.0
    for _ in tl.static_range(_TURNS):
        total += tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), 0)
    return total


@triton.jit
def _counted(x_ptr, y_ptr, N, CASE: tl.constexpr, BLOCK: tl.constexpr):
    if CASE == "loop":
        for begin in range(0, N, BLOCK):
            tl.store(y_ptr + begin, 0.0)
    elif CASE == "rows of programs":
        tiles = tl.cdiv(N, BLOCK)
        for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
            for _ in range(2):
                tl.store(y_ptr + tile, 0.0)
    elif CASE == "device function":
        tl.store(y_ptr, _block_sum(x_ptr, BLOCK))
    else:
        for at in range(0, tl.load(x_ptr)):
            tl.store(y_ptr + at, 0.0)


@pytest.mark.parametrize(
    ("name", "statements"),
    [
        ("loop", 1 + 1 + 7),  # the `if`, the loop, and its statement in each of 7 turns
        ("rows of programs", 2 + 2 + 2 * (1 + 2)),  # program 2 of 4 has tiles 2 and 6 of 7
        ("device function", 3 + 1 + 3 + 3),
        ("loaded bound", 3 + 1 + 1),
    ],
)
def test_statements_of_the_middle_program_are_counted(name: str, statements: int) -> None:
    x = torch.empty(100, device="meta")
    with unlaunched() as launches:
        _counted[(4,)](x, x, 100, CASE=name, BLOCK=16)
    assert launches.num_statements == 4 * statements
