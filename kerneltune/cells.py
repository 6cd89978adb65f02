"""Cells of the tables that are printed, and lines of them. Pure; imports the standard library."""

import re
import textwrap
from collections.abc import Mapping

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with control characters, escape sequences and marks of writing direction as visible escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio; None where one of the two is not known."""
    return None if numerator is None or denominator is None else numerator / denominator


def number(value: float | None, digits: int) -> str:
    """Write a number with so many digits behind the point, and no minus before nothing but zeros; empty for None."""
    return "" if value is None else f"{value:z.{digits}f}"


def pairs(values: Mapping[str, object]) -> str:
    """`block=1024 warps=4`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """Words on lines of at most `width` columns, from the second on with an indent; what is longer than a line stays whole."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
