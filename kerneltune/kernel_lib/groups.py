"""Make groups of rows for the cases of grouped operators."""

import torch

from kerneltune.spec import Case

GROUP_ALIGNMENT = 128
"""Aligned groups begin at multiples of so many columns of a transposed fp8 operand: a step of a product's contraction."""


def aligned_size(tokens: int, groups: int) -> int:
    """Return how many columns hold any `groups` groups of `tokens` rows in all, each at its `aligned_starts`."""
    return (tokens // GROUP_ALIGNMENT + groups) * GROUP_ALIGNMENT


def aligned_starts(offs: torch.Tensor) -> torch.Tensor:
    """Return (G,) of offs' type, the first column of each aligned group, computed from the group's start and number alone.

    Even with its size rounded up to a multiple of GROUP_ALIGNMENT, no group reaches the start of the next group. The columns up
    to the rounded size hold zeros; all other columns between groups are never read.
    """
    starts = torch.cat([offs.new_zeros(1), offs[:-1]])
    return (starts // GROUP_ALIGNMENT + torch.arange(offs.shape[0], dtype=offs.dtype, device=offs.device)) * GROUP_ALIGNMENT


def align_groups(q: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return rows of q (M, K), any type, copied to (aligned_size, K), zeros elsewhere; aligned casts are checked against them."""
    out = q.new_zeros((aligned_size(q.shape[0], offs.shape[0]), q.shape[1]))
    for (start, end), to in zip(bounds(offs), aligned_starts(offs).tolist(), strict=True):
        out[to : to + end - start] = q[start:end]
    return out


def bounds(offs: torch.Tensor) -> list[tuple[int, int]]:
    """Return where each group begins and ends, on the host."""
    ends = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def group_ends(case: Case, groups: int, device: str, seed: int) -> torch.Tensor:
    """Return (groups,) int32, the row at which each group of a case's M rows ends.

    Values of the option `groups`:
    `balanced`: sizes are equal up to a multiple of 16.
    `zipf`: the i-th largest size is proportional to 1/i; sizes are multiples of 16, in random order.
    `ragged`: groups end at random rows. Some groups are empty; from two groups on, the last group is empty.
    `dropped`: like `ragged`, but the last quarter of the rows belongs to no group.
    `routed`: sizes are the counts of a router that draws the expert of each row; the experts differ in probability.
    """
    M = case["M"]
    generator = torch.Generator().manual_seed(seed)
    if case.option("groups") in ("ragged", "dropped"):
        used = M if case.option("groups") == "ragged" else M * 3 // 4
        ends = torch.randint(0, used + 1, (groups,), generator=generator).sort().values
        ends[1::4] = ends[0::4][: ends[1::4].numel()]
        ends[-2:] = used
    elif case.option("groups") == "routed":
        popularity = torch.exp(0.5 * torch.randn(groups, generator=generator))
        experts = (
            torch.multinomial(popularity, M, replacement=True, generator=generator) if M else torch.zeros(0, dtype=torch.int64)
        )
        ends = torch.bincount(experts, minlength=groups).cumsum(0)
    else:
        shares = torch.ones(groups, dtype=torch.float64)
        if case.option("groups") == "zipf":
            shares = (1.0 / torch.arange(1, groups + 1, dtype=torch.float64))[torch.randperm(groups, generator=generator)]
        ends = (shares.cumsum(0) / shares.sum() * M / 16).round() * 16
        ends[-1] = M
    return ends.clamp(max=M).to(torch.int32).to(device)
