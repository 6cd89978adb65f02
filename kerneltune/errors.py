"""Write errors on one line."""

import re
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

from kerneltune.wording import first_of, short_dtype

PLACE = "place_in_kernel"
"""Attribute of an error of another process: the answer of `place_in_kernel` there."""
_LONGEST = 200
_TRITON_PLACE = re.compile(r"at \d+:\d+:")
"""First line of Triton's CompilationError; the kernel's code, a caret and the reason follow."""
_PTXAS = re.compile(r"^ptxas\S* .*?\b(?:error|fatal) *: *(.+)", re.MULTILINE)
"""Reason in the output of ptxas, which Triton's PTXASError quotes below a line of its own."""
_INTERPRETERS = re.compile(r"/triton/|/kerneltune/interpreter/\w+\.py$")
"""Path in Triton's interpreter, or in this package's corrections of it."""
_STRANGE = re.compile(rf"<|.*/(?:site|dist)-packages/|.*/lib/python3[^/]*/|{re.escape(str(Path(__file__).parent))}/")
"""Path in generated code, in an installed package, in Python's library or in this package."""
_META = re.compile(r"(\b|_)meta\b", re.IGNORECASE)
_FEW, _MOST = 12, 25
_INSTALLED = re.compile(r"(?<![^\s()'\":,])/[^\s()'\":,]*/(?:site|dist)-packages/")
_PLACE = re.compile(r" \((?>/[^()\n]*/(?:site|dist)-packages/)[^()]*\)")


def first_line(error: BaseException) -> str:
    """Return `TypeError: text`: the first line with text, for Triton's compiler also the last line, for ptxas its reason.

    An error without text has its type alone. An error that Triton's interpreter wrapped is unwrapped, and its line in the kernel
    is named.
    """
    chain = wrapped_by_interpreter(error)
    if len(chain) > 1:
        return f"Triton's interpreter: {place_in_kernel(chain)}{first_line(chain[-1])}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    if len(lines) > 1 and _TRITON_PLACE.fullmatch(lines[0]):
        lines[0] += f" {lines[-1]}"
    if not lines:
        return type(error).__name__
    if type(error).__name__ == "PTXASError" and (reason := _PTXAS.search(str(error))):
        lines[0] = reason[1]
    text = without_places(lines[0])[:_LONGEST].encode(errors="backslashreplace").decode()  # a lone surrogate cannot be printed
    return f"{type(error).__name__}: {text}"


def warning_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> str:
    """Return a warning on a line, with its place unless it is a UserWarning: other messages say nothing without it."""
    return f"warning: {'' if issubclass(category, UserWarning) else f'{filename}:{lineno}: '}{message}"


def wrapped_by_interpreter(error: BaseException) -> list[BaseException]:
    """Return an error, and what Triton's interpreter wrapped in it, the innermost last."""
    chain = [error]
    while type(chain[-1]).__name__ == "InterpreterError" and chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def place_in_kernel(chain: list[BaseException]) -> str:
    """Return `FILE:LINE: ` of the last statement of these errors outside Triton, or their own `PLACE`."""
    import traceback

    for error in reversed(chain):
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not _INTERPRETERS.search(frame.filename)]
        if getattr(error, PLACE, ""):
            return str(getattr(error, PLACE))
        if own:
            return f"{Path(own[-1].filename).name}:{own[-1].lineno}: "
    return ""


def without_places(text: str) -> str:
    """Remove from a text the folders that packages are installed in, which differ on the reader's machine.

    A path with a space is found only if it stands alone in brackets.
    """
    return _INSTALLED.sub("", _PLACE.sub("", text))


def place_of(function: object, error: BaseException | None = None) -> str:
    """Return `FILE:LINE: ` of a function, or of the innermost own statement that led to an error; empty if unknown."""
    import inspect  # slow to import, and --help is to be quick

    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    if code is None:
        return ""
    own = _innermost(f"{Path(code.co_filename).parent}/", error) if error is not None else ""
    return own or f"{Path(code.co_filename).name}:{code.co_firstlineno}: "


@cache
def is_own(folder: str, file: str) -> bool:
    """Return whether a file lies in a folder, and not in an environment or a checkout of this package below the folder."""
    if not folder or not file.startswith(folder):
        return False
    strange = _STRANGE.match(file)
    return strange is None or strange.end() <= len(folder)


def statement_in(folder: str, error: BaseException) -> str:
    """Return `FILE:LINE: ` of the last statement in the files of a folder, or of no installed package, that led to an error.

    The text is empty if no statement of these files led to the error, or if `first_line` names a statement of a kernel.

    folder: path with a slash at its end, or empty.
    """
    return _innermost(folder, error) if len(wrapped_by_interpreter(error)) == 1 else ""


def _innermost(folder: str, error: BaseException) -> str:
    import traceback

    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = (frame for frame in frames if is_own(folder, frame.filename) or not _STRANGE.match(frame.filename))
    return next((f"{Path(frame.filename).name}:{frame.lineno}: " for frame in own), "")


def line_of_inputs(error: BaseException) -> str:
    """Return the line of an error of inputs on device `meta`; if torch refuses the device, the line says what inputs must do."""
    line = first_line(error)
    if not isinstance(error, RuntimeError) or not _META.search(line):
        return line
    branch = 'return torch.empty(shape, dtype=dtype, device=device) for each tensor `if device == "meta"`'
    return f"values are made for device meta, which holds none: expected a branch: {branch}"


def reads_values(error: BaseException) -> bool:
    """Return whether an error says that host code read a value of a tensor without memory."""
    return isinstance(error, RuntimeError | TypeError) and _META.search(first_line(error)) is not None


def unknown(field: str, value: object, known: Iterable[object], more: str = "") -> ValueError:
    """Make the error of an unknown value: the nearest known value, the known values, of many only the count, and `more`."""
    names = [str(name) for name in known]
    near = meant(value, names).replace("; ", "", 1)
    listed = f"{len(names)} names" if near and len(names) > _FEW else first_of(names, _MOST) or "(none found)"
    return ValueError(" ".join(filter(None, [f"{field}: {value!r}:", near, f"expected one of {listed}{more}"])))


def meant(value: object, names: Iterable[str]) -> str:
    """Return `; did you mean NAME?`, the nearest name or short name of an element type; empty if none is near, or for a name."""
    from difflib import get_close_matches  # slow to import, and --help is to be quick

    names = list(names)
    is_unknown = isinstance(value, str) and value not in names
    near = get_close_matches(str(value), [*names, *map(short_dtype, names)], 1) if is_unknown else []
    return f"; did you mean {near[0]}?" if near else ""
