"""A Triton driver for a GPU that is not there: kernels are compiled for it, a launch goes to what the caller gives.

Imports torch and triton, and nothing of kerneltune: `inspection.launches` loads it beside the package of another revision.
"""

from collections.abc import Callable
from typing import Any


def dry_driver(backend: str, arch: int | str, warp_size: int, utils: Any, launcher: Callable[[Any, Any], Any]) -> Any:
    """Make a Triton driver that compiles for a target without having its GPU.

    Args:
        utils: has `get_device_properties` and `load_binary`, as Triton calls them.
        launcher: (source, metadata of a compiled kernel) -> what is called to launch it.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class DryDriver(DriverBase):
        """Compiles for one target and launches nothing."""

        def __init__(self) -> None:
            self.utils = utils

        @classmethod
        def is_active(cls) -> bool:
            return True

        def launcher_cls(self, source: Any, metadata: Any) -> Any:
            return launcher(source, metadata)

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(backend, arch, warp_size)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("meta")

        def get_benchmarker(self) -> Any:
            raise RuntimeError("nothing can be timed while compiling")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int = 0) -> int:
            return 0

    return DryDriver()
