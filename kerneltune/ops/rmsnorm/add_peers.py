"""What a user would run for RMSNorm of a sum: two launches of ours (`baseline`), eager torch, torch.compile, Liger, quack."""

from collections.abc import Callable
from typing import Any

import torch

from kerneltune.kernel_lib.compiled import call_compiled
from kerneltune.ops.rmsnorm.optimized import rmsnorm_bwd, rmsnorm_fwd
from kerneltune.ops.rmsnorm.reference import EPS, FP8
from kerneltune.spec import Case, Inputs, Outputs


def two_launches_fwd(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's addition, then `rmsnorm_fwd`."""
    total = inputs["x"] + inputs["residual"]
    out = rmsnorm_fwd(
        total, inputs["weight"], EPS, quant=inputs["quant"], scale=inputs.get("scale"), amax=inputs.get("amax"),
        zero_centered=inputs["zero_centered"],
    )  # fmt: skip
    return {"total": total} | {name: value for name, value in out._asdict().items() if value is not None}


def two_launches_bwd(inputs: Inputs, _config: None) -> Outputs:
    """Run `rmsnorm_bwd`, then torch's addition; dx is rounded twice, as in a model that is not fused."""
    dx, dgamma = rmsnorm_bwd(inputs["dz"], inputs["x"], inputs["rsigma"], inputs["weight"], zero_centered=inputs["zero_centered"])
    return {"dx": dx + inputs["dtotal"]} | ({} if dgamma is None else {"dgamma": dgamma})


def _norm(total: torch.Tensor, weight: torch.Tensor | None, zero_centered: bool) -> torch.Tensor:
    y = total.float() * torch.rsqrt(total.float().square().mean(1, keepdim=True) + EPS)
    if weight is None:
        return y
    return y * (weight.float() + 1 if zero_centered else weight.float())


def _fwd_formula(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return _norm(total, weight, zero_centered).to(x.dtype), total


def _fwd_fp8_formula(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    zero_centered: bool,
    dtype: torch.dtype,
    transpose: bool,
) -> tuple[torch.Tensor, ...]:
    total = x + residual
    y = _norm(total, weight, zero_centered)
    limit = torch.finfo(dtype).max
    q = (y * scale).clamp(-limit, limit).to(dtype)
    return (q, total, y.abs().amax().reshape(1), scale.reciprocal()) + ((q.t().contiguous(),) if transpose else ())


def _bwd_formula(
    dz: torch.Tensor,
    dtotal: torch.Tensor,
    total: torch.Tensor,
    rsigma: torch.Tensor,
    weight: torch.Tensor | None,
    zero_centered: bool,
) -> tuple[torch.Tensor, ...]:
    dz32, x32, r = dz.float(), total.float(), rsigma[:, None]
    dzg = dz32
    if weight is not None:
        dzg = dz32 * (weight.float() + 1 if zero_centered else weight.float())
    c = (dzg * x32).sum(1, keepdim=True) * (r * r) / total.shape[1]
    dx = (r * (dzg - c * x32) + dtotal.float()).to(total.dtype)
    return (dx,) if weight is None else (dx, (dz32 * x32 * r).sum(0).to(weight.dtype))


def _called(function: Callable[..., Any], mode: str, tensors: tuple[torch.Tensor | None, ...], *options: Any) -> Any:
    if mode == "eager":
        return function(*tensors, *options)
    return call_compiled(function, tensors, *options, mode=None if mode == "default" else mode)


def fwd(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Run torch's `eager` operators one after another, or torch.compile in that mode, `default` being its default."""
    x, residual, weight, zero_centered = inputs["x"], inputs["residual"], inputs["weight"], inputs["zero_centered"]
    if inputs["quant"] == "none":
        y, total = _called(_fwd_formula, mode, (x, residual, weight), zero_centered)
        return {"y": y, "total": total}
    options = (zero_centered, FP8[inputs["fp8_format"]], inputs["quant"] == "fp8_t")
    q, total, amax, scale_inv, *rest = _called(_fwd_fp8_formula, mode, (x, residual, weight, inputs["scale"]), *options)
    torch.maximum(inputs["amax"], amax, out=inputs["amax"])
    return {"y": q, "total": total, "scale_inv": scale_inv} | ({"y_t": rest[0]} if rest else {})


def bwd(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Compute dx and dγ in one function, as in `fwd`."""
    tensors = (inputs["dz"], inputs["dtotal"], inputs["x"], inputs["rsigma"], inputs["weight"])
    return dict(zip(("dx", "dgamma"), _called(_bwd_formula, mode, tensors, inputs["zero_centered"]), strict=False))


def liger_fwd(inputs: Inputs, _config: None) -> Outputs:
    """Run Liger's Triton kernel in its Gemma casting mode: all in fp32."""
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    offset = 1.0 if inputs["zero_centered"] else 0.0
    y, total, *_ = fused_add_rms_norm_forward(inputs["x"], inputs["residual"], inputs["weight"], EPS, offset, "gemma")
    return {"y": y, "total": total}


def liger_bwd(inputs: Inputs, _config: None) -> Outputs:
    """Run Liger's backward, out of place."""
    from liger_kernel.ops.fused_add_rms_norm import _CASTING_MODE_GEMMA, calculate_settings, fused_add_rms_norm_backward

    x = inputs["x"]
    block, warps = calculate_settings(x.shape[1])
    offset = 1.0 if inputs["zero_centered"] else 0.0
    dx, _, dgamma = fused_add_rms_norm_backward(
        inputs["dz"], inputs["dtotal"], x, inputs["weight"], inputs["rsigma"], offset, _CASTING_MODE_GEMMA.value,
        block, warps, 2, False,
    )  # fmt: skip
    return {"dx": dx, "dgamma": dgamma}


def quack_fwd(inputs: Inputs, _config: None) -> Outputs:
    """Run quack's CuTe kernel."""
    from quack.rmsnorm import rmsnorm_fwd as quack_rmsnorm_fwd

    y, total, *_ = quack_rmsnorm_fwd(inputs["x"], inputs["weight"], residual=inputs["residual"], eps=EPS)
    return {"y": y, "total": total}


def quack_bwd(inputs: Inputs, _config: None) -> Outputs:
    """Run quack's CuTe backward."""
    from quack.rmsnorm import rmsnorm_bwd as quack_rmsnorm_bwd

    dx, dgamma, *_ = quack_rmsnorm_bwd(
        inputs["x"], inputs["weight"], inputs["dz"], inputs["rsigma"], dresidual_out=inputs["dtotal"]
    )
    return {"dx": dx} | ({} if dgamma is None else {"dgamma": dgamma})


def only_weighted(case: Case) -> str | None:
    """Say what Liger's fused kernel lacks: fp8 output, and rows without a weight."""
    if case.quant != "none":
        return "has no fp8 output"
    if case.option("weight") == "none":
        return "needs a weight"
    return "no rows" if case["M"] == 0 else None
