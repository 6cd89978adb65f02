"""On which GPU an operator's function runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerneltune.kernel_lib import launch


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Show two GPUs, of which the first is the current one; return the devices that are made current."""
    seen: list[torch.device] = []

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        seen.append(where)
        yield

    monkeypatch.setattr(launch, "several_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    return seen


def on(where: str) -> Any:
    return SimpleNamespace(device=torch.device(where))


@launch.on_its_device
def named(x: Any, scale: float = 1.0) -> float:
    """Return twice x."""
    return 2 * scale


@pytest.mark.parametrize("first", [on("cuda:1"), [on("cuda:1"), on("cuda:0")], (on("cuda:1"),)])
def test_call_with_a_tensor_on_another_gpu_makes_that_gpu_current(entered: list[torch.device], first: Any) -> None:
    assert named(first, scale=3.0) == 6.0
    assert named(x=first) == 2.0
    assert entered == [torch.device("cuda:1")] * 2


@pytest.mark.parametrize("first", [on("cuda:0"), on("cpu"), on("meta"), [], 7])
def test_call_with_tensors_of_the_current_gpu_changes_no_device(entered: list[torch.device], first: Any) -> None:
    assert named(first) == 2.0
    assert entered == []
    assert named.__doc__ == "Return twice x."


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernel_runs_on_the_gpu_of_its_tensors() -> None:
    from kerneltune.ops.rmsnorm import rmsnorm_fwd

    x = torch.randn(64, 1024, device="cuda:1", dtype=torch.bfloat16)
    y = rmsnorm_fwd(x, torch.ones_like(x[0])).y
    assert torch.cuda.current_device() == 0
    assert y.device == x.device
    expected = torch.nn.functional.rms_norm(x.float(), (1024,), eps=1e-6)
    assert torch.allclose(y.float(), expected, rtol=2e-2, atol=2e-2)
