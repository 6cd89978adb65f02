"""Check the addresses of a case of any size, without memory."""

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kerneltune.checking.check import (
    host_folder,
    launches_kernel,
    meta_inputs,
    only_calls_torch,
    poisoned_memory,
    smallest_cases,
)
from kerneltune.errors import first_line, is_own, statement_in
from kerneltune.interpreter.facts import Fact, note_facts, noting
from kerneltune.interpreter.faults import fault_of
from kerneltune.interpreter.modes import replaced, strict, unlaunched
from kerneltune.spec import Case, Config, Inputs, Op, Variant
from kerneltune.task import CaseError

_MOST_OFFSET = 2**31 - 1
_SEVERAL = 4
"""Fewest integers of an input whose largest number tells their limit."""

_FEW_CASES = 2
"""Small check cases in which launches are sought of a variant that launches no kernel without memory."""
_WAITS = re.compile(
    r"Tensor\.item\(\)|copy out of meta|aten::(masked_select|_?unique\w*|bincount|equal):|repeat_interleave a meta"
)
"""Errors of functions of torch that wait for a GPU, on tensors without memory."""
_SETS_DEVICE = re.compile(r"\bset_default_(device|tensor_type)\b")


def largest_cases(op: Op, cases: Sequence[Case]) -> list[Case]:
    """Return the case with the most bytes, and the case with the longest of each axis if its offsets may exceed 32 bits."""
    by_bytes = sorted(cases, key=lambda case: op.traffic(case).total)
    longest = [max(by_bytes, key=lambda case: (case[axis], op.traffic(case).total)) for axis, _size in by_bytes[-1].axes]
    return list(dict.fromkeys([by_bytes[-1], *(case for case in longest if _furthest_offset(op, case) > _MOST_OFFSET)]))


def _furthest_offset(op: Op, case: Case) -> int:
    """Return the bytes of `traffic`, or of a larger input, such as a table if a look-up reads few rows."""
    inputs = list[object]()
    with suppress(CaseError):  # the check of the case's addresses says why
        inputs = tree_leaves(dict(meta_inputs(op, case)))
    return max([op.traffic(case).total, *(value.nbytes for value in inputs if isinstance(value, torch.Tensor))])


def address_errors(op: Op, case: Case, variant: Variant, config: Config, checks: Sequence[Case] = ()) -> list[str]:
    """Return the address errors of a variant on a case of any size; nothing is computed and no memory is used.

    The interpreter runs the programs at the corners of every grid on tensors without memory. So the check finds overflows of
    32-bit arithmetic that occur only in cases too large to compute. If addresses depend on values, the list is empty, but for
    overflows of offsets from integers that grow with an axis in the check cases. A kernel's argument that lies on the CPU is an
    error, too, and an operation of torch on several devices, unless they remain if `device=` is never left out.
    """
    try:
        inputs = meta_inputs(op, case)
        largest = _largest_numbers(op, case, variant, inputs, checks)
        with strict(host_folder(op), largest, "meta"), noting() as facts:
            variant.run(inputs, config)
        if any(fact.kind == "on the CPU" for fact in facts):
            return _made_without_device(host_folder(op), variant, inputs, config)
        has_launch = any(fact.kind == "launch" for fact in facts)
        if op.policy != "eager" and op.kind == "foreign":
            note_facts(*(Fact("waits", variant.name, fact.where) for fact in facts if fact.kind == "copies"))
        if op.kind == "foreign" and not has_launch and launches_kernel(op, variant, _small(op, variant, checks)):
            text = f"addresses of {variant.name} in {case.name}: no kernel is launched without memory: is a fake registered?"
            note_facts(Fact("not judged", text))
    except CaseError as error:  # no inputs, or a captured launch that cannot be made again
        return [str(error)]
    except Exception as error:  # code that reads values fails on tensors without memory, which is no address error
        if (fault := fault_of(error)) is not None:
            return [str(fault)]
        if _mixes_devices(error) and (lines := _made_without_device(host_folder(op), variant, inputs, config)):
            return lines
        if op.policy != "eager" and isinstance(error, RuntimeError) and _WAITS.search(str(error)):
            note_facts(Fact("waits", variant.name, statement_in(host_folder(op), error).rstrip(": ")))
        if only_calls_torch(op, variant, checks):
            return []
        where = f"addresses of {variant.name} in {case.name}: host code fails without memory"
        note_facts(Fact("not judged", f"{where}: {statement_in(host_folder(op), error)}{first_line(error)}"))
    return []


def _small(op: Op, variant: Variant, checks: Sequence[Case]) -> list[Case]:
    return smallest_cases(op, [case for case in checks if not variant.unsupported(case)], _FEW_CASES)


def _made_without_device(folder: str, variant: Variant, inputs: Inputs, config: Config) -> list[str]:
    """Return the errors of tensors that lack `device=` on a GPU, too; none if host code in the folder sets a default device.

    Host code is told that there is a GPU, as it may pin memory then, and may give `device="cpu"`. It is not judged if it fails.
    """
    has_gpu: dict[tuple[Any, str], Any] = {(torch.cuda, "is_available"): lambda: True}
    with suppress(Exception), strict(device="meta"), replaced(has_gpu):
        for module in list(sys.modules.values()):
            if is_own(folder, file := getattr(module, "__file__", None) or "") and _SETS_DEVICE.search(Path(file).read_text()):
                return []
        with noting(passes_on=False) as facts:
            mixed = _mixing_error(variant, inputs, config)
        with torch.device("meta"), noting(passes_on=False) as others:
            mixed = None if _mixing_error(variant, inputs, config) else mixed
        if mixed is not None:
            return [f"{statement_in(folder, mixed)}torch needs its tensors on one device: is one made without `device=`?"]
        return sorted(str(fact) for fact in facts - others if fact.kind == "on the CPU")
    return []


def _mixing_error(variant: Variant, inputs: Inputs, config: Config) -> RuntimeError | None:
    """Return the error of an operation of torch on several devices in a run; None for none."""
    try:
        variant.run(inputs, config)
    except RuntimeError as error:
        if _mixes_devices(error):
            return error
        raise
    return None


def _mixes_devices(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and all(name in str(error) for name in ("device", "meta", "cpu"))


def _largest_numbers(op: Op, case: Case, variant: Variant, inputs: Inputs, checks: Sequence[Case]) -> dict[tuple[str, str], int]:
    """Return the largest number of each kernel's argument of integers, if it grows with a size in the check cases.

    Sizes are axes, axes of inputs and inputs that are integers. If several sizes limit an argument, the least limit is taken.
    """
    known = defaultdict[tuple[str, str], list[tuple[dict[str, int], int, int]]](list)

    def integers(of_case: Inputs, config: Config, device: str) -> dict[tuple[str, str], tuple[int, int]]:
        with poisoned_memory(), unlaunched(host_folder(op), device) as launches:  # integers that a kernel writes are the largest
            variant.run(of_case, config)
        return launches.integers

    for check in checks if integers(inputs, variant.default_config(case), "meta") else ():
        with suppress(Exception):  # the record of the check says why a case has no inputs, or why host code fails
            of_check = op.inputs(check, device="cpu")
            for argument, numbers in integers(of_check, variant.default_config(check), "cpu").items():
                known[argument].append((_sizes(check, of_check), *numbers))
    largest: dict[tuple[str, str], int] = {}
    for argument, (size_name, size) in itertools.product(known, _sizes(case, inputs).items()):
        limit = _limit(size, [(sizes.get(size_name, 0), *numbers) for sizes, *numbers in known[argument]])
        if limit is not None:
            largest[argument] = min(limit, largest.get(argument, limit))
    return largest


def _limit(size: int, known: Sequence[Sequence[int]]) -> int | None:
    """Return the limit that a size sets to the numbers of an input, by the check cases; None if it sets none.

    A size limits an input if, with one factor c for all check cases, the largest number is above 2/3 c and at most c times the
    size, and one of these sizes is at least twice another; or if in check cases of different sizes the largest number is always
    the size, or the size less 1. Cases with few integers count only if they agree with this.

    Args:
        size: the size in the largest case.
        known: in each check case the size, the largest number of the input, and how many numbers it holds.
    """
    several = [each for each in known if each[-1] >= _SEVERAL]
    for cases in (several, known):
        below = {of_check - number for of_check, number, _count in cases}
        if len({of_check for of_check, *_ in cases}) > 1 and below in ({0}, {1}):
            return size - below.pop()
    sizes = [of_check for of_check, *_ in several]
    shares = [(number + 1) / max(1, of_check) for of_check, number, _count in several]
    is_share = shares and max(sizes) >= 2 * min(sizes) > 0 and 0 < max(shares) <= 1.5 * min(shares)
    return int(max(shares) * size) - 1 if is_share else None


def _sizes(case: Case, inputs: Inputs) -> dict[str, int]:
    """Return the sizes of a case by name: its axes, the axes of its inputs, and inputs that are integers."""
    shapes = {name: tuple(value.shape) if isinstance(value, torch.Tensor) else (value,) for name, value in inputs.items()}
    of_inputs = {
        f"{name}[{axis}]": size for name, shape in shapes.items() for axis, size in enumerate(shape) if type(size) is int
    }
    return {**of_inputs, **dict(case.axes)}
