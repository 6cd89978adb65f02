"""Rows of inputs that show mistakes which normal values hide."""

import pytest
import torch

from kerneltune.kernel_lib.check_values import kind_of_row, vary_rows


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_constant_rows_have_a_scale_that_is_a_power_of_two(largest: float) -> None:
    """A quantizer that rounds scales up to powers of two must not double an exact power."""
    rows = vary_rows(torch.randn(16, 64, dtype=torch.bfloat16))
    for row in (1, 9):
        assert rows[row].unique().numel() == 1
        assert float(torch.frexp(rows[row, 0].float() / largest).mantissa) == 0.5


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_rows_without_elements_stay_empty(shape: tuple[int, ...]) -> None:
    assert vary_rows(torch.empty(shape)).shape == shape


def test_kinds_name_the_rows_of_vary_rows_alone() -> None:
    kinds = [
        "",
        "equal values",
        "tiny values",
        "values far from 0",
        "negative values",
        "large values",
        "zeros",
        "",
        "",
        "equal values",
    ]
    signed, positive = vary_rows(torch.randn(2, 5, 8)), vary_rows(torch.rand(10, 8))
    assert [kind_of_row(signed, row) for row in range(10)] == kinds
    assert kind_of_row(positive, 4) == kind_of_row(torch.randn(10, 8), 1) == kind_of_row(torch.ones(1, 8), 0) == ""
