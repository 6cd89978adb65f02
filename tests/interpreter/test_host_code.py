"""Facts of host code that has no `if`."""

import os
from collections.abc import Callable

import pytest
import torch

from kerneltune.interpreter.facts import noting
from kerneltune.interpreter.host_code import noting_host


def texts(function: Callable[..., object], *arguments: object) -> set[str]:
    """Return the facts of a call of a function of this file."""
    with noting(passes_on=False) as facts, noting_host(os.path.dirname(__file__) + os.sep):
        function(*arguments)
    return {fact.text for fact in facts}


def short_and_odd(is_odd: bool, size: int, other: int) -> bool:
    return is_odd and (size <= 64 or size // 8 == other)


def least(is_cut: bool, size: int, _other: int) -> int:
    return min(size, 64) if is_cut else size // 128


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (short_and_odd, (False, 128, 16), set()),
        (short_and_odd, (True, 48, 6), {"`size <= 64` is True"}),
        (short_and_odd, (True, 128, 16), {"`size <= 64` is False", "`size // 8` is exact", "`size // 8 == other` is True"}),
        (least, (True, 128, 0), {"`min(size, 64)` is operand 2", "`is_cut` is True"}),
        (least, (False, 128, 0), {"`size // 128` is exact", "`is_cut` is False"}),
    ],
)
def test_limits_in_parts_that_python_does_not_reach_are_no_facts(
    function: Callable[..., object], arguments: tuple[object, ...], expected: set[str]
) -> None:
    assert texts(function, *arguments) == expected


def clamped(size: int, limit: int) -> torch.Tensor:
    x, tokens = torch.empty(size), torch.arange(5000)
    return tokens.clamp(0, len(x) - 1) + tokens.clamp(0, limit)


def test_clamp_to_a_length_is_no_limit_of_other_sizes() -> None:
    assert texts(clamped, 1024, 4000) == {"tokens.shape[0] - 1 > 4000 beside `tokens.clamp(0, limit)`"}
