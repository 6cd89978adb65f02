"""Name values of cases and inputs that no check tells apart: a kernel that ignores them passes. The module knows no operator."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kerneltune.checking.check import Checker, bytes_of, host_folder
from kerneltune.interpreter.modes import unlaunched
from kerneltune.spec import Case, Inputs, Op, Variant
from kerneltune.task import knobs_of

_BLOCK = 16
"""Least size of a block; smaller knobs are counts."""
_ROW, _LARGE = 8, 10.0
"""Least length of a row, and least large value: a softmax of smaller values needs no maximum."""
_EQUAL = 0.01
"""Relative difference of equal steps: results may be in 16 bits."""
_PLAIN = f"no row of an input is constant or has a value above {_LARGE:g}: draw rows by `vary_rows`"
_FEW_ROWS = 8
"""The smallest cases whose rows are looked at, and in which another value of an input may have an effect."""
_FEW_CASES = 3
"""The reference runs on the largest of so many small cases."""


def blind_spots(op: Op, variant: Variant, cases: Sequence[Case]) -> list[str]:
    """Return lines: types, modes and options that no check tells apart, inputs that are the same, equal rows, unread knobs."""
    with_work = sorted((case for case in cases if op.traffic(case).total), key=lambda case: op.traffic(case).total)
    values = {"dtype": op.dtypes, "quant": op.quants, **op.options}
    ignored = [text for name, offered in values.items() for text in _ignored(op, variant, with_work, name, offered)]
    texts = [*ignored, *_one_type(op, variant, with_work), *_constant(op, with_work)]
    plain = [_PLAIN] if _are_plain(op, with_work) else []
    return [
        *(f"{text}: a kernel that ignores it passes" for text in texts),
        *plain,
        *_equal(op, with_work),
        *_unread(op, with_work),
        *_never_ragged_by_one(op, variant, with_work),
    ]


def _ignored(op: Op, variant: Variant, cases: Sequence[Case], name: str, offered: Sequence[Any]) -> list[str]:
    """Return a text if every value of an option, a type or a mode gives the same inputs, or the same results."""
    others, has_equal = list[tuple[Case, Case]](), False
    for case, value in itertools.product(cases, offered):
        options = tuple((option, value if option == name else present) for option, present in case.options)
        other = replace(case, options=options) if name in dict(case.options) else replace(case, **{name: value})
        with suppress(Exception):  # two values that the operator does not take together
            if other == case:
                continue
            inputs, changed = (op.inputs(either, device="cpu") for either in (case, other))
            if _leaves(inputs) == _leaves(changed):
                has_equal = True
            elif _tensors(inputs) != _tensors(changed) or _leaves(op.reference(inputs)) != _leaves(op.reference(changed)):
                return []
            else:
                others.append((case, other))
    if others and all(_are_results_equal(op, variant, *pair) for pair in others[-_FEW_CASES:]):
        return [f"results are equal for every {name}"]
    return [f"inputs are equal for every {name}"] if has_equal and not others else []


def _are_results_equal(op: Op, variant: Variant, *cases: Case) -> bool:
    """Return whether a variant gives two cases the same outputs, and the operator's own variants the same launches."""
    with suppress(Exception):  # a case that the variant does not support
        outputs, others = (Checker(op, case, "cpu").outputs(variant, variant.default_config(case)) for case in cases)
        own = [variant for variant in op.variants if not variant.is_peer]
        return _leaves(outputs) == _leaves(others) and all(
            _launched(op, it, cases[0]) == _launched(op, it, cases[1]) for it in own
        )
    return False


def _launched(op: Op, variant: Variant, case: Case) -> list[tuple[Any, ...]]:
    """Return the launches of a variant, which may depend on a number of SMs, up to a launch whose values host code reads."""
    with unlaunched(host_folder(op)) as launches, suppress(Exception):
        variant.run(op.inputs(case, device="cpu"), variant.default_config(case))
    return launches.arguments


def _one_type(op: Op, variant: Variant, cases: Sequence[Case]) -> Iterator[str]:
    """Yield a text for each output that is bf16, or fp16, in all cases, though the reference returns more bits."""
    types: dict[str, list[tuple[torch.dtype, torch.dtype]]] = {}
    smallest = {case.dtype: case for case in reversed(cases) if case.quant == cases[0].quant}
    for case in smallest.values() if len(smallest) > 1 else ():
        with suppress(Exception):  # the check of the case says why
            checker = Checker(op, case, "cpu")
            for name, value in checker.outputs(variant, variant.default_config(case)).items():
                wanted = checker.expected[name].dtype
                types.setdefault(name, []).append((value.dtype, wanted))
    for name, (first, *others) in types.items():
        given, wanted = first
        is_wider = wanted in (torch.float32, torch.float64)
        if set(others) == {first} and given.itemsize == 2 and given.is_floating_point and is_wider:
            yield f"{name} is {given} for every dtype"


def _are_plain(op: Op, cases: Sequence[Case]) -> bool:
    """Return whether no row of an input is constant or has a large value, though the reference is not linear in an input."""
    inputs: Inputs = {}
    with_rows = dict[str, None]()
    for case in cases[:_FEW_ROWS]:
        with suppress(Exception):  # the check of the case says why
            inputs = op.inputs(case, device="cpu")
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1 and value.shape[-1] >= _ROW:
                    rows = value.float().reshape(-1, value.shape[-1])
                    if bool((rows == rows[:, :1]).all(1).any()) or bool((rows.abs() > _LARGE).any()):
                        return False
                    with_rows[name] = None
    with suppress(Exception):
        return not all(_is_linear(op, inputs, name) for name in with_rows)
    return False


def _is_linear(op: Op, inputs: Inputs, name: str) -> bool:
    """Return whether an input of zeros, as it is, and doubled changes all outputs by equal steps, as in sums and copies."""
    steps = [tree_leaves(dict(op.reference({**inputs, name: inputs[name] * factor}))) for factor in (0, 1, 2)]
    floats = [step for step in zip(*steps, strict=True) if isinstance(step[0], torch.Tensor) and step[0].is_floating_point()]
    changes = [(once.float() - zero.float(), twice.float() - once.float()) for zero, once, twice in floats]
    return all(torch.allclose(*change, rtol=_EQUAL, atol=_EQUAL * float(change[0].abs().max())) for change in changes)


def _leaves(inputs: Inputs) -> list[Any]:
    """Return what inputs hold, with the bytes of tensors."""
    return [
        (leaf.dtype, leaf.shape, leaf.stride(), _bytes(leaf)) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in tree_leaves(dict(inputs))
    ]


def _tensors(inputs: Inputs) -> list[Any]:
    """Return what tensors of inputs hold."""
    return [held for held in _leaves(inputs) if isinstance(held, tuple) and isinstance(held[-1], bytes)]


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements."""
    return bytes_of(tensor).numpy().tobytes()


def _constant(op: Op, cases: Sequence[Case]) -> Iterator[str]:
    """Yield a text for each input that the reference depends on, if all elements are equal in all cases, whatever the seed.

    Of numbers and flags, 0 and 1 alone count, with which a factor, a shift or a step has no effect.
    """
    seen, of_small = dict[str, set[bytes]](), dict[str, list[Inputs]]()
    for case in cases:
        for seed in (0, 1):
            with suppress(Exception):  # the check of the case says why
                inputs = op.inputs(case, device="cpu", seed=seed)
                for name, value in inputs.items():
                    if isinstance(value, torch.Tensor) and value.numel():
                        first, whole = _bytes(value.reshape(-1)[:1]), _bytes(value)
                        seen.setdefault(name, set()).update({first} if first * value.numel() == whole else {b"", first})
                    elif isinstance(value, int | float):
                        seen.setdefault(name, set()).update({repr(value).encode()} if value in (0, 1) else {b"", b"other"})
                    else:
                        continue
                    if seed == 0 and len(of_small.setdefault(name, [])) < _FEW_ROWS:
                        of_small[name].append(inputs)
        if all(len(values) > 1 for values in seen.values()):
            return
    for name in (name for name, values in seen.items() if len(values) == 1):
        if any(matters(op, inputs, name) for inputs in of_small[name]):
            value = of_small[name][0][name]
            shown = f"{value.reshape(-1)[0].item():g}" if isinstance(value, torch.Tensor) else f"{value}"
            yield f"input {name} is {shown} in all check cases"


def matters(op: Op, inputs: Inputs, name: str) -> bool:
    """Return whether other values of an input change the outputs of the reference."""
    value = inputs[name]
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.is_floating_point():
        changed = (value.float() * 1.5 + 0.75).to(value.dtype)
    elif is_tensor and value.dtype == torch.bool:
        changed = ~value
    else:
        changed = not value if isinstance(value, bool) else value + 1
    with suppress(Exception):  # as an index may be out of range then
        return _leaves(op.reference(inputs)) != _leaves(op.reference({**inputs, name: changed}))
    return False


def _equal(op: Op, cases: Sequence[Case]) -> Iterator[str]:
    """Yield a line for each two inputs that hold the same values in all cases, and a line if `inputs` ignores the seed."""
    are_equal, seeds_matter = dict[tuple[str, str], bool](), list[bool]()
    for case in cases:
        with suppress(Exception):  # the check of the case says why
            inputs, others = (op.inputs(case, device="cpu", seed=seed) for seed in (0, 1))
            seeds_matter.append(_leaves(inputs) != _leaves(others))
            tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
            for pair in itertools.combinations(tensors, 2):
                first, second = (tensors[name] for name in pair)
                is_same = first is not second and (first.dtype, first.shape) == (second.dtype, second.shape)
                are_equal[pair] = are_equal.get(pair, True) and is_same and _bytes(first) == _bytes(second)
                if are_equal[pair] and bool((first.reshape(-1) == first.reshape(-1)[0]).all()):
                    del are_equal[pair]  # `_constant` names constant inputs
    for first_name, second_name in (pair for pair, is_equal in are_equal.items() if is_equal):
        yield f"inputs {first_name} and {second_name} are equal in all check cases: a kernel that reads one twice passes"
    if seeds_matter and not any(seeds_matter):
        yield "inputs are equal for every seed: a kernel that keeps its first results passes"


def _unread(op: Op, cases: Sequence[Case]) -> Iterator[str]:
    """Yield a line for each own variant whose host function reads a knob of its config in none of the smallest cases."""
    for variant in (variant for variant in op.variants if not variant.is_peer and variant.config is not None):
        read, knobs = set[str](), set[str]()
        for case in [case for case in cases if not variant.unsupported(case)][:_FEW_CASES]:
            try:
                config = variant.default_config(case)
                knobs |= knobs_of(config).keys()
                Checker(op, case, "cpu").outputs(variant, _watched(config, read))
            except Exception:  # the check of the case says why
                break
        else:
            if unread := ", ".join(sorted(knobs - read)):
                yield f"{variant.name} reads no {unread} of its config: all values are checked and timed alike"


def _never_ragged_by_one(op: Op, variant: Variant, cases: Sequence[Case]) -> Iterator[str]:
    """Yield a line for each input of ends, such as `cu_seqlens`, in which no sequence is whole blocks and one element long."""
    lengths, blocks = dict[str, set[int]](), set[int]()
    for case in cases:
        with suppress(Exception):  # the check of the case says why
            knobs = knobs_of(variant.default_config(case)).values()
            blocks |= {knob for knob in knobs if type(knob) is int and knob >= _BLOCK}
            inputs = op.inputs(case, device="cpu")
            sizes = {size for value in inputs.values() if isinstance(value, torch.Tensor) for size in value.shape}
            for name, value in inputs.items():
                if _are_ends(value) and int(value[-1]) in sizes - {0}:
                    lengths.setdefault(name, set()).update(value.diff().tolist())
    for name, known in lengths.items():
        if blocks and not any(length > block and length % block == 1 for length in known for block in blocks):
            example = min(blocks) + 1
            yield f"no sequence of {name} has a block and an element, such as {example}: an end that is too small by 1 passes"


def _are_ends(value: Any) -> bool:
    """Return whether a value is a vector of integers that rise from 0."""
    is_vector = isinstance(value, torch.Tensor) and value.ndim == 1 and len(value) > 1
    return is_vector and value.dtype in (torch.int32, torch.int64) and int(value[0]) == 0 and bool((value.diff() >= 0).all())


def _watched(config: Any, read: set[str]) -> Any:
    """Return a copy of a config that adds the names of its attributes to `read` as they are read."""

    def noted(self: object, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    kind = type(config)
    copy: Any = object.__new__(type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": noted}))
    for name, value in knobs_of(config).items():
        object.__setattr__(copy, name, value)
    return copy
