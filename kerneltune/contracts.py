"""Check the contract of an operator when it loads: a mistake is one line at once, not a failure after a sweep.

Runs no kernel.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from kerneltune.spec import Case, Op, Variant

_SIZES = (4096, 256, 16)
"""Sizes of all axes of the cases on which spaces are tried: a space has to have a valid config on one of these."""


def check_contract(op: Op) -> None:
    """Check that an operator does not contradict itself.

    Raises:
        ValueError: one line that names operator, variant, field and value.
    """
    for field, given, known in (
        ("free_axes", op.free_axes, op.axes),
        ("free_options", op.free_options, tuple(op.options)),
        ("unseen_options", op.unseen_options or (), op.free_options),
        ("bands", tuple(op.bands), op.free_axes),
    ):
        for name in given:
            if name not in known:
                raise ValueError(f"{op.name}: {field}: {name!r}: expected one of {', '.join(known) or 'none'}")
    for axis, ends in op.bands.items():
        if list(ends) != sorted(set(ends)):
            raise ValueError(f"{op.name}: bands: {axis}: {ends}: expected rising sizes")
    names = [variant.name for variant in op.variants]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{op.name}: variants: {name!r}: expected one variant of each name")
    for variant in op.variants:
        if variant.config is not None:
            _check_variant(op, variant)


def _check_variant(op: Op, variant: Variant) -> None:
    """Check the space and the default of a variant that has knobs."""
    where = f"{op.name} {variant.name}"
    if not dataclasses.is_dataclass(variant.config):
        raise ValueError(f"{where}: config: {variant.config!r}: expected a dataclass")
    if variant.default is None:
        raise ValueError(f"{where}: default: None: expected a function of the case, for {variant.config.__name__}")
    knobs = [knob.name for knob in dataclasses.fields(variant.config)]
    reasons = []
    for case in _cases(op):
        try:
            reason = None if variant.unsupported(case) is not None else _reason(variant, case, knobs)
        except (ValueError, LookupError, ArithmeticError):  # sizes that make no sense together
            continue
        except (AttributeError, NameError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            return
        reasons.append(f"{where}: {reason}, for {case.label}")
    if reasons:
        raise ValueError(reasons[0])


def _reason(variant: Variant, case: Case, knobs: Sequence[str]) -> str | None:
    """Return what is wrong with the space or the default of a variant for a case."""
    space, default = variant.space(case), variant.default_config(case)
    for knob in (*space, *(knob for knob in knobs if knob not in space)):
        if knob not in knobs or knob not in space:
            expected = f"a knob of the config: {', '.join(knobs)}" if knob in space else "values in the space"
            return f"space: {knob!r}: expected {expected}"
    refused = variant.valid(case, default)
    if refused is not None:
        return f"default: {default}: not valid ({refused})"
    return None if next(variant.configs(case), None) else f"space: {dict(space)}: no valid config"


def _cases(op: Op) -> Iterator[Case]:
    options = tuple((name, values[0]) for name, values in op.options.items())
    for size in _SIZES:
        yield Case("contract", tuple((axis, size) for axis in op.axes), op.dtypes[0], op.quants[0], options)
