"""When two tensors agree."""

import pytest
import torch

from kerneltune.kernel_lib.agreement import close

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("got", "want"), [(1.0, 1.0), (1.01, 1.0), (INF, INF), (-INF, -INF), (NAN, NAN)])
def test_close(got: float, want: float) -> None:
    assert close("y", torch.tensor([got]), torch.tensor([want]), 2e-2, 0.0) == []


@pytest.mark.parametrize(("got", "want"), [(1.1, 1.0), (0.0, INF), (-INF, INF), (INF, 1.0), (NAN, 1.0), (1.0, NAN), (NAN, INF)])
def test_not_close(got: float, want: float) -> None:
    (line,) = close("y", torch.tensor([2.0, got]), torch.tensor([2.0, want]), 2e-2, 0.0)
    assert line.startswith("y: 1 of 2 wrong, first at (1,): ")
