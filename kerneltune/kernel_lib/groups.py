"""Groups of rows, as cases of grouped operators name them. Knows no operator. May import torch and spec."""

import torch

from kerneltune.spec import Case


def bounds(offs: torch.Tensor) -> list[tuple[int, int]]:
    """Where each group begins and ends, on the host."""
    ends = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def group_ends(case: Case, groups: int, device: str, seed: int, multiple: int = 1) -> torch.Tensor:
    """(groups,) int32, where each group of a case's M rows ends.

    The option `groups`: `balanced`, equal up to a multiple of 16; `zipf`, the i-th largest as 1/i, multiples of 16, shuffled;
    `ragged`, cut at random multiples of `multiple`, some of the groups empty, from two on the last among them.
    """
    M = case["M"]
    generator = torch.Generator().manual_seed(seed)
    if case.option("groups") == "ragged":
        ends = torch.randint(0, M // multiple + 1, (groups,), generator=generator).sort().values * multiple
        ends[1::4] = ends[0::4][: ends[1::4].numel()]
        ends[-2:] = M
    else:
        shares = torch.ones(groups, dtype=torch.float64)
        if case.option("groups") == "zipf":
            shares = (1.0 / torch.arange(1, groups + 1, dtype=torch.float64))[torch.randperm(groups, generator=generator)]
        ends = (shares.cumsum(0) / shares.sum() * M / 16).round() * 16
        ends[-1] = M
    return ends.clamp(max=M).to(torch.int32).to(device)
