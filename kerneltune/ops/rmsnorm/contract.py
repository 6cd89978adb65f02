"""Define the formulas, inputs and options that the operators of RMSNorm share, with fp8 output under delayed scaling.

    r_i = 1 / sqrt(mean_j(x_ij²) + eps)      y_ij = x_ij * r_i * γ_j      q_ij = fp8(clamp(y_ij * scale))
    dx_ij = r_i * (dz_ij γ_j - r_i² s_i x_ij / N),  s_i = Σ_j dz_ij x_ij γ_j      dγ_j = Σ_i dz_ij x_ij r_i

All in fp32 inside; with zero-centred gamma γ = weight + 1, added in fp32. The formulas here share no code with the kernels.
Source: the contract of TransformerEngine's Triton RMSNorm and of its pull request 593.
"""

from dataclasses import replace
from typing import Any

import torch

from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like
from kerneltune.kernel_lib.check_values import draw
from kerneltune.spec import Case, Inputs, Option

EPS = 1e-5
"""The epsilon of all cases."""
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""torch's type of each fp8 format."""

ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Largest relative error of rounding to each type."""

CONTRACT: dict[str, Any] = {"axes": ("M", "N"), "free_axes": ("M",), "dtypes": tuple(DTYPE_NAMES.values())}
"""The fields of `Op` that all operators share."""

QUANTS = ("none", "fp8", "fp8_t")
"""The output of a forward: of x's dtype; fp8; fp8 and its transpose."""

SUM_OPTIONS: dict[str, tuple[Option, ...]] = {"zero_centered": (False, True), "weight": ("same", "float32", "none")}
"""The options where a residual is added. weight: of x's dtype, of fp32, or no weight."""


def uniform(shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Draw values between low and high, the same for the same seed; none on device `meta`."""
    return draw("uniform_", shape, dtype, device, seed, low, high)


def sum_as_called(case: Case) -> Case:
    """Return the case with `SUM_OPTIONS` that a call looks up: an fp32 weight is of x's dtype where x is fp32."""
    is_same = case.dtype == "float32" and case.option("weight") == "float32"
    return replace(case, options=(*case.options[:-1], ("weight", "same"))) if is_same else case


SUM: dict[str, Any] = {
    **CONTRACT, "options": SUM_OPTIONS, "free_options": tuple(SUM_OPTIONS), "as_called": sum_as_called,
}  # fmt: skip
"""The fields of `Op` that the operators with a residual share."""


def weight_of(case: Case, device: str, seed: int) -> torch.Tensor | None:
    """Draw the weight (N,) of a case with `SUM_OPTIONS`, or return None."""
    kind = case.option("weight")
    if kind == "none":
        return None
    return uniform((case["N"],), 0.5, 1.5, getattr(torch, case.dtype) if kind == "same" else torch.float32, device, seed)


def weight_bytes(case: Case) -> int:
    """Return the bytes of the weight of a case with `SUM_OPTIONS`."""
    kind = case.option("weight")
    itemsize: int = 0 if kind == "none" else torch.float32.itemsize if kind == "float32" else getattr(torch, case.dtype).itemsize
    return case["N"] * itemsize


def sum_options(zero_centered: bool, weight: torch.Tensor | None, x: torch.Tensor) -> tuple[tuple[str, Option], ...]:
    """Return the options of a call in the form that a case has, with `SUM_OPTIONS`."""
    kind = "none" if weight is None else "same" if weight.dtype == x.dtype else "float32"
    return (("zero_centered", zero_centered), ("weight", kind))


def scalars(case: Case, device: str, seed: int) -> Inputs:
    """Draw scale (1,) and amax (1,) where a forward quantizes; with every second seed amax is above all of y."""
    if case.quant == "none":
        return {}
    scale = uniform((1,), 1.0, 2.0, torch.float32, device, seed + 2)
    return {"scale": scale, "amax": torch.full((1,), 1e4 if seed % 2 else 0.0, dtype=torch.float32, device=device)}


def rsigma_of(x: torch.Tensor) -> torch.Tensor:
    """Compute 1 / sqrt(mean(x²) + eps) of every row, fp32."""
    return torch.rsqrt(x.float().square().mean(dim=1) + EPS)


def gamma_of(inputs: Inputs) -> torch.Tensor | float:
    """Return γ in fp32, 1 without a weight."""
    if inputs["weight"] is None:
        return 1.0
    weight: torch.Tensor = inputs["weight"].float()
    return weight + 1.0 if inputs["zero_centered"] else weight


def check_weight(weight: torch.Tensor | None, x: torch.Tensor, zero_centered: bool) -> None:
    """Check the weight: (N,) of x's dtype or fp32, or None, which goes without zero_centered."""
    if weight is None:
        if zero_centered:
            raise ValueError("zero_centered needs a weight, got weight=None")
        return
    wide = isinstance(weight, torch.Tensor) and weight.dtype == torch.float32
    check_like("weight", weight, x.shape[1:], torch.float32 if wide else x.dtype, x.device)
