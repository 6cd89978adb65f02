"""Quotients by numbers: without a GPU a reference divides as torch does on one, and a failed comparison names the division."""

import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planted_kernels import op_with
from subprocesses import environment
from warm_python import python

from kerneltune.checking.check import Checker
from kerneltune.checking.quotients import AsOnGpu
from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.spec import Case, Inputs, Op, Outputs

RECIPROCAL = float(np.float32(1) / np.float32(15))
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32]


def values(dtype: torch.dtype) -> torch.Tensor:
    return (1000 * torch.rand(4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)


def test_tensor_is_multiplied_by_the_reciprocal_of_a_number() -> None:
    x, y = values(torch.float32), values(torch.float32)
    with AsOnGpu() as quotients:
        y /= 15
        divided = [x / 15, x.div(15), torch.true_divide(x, 15.0), y]
    assert all(torch.equal(each, x * RECIPROCAL) for each in divided)
    assert not torch.equal(x / 15, x * RECIPROCAL)
    assert quotients.first == "", "this file lies in no folder of an operator"


DIVIDED = """
import sys
import torch
from kerneltune.checking.quotients import AsOnGpu

imported = set(sys.modules)
with AsOnGpu():
    torch.ones(2) / 15
print(sorted(set(sys.modules) - imported))
"""


def test_division_imports_no_module() -> None:
    """Else the first call in each process that checks imports torch's compiler, which takes 1 s."""
    done = subprocess.run([python(), "-c", DIVIDED], capture_output=True, text=True, env=environment(), timeout=800)
    assert done.stdout == "[]\n", done.stderr[-2000:]


def test_exact_quotients_stay_as_they_are() -> None:
    x, fifteen = values(torch.float32), torch.tensor(15.0)
    exact = [x / fifteen, x / 16, x / -0.25, x.div(15, rounding_mode="floor"), 15 / x]
    with AsOnGpu():
        divided = [x / fifteen, x / 16, x / -0.25, x.div(15, rounding_mode="floor"), 15 / x]
    assert all(map(torch.equal, divided, exact))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [15, 448.0, 0.3, -6])
def test_quotients_are_those_of_a_gpu(dtype: torch.dtype, number: float) -> None:
    x = values(dtype)
    with AsOnGpu():
        divided = x / number
    assert torch.equal(divided, (x.cuda() / number).cpu())


def divided_op(divide: Any) -> Op:
    """Return an operator that divides by 15, whose only variant is exact on a GPU."""

    def scaled(inputs: Inputs, _config: Any) -> Outputs:
        return {"y": inputs["x"].float() / torch.full((), 15.0, device=inputs["x"].device)}

    op = op_with("")
    return replace(
        op,
        reference=lambda inputs: {"y": divide(inputs["x"].float())},
        compare=lambda _case, _inputs, outputs, expected: same_bits("y", outputs["y"], expected["y"]),
        variants=(replace(op.variants[0], run=scaled),),
    )


def errors(op: Op) -> list[str]:
    case, (variant,) = Case("small", (("M", 7), ("N", 100)), "bfloat16"), op.variants
    return Checker(op, case, "cpu").run(variant, variant.default_config(case))[1]


def test_check_names_the_division_of_a_reference_that_an_exact_kernel_disagrees_with() -> None:
    divide = lambda x: x / 15  # noqa: E731
    _wrong, hint = errors(divided_op(divide))
    place = f"test_quotients.py:{divide.__code__.co_firstlineno}"
    expected = f"torch multiplies by the reciprocal of 15 on a GPU, {place}: divide by a tensor on the GPU for exact quotients"
    assert hint == expected
    assert len(errors(divided_op(lambda x: x / 15 + 1))) == 1, "the division is not the cause"


def test_check_passes_if_the_reference_divides_by_a_tensor() -> None:
    assert errors(divided_op(lambda x: x / torch.tensor(15.0))) == []
