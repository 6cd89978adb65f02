"""Run expert modules of `transformers` in fp8: those with one weight for the gates and up projections of all experts."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from kerneltune.compat import apply_gate, has_own_gate
from kerneltune.nn.converted_products import ConvertedProducts, local_part
from kerneltune.nn.routing import sort_tokens, unpermute_tokens
from kerneltune.nn.swiglu import is_plain_silu, swiglu


def weight_names(module: nn.Module) -> list[str]:
    """Return the names of the weights in the order of their products."""
    return ["gate_up_proj" if cast(Any, module).has_gate else "up_proj", "down_proj"]


def fused_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Send tokens (T, H) through the experts that the router chose, as every `experts_implementation` of the library does.

    Args:
        hidden_states: (T, H).
        top_k_index: (T, k), experts; others than the module's own, as the library marks tokens of other ranks, have weight 0.
        top_k_weights: (T, k).

    Returns:
        (T, H) of the type of hidden_states.
    """
    up, down = weight_names(module)
    routing = sort_tokens(top_k_index, getattr(module, up).shape[0])
    products: ConvertedProducts = module.fp8
    has_default_gate = module.has_gate and module.fp8_default_gate and not has_own_gate(module)
    has_swiglu = has_default_gate and is_plain_silu(module.act_fn)
    if has_swiglu and not module.has_bias and products.takes_swiglu:
        weights = (up, _weight(module, up)), (down, _weight(module, down))
        x = products.gated_experts(hidden_states, *weights, routing)
    else:
        x = products.routed(hidden_states, _weight(module, up), routing, up)
        x = _with_bias(module, up, x, routing.offs)
        x = swiglu(x) if has_swiglu else apply_gate(module, x) if module.has_gate else module.act_fn(x)
        x = products.grouped(x, _weight(module, down), routing.offs, down)
        x = _with_bias(module, down, x, routing.offs)
    return unpermute_tokens(x, routing, top_k_weights).to(hidden_states.dtype)


def _weight(module: Any, name: str) -> Tensor:
    """Return the local part of a weight as (E, K, N)."""
    weight = local_part(getattr(module, name))
    return weight if module.is_transposed else weight.transpose(1, 2)


def _with_bias(module: Any, name: str, y: Tensor, offs: Tensor) -> Tensor:
    return y + _bias_of_rows(module, name, offs, y.shape[0]).to(y.dtype) if module.has_bias else y


def _bias_of_rows(module: Any, name: str, offs: Tensor, num_rows: int) -> Tensor:
    rows = torch.arange(num_rows, device=offs.device, dtype=offs.dtype)
    bias = local_part(getattr(module, f"{name}_bias"))
    return bias[torch.searchsorted(offs, rows, right=True).clamp_(max=offs.shape[0] - 1)]
