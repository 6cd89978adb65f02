"""Find kernels that are wrong for values that the inputs of a check lack, such as tiny or huge numbers, NaN, or ignored rows.

The module knows no operator.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from kerneltune.checking.blind_spots import matters
from kerneltune.checking.check import LAUNCH_FAILURE, Checker, have_same_bits, only_calls_torch, smallest_cases
from kerneltune.checking.covering import settings
from kerneltune.interpreter.facts import noting
from kerneltune.processes.forked import Fork
from kerneltune.records import RIGHT_ALONE
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant

_FAR = 28672
"""Distance from 0: beyond usual stand-ins for infinity, 1000 and 10000."""
_STEP = 128
"""The distance of two values of bf16 between 16384 and 32768."""
_STEPS = 62
"""Most steps between a row's constant and its other values, except the top value."""
_TOP = 95
"""Steps between a row's constant and its top value."""
_EQUAL = 0.125
"""Products with it stay far below 1e6, which is enough for infinity."""
_NEAR, _STABLE, _GROSS = 1e-3, 0.05, 0.2
"""Differences relative to the largest result: at most _NEAR for equal results, at most _STABLE for results that do not depend on
a step of bf16, more than _GROSS for wrong results."""
_HUGE = 1e9
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_KEPT = 4
"""Elements that stay as they are, between elements that hold arguments."""
_FACTORS = {"2^-24 times as large": 2.0**-24, "0": 0.0, "4 times as large": 4.0}
"""Factors of inputs: tiny values show an epsilon, zeros a division by 0, large values an exponential that overflows."""
_FLOAT_FACTORS = (1.7, 6.8, 1 / 6.8)
"""Factors of inputs that are floats. Many floats below 1 exceed 1 after the second factor alone."""
_IN_KERNEL = f"{LAUNCH_FAILURE}: Triton's interpreter: "
"""Beginning of an error of a kernel's code; for other numbers it is no refusal."""
_RACE = "two programs"
"""Beginning of the error of programs that store to an element without an order, as they may if indices are equal."""
_POWER = 0x44800000
"""The bits of 1024 in fp32."""
_BESIDE = {"below 1024": _POWER - 1, "above 1024": _POWER + 1}
_MOST_IGNORED = 2
"""Most negative values that an input of integers holds if they are marks, such as -1 or -100, and no numbers."""
_MOST_CASES = 6
KIND_SECONDS = 5.0
"""Processor seconds after which no further values of a kind are tried, in any case."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Describe other values of a case's inputs.

    Attributes:
        where: the values, as a line names them.
        inputs: function that returns other inputs of inputs. Its further arguments are 1 for the values, 0 for values with which
            the variant must be right; and 1 to change each value by a step of bf16 at most, or an outlier to a huge value, 0 to
            keep it.
        judged: function that returns the names of judged outputs, of the reference's outputs with both values.
        has_outliers: whether rows have NaN, infinity or a huge value. Then a variant is wrong only if an output is not finite
            where the reference is, or, with NaN, if no output has a NaN that plain values do not give, or only some rows do.
        has_exact_bytes: whether a variant is also wrong by any bit of an output of 8 bits, if it is exact without the change.
    """

    where: str
    inputs: Callable[..., Inputs]
    judged: Callable[[Outputs, Outputs], list[str]]
    has_outliers: bool = False
    has_exact_bytes: bool = False


def wrong_by_values(op: Op, cases: Sequence[Case]) -> list[str]:
    """Return a line for each kind of values with which a variant of kernels is wrong, and right with other values.

    Values with which a baseline of torch alone is wrong as well are left out: the operator cannot compute them. This process must
    have run no variant: a line says that host code keeps a value if a variant is right with the values in a new process.
    """
    lines, kept = list[str](), dict[str, str]()
    for name, case, change, error in Fork(partial(_search, op, cases)).result():
        if alone := Fork(partial(_wrong, op, case, op.variant(name), change)).result():
            lines.append(f"{name} is wrong where {alone[0]}, in case {case.name}: {alone[1]}")
        else:
            kept[name] = f"{name} is {RIGHT_ALONE}other calls, in case {case.name}: does host code keep a value? {error}"
    return [*lines, *kept.values()]


def _search(op: Op, cases: Sequence[Case]) -> list[tuple[str, Case, _Change, str]]:
    """Return the variants that are wrong with values of a kind, each with the first case, values and error of the kind."""
    wrong = dict[tuple[object, str], tuple[str, Case, _Change, str]]()
    few, own = _few(op, cases), [variant for variant in op.variants if not variant.is_peer]
    of_torch = [variant for variant in own[:1] if own[1:] and only_calls_torch(op, variant, few[:1])]
    of_floats = (_far_changes, _argument_changes, _factor_changes, _outlier_changes, _full_changes, _number_changes)
    for kind in (_integer_changes, *of_floats):
        end_s = time.thread_time() + KIND_SECONDS
        for case, variant in itertools.product(few, [variant for variant in own if variant not in of_torch]):
            if time.thread_time() > end_s:
                break
            with suppress(Exception):  # the check of the case says why
                for change in () if variant.unsupported(case) else kind(op, case, variant):
                    if (kind, variant.name) in wrong or time.thread_time() > end_s:
                        break
                    with suppress(Exception):  # values that the operator refuses
                        found = _wrong(op, case, variant, change)
                        if found is not None and not any(_wrong(op, case, other, change) for other in of_torch):
                            wrong[kind, variant.name] = variant.name, case, change, found[1]
    return [*wrong.values()]


def _few(op: Op, cases: Sequence[Case]) -> list[Case]:
    """Return the smallest case with each type, mode and value of an option, and further small cases."""
    smallest = smallest_cases(op, cases, len(cases))
    first = {setting: case for case in reversed(smallest) for setting in settings(case)}
    return [*dict.fromkeys([*sorted(first.values(), key=smallest.index), *smallest])][:_MOST_CASES]


class _Outputs(NamedTuple):
    """Hold outputs of the reference and of a variant: with changed inputs, `want` and `got`, and without, `near` and `right`."""

    want: Outputs
    got: Outputs
    near: Outputs
    right: Outputs


def _wrong(op: Op, case: Case, variant: Variant, change: _Change) -> tuple[str, str] | None:
    """Return values and a line if a variant is wrong with other values of inputs, and right without the change; else None."""

    def checker(*which: int) -> Checker:
        return Checker(replace(op, inputs=lambda *args, **named: change.inputs(op.inputs(*args, **named), *which)), case, "cpu")

    near, moved, config = checker(0, 0), checker(1, 0), variant.default_config(case)
    judged = change.judged(moved.expected, near.expected)
    got, lines = moved.run(variant, config) if judged else ({}, [])
    if not lines:
        return None
    right, others = near.run(variant, config)
    if others:
        return None
    outputs, is_fault = _Outputs(moved.expected, got, near.expected, right), False
    if change.has_outliers:
        wrong, how = _broken_outputs(judged, outputs)
        if not wrong and got and change.judged is _new_nan:
            wrong, how = _outputs_without_nan(judged, outputs, checker(1, 1))
    else:
        wrong, how = _far_outputs(judged, outputs, checker(1, 1)), ""
        if change.has_exact_bytes and got:
            wrong += _other_bytes(judged, outputs)
        is_in_host = lines[0].startswith(LAUNCH_FAILURE) and not (change.has_exact_bytes and _IN_KERNEL in lines[0])
        is_fault = not got and not is_in_host and _RACE not in lines[0]
    if not wrong and not is_fault:
        return None
    return change.where + how, next((line for line in lines if wrong and line.startswith(wrong[0])), lines[0])


def _broken_outputs(judged: Sequence[str], outputs: _Outputs) -> tuple[list[str], str]:
    """Return the outputs that are not finite where the reference is, and a text about the first."""
    want, got, near, right = outputs
    broken = [name for name in judged if name in got and _is_broken(got[name], want[name], right[name], near[name])]
    return broken, f", and {broken[0]} is not finite where the reference is" if broken else ""


def _outputs_without_nan(judged: list[str], outputs: _Outputs, huge: Checker) -> tuple[list[str], str]:
    """Return the outputs that lose a NaN, and a text about the first.

    If no output has a new NaN, these are all outputs; else the outputs in which some rows have none.

    huge: a checker of inputs with a huge value in place of each NaN.
    """
    kept = _new_nan(outputs.got, outputs.right)
    if not kept:
        return judged, ", which no output has"
    if not set(judged) <= set(kept):  # scales of fp8 values lose each NaN, and the values keep it alone
        return [], ""
    losing = [name for name in judged if _loses_rows(outputs.want, outputs.near, huge.expected, outputs.got, name)]
    return losing, f", which some rows of {losing[0]} lose" if losing else ""


def _far_outputs(judged: Sequence[str], outputs: _Outputs, blurred: Checker) -> list[str]:
    """Return the outputs that are far off with the change, and were not without, as a dropout's elements are.

    blurred: a checker of inputs that differ from the changed inputs by a step.
    """
    want, got, near, right = outputs
    is_same = {name: _is_same(right.get(name), near[name]) for name in judged}
    far = [name for name in judged if _is_far(got.get(name), want[name], blurred.expected[name], is_same[name])]
    return [name for name in far if not _is_far(right.get(name), near[name], near[name])]


def _other_bytes(judged: Sequence[str], outputs: _Outputs) -> list[str]:
    """Return the outputs of 8 bits with a wrong bit that were exact without the change."""
    wrong, (want, got, near, right) = list[str](), outputs
    for name in judged:
        value = got.get(name)
        if isinstance(value, torch.Tensor) and value.itemsize == 1 and not have_same_bits(value, want[name]):
            wrong += [name] * _is_same(right[name], near[name])
    return wrong


def _far_changes(op: Op, case: Case, _variant: Variant) -> Iterator[_Change]:
    """Yield inputs around _FAR and -_FAR, which show a constant that a kernel takes for infinity.

    Only outputs are judged whose reference stays as it is around 0, or moves with the input, as in a softmax, a choice of the
    largest or a maximum. The other inputs are cut to 1; or they are _EQUAL throughout, so that products of two inputs are large
    and equal. Where a step of bf16 changes the reference, only NaN, infinity and integers count as wrong.
    """
    wide = _wide(op, op.inputs(case, device="cpu"))
    for name, far in itertools.product(wide, (-_FAR, _FAR)):
        others = [other for other in wide if other != name]
        if others and wide[name].dtype == torch.float16:  # products exceed its range
            continue
        for equal in [others, *([other] for other in others if len(others) > 1)]:
            yield _Change(f"{name} is around {far}", partial(_moved, name, equal, far), partial(_blind, far))


def _argument_changes(op: Op, case: Case, variant: Variant) -> Iterator[_Change]:
    """Yield inputs that hold float arguments of the kernels: a limit may count to the wrong side, such as the last bin's edge."""
    checker = Checker(op, case, "cpu")
    with noting() as facts:
        checker.run(variant, variant.default_config(case))
    held = sorted({float(fact.text) for fact in facts if fact.kind == "float"})
    for name in _wide(op, checker.inputs) if held else ():
        where = f"{name} holds floats of its launches, {', '.join(map('{:g}'.format, held))}"
        yield _Change(where, partial(_holding, name, held), _tensors)


def _integer_changes(op: Op, case: Case, _variant: Variant) -> Iterator[_Change]:
    """Yield ignored rows only, if an input marks rows; and indices that are all equal, which show a counter that overflows.

    Indices are integers that repeat and fall in some row. Places in ends of sequences, which rise, would be wrong places.
    """
    inputs = op.inputs(case, device="cpu")
    kinds = (torch.int32, torch.int64)
    integers = {name: value for name, value in inputs.items() if getattr(value, "dtype", None) in kinds and value.numel()}
    for name, value in integers.items() if len(integers) == 1 else ():  # several, such as places and counts, depend on each other
        if 1 <= len(value[value < 0].unique()) <= _MOST_IGNORED:
            yield _Change(f"{name} is {value.min()}", partial(_replaced, [name], partial(_filled, int(value.min()))), _floats)
    rows = {name: value.reshape(-1, value.shape[-1] if value.ndim else 1) for name, value in integers.items()}
    falling = [name for name, value in rows.items() if (value.diff() < 0).any() and (value.sort().values.diff() == 0).any()]
    rising = [name for name, value in integers.items() if value.ndim == 1 and (value.diff() >= 0).all()]
    for name in falling if not rising else ():
        for number in integers[name][integers[name] >= 0][:1].tolist():  # the last may be padding
            yield _Change(f"all {name} are {number}", partial(_replaced, [name], partial(_filled, number)), _tensors)


def _factor_changes(op: Op, case: Case, _variant: Variant) -> Iterator[_Change]:
    """Yield inputs times each of _FACTORS, alone, together, and all but one.

    So an epsilon is found that should be less or in another place, a division by 0, and an exponential that overflows.
    """
    inputs = op.inputs(case, device="cpu")
    names = [name for name, value in _wide(op, inputs).items() if value.dtype != torch.float16]  # whose range is small
    others = [[other for other in names if other != name] for name in names]
    groups = dict.fromkeys(map(tuple, [*([name] for name in names), names, *others]))
    for (word, factor), group in itertools.product(_FACTORS.items(), filter(None, groups)):
        where = f"{', '.join(group)} {'is' if len(group) == 1 else 'are'} {word}"
        yield _Change(where, partial(_replaced, group, partial(_times, factor)), _numbers if factor else _floats)


def _outlier_changes(op: Op, case: Case, _variant: Variant) -> Iterator[_Change]:
    """Yield inputs of which each row has a NaN, the NaN that GPUs make, infinity, or a huge value.

    Rounding that adds to the bits turns a NaN of ones into -0; a difference of two sums is NaN where both are infinite.
    """
    inputs = _wide(op, op.inputs(case, device="cpu"))
    for kind, (name, value) in itertools.product(("NaN", "ones", "inf", "huge"), inputs.items()):
        ones, huge = 2 ** (8 * value.itemsize - 1) - 1, min(_HUGE, torch.finfo(value.dtype).max / 16)
        word, number = {"NaN": ("a NaN", torch.nan), "ones": (f"the NaN {ones:#x}", ones), "inf": ("inf", torch.inf)}.get(
            kind, (f"{huge:g}", huge)
        )
        function = partial(_replaced, [name], partial(_outlier, number, huge))
        judged = _new_nan if kind in ("NaN", "ones") else _floats
        yield _Change(f"each row of {name} has {word}", function, judged, has_outliers=True)


def _full_changes(op: Op, case: Case, _variant: Variant) -> Iterator[_Change]:
    """Yield fp8 inputs of which each row is as large as its type holds, as after a row-wise quantization: sums exceed fp16."""
    inputs = op.inputs(case, device="cpu")
    names = [name for name, value in inputs.items() if _is_fp8(value) and matters(op, inputs, name)]
    for group in dict.fromkeys(map(tuple, [names, *([name] for name in names)])) if names else ():
        where = f"each row of {', '.join(group)} has the largest number of its type"
        yield _Change(where, partial(_replaced, group, _full), _floats)


def _number_changes(op: Op, case: Case, _variant: Variant) -> Iterator[_Change]:
    """Yield other values of inputs that are floats, such as a scale, which powers of two make exact; and numbers beside 1024.

    A logarithm in fp32 takes these numbers for 1024.
    """
    inputs = op.inputs(case, device="cpu")
    floats = {name: value for name, value in inputs.items() if type(value) is float and value and matters(op, inputs, name)}
    for (name, value), factor in itertools.product(floats.items(), _FLOAT_FACTORS):
        factor = 1 / factor if value < 1 < value * factor and factor < 2 else factor  # a rate stays below 1
        function = partial(_replaced, [name], partial(_scaled, factor))
        yield _Change(f"{name} is {value * factor:g}", function, _tensors, has_exact_bytes=True)
    wide = [name for name, value in _wide(op, inputs).items() if value.dtype == torch.float32]
    for name, (word, bits) in itertools.product(wide, _BESIDE.items()):
        where = f"each row of {name} has the number just {word}, and it is right with 1024"
        yield _Change(where, partial(_beside, name, bits), _tensors, has_exact_bytes=True)


def _moved(name: str, equal: Sequence[str], far: int, given: Inputs, moves: int, blurs: int) -> Inputs:
    """Return inputs with one input moved: its values lie between 0 and `far`, and every type holds them exactly.

    In each row the top value is _TOP steps away from the row's constant, the next values up to _STEPS.

    Args:
        equal: other inputs that are _EQUAL throughout.
        moves: 1 if the constant is `far`, 0 if it is 0.
        blurs: 1 to change each value by a step at most, 0 to keep it.
    """
    random = torch.Generator().manual_seed(0)
    ranks = torch.rand(given[name].shape, generator=random).argsort(-1)
    steps = torch.where(ranks == 0, _TOP, (_STEPS + 1 - ranks).clamp(min=0))
    steps += blurs * torch.randint(-1, 2, steps.shape, generator=random)
    values = far * moves + steps * (_STEP if far < 0 else -_STEP)
    others = {other: value.clamp(-1, 1) for other, value in given.items() if _is_wide(value)}
    equals = {other: torch.full_like(given[other], _EQUAL) for other in equal}
    return {**given, **others, **equals, name: given[name].clone().copy_(values)}


def _holding(name: str, held: Sequence[float], given: Inputs, moves: int, _blurs: int) -> Inputs:
    """Return inputs in which some elements of an input are the numbers that its type holds exactly."""
    value = given[name].clone()
    exact = [number for number in held if torch.tensor(number, dtype=value.dtype).item() == number]
    for place, number in enumerate(exact if moves else ()):
        value.reshape(-1)[place :: len(exact) + _KEPT] = number
    return {**given, name: value}


def _replaced(names: Sequence[str], function: Callable[..., Any], given: Inputs, moves: int, blurs: int) -> Inputs:
    """Return inputs, some of them replaced by a function of their values and of `blurs`."""
    return {**given, **{name: function(given[name], blurs) for name in names if moves}}


def _beside(name: str, bits: int, given: Inputs, moves: int, blurs: int) -> Inputs:
    """Return inputs, one with a number in each row that bits give, or with 1024."""
    return {**given, name: _with(bits if moves else _POWER, given[name], blurs)}


def _times(factor: float, value: torch.Tensor, blurs: int) -> torch.Tensor:
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) * (blurs * 2.0**-8)
    return torch.empty_like(value).copy_(value * factor).mul_(noise.to(value.device).add_(1).to(value.dtype))


def _full(value: torch.Tensor, blurs: int) -> torch.Tensor:
    top = torch.finfo(value.dtype).max
    rows = value.float() * (top / value.float().abs().amax(-1, keepdim=True).clamp(min=_NEAR))
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value.device) - 0.5
    return torch.empty_like(value).copy_((rows * (1 + blurs * 2.0**-4 * noise)).clamp(-top, top))


def _scaled(factor: float, value: float, blurs: int) -> float:
    return value * factor * (1 + blurs * 2.0**-8)


def _filled(number: int, value: torch.Tensor, _blurs: int) -> torch.Tensor:
    return torch.full_like(value, number)


def _with(number: float, value: torch.Tensor, _blurs: int) -> torch.Tensor:
    """Return a tensor with a number in each row; an integer gives the bits."""
    places = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).argmax(-1, keepdim=True)
    numbers = value.clone().view(_INTEGERS[value.itemsize]) if isinstance(number, int) else value.clone()
    return numbers.scatter_(-1, places, number).view(value.dtype)


def _outlier(number: float, huge: float, value: torch.Tensor, blurs: int) -> torch.Tensor:
    return _with(huge if blurs else number, value, blurs)


def _is_broken(got: torch.Tensor, want: torch.Tensor, right: torch.Tensor, near: torch.Tensor) -> bool:
    """Return whether an output is not finite where the reference is, and where the output of plain values is.

    Elements of 0, rows of the reference that stay, and in vectors elements that stay do not count: a kernel may multiply by a
    mask of 0, which keeps NaN.
    """
    changed = want != near
    is_judged = want.to(got.dtype).double().isfinite() & right.double().isfinite() & (want != 0)
    return bool((is_judged & (changed.any(-1, keepdim=True) if want.ndim > 1 else changed) & ~got.double().isfinite()).any())


def _new_nan(want: Outputs, near: Outputs) -> list[str]:
    """Return the outputs that have NaN where they had none."""
    tensors = {name: value for name, value in want.items() if isinstance(value, torch.Tensor)}
    return [name for name, value in tensors.items() if bool((value.isnan() & ~near[name].isnan()).any())]


def _loses_rows(want: Outputs, near: Outputs, huge: Outputs, outputs: Outputs, name: str) -> bool:
    """Return whether an output keeps some, and not all, of the rows, or elements of a vector, that get NaN in the reference.

    huge: the reference's outputs with a huge value in place of each NaN. What stays as it is does not count, as under a mask.
    """
    got = outputs.get(name)
    if not isinstance(got, torch.Tensor) or got.shape != want[name].shape or not got.ndim:
        return False
    is_new, is_kept = want[name].isnan() & ~near[name].isnan() & (huge[name] != near[name]), got.isnan()
    if got.ndim > 1:
        is_new, is_kept = is_new.any(-1), is_kept.any(-1)
    return bool((is_new & is_kept).any() and (is_new & ~is_kept).any())


def _wide(op: Op, inputs: Inputs) -> Inputs:
    """Return the tensors of floats of 16 bits or more on which the reference depends; not flags 0 and 1, such as a mask."""
    numbers = {name: value for name, value in inputs.items() if _is_wide(value) and value.unique().tolist() != [0, 1]}
    return {name: value for name, value in numbers.items() if matters(op, inputs, name)}


def _is_wide(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1 and value.ndim > 0


def _is_fp8(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and value.numel() > 0


def _blind(far: int, want: Outputs, near: Outputs) -> list[str]:
    """Return the outputs whose reference's values are each as around 0, or as far from it as the input."""
    limits = {name: _NEAR * _largest(value) for name, value in want.items()}
    agree = {
        name: (_close(want[name], near[name], atol), _close(want[name].double() - far, near[name], atol))
        for name, atol in limits.items()
    }
    return [name for name, (stays, moves) in agree.items() if bool((stays | moves).all())]


def _floats(want: Outputs, _near: Outputs) -> list[str]:
    """Return the outputs in floating point."""
    return [name for name, value in want.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _numbers(want: Outputs, near: Outputs) -> list[str]:
    """Return the outputs in floating point, and of int8, as quantized values are."""
    return _floats(want, near) + [name for name, value in want.items() if getattr(value, "dtype", None) == torch.int8]


def _tensors(want: Outputs, _near: Outputs) -> list[str]:
    return [name for name, value in want.items() if isinstance(value, torch.Tensor)]


def _is_same(got: torch.Tensor | None, want: torch.Tensor) -> bool:
    return got is not None and got.dtype == want.dtype and have_same_bits(got, want)


def _is_far(got: torch.Tensor | None, want: torch.Tensor, blurred: torch.Tensor, by_element: bool = False) -> bool:
    """Return whether an output has NaN, infinity, integers or stable values that are wrong, and far off if in floating point.

    by_element: differences are relative to each element, and not to the largest, because plain values give the bits exactly.
    """
    if got is None:
        return False
    size = want.double().abs() if by_element else _largest(want)
    is_judged = _close(want, blurred, _STABLE * size) | ~got.double().isfinite() | (not want.is_floating_point())
    is_exact = not want.is_floating_point() and want.itemsize > 1  # as an index or a count
    want = want.to(got.dtype)  # which may be too large for it, or 0
    return bool((is_judged & want.double().isfinite() & ~_close(got, want, 0 if is_exact else _GROSS * size)).any())


def _close(a: torch.Tensor, b: torch.Tensor, atol: float | torch.Tensor) -> torch.Tensor:
    a, b = a.double(), b.double()
    return (a == b) | ((a - b).abs() <= atol)


def _largest(values: torch.Tensor) -> float:
    """Return the largest finite magnitude; 1 if there is none but 0."""
    finite = values.double()[values.double().isfinite()]
    return float(finite.abs().max()) if finite.any() else 1.0
