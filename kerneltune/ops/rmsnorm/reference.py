"""What RMSNorm is: inputs, plain torch reference, comparison, traffic. Shares no code with the kernels."""

import torch

from kerneltune.kernel_lib.agreement import close, same_bits, within_a_step
from kerneltune.spec import Case, Inputs, Outputs, Traffic

EPS = 1e-5
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative size of one unit in the last place."""


def fwd_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x (M, N) with rows `row_pad` elements apart, weight (N,), and scale (1,), amax (1,) where there is quantisation."""
    M, N, dtype = case["M"], case["N"], getattr(torch, case.dtype)
    pad = int(case.option("row_pad"))
    inputs = {
        "x": uniform((M, N + pad), -2.0, 1.0, dtype, device, seed)[:, :N],
        "weight": uniform((N,), 0.5, 1.5, dtype, device, seed + 1),
        "quant": case.quant,
        "fp8_format": case.option("fp8_format"),
        "zero_centered": case.option("zero_centered"),
    }
    return {**inputs, **scalars(case, device, seed)}


def scalars(case: Case, device: str, seed: int) -> Inputs:
    """Make scale (1,) and amax (1,) where there is quantisation."""
    if case.quant == "none":
        return {}
    scale = uniform((1,), 1.0, 2.0, torch.float32, device, seed + 2)
    return {"scale": scale, "amax": torch.zeros(1, dtype=torch.float32, device=device)}


def bwd_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """dz (M, N), x (M, N), weight (N,), and the rsigma (M,) of x."""
    M, N, dtype = case["M"], case["N"], getattr(torch, case.dtype)
    x = uniform((M, N), -2.0, 1.0, dtype, device, seed)
    return {
        "dz": uniform((M, N), -1.0, 1.0, dtype, device, seed + 3),
        "x": x,
        "rsigma": rsigma_of(x),
        "weight": uniform((N,), 0.5, 1.5, dtype, device, seed + 1),
        "zero_centered": case.option("zero_centered"),
    }


def fwd_reference(inputs: Inputs) -> Outputs:
    """y, rsigma, and under fp8 amax, scale_inv; the transpose is y's, byte for byte."""
    rsigma = rsigma_of(inputs["x"])
    return _normalised(inputs, rsigma) | {"rsigma": rsigma}


def bwd_reference(inputs: Inputs) -> Outputs:
    """dx and dgamma from the saved rsigma, in fp32, dgamma's terms before their sum as well."""
    x, dz, r = inputs["x"].float(), inputs["dz"].float(), inputs["rsigma"][:, None]
    dzg = dz * _gamma(inputs)
    s = (dzg * x).sum(1, keepdim=True)
    terms = dz * x * r
    return {"dx": r * (dzg - r * r * s / max(x.shape[1], 1) * x), "dgamma": terms.sum(0), "dgamma_abs": terms.abs().sum(0)}


def compare_fwd(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Disagreements of a forward.

    rsigma is a sum, so it is held to a tolerance. Everything after it is held to the bits that follow from the output's
    own rsigma, if the variant returns it. In Triton's interpreter (CPU tensors) bf16 stores truncate, which may be one unit in
    the last place: that is allowed there, and nowhere else.
    """
    errors: list[str] = []
    rsigma = outputs.get("rsigma")
    if rsigma is not None:
        errors += close("rsigma", rsigma, expected["rsigma"], rtol=5e-5, atol=1e-6)
        if errors:
            return errors
        expected = _normalised(inputs, rsigma)
    y, want = outputs["y"], expected["y"]
    if inputs["quant"] == "none":
        units = 1.0 if rsigma is not None else 4.0
        exact = rsigma is not None and y.is_cuda and y.dtype != torch.float32
        errors += same_bits("y", y, want) if exact else close("y", y, want, rtol=units * ROUNDING[y.dtype], atol=1e-5)
        return errors
    errors += (within_a_step if rsigma is None else same_bits)("y", y, want)
    if inputs["quant"] == "fp8_t":
        errors += same_bits("y_t", outputs["y_t"], y.t())
    # amax accumulates over calls: inputs of a check come fresh, with amax 0
    errors += close("amax", inputs["amax"], expected["amax"], rtol=1e-6 if rsigma is not None else 5e-5, atol=0.0)
    errors += close("scale_inv", outputs["scale_inv"], expected["scale_inv"], rtol=1e-7, atol=0.0)
    return errors


def compare_bwd(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Disagreements of a backward: dx to one rounding, dgamma to one rounding and the error of an fp32 sum."""
    unit = ROUNDING[inputs["x"].dtype]
    dx_scale = float(expected["dx"].abs().max()) if expected["dx"].numel() else 0.0
    errors = close("dx", outputs["dx"], expected["dx"], rtol=unit, atol=1e-6 + 2e-6 * dx_scale)
    slack = 2e-6 * expected["dgamma_abs"] + 1e-6
    return errors + close("dgamma", outputs["dgamma"], expected["dgamma"], rtol=unit, atol=slack)


def fwd_traffic(case: Case) -> Traffic:
    """x and weight read; y (and its transpose) and rsigma written. The scalars of quantisation are not counted."""
    M, N, size = case["M"], case["N"], getattr(torch, case.dtype).itemsize
    out = {"none": size, "fp8": 1, "fp8_t": 2}[case.quant]
    return Traffic(read=size * (M * N + N), write=out * M * N + 4 * M)


def bwd_traffic(case: Case) -> Traffic:
    """dz, x, weight and rsigma read; dx and dgamma written."""
    M, N, size = case["M"], case["N"], getattr(torch, case.dtype).itemsize
    return Traffic(read=size * (2 * M * N + N) + 4 * M, write=size * (M * N + N))


def uniform(shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Make values between low and high, the same for the same seed; none on device `meta`."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device == "meta":
        return tensor
    return tensor.uniform_(low, high, generator=torch.Generator(device=device).manual_seed(seed))


def rsigma_of(x: torch.Tensor) -> torch.Tensor:
    """Compute 1 / sqrt(mean(x²) + eps) of every row, fp32."""
    return torch.rsqrt(x.float().square().mean(dim=1) + EPS)


def _gamma(inputs: Inputs) -> torch.Tensor | float:
    if inputs["weight"] is None:
        return 1.0
    weight: torch.Tensor = inputs["weight"].float()
    return weight + 1.0 if inputs["zero_centered"] else weight


def _normalised(inputs: Inputs, rsigma: torch.Tensor) -> dict[str, torch.Tensor]:
    x = inputs["x"]
    y = x.float() * rsigma[:, None] * _gamma(inputs)
    if inputs["quant"] == "none":
        return {"y": y.to(x.dtype)}
    dtype = FP8[inputs["fp8_format"]]
    limit = torch.finfo(dtype).max
    quantised = (y * inputs["scale"]).clamp(-limit, limit).to(dtype)
    amax = y.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().max() if y.numel() else y.new_zeros(())
    return {"y": quantised, "amax": amax.reshape(1), "scale_inv": 1.0 / inputs["scale"]}
