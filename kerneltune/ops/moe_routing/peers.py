"""Routing by torch's own index operators: eager, the `baseline`, and compiled."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kerneltune.kernel_lib.compiled import DEFAULT, EAGER, torch_run
from kerneltune.kernel_lib.groups import aligned_size, aligned_starts
from kerneltune.ops.moe_routing.contract import sorted_pairs
from kerneltune.spec import Case, Variant


class Torch(NamedTuple):
    """The two ways to run a function of torch operators."""

    eager: Variant
    compiled: Variant


def unsupported(case: Case) -> str | None:
    """Say why torch's operators do not support a case."""
    if case.option("routing") == "dropped":
        return "its indices are all of experts"
    return None if case["T"] and case["K"] else "no tokens"


def _variants(function: Callable[..., tuple[torch.Tensor, ...]], tensors: str, results: str, options: str = "") -> Torch:
    """Return the variants that run a function, as `torch_run` takes it."""
    run = torch_run(function, tensors, results, options)
    return Torch(
        Variant("baseline", partial(run, EAGER), unsupported=unsupported, requires=("torch",)),
        Variant("compile", partial(run, DEFAULT), unsupported=unsupported, requires=("torch",), compiles=True),
    )


def _permute(x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
    T, K = places.shape
    return (x.new_empty((T * K, x.shape[1])).index_copy_(0, places.reshape(-1).long(), x.repeat_interleave(K, 0)),)


def _permute_fp8(x: torch.Tensor, pairs: torch.Tensor, offs: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    """Index rows, and copy their transpose to aligned columns, whose number waits for no device."""
    M = pairs.shape[0]
    q = x[pairs // top_k]
    rows = torch.arange(M, device=x.device)
    group = torch.bucketize(rows, offs, right=True)
    shift = aligned_starts(offs) - torch.cat([offs.new_zeros(1), offs[:-1]])
    spread = x.new_zeros((aligned_size(M, offs.shape[0]), x.shape[1])).index_copy(0, rows + shift[group], q)
    return q, spread.t().contiguous().t()


def _unpermute(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    rows = y[places.long()].float()
    return ((rows if weights is None else rows * weights[..., None]).sum(1).to(y.dtype),)


def _unpermute_bwd(dout: torch.Tensor, y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    T, K = places.shape
    spread = (dout.float()[:, None] * weights[..., None]).to(y.dtype).view(T * K, -1)
    flat = places.reshape(-1).long()
    dy = torch.empty_like(y).index_copy_(0, flat, spread)
    return dy, (y[flat].view(T, K, -1).float() * dout.float()[:, None]).sum(2)


SORT = _variants(sorted_pairs, "ids", "pairs places offs", "num_experts")
PERMUTE = _variants(_permute, "x places", "y")
PERMUTE_FP8 = _variants(_permute_fp8, "x pairs offs", "q q_t", "top_k")
UNPERMUTE = _variants(_unpermute, "y places weights", "out")
UNPERMUTE_BWD = _variants(_unpermute_bwd, "dout y places weights", "dy dweights")
"""The peers of each operator: torch's functions in each mode of torch.compile."""
