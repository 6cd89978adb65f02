"""Check operators whose kernels break a promise about a tensor."""

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import all_close, case_of, values

from kerneltune.checking.jobs import CaseJob, coverage_lines, run_jobs
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant
from kerneltune.task import Run, Task

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="what Triton's interpreter finds")


@triton.jit
def _maxima(x_ptr, y_ptr, count, MISTAKE: tl.constexpr, BLOCK: tl.constexpr):
    begin = tl.program_id(0) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    inside = tl.where(at < count, at, begin)  # repeats an element, which the maximum does not mind
    if MISTAKE == "contiguous":
        inside = tl.max_contiguous(tl.multiple_of(inside, BLOCK), BLOCK)
    if MISTAKE == "multiple":
        inside = tl.multiple_of(inside + 1, BLOCK) - 1
    tl.store(y_ptr + tl.program_id(0), tl.max(tl.load(x_ptr + inside), 0))


def checked(mistake: str) -> tuple[list[str], list[str]]:
    """Return the reasons of failed checks of maxima of blocks of 1024 elements, and the lines about coverage."""

    def run(inputs: Inputs, _config: None) -> Outputs:
        x = inputs["x"]
        y = x.new_empty(triton.cdiv(x.numel(), 1024))
        _maxima[(y.numel(),)](x, y, x.numel(), mistake, 1024)
        return {"y": y}

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {"x": values(seed, device, case["M"], case["N"])}

    def reference(inputs: Inputs) -> Outputs:
        return {"y": torch.stack([block.amax() for block in inputs["x"].reshape(-1).split(1024)])}

    variant = Variant("optimized", run)
    op = Op(
        name="maxima", axes=("M", "N"), dtypes=("float32",), inputs=inputs, reference=reference, compare=all_close,
        traffic=lambda case: Traffic(4 * case["M"] * case["N"], 4 * case["M"]), variants=(variant,), module=__name__,
    )  # fmt: skip
    job = CaseJob.of([Run(Task(op, case_of("odd", 3, 343), variant), None)])
    outcomes = [outcome for _job, found in run_jobs([job]) for outcome in found]
    return [outcome.reason for outcome in outcomes if outcome.status == "failed"], list(coverage_lines([job]))


def test_vector_that_takes_elements_behind_the_tensor_fails_and_names_the_promise() -> None:
    (reason,), _lines = checked("contiguous")
    assert reason.startswith("y: 1 of 2 wrong")
    assert "by max_contiguous(1024), test_promise_mistakes.py:" in reason


def test_wrong_multiple_that_makes_no_access_a_vector_is_a_line() -> None:
    failures, lines = checked("multiple")
    assert failures == []
    assert [line for line in lines if "does not hold" in line] == [
        "maxima: multiple_of(1024) at test_promise_mistakes.py:24 does not hold: wrong where it makes an access a vector"
    ]


def test_right_kernel_has_no_line_about_promises() -> None:
    failures, lines = checked("")
    assert failures == []
    assert not [line for line in lines if "does not hold" in line]
