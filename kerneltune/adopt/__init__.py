"""Kernels that exist already: capture their launches, tune them offline, serve the result without touching the program.

Importing this package imports nothing else, because every process of an adopted program does.
"""

from typing import Any

__all__ = ["autotune", "install"]


def __getattr__(name: str) -> Any:
    """Import `install` or `autotune` when it is asked for.

    Raises:
        AttributeError: the package has no such name.
    """
    if name == "install":
        from kerneltune.adopt.startup import install

        return install
    if name == "autotune":
        from kerneltune.adopt.decorator import autotune

        return autotune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
