"""Let host code that is written for a GPU run on tensors of the CPU, or on tensors without memory.

Questions about the GPU are answered for the smallest slice of an H100 (MIG 1g.10gb), whose few SMs let persistent kernels loop in
small cases.
"""

import os
import re
import sys
from collections.abc import Callable
from functools import partialmethod
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kerneltune.interpreter.facts import note_here

_GPU = torch.device("cuda:0")
_IS_GPU = re.compile(r"cuda(:\d+)?")
_COPYING = {torch.tensor, torch.as_tensor, torch.Tensor.to, torch.Tensor.cuda}
"""Functions that copy values of the host to the GPU, and wait for it: pinned tensors are on the GPU's side here."""
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 MIG 1g.10gb", major=9, minor=0, total_memory=10 << 30, multi_processor_count=16, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
)  # fmt: skip
_ANSWERS: dict[str, Any] = {
    "current_device": 0, "get_device_capability": (9, 0), "get_device_name": _PROPERTIES.name,
    "get_device_properties": _PROPERTIES, "mem_get_info": (_PROPERTIES.total_memory, _PROPERTIES.total_memory),
    "set_device": None, "synchronize": None,
}  # fmt: skip
"""Functions of torch.cuda, and what they return without a GPU."""
_NO_HOST_CODE = tuple(
    f"{folder}{os.sep}"
    for name in ("kerneltune", "torch", "triton")
    if (spec := find_spec(name))
    for folder in spec.submodule_search_locations or ()
)
"""Folders whose code sees on which device a tensor is; to other code, tensors of a check are on a GPU."""
_QUEUES = "Event", "Stream", "current_stream", "default_stream", "stream"


class OnDevice(TorchFunctionMode):
    """Make tensors for a GPU on another device within `with`, also pinned tensors, and move them there."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.pin_memory:
            return args[0].to(self._device)
        if func is torch.Tensor.to and [*map(type, args[1:2])] == [int]:
            args = args[0], self._device, *args[2:]
        named = {name: self._moved(value) for name, value in (kwargs or {}).items()}
        if named.pop("pin_memory", False) or type(named.get("device")) is int:
            named["device"] = self._device
        result = args[0].to(self._device) if func is torch.Tensor.cuda else func(*map(self._moved, args), **named)
        is_copied = func in _COPYING and not any(getattr(value, "is_meta", False) for value in args[:1])
        if is_copied and self._device == "meta" and result.is_meta:
            note_here("copies")
        return result

    def _moved(self, value: Any) -> Any:
        return self._device if isinstance(value, str | torch.device) and _IS_GPU.fullmatch(str(value)) else value


def gpu_parts(device: str) -> dict[tuple[Any, str], Any]:
    """Return the functions of torch and Triton that are replaced while host code for a GPU runs on tensors of a device.

    These tensors say that they are on a GPU, and may be given to `torch.cuda.device`. Without a GPU, streams and events do
    nothing, and questions about the GPU have answers.
    """
    from triton.runtime.driver import driver
    from triton.runtime.interpreter import InterpreterBuilder

    has_gpu, of_gpu, of_tensor = torch.cuda.is_available(), torch.cuda.device.__init__, torch.Tensor.device

    def select(selection: Any, chosen: Any) -> None:
        if has_gpu and (isinstance(chosen, int) or _IS_GPU.fullmatch(str(chosen))):
            of_gpu(selection, chosen)
        else:
            selection.idx = selection.prev_idx = -1

    descriptor, run_backward = "create_make_tensor_descriptor", vars(torch.autograd)["_engine_run_backward"]

    def seen(tensor: torch.Tensor) -> torch.device:
        own = of_tensor.__get__(tensor)
        is_moved = own.type == device and torch._C._len_torch_function_stack() > 0  # else nothing moves what is made there
        return _GPU if is_moved and not sys._getframe(1).f_code.co_filename.startswith(_NO_HOST_CODE) else own

    def backward(*args: Any, **named: Any) -> Any:
        with OnDevice(device):  # torch leaves the mode before a function of its own, such as `backward`, runs
            return run_backward(*args, **named)

    parts: dict[tuple[Any, str], Any] = {
        (torch.autograd, "_engine_run_backward"): backward,
        (torch.Tensor, "device"): property(seen),
        (torch.Tensor, "get_device"): lambda tensor: 0 if tensor.is_cuda else -1,
        (torch.Tensor, "is_cuda"): property(lambda tensor: tensor.device.type in (device, "cuda")),
        (torch.Tensor, "record_stream"): lambda _tensor, _stream: None,
        (torch.cuda.device, "__init__"): select,
        (InterpreterBuilder, descriptor): partialmethod(_make_descriptor, getattr(InterpreterBuilder, descriptor)),
    }
    if not has_gpu:
        parts |= {(torch.cuda, name): lambda *_args, _answer=answer, **_named: _answer for name, answer in _ANSWERS.items()}
        parts |= {(torch.cuda, name): _Queue for name in _QUEUES}
        parts[torch, "Generator"] = _Generator
    try:
        assert driver.active  # a GPU's, or the driver of a process that compiles
    except RuntimeError:
        parts[type(driver), "active"] = property(lambda _holder: Driver(device))
    return parts


def _make_descriptor(builder: Any, make: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Make a tensor descriptor; note a fact if a kernel makes it without an allocator, which one of the host does not need."""
    from triton.runtime._allocation import NullAllocator, _allocator

    is_of_kernel = sys._getframe(2).f_code.co_name == "make_tensor_descriptor"  # of tl, which calls that of `semantic`
    if is_of_kernel and isinstance(_allocator.get(), NullAllocator):
        note_here("no allocator")
    return make(builder, *args, **named)


def nonzero_parts(device: str) -> dict[tuple[Any, str], Any]:
    """Return the settings of torch by which `nonzero` gives all elements of a tensor without memory; none for other tensors."""
    return {(torch._meta_registrations, "exp_config"): _NonzeroWithoutMemory()} if device == "meta" else {}


class _NonzeroWithoutMemory:
    """Stand for the settings of torch that its `nonzero` reads without memory, as `x[mask]` calls it, which waits for a GPU."""

    @property
    def meta_nonzero_assume_all_nonzero(self) -> bool:
        note_here("copies")
        return True


class _Generator(torch.Generator):
    """Stand for a generator of random numbers, also of a GPU."""

    def __new__(cls, device: object = None) -> "_Generator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _Queue:
    """Stand for a stream, an event, or the context of a stream: each call on a CPU ends before the next."""

    device, cuda_stream = "cuda:0", 0

    def __init__(self, *_args: object, **_named: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_args, **_named: self

    def __enter__(self) -> "_Queue":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Driver:
    """Stand for Triton's driver, and for its `utils`, where host code asks about the GPU."""

    def __init__(self, device: str = "meta") -> None:
        self._device, self.utils = device, self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, _PROPERTIES.warp_size)

    def get_active_torch_device(self) -> torch.device:
        return torch.device(self._device)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_device_properties(self, _device: int = 0) -> dict[str, int]:
        num_sms, shared = _PROPERTIES.multi_processor_count, _PROPERTIES.shared_memory_per_block_optin
        return {"multiprocessor_count": num_sms, "max_shared_mem": shared, "warpSize": _PROPERTIES.warp_size}
