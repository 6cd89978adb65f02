"""Run torchtitan's grouped experts in fp8: silu(x w1ᵀ) · (x w3ᵀ), then w2ᵀ, for rows that are sorted by expert."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerneltune.nn.converted_products import ConvertedProducts, local_part
from kerneltune.nn.forward_code import names_in_forward

WEIGHT_NAMES = ("w1", "w2", "w3")
_OTHER_ACTIVATIONS = {"gelu", "relu", "sigmoid", "tanh", "elu", "mish", "softplus", "clamp", "clip"}


def is_grouped_experts(module: nn.Module) -> bool:
    """Return whether a module has w1, w2 and w3 alone, and a forward of x and num_tokens_per_expert with SiLU alone."""
    weights = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if set(weights) != set(WEIGHT_NAMES) or any(w.ndim != 3 for w in weights.values()):
        return False
    if list(inspect.signature(type(module).forward).parameters)[1:] != ["x", "num_tokens_per_expert"]:
        return False
    names = names_in_forward(module)
    return "silu" in names and names.isdisjoint(_OTHER_ACTIVATIONS)


def grouped_experts_forward(module: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """Send rows x (M, K), sorted by expert, through their experts.

    Args:
        x: (M, K); rows beyond the counted ones become 0, as token dispatchers pad.
        num_tokens_per_expert: (E,) integers.

    Returns:
        (M, K) of the type of x.
    """
    products: ConvertedProducts = module.fp8
    w1, w2, w3 = (local_part(getattr(module, name)).transpose(1, 2) for name in WEIGHT_NAMES)
    ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    is_counted = torch.arange(x.shape[0], device=x.device)[:, None] < ends[-1]
    offs = torch.cat([ends[:-1], torch.full_like(ends[:1], x.shape[0])])
    rows = torch.where(is_counted, x, 0).bfloat16()
    hidden = F.silu(products.grouped(rows, w1, offs, "w1")) * products.grouped(rows, w3, offs, "w3")
    return products.grouped(hidden, w2, offs, "w2").to(x.dtype)
