"""What rounds of times are held to: whose throttling they hear of, and how many input sets keep the L2 cold."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from kerneltune.measuring.rounds import throttled

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Two GPUs, of which CUDA_VISIBLE_DEVICES=1 shows torch the second as its first; the reasons of each, by its id."""
    reasons = {"GPU-one": 0, "GPU-two": 0}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="two"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: list(reasons)[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: reasons[handle])
    return reasons


def test_throttling_is_that_of_the_gpu_that_torch_uses(second_of_two: dict[str, int]) -> None:
    second_of_two["GPU-one"] = 0x20
    assert not throttled()
    second_of_two["GPU-two"] = 0x20
    assert throttled()


@pytest.mark.parametrize(
    ("reasons", "repeated"), [(0x0, False), (0x1, False), (0x4, False), (0x110, False), (0x8 | 0x80, True), (0x24, True)]
)
def test_heat_and_the_power_brake_spoil_a_round_and_the_power_cap_does_not(
    reasons: int, repeated: bool, second_of_two: dict[str, int]
) -> None:
    second_of_two["GPU-two"] = reasons
    assert throttled() == repeated


def test_without_nvml_nothing_is_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert not throttled()
