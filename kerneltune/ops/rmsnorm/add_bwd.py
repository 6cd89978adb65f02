"""Differentiate RMSNorm of a sum: the launch of RMSNorm's backward adds the gradient of the sum.

d x = d residual = rmsnorm_bwd(dz, total) + d total
"""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_like
from kerneltune.kernel_lib.functions import run_of
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.rmsnorm import bwd, contract, peers
from kerneltune.ops.rmsnorm.bwd import BwdConfig, rmsnorm_bwd
from kerneltune.ops.rmsnorm.contract import ROUNDING, sum_options, uniform
from kerneltune.ops.rmsnorm.kernels.backward import gradients
from kerneltune.ops.rmsnorm.tiles import check_config, first_valid, sum_too_large
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant


def space(case: Case) -> Space:
    """Offer the space of `rmsnorm_bwd` with fewer stages as well, because a program loads three matrices instead of two."""
    return {**bwd.space(case), "stages": (1, 2, 3, 4)}


def invalid(case: Case, config: BwdConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    return bwd.invalid(case, config) or sum_too_large(case, config, tensors=3)


def default(case: Case) -> BwdConfig:
    """Return a config for any shape, by the rule of `rmsnorm_bwd`."""
    return first_valid(case, bwd.likely(case), invalid)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw dz, dtotal and total (M, N), weight (N,) or None, and the rsigma (M,) of total."""
    drawn = dict(bwd.inputs(case, device=device, seed=seed))
    total = drawn.pop("x")
    dtotal = uniform(total.shape, -1.0, 1.0, total.dtype, device, seed + 4)
    return {**drawn, "total": total, "dtotal": dtotal, "weight": contract.weight_of(case, device, seed + 1)}


def reference(inputs: Inputs) -> Outputs:
    """Return dx, and dgamma unless the weight is None, from the saved rsigma, in fp32."""
    expected = dict(bwd.reference({**inputs, "x": inputs["total"]}))
    expected["dx"] = expected["dx"] + inputs["dtotal"].float()
    if inputs["weight"] is None:
        del expected["dgamma"], expected["dgamma_abs"]
    return expected


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare dx within its rounding and the rounding of RMSNorm's part, dgamma as RMSNorm's; return a line per wrong output."""
    unit = ROUNDING[inputs["total"].dtype]
    part = (expected["dx"] - inputs["dtotal"].float()).abs()
    errors = close("dx", outputs["dx"], expected["dx"], rtol=unit, atol=1e-6 + (unit + 2e-6) * part)
    if inputs["weight"] is None:
        return errors + (["dgamma: given without a weight"] if "dgamma" in outputs else [])
    slack = 2e-6 * expected["dgamma_abs"] + 1e-6
    rtol = ROUNDING[inputs["weight"].dtype]
    return errors + close("dgamma", outputs["dgamma"], expected["dgamma"], rtol=rtol, atol=slack)


def traffic(case: Case) -> Traffic:
    """Return the bytes of dz, dtotal, total, weight and rsigma read; of dx and dgamma written."""
    M, N, size = case["M"], case["N"], ITEMSIZE[case.dtype]
    return Traffic(read=3 * size * M * N + contract.weight_bytes(case) + 4 * M, write=size * M * N + contract.weight_bytes(case))


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
    """Compute dx (M, N), the gradient of x and of residual alike, and dgamma (N,) of `rmsnorm_add_fwd` without quantization.

    Args:
        dz: (M, N), the gradient of y.
        dtotal: (M, N), the gradient of total, or None for zeros.
        total, rsigma: as `rmsnorm_add_fwd` returned them.
        weight, zero_centered, with_dgamma, config: as in `rmsnorm_bwd`.
    """
    if dtotal is None:
        return rmsnorm_bwd(dz, total, rsigma, weight, zero_centered=zero_centered, with_dgamma=with_dgamma, config=config)
    bwd.check(dz, total, rsigma, weight, zero_centered)
    check_like("dtotal", dtotal, tuple(total.shape), total.dtype, total.device)
    if config is not None:
        check_config(config, BwdConfig, least_ctas=1)
    elif total.numel():
        axes, options = (("M", total.shape[0]), ("N", total.shape[1])), sum_options(zero_centered, weight, total)
        config = _choose(axes, DTYPE_NAMES[total.dtype], "none", options)
    return gradients(dz, total, rsigma, weight, dtotal, zero_centered, with_dgamma, config)


def _two_launches(inputs: Inputs, _config: None) -> Outputs:
    """Run `rmsnorm_bwd`, then torch's addition; dx is rounded twice, as in a model that is not fused."""
    dz, total, rsigma, weight = (inputs[name] for name in ("dz", "total", "rsigma", "weight"))
    dx, dgamma = rmsnorm_bwd(dz, total, rsigma, weight, zero_centered=inputs["zero_centered"])
    return {"dx": dx + inputs["dtotal"]} | ({} if dgamma is None else {"dgamma": dgamma})


OP = Op(
    name="rmsnorm_add_bwd",
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        Variant("baseline", _two_launches),
        Variant("optimized", run_of(rmsnorm_add_bwd, "dx", "dgamma"), BwdConfig, space, invalid, default),
        *peers.ADD_BACKWARD,
    ),
    module=__name__,
    **contract.SUM,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
