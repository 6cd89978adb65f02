"""Find kernels that are wrong where an input is far from 0, or holds a float that a kernel gets. The module knows no operator."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kerneltune.checking.check import Checker, smallest_cases
from kerneltune.interpreter.facts import noting
from kerneltune.spec import Case, Inputs, Op

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
_KEPT = 4
"""Elements that stay as they are, between elements that hold arguments."""
_MOST_CASES, _MOST_S = 3, 5.0
"""The smallest cases, and the processor seconds after which no further input is moved."""


def wrong_far_from_zero(op: Op, cases: Sequence[Case]) -> list[str]:
    """Return a line for each own variant that is wrong with an input around _FAR or -_FAR, and right around 0.

    So a constant is found that a kernel takes for infinity. Only outputs are judged whose reference stays as it is around 0, or
    moves with the input, as in a softmax, a choice of the largest or a maximum. The other inputs are cut to 1; or they are _EQUAL
    throughout, so that products of two inputs are large and equal. Where a step of bf16 changes the reference, only NaN, infinity
    and integers count as wrong.
    """
    begun_s, lines = time.thread_time(), dict[str, str]()
    for case in smallest_cases(op, cases, _MOST_CASES):
        with suppress(Exception):  # the check of the case says why
            wide = {name: value for name, value in op.inputs(case, device="cpu").items() if _is_wide(value)}
            for name, far in itertools.product(wide, (-_FAR, _FAR)):
                others = [other for other in wide if other != name]
                if others and wide[name].dtype == torch.float16:  # products exceed its range
                    continue
                for equal in [others, *([other] for other in others if len(others) > 1)]:
                    if time.thread_time() - begun_s > _MOST_S:
                        return list(lines.values())
                    with suppress(Exception):  # values that the operator refuses
                        for variant, line in _wrong(op, case, partial(_moved, op.inputs, name, equal, far), far):
                            where = f"where {name} is around {far}, in case {case.name}"
                            lines.setdefault(variant, f"{variant} is wrong {where}: {line}")
    return list(lines.values())


def wrong_at_arguments(op: Op, cases: Sequence[Case]) -> list[str]:
    """Return a line for each own variant that is wrong where an input holds float arguments of its kernels, and else is right.

    So a limit is found that counts to the wrong side, such as the upper edge of a histogram's last bin.
    """
    begun_s, lines = time.thread_time(), dict[str, str]()
    for case, variant in itertools.product(smallest_cases(op, cases, _MOST_CASES), op.variants):
        with suppress(Exception):  # the check of the case says why
            config, checker = variant.default_config(case), Checker(op, case, "cpu")
            with noting() as facts:
                errors = variant.is_peer or variant.unsupported(case) or checker.run(variant, config)[1]
            held = sorted({float(fact.text) for fact in facts if fact.kind == "float"})
            for name in (name for name, value in checker.inputs.items() if _is_wide(value) and held and not errors):
                if time.thread_time() - begun_s > _MOST_S:
                    return list(lines.values())
                with suppress(Exception):  # values that the operator refuses
                    holding = Checker(replace(op, inputs=partial(_holding, op.inputs, name, held)), case, "cpu")
                    if wrong := holding.run(variant, config)[1]:
                        where = f"where {name} holds floats of its launches, {', '.join(map('{:g}'.format, held))}"
                        lines.setdefault(variant.name, f"{variant.name} is wrong {where}, in case {case.name}: {wrong[0]}")
    return list(lines.values())


def _holding(inputs: Callable[..., Inputs], name: str, held: Sequence[float], *args: Any, **named: Any) -> Inputs:
    """Return inputs in which some elements of an input are the numbers that its type holds exactly."""
    given = inputs(*args, **named)
    value = given[name].clone()
    exact = [number for number in held if torch.tensor(number, dtype=value.dtype).item() == number]
    for place, number in enumerate(exact):
        value.reshape(-1)[place :: len(exact) + _KEPT] = number
    return {**given, name: value}


def _wrong(op: Op, case: Case, inputs: Callable[..., Inputs], far: int) -> Iterator[tuple[str, str]]:
    """Yield the name and a line of each variant that is wrong with an input around `far`, and right around 0."""
    near, moved, blurred = (
        Checker(replace(op, inputs=partial(inputs, *which)), case, "cpu") for which in ((0, 0), (1, 0), (1, 1))
    )
    judged = {name: want for name, want in moved.expected.items() if _is_blind(want, near.expected[name], far)}
    for variant in op.variants if judged else ():
        if not variant.is_peer and not variant.unsupported(case):
            config = variant.default_config(case)
            outputs, lines = moved.run(variant, config)
            wrong = [name for name, want in judged.items() if lines and _is_far(outputs.get(name), want, blurred.expected[name])]
            if wrong and not near.run(variant, config)[1]:
                yield variant.name, next((line for line in lines if line.startswith(wrong[0])), lines[0])


def _moved(
    inputs: Callable[..., Inputs], name: str, equal: Sequence[str], far: int, moves: int, blurs: int, *args: Any, **named: Any
) -> Inputs:
    """Return inputs with one input moved: its values lie between 0 and `far`, and every type holds them exactly.

    In each row the top value is _TOP steps away from the row's constant, the next values up to _STEPS.

    Args:
        equal: other inputs that are _EQUAL throughout.
        moves: 1 if the constant is `far`, 0 if it is 0.
        blurs: 1 to change each value by a step at most, 0 to keep it.
    """
    given = inputs(*args, **named)
    random = torch.Generator().manual_seed(0)
    ranks = torch.rand(given[name].shape, generator=random).argsort(-1)
    steps = torch.where(ranks == 0, _TOP, (_STEPS + 1 - ranks).clamp(min=0))
    steps += blurs * torch.randint(-1, 2, steps.shape, generator=random)
    values = far * moves + steps * (_STEP if far < 0 else -_STEP)
    others = {other: value.clamp(-1, 1) for other, value in given.items() if _is_wide(value)}
    equals = {other: torch.full_like(given[other], _EQUAL) for other in equal}
    return {**given, **others, **equals, name: given[name].clone().copy_(values)}


def _is_wide(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1 and value.ndim > 0


def _is_blind(want: torch.Tensor, near: torch.Tensor, far: int) -> bool:
    """Return whether each of the reference's values is as around 0, or as far from it as the input."""
    atol = _NEAR * _largest(want)
    return bool((_close(want, near, atol) | _close(want.double() - far, near, atol)).all())


def _is_far(got: torch.Tensor | None, want: torch.Tensor, blurred: torch.Tensor) -> bool:
    """Return whether an output has NaN, infinity, integers or stable values that are far from the expected values."""
    if got is None:
        return False
    is_judged = _close(want, blurred, _STABLE * _largest(want)) | ~got.double().isfinite() | (not want.is_floating_point())
    return bool((is_judged & ~_close(got, want, _GROSS * _largest(want))).any())


def _close(a: torch.Tensor, b: torch.Tensor, atol: float) -> torch.Tensor:
    return torch.isclose(a.double(), b.double(), rtol=0, atol=atol)


def _largest(values: torch.Tensor) -> float:
    """Return the largest finite magnitude; 1 if there is none but 0."""
    finite = values.double()[values.double().isfinite()]
    return float(finite.abs().max()) if finite.any() else 1.0
