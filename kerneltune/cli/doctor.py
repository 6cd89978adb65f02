"""`kerneltune doctor`: show the machine's versions, GPU, tools and folders, with the consequence of each missing part."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from kerneltune import device
from kerneltune.cache import default_root
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import show_table
from kerneltune.inspection.health import Finding, gpu_lines
from kerneltune.inspection.ncu import find_ncu
from kerneltune.records import grouped
from kerneltune.sweep_file import results_root
from kerneltune.wording import first_of

_NAMED = 2
"""Operators that a line names; the rest is counted."""
_DRIVER = Path("/proc/driver/nvidia/version")


def command(configs: o.Configs = None, results: o.Results = None) -> None:
    """Show versions, GPU, clocks, tools and folders, with the consequence of each missing part."""
    o.use_configs(configs)
    ncu = find_ncu()
    tool = Finding("ncu", str(ncu or "not found"), "" if ncu else "profile cannot run; nothing else needs it")
    rows = [*_software(), *_gpu(), tool, *peer_packages(), *_folders(results)]
    show_table(("what", "found", "means"), rows)


def _software() -> Iterator[Finding]:
    from importlib import metadata

    yield Finding("python", platform.python_version())
    for package in ("torch", "triton"):
        is_installed = importlib.util.find_spec(package) is not None
        version = metadata.version(package) if is_installed else "not installed"
        yield Finding(package, version, "" if is_installed else "no kernel can run")


def _gpu() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    build = torch.version.cuda or torch.version.hip
    yield Finding("torch build", build or "CPU only", "" if build else "no GPU can be used with this torch")
    gpu = device.current()
    if not gpu.is_gpu:
        interpreter_use = "set" if device.wants_interpreter() else "used, as no GPU is seen"
        yield Finding("GPU", "none", "no times: nothing can be tuned, measured or gated; compare shows recorded results")
        if _DRIVER.is_file():
            version = _DRIVER.read_text(encoding="utf-8").partition("\n")[0]
            yield Finding("NVIDIA driver", version, "TRITON_INTERPRET or this torch keeps it from being used")
        else:
            yield Finding("NVIDIA driver", "not loaded", "a GPU needs one; AMD's is not looked for")
        yield Finding("interpreter", interpreter_use, "check cases run on the CPU: correctness is checked, no timing")
        return
    yield Finding("GPU", f"{gpu.name}, {gpu.arch}, {gpu.sms} SMs")
    loss = "" if gpu.unit else "records cannot say on which GPU of this model they were made"
    yield Finding("GPU serial", gpu.unit or "not known", loss)
    yield Finding("driver", gpu.driver)
    free, total = torch.cuda.mem_get_info()
    yield Finding("free memory", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB", "larger cases are skipped")
    yield Finding("L2 cache", f"{gpu.l2_bytes / 1e6:.0f} MB")
    if torch.version.hip is None:
        yield from nvml_lines()


def nvml_lines() -> Iterator[Finding]:
    """Yield clocks, throttling and other processes of the GPU."""
    import pynvml

    try:
        yield from gpu_lines(pynvml, device.nvml_handle(), os.getpid())
    except pynvml.NVMLError as error:
        yield Finding("NVML", str(error), "clocks and throttling are unknown: a throttled round is not noticed")


def peer_packages() -> Iterator[Finding]:
    """List the packages that peers need, and for a missing package the peers that need it."""
    try:
        ops = loading.load_summaries()
    except ValueError as error:
        yield Finding("operators", "not usable", str(error))
        return
    needed = [(package, op.name) for op in ops.values() for variant in op.variants for package in variant.requires]
    for package, needs in grouped((pair for pair in needed if pair[0] != "torch"), lambda pair: pair[0]).items():
        users = dict.fromkeys(op for _, op in needs)
        if importlib.util.find_spec(package) is not None:
            yield Finding(f"peer {package}", "found")
        else:
            yield Finding(f"peer {package}", "not installed", f"left out of {first_of(users, _NAMED)}")


def _folders(results: Path | None) -> Iterator[Finding]:
    for name, folder, loss in (
        ("configs", default_root(), "tune cannot keep what it finds; set KERNELTUNE_CONFIGS"),
        ("results", results_root(results), "sweep cannot keep records; set KERNELTUNE_RESULTS"),
    ):
        try:
            loading.require_writable(folder)
            yield Finding(name, str(folder))
        except ValueError as error:
            yield Finding(name, str(error), loss)
