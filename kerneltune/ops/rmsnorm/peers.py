"""What a user would pick instead: eager torch, torch.compile, Liger, quack. Imports the peers when they run."""

from collections.abc import Callable
from typing import Any

import torch

from kerneltune.kernel_lib.compiled import call_compiled
from kerneltune.ops.rmsnorm.reference import EPS, FP8
from kerneltune.spec import Case, Inputs, Outputs


def _fwd_formula(x: torch.Tensor, weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    if zero_centered:
        weight = weight + 1
    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, EPS)


def _fwd_fp8_formula(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero_centered: bool, dtype: torch.dtype, transpose: bool
) -> tuple[torch.Tensor, ...]:
    x32, gamma = x.float(), weight.float()
    if zero_centered:
        gamma = gamma + 1
    y = x32 * torch.rsqrt(x32.square().mean(1, keepdim=True) + EPS) * gamma
    limit = torch.finfo(dtype).max
    q = (y * scale).clamp(-limit, limit).to(dtype)
    amax = y.abs().amax().reshape(1)
    return (q, amax, scale.reciprocal()) + ((q.t().contiguous(),) if transpose else ())


def _bwd_formula(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, weight: torch.Tensor, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dz32, x32, gamma, r = dz.float(), x.float(), weight.float(), rsigma[:, None]
    if zero_centered:
        gamma = gamma + 1
    dzg = dz32 * gamma
    c = (dzg * x32).sum(1, keepdim=True) * (r * r) / x.shape[1]
    return (r * (dzg - c * x32)).to(x.dtype), (dz32 * x32 * r).sum(0).to(weight.dtype)


def _called(function: Callable[..., Any], mode: str, tensors: tuple[torch.Tensor, ...], *options: Any) -> Any:
    if mode == "eager":
        return function(*tensors, *options)
    return call_compiled(function, tensors, *options, mode=None if mode == "default" else mode)


def fwd(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """torch: `eager`, one operator after another, or torch.compile in that mode, `default` being its default."""
    x, weight, zero_centered = inputs["x"], inputs["weight"], inputs["zero_centered"]
    if inputs["quant"] == "none":
        return {"y": _called(_fwd_formula, mode, (x, weight), zero_centered)}
    tensors, options = (x, weight, inputs["scale"]), (zero_centered, FP8[inputs["fp8_format"]], inputs["quant"] == "fp8_t")
    q, amax, scale_inv, *rest = _called(_fwd_fp8_formula, mode, tensors, *options)
    torch.maximum(inputs["amax"], amax, out=inputs["amax"])
    return {"y": q, "scale_inv": scale_inv} | ({"y_t": rest[0]} if rest else {})


def bwd(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """dx and dγ in one function, as in `fwd`."""
    tensors = (inputs["dz"], inputs["x"], inputs["rsigma"], inputs["weight"])
    dx, dgamma = _called(_bwd_formula, mode, tensors, inputs["zero_centered"])
    return {"dx": dx, "dgamma": dgamma}


def liger_fwd(inputs: Inputs, _config: None) -> Outputs:
    """Liger's Triton kernel, its Gemma casting mode: all in fp32."""
    from liger_kernel.ops.rms_norm import rms_norm_forward

    offset = 1.0 if inputs["zero_centered"] else 0.0
    y, *_ = rms_norm_forward(inputs["x"], inputs["weight"], EPS, offset, "gemma", None)
    return {"y": y}


def liger_bwd(inputs: Inputs, _config: None) -> Outputs:
    """Liger's backward, out of place."""
    from liger_kernel.ops.rms_norm import _CASTING_MODE_GEMMA, calculate_settings, rms_norm_backward

    x = inputs["x"]
    block, warps = calculate_settings(x.shape[1])
    offset = 1.0 if inputs["zero_centered"] else 0.0
    dx, dgamma = rms_norm_backward(
        inputs["dz"], x, inputs["weight"], inputs["rsigma"], offset, _CASTING_MODE_GEMMA.value, block, warps, False, None
    )
    return {"dx": dx, "dgamma": dgamma}


def quack_fwd(inputs: Inputs, _config: None) -> Outputs:
    """quack's CuTe kernel."""
    from quack.rmsnorm import rmsnorm_fwd

    y, *_ = rmsnorm_fwd(inputs["x"], inputs["weight"], eps=EPS)
    return {"y": y}


def quack_bwd(inputs: Inputs, _config: None) -> Outputs:
    """quack's CuTe backward."""
    from quack.rmsnorm import rmsnorm_bwd

    dx, dgamma, *_ = rmsnorm_bwd(inputs["x"], inputs["weight"], inputs["dz"], inputs["rsigma"])
    return {"dx": dx, "dgamma": dgamma}


def only_unquantised(case: Case) -> str | None:
    """Liger and quack have no fused fp8 output."""
    if case.quant != "none":
        return "has no fp8 output"
    return "no rows" if case["M"] == 0 else None


def only_plain_gamma(case: Case) -> str | None:
    """quack has no zero-centred gamma, and takes rows that are multiples of 8 elements."""
    if case.option("zero_centered"):
        return "has no zero-centred gamma"
    return "needs N % 8 == 0" if case["N"] % 8 else only_unquantised(case)


def not_empty(case: Case) -> str | None:
    """An amax over nothing is no number."""
    return "no rows" if case["M"] == 0 else None
