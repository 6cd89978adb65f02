"""Tune and benchmark GPU kernels. Importing this package imports nothing else.

PYTEST_DONT_REWRITE: captured and served processes import this package before pytest starts, and pytest would warn of the import.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `autotune`, the drop-in for triton.autotune, at its first use."""
    if name == "autotune":
        from kerneltune.adopt.decorator import autotune

        return autotune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that a shell or a notebook completes."""
    return [*globals(), "autotune"]
