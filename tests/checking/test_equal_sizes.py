"""A branch on equal sizes: sizes of 1 do not count, and bench cases with equal sizes give a small derived case."""

from dataclasses import replace
from functools import partial

import pytest
import triton
import triton.language as tl
from mistaken_ops import case_of
from row_sums import findings, summing

from kerneltune.checking.derived import derived_cases
from kerneltune.checking.jobs import CaseJob, coverage_lines, run_jobs
from kerneltune.spec import Inputs, Outputs, Variant
from kerneltune.task import Run, Task


@triton.jit
def _doubled_square(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr, IS_IN_KERNEL: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + tl.program_id(0) * N + at, at < N, other=0.0), 0)
    if M == N and IS_IN_KERNEL:
        total *= 1 + (M > 1)
    tl.store(y_ptr + tl.program_id(0), total)


def sums_doubled_in_a_square(form: str, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    if form == "if" and M == N:
        x = x * min(M, 2)
    x = x * min(M, 2) if form == "ternary" and M == N else x
    if x.stride(1) != inputs["x"].stride(1):  # always equal, and always 1
        raise ValueError("stride")
    y = x.new_empty(M)
    _doubled_square[(M,)](x, y, M, N, BLOCK=triton.next_power_of_2(N), IS_IN_KERNEL=form == "kernel")
    return {"y": y}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("if", "`M == N` in sums_doubled_in_a_square"),
        ("ternary", "`M == N` in sums_doubled_in_a_square"),
        ("kernel", "`M == N` in _doubled_square"),
    ],
)
def test_equal_sizes_of_1_do_not_count_as_equal_sizes(form: str, text: str) -> None:
    variant = Variant("optimized", partial(sums_doubled_in_a_square, form))
    op = replace(summing(""), variants=(variant,))
    checks = [case_of("one", 1, 1), case_of("odd", 7, 70)]
    assert findings(op, checks) == []
    jobs = [CaseJob.of([Run(Task(op, case, variant), None)]) for case in checks]
    dict(run_jobs(jobs))
    (line,) = coverage_lines(jobs)
    assert f"equal sizes above 1 at {text}" in line
    assert "stride" not in line
    derived, _, _ = derived_cases(op, checks, [case_of("square", 1024, 1024)])
    assert "y: wrong" in findings(op, derived)
