"""Find and name mistakes that Triton users make, by a check without a GPU."""

import warnings

import pytest
import torch
import triton
import triton.language as tl
from planted_kernels import MISTAKES, op_with

from kerneltune.checking.addresses import address_errors
from kerneltune.checking.check import Checker
from kerneltune.interpreter.modes import strict
from kerneltune.spec import Case, Op

SMALL = Case("small", (("M", 7), ("N", 100)), "bfloat16")
LARGE = Case("large", (("M", 200_000), ("N", 20_000)), "bfloat16")

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="addresses are checked in Triton's interpreter")


def findings(op: Op) -> list[str]:
    """Run all configs twice on a small case, then check addresses of a large case."""
    checker, (variant,) = Checker(op, SMALL, "cpu"), op.variants
    reasons = [checker.check(variant, config, runs=2).reason for config in variant.configs(SMALL)]
    return [*filter(None, reasons), *address_errors(op, LARGE, variant, variant.default_config(LARGE))]


EXPECTED = {
    "off_by_one_mask": "two programs store different values to y_ptr: element 100 at (1, 0) of 7x100 bfloat16: program ",
    "missing_mask": "load outside of x_ptr: element 756 at (7, 0) of 7x100 bfloat16, program (6, 0, 0)",
    "wrong_stride": "y: 595 of 700 wrong, first at (1, 0): ",
    "wrong_cast": "y: ",
    "unwritten_tail": "y: 7 of 700 wrong, first at (0, 99): nan, expected ",
    "int32_overflow": "int32 overflow detected for operation mul, planted_kernels.py:",
    "swapped_axes": "store outside of y_ptr: element ",
    "wrong_scale": "y: 699 of 700 wrong, first at (0, 1): ",
    "nan_policy": "y: 1 of 700 wrong, first at (0, 0): -inf, expected nan",
    "atomics_without_reset": "run 2: rows: 1 of 1 wrong, first at (0,): 14, expected 7",
    "config_dependent": "y: 252 of 700 wrong, first at (0, 64): nan, expected ",
    "overwritten_input": "inputs: x was overwritten, and is no output",
    "out_of_bounds_read": "load outside of x_ptr: element 756 at (7, 0) of 7x100 bfloat16, program (6, 0, 0)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_names_a_planted_mistake(mistake: str) -> None:
    errors = findings(op_with(mistake))
    assert errors, errors
    assert errors[0].startswith(EXPECTED[mistake]), errors


def test_check_finds_nothing_in_a_right_kernel() -> None:
    assert findings(op_with("")) == []


def test_check_reports_unwritten_elements_as_such() -> None:
    assert findings(op_with("unwritten_tail"))[0].endswith(
        "7 are NaN, as elements that are never written, or loaded under a mask without `other`"
    )


def test_guarded_restores_the_interpreter() -> None:
    from triton.runtime import interpreter

    before = interpreter._implicit_cvt, interpreter._interpreter, interpreter.interpreter_builder.options
    with strict():
        assert interpreter._implicit_cvt is not before[0]
    assert before == (interpreter._implicit_cvt, interpreter._interpreter, interpreter.interpreter_builder.options)


@triton.jit
def _largest_of_nothing(x_ptr, y_ptr):
    zeros = tl.load(x_ptr + tl.arange(0, 16)) * 0.0
    tl.store(y_ptr, tl.max(zeros / zeros))


def test_guarded_values_of_meta_tensors_warn_of_nothing() -> None:
    x = torch.empty(16, device="meta")
    with strict(), warnings.catch_warnings():
        warnings.simplefilter("error")
        _largest_of_nothing[(1,)](x, x)
