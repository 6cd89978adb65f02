"""RMSNorm of a sum: its inputs, plain torch reference, comparison, traffic. Shares no code with the kernels."""

import torch

from kerneltune.kernel_lib.agreement import close, same_bits
from kerneltune.ops.rmsnorm import reference
from kerneltune.ops.rmsnorm.reference import rsigma_of, scalars, uniform
from kerneltune.spec import Case, Inputs, Option, Outputs, Traffic

OPTIONS: dict[str, tuple[Option, ...]] = {"zero_centered": (False, True), "weight": ("same", "float32", "none")}
"""weight: of x's dtype, of fp32, or no weight."""


def options_of(zero_centered: bool, weight: torch.Tensor | None, x: torch.Tensor) -> tuple[tuple[str, Option], ...]:
    """Return the options of a call, as those of a case."""
    kind = "none" if weight is None else "same" if weight.dtype == x.dtype else "float32"
    return (("zero_centered", zero_centered), ("weight", kind))


def fwd_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Make x and residual (M, N), weight (N,) or None, and scale (1,), amax (1,) where there is quantisation."""
    M, N, dtype = case["M"], case["N"], getattr(torch, case.dtype)
    inputs = {
        "x": uniform((M, N), -2.0, 1.0, dtype, device, seed),
        "residual": uniform((M, N), -1.0, 2.0, dtype, device, seed + 4),
        "weight": _weight(case, device, seed + 1),
        "quant": case.quant,
        "fp8_format": "e4m3",
        "zero_centered": case.option("zero_centered"),
    }
    return {**inputs, **scalars(case, device, seed)}


def bwd_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Make dz, dtotal and x (M, N), which is the sum, weight (N,) or None, and the rsigma (M,) of x."""
    M, N, dtype = case["M"], case["N"], getattr(torch, case.dtype)
    x = uniform((M, N), -2.0, 1.0, dtype, device, seed)
    return {
        "dz": uniform((M, N), -1.0, 1.0, dtype, device, seed + 3),
        "dtotal": uniform((M, N), -1.0, 1.0, dtype, device, seed + 4),
        "x": x,
        "rsigma": rsigma_of(x),
        "weight": _weight(case, device, seed + 1),
        "zero_centered": case.option("zero_centered"),
    }


def fwd_reference(inputs: Inputs) -> Outputs:
    """Compute total, and what RMSNorm gives of it."""
    total = (inputs["x"].float() + inputs["residual"].float()).to(inputs["x"].dtype)
    return {"total": total, **reference.fwd_reference({**inputs, "x": total})}


def bwd_reference(inputs: Inputs) -> Outputs:
    """Compute dx, and dgamma where there is a weight, from the saved rsigma, in fp32."""
    expected = dict(reference.bwd_reference(inputs))
    expected["dx"] = expected["dx"] + inputs["dtotal"].float()
    if inputs["weight"] is None:
        del expected["dgamma"], expected["dgamma_abs"]
    return expected


def compare_fwd(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """List the disagreements of a forward: total bit for bit on a GPU, the rest as RMSNorm of the output's own total."""
    total, want = outputs["total"], expected["total"]
    if total.is_cuda:
        errors = same_bits("total", total, want)
    else:  # the interpreter truncates what it stores as bf16
        errors = close("total", total, want, rtol=2.0**-7 if total.dtype == torch.bfloat16 else 2.0**-10, atol=1e-5)
    normed = {**inputs, "x": total}
    return errors or reference.compare_fwd(case, normed, outputs, reference.fwd_reference(normed))


def compare_bwd(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """List the disagreements of a backward: dx to its rounding and to that of RMSNorm's part of it, dgamma as RMSNorm's."""
    unit = reference.ROUNDING[inputs["x"].dtype]
    part = (expected["dx"] - inputs["dtotal"].float()).abs()
    errors = close("dx", outputs["dx"], expected["dx"], rtol=unit, atol=1e-6 + (unit + 2e-6) * part)
    if inputs["weight"] is None:
        return errors + (["dgamma: given without a weight"] if "dgamma" in outputs else [])
    slack = 2e-6 * expected["dgamma_abs"] + 1e-6
    rtol = reference.ROUNDING[inputs["weight"].dtype]
    return errors + close("dgamma", outputs["dgamma"], expected["dgamma"], rtol=rtol, atol=slack)


def fwd_traffic(case: Case) -> Traffic:
    """Count x, residual and weight read; y (and its transpose), total and rsigma written; no scalars of quantisation."""
    M, N, size = case["M"], case["N"], getattr(torch, case.dtype).itemsize
    out = {"none": size, "fp8": 1, "fp8_t": 2}[case.quant]
    return Traffic(read=2 * size * M * N + _weight_bytes(case), write=(out + size) * M * N + 4 * M)


def bwd_traffic(case: Case) -> Traffic:
    """Count dz, dtotal, total, weight and rsigma read; dx and dgamma written."""
    M, N, size = case["M"], case["N"], getattr(torch, case.dtype).itemsize
    return Traffic(read=3 * size * M * N + _weight_bytes(case) + 4 * M, write=size * M * N + _weight_bytes(case))


def _weight(case: Case, device: str, seed: int) -> torch.Tensor | None:
    kind = case.option("weight")
    if kind == "none":
        return None
    return uniform((case["N"],), 0.5, 1.5, getattr(torch, case.dtype) if kind == "same" else torch.float32, device, seed)


def _weight_bytes(case: Case) -> int:
    kind = case.option("weight")
    itemsize: int = 0 if kind == "none" else torch.float32.itemsize if kind == "float32" else getattr(torch, case.dtype).itemsize
    return case["N"] * itemsize
