"""Facts about the program that is captured or served: its GPU, its packages, whether a stream is being captured.

Asks the torch and triton that the program has loaded, and loads neither.
"""

import os
import sys
from functools import cache
from typing import Any

from kerneltune import device

LAUNCH_FAILURES = frozenset(("OutOfResources", "PTXASError", "CompilationError"))


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU."""
    triton = sys.modules.get("triton")
    knobs: Any = getattr(triton, "knobs", None)
    return bool(knobs.runtime.interpret) if knobs is not None else device.wants_interpreter()


def device_slug() -> str:
    """Return the GPU's name as a folder; `interpreter` where kernels are interpreted or there is no GPU."""
    torch: Any = sys.modules.get("torch")
    return device.INTERPRETER if torch is None or is_interpreted() else _slug_of_torch(torch)  # torch may be imported later


@cache
def _slug_of_torch(torch: Any) -> str:
    return device.slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else device.INTERPRETER


def early_device_slug() -> str:
    """Return the GPU's name as a folder without starting CUDA, which a program may not do before it forks; empty if unknown.

    Before CUDA is started, the driver's first GPU stands for the GPU that will be used.
    """
    torch: Any = sys.modules.get("torch")
    if is_interpreted() or (torch is not None and torch.cuda.is_initialized()):
        return device_slug()
    return _first_gpu()


@cache
def _first_gpu() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return device.slug(str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))))
    except Exception:  # no NVIDIA driver, or no GPU
        return ""


def version_of(module: str) -> str:
    """Return the version that a module's package gives itself; empty if it gives no version."""
    package = sys.modules.get(module.partition(".")[0])
    version = getattr(package, "__version__", "")
    return version if isinstance(version, str) else ""


def versions(module: str) -> dict[str, str]:
    """Return the versions of Python, of triton, of torch and of the package that holds a module."""
    packages = {"triton": version_of("triton"), "torch": version_of("torch"), "package": version_of(module)}
    return {"python": python_version(), **packages}


def import_folders() -> tuple[str, ...]:
    """Return the folders that the program imports from, without the folder of our start-up hook."""
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
    return tuple(dict.fromkeys(folder for folder in map(os.path.abspath, sys.path) if folder != own))


def python_version() -> str:
    """Return the version of Python whose bytecode this process has."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def is_capturing() -> bool:
    """Return whether the current CUDA stream is being captured into a graph."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def is_launch_failure(error: BaseException) -> bool:
    """Return whether an error says that this config cannot run here, so that another may."""
    return any(kind.__name__ in LAUNCH_FAILURES for kind in type(error).__mro__)
