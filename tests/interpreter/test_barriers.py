"""Elements that a program stores and loads in different threads, without a barrier between."""

import pytest
import torch
import triton
import triton.language as tl

from kerneltune.interpreter.facts import noting
from kerneltune.interpreter.modes import strict

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="threads are told in Triton's interpreter")


@triton.jit
def _through_memory(x_ptr, y_ptr, HOW: tl.constexpr):
    at = tl.arange(0, 64)
    x = tl.load(x_ptr + at)
    if HOW == "sum":
        x = tl.sum(tl.reshape(x, (32, 2)), 1)
        at = tl.arange(0, 32)
    tl.store(y_ptr + at, x + 1.0)
    if HOW == "barrier":
        tl.debug_barrier()
    if HOW == "cumsum":
        x = tl.cumsum(x, 0)
    if HOW == "row":
        again = tl.load(y_ptr + at)
    elif HOW == "part":
        again = tl.load(y_ptr + at, at < 40)
    elif HOW == "sum":
        again = tl.load(y_ptr + tl.arange(0, 64) // 2)
        at = tl.arange(0, 64)
    else:
        again = tl.load(y_ptr + (at ^ 1))
    tl.store(y_ptr + 64 + at, again)


@triton.jit
def _pairs(x_ptr, y_ptr, HOW: tl.constexpr):
    at = tl.arange(0, 64)
    x = tl.load(x_ptr + at)
    other = tl.load(x_ptr + (at ^ 1))
    if HOW == "barrier":
        tl.debug_barrier()
    elif HOW == "maximum":
        x = x - tl.max(x, 0)
    tl.store((y_ptr if HOW == "elsewhere" else x_ptr) + at, x if HOW == "as before" else x - other)


@pytest.mark.parametrize("how", ["pairs", "barrier", "cumsum", "row", "part", "sum"])
def test_load_of_what_another_thread_stored_is_named_unless_a_barrier_lies_between(how: str) -> None:
    with strict(), noting() as facts:
        _through_memory[(1,)](torch.randn(64), torch.empty(128), HOW=how)
    text = "a program loads elements that it has stored at other places of a block, test_barriers.py"
    assert [str(fact).partition(":")[0] for fact in facts if fact.kind == "no barrier"] == [text] * (how in ("pairs", "sum"))


@pytest.mark.parametrize("how", ["pairs", "barrier", "maximum", "elsewhere", "as before"])
def test_store_to_what_another_thread_loads_is_named_unless_a_barrier_lies_between(how: str) -> None:
    with strict(), noting() as facts:
        _pairs[(1,)](torch.randn(64), torch.empty(64), HOW=how)
    text = "a program stores elements that it has loaded at other places of a block, test_barriers.py"
    assert [str(fact).partition(":")[0] for fact in facts if fact.kind == "no barrier"] == [text] * (how == "pairs")
