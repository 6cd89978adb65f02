"""Integers rounded up."""

import pytest

from kerneltune.rounding import cdiv, next_power_of_2


@pytest.mark.parametrize(("n", "divisor", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (2**40 + 1, 2, 2**39 + 1)])
def test_cdiv_of_whole_numbers_rounds_up(n: int, divisor: int, expected: int) -> None:
    assert cdiv(n, divisor) == expected


@pytest.mark.parametrize(("n", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (17389, 32768)])
def test_next_power_of_2_of_a_power_is_the_power(n: int, expected: int) -> None:
    assert next_power_of_2(n) == expected
