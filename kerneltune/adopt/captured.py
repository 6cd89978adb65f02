"""The operators of the capture that KERNELTUNE_CAPTURED names, as `kerneltune --plugin kerneltune.adopt.captured` takes them.

Imports operators.
"""

from typing import Any

from kerneltune.adopt.operators import Numbered, operators, tuned_variant

__all__ = ["Numbered"]


def __getattr__(name: str) -> Any:
    """Return OPS, or the config class of a kernel, by which processes exchange configs.

    Raises:
        AttributeError: there is no such name.
    """
    if name == "OPS":
        return operators()
    for op in operators() if name.startswith("Config_") else ():
        kind = tuned_variant(op).config
        if kind is not None and kind.__name__ == name:
            return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
