"""Launch a captured class again: make its arguments anew, launch a config; in the interpreter in a fork of this process.

A fork shares the memory of the arguments with this process, and nothing else that it writes, so that a kernel that crashes
costs its launch alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from kerneltune.adopt.arguments import Argument, Tensor, decode, joined, span, torch_dtype, views
from kerneltune.adopt.configs import config_index, live_config, stored_key
from kerneltune.adopt.folder import VALUES, LaunchClass
from kerneltune.adopt.kernel_import import ReplayError, live_kernel
from kerneltune.adopt.program import describe_error, is_interpreted
from kerneltune.forked import run_forked, shared_bytes

_BASE_ALIGNMENT = 256
_GUARD_BYTES = 1 << 16
"""Bytes behind each storage of a kernel without an autotuner, which a launch with too large blocks writes to."""


@dataclass(slots=True)
class Launch:
    """Arguments of a class, made anew.

    Attributes:
        named: arguments by name, in the kernel's order.
        storages: bytes of each storage, (bytes,) uint8.
        guard_bytes: bytes behind the arguments of each storage.
        state: contents that are restored before a launch; None if launches follow each other to be timed.
    """

    launch: LaunchClass
    named: dict[str, Any]
    storages: list[torch.Tensor]
    guard_bytes: int = 0
    state: "LaunchEffects | None" = None
    _prepared: dict[int, Callable[[], Any]] = field(default_factory=dict)

    def run(self, stored: Mapping[str, Any]) -> None:
        """Launch with a config, given as JSON, its pre_hook before it; in the interpreter in a process of its own.

        Raises:
            ForkCrashedError: the launch ended that process.
        """
        call = self._prepared.get(id(stored))
        if call is None:
            call = partial(self._prepare(stored), False)
            if is_interpreted() and not any(storage.is_cuda for storage in self.storages):
                call = partial(run_forked, call)
            self._prepared[id(stored)] = call
        call()

    def compile(self, stored: Mapping[str, Any]) -> Any:
        """Compile a config without launching it; returns Triton's compiled kernel."""
        return self._prepare(stored)(True)

    def _prepare(self, stored: Mapping[str, Any]) -> Callable[[bool], Any]:
        """Return a function that launches a config, or only compiles it."""
        import triton

        captured = self.launch
        autotuner = live_kernel(captured)
        grid = grid_of(captured, stored)
        config = live_config(config_index(autotuner.configs), stored, triton.Config)
        if config is None or grid is None:
            raise ReplayError(f"{captured.kernel.text}: no grid or pre_hook is known for {dict(stored)}")
        args = list(joined({a.name: self.named[a.name] for a in captured.arguments if a.is_positional}).values())
        kwargs = joined({a.name: self.named[a.name] for a in captured.arguments if not a.is_positional})
        options = config.all_kwargs()
        named, hook, run = {**joined(self.named), **options}, config.pre_hook, autotuner.fn.run
        given = {**kwargs, **options}  # of a kernel without an autotuner, the program gives the blocks, too

        def call(warmup: bool) -> Any:
            if hook is not None:
                hook(named)
            return run(*args, grid=grid, warmup=warmup, **given)

        return call


@dataclass(slots=True)
class LaunchEffects:
    """Results that every launch of a class must leave in its arguments.

    Attributes:
        before: contents of each storage before a launch; outputs that are overwritten as a whole are poisoned.
        written: arguments that a launch of the author's first config writes.
        expected: contents of arguments after a launch of that config, or the values of the author's reference; by argument.
        noise: relative difference between launches of it, root mean square, by argument.
        behind: contents of the guard of each storage after a launch of that config.
        has_reference: `expected` holds the values of the author's reference.
        tolerance: the author's relative and absolute tolerance for them; None for a tolerance by the element types.
    """

    before: list[torch.Tensor] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    behind: list[torch.Tensor] = field(default_factory=list)
    has_reference: bool = False
    tolerance: tuple[float, float] | None = None

    def restore(self, storages: Sequence[torch.Tensor]) -> None:
        """Put back what launches have changed."""
        for storage, before in zip(storages, self.before, strict=True):
            storage.copy_(before)


def grid_of(captured: LaunchClass, stored: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the captured grid of a config; None if the capture has no grid for it."""
    wanted = stored_key(stored)
    return next((one.grid for one in captured.candidates if stored_key(one.config) == wanted), None)


def make_launch(captured: LaunchClass, folder: Path, device: str, seed: int) -> Launch:
    """Make a class's arguments; indices as captured, data from its sample or statistics.

    On device `meta` without values.
    """
    storages = []
    guard_bytes = _GUARD_BYTES if captured.is_plain and device not in ("cpu", "meta") else 0  # the interpreter checks accesses
    kept = _read_values(folder / VALUES) if device != "meta" else {}
    for number, about in enumerate(captured.storages):
        tensors = views(captured.arguments, number)
        begin, end = span(tensors)
        if device == "meta":
            storages.append(torch.empty(_aligned(begin) + end - begin, dtype=torch.uint8, device=device))
            continue
        if about.get("kept") == "missing" and any(tensor.is_whole for tensor in tensors):
            raise ReplayError(f"{captured.label}: index values were not kept: capture again, with more --max-bytes")
        storages.append(_storage(kept.get(f"storage.{number}"), about, tensors, device, seed + number, guard_bytes))
    return Launch(captured, live_arguments(captured, storages), storages, guard_bytes)


def live_arguments(captured: LaunchClass, storages: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of a class by name, tensors as views of its storages."""
    return {a.name: _live(a, captured, storages) for a in captured.arguments}


def _aligned(begin: int) -> int:
    """Return where the first byte of a storage comes to lie, so that pointers are aligned as they were."""
    return begin % _BASE_ALIGNMENT


@cache
def _read_values(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        return {}
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except Exception as error:  # SafetensorError, OSError
        raise ReplayError(f"{path}: {describe_error(error)}") from error


def _storage(
    kept: torch.Tensor | None, about: Mapping[str, Any], tensors: Sequence[Tensor], device: str, seed: int, guard_bytes: int
) -> torch.Tensor:
    begin, end = span(tensors)
    count = end - begin
    size = _aligned(begin) + count + guard_bytes
    whole: torch.Tensor = shared_bytes(size) if device == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)
    values = whole[_aligned(begin) : _aligned(begin) + count]
    if kept is not None and kept.numel():
        sample = kept.to(device)
        repeats = -(-count // sample.numel())
        values.copy_(sample.repeat(repeats)[:count] if repeats > 1 else sample[:count])
    elif count and isinstance(about.get("statistics"), dict):
        values.copy_(_random(about["statistics"], tensors[0], count, seed).to(device))
    return whole


def _random(statistics: Mapping[str, Any], tensor: Tensor, count: int, seed: int) -> torch.Tensor:
    """Return bytes of normal values with the captured mean, deviation and limits."""
    kind = torch_dtype(tensor.dtype)
    elements = -(-count // tensor.element_bytes)
    generator = torch.Generator().manual_seed(seed)
    floats = torch.randn(elements, generator=generator) * float(statistics["std"]) + float(statistics["mean"])
    floats = floats.clamp(float(statistics["least"]), float(statistics["largest"])).to(kind)
    return floats.view(torch.uint8)[:count]


def _live(argument: Argument, captured: LaunchClass, storages: Sequence[torch.Tensor]) -> Any:
    if argument.tensor is None:
        return decode(argument.value)
    tensor = argument.tensor
    begin, _ = span(views(captured.arguments, tensor.storage))
    storage = storages[tensor.storage]
    offset = _aligned(begin) + tensor.offset - begin
    kind = torch_dtype(tensor.dtype)
    live = torch.empty(0, dtype=kind, device=storage.device)
    live.set_(storage.untyped_storage(), offset // tensor.element_bytes, tensor.shape, tensor.stride)
    if argument.kind == "descriptor":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(live, *map(list, argument.block))
    return live
