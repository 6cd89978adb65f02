"""Sort the (token, choice) pairs of a router by expert; give the row of every pair, and the end of every expert's rows.

Source: the permute of MoE training frameworks, by their contract.
"""

from typing import NamedTuple

import torch

from kerneltune.kernel_lib.agreement import all_same_bits
from kerneltune.kernel_lib.functions import torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.moe_routing import peers
from kerneltune.ops.moe_routing.contract import CONTRACT, experts_of, sorted_pairs
from kerneltune.ops.moe_routing.kernels.sort import count_pairs, place_pairs, sum_blocks
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

_BLOCK = 128
_MOST_BLOCKS = 1 << 16
_MOST_EXPERTS = 1024
"""Pairs per program; most programs whose counts a program of `sum_blocks` adds, for 8 million pairs in all; most experts
whose counts a program holds in registers."""


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw ids (T, K) and the number of experts."""
    return {"ids": experts_of(case, device, seed), "num_experts": case["E"]}


def reference(inputs: Inputs) -> Outputs:
    """Sort by torch."""
    pairs, places, offs = sorted_pairs(inputs["ids"], inputs["num_experts"])
    return {"pairs": pairs, "places": places, "offs": offs}


def traffic(case: Case) -> Traffic:
    """Count the bytes of the ids read, the pairs, places and ends written."""
    M = case["T"] * case["K"]
    return Traffic(8 * M, 4 * (2 * M + case["E"]))


class SortedPairs(NamedTuple):
    """The order of a router's pairs, which are numbered token * K + choice; M = T K.

    Attributes:
        pairs: (M,) int32, the pair of each row, experts in order and pairs of an expert in order; -1 behind the last
            expert's.
        places: (T, K) int32, the row of each pair; -1 for a pair of no expert.
        offs: (E,) int32, where each expert's rows end.
    """

    pairs: torch.Tensor
    places: torch.Tensor
    offs: torch.Tensor


def _results(ids: torch.Tensor, num_experts: int) -> SortedPairs:
    sizes = ((ids.numel(),), tuple(ids.shape), (num_experts,))
    return SortedPairs(*(ids.new_empty(size, dtype=torch.int32) for size in sizes))


@torch_operator(_results)
@on_its_device
def moe_sort(ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """Sort the pairs of a router by expert, stably, in three launches; the host waits for nothing, and graphs can capture it.

    Args:
        ids: (T, K) int32 or int64, contiguous, the experts of each token; an id outside [0, num_experts) is no expert.
        num_experts: E, 1 to 1024.
    """
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous() or not ids.shape[1]:
        raise ValueError(
            f"ids must be contiguous int32 or int64 (T, K), K at least 1, got {tuple(ids.shape)} {ids.dtype}, "
            f"strides {ids.stride()}"
        )
    if not 1 <= num_experts <= _MOST_EXPERTS:
        raise ValueError(f"num_experts must be 1 to {_MOST_EXPERTS}, got {num_experts}")
    M = ids.numel()
    blocks = cdiv(M, _BLOCK)
    if blocks > _MOST_BLOCKS:
        raise ValueError(f"ids must be at most {_MOST_BLOCKS * _BLOCK} pairs, got {M}")
    found = _results(ids, num_experts)
    if not M:
        found.offs.zero_()
        return found
    counts = ids.new_empty((blocks + 1, num_experts), dtype=torch.int32)
    totals = counts[blocks]
    experts = max(64, next_power_of_2(num_experts + 1))
    count_pairs[(blocks,)](ids, counts, M, E=num_experts, EXPERTS=experts, BLOCK=_BLOCK, num_warps=4)
    sum_blocks[(num_experts,)](
        counts, totals, blocks, E=num_experts, BLOCKS=next_power_of_2(blocks), num_warps=4 if blocks <= 4096 else 16
    )
    place_pairs[(blocks,)](ids, counts, totals, *found, M, E=num_experts, EXPERTS=experts, BLOCK=_BLOCK, num_warps=4)
    return found


def _run(inputs: Inputs, _config: None) -> Outputs:
    return moe_sort(**inputs)._asdict()


OP = Op(
    name="moe_sort",
    dtypes=("int64",),
    inputs=inputs,
    reference=reference,
    compare=all_same_bits,
    traffic=traffic,
    variants=(peers.SORT.eager, Variant("optimized", _run), peers.SORT.compiled),
    module=__name__,
    **{**CONTRACT, "axes": ("T", "E", "K")},
)
