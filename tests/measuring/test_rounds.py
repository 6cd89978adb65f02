"""Rounds of times: throttling of the right GPU, and numbers of input sets that keep the L2 cold."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from kerneltune.measuring.rounds import POLICIES, num_input_sets, throttled, why_no_graph

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Show two GPUs, the second as torch's first, as CUDA_VISIBLE_DEVICES=1 does; return the throttle reasons by the GPU's id."""
    reasons = {"GPU-one": 0, "GPU-two": 0}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="two"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: list(reasons)[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: reasons[handle])
    return reasons


def test_throttled_is_that_of_the_gpu_that_torch_uses(second_of_two: dict[str, int]) -> None:
    second_of_two["GPU-one"] = 0x20
    assert not throttled()
    second_of_two["GPU-two"] = 0x20
    assert throttled()


@pytest.mark.parametrize(
    ("reasons", "repeated"), [(0x0, False), (0x1, False), (0x4, False), (0x110, False), (0x8 | 0x80, True), (0x24, True)]
)
def test_throttled_by_heat_or_power_brake_but_not_by_the_power_cap(
    reasons: int, repeated: bool, second_of_two: dict[str, int]
) -> None:
    second_of_two["GPU-two"] = reasons
    assert throttled() == repeated


def test_throttled_without_nvml_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert not throttled()


L2, FREE = 62_914_560, 140 << 30
COLD = POLICIES["cold"]


@pytest.mark.parametrize(
    ("set_bytes", "sets"),
    [(1_547_737, 164), (2_144_384, 119), (67_117_056, 5), (251_658_239, 3), (251_658_240, 2), (1 << 34, 2), (100_000, 2518)],
)
def test_rotation_of_input_sets_exceeds_four_times_the_l2(set_bytes: int, sets: int) -> None:
    """Records of the H200 were measured with the first six."""
    assert num_input_sets(COLD, set_bytes, L2, FREE) == sets
    assert sets * set_bytes > 4 * L2
    assert num_input_sets(POLICIES["eager"], set_bytes, L2, FREE) == sets
    assert num_input_sets(POLICIES["hot"], set_bytes, L2, FREE) == 1


def test_rotation_with_little_memory_has_one_set_above_four_times_the_l2() -> None:
    assert num_input_sets(COLD, 1 << 20, L2, 482 << 20) == 241  # four times the L2 is 240 MiB
    assert num_input_sets(COLD, 1 << 20, L2, 481 << 20) == 240
    assert num_input_sets(COLD, 1 << 30, L2, 1 << 30) == 1  # it pushes itself out
    with pytest.raises(
        ValueError, match=r"^a cold L2 takes 240 input sets of 1,048,576 bytes, half of the free memory holds 239: "
    ):
        num_input_sets(COLD, 1 << 20, L2, 479 << 20)
    assert num_input_sets(POLICIES["hot"], 1 << 20, L2, 479 << 20) == 1


def test_rotation_of_a_case_too_small_for_a_cold_l2_raises() -> None:
    assert num_input_sets(COLD, 30_721, L2, FREE) == 8193
    with pytest.raises(ValueError, match=r"^a cold L2 takes 61,440 input sets of 4,096 bytes, more than 8,192: only policy hot"):
        num_input_sets(COLD, 4096, L2, FREE)


def test_failed_capture_is_told_by_the_call_that_no_graph_can_hold() -> None:
    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be reported later")

    line = waits.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError, match="previous error") as failed:
        try:
            waits()
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    cause = "RuntimeError: operation not permitted when stream is capturing"
    assert why_no_graph(failed.value) == (
        f'test_rounds.py:{line}: no CUDA graph can hold it, policy="eager" times each launch: {cause}'
    )
