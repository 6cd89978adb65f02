"""Test that a sum, difference or product of uint32 that wraps around fails as an address alone, in the largest case."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import case_of
from row_sums import summing

from kerneltune.checking.addresses import address_errors
from kerneltune.spec import Inputs, Outputs, Variant

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="addresses are checked in Triton's interpreter")
LARGE = case_of("large", 200_000, 50_000)
INDICES = ("block", "scalar", "sum", "difference", "wide", "chosen", "splat", "transposed", "pointer", "stored")
HASHES = (
    "remainder", "squared difference", "bits", "high bits", "exclusive or", "byte", "fraction", "in range", "masked", "value",
    "comparison",
)  # fmt: skip


@triton.jit
def _index(row, at, N, HOW: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.full([BLOCK], row, tl.uint32) * N
    place = at
    if HOW == "block":
        place = (row + at) * N
    elif HOW == "scalar":
        place = row * N + at
    elif HOW == "sum":
        place = at + 4294967290
    elif HOW == "wide":
        place = first.to(tl.int64) + at
    elif HOW == "chosen":
        place = tl.where(at < N, first, 0) + at
    elif HOW == "splat":
        place = tl.broadcast_to(row * N, [BLOCK]) + at.to(tl.int64)
    elif HOW == "transposed":
        place = tl.reshape(tl.trans(first[None, :] + at[None, :]), [BLOCK])
    elif HOW == "pointer" or HOW == "stored":
        place = first + at
    elif HOW == "in range":
        place = (row % 7) * N + at
    return place


@triton.jit
def _slot(mixed, at, HOW: tl.constexpr):  # noqa: C901
    slot = at
    if HOW == "remainder":
        slot = mixed % 1000
    elif HOW == "squared difference":
        slot = (at - 9) * (at - 9) % 1000
    elif HOW == "bits":
        slot = mixed & 1023
    elif HOW == "high bits":
        slot = mixed >> 20
    elif HOW == "exclusive or":
        slot = ((mixed ^ 77) * 2246822519 + mixed) % 1000
    elif HOW == "byte":
        slot = mixed.to(tl.uint8).to(tl.uint32)
    elif HOW == "fraction":
        slot = (mixed.to(tl.float32) * 1e-9).to(tl.uint32)
    elif HOW == "comparison":
        slot = tl.where(mixed < 77, at, at + 1)
    elif HOW == "masked":
        slot = mixed
    elif HOW == "difference":
        slot = at - 77  # wraps around
    return slot


@triton.jit
def _placed(x_ptr, y_ptr, M, N, HOW: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.uint32), tl.arange(0, BLOCK).to(tl.uint32)
    mixed = row * 2654435761 + at
    place = _slot(mixed, _index(row, at, N, HOW, BLOCK), HOW)
    mask = at < (0 if HOW == "masked" else 16)
    x = tl.load(x_ptr + (at if HOW == "stored" else place), mask, 0.0) + (mixed.to(tl.float32) if HOW == "value" else 0.0)
    tl.store(y_ptr + (place if HOW == "stored" else at), x, mask)


def placed(how: str) -> Callable[[Inputs, None], Outputs]:
    def run(inputs: Inputs, _config: None) -> Outputs:
        x = inputs["x"]
        y = torch.empty_like(x)
        _placed[(x.shape[0],)](x, y, *x.shape, HOW=how, BLOCK=16)
        return {"y": y}

    return run


@pytest.mark.parametrize("how", [*INDICES, *HASHES])
def test_uint32_that_wraps_around_fails_as_an_address_of_the_largest_case_alone(how: str) -> None:
    variant = Variant("optimized", placed(how))
    lines = address_errors(replace(summing(""), variants=(variant,)), LARGE, variant, None)
    operation = {"sum": "add", "difference": "sub"}.get(how, "mul")
    begins = f"uint32 overflow detected for operation {operation}, test_wrapping.py:"
    assert [line[: len(begins)] for line in lines] == [begins] * (how in INDICES), lines
    assert all(", whose result is an address, program (199999, 0, 0), test_wrapping.py:" in line for line in lines)
