"""Spaces of a variant with further values to some knobs, or with fewer.

Measures nothing. Imports spec.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from kerneltune.spec import Case, Space, Variant

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
        raise ValueError(f"knob: {missing[0]!r}: expected one of {', '.join(map(str, offered))}")
    return given


def _changed(variant: Variant, knobs: Given, change: Callable[[_Values, _Values], _Values]) -> Variant:
    if not knobs:
        return variant
    types = {f.name: f.type for f in fields(variant.config)} if variant.config is not None else {}
    values: dict[str, _Values] = {}
    for name, texts in knobs:
        if name not in types:
            raise ValueError(f"knob: {name!r}: {variant.name} has {', '.join(types) or 'none'}")
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
