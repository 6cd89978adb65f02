"""Spaces of a variant: whether they make sense, and the same with further values to some knobs, or with fewer.

An operator's own code may fail in any way: what it raises is one line here. Measures nothing. Imports errors and spec.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kerneltune.errors import unknown
from kerneltune.spec import Case, Config, Op, Space, Variant

Given = Sequence[tuple[str, tuple[str, ...]]]
"""Names of knobs and their values as text."""
_Values = tuple[Any, ...]


def widened(variant: Variant, knobs: Given) -> Variant:
    """The variant with further values to some knobs of its space; `valid` still has the last word.

    Raises:
        ValueError: a knob that the variant does not have, or a value of another type.
    """
    return _changed(variant, knobs, lambda offered, given: tuple(dict.fromkeys((*offered, *given))))


def narrowed(variant: Variant, knobs: Given) -> Variant:
    """The variant with these values only to some knobs of its space; a space that lacks one of them raises ValueError.

    Raises:
        ValueError: a knob that the variant does not have, or a value of another type.
    """
    return _changed(variant, knobs, _some_of)


def _some_of(offered: _Values, given: _Values) -> _Values:
    missing = [value for value in given if value not in offered]
    if missing:
        raise unknown("knob", missing[0], offered)
    return given


def _changed(variant: Variant, knobs: Given, change: Callable[[_Values, _Values], _Values]) -> Variant:
    if not knobs:
        return variant
    types = {f.name: f.type for f in fields(variant.config)} if variant.config is not None else {}
    values: dict[str, _Values] = {}
    for name, texts in knobs:
        if name not in types:
            raise unknown("knob", name, types, f" of {variant.name}")
        values[name] = tuple(_typed(name, text, types[name]) for text in texts)

    def space(case: Case) -> Space:
        offered = variant.space(case)
        return {name: change(given, values[name]) if name in values else given for name, given in offered.items()}

    return replace(variant, space=space)


def _typed(name: str, text: str, kind: Any) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"knob: {name}: {text!r}: expected {getattr(kind, '__name__', kind)}") from None


def takes(op: Op, case: Case, variant: Variant) -> bool:
    """Whether a variant takes a case.

    Raises:
        ValueError: `unsupported` raises.
    """
    with _in_one_line(op, case, variant):
        return variant.unsupported(case) is None


def checked_space(op: Op, case: Case, variant: Variant) -> list[Config]:
    """The valid configs of a space, none twice.

    Raises:
        ValueError: no config is valid (names the most frequent reason), a knob has no value or the same one twice, knobs and
            config class disagree, or `space`, `valid`, `default` or `promising` raises.
    """
    with _in_one_line(op, case, variant):
        knobs = variant.space(case)
        for knob, offered in knobs.items():
            if not offered:
                raise ValueError(f"space: {knob}: no value")
            if len(set(offered)) < len(offered):
                raise ValueError(f"space: {knob}: {offered!r}: a value twice")
        found = list(variant.configs(case))
        chosen = [("default", variant.default_config(case)), *(("promising", config) for config in variant.promising(case))]
    if not found:
        raise ValueError(f"{op.name} {variant.name}: no valid config for {case.label}{_why(variant, case)}")
    with _in_one_line(op, case, variant):
        for name, config in chosen:
            if type(config) is not type(found[0]):
                raise ValueError(f"{name}: {config!r}: expected a {type(found[0]).__name__}")
    return found


@contextmanager
def _in_one_line(op: Op, case: Case, variant: Variant) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # an operator's own code may fail in any way
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{op.name} {variant.name}: {case.label}: {kind}{' '.join(str(error).split())}") from error


def _why(variant: Variant, case: Case) -> str:
    """The reason that `valid` gives most often."""
    space = variant.space(case)
    make = partial(_configured, variant, tuple(space))
    reasons = Counter(variant.valid(case, make(values)) for values in itertools.product(*space.values()))
    return f": {reasons.most_common(1)[0][0]} ({reasons.most_common(1)[0][1]} of {reasons.total()} configs)" if reasons else ""


def _configured(variant: Variant, knobs: tuple[str, ...], values: tuple[Any, ...]) -> Config:
    assert variant.config is not None
    return variant.config(**dict(zip(knobs, values, strict=True)))
