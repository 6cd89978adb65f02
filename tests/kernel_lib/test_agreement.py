"""When two tensors agree."""

import pytest
import torch

from kerneltune.kernel_lib.agreement import close, same_bits, within_a_step

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("got", "want"), [(1.0, 1.0), (1.01, 1.0), (INF, INF), (-INF, -INF), (NAN, NAN)])
def test_close(got: float, want: float) -> None:
    assert close("y", torch.tensor([got]), torch.tensor([want]), 2e-2, 0.0) == []


@pytest.mark.parametrize(("got", "want"), [(1.1, 1.0), (0.0, INF), (-INF, INF), (INF, 1.0), (NAN, 1.0), (1.0, NAN), (NAN, INF)])
def test_not_close(got: float, want: float) -> None:
    (line,) = close("y", torch.tensor([2.0, got]), torch.tensor([2.0, want]), 2e-2, 0.0)
    assert line.startswith("y: 1 of 2 wrong, first at (1,): ")


@pytest.mark.parametrize(("got", "want"), [(1.0, 1.0), (2.0, 1.875), (-2.0, -1.875), (-0.0, 2.0**-9), (NAN, -NAN)])
def test_within_a_step(got: float, want: float) -> None:
    q, expected = (torch.tensor([value]).to(torch.float8_e4m3fn) for value in (got, want))
    assert within_a_step("y", q, expected) == []
    assert (same_bits("y", q, expected) == []) == (got == want or got != got)


@pytest.mark.parametrize(("got", "want"), [(1.0, 2.0), (1.0, -1.0), (448.0, NAN), (NAN, 448.0), (0.0, NAN)])
def test_further_than_a_step(got: float, want: float) -> None:
    q, expected = (torch.tensor([value]).to(torch.float8_e4m3fn) for value in (got, want))
    for compare in (within_a_step, same_bits):
        (line,) = compare("y", q, expected)
        assert line.startswith("y: 1 of 1 wrong")
