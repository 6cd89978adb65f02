"""Find kernels that are wrong for values that the inputs of a check lack, such as tiny or huge numbers, NaN, or ignored rows.

The module knows no operator.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

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


Which = Literal["usual", "changed", "blurred"]
"""Values of inputs: `usual`, with which a variant must be right; `changed`; or `blurred`: changed, and moved by a step of bf16 at
most, with a huge value in place of each outlier."""


class _Outputs(NamedTuple):
    """Hold outputs of the reference and of a variant: with changed inputs, `want` and `got`, and usual, `usual` and `right`."""

    want: Outputs
    got: Outputs
    usual: Outputs
    right: Outputs


@dataclass(frozen=True, slots=True)
class _Change:
    """Describe other values of a case's inputs. A variant is wrong with them if an output is far off, or if a kernel faults.

    Attributes:
        where: the values, as a line names them.
        inputs: function of inputs that returns inputs of usual, changed or blurred values.
        judged: function that returns the names of judged outputs, of the reference's outputs with changed and with usual values.
    """

    where: str
    inputs: Callable[[Inputs, Which], Inputs]
    judged: Callable[[Outputs, Outputs], list[str]]

    def wrong_outputs(self, judged: list[str], outputs: _Outputs, blurred: Callable[[], Checker]) -> tuple[list[str], str]:
        """Return the wrong outputs, and a text about the first: outputs that are far off, and not with usual values.

        With usual values, a dropout's elements are far off.

        blurred: function that makes the checker of blurred inputs.
        """
        (want, got, usual, right), expected = outputs, blurred().expected
        is_same = {name: _is_same(right.get(name), usual[name]) for name in judged}
        far = [name for name in judged if _is_far(got.get(name), want[name], expected[name], is_same[name])]
        return [name for name in far if not _is_far(right.get(name), usual[name], usual[name])], ""

    def is_fault(self, line: str) -> bool:
        """Return whether the error of a run without outputs is a mistake, and not the refusal of such values."""
        return not line.startswith(LAUNCH_FAILURE) and _RACE not in line


class _Number(_Change):
    """Describe other numbers, with which a variant is also wrong by any bit of an output of 8 bits, if it else is exact."""

    def wrong_outputs(self, judged: list[str], outputs: _Outputs, blurred: Callable[[], Checker]) -> tuple[list[str], str]:
        """Return the outputs that are far off, and outputs of 8 bits with a wrong bit that are exact with usual values."""
        (wrong, how), (want, got, usual, right) = super().wrong_outputs(judged, outputs, blurred), outputs
        bytes_of = {name: got[name] for name in judged if isinstance(got.get(name), torch.Tensor) and got[name].itemsize == 1}
        other = [name for name, value in bytes_of.items() if not have_same_bits(value, want[name])]
        return wrong + [name for name in other if _is_same(right[name], usual[name])], how

    def is_fault(self, line: str) -> bool:
        """Return whether the error of a run without outputs is a mistake, as an error of a kernel's code is."""
        return super().is_fault(line) or (_IN_KERNEL in line and _RACE not in line)


class _Outlier(_Change):
    """Describe inputs whose rows have NaN, infinity or a huge value, which no variant need accept."""

    def wrong_outputs(self, judged: list[str], outputs: _Outputs, blurred: Callable[[], Checker]) -> tuple[list[str], str]:
        """Return the outputs that are not finite where the reference is, or else, with NaN, the outputs that lose a NaN.

        If no output has a new NaN, all outputs lose it; else the outputs in which some rows have none.
        """
        want, got, usual, right = outputs
        broken = [name for name in judged if name in got and _is_broken(got[name], want[name], right[name], usual[name])]
        if broken or not got or self.judged is not _new_nan:
            return broken, f", and {broken[0]} is not finite where the reference is" if broken else ""
        kept = _new_nan(got, right)
        if not kept:
            return judged, ", which no output has"
        if not set(judged) <= set(kept):  # scales of fp8 values lose each NaN, and the values keep it alone
            return [], ""
        losing = [name for name in judged if _loses_rows(want, usual, blurred().expected, got, name)]
        return losing, f", which some rows of {losing[0]} lose" if losing else ""

    def is_fault(self, _line: str) -> bool:
        """Return False: a variant may refuse such values."""
        return False


_Wrong = tuple[str, Case, _Change, str]
"""The name of a variant, and the first case, values and error with which it is wrong."""


def wrong_by_values(op: Op, cases: Sequence[Case]) -> list[str]:
    """Return a line for each kind of values with which a variant of kernels is wrong, and right with other values.

    Values with which a baseline of torch alone is wrong as well are left out: the operator cannot compute them. This process must
    have run no variant: a line says that host code keeps a value if a variant is right with the values in a new process.
    """
    lines, kept = list[str](), dict[str, str]()
    for name, case, change, error in Fork(partial(_search, op, cases)).result():
        if alone := Fork(partial(_wrong, op, case, op.variant(name), change)).result():
            where, line = alone
            lines.append(f"{name} is wrong where {where}, in case {case.name}: {line}")
        else:
            kept[name] = f"{name} is {RIGHT_ALONE}other calls, in case {case.name}: does host code keep a value? {error}"
    return [*lines, *kept.values()]


def _search(op: Op, cases: Sequence[Case]) -> list[_Wrong]:
    """Return for each kind of values the variants that are wrong with them."""
    few, own, all_wrong = _few(op, cases), [variant for variant in op.variants if not variant.is_peer], list[_Wrong]()
    of_torch = [variant for variant in own[:1] if own[1:] and only_calls_torch(op, variant, few[:1])]
    judged = [variant for variant in own if variant not in of_torch]
    of_floats = (_far_changes, _argument_changes, _factor_changes, _outlier_changes, _full_changes, _number_changes)
    for kind in (_integer_changes, *of_floats):
        wrong = dict[str, _Wrong]()
        for case, variant, change in _changes(kind, op, few, judged):
            with suppress(Exception):  # values that the operator refuses
                found = None if variant.name in wrong else _wrong(op, case, variant, change)
                if found is not None and not any(_wrong(op, case, other, change) for other in of_torch):
                    wrong[variant.name] = variant.name, case, change, found[1]
        all_wrong += wrong.values()
    return all_wrong


def _changes(
    kind: Callable[..., Iterator[_Change]], op: Op, cases: Sequence[Case], variants: Sequence[Variant]
) -> Iterator[tuple[Case, Variant, _Change]]:
    """Yield the changes of a kind for each case and variant, until `KIND_SECONDS` are over."""
    end_s = time.thread_time() + KIND_SECONDS
    in_time = partial(itertools.takewhile, lambda _: time.thread_time() <= end_s)
    for case, variant in in_time(itertools.product(cases, variants)):
        with suppress(Exception):  # the check of the case says why
            for change in in_time(() if variant.unsupported(case) else kind(op, case, variant)):
                yield case, variant, change


def _few(op: Op, cases: Sequence[Case]) -> list[Case]:
    """Return the smallest case with each type, mode and value of an option, and further small cases."""
    smallest = smallest_cases(op, cases, len(cases))
    first = {setting: case for case in reversed(smallest) for setting in settings(case)}
    return [*dict.fromkeys([*sorted(first.values(), key=smallest.index), *smallest])][:_MOST_CASES]


def _wrong(op: Op, case: Case, variant: Variant, change: _Change) -> tuple[str, str] | None:
    """Return values and a line if a variant is wrong with other values of inputs, and right with usual values; else None."""

    def checker(which: Which) -> Checker:
        return Checker(replace(op, inputs=lambda *args, **named: change.inputs(op.inputs(*args, **named), which)), case, "cpu")

    usual, changed, config = checker("usual"), checker("changed"), variant.default_config(case)
    judged = change.judged(changed.expected, usual.expected)
    got, lines = changed.run(variant, config) if judged else ({}, [])
    right, others = usual.run(variant, config) if lines else ({}, [])
    if not lines or others:
        return None
    outputs = _Outputs(changed.expected, got, usual.expected, right)
    wrong, how = change.wrong_outputs(judged, outputs, partial(checker, "blurred"))
    if not wrong and (got or not change.is_fault(lines[0])):
        return None
    return change.where + how, next((line for line in lines if wrong and line.startswith(wrong[0])), lines[0])


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
    """Yield inputs that hold floats of kernels' arguments, or of inputs: a limit may count to the wrong side, as a bin's edge."""
    checker = Checker(op, case, "cpu")
    with noting() as facts:
        checker.run(variant, variant.default_config(case))
    of_inputs = {value for value in checker.inputs.values() if type(value) is float}
    held = sorted({float(fact.text) for fact in facts if fact.kind == "float"} | of_inputs)
    for name in _wide(op, checker.inputs) if held else ():
        where = f"{name} holds floats of its launches or inputs, {', '.join(map('{:g}'.format, held))}"
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
        yield _Outlier(f"each row of {name} has {word}", function, judged)


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
        yield _Number(f"{name} is {value * factor:g}", function, _tensors)
    wide = [name for name, value in _wide(op, inputs).items() if value.dtype == torch.float32]
    for name, (word, bits) in itertools.product(wide, _BESIDE.items()):
        where = f"each row of {name} has the number just {word}, and it is right with 1024"
        yield _Number(where, partial(_beside, name, bits), _tensors)


def _moved(name: str, equal: Sequence[str], far: int, given: Inputs, which: Which) -> Inputs:
    """Return inputs with one input moved: its values lie between 0 and `far`, and every type holds them exactly.

    In each row the top value is _TOP steps away from the row's constant, which is `far`, or 0 for usual values; the next values
    are up to _STEPS away.

    equal: other inputs that are _EQUAL throughout.
    """
    random = torch.Generator().manual_seed(0)
    ranks = torch.rand(given[name].shape, generator=random).argsort(-1)
    steps = torch.where(ranks == 0, _TOP, (_STEPS + 1 - ranks).clamp(min=0))
    if which == "blurred":
        steps += torch.randint(-1, 2, steps.shape, generator=random)
    values = (0 if which == "usual" else far) + steps * (_STEP if far < 0 else -_STEP)
    others = {other: value.clamp(-1, 1) for other, value in given.items() if _is_wide(value)}
    equals = {other: torch.full_like(given[other], _EQUAL) for other in equal}
    return {**given, **others, **equals, name: given[name].clone().copy_(values)}


def _holding(name: str, held: Sequence[float], given: Inputs, which: Which) -> Inputs:
    """Return inputs in which some elements of an input are the numbers that its type holds exactly."""
    value = given[name].clone()
    exact = [number for number in held if torch.tensor(number, dtype=value.dtype).item() == number]
    for place, number in enumerate(exact if which != "usual" else ()):
        value.reshape(-1)[place :: len(exact) + _KEPT] = number
    return {**given, name: value}


def _replaced(names: Sequence[str], function: Callable[[Any, bool], Any], given: Inputs, which: Which) -> Inputs:
    """Return inputs, some of them replaced by a function of their values and of whether these are to be blurred."""
    return {**given, **{name: function(given[name], which == "blurred") for name in names if which != "usual"}}


def _beside(name: str, bits: int, given: Inputs, which: Which) -> Inputs:
    """Return inputs, one with a number in each row that bits give, or with 1024."""
    return {**given, name: _with(_POWER if which == "usual" else bits, given[name])}


def _times(factor: float, value: torch.Tensor, blurs: bool) -> torch.Tensor:
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) * (blurs * 2.0**-8)
    return torch.empty_like(value).copy_(value * factor).mul_(noise.to(value.device).add_(1).to(value.dtype))


def _full(value: torch.Tensor, blurs: bool) -> torch.Tensor:
    top = torch.finfo(value.dtype).max
    rows = value.float() * (top / value.float().abs().amax(-1, keepdim=True).clamp(min=_NEAR))
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value.device) - 0.5
    return torch.empty_like(value).copy_((rows * (1 + blurs * 2.0**-4 * noise)).clamp(-top, top))


def _scaled(factor: float, value: float, blurs: bool) -> float:
    return value * factor * (1 + blurs * 2.0**-8)


def _filled(number: int, value: torch.Tensor, _blurs: bool) -> torch.Tensor:
    return torch.full_like(value, number)


def _outlier(number: float, huge: float, value: torch.Tensor, blurs: bool) -> torch.Tensor:
    return _with(huge if blurs else number, value)


def _with(number: float, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a number in each row; an integer gives the bits."""
    places = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).argmax(-1, keepdim=True)
    numbers = value.clone().view(_INTEGERS[value.itemsize]) if isinstance(number, int) else value.clone()
    return numbers.scatter_(-1, places, number).view(value.dtype)


def _is_broken(got: torch.Tensor, want: torch.Tensor, right: torch.Tensor, usual: torch.Tensor) -> bool:
    """Return whether an output is not finite where the reference is, and where the output of plain values is.

    Elements of 0, rows of the reference that stay, and in vectors elements that stay do not count: a kernel may multiply by a
    mask of 0, which keeps NaN.
    """
    changed = want != usual
    is_judged = want.to(got.dtype).double().isfinite() & right.double().isfinite() & (want != 0)
    return bool((is_judged & (changed.any(-1, keepdim=True) if want.ndim > 1 else changed) & ~got.double().isfinite()).any())


def _new_nan(want: Outputs, usual: Outputs) -> list[str]:
    """Return the outputs that have NaN where they had none."""
    tensors = {name: value for name, value in want.items() if isinstance(value, torch.Tensor)}
    return [name for name, value in tensors.items() if bool((value.isnan() & ~usual[name].isnan()).any())]


def _loses_rows(want: Outputs, usual: Outputs, huge: Outputs, outputs: Outputs, name: str) -> bool:
    """Return whether an output keeps some, and not all, of the rows, or elements of a vector, that get NaN in the reference.

    huge: the reference's outputs with a huge value in place of each NaN. What stays as it is does not count, as under a mask.
    """
    got = outputs.get(name)
    if not isinstance(got, torch.Tensor) or got.shape != want[name].shape or not got.ndim:
        return False
    is_new, is_kept = want[name].isnan() & ~usual[name].isnan() & (huge[name] != usual[name]), got.isnan()
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


def _blind(far: int, want: Outputs, usual: Outputs) -> list[str]:
    """Return the outputs whose reference's values are each as around 0, or as far from it as the input."""
    limits = {name: _NEAR * _largest(value) for name, value in want.items()}
    agree = {
        name: (_close(want[name], usual[name], atol), _close(want[name].double() - far, usual[name], atol))
        for name, atol in limits.items()
    }
    return [name for name, (stays, moves) in agree.items() if bool((stays | moves).all())]


def _floats(want: Outputs, _near: Outputs) -> list[str]:
    """Return the outputs in floating point."""
    return [name for name, value in want.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _numbers(want: Outputs, usual: Outputs) -> list[str]:
    """Return the outputs in floating point, and of int8, as quantized values are."""
    return _floats(want, usual) + [name for name, value in want.items() if getattr(value, "dtype", None) == torch.int8]


def _tensors(want: Outputs, _near: Outputs) -> list[str]:
    return [name for name, value in want.items() if isinstance(value, torch.Tensor)]


def _is_same(got: torch.Tensor | None, want: torch.Tensor) -> bool:
    return got is not None and got.dtype == want.dtype and have_same_bits(got, want)


def _is_far(got: torch.Tensor | None, want: torch.Tensor, blurred: torch.Tensor, by_element: bool = False) -> bool:
    """Return whether an output has NaN, infinity, integers or stable values that are wrong, and far off if in floating point.

    by_element: differences are relative to each element, and not to the largest, because plain values give the bits exactly.
    """
    if got is None or want.shape != blurred.shape:  # of a number of elements that depends on values
        return False
    if got.shape != want.shape:
        return True
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
