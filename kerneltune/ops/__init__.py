"""The operators: every module or package in this folder that has `OPS`. Its presence is its registration."""

import importlib
import pkgutil
from functools import cache

from kerneltune.spec import Op


@cache
def load() -> dict[str, Op]:
    """All operators by name; imports torch and triton.

    Raises:
        ValueError: two operators have one name.
    """
    found: dict[str, Op] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        for op in importlib.import_module(f"{__name__}.{module.name}").OPS:
            if op.name in found:
                raise ValueError(f"two operators are called {op.name!r}: in {found[op.name].module} and in {op.module}")
            found[op.name] = op
    return found
