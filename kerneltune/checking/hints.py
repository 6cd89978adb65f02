"""Explain the first wrong element of an output, by its value and by the values of its row in the inputs."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kerneltune.interpreter.garbage import INTEGER_GARBAGE
from kerneltune.kernel_lib.check_values import kind_of_row
from kerneltune.spec import Outputs

FIRST_AT = re.compile(r"first at \([^)]*\)")
_NUMBER = r"(-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]\d+)?))"
_VALUES = re.compile(rf"{FIRST_AT.pattern}: {_NUMBER}, expected {_NUMBER}")
_LEAST_HUGE = 1e30
"""A load under a mask without `other` gives the largest and the least value of its type."""


def hint(line: str, outputs: Outputs, expected: Outputs, inputs: Mapping[str, Any], has_garbage: bool) -> str:
    """Return what a line of `compare` about an output lacks: the likely cause, and what its inputs hold there; empty for nothing.

    Args:
        inputs: tensors of the inputs as they were before the run.
        has_garbage: whether a load without `other` left elements out by its mask.
    """
    name = line.partition(": ")[0]
    output, values, first = outputs.get(name), _VALUES.search(line), FIRST_AT.search(line)
    if not isinstance(output, torch.Tensor):
        return ""
    numbers = (float(values[1]), float(values[2])) if values else (math.nan, math.nan)
    cause = _limit_of_type(output, *numbers) if values and output.is_floating_point() else ""
    if not cause and values and has_garbage and _LEAST_HUGE < abs(numbers[0]) < math.inf:
        cause = f"; {values[1]} may come from a load under a mask without `other`"
    cause = cause or _of_integers(output, expected.get(name), has_garbage)
    if not first or "never written" in line + cause:
        return cause
    place = list(map(int, re.findall(r"\d+", first[0])))
    if values and not _holds(output, place, numbers[0]):
        return cause  # `compare` has another view of the output
    return cause + _kind_of_row(output, place, inputs)


def _limit_of_type(output: torch.Tensor, got: float, wanted: float) -> str:
    """Return the limit of a type that explains a wrong element: its largest number, or its smallest step."""
    limits = torch.finfo(output.dtype)
    step = limits.smallest_normal * limits.eps
    if math.isinf(got) and limits.max < abs(wanted) < math.inf:
        return f"; {output.dtype} holds at most {limits.max:g}"
    if 0 < abs(got - wanted) < 1.01 * step:
        return f"; {output.dtype} has steps of {step:.2g} near 0: atol must allow them"
    return ""


def _of_integers(got: torch.Tensor, want: object, has_garbage: bool) -> str:
    """Return the likely cause of integers that checks, or the interpreter, put in undefined elements."""
    if not isinstance(want, torch.Tensor) or got.shape != want.shape:
        return ""
    if got.is_floating_point() or got.is_complex() or got.dtype == torch.bool:
        return ""
    wrong, largest = got[got != want], torch.iinfo(got.dtype).max
    if 2 * int((wrong == largest).sum()) > wrong.numel():
        return f"; {largest} may be an element that is never written: checks fill memory with it"
    if 2 * int((wrong == INTEGER_GARBAGE).sum()) > wrong.numel():
        of_load = ", or a load under a mask without `other`" if has_garbage else ""
        return f"; {INTEGER_GARBAGE} may be a cast of NaN or of a value out of range{of_load}"
    return ""


def _holds(output: torch.Tensor, place: Sequence[int], number: float) -> bool:
    """Return whether an output has a number, printed with six digits, at a place."""
    if len(place) != output.ndim or any(at >= size for at, size in zip(place, output.shape, strict=True)):
        return False
    held = output[tuple(place)].item()
    return math.isclose(held, number, rel_tol=1e-5) or (math.isnan(held) and math.isnan(number))


def _kind_of_row(output: torch.Tensor, place: Sequence[int], inputs: Mapping[str, Any]) -> str:
    """Return what `vary_rows` made of the row at a place in the inputs."""
    inputs_of = dict[str, list[str]]()
    for name, value in inputs.items():
        shape = value.shape[:-1]
        is_inside = len(place) >= len(shape) and all(at < size for at, size in zip(place, shape, strict=False))
        if value.is_floating_point() and value.numel() and shape and output.shape[: len(shape)] == shape and is_inside:
            row = int(torch.arange(shape.numel()).view(shape)[tuple(place[: len(shape)])])
            if kind := kind_of_row(value, row):
                inputs_of.setdefault(kind, []).append(f"row {row} of {name}")
    return "".join(f"; {' and '.join(names)}: {kind}" for kind, names in inputs_of.items())
