"""Name values of cases and inputs that no check tells apart: a kernel that ignores them passes. The module knows no operator."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kerneltune.spec import Case, Inputs, Op

_FEW_CASES = 3
"""The reference runs on the largest of so many small cases."""


def blind_spots(op: Op, cases: Sequence[Case]) -> list[str]:
    """Return a text for each type, mode or option that `inputs` ignores, and for each input that is the same in all cases."""
    with_work = sorted((case for case in cases if op.traffic(case).total), key=lambda case: op.traffic(case).total)
    values = {"dtype": op.dtypes, "quant": op.quants, **op.options}
    ignored = [
        f"inputs are equal for every {name}" for name, offered in values.items() if _is_ignored(op, with_work, name, offered)
    ]
    return [*ignored, *(f"input {name} is {value} in all check cases" for name, value in _constant(op, with_work))]


def _is_ignored(op: Op, cases: Sequence[Case], name: str, offered: Sequence[Any]) -> bool:
    """Return whether no value of a type, a mode or an option changes the inputs of any case."""
    num_equal = 0
    for case, value in itertools.product(cases, offered):
        options = tuple((option, value if option == name else its) for option, its in case.options)
        other = replace(case, options=options) if name in dict(case.options) else replace(case, **{name: value})
        with suppress(Exception):  # two values that the operator does not take together
            if other != case and _leaves(op.inputs(case, device="cpu")) != _leaves(op.inputs(other, device="cpu")):
                return False
            num_equal += other != case
    return num_equal > 0


def _leaves(inputs: Inputs) -> list[Any]:
    """Return what inputs hold, with the bytes of tensors."""
    return [
        (leaf.dtype, leaf.shape, leaf.stride(), _bytes(leaf)) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in tree_leaves(dict(inputs))
    ]


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _constant(op: Op, cases: Sequence[Case]) -> Iterator[tuple[str, str]]:
    """Yield the inputs whose elements are all equal in all cases, whatever the seed, and on which the reference depends."""
    seen, of_small = dict[str, set[bytes]](), dict[str, Inputs]()
    for case in cases:
        for seed in (0, 1):
            with suppress(Exception):  # the check of the case says why
                inputs = op.inputs(case, device="cpu", seed=seed)
                for name, value in inputs.items():
                    if isinstance(value, torch.Tensor) and value.numel():
                        first, whole = _bytes(value.reshape(-1)[:1]), _bytes(value)
                        seen.setdefault(name, set()).update({first} if first * value.numel() == whole else {b"", first})
                        if name not in of_small or case in cases[:_FEW_CASES]:
                            of_small[name] = inputs
        if all(len(values) > 1 for values in seen.values()):
            return
    for name in (name for name, values in seen.items() if len(values) == 1):
        if _matters(op, of_small[name], name):
            yield name, f"{of_small[name][name].reshape(-1)[0].item():g}"


def _matters(op: Op, inputs: Inputs, name: str) -> bool:
    """Return whether other values of an input change what the reference returns."""
    value = inputs[name]
    whole = ~value if value.dtype == torch.bool else value + 1
    changed = (value.float() * 1.5 + 0.75).to(value.dtype) if value.is_floating_point() else whole
    with suppress(Exception):  # as an index may be out of range then
        return _leaves(op.reference(inputs)) != _leaves(op.reference({**inputs, name: changed}))
    return False
