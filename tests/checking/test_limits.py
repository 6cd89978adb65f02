"""Find kernels that count a limit to the wrong side, which shows where inputs hold the limit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import CASES, values
from test_pairs import interpreted, op_with

from kerneltune.checking.jobs import compare_job, run_jobs
from kerneltune.checking.shifts import wrong_by_values
from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant
from kerneltune.task import Task


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {"x": values(seed, device, case["M"], case["N"]), "least": 0.25}


def op_of_x(name: str, reference: Callable[[Inputs], Outputs], run: Callable[..., Outputs]) -> Op:
    return replace(
        op_with(""), inputs=_inputs, reference=reference, variants=(Variant("optimized", run),),
        compare=lambda _case, _given, outputs, expected: same_bits(name, outputs[name], expected[name]),
    )  # fmt: skip


@triton.jit
def _count(x_ptr, count_ptr, N, least, most, IS_OPEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < N, other=most + 1)
    within = (x >= least) & ((x < most) if IS_OPEN else (x <= most))
    tl.store(count_ptr, tl.sum(within.to(tl.int32), 0))


@interpreted
@pytest.mark.parametrize("is_open", [True, False])
def test_limit_that_a_kernel_counts_to_the_wrong_side_is_named(is_open: bool) -> None:
    def run(inputs: Inputs, _config: object = None) -> Outputs:
        y = torch.empty(1, dtype=torch.int32)
        _count[(1,)](inputs["x"], y, inputs["x"].numel(), -4.0, 4.0, is_open, triton.next_power_of_2(inputs["x"].numel()))
        return {"y": y}

    op = op_of_x("y", lambda inputs: {"y": ((inputs["x"] >= -4) & (inputs["x"] <= 4)).sum().int().reshape(1)}, run)
    line = "optimized is wrong where x holds floats of its launches or inputs, -4, 0.25, 4, in case odd: y: 1 of 1 wrong, "
    lines = wrong_by_values(op, CASES)
    assert [text.startswith(line) for text in lines] == [True] * is_open
    ((_job, outcomes),) = run_jobs([compare_job(Task(op, CASES[1], op.variants[0]), CASES)])
    assert {f"scaled: {text}" for text in lines} <= {outcome.reason for outcome in outcomes}


def _kept(is_open: bool, inputs: Inputs, _config: object = None) -> Outputs:
    x, least = inputs["x"].reshape(-1), inputs["least"]
    return {"kept": x[x >= least] if is_open else x[x > least]}


@pytest.mark.parametrize("is_open", [True, False])
def test_limit_of_an_input_that_is_a_number_is_named_where_the_output_has_another_shape(is_open: bool) -> None:
    op = op_of_x("kept", partial(_kept, False), partial(_kept, is_open))
    lines = wrong_by_values(op, CASES)
    line = "optimized is wrong where x holds floats of its launches or inputs, 0.25, in case odd: kept: "
    assert [text.startswith(line) for text in lines] == [True] * is_open, lines
