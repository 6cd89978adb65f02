"""Describe the device that kernels run on: a GPU's identity and limits, or Triton's interpreter.

Imports torch inside functions, so that the command line starts without torch.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

INTERPRETER = "interpreter"
SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "software thermal"}
"""Bits of NVML's clocks event reasons for heat and the power brake.

If a bit is set during a round of times, the round is repeated.
The power cap is not included: long kernels keep a GPU at its power cap all the time.
"""


@dataclass(frozen=True, slots=True)
class Device:
    """Describe a GPU model or the interpreter; two GPUs of a model are equal.

    Attributes:
        name: the driver's name of the model, for example `NVIDIA H200`.
        arch: `sm_90`, `gfx942`, … or `interpreter`.
        sms: SMs (compute units on AMD).
        l2_bytes: size of the last-level cache.
        driver: driver version.
        unit: digest of the GPU's serial identifier; empty if the driver gives none.
    """

    name: str
    arch: str
    sms: int
    l2_bytes: int
    driver: str
    unit: str = field(default="", compare=False)

    @property
    def slug(self) -> str:
        """Return the name as a folder: `nvidia_h200`."""
        return slug(self.name)

    @property
    def is_gpu(self) -> bool:
        """Return whether the device is a GPU; on the interpreter, correctness is checked without timing."""
        return self.name != INTERPRETER


PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    device: dict.fromkeys(("bfloat16", "float16"), half) | dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), eighth)
    for device, half, eighth in (
        ("NVIDIA H100 80GB HBM3", 989.4, 1978.9),
        ("NVIDIA H200", 989.4, 1978.9),
        ("NVIDIA B200", 2250.0, 4500.0),
    )
}
"""Device name -> element type -> TFLOP/s of the tensor cores as the data sheet gives them, without sparsity."""

ARCHITECTURES: Mapping[str, str] = {"nvidia_h100_80gb_hbm3": "sm_90", "nvidia_h200": "sm_90", "nvidia_b200": "sm_100"}
"""Folder of a GPU model -> architecture, for work on the model's files without a GPU."""

_UNIT_DIGITS = 12
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA's, WSL's and AMD's drivers, which exist even if a process may see no GPU."""

NO_GPU = Device(INTERPRETER, INTERPRETER, sms=4, l2_bytes=0, driver="none")


def slug(name: str) -> str:
    """Return the folder name of a device name."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def may_have_gpu() -> bool:
    """Return whether the operating system's kernel knows a GPU; do not import torch."""
    return any(map(os.path.exists, _DEVICE_FILES))


def has_gpu() -> bool:
    """Return whether torch sees a GPU; do not import torch if the operating system's kernel knows no GPU."""
    if not may_have_gpu():
        return False
    import torch

    return torch.cuda.is_available()


def wants_interpreter() -> bool:
    """Return whether TRITON_INTERPRET has a value that Triton takes for true, which turns the interpreter on."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def select_backend() -> None:
    """Turn Triton's interpreter on if no GPU is visible. Must be called before triton is imported."""
    if not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"


def require_gpu(command: str) -> None:
    """Raise ValueError where `command` has no GPU to run on."""
    if not current().is_gpu:
        raise ValueError(f"{command} needs a GPU: in the interpreter nothing can be timed")


@cache
def current() -> Device:
    """Return the device that kernels run on now: the interpreter if TRITON_INTERPRET is set or no GPU is visible."""
    if wants_interpreter() or not has_gpu():
        return NO_GPU
    import torch

    is_hip = torch.version.hip is not None
    if is_hip:
        driver = torch.version.hip
    else:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = gpu.gcnArchName.split(":")[0] if is_hip else f"sm_{gpu.major}{gpu.minor}"
    return Device(gpu.name, arch, gpu.multi_processor_count, gpu.L2_cache_size, str(driver), serial_digest(str(gpu.uuid)))


@cache
def model() -> str:
    """Return `current().name`, by NVML if NVML sees a single model, so that readers of records start without torch."""
    if wants_interpreter() or not os.path.exists(_DEVICE_FILES[0]) or os.environ.get("CUDA_VISIBLE_DEVICES"):
        return current().name
    return only_model() or current().name


@cache
def only_model() -> str:
    """Return the name of the GPUs that NVML sees; empty where NVML is missing, or sees none or several models."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        (name,) = {str(pynvml.nvmlDeviceGetName(handle)) for handle in handles}
    except Exception:  # of the driver, or of no single name
        return ""
    return name


def serial_digest(uuid: str) -> str:
    """Return the digest of a GPU's identifier, by which records tell GPUs apart; empty for an identifier of zeros."""
    uuid = uuid.removeprefix("GPU-")
    if not uuid.strip("0-"):
        return ""
    return hashlib.sha256(uuid.encode()).hexdigest()[:_UNIT_DIGITS]


@cache
def current_slug() -> str:
    """Return `current().slug`, the folder of this device's configs; the result is cached."""
    return current().slug


def arch_of(gpu: str) -> str:
    """Return the architecture of a GPU model by its folder; empty for an unknown model that is not the present device."""
    present = current()
    return present.arch if present.slug == gpu else ARCHITECTURES.get(gpu, "")


_SMS_COMPILED_FOR = 132


@cache
def sm_count(device_type: str, index: int | None) -> int:
    """Return the number of SMs of a torch device; for the CPU a small number, for the meta device a typical GPU's number."""
    if device_type == "meta":
        return _SMS_COMPILED_FOR
    if device_type != "cuda":
        return NO_GPU.sms
    import torch

    count: int = torch.cuda.get_device_properties(
        index if index is not None else torch.cuda.current_device()
    ).multi_processor_count
    return count


@cache
def versions() -> Mapping[str, str]:
    """Return the versions that a time depends on: of torch and triton."""
    import importlib.metadata  # because the import is slow and --help must be quick

    return {package: importlib.metadata.version(package) for package in ("torch", "triton")}


def nvml_handle() -> Any:
    """Return NVML's handle of the GPU that torch runs on now.

    NVML counts all GPUs of a host and ignores CUDA_VISIBLE_DEVICES: look a GPU up by its id, never by torch's index.

    Raises:
        pynvml.NVMLError: NVML is missing or does not know the GPU.
    """
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def slowed_down(reasons: int) -> bool:
    """Return whether these clocks event reasons of NVML require to repeat a round of times."""
    return any(reasons & bit for bit in SLOWDOWNS)
