"""Sort the (token, choice) pairs of a router by expert: where every row goes, and where every expert's rows end."""

from typing import NamedTuple

import torch

from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.moe_routing.common import MOST_EXPERTS, experts_of, sorted_pairs
from kerneltune.ops.moe_routing.kernels import sort
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Outputs, Traffic

_BLOCK = 128
_MOST_BLOCKS = 1 << 16


class SortedPairs(NamedTuple):
    """The order of a router's pairs, which are numbered token * K + choice; M = T K.

    Attributes:
        pairs: (M,) int32, the pair of each row, experts in order and pairs of an expert in order; -1 behind the last expert's.
        places: (T, K) int32, the row of each pair; -1 for a pair of no expert.
        offs: (E,) int32, where each expert's rows end.
    """

    pairs: torch.Tensor
    places: torch.Tensor
    offs: torch.Tensor


@on_its_device
def moe_sort(ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """Sort the pairs of a router by expert, stably, in three launches; the host waits for nothing, and graphs can capture it.

    Args:
        ids: (T, K) int32 or int64, contiguous, the experts of each token; one outside [0, num_experts) is no expert.
        num_experts: E, 1 to 1024.

    Raises:
        ValueError: a wrong shape, type, stride or number, which it names.
    """
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous() or not ids.shape[1]:
        raise ValueError(
            f"ids must be contiguous int32 or int64 (T, K), K at least 1, got {tuple(ids.shape)} {ids.dtype}, "
            f"strides {ids.stride()}"
        )
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"num_experts must be 1 to {MOST_EXPERTS}, got {num_experts}")
    M = ids.numel()
    blocks = cdiv(M, _BLOCK)
    if blocks > _MOST_BLOCKS:
        raise ValueError(f"ids must be at most {_MOST_BLOCKS * _BLOCK} pairs, got {M}")
    sizes = ((M,), tuple(ids.shape), (num_experts,))
    pairs, places, offs = (ids.new_empty(size, dtype=torch.int32) for size in sizes)
    if not M:
        return SortedPairs(pairs, places, offs.zero_())
    counts = ids.new_empty((blocks + 1, num_experts), dtype=torch.int32)
    totals = counts[blocks]
    experts = max(64, next_power_of_2(num_experts + 1))
    sort.count_pairs[(blocks,)](ids, counts, M, E=num_experts, EXPERTS=experts, BLOCK=_BLOCK, num_warps=4)
    sort.sum_blocks[(num_experts,)](
        counts, totals, blocks, E=num_experts, BLOCKS=next_power_of_2(blocks), num_warps=4 if blocks <= 4096 else 16
    )
    sort.place_pairs[(blocks,)](
        ids, counts, totals, pairs, places, offs, M,
        E=num_experts, EXPERTS=experts, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return SortedPairs(pairs, places, offs)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Return ids (T, K) and the number of experts."""
    return {"ids": experts_of(case, device, seed), "num_experts": case["E"]}


def reference(inputs: Inputs) -> Outputs:
    """Sort by torch."""
    pairs, places, offs = sorted_pairs(inputs["ids"], inputs["num_experts"])
    return {"pairs": pairs, "places": places, "offs": offs}


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare every index."""
    return [error for name in expected for error in same_bits(name, outputs[name], expected[name])]


def traffic(case: Case) -> Traffic:
    """Count the ids read, the pairs, places and ends written."""
    M = case["T"] * case["K"]
    return Traffic(8 * M, 4 * (2 * M + case["E"]))


def run(inputs: Inputs, _config: None) -> Outputs:
    """Run `moe_sort` on a case's inputs."""
    return moe_sort(inputs["ids"], inputs["num_experts"])._asdict()
