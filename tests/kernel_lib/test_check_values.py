"""Rows of inputs that show mistakes which normal values hide."""

import pytest
import torch

from kerneltune.kernel_lib.check_values import vary_rows


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
