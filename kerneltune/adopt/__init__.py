"""Capture the launches of a program's own kernels, tune them offline, and serve the configs without a change of the program.

Importing this package imports nothing else, because every process of an adopted program imports it.
"""

import importlib
import sys
from typing import Any

__all__ = ["autotune", "install"]


def start() -> None:
    """Start the capture or the serving that the environment asks for; a failure costs one line on standard error."""
    try:
        from kerneltune.adopt.startup import start_from_environment

        start_from_environment()
    except Exception as error:  # this package itself cannot be imported: another Python, a broken installation
        sys.stderr.write(f"kerneltune: not started: {type(error).__name__}: {' '.join(str(error).split())[:200]}\n")


def __getattr__(name: str) -> Any:
    """Import `install` or `autotune` at its first use."""
    if home := {"install": "startup", "autotune": "decorator"}.get(name):
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
