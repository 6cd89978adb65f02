"""Routing of tokens to experts: the cases, the order of rows and the checks that the operators of this family share.

T tokens of H elements choose K of E experts each. A pair is token * K + choice; M = T K.
"""

from functools import lru_cache
from typing import Any

import torch

from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.spec import Case, Inputs, Option

OPTIONS: dict[str, tuple[Option, ...]] = {"routing": ("routed", "one", "dropped")}
"""The experts of a case's tokens: drawn, so that some experts are more popular; the first K for all tokens; drawn, a quarter
of the choices of no expert."""

CALL_OPTIONS: tuple[tuple[str, Option], ...] = (("routing", "routed"),)
"""The options under which configs are looked up: the host does not know how tokens fall to experts."""

CONTRACT: dict[str, Any] = {
    "axes": ("T", "H", "E", "K"),
    "free_axes": ("T", "E", "K"),
    "options": OPTIONS,
    "free_options": tuple(OPTIONS),
}
"""The fields of `Op` that all operators share."""

ROWS: dict[str, Any] = {**CONTRACT, "dtypes": tuple(DTYPE_NAMES.values())}
"""The fields of `Op` that operators on rows of floating-point values share."""


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


def routed(case: Case, device: str, seed: int) -> Inputs:
    """Return pairs (M,), places (T, K) and offs (E,) of a case's tokens, drawn on the host."""
    drawn = _drawn(case["T"], case["E"], case["K"], case.option("routing"), seed)
    return {name: t.to(device, copy=True) for name, t in zip(("pairs", "places", "offs"), drawn, strict=True)}


@lru_cache(maxsize=64)
def _drawn(T: int, E: int, K: int, routing: Option, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `sorted_pairs` of a routing: drawing 32768 tokens takes a second of a core, and every operator asks for them."""
    case = Case("", (("T", T), ("E", E), ("K", K)), "int64", options=(("routing", routing),))
    return sorted_pairs(experts_of(case, "cpu", seed), E)


def sorted_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pairs (M,), places (T, K) and offs (E,), all int32, as `moe_sort` defines them, in plain torch."""
    flat = ids.reshape(-1).long()
    known = (flat >= 0) & (flat < num_experts)
    key, order = flat.masked_fill(~known, num_experts).sort(stable=True)  # torch.where copies a number from the host
    offs = torch.searchsorted(key, torch.arange(num_experts, device=ids.device), right=True)
    row = torch.arange(flat.shape[0], device=ids.device)
    places = torch.empty_like(row).index_copy_(0, order, row)
    pairs = order.masked_fill(row >= offs[-1], -1)
    places = places.masked_fill(~known, -1).view(ids.shape)
    return pairs.int(), places.int(), offs.int()


def check_rows(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = tuple(DTYPE_NAMES)) -> None:
    """Check a matrix of rows whose elements are adjacent."""
    if x.ndim != 2 or x.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be a matrix of {known}, got {tuple(x.shape)} {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"elements of a row of {name} must be adjacent, got strides {x.stride()}")


def check_index(name: str, index: torch.Tensor, shape: tuple[int | None, ...], where: torch.device) -> None:
    """Check a contiguous int32 index; None in its shape stands for any size."""
    fits = index.ndim == len(shape) and all(size is None or size == found for size, found in zip(shape, index.shape, strict=True))
    if not fits or index.dtype != torch.int32 or index.device != where or not index.is_contiguous():
        wanted = "(" + ", ".join("any" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"
        raise ValueError(
            f"{name} must be contiguous int32 {wanted} on {where}, got {tuple(index.shape)} {index.dtype} on {index.device}"
        )


def check_router_weights(weights: torch.Tensor | None, places: torch.Tensor) -> None:
    """Check that weights, unless they are None, fit the places: the same shape and device, contiguous."""
    if weights is None:
        return
    fits = weights.shape == places.shape and weights.dtype in DTYPE_NAMES and weights.device == places.device
    if not fits or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous {tuple(places.shape)} of {', '.join(DTYPE_NAMES.values())} on {places.device}, "
            f"got {tuple(weights.shape)} {weights.dtype} on {weights.device}, strides {weights.stride()}"
        )
