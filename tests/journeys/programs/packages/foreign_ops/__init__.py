"""A package as somebody else might ship it: it knows nothing of kerneltune."""

from .functional import scaled_sum, shifted

__all__ = ["scaled_sum", "shifted"]
