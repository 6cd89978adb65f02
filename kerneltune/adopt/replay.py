"""Replay a captured class: find the live kernel, make its arguments anew, launch it.

The kernel's module is imported, so that hooks and heuristics are the author's.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from kerneltune.adopt import main_file
from kerneltune.adopt.arguments import Argument, Tensor, decode, joined, span, torch_dtype
from kerneltune.adopt.folder import VALUES, LaunchClass
from kerneltune.adopt.forked import run_forked, shared_bytes
from kerneltune.adopt.kernels import (
    KernelName,
    attribute,
    autotuner_of,
    bytecode_digest,
    config_index,
    configs_digest,
    jit_of,
    live_config,
    read_globals,
    source_digest,
    stored_key,
)
from kerneltune.adopt.program import is_interpreted, python_version
from kerneltune.adopt.spaces import OPTIONS, plain_tuner

_BASE_ALIGNMENT = 256
_GUARD_BYTES = 1 << 16
"""Bytes behind each storage of a kernel without an autotuner, which a launch with too large blocks writes to."""


class ReplayError(ValueError):
    """A class that cannot be replayed here; one line that says why."""


def live_kernel(captured: LaunchClass) -> Any:
    """Import a captured kernel's module and return its autotuner.

    Raises:
        ReplayError: there is none, or its source or a global that it reads has changed.
    """
    home, name = captured.home or captured.kernel, captured.kernel.text
    file = captured.home_file or captured.file
    held = vars(_module(home, file, captured.argv, captured.path))
    unwrap = jit_of if captured.is_plain else autotuner_of
    found = [one for one in map(unwrap, [attribute(held, home.name), *held.values()]) if one is not None]
    tuners = [_described(one, captured) if captured.is_plain else one for one in found]
    tuners = [tuner for tuner in tuners if tuner.base_fn.__qualname__ == captured.kernel.name]
    same = [one for one in tuners if bytecode_digest(one.base_fn) == captured.bytecode]
    is_other_bytecode = not same
    same = same or [one for one in tuners if source_digest(one.base_fn) == captured.source]
    if tuners and not same:
        raise ReplayError(f"{name}: its source has changed since it was captured: capture again")
    if not same:
        raise ReplayError(f"{name}: {file} does not autotune it here: set the environment variables of the program")
    present = read_globals(same[0].base_fn)
    for read, value in captured.globals.items():
        if present.get(read) != value:
            values = f"which was {value!r} when captured and is {present.get(read)!r} here"
            raise ReplayError(f"{name}: the kernel reads {read}, {values}")
    if is_other_bytecode and captured.versions.get("python") == python_version():  # another Python has other bytecode
        raise ReplayError(f"{name}: the file has several kernels of this name: give each a name of its own")
    return next((tuner for tuner in same if configs_digest(tuner.configs) == captured.configs), same[0])


def _described(kernel: Any, captured: LaunchClass) -> Any:
    """Return the autotuner that describes a kernel without an autotuner as the program launched it."""
    return plain_tuner(kernel, {name: captured.candidates[0].config.get(name) for name in OPTIONS}, captured.keys)


@cache
def _module(name: KernelName, file: str, argv: tuple[str, ...], folders: tuple[str, ...]) -> Any:
    """Import the module that holds a kernel, from the folders that the program imported from.

    Raises:
        ReplayError: the file is gone, or an import of it fails.
    """
    path, here = Path(file), str(Path.cwd())
    for folder in (*folders, here, str(path.parent) if path.is_relative_to(here) else ""):
        if folder and folder not in sys.path:
            sys.path.append(folder)
    if name.module == "__main__":
        if not path.is_file():
            raise ReplayError(f"{path}: the program's file is gone")
        return _imported(lambda: main_file.load(path, name.name), str(path), argv)
    return _imported(lambda: importlib.import_module(name.module), f"{name.module} ({file})", argv)


def _imported(load: Callable[[], Any], what: str, argv: Sequence[str]) -> Any:
    """Return the module that is loaded, with the program's arguments in sys.argv.

    Raises:
        ReplayError: it cannot be loaded.
    """
    before = sys.argv
    sys.argv = list(argv) or before
    try:
        with _first_configs():
            return load()
    except ModuleNotFoundError as error:
        raise ReplayError(f"{what}: {error}: set PYTHONPATH to the folders that the program imports from") from error
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise ReplayError(f"{what}: importing fails here: {said}") from error
    finally:
        sys.argv = before


@contextmanager
def _first_configs() -> Iterator[None]:
    """Have kernels that a module launches while it is imported run their first configs, where nothing can be timed."""
    from triton.runtime.autotuner import Autotuner  # in a fresh process nothing else has imported it

    before = Autotuner.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        config = kernel.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()})
        return kernel.fn.run(*args, **kwargs, **config.all_kwargs())

    if is_interpreted():
        Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = before


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
            LaunchCrashedError: the launch ended that process.
            ReplayError: the config has no grid, or cannot be made here.
        """
        call = self._prepared.get(id(stored))
        if call is None:
            call = partial(self._prepare(stored), False)
            if is_interpreted() and not any(storage.is_cuda for storage in self.storages):
                call = partial(run_forked, call)
            self._prepared[id(stored)] = call
        call()

    def compile(self, stored: Mapping[str, Any]) -> Any:
        """Compile a config without launching it; returns Triton's compiled kernel.

        Raises:
            ReplayError: the config has no grid, or cannot be made here.
        """
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


def grid_of(captured: LaunchClass, stored: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the captured grid of a config; None if the capture has no grid for it."""
    wanted = stored_key(stored)
    return next((one.grid for one in captured.candidates if stored_key(one.config) == wanted), None)


def make_launch(captured: LaunchClass, folder: Path, device: str, seed: int) -> Launch:
    """Make a class's arguments; indices as captured, data from its sample or statistics.

    On device `meta` without values.

    Raises:
        ReplayError: the index values were not kept, or the values' file is damaged.
    """
    storages = []
    guard_bytes = _GUARD_BYTES if captured.is_plain and device not in ("cpu", "meta") else 0  # the interpreter checks accesses
    kept = _read_values(folder / VALUES) if device != "meta" else {}
    for number, about in enumerate(captured.storages):
        tensors = [a.tensor for a in captured.arguments if a.tensor is not None and a.tensor.storage == number]
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
        raise ReplayError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:120]}") from error


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
    begin, _ = span([a.tensor for a in captured.arguments if a.tensor is not None and a.tensor.storage == tensor.storage])
    storage = storages[tensor.storage]
    offset = _aligned(begin) + tensor.offset - begin
    kind = torch_dtype(tensor.dtype)
    live = torch.empty(0, dtype=kind, device=storage.device)
    live.set_(storage.untyped_storage(), offset // tensor.element_bytes, tensor.shape, tensor.stride)
    if argument.kind == "descriptor":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(live, *map(list, argument.block))
    return live


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
