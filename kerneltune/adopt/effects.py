"""Learn from the author's first config which results a launch writes, and compare the results of other configs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kerneltune.adopt.arguments import is_descriptor, torch_dtype, with_tuples
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.replay import Replay, ReplayError, live_arguments, live_kernel
from kerneltune.checking.check import have_same_bits
from kerneltune.errors import first_line, place_of
from kerneltune.kernel_lib.agreement import close, leaning, within_a_step
from kerneltune.kernel_lib.check_values import LARGE, vary_rows


def learn(replay: Replay, stored: StoredConfig) -> list[str]:
    """Launch the author's first config several times; note its results and how much they vary, and return the written arguments.

    An argument is written if a launch changes the captured values, or filled values in their place. An argument whose old values
    do not change the results is poisoned before all later launches.
    """
    kernel = live_kernel(replay.launch_class)
    reference = getattr(kernel, "kerneltune_reference", None)
    if reference is not None:
        _vary(replay, large=1.0)  # a large row would hide differences elsewhere: they are relative to all elements
    replay.before = [storage.clone() for storage in replay.storages]
    _run(replay, stored)
    changed = _changed(replay)
    results = {name: tensor.clone() for name, tensor in _tensors(replay.named).items()}
    changed |= _hidden_writes(replay, stored, changed)
    replay.expected = {name: results[name] for name in results if name in changed}
    written = list(replay.expected)
    for _ in range(2):
        _run(replay, stored)
        for name, tensor in results_of(replay).items():
            rms, _largest = relative_difference(replay.expected[name], tensor)
            replay.noise[name] = max(replay.noise.get(name, 0.0), rms)
    _poison(replay, stored, written)
    if any(replay.guard_bytes):
        _note_guards(replay, stored)
    replay.restore()
    if reference is not None:
        replay.expected |= _reference_values(replay, reference, written)
        replay.has_reference = True
        replay.tolerance = getattr(kernel, "kerneltune_tolerance", None)
        if not any(storage.is_cuda for storage in replay.storages):
            replay.overflows = _overflows(replay, stored, reference, written)
    first = replay.launch_class.candidate(stored)
    is_launched = first is None or first.grid is None or 0 not in first.grid
    if not replay.expected and is_launched and any(map(torch.numel, _tensors(replay.named).values())):
        raise ReplayError(f"{replay.launch_class.kernel.text}: the author's first config changes no argument: nothing to compare")
    return written


def _note_guards(replay: Replay, stored: StoredConfig) -> None:
    """Note what a launch leaves behind the arguments, and how much it varies between two launches."""
    _run(replay, stored)
    replay.guard_contents = [guard.clone() for guard in replay.guards(replay.storages)]
    _run(replay, stored)
    pairs = zip(replay.guard_contents, replay.guards(replay.storages), strict=True)
    replay.guard_noise = [0.0 if _has_same_bytes(*pair) else relative_difference(*pair)[0] for pair in pairs]


def _run(replay: Replay, stored: StoredConfig) -> None:
    """Restore the storages, launch a config and wait for it."""
    replay.restore()
    replay.run(stored)
    if any(storage.is_cuda for storage in replay.storages):
        torch.cuda.synchronize()


def _earlier(replay: Replay) -> dict[str, torch.Tensor]:
    """Return the tensors among the arguments as they are before a launch."""
    return _tensors(live_arguments(replay.launch_class, replay.before or ()))


def _changed(replay: Replay) -> set[str]:
    """Return the arguments that hold other bytes than before."""
    earlier = _earlier(replay)
    return {name for name, tensor in _tensors(replay.named).items() if not have_same_bits(tensor, earlier[name])}


_POISON = 0xFF
"""Bytes that make NaN in every floating-point type."""
_LEAST_FILL, _FILLS = 0x31, 16
"""First of the bytes that make small positive values in every floating-point type, and the number of these bytes."""


def _hidden_writes(replay: Replay, stored: StoredConfig, changed: set[str]) -> set[str]:
    """Return the arguments that a launch writes with the bytes that they held already, such as zeros over zeros.

    To find them, each storage of floating-point values that did not change is filled with another value before a launch. Whole
    numbers stay, because they may be indices.
    """
    storages = {a.name: a.tensor.storage for a in replay.launch_class.arguments if a.tensor is not None}
    changed_storages = {storages[name] for name in changed}
    before = replay.before or []
    replay.before = list(before)
    for number, values in enumerate(replay.launch_class.storages):
        if number not in changed_storages and values.are_data:
            replay.before[number] = torch.full_like(before[number], _LEAST_FILL + number % _FILLS)
    _run(replay, stored)
    hidden = {name for name in _changed(replay) if storages[name] not in changed_storages}
    replay.before = before
    return hidden


def _vary(replay: Replay, large: float) -> None:
    """Vary the rows of inputs whose values are not kept, so that the author's reference sees more than values around zero."""
    for name, tensor in _tensors(replay.named).items():
        argument = next(a for a in replay.launch_class.arguments if a.name == name)
        is_data = argument.tensor is not None and replay.launch_class.storages[argument.tensor.storage].are_data
        is_wide = tensor.is_floating_point() and tensor.element_size() > 1
        if is_data and is_wide and tensor.ndim > 1 and tensor.is_contiguous() and tensor.any():  # zeros are a sum that begins
            vary_rows(tensor, large)


def _reference_values(replay: Replay, reference: Callable[..., Any], written: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the values of the author's reference, which gets copies of the arguments."""
    refused = f"reference of {replay.launch_class.kernel.text}: "
    try:
        returned = reference(with_tuples(live_arguments(replay.launch_class, [storage.clone() for storage in replay.storages])))
    except Exception as error:  # the author's own code
        raise ReplayError(f"{place_of(reference, error)}{refused}{first_line(error)}") from error
    try:
        values = _expected_values(returned, _tensors(replay.named))
        if missing := [name for name in written if name not in values]:
            raise ValueError(f"no value for {missing[0]}, which the kernel writes")
    except ValueError as error:
        raise ReplayError(f"{place_of(reference)}{refused}{error}") from error
    return values


def _overflows(
    replay: Replay, stored: StoredConfig, reference: Callable[..., Any], written: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return by output where a launch with large rows gives NaN or infinity and the author's reference does not."""
    before = replay.before
    try:
        _vary(replay, large=LARGE)
        replay.before = [storage.clone() for storage in replay.storages]
        expected = _reference_values(replay, reference, written)
        _run(replay, stored)
        found = _tensors(replay.named)
        floats = [name for name in written if found[name].is_floating_point()]
        wrong = {name: expected[name].float().isfinite() & ~found[name].float().isfinite() for name in floats}
    except ReplayError:  # of a reference that refuses such values
        wrong = {}
    replay.before = before
    replay.restore()
    return {name: places for name, places in wrong.items() if bool(places.any())}


def _expected_values(returned: object, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values of the author's reference, in the element types of the arguments."""
    if not isinstance(returned, Mapping):
        raise ValueError(f"gives a {type(returned).__name__}: expected a dict of argument -> tensor")
    for name, value in returned.items():
        if name not in like:
            raise ValueError(f"{name!r}: expected a tensor argument of the kernel: {', '.join(like)}")
        wanted = f"{tuple(like[name].shape)} {like[name].dtype}"
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name}: {type(value).__name__}: expected a tensor, {wanted}")
        if value.shape != like[name].shape or not torch.can_cast(value.dtype, like[name].dtype):
            raise ValueError(f"{name}: {tuple(value.shape)} {value.dtype}: expected {wanted}")
    return {name: value.to(like[name]) for name, value in returned.items()}


def _poison(replay: Replay, stored: StoredConfig, written: Sequence[str]) -> None:
    """Poison each written storage whose content before the launch does not matter."""
    launch_class, contents = replay.launch_class, replay.before or []
    written_storages = {a.tensor.storage for a in launch_class.arguments if a.tensor is not None and a.name in written}
    for number in sorted(written_storages):
        if not launch_class.storages[number].are_data:
            continue
        before = contents[number]
        contents[number] = torch.full_like(before, _POISON)
        try:
            _run(replay, stored)
            matters = bool(wrong_results(replay, {}))
        except RuntimeError:
            contents[number] = before
            raise
        if matters:
            contents[number] = before


def results_of(replay: Replay) -> dict[str, torch.Tensor]:
    """Return the arguments that hold results, as they are now."""
    return {name: tensor for name, tensor in _tensors(replay.named).items() if name in replay.expected}


def wrong_results(replay: Replay, outputs: Mapping[str, Any]) -> list[str]:
    """Return one line for each output or argument that disagrees with the author's first config or reference.

    An argument that the first config does not write must keep its bytes.
    """
    earlier, changed = _earlier(replay), _changed(replay)
    lines = []
    for name, tensor in {**_tensors(replay.named), **outputs}.items():
        if name in replay.expected:
            expected = replay.expected[name]
            if text := _difference(replay, expected, tensor, replay.noise.get(name, 0.0), replay.has_reference):
                lines.append(f"{name}: {_unwritten(expected, tensor, earlier[name]) or text}")
            elif name in replay.overflows:
                places = replay.overflows[name]
                text = f"{int(places.sum())} of {tensor.numel()} elements, first at {_place(places)}, are NaN or infinite"
                lines.append(f"{name}: {text}, unlike the reference, where rows are {LARGE:g} times as large")
        elif name in changed:
            lines.append(f"{name}: is written, which the author's first config does not do")
    guards, before = replay.guards(replay.storages), replay.guards(replay.before or ())
    for found, earlier_guard, expected, noise in zip(guards, before, replay.guard_contents, replay.guard_noise, strict=False):
        if _has_same_bytes(found, expected):
            continue
        if _has_same_bytes(expected, earlier_guard):
            lines.append("memory behind the arguments is written, unlike by the author's first config")
        elif text := _difference(replay, expected, found, noise, has_reference=False):
            lines.append(f"memory behind the arguments: {text}")
    return lines


def _difference(replay: Replay, expected: torch.Tensor, found: torch.Tensor, noise: float, has_reference: bool) -> str:
    """Return how a result differs, by the author's tolerance or else as `disagreement` does; empty if it agrees."""
    if replay.tolerance is not None:
        return _unnamed(close("", found, expected, *replay.tolerance))
    return disagreement(expected, found, noise, replay.launch_class.dtypes, has_reference)


def _unnamed(lines: Sequence[str]) -> str:
    return "; ".join(line.removeprefix(": ") for line in lines)


def _place(values: torch.Tensor) -> tuple[int, ...]:
    """Return the place of the largest value, the first of several."""
    return tuple(map(int, torch.unravel_index(values.float().argmax(), values.shape)))


def _has_same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes; NaN of other bits differ."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _unwritten(expected: torch.Tensor, found: torch.Tensor, before: torch.Tensor) -> str:
    """Return how many elements a launch never wrote; empty if that cannot be told."""
    width = found.element_size()
    tensors = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, before, expected))
    present, held, wanted = (tensor.view(-1, width) for tensor in tensors)
    wrong = (present != wanted).any(dim=1)
    never = wrong & (present == held).all(dim=1)
    if not bool((never == wrong).all()):
        never &= (held == _POISON).all(dim=1)  # a wrong result is no NaN by chance
    count = int(never.sum())
    return f"{count} of {found.numel()} elements never written, first at {_place(never.view(found.shape))}" if count else ""


def _tensors(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among arguments, and the tensors below descriptors."""
    below = {name: value.base if is_descriptor(value) else value for name, value in named.items()}
    return {name: value for name, value in below.items() if isinstance(value, torch.Tensor)}


_NOISE_FACTOR = 4.0
_ROUNDINGS = 1.0
_LARGEST_ROUNDINGS = 8.0
_CANCELLED = 2.0**-8
"""Difference of fp8 results, as a share of the largest, that may be several steps: a step near zero is far smaller. Attention
with blocks of 32 and of 128 differs by up to 2^-9.2, partial sums in bf16 by up to 2^-8.8 (docs/notes/checks.md)."""
_LEAST_EPSILON = 2.0**-14
"""The least tolerance of float32 results: products in TF32 and sums in another order differ by more than float32 rounds."""


def disagreement(
    expected: torch.Tensor, found: torch.Tensor, noise: float, dtypes: Sequence[str], has_reference: bool = False
) -> str:
    """Return how far two results differ beyond noise and rounding; empty if they agree.

    Results in fp8 may be a single step off, few of them and to both sides; results in 16 bits may not lean to a side. For other
    results, the coarsest element type among the kernel's floating-point arguments decides the rounding, because configs that sum
    in another order differ by as much.

    dtypes: names of the element types of all arguments.
    """
    if not (expected.is_floating_point() or expected.is_complex()):
        return _unnamed(close("", found, expected, 0.0, 0.0)) if not noise else ""
    is_other = torch.isnan(expected.float()) != torch.isnan(found.float())
    if other := int(is_other.sum()):
        return f"NaN in other places: {other} of {expected.numel()} elements, first at {_place(is_other)}"
    if expected.element_size() == 1 and expected.numel() and not noise:
        a, b = expected.float(), found.float()
        is_cancelled = (a - b).abs() <= _CANCELLED * a.nan_to_num(0.0, 0.0, 0.0).abs().max()
        codes = torch.where(is_cancelled, expected.view(torch.uint8), found.view(torch.uint8))
        return "; ".join(within_a_step("fp8", codes.view(expected.dtype), expected))
    rms, largest = relative_difference(expected, found, by_element=has_reference)
    inside = [torch.finfo(kind).eps for kind in map(torch_dtype, dtypes) if kind in (torch.bfloat16, torch.float16)]
    epsilon = float(max(torch.finfo(expected.dtype).eps, _LEAST_EPSILON, *inside))
    allowed = max(_NOISE_FACTOR * noise, _ROUNDINGS * epsilon)
    allowed_largest = max(8 * _NOISE_FACTOR * noise, _LARGEST_ROUNDINGS * epsilon)
    if rms <= allowed and largest <= allowed_largest:
        return leaning(found, expected, by_rows=has_reference) if expected.element_size() == 2 else ""
    of_largest = "an element, or of the rms if larger" if has_reference else "the largest"
    largest_text = f"{largest:.2e} of {of_largest} (allowed {allowed_largest:.2e})"
    most = _place((found.float() - expected.float()).abs().nan_to_num(0.0, torch.inf))
    values = f"most at {most}: {found[most].item():.6g}, expected {expected[most].item():.6g}"
    return f"differs by {rms:.2e} of the rms (allowed {allowed:.2e}), at most {largest_text}, {values}"


def relative_difference(expected: torch.Tensor, found: torch.Tensor, by_element: bool = False) -> tuple[float, float]:
    """Return the rms and the largest of the differences, each over the same measure of the expected values.

    Args:
        by_element: divide each difference by its own expected value instead, or by the rms of all if that is larger.
    """
    if expected.numel() == 0:
        return 0.0, 0.0
    a, b = (torch.nan_to_num(t.float(), nan=0.0, posinf=3e38, neginf=-3e38) for t in (expected, found))
    gaps = (a - b).abs()
    scale, peak = float(a.double().square().mean().sqrt()), float(a.abs().max())
    rms, largest = float(gaps.double().square().mean().sqrt()), float(gaps.max())
    if by_element and scale:
        return rms / scale, float((gaps / a.abs().clamp(min=scale)).max())
    return (rms / scale if scale else rms), (largest / peak if peak else largest)
