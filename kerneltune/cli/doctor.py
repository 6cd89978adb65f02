"""`kerneltune doctor`: what this machine offers, and what each missing thing means for the numbers."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kerneltune.cli import options as o
from kerneltune.cli.console import show_table

Line = tuple[str, str, str]
_PEERS = {"liger_kernel": "Liger", "quack": "quack", "torchao": "torchao", "transformer_engine": "TransformerEngine"}
_HARMLESS_THROTTLE = 0x1  # NVML: the GPU is idle


def command(configs: o.Configs = None, results: o.Results = None) -> None:
    """Show versions, GPU, clocks, tools and folders, and what a missing one means."""
    show_table(("what", "found", "means"), [*_software(), *_gpu(), *_tools(), *_folders(configs, results)])


def _software() -> Iterator[Line]:
    import torch

    yield "python", platform.python_version(), ""
    for package in ("torch", "triton"):
        yield package, importlib.metadata.version(package), ""
    build = torch.version.cuda or torch.version.hip
    yield "torch build", build or "CPU only", "" if build else "no GPU can be used with this torch"


def _gpu() -> Iterator[Line]:
    from kerneltune import device

    here = device.current()
    if not here.is_gpu:
        seen = "set" if os.environ.get("TRITON_INTERPRET") == "1" else "used, as no GPU is seen"
        yield "GPU", "none", "no times: nothing can be tuned, measured or gated; compare shows recorded results"
        yield "interpreter", seen, "check cases run on the CPU: results are real, times do not exist"
        return
    import torch

    yield "GPU", f"{here.name}, {here.arch}, {here.sms} SMs", ""
    yield "driver", here.driver, ""
    free, total = torch.cuda.mem_get_info()
    yield "free memory", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB", "larger cases are skipped"
    yield "L2 cache", f"{here.l2_bytes / 1e6:.0f} MB", ""
    if torch.version.hip is None:
        yield from _nvml(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))


def _nvml(uuid: str) -> Iterator[Line]:
    """Clocks, throttling and other processes of the GPU with this id."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        yield from _state(pynvml, handle)
    except pynvml.NVMLError as error:
        yield "NVML", str(error), "clocks and throttling are unknown: a throttled round is not noticed"


def _state(nvml: Any, handle: Any) -> Iterator[Line]:
    clock, highest = (get(handle, nvml.NVML_CLOCK_SM) for get in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo))
    yield "SM clock", f"{clock} of at most {highest} MHz", "not locked: compare only what is measured interleaved"
    yield "memory clock", f"{nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)} MHz", ""
    yield "temperature", f"{nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)} °C", ""
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & ~_HARMLESS_THROTTLE
    yield "throttled", f"reasons {reasons:#x}" if reasons else "no", "times are too long now" if reasons else ""
    others = [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid != os.getpid()]
    yield (
        "other processes",
        ", ".join(map(str, others)) or "none",
        "they share the GPU: times are not to be trusted" if others else "",
    )


def _tools() -> Iterator[Line]:
    yield (
        "ncu",
        shutil.which("ncu") or "not on PATH",
        "" if shutil.which("ncu") else "no hardware counters; nothing else needs it",
    )
    for package, name in _PEERS.items():
        found = importlib.util.find_spec(package) is not None
        yield f"peer {name}", "found" if found else "not installed", "" if found else "left out of the comparison"


def _folders(configs: Path | None, results: Path | None) -> Iterator[Line]:
    for name, folder, loss in (
        ("configs", o.configs_root(configs), "tune cannot keep what it finds; set KERNELTUNE_CONFIGS"),
        ("results", o.results_root(results), "sweep cannot keep records; set KERNELTUNE_RESULTS"),
    ):
        try:
            o.require_writable(folder)
            yield name, str(folder), ""
        except ValueError as error:
            yield name, str(error), loss
