"""Perturb the outputs of a variant, to test an operator's `compare`: a comparison that accepts wrong outputs checks nothing.

`compare` must refuse each mutation on at least a single check case. The module knows no operator.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from kerneltune.checking.check import Checker, bytes_of, have_same_bits
from kerneltune.spec import Case, Op, Outputs, Variant
from kerneltune.task import CaseError, Outcome

_MOST_CASES = 8
_TAIL = 8
"""The last `1 / _TAIL` of the elements of each row is zeroed."""
_SCALED, _WRONG_SCALE = 1.01, 1.1
_INTEGER_STEP = 64
"""Difference of a changed integer: more than a step of int8, which a comparison may accept."""
MEANING = f"""one element  one value x becomes 2x + 1, an integer differs by {_INTEGER_STEP}
one row      the last row becomes a copy of the first
exchange     the first two elements of each row change places
zeroed tail  the last 1/{_TAIL} of each row becomes 0
truncation   every second value moves a step to 0; fp32 and fp64 are cut to half
scale x F    every value is multiplied by F, in fp8 before the cast"""


def _one_element(values: torch.Tensor) -> torch.Tensor:
    """Change a value near the middle that 2x + 1 changes: NaN, infinity and 448 in fp8 may stay as they are."""
    flat = values.reshape(-1).clone()
    changed = (flat.float() * 2 + 1).to(values.dtype) if values.is_floating_point() else flat ^ _INTEGER_STEP
    before, after = flat.double(), changed.double()
    differ = ((before != after) & ~before.isnan()).nonzero().flatten()
    if differ.numel():
        place = differ[(differ - flat.numel() // 2).abs().argmin()]
        flat[place] = changed[place]
    return flat.reshape(values.shape)


def _exchanged(values: torch.Tensor) -> torch.Tensor:
    """Exchange the first two elements of each row."""
    changed = values.clone()
    if values.ndim and values.shape[-1] > 1:
        changed[..., 0], changed[..., 1] = values[..., 1], values[..., 0]
    return changed


def _one_row(values: torch.Tensor) -> torch.Tensor:
    rows = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1).clone()
    rows[-1] = rows[0] if rows.shape[0] > 1 else torch.zeros_like(rows[-1])
    return rows.reshape(values.shape)


def _truncated(values: torch.Tensor) -> torch.Tensor:
    """Move every second value a step closer to zero; clear the bits of fp32 that bf16 lacks, and of fp64 that fp32 lacks."""
    if values.dtype == torch.float64:
        return values.float().double()
    if values.dtype == torch.float32:
        return (values.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
    bits = values.contiguous().view(torch.uint8 if values.dtype.itemsize == 1 else torch.int16).reshape(-1).clone()
    every_other = torch.arange(bits.numel()) % 2 == 0
    bits -= ((values.reshape(-1).float() != 0) & every_other).to(bits.dtype)
    return bits.view(values.dtype).reshape(values.shape)


def _zeroed_tail(values: torch.Tensor) -> torch.Tensor:
    changed = values.clone()
    length = values.shape[-1] if values.ndim else 1
    changed.reshape(-1, length)[:, length - max(1, length // _TAIL) :] = 0
    return changed


def _scaled(factor: float, values: torch.Tensor) -> torch.Tensor:
    """Multiply values by a factor. In fp8 a factor before the cast moves a share of the values a step away from zero."""
    wide = values.float()
    if values.dtype.itemsize > 1:
        return (wide * factor).to(values.dtype)
    bits = bytes_of(values).view(values.shape)
    step = ((bits + 1).view(values.dtype).float() - wide).abs()
    share = (factor - 1) * wide.abs() / step
    is_moved = step.isfinite() & (torch.rand(wide.shape, generator=torch.Generator().manual_seed(0)) < share)
    return (bits + is_moved.to(torch.uint8)).view(values.dtype)


_WRONG = f"scale x {_WRONG_SCALE}"
_MUTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one element": _one_element,
    "one row": _one_row,
    "exchange": _exchanged,
    "zeroed tail": _zeroed_tail,
    "truncation": _truncated,
    f"scale x {_SCALED}": partial(_scaled, _SCALED),
    _WRONG: partial(_scaled, _WRONG_SCALE),
}
_GROSS = {"one element", "one row", "zeroed tail"}
_OF_INTEGERS = {*_GROSS, "exchange"}


def mutate(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Outcome]:
    """Perturb each output of a variant on the smaller check cases, and let `compare` judge the perturbed outputs.

    Return an outcome for each output, whose reason names the mutations that `compare` refused on some case, and the mutations
    that it accepted on all cases. The outcome is `failed` if `compare` accepted a wrong element, a wrong row or a zeroed tail,
    which no tolerance may hide.

    Raises:
        CaseError: a case has no inputs or no reference, the variant is wrong as it is, or it has no outputs.
    """
    return [_outcome(f"{op.name} {name}", is_refused) for name, is_refused in _refusals(op, variant, cases).items()]


def accepted_mutations(op: Op, variant: Variant, cases: Sequence[Case]) -> tuple[list[str], list[str]]:
    """Return the outputs of which `compare` refused nothing, and a text for each other output with accepted gross errors.

    If a CaseError is raised, whose cause the checks tell, there are none.
    """
    seen: dict[str, dict[str, bool]] = {}
    with suppress(CaseError):
        seen = _refusals(op, variant, cases)
    wrong = [mutation for mutation in _MUTATIONS if mutation in {*_GROSS, _WRONG}]
    gross = {name: [mutation for mutation in wrong if not refused.get(mutation, True)] for name, refused in seen.items()}
    ignored = [name for name, refused in seen.items() if not any(refused.values())]
    return ignored, [f"{name} ({', '.join(taken)})" for name, taken in gross.items() if taken and name not in ignored]


def _refusals(op: Op, variant: Variant, cases: Sequence[Case]) -> dict[str, dict[str, bool]]:
    """Return by output and mutation whether `compare` refused the mutation on some case.

    An output of length 1 along its first axis counts only if it has this length in all cases: `compare` may look at the first
    matrix alone.
    """
    seen: dict[tuple[str, bool], dict[str, bool]] = {}
    supported = [case for case in cases if variant.unsupported(case) is None and op.traffic(case).total]
    for case in sorted(supported, key=lambda case: op.traffic(case).total)[:_MOST_CASES]:
        checker = Checker(op, case, "cpu")
        config = variant.default_config(case)
        outputs, wrong = checker.run(variant, config)
        if wrong:
            raise CaseError(f"{op.name} {variant.name} {case.name}: {wrong[0]}: only outputs of a right variant can be perturbed")
        for name, mutation, changed in _mutated(outputs):
            refused = bool(checker.disagreements({**outputs, name: changed}))
            of_output = seen.setdefault((name, changed.shape[:1].numel() > 1), {})
            of_output[mutation] = of_output.get(mutation, False) or refused
    if not seen:
        raise CaseError(f"{op.name} {variant.name}: no check case gives outputs that can be perturbed")
    return {name: seen.get((name, True)) or seen[name, False] for name, _is_long in seen}


def _outcome(label: str, is_refused: Mapping[str, bool]) -> Outcome:
    refused, accepted = ([name for name in _MUTATIONS if is_refused.get(name) is wanted] for wanted in (True, False))
    is_wrong = bool(_GROSS.intersection(accepted)) or not refused
    line = f"{label}: compare refuses {', '.join(refused) or 'nothing'}"
    return Outcome("failed" if is_wrong else "checked", f"{line}; accepts {', '.join(accepted)}" if accepted else line)


def _mutated(outputs: Outputs) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield each output's name, the name of a mutation and the mutated output, if the mutation changed the output."""
    for name, output in outputs.items():
        if not isinstance(output, torch.Tensor) or not output.numel() or output.dtype == torch.bool:
            continue
        values = torch.view_as_real(output).reshape(*output.shape[:-1], -1) if output.is_complex() else output
        for mutation, change in _MUTATIONS.items():
            if values.is_floating_point() or mutation in _OF_INTEGERS:
                changed = change(values)
                if not have_same_bits(changed, values):
                    real = changed.reshape(*output.shape, 2) if output.is_complex() else changed
                    yield name, mutation, torch.view_as_complex(real) if output.is_complex() else changed
