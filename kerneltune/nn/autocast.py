"""Follow autocast regions."""

import torch
from torch import Tensor


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the type of a product's result with x: the autocast type, or else x's type."""
    kind = x.device.type
    in_region = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has no autocast, and torch raises
    return torch.get_autocast_dtype(kind) if in_region else x.dtype


def in_autocast(x: Tensor) -> Tensor:
    """Return x in the type of the autocast region, or x itself outside of autocast."""
    return x.to(output_dtype(x))
