"""RMSNorm of a sum: the public functions, which add a residual to x in the same launch, and its gradient in that of the backward.

total = x + residual, rounded      y = rmsnorm(total)      d x = d residual = rmsnorm_bwd(dy, total) + d total
"""

from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like, check_matrix
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.rmsnorm import optimized
from kerneltune.ops.rmsnorm.add_reference import OPTIONS, options_of
from kerneltune.ops.rmsnorm.configs import (
    BwdConfig,
    FwdConfig,
    check_config,
    default_add_bwd,
    default_add_fwd,
    valid_add_bwd,
    valid_add_fwd,
)
from kerneltune.ops.rmsnorm.reference import EPS
from kerneltune.spec import Inputs, Outputs

_choose_fwd = cache.Chooser("rmsnorm_add_fwd", FwdConfig, valid_add_fwd, default_add_fwd, ("M",), free_options=tuple(OPTIONS))
_choose_bwd = cache.Chooser("rmsnorm_add_bwd", BwdConfig, valid_add_bwd, default_add_bwd, ("M",), free_options=tuple(OPTIONS))


class RMSNormSum(NamedTuple):
    """y (M, N); total = x + residual (M, N); rsigma (M,) fp32 of total; y_t (N, M) fp8 or None; scale_inv (1,) fp32 or None."""

    y: torch.Tensor
    total: torch.Tensor
    rsigma: torch.Tensor
    y_t: torch.Tensor | None
    scale_inv: torch.Tensor | None


@on_its_device
def rmsnorm_add_fwd(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    quant: str = "none",
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    fp8_format: str = "e4m3",
    zero_centered: bool = False,
    config: FwdConfig | None = None,
) -> RMSNormSum:
    """Compute total = x + residual, rounded to x's dtype, and the RMSNorm of total.

    Args:
        x, residual: (M, N) bf16, fp16 or fp32, one dtype; rows may be any distance apart, elements of a row must be adjacent.
        weight, eps, quant, scale, amax, fp8_format, zero_centered: as in `rmsnorm_fwd`.
        config: None takes the best known config.

    Raises:
        ValueError: a wrong shape, stride, dtype, device, value or config, which it names.
    """
    optimized.check_fwd(x, weight, eps, quant, scale, amax, fp8_format, None, zero_centered)
    check_matrix("residual", residual)
    check_like("residual", residual, tuple(x.shape), x.dtype, x.device)
    if config is not None:
        check_config(config, FwdConfig, least_ctas=0)
        if config.reload:
            raise ValueError(f"config: reload must be False where a residual is added, got {config}")
    elif x.numel():
        axes, options = (("M", x.shape[0]), ("N", x.shape[1])), options_of(zero_centered, weight, x)
        config = _choose_fwd(axes, DTYPE_NAMES[x.dtype], quant, options)
    out, total = optimized.launch_fwd(
        x, residual, weight, eps, quant, scale, amax, fp8_format, zero_centered, None, config
    )  # fmt: skip
    return RMSNormSum(out.y, total, out.rsigma, out.y_t, out.scale_inv)


@on_its_device
def rmsnorm_add_bwd(
    dz: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    rsigma: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    zero_centered: bool = False,
    with_dgamma: bool = True,
    config: BwdConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute dx (M, N), the gradient of x and of residual alike, and dgamma (N,) of `rmsnorm_add_fwd` without quantisation.

    Args:
        dz: (M, N), the gradient of y.
        dtotal: (M, N), the gradient of total, or None for zeros.
        total, rsigma: as the forward returned them.
        weight, zero_centered, with_dgamma: as in `rmsnorm_bwd`.
        config: None takes the best known config.

    Raises:
        ValueError: a wrong shape, dtype, device or config, which it names.
    """
    if dtotal is None:
        return optimized.rmsnorm_bwd(
            dz, total, rsigma, weight, zero_centered=zero_centered, with_dgamma=with_dgamma, config=config
        )
    optimized.check_bwd(dz, total, rsigma, weight, zero_centered)
    check_like("dtotal", dtotal, tuple(total.shape), total.dtype, total.device)
    if config is not None:
        check_config(config, BwdConfig, least_ctas=1)
    elif total.numel():
        axes, options = (("M", total.shape[0]), ("N", total.shape[1])), options_of(zero_centered, weight, total)
        config = _choose_bwd(axes, DTYPE_NAMES[total.dtype], "none", options)
    return optimized.launch_bwd(dz, total, rsigma, weight, dtotal, zero_centered, with_dgamma, config)


def run_fwd(inputs: Inputs, config: FwdConfig | None) -> Outputs:
    """Run `rmsnorm_add_fwd` on a case's inputs."""
    out = rmsnorm_add_fwd(
        inputs["x"], inputs["residual"], inputs["weight"], EPS, quant=inputs["quant"], scale=inputs.get("scale"),
        amax=inputs.get("amax"), zero_centered=inputs["zero_centered"], config=config,
    )  # fmt: skip
    return {name: value for name, value in out._asdict().items() if value is not None}


def run_bwd(inputs: Inputs, config: BwdConfig | None) -> Outputs:
    """Run `rmsnorm_add_bwd` on a case's inputs."""
    dx, dgamma = rmsnorm_add_bwd(
        inputs["dz"], inputs["dtotal"], inputs["x"], inputs["rsigma"], inputs["weight"],
        zero_centered=inputs["zero_centered"], config=config,
    )  # fmt: skip
    return {"dx": dx} | ({} if dgamma is None else {"dgamma": dgamma})
