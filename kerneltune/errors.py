"""Write errors on one line. Imports the standard library."""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

_LONGEST = 200
_TRITON_PLACE = re.compile(r"at \d+:\d+:")
"""First line of Triton's CompilationError; the kernel's code follows, a caret, and what is wrong."""
_MANY, _MOST = 24, 60
_INSTALLED = re.compile(r"(?<![^\s()'\":,])/[^\s()'\":,]*/(?:site|dist)-packages/")
_PLACE = re.compile(r" \((?>/[^()\n]*/(?:site|dist)-packages/)[^()]*\)")


def first_line(error: BaseException) -> str:
    """Return `TypeError: text`, the text being the first line that says something, of Triton's compiler also the last.

    The type alone where no line does. Of what Triton's interpreter wraps it is the error itself, and where in the kernel.
    """
    inner = error
    while type(inner).__name__ == "InterpreterError" and inner.__cause__ is not None:
        inner = inner.__cause__
    if inner is not error:
        return f"Triton's interpreter: {_place_in_kernel(inner)}{first_line(inner)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    if len(lines) > 1 and _TRITON_PLACE.fullmatch(lines[0]):
        lines[0] += f" {lines[-1]}"
    return f"{type(error).__name__}: {without_places(lines[0])[:_LONGEST]}" if lines else type(error).__name__


def _place_in_kernel(error: BaseException) -> str:
    """Return `FILE:LINE: ` of the last statement of an error that is none of Triton's own."""
    import traceback

    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "triton" not in Path(frame.filename).parts]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else ""


def without_places(text: str) -> str:
    """Remove from a text the folders that packages are installed in, which differ on the reader's machine.

    A path with a space is found only where it stands alone in brackets.
    """
    return _INSTALLED.sub("", _PLACE.sub("", text))


def place_of(function: object, error: BaseException | None = None) -> str:
    """Return `FILE:LINE: ` of a function, or of its file's statement that led to an error; empty where that is not known."""
    import inspect  # slow to import, and --help is to be quick
    import traceback

    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    if code is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == code.co_filename), code.co_firstlineno)
    return f"{Path(code.co_filename).name}:{line}: "


def unknown(field: str, value: object, known: Iterable[object], more: str = "") -> ValueError:
    """Make the error of an unknown value; it names the known values, then what else may be, then the nearest of them.

    More than a screen of names are only counted where one of them is near, and cut short where none is.
    """
    names = [str(name) for name in known]
    near = meant(value, names)
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    listed = f"{len(names)} names" if near and len(names) > _MANY else ", ".join(names[:_MOST]) + rest or "(none found)"
    return ValueError(f"{field}: {value!r}: expected one of {listed}{more}{near}")


def meant(value: object, names: Iterable[str]) -> str:
    """`; did you mean NAME?`, the nearest name of a text; empty where none is near, or it is one of them."""
    from difflib import get_close_matches  # slow to import, and --help is to be quick

    names = list(names)
    near = get_close_matches(value, names, 1) if isinstance(value, str) and value not in names else []
    return f"; did you mean {near[0]}?" if near else ""
