"""Learn from the author's first config which results a launch writes, and compare the results of other configs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kerneltune.adopt.arguments import is_descriptor, torch_dtype, with_tuples
from kerneltune.adopt.folder import LaunchClass
from kerneltune.adopt.replay import Launch, LaunchEffects, ReplayError, grid_of, live_arguments, live_kernel
from kerneltune.errors import first_line, place_of
from kerneltune.kernel_lib.agreement import close, leaning, within_a_step
from kerneltune.kernel_lib.check_values import vary_rows


def learn(launch: Launch, stored: Mapping[str, Any]) -> LaunchEffects:
    """Launch the author's first config several times; return its results and how much they vary.

    An argument is written if a launch changes the captured values, or filled values in their place. An argument whose old values
    do not change the results is poisoned before all later launches.
    """
    reference = getattr(live_kernel(launch.launch), "kerneltune_reference", None)
    if reference is not None:
        _vary(launch)
    state = LaunchEffects([storage.clone() for storage in launch.storages])
    _run(launch, state, stored)
    changed = _changed(launch, state.before)
    state.expected = {name: tensor.clone() for name, tensor in _tensors(launch.named).items()}
    changed |= _hidden_writes(launch, state, stored, changed)
    state.written = [name for name in state.expected if name in changed]
    state.expected = {name: state.expected[name] for name in state.written}
    for _ in range(2):
        _run(launch, state, stored)
        for name, tensor in _tensors(launch.named).items():
            if name in changed:
                rms, _ = difference(state.expected[name], tensor)
                state.noise[name] = max(state.noise.get(name, 0.0), rms)
    _poison(launch, state, stored)
    if launch.guard_bytes:
        _run(launch, state, stored)
        state.behind = [storage[-launch.guard_bytes :].clone() for storage in launch.storages]
    state.restore(launch.storages)
    if reference is not None:
        _use_reference(launch, state, reference)
    is_empty = 0 in (grid_of(launch.launch, stored) or ()) or not any(map(torch.numel, _tensors(launch.named).values()))
    if not state.expected and not is_empty:
        raise ReplayError(f"{launch.launch.kernel.text}: the author's first config writes to no argument: nothing to compare")
    return state


def _run(launch: Launch, state: LaunchEffects, stored: Mapping[str, Any]) -> None:
    """Restore the storages, launch a config and wait for it."""
    state.restore(launch.storages)
    launch.run(stored)
    if any(storage.is_cuda for storage in launch.storages):
        torch.cuda.synchronize()


def _changed(launch: Launch, before: Sequence[torch.Tensor]) -> set[str]:
    """Return the arguments that hold other bytes than before."""
    earlier = _tensors(live_arguments(launch.launch, before))
    return {name for name, tensor in _tensors(launch.named).items() if not torch.equal(_bytes(tensor), _bytes(earlier[name]))}


_POISON = 0xFF
"""Bytes that make NaN in every floating-point type."""
_LEAST_FILL, _FILLS = 0x31, 16
"""First of the bytes that make small positive values in every floating-point type, and the number of these bytes."""


def _hidden_writes(launch: Launch, state: LaunchEffects, stored: Mapping[str, Any], changed: set[str]) -> set[str]:
    """Return the arguments that a launch writes with the bytes that they held already, such as zeros over zeros.

    To find them, each storage of floating-point values that did not change is filled with another value before a launch. Whole
    numbers stay, because they may be indices.
    """
    storages = {a.name: a.tensor.storage for a in launch.launch.arguments if a.tensor is not None}
    known = {storages[name] for name in changed}
    filled = LaunchEffects(list(state.before))
    for number, about in enumerate(launch.launch.storages):
        if number not in known and _is_floating(about):
            filled.before[number] = torch.full_like(state.before[number], _LEAST_FILL + number % _FILLS)
    _run(launch, filled, stored)
    return {name for name in _changed(launch, filled.before) if storages[name] not in known}


def _is_floating(about: Mapping[str, Any]) -> bool:
    """Return whether a storage holds data, such as floating-point values, and no indices, which a capture keeps as `values`."""
    return about.get("kept") != "values"


def _vary(launch: Launch) -> None:
    """Vary the rows of inputs whose values are not kept, so that the author's reference sees more than values around zero."""
    for name, tensor in _tensors(launch.named).items():
        argument = next(a for a in launch.launch.arguments if a.name == name)
        is_data = argument.tensor is not None and _is_floating(launch.launch.storages[argument.tensor.storage])
        if is_data and tensor.is_floating_point() and tensor.element_size() > 1 and tensor.ndim > 1 and tensor.is_contiguous():
            vary_rows(tensor, large=1.0)  # a large row would hide differences elsewhere: they are relative to all elements


def _use_reference(launch: Launch, state: LaunchEffects, reference: Callable[..., Any]) -> None:
    """Compare results with the author's reference, which gets copies of the arguments."""
    refused = f"reference of {launch.launch.kernel.text}: "
    try:
        given = reference(with_tuples(live_arguments(launch.launch, [storage.clone() for storage in launch.storages])))
    except Exception as error:  # the author's own code
        raise ReplayError(f"{place_of(reference, error)}{refused}{first_line(error)}") from error
    try:
        values = _expected_values(given, _tensors(launch.named))
        if missing := [name for name in state.written if name not in values]:
            raise ValueError(f"no value for {missing[0]}, which the kernel writes")
    except ValueError as error:
        raise ReplayError(f"{place_of(reference)}{refused}{error}") from error
    state.expected |= values
    state.has_reference = True
    state.tolerance = getattr(live_kernel(launch.launch), "kerneltune_tolerance", None)


def _expected_values(given: object, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values of the author's reference, in the element types of the arguments.

    Raises:
        ValueError: a value belongs to no argument, or has another shape, or a kind that its argument cannot hold.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"gives a {type(given).__name__}: expected a dict of argument -> tensor")
    for name, value in given.items():
        if name not in like:
            raise ValueError(f"{name!r}: expected a tensor argument of the kernel: {', '.join(like)}")
        wanted = f"{tuple(like[name].shape)} {like[name].dtype}"
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name}: {type(value).__name__}: expected a tensor, {wanted}")
        if value.shape != like[name].shape or not torch.can_cast(value.dtype, like[name].dtype):
            raise ValueError(f"{name}: {tuple(value.shape)} {value.dtype}: expected {wanted}")
    return {name: value.to(like[name]) for name, value in given.items()}


def _poison(launch: Launch, state: LaunchEffects, stored: Mapping[str, Any]) -> None:
    """Poison each written storage whose content before the launch does not matter."""
    captured = launch.launch
    written = {a.tensor.storage for a in captured.arguments if a.tensor is not None and a.name in state.written}
    for number in sorted(written):
        if not _is_floating(captured.storages[number]):
            continue
        before = state.before[number]
        state.before[number] = torch.full_like(before, _POISON)
        try:
            _run(launch, state, stored)
            matters = bool(wrong_results(launch, state, {}))
        except RuntimeError:
            state.before[number] = before
            raise
        if matters:
            state.before[number] = before


def results(launch: Launch, state: LaunchEffects) -> dict[str, torch.Tensor]:
    """Return the arguments that hold results, as they are now."""
    return {name: tensor for name, tensor in _tensors(launch.named).items() if name in state.expected}


def wrong_results(launch: Launch, state: LaunchEffects, outputs: Mapping[str, Any]) -> list[str]:
    """Return one line for each output or argument that disagrees with the author's first config or reference.

    An argument that the first config does not write must keep its bytes.
    """
    earlier = _tensors(live_arguments(launch.launch, state.before))
    changed = _changed(launch, state.before)
    found = []
    for name, tensor in {**_tensors(launch.named), **outputs}.items():
        if name in state.expected:
            expected = state.expected[name]
            if state.tolerance is not None:
                text = "; ".join(line.removeprefix(f"{name}: ") for line in close(name, tensor, expected, *state.tolerance))
            else:
                text = disagreement(expected, tensor, state.noise.get(name, 0.0), launch.launch, state.has_reference)
            if text:
                found.append(f"{name}: {_unwritten(expected, tensor, earlier[name]) or text}")
        elif name in changed:
            found.append(f"{name}: is written, which the author's first config does not do")
    behind = [storage[-launch.guard_bytes :] for storage in launch.storages]
    if not all(map(torch.equal, state.behind, behind)):
        found.append("memory behind the arguments is written, unlike by the author's first config")
    return found


def _unwritten(expected: torch.Tensor, found: torch.Tensor, before: torch.Tensor) -> str:
    """Return how many elements a launch never wrote; empty if that cannot be told."""
    width = found.element_size()
    present, held, wanted = (_bytes(tensor).view(-1, width) for tensor in (found, before, expected))
    wrong = (present != wanted).any(dim=1)
    never = wrong & (present == held).all(dim=1)
    if not bool((never == wrong).all()):
        never &= (held == _POISON).all(dim=1)  # a wrong result is no NaN by chance
    count = int(never.sum())
    return f"{count} of {found.numel()} elements never written" if count else ""


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
    expected: torch.Tensor, found: torch.Tensor, noise: float, captured: LaunchClass, has_reference: bool = False
) -> str:
    """Return how far two results differ beyond noise and rounding; empty if they agree.

    Results in fp8 may be a single step off, few of them and to both sides; results in 16 bits may not lean to a side. For other
    results, the coarsest element type among the kernel's floating-point arguments decides the rounding, because configs that sum
    in another order differ by as much.
    """
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = int((expected != found).sum())
        return f"{wrong} of {expected.numel()} whole numbers differ" if wrong and not noise else ""
    if other := int((torch.isnan(expected.float()) != torch.isnan(found.float())).sum()):
        return f"NaN in other places: {other} of {expected.numel()} elements"
    if expected.element_size() == 1 and expected.numel() and not noise:
        a, b = expected.float(), found.float()
        is_cancelled = (a - b).abs() <= _CANCELLED * a.nan_to_num(0.0, 0.0, 0.0).abs().max()
        codes = torch.where(is_cancelled, expected.view(torch.uint8), found.view(torch.uint8))
        return "; ".join(within_a_step("fp8", codes.view(expected.dtype), expected))
    rms, largest = difference(expected, found, by_element=has_reference)
    inside = [torch.finfo(kind).eps for kind in map(torch_dtype, captured.dtypes) if kind in (torch.bfloat16, torch.float16)]
    epsilon = float(max(torch.finfo(expected.dtype).eps, _LEAST_EPSILON, *inside))
    allowed = max(_NOISE_FACTOR * noise, _ROUNDINGS * epsilon)
    allowed_largest = max(8 * _NOISE_FACTOR * noise, _LARGEST_ROUNDINGS * epsilon)
    if rms <= allowed and largest <= allowed_largest:
        return leaning(found, expected, by_rows=has_reference) if expected.element_size() == 2 else ""
    of_largest = "an element, or of the rms if larger" if has_reference else "the largest"
    largest_text = f"{largest:.2e} of {of_largest} (allowed {allowed_largest:.2e})"
    return f"differs by {rms:.2e} of the rms (allowed {allowed:.2e}), at most {largest_text}"


def difference(expected: torch.Tensor, found: torch.Tensor, by_element: bool = False) -> tuple[float, float]:
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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, (bytes,) uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)
