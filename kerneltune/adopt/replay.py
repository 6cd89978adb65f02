"""Replay one captured class: the live kernel, its arguments made anew, and what its launch writes.

The kernel's module is imported, so that hooks and heuristics are the real ones.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kerneltune.adopt import main_file
from kerneltune.adopt.arguments import Argument, Tensor, decode, is_descriptor, span, torch_dtype
from kerneltune.adopt.folder import VALUES, LaunchClass
from kerneltune.adopt.kernels import KernelName, bytecode_digest, configs_digest, live_config, source_digest, stored_key

_BASE_ALIGNMENT = 256


class ReplayError(ValueError):
    """A class that cannot be replayed here; one line that says why."""


def live_kernel(captured: LaunchClass) -> Any:
    """Import a captured kernel's module and return its autotuner.

    Raises:
        ReplayError: there is none, or its source has changed.
    """
    return _live_kernel(captured.kernel, captured.file, captured.source, captured.bytecode, captured.configs)


@cache
def _live_kernel(name: KernelName, file: str, source: str, bytecode: str, configs: str) -> Any:
    module = _module(name, file)
    found = [value for value in [_walk(module, name.name), *vars(module).values()] if value is not None]
    tuners = [tuner for tuner in map(_autotuner, found) if tuner is not None and tuner.base_fn.__qualname__ == name.name]
    same = [one for one in tuners if bytecode_digest(one.base_fn) == bytecode or source_digest(one.base_fn) == source]
    if tuners and not same:
        raise ReplayError(f"{name.text}: its source has changed since it was captured: capture again")
    if not same:
        raise ReplayError(f"{name.text}: no autotuned kernel of this name in its module")
    return next((tuner for tuner in same if configs_digest(tuner.configs) == configs), same[0])


def _module(name: KernelName, file: str) -> Any:
    path, here = Path(file), str(Path.cwd())
    if name.module == "__main__":
        return _main_module(path, name.name)
    for folder in (here, str(path.parent) if path.is_relative_to(here) else ""):
        if folder and folder not in sys.path:
            sys.path.append(folder)
    try:
        return importlib.import_module(name.module)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise ReplayError(f"{name.text}: its module cannot be imported ({said}); it was {file}: set PYTHONPATH") from error


@cache
def _main_module(path: Path, kernel: str) -> Any:
    """Load what a kernel of the program's own file needs.

    Raises:
        ReplayError: the file is gone, or what it needs fails.
    """
    if not path.is_file():
        raise ReplayError(f"{path}: the program's file is gone")
    try:
        return main_file.load(path, kernel)
    except (Exception, SystemExit) as error:
        raise ReplayError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:150]}") from error


def _walk(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _autotuner(value: Any) -> Any:
    """Return the autotuner that an object is or wraps, None where there is none."""
    autotuning: Any = sys.modules.get("triton.runtime.autotuner")
    seen = 0
    while autotuning is not None and value is not None and seen < 16 and not inspect.isfunction(value):
        if isinstance(value, autotuning.Autotuner):
            return value
        value, seen = getattr(value, "fn", None), seen + 1
    return None


@dataclass(slots=True)
class Launch:
    """Arguments of a class, made anew.

    Attributes:
        named: arguments by name, in the kernel's order.
        storages: bytes of each storage, (bytes,) uint8.
        state: what is restored before a launch; None where launches follow each other as they are, to be timed.
    """

    launch: LaunchClass
    named: dict[str, Any]
    storages: list[torch.Tensor]
    state: "LaunchEffects | None" = None
    _prepared: dict[int, Callable[[bool], Any]] = field(default_factory=dict)

    def run(self, stored: Mapping[str, Any]) -> None:
        """Launch with a config, given as JSON, its pre_hook before it.

        Raises:
            ReplayError: the config has no grid, or cannot be made here.
        """
        call = self._prepared.get(id(stored))
        if call is None:
            call = self._prepared[id(stored)] = self._prepare(stored)
        call(False)

    def compile(self, stored: Mapping[str, Any]) -> Any:
        """Compile a config without launching it; returns Triton's compiled kernel.

        Raises:
            ReplayError: the config has no grid, or cannot be made here.
        """
        return self._prepare(stored)(True)

    def _prepare(self, stored: Mapping[str, Any]) -> Callable[[bool], Any]:
        """Return what launches a config, or compiles it only where it is told so."""
        captured = self.launch
        autotuner = live_kernel(captured)
        grid = grid_of(captured, stored)
        autotuning: Any = sys.modules["triton.runtime.autotuner"]
        config = live_config(autotuner.configs, stored, autotuning.Config)
        if config is None or grid is None:
            raise ReplayError(f"{captured.kernel.text}: no grid or pre_hook is known for {dict(stored)}")
        args = [self.named[a.name] for a in captured.arguments if a.is_positional]
        kwargs = {a.name: self.named[a.name] for a in captured.arguments if not a.is_positional}
        options = config.all_kwargs()
        named, hook, run = {**self.named, **options}, config.pre_hook, autotuner.fn.run

        def call(warmup: bool) -> Any:
            if hook is not None:
                hook(named)
            return run(*args, grid=grid, warmup=warmup, **kwargs, **options)

        return call


def grid_of(captured: LaunchClass, stored: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the captured grid of a config, None where there is none."""
    wanted = stored_key(stored)
    return next((one.grid for one in captured.candidates if stored_key(one.config) == wanted), None)


def make_launch(captured: LaunchClass, folder: Path, device: str, seed: int) -> Launch:
    """Make a class's arguments; whole numbers as captured, others from their sample or statistics.

    On device `meta` without values.

    Raises:
        ReplayError: the index values were not kept, or the values' file is damaged.
    """
    storages = []
    kept = _read_values(folder / VALUES) if device != "meta" else {}
    for number, about in enumerate(captured.storages):
        tensors = [a.tensor for a in captured.arguments if a.tensor is not None and a.tensor.storage == number]
        begin, end = span(tensors)
        if device == "meta":
            storages.append(torch.empty(_aligned(begin) + end - begin, dtype=torch.uint8, device=device))
            continue
        if about.get("kept") == "missing" and any(tensor.is_whole for tensor in tensors):
            raise ReplayError(f"{captured.label}: index values were not kept: capture again, with more --max-bytes")
        storages.append(_storage(kept.get(f"storage.{number}"), about, tensors, device, seed + number))
    return Launch(captured, {a.name: _live(a, captured, storages) for a in captured.arguments}, storages)


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
    except Exception as error:  # SafetensorError and what the system raises
        raise ReplayError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:120]}") from error


def _storage(
    kept: torch.Tensor | None, about: Mapping[str, Any], tensors: Sequence[Tensor], device: str, seed: int
) -> torch.Tensor:
    begin, end = span(tensors)
    count = end - begin
    whole = torch.zeros(_aligned(begin) + count, dtype=torch.uint8, device=device)
    values = whole[_aligned(begin) :]
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
    """What a launch writes, learned by launching the author's first config.

    Attributes:
        before: what each storage holds before a launch, written ones only; outputs that are overwritten as a whole are poisoned.
        written: arguments that the launch changes.
        expected: what they hold after a launch of the author's first config.
        noise: relative difference between launches of it, root mean square, by argument.
    """

    before: dict[int, torch.Tensor] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)

    def restore(self, storages: Sequence[torch.Tensor]) -> None:
        """Put back what launches have changed."""
        for number, before in self.before.items():
            storages[number].copy_(before)


def learn(launch: Launch, stored: Mapping[str, Any]) -> LaunchEffects:
    """Launch the author's first config several times; returns what it writes and how much that varies.

    Arguments that its launch overwrites whatever they held are poisoned from then on.
    """
    captured = launch.launch
    first = [storage.clone() for storage in launch.storages]
    launch.run(stored)
    _wait(launch)
    changed = {number for number, storage in enumerate(launch.storages) if not torch.equal(storage, first[number])}
    state = LaunchEffects({number: first[number] for number in changed})
    names = [a.name for a in captured.arguments if a.tensor is not None and a.tensor.storage in changed]
    once = {name: _tensor_of(launch.named[name]).clone() for name in names}
    state.written = [name for name in names if _was_written(launch, name, first)]
    state.expected = {name: once[name] for name in state.written}
    for _ in range(2):
        state.restore(launch.storages)
        launch.run(stored)
        _wait(launch)
        for name in state.written:
            rms, _ = difference(state.expected[name], _tensor_of(launch.named[name]))
            state.noise[name] = max(state.noise.get(name, 0.0), rms)
    _poison(launch, state, stored)
    state.restore(launch.storages)
    _use_reference(launch, state)
    return state


def _use_reference(launch: Launch, state: LaunchEffects) -> None:
    """Have results held against the author's reference where the decorator was given one.

    Raises:
        ReplayError: the reference fails, or gives no value for an argument that the kernel writes.
    """
    captured = launch.launch
    autotuner = live_kernel(captured)
    reference = getattr(autotuner, "kerneltune_reference", None)
    if reference is None:
        return
    try:
        expected = dict(reference(dict(launch.named)))
    except Exception as error:  # the author's own code
        raise ReplayError(f"{captured.kernel.text}: reference: {type(error).__name__}: {error}") from error
    for name in state.written:
        if name not in expected:
            raise ReplayError(f"{captured.kernel.text}: reference: no value for {name}, which the kernel writes")
        like = state.expected[name]
        state.expected[name] = expected[name].to(like.dtype).reshape(like.shape)


def _was_written(launch: Launch, name: str, first: Sequence[torch.Tensor]) -> bool:
    argument = next(a for a in launch.launch.arguments if a.name == name)
    before = _tensor_of(_live(argument, launch.launch, first))
    return not torch.equal(_bytes(before), _bytes(_tensor_of(launch.named[name])))


def _poison(launch: Launch, state: LaunchEffects, stored: Mapping[str, Any]) -> None:
    """Poison each written storage whose content before the launch does not matter."""
    kept = launch.launch.storages
    for number, before in list(state.before.items()):
        if kept[number].get("kept") == "values":
            continue
        state.before[number] = torch.full_like(before, 0xFF)  # NaN in every floating-point type
        state.restore(launch.storages)
        try:
            launch.run(stored)
            _wait(launch)
        except RuntimeError:
            state.before[number] = before
            raise
        if any(differences(launch, state)):
            state.before[number] = before
        launch.storages[number].copy_(before)


def differences(launch: Launch, state: LaunchEffects) -> list[str]:
    """Return one line for each written argument that disagrees with the author's first config."""
    found = []
    for name in state.written:
        text = disagreement(state.expected[name], _tensor_of(launch.named[name]), state.noise.get(name, 0.0), launch.launch)
        if text:
            found.append(f"{name}: {text}")
    return found


_NOISE_FACTOR = 4.0
_ROUNDINGS = 1.0
_LARGEST_ROUNDINGS = 8.0
_LEAST_EPSILON = 2.0**-14
"""Of float32 results: products in TF32 and sums in another order differ by more than float32 rounds."""


def disagreement(expected: torch.Tensor, found: torch.Tensor, noise: float, captured: LaunchClass) -> str:
    """Return how far two results differ beyond noise and rounding; empty where they agree.

    Rounding is that of the coarsest element type among the kernel's floating-point arguments: configs that sum in another order
    differ by as much.
    """
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = int((expected != found).sum())
        return f"{wrong} of {expected.numel()} whole numbers differ" if wrong and not noise else ""
    if bool((torch.isnan(expected.float()) != torch.isnan(found.float())).any()):
        return "NaN in other places"
    rms, largest = difference(expected, found)
    epsilon = _epsilon(expected, captured)
    allowed = max(_NOISE_FACTOR * noise, _ROUNDINGS * epsilon)
    allowed_largest = max(8 * _NOISE_FACTOR * noise, _LARGEST_ROUNDINGS * epsilon)
    if rms <= allowed and largest <= allowed_largest:
        return ""
    return (
        f"differs by {rms:.2e} (root mean square, allowed {allowed:.2e}), at most {largest:.2e} (allowed {allowed_largest:.2e})"
    )


def difference(expected: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """Return the root mean square and the largest difference, relative to the expected values' own."""
    if expected.numel() == 0:
        return 0.0, 0.0
    a, b = (torch.nan_to_num(t.float(), nan=0.0, posinf=3e38, neginf=-3e38) for t in (expected, found))
    apart = (a - b).abs()
    scale, peak = float(a.double().square().mean().sqrt()), float(a.abs().max())
    rms, largest = float(apart.double().square().mean().sqrt()), float(apart.max())
    return (rms / scale if scale else rms), (largest / peak if peak else largest)


def _epsilon(expected: torch.Tensor, captured: LaunchClass) -> float:
    """Return the rounding of a result: of its own type, or of a 16-bit type among the arguments, which kernels compute in."""
    kinds = {torch_dtype(name) for name in captured.dtypes}
    inside = [torch.finfo(kind).eps for kind in kinds & {torch.bfloat16, torch.float16}]
    return float(max(torch.finfo(expected.dtype).eps, _LEAST_EPSILON, *inside))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else tensor.reshape(-1).view(torch.uint8)


def _tensor_of(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.base if is_descriptor(value) else value
    return tensor


def _wait(launch: Launch) -> None:
    if any(storage.is_cuda for storage in launch.storages):
        torch.cuda.synchronize()
