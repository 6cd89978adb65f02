"""Share what the routing operators check, and how their cases draw experts. Launches nothing."""

from dataclasses import dataclass

import torch

from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE
from kerneltune.rounding import next_power_of_2
from kerneltune.spec import Case, Option, Space

DTYPES = tuple(DTYPE_NAMES.values())
OPTIONS: dict[str, tuple[Option, ...]] = {"routing": ("routed", "one", "dropped")}
"""The experts of a case's tokens: drawn, some more popular than others; the first K for all tokens; drawn, a quarter of the
choices of no expert."""

MOST_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """How to cut a matrix of tokens.

    Attributes:
        rows: tokens of a program.
        cols: columns that it takes at a time, a power of two.
        warps: warps of a program.
    """

    rows: int
    cols: int
    warps: int


def rows_space(case: Case) -> Space:
    """Return 1 to 8 tokens and 256 columns to a whole row of a program."""
    whole = max(256, next_power_of_2(case["H"]))
    return {
        "rows": (1, 2, 4, 8),
        "cols": tuple(cols for cols in (256, 512, 1024, 2048, 4096, 8192) if cols <= whole),
        "warps": (1, 2, 4, 8),
    }


def rows_valid(case: Case, config: RowsConfig) -> str | None:
    """Return why a config cannot be worth running: 16 to 128 bytes of a row per thread."""
    size = config.rows * config.cols * ITEMSIZE[case.dtype] / (32 * config.warps)
    if config.cols > max(256, next_power_of_2(case["H"])):
        return f"{config.cols} columns of {case['H']}"
    return None if 16 <= size <= 128 else f"{size:g} bytes per thread"


def rows_default(case: Case) -> RowsConfig:
    """Return a config for any shape, by rule: 32 bytes per thread, in rows as long as eight warps take them."""
    itemsize = ITEMSIZE[case.dtype]
    cols = min(max(256, next_power_of_2(case["H"])), 8192 // itemsize)
    warps = max(1, min(8, cols * itemsize // 1024))
    rows = max(1, 1024 * warps // (cols * itemsize))
    return RowsConfig(rows, cols, warps)


def experts_of(case: Case, device: str, seed: int) -> torch.Tensor:
    """Return (T, K) int64, the experts of a case's tokens; -1 is no expert."""
    T, E, K = case["T"], case["E"], case["K"]
    generator = torch.Generator().manual_seed(seed)
    if case.option("routing") == "one":
        return torch.arange(K).expand(T, K).contiguous().to(device)
    popularity = torch.exp(0.5 * torch.randn(E, generator=generator))
    chosen = torch.multinomial(popularity.expand(max(1, T), E), K, generator=generator)[:T]
    if case.option("routing") == "dropped":
        chosen[torch.rand(chosen.shape, generator=generator) < 0.25] = -1
    return chosen.contiguous().to(device)


def sorted_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pairs (M,), places (T, K) and offs (E,), all int32, as `moe_sort` defines them, in plain torch."""
    flat = ids.reshape(-1).long()
    routed = (flat >= 0) & (flat < num_experts)
    key = torch.where(routed, flat, num_experts)
    order = key.argsort(stable=True)
    count = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    row = torch.arange(flat.shape[0], device=ids.device)
    total = count.sum()
    places = torch.empty_like(row).index_copy_(0, order, row)
    pairs = torch.where(row < total, order, -1)
    places = torch.where(routed, places, -1).view(ids.shape)
    return pairs.int(), places.int(), count.cumsum(0).int()


def check_rows(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = tuple(DTYPE_NAMES)) -> None:
    """Check a matrix of rows whose elements are adjacent.

    Raises:
        ValueError: it is not one of these types, or not such a matrix.
    """
    if x.ndim != 2 or x.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be a matrix of {known}, got {tuple(x.shape)} {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"elements of a row of {name} must be adjacent, got strides {x.stride()}")


def check_index(name: str, index: torch.Tensor, shape: tuple[int | None, ...], where: torch.device) -> None:
    """Check a contiguous int32 index; None in its shape stands for any size.

    Raises:
        ValueError: another shape, type or device.
    """
    fits = index.ndim == len(shape) and all(size is None or size == found for size, found in zip(shape, index.shape, strict=True))
    if not fits or index.dtype != torch.int32 or index.device != where or not index.is_contiguous():
        wanted = "(" + ", ".join("any" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"
        raise ValueError(
            f"{name} must be contiguous int32 {wanted} on {where}, got {tuple(index.shape)} {index.dtype} on {index.device}"
        )


def values(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> torch.Tensor:
    """Return normal values of a type."""
    x = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if device != "meta" and x.numel():
        x.normal_(generator=torch.Generator(device=device).manual_seed(seed))
    return x
