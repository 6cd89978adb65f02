"""Values of launches as JSON and back: plain scalars, element types, tuples. Nothing that is executed on load.

Imports the standard library; torch and triton are looked up among the modules that the program has loaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

PLAIN = (bool, int, float, str, type(None))


class NotRecordableError(ValueError):
    """A value that JSON cannot hold as data."""


def read_json(path: Path, largest: int) -> Any:
    """Return what a regular file of JSON holds; never waits for a pipe.

    Raises:
        ValueError: it cannot be read, has more than `largest` bytes, or is no JSON.
    """
    try:
        if not path.is_file():
            raise ValueError("no regular file" if path.exists() else "no such file")
        if path.stat().st_size > largest:
            raise ValueError(f"larger than {largest} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError) as error:
        raise ValueError(getattr(error, "strerror", None) or "JSON: nested too deeply") from error


def encode(value: Any) -> Any:
    """Return a value as JSON.

    Raises:
        NotRecordableError: it is an object of another kind.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        return {"tuple": [encode(item) for item in value]}
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return {"torch": str(value).removeprefix("torch.")}
    if kind.__module__.startswith("triton.language") and kind.__name__ == "dtype":
        return {"triton": str(value)}
    if kind.__module__.startswith("triton.language") and kind.__name__ == "constexpr":
        return encode(value.value)
    raise NotRecordableError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def decode(value: Any) -> Any:
    """Return the value that `encode` made JSON of.

    Raises:
        ValueError: no such value, or the package that has its type is not loaded.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict) and len(value) == 1:
        (kind, what), *_ = value.items()
        if kind == "tuple" and isinstance(what, list):
            return tuple(decode(item) for item in what)
        if kind == "torch" and isinstance(what, str):
            return torch_dtype(what)
        if kind == "triton" and isinstance(what, str):
            return _triton_dtype(what)
    raise ValueError(f"{value!r}: expected a plain value, an element type or a tuple")


def torch_dtype(name: str) -> Any:
    """Return torch's element type of a name.

    Raises:
        ValueError: there is none.
    """
    torch: Any = sys.modules["torch"]
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype: {name!r}: expected the name of an element type of torch")
    return found


def _triton_dtype(name: str) -> Any:
    language: Any = sys.modules["triton.language"]
    try:
        return language.dtype(name)
    except Exception as error:  # an assertion, in the versions seen
        raise ValueError(f"dtype: {name!r}: expected the name of an element type of triton") from error
