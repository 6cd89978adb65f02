"""Weights of four bits and numbers whose products are exact, for the tests of `int4_gemm` and of its layer."""

import itertools

import torch

from kerneltune.ops.int4_gemm import configs
from kerneltune.ops.int4_gemm.packing import Codes
from kerneltune.spec import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def some_codes(
    rows: int, depth: int, group: int, zeros: bool = True, dtype: torch.dtype = torch.float16, zero: int | None = None
) -> Codes:
    """Make random codes and zero points, or the given code everywhere; scales that are powers of two."""
    codes = torch.randint(0, 16, (rows, depth), dtype=torch.uint8, device=DEVICE)
    scales = torch.exp2(torch.randint(-2, 2, (rows, depth // group), device=DEVICE)).to(dtype)
    z = torch.randint(1, 16, scales.shape, dtype=torch.uint8, device=DEVICE) if zeros else None
    return Codes(codes, scales, z if z is None or zero is None else z.fill_(zero))


def whole_numbers(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, (rows, depth), device=DEVICE).to(dtype)


def exact(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product in fp64, rounded once."""
    depth = codes.codes.shape[1]
    z = codes.zeros.double() if codes.zeros is not None else torch.full_like(codes.scales, 8).double()
    group = depth // codes.scales.shape[1]
    w = (codes.codes.double() - z.repeat_interleave(group, 1)) * codes.scales.double().repeat_interleave(group, 1)
    y = x.double() @ w.t()
    return (y if bias is None else y + bias.double()).to(x.dtype)


def case_of(tokens: int, rows: int, depth: int, group: int = 64, zeros: bool = False) -> Case:
    sizes = (("N", tokens), ("M", rows), ("K", depth))
    return Case("", sizes, "float16", "int4", (("group", group), ("zeros", zeros), ("bias", False)))


def configs_of(case: Case) -> list[configs.Int4Config]:
    products = itertools.product(*configs.space(case).values())
    return [c for c in (configs.Int4Config(*values) for values in products) if configs.invalid(case, c) is None]


def warpgroups(tokens: int, splits: int, blocks: int = 1) -> configs.Int4Config:
    return configs.Int4Config(tokens, 64, 1, splits, prefetch=True, blocks=blocks, warpgroup=True)


def tokens_of(count: int, depth: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return integers and, in every row, 3.5: its scale is a power of two, so that the cast is exact."""
    x = whole_numbers(count, depth, dtype)
    x[:, 0] = 3.5
    return x
