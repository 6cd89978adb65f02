"""Read the code of a kernel and of its helpers: a digest, the functions, and the globals that they read."""

import dis
import hashlib
import inspect
from contextlib import suppress
from functools import cache
from typing import Any

from kerneltune.adopt.arguments import NotRecordableError, encode_value, is_function
from kerneltune.source_modules import code_text

_MOST_HELPER_LAYERS = 4
"""Most decorators around a function that a kernel calls."""


@cache
def bytecode_digest(function: Any) -> str:
    """Return a digest of the bytecode of a kernel and of its helpers, 1000 times faster than the digest of the source.

    Equal digests mean equal code. Each version of Python compiles a source to other bytecode.
    """
    digest, seen = hashlib.sha256(), {function}

    def add(reached: Any) -> None:
        digest.update(code_text(reached.__code__, reached.__doc__).encode())
        for name in reached.__code__.co_names:
            value = reached.__globals__.get(name)
            if isinstance(value, bool | int | float | str):
                digest.update(repr((name, value)).encode())
            elif (helper := _helper(reached, name)) is not None and helper not in seen:
                seen.add(helper)
                add(helper)

    add(function)
    return digest.hexdigest()[:16]


def _helper(function: Any, name: str) -> Any:
    """Return the function of a kernel's own package that the global `name` of the kernel is or wraps; None for another value."""
    value = function.__globals__.get(name)
    for _ in range(_MOST_HELPER_LAYERS):
        value = getattr(value, "fn", value)
    packages = [str(member.__module__).partition(".")[0] for member in (function, value) if inspect.isfunction(member)]
    return value if len(packages) == 2 and packages[0] == packages[1] else None


@cache
def functions_of(function: Any) -> tuple[Any, ...]:
    """Return a kernel's function and the helpers of its package that it calls, helpers of helpers as well."""
    functions = [function]
    for reached in functions:
        helpers = [_helper(reached, name) for name in _globals_named(reached)]
        functions += [helper for helper in helpers if helper is not None and helper not in functions]
    return tuple(functions)


@cache
def _globals_named(function: Any) -> list[str]:
    """Return the names of the globals that a function reads."""
    names = (str(step.argval) for step in dis.get_instructions(function) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return list(dict.fromkeys(names))


def read_globals(function: Any) -> dict[str, Any]:
    """Return the plain values of the globals that a kernel and its helpers read, as JSON, by `function.name`."""
    plain = {}
    for reached in functions_of(function):
        for name in _globals_named(reached):
            value = reached.__globals__.get(name)
            with suppress(NotRecordableError):
                if name in reached.__globals__ and not is_function(value):  # functions are in the digest of the source
                    plain[f"{reached.__name__}.{name}"] = encode_value(value)
    return plain
