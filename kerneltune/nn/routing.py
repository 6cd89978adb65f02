"""Route tokens to experts and back, with autograd; compiles without a graph break, and CUDA graphs can capture it.

No function waits for the device, and no kernel adds to a gradient in memory: results are the same in every run.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.tl_lib import INTERPRETED
from kerneltune.nn.alignment import row_major
from kerneltune.ops import moe_routing


class Routing(NamedTuple):
    """Hold the places of the rows of tokens, made by `sort_tokens`; M = T K rows.

    Attributes:
        pairs: (M,) int32, the pair token * K + choice of each row; -1 behind the last expert's rows.
        places: (T, K) int32, the row of each pair; -1 for a pair of no expert.
        offs: (E,) int32, where each expert's rows end, as grouped products need it.
    """

    pairs: Tensor
    places: Tensor
    offs: Tensor


def sort_tokens(ids: Tensor, num_experts: int) -> Routing:
    """Sort the choices of a router by expert; the choices of an expert keep the order of the tokens.

    Args:
        ids: (T, K) int32 or int64, the experts of each token, as `topk` returns them; an id outside [0, num_experts) is no
            expert, for example an expert of another device.
        num_experts: E, 1 to 1024.
    """
    if not isinstance(ids, Tensor) or type(num_experts) is not int:
        raise ValueError(f"sort_tokens takes a tensor and a number, got {ids!r} and {num_experts!r}")
    if not (ids.is_cuda or ids.is_meta or INTERPRETED):
        raise ValueError(f"ids must be on a GPU, or kernels interpreted (TRITON_INTERPRET=1), got ids on {ids.device}")
    return Routing(*torch.ops.kerneltune.moe_sort(ids.contiguous(), num_experts))


def permute_tokens(x: Tensor, routing: Routing) -> Tensor:
    """Copy the rows of tokens to their experts, in the order of `routing`; differentiable in x.

    Args:
        x: (T, H) bf16, fp16 or fp32.
        routing: the routing of the same tokens.

    Returns:
        (T K, H), zeros behind the last expert's rows.
    """
    y: Tensor = torch.ops.kerneltune.moe_permute(_rows(x), routing.places, routing.offs)
    return y


def unpermute_tokens(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Sum the rows of each token's experts, times the router's weights, in fp32; differentiable in y and weights.

    Args:
        y: (T K, H) bf16, fp16 or fp32, in the order of `routing`.
        weights: (T, K) bf16, fp16 or fp32; None adds the rows as they are.

    Returns:
        (T, H) of y's type.
    """
    T, K = routing.places.shape
    if y.ndim != 2 or y.shape[0] != T * K:
        raise ValueError(f"y must be ({T * K}, H) as the routing of {T} tokens with {K} choices has it, got {tuple(y.shape)}")
    out: Tensor = combine(_rows(y), routing.places, routing.offs, None if weights is None else weights.contiguous())
    return out


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim != 2 else row_major(x)


@custom_op("kerneltune::moe_combine")
def combine(y: Tensor, places: Tensor, offs: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the rows of each token's experts; `moe_unpermute` with the ends of groups, which the backward pass needs."""
    return moe_routing.moe_unpermute(y, places, weights)


@combine.register_fake
def _(y: Tensor, places: Tensor, offs: Tensor, weights: Tensor | None) -> Tensor:
    return y.new_empty((places.shape[0], y.shape[1]))


def _save_index(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _permute_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return combine(_rows(dy), *ctx.saved_tensors, None), None, None


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, places, offs, weights = inputs
    ctx.save_for_backward(None if weights is None else y, places, offs, weights)


def _combine_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
    y, places, offs, weights = ctx.saved_tensors
    if weights is None:
        return torch.ops.kerneltune.moe_permute(_rows(dout), places, offs), None, None, None
    dy, dweights = torch.ops.kerneltune.moe_unpermute_bwd(_rows(dout), y, places, weights, offs)
    return dy, None, None, dweights


torch.library.register_autograd("kerneltune::moe_permute", _permute_backward, setup_context=_save_index)
combine.register_autograd(_combine_backward, setup_context=_save_all)
