"""The device that kernels run on, and facts of other devices."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerneltune import device
from kerneltune.device import ARCHITECTURES, NO_GPU, PEAK_TFLOPS, Device


def properties(**changes: Any) -> SimpleNamespace:
    fields = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "L2_cache_size": 50 << 20,
        "uuid": "ab-1",
    }
    return SimpleNamespace(**fields | changes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch and NVML tell of a GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties())
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.1")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(device, "current", device.current.__wrapped__)


@pytest.mark.usefixtures("gpu")
def test_current_device_has_the_fields_of_torch_and_of_the_driver() -> None:
    here = device.current()
    assert here == Device("NVIDIA H200", "sm_90", 132, 50 << 20, "580.1")
    assert (here.slug, here.is_gpu, len(here.unit)) == ("nvidia_h200", True, 12)


@pytest.mark.usefixtures("gpu")
def test_current_device_of_amd_has_the_architecture_without_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    mi300 = properties(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: mi300)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    here = device.current()
    assert (here.arch, here.driver, here.slug) == ("gfx942", "6.4.1", "amd_instinct_mi300x")


def test_current_device_with_triton_interpret_set_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert device.current.__wrapped__() is NO_GPU
    assert not NO_GPU.is_gpu


@pytest.mark.parametrize(("has_gpu", "interpreted"), [(True, None), (False, "1")])
def test_backend_is_the_interpreter_without_a_gpu(
    has_gpu: bool, interpreted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(device, "has_gpu", lambda: has_gpu)
    device.select_backend()
    assert os.environ.get("TRITON_INTERPRET") == interpreted


def test_has_gpu_without_a_driver_is_false_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.os.path, "exists", lambda _path: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked torch"))
    assert not device.may_have_gpu()
    assert not device.has_gpu()


def test_serial_of_a_gpu_is_a_digest_that_differs_between_gpus() -> None:
    first, second = device.serial_digest("GPU-0a1b-2"), device.serial_digest("GPU-0a1b-3")
    assert first == device.serial_digest("0a1b-2")
    assert first != second
    assert len(first) == 12
    assert "0a1b" not in first
    assert device.serial_digest("GPU-00000000-0000") == ""


def test_arch_of_a_gpu_folder_is_known_without_the_gpu() -> None:
    assert device.arch_of("nvidia_b200") == "sm_100"
    assert device.arch_of(device.current().slug) == device.current().arch
    assert device.arch_of("nvidia_gtx_970") == ""
    assert {device.slug(name) for name in PEAK_TFLOPS} == set(ARCHITECTURES)


def test_sm_count_of_a_meta_tensor_is_132() -> None:
    assert device.sm_count("meta", None) == 132
    assert device.sm_count("cpu", None) == NO_GPU.sms


@pytest.mark.parametrize(("reasons", "slowed"), [(0, False), (0x4, False), (0x8, True), (0x20, True), (0x24, True)])
def test_slowed_down_counts_heat_and_power_brake_but_not_the_power_cap(reasons: int, slowed: bool) -> None:
    assert device.slowed_down(reasons) is slowed


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("names", "model"), [
    (["NVIDIA H200"] * 2, "NVIDIA H200"), (["NVIDIA H200", "NVIDIA A100"], "asked torch"), ([], "asked torch"),
])  # fmt: skip
@pytest.mark.parametrize("visible", ["", "1"])
def test_model_is_that_of_nvml_if_all_gpus_are_visible_and_alike(
    names: list[str], model: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = sys.modules["pynvml"]
    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: len(names), raising=False)
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", lambda index: index, raising=False)
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda index: names[index], raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties(name="asked torch"))
    monkeypatch.setattr(device.os.path, "exists", lambda _path: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(device, "only_model", device.only_model.__wrapped__)
    assert device.model.__wrapped__() == ("asked torch" if visible else model)


@pytest.mark.parametrize(("here", "refused"), [(NO_GPU, True), (Device("NVIDIA H200", "sm_90", 132, 50 << 20, "580.1"), False)])
def test_command_that_needs_a_gpu_is_refused_without_a_gpu_alone(
    here: Device, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "current", lambda: here)
    message = r"^tune needs a GPU: in the interpreter nothing can be timed$"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        device.require_gpu("tune")
