"""Write counts, lists, named values, element types and words on lines in the same way everywhere."""

import re
import textwrap
from collections.abc import Iterable, Mapping

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_SHORT_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip


def dtype_name(text: str) -> str:
    """Return torch's name of an element type, `bfloat16` for `bf16`, also in each part of `bf16+fp32`; keep any other text."""
    names = [name.removeprefix("torch.") for name in text.split("+")]
    return "+".join(_SHORT_DTYPES.get(name.lower(), name) for name in names)


def short_dtype(name: str) -> str:
    """Return the short name of an element type, `bf16` for `bfloat16`, also in each part of a sum; keep any other name."""
    shorts = {whole: short for short, whole in reversed(_SHORT_DTYPES.items())}
    return "+".join(shorts.get(whole, whole) for whole in name.split("+"))


def printable(text: str) -> str:
    """Return the text with control characters, escape sequences and marks of writing direction as visible escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 row`, `3 rows`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def assignments(values: Mapping[str, object]) -> str:
    """Return values with their names: `block=1024 warps=4`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def differing(first: Mapping[str, object], second: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the values of each side that the other side lacks or has otherwise, with their names; None if there are none."""
    names = [name for name in {**first, **second} if (name in first, first.get(name)) != (name in second, second.get(name))]
    if not names:
        return None
    return _named(names, first), _named(names, second)


def _named(names: Iterable[str], values: Mapping[str, object]) -> str:
    return assignments({name: values[name] for name in names if name in values}) or "none"


def first_of(names: Iterable[str], most: int) -> str:
    """Return the first names, and how many more there are: `a, b and 3 more`."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """Return words on lines of at most `width` characters, from the second line on with an indent; longer words stay whole."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
