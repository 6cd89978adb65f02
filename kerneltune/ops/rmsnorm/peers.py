"""Peers of RMSNorm, also of a sum: eager torch, torch.compile, Liger and quack, which are imported when they run.

Under RMSNorm of a sum the inputs hold a residual and dtotal, which the other operators' lack.
"""

from collections.abc import Callable
from functools import partial

import torch

from kerneltune.kernel_lib.compiled import DEFAULT, EAGER, call
from kerneltune.ops.rmsnorm.contract import EPS, FP8
from kerneltune.spec import Case, Inputs, Outputs, Variant

_MODES = {"eager": EAGER, "compile": DEFAULT, "max-autotune": "max-autotune-no-cudagraphs"}
"""Name of each variant by torch -> the mode in which `call` runs it."""


def _fwd_formula(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, zero_centered: bool
) -> tuple[torch.Tensor, ...]:
    if residual is not None:
        total = x + residual
        return _norm(total, weight, zero_centered).to(x.dtype), total
    assert weight is not None
    return (torch.nn.functional.rms_norm(x, (x.shape[1],), weight + 1 if zero_centered else weight, EPS),)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, zero_centered: bool) -> torch.Tensor:
    y = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + EPS)
    return y if weight is None else y * _gamma(weight, zero_centered)


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _fwd_fp8_formula(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    zero_centered: bool,
    dtype: torch.dtype,
    transpose: bool,
) -> tuple[torch.Tensor, ...]:
    total = x if residual is None else x + residual
    y = _norm(total, weight, zero_centered)
    limit = torch.finfo(dtype).max
    q = (y * scale).clamp(-limit, limit).to(dtype)
    results = (q, y.abs().amax().reshape(1), scale.reciprocal())
    return (*results, *(() if residual is None else (total,)), *((q.t().contiguous(),) if transpose else ()))


def _bwd_formula(
    dz: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    weight: torch.Tensor | None,
    zero_centered: bool,
) -> tuple[torch.Tensor, ...]:
    dz32, x32, r = dz.float(), x.float(), rsigma[:, None]
    dzg = dz32 if weight is None else dz32 * _gamma(weight, zero_centered)
    c = (dzg * x32).sum(1, keepdim=True) * (r * r) / x.shape[1]
    dx = r * (dzg - c * x32)
    if dtotal is not None:
        dx = dx + dtotal.float()
    return (dx.to(x.dtype),) if weight is None else (dx.to(x.dtype), (dz32 * x32 * r).sum(0).to(weight.dtype))


def _torch_fwd(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Run torch's operators in a mode of `call`."""
    x, residual, weight, zero_centered = inputs["x"], inputs.get("residual"), inputs["weight"], inputs["zero_centered"]
    sums = () if residual is None else ("total",)
    if inputs["quant"] == "none":
        return dict(zip(("y", *sums), call(_fwd_formula, mode, (x, residual, weight), zero_centered), strict=True))
    options = (zero_centered, FP8[inputs["fp8_format"]], inputs["quant"] == "fp8_t")
    q, amax, *others = call(_fwd_fp8_formula, mode, (x, residual, weight, inputs["scale"]), *options)
    torch.maximum(inputs["amax"], amax, out=inputs["amax"])
    return {"y": q} | dict(zip(("scale_inv", *sums, "y_t"), others, strict=False))


def _torch_bwd(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Compute dx and dγ in a single function, as in `_torch_fwd`."""
    tensors = (inputs["dz"], inputs.get("dtotal"), _normed(inputs), inputs["rsigma"], inputs["weight"])
    return dict(zip(("dx", "dgamma"), call(_bwd_formula, mode, tensors, inputs["zero_centered"]), strict=False))


def _normed(inputs: Inputs) -> torch.Tensor:
    """Return the tensor that the forward pass normalized."""
    x: torch.Tensor = inputs["total"] if "dtotal" in inputs else inputs["x"]
    return x


def _liger_fwd(inputs: Inputs, _config: None) -> Outputs:
    """Run Liger's Triton kernel in its Gemma casting mode: all in fp32."""
    from liger_kernel.ops.rms_norm import rms_norm_forward

    y, *_ = rms_norm_forward(inputs["x"], inputs["weight"], EPS, _offset(inputs), "gemma", None)
    return {"y": y}


def _liger_add_fwd(inputs: Inputs, _config: None) -> Outputs:
    """Run Liger's Triton kernel in its Gemma casting mode: all in fp32."""
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    y, total, *_ = fused_add_rms_norm_forward(inputs["x"], inputs["residual"], inputs["weight"], EPS, _offset(inputs), "gemma")
    return {"y": y, "total": total}


def _liger_bwd(inputs: Inputs, _config: None) -> Outputs:
    """Run Liger's backward, out of place."""
    from liger_kernel.ops.rms_norm import _CASTING_MODE_GEMMA, calculate_settings, rms_norm_backward

    x = inputs["x"]
    dx, dgamma = rms_norm_backward(
        inputs["dz"], x, inputs["weight"], inputs["rsigma"], _offset(inputs), _CASTING_MODE_GEMMA.value,
        *calculate_settings(x.shape[1]), False, None,
    )  # fmt: skip
    return {"dx": dx, "dgamma": dgamma}


def _liger_add_bwd(inputs: Inputs, _config: None) -> Outputs:
    """Run Liger's backward, out of place."""
    from liger_kernel.ops.fused_add_rms_norm import _CASTING_MODE_GEMMA, calculate_settings, fused_add_rms_norm_backward

    total = inputs["total"]
    dx, _, dgamma = fused_add_rms_norm_backward(
        inputs["dz"], inputs["dtotal"], total, inputs["weight"], inputs["rsigma"], _offset(inputs),
        _CASTING_MODE_GEMMA.value, *calculate_settings(total.shape[1]), 2, False,
    )  # fmt: skip
    return {"dx": dx, "dgamma": dgamma}


def _offset(inputs: Inputs) -> float:
    return 1.0 if inputs["zero_centered"] else 0.0


def _quack_fwd(inputs: Inputs, _config: None) -> Outputs:
    """Run quack's CuTe kernel."""
    from quack.rmsnorm import rmsnorm_fwd

    if "residual" not in inputs:
        return {"y": rmsnorm_fwd(inputs["x"], inputs["weight"], eps=EPS)[0]}
    y, total, *_ = rmsnorm_fwd(inputs["x"], inputs["weight"], residual=inputs["residual"], eps=EPS)
    return {"y": y, "total": total}


def _quack_bwd(inputs: Inputs, _config: None) -> Outputs:
    """Run quack's CuTe backward."""
    from quack.rmsnorm import rmsnorm_bwd

    of_sum = {"dresidual_out": inputs["dtotal"]} if "dtotal" in inputs else {}
    dx, dgamma, *_ = rmsnorm_bwd(_normed(inputs), inputs["weight"], inputs["dz"], inputs["rsigma"], **of_sum)
    return {"dx": dx} | ({} if dgamma is None else {"dgamma": dgamma})


def _no_rows(case: Case) -> str | None:
    """Refuse empty tensors, because an amax over no element is undefined."""
    return "no rows" if case["M"] == 0 else None


def _not_liger(case: Case) -> str | None:
    """Refuse cases that Liger does not support: fp8 output, and sums without a weight."""
    if case.quant != "none":
        return "has no fp8 output"
    if dict(case.options).get("weight") == "none":
        return "needs a weight"
    return _no_rows(case)


def _not_quack(case: Case) -> str | None:
    """Refuse cases that quack does not support: fp8 output, zero-centred gamma, rows that are no multiple of 8 elements."""
    if case.option("zero_centered"):
        return "has no zero-centred gamma"
    if case["N"] % 8:
        return "needs N % 8 == 0"
    return "has no fp8 output" if case.quant != "none" else _no_rows(case)


def _peers(by_torch: Callable[..., Outputs], liger: Callable[..., Outputs], quack: Callable[..., Outputs]) -> tuple[Variant, ...]:
    return (
        *(
            Variant(name, partial(by_torch, mode), unsupported=_no_rows, requires=("torch",), compiles=mode != EAGER)
            for name, mode in _MODES.items()
        ),
        Variant("liger", liger, unsupported=_not_liger, requires=("liger_kernel",)),
        Variant("quack", quack, unsupported=_not_quack, requires=("quack",)),
    )


FORWARD = _peers(_torch_fwd, _liger_fwd, _quack_fwd)
BACKWARD = _peers(_torch_bwd, _liger_bwd, _quack_bwd)
ADD_FORWARD = _peers(_torch_fwd, _liger_add_fwd, _quack_fwd)
ADD_BACKWARD = _peers(_torch_bwd, _liger_add_bwd, _quack_bwd)
"""The peers of each operator."""
