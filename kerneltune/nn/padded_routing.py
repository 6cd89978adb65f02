"""Sort tokens by the expert that the router chose, and bring the results back: differentiable, without a wait for the device.

Each expert's rows begin at a multiple of 16, so that fp8 products read them where the gather wrote them: no padding copy.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kerneltune.nn.alignment import aligned_groups


class PaddedRouting(NamedTuple):
    """Say where each of the T k copies of T tokens goes.

    Attributes:
        tokens: (R,) int64, the token of each sorted row; token 0 for rows that pad a group.
        copies: (T k,) int64, the copies in the order of their rows; copy i is of token i // k.
        rows: (T k,) int64, the row of each of these copies.
        places: (T k,) int64, the row of each copy in the order of copies.
        offs: (E,) int32, where the rows of each expert end, multiples of 16.
    """

    tokens: Tensor
    copies: Tensor
    rows: Tensor
    places: Tensor
    offs: Tensor


def route_padded(chosen: Tensor, num_experts: int) -> PaddedRouting:
    """Sort the choices (T, k) of a router by expert. Choices outside of 0 … num_experts - 1 go to the last expert."""
    flat = chosen.reshape(-1)
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts - 1, flat)
    found, copies = torch.sort(flat, stable=True)
    experts = torch.arange(num_experts, device=flat.device, dtype=found.dtype)
    ends = torch.searchsorted(found, experts, right=True, out_int32=True)
    rows, offs, total = aligned_groups(ends, flat.shape[0])
    places = torch.empty_like(copies).scatter_(0, copies, rows)
    tokens = copies.new_zeros(total).scatter_(0, rows, copies // chosen.shape[-1])
    return PaddedRouting(tokens, copies, rows, places, offs)


def permute_padded(x: Tensor, routing: PaddedRouting) -> Tensor:
    """Copy tokens x (T, H) to sorted rows (R, H). Gradients of padding rows must be 0, as `unpermute_padded` makes them."""
    rows: Tensor = _Permute.apply(x, routing.tokens, routing.places)  # type: ignore[no-untyped-call]
    return rows


def unpermute_padded(rows: Tensor, weights: Tensor, routing: PaddedRouting) -> Tensor:
    """Add the sorted rows (R, H) of each token, times the router's weights (T, k), in fp32: (T, H) of the rows' type."""
    x: Tensor = _Unpermute.apply(rows, weights, *routing[:4])  # type: ignore[no-untyped-call]
    return x


class _Permute(torch.autograd.Function):
    """Gather in both directions, so that no addition is atomic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_tokens = x.shape[0]
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        dy = grads[0].index_select(0, places)
        return dy.view(ctx.num_tokens, -1, dy.shape[1]).sum(1), None, None


class _Unpermute(torch.autograd.Function):
    """Gather in both directions."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, tokens: Tensor, copies: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, tokens, copies, rows, places)
        found = y.index_select(0, places).view(*weights.shape, y.shape[1])
        return (found * weights[:, :, None].float()).sum(1).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        y, weights, tokens, copies, rows, places = ctx.saved_tensors
        dx = grads[0].index_select(0, tokens).float()
        sorted_weights = weights.reshape(-1).index_select(0, copies).float()
        row_weights = sorted_weights.new_zeros(tokens.shape[0]).scatter_(0, rows, sorted_weights)
        d_weights = (dx * y).sum(1).index_select(0, places).view(weights.shape).to(weights.dtype)
        return (dx * row_weights[:, None]).to(y.dtype), d_weights, None, None, None, None
