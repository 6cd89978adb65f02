"""Add a residual to x and compute RMSNorm of the sum, in one launch.

total = x + residual, rounded      y = rmsnorm(total)
"""

from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_like, check_matrix
from kerneltune.kernel_lib.functions import run_of
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.rmsnorm import contract, fwd, peers
from kerneltune.ops.rmsnorm.contract import EPS, sum_options, uniform
from kerneltune.ops.rmsnorm.fwd import FwdConfig, rmsnorm_fwd
from kerneltune.ops.rmsnorm.kernels.forward import normalize
from kerneltune.ops.rmsnorm.tiles import check_config, first_valid, sum_too_large
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant


def space(case: Case) -> Space:
    """Offer the space of `rmsnorm_fwd` without `reload`: the sum that would be read again has only just been written."""
    return {**fwd.space(case), "reload": (False,)}


def invalid(case: Case, config: FwdConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    if config.reload:
        return "the sum has only just been written: it is not read again"
    return fwd.invalid(case, config) or sum_too_large(case, config, tensors=2)


def default(case: Case) -> FwdConfig:
    """Return a config for any shape, by the rule of `rmsnorm_fwd`."""
    return first_valid(case, fwd.likely(case, reload=False), invalid)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x and residual (M, N), weight (N,) or None, and scale (1,), amax (1,) where y is quantized."""
    M, N, dtype = case["M"], case["N"], getattr(torch, case.dtype)
    drawn = {
        "x": uniform((M, N), -2.0, 1.0, dtype, device, seed),
        "residual": uniform((M, N), -1.0, 2.0, dtype, device, seed + 4),
        "weight": contract.weight_of(case, device, seed + 1),
        "eps": EPS,
        "quant": case.quant,
        "fp8_format": "e4m3",
        "zero_centered": case.option("zero_centered"),
    }
    return {**drawn, **contract.scalars(case, device, seed)}


def reference(inputs: Inputs) -> Outputs:
    """Return total, and the outputs of RMSNorm of total."""
    total = (inputs["x"].float() + inputs["residual"].float()).to(inputs["x"].dtype)
    return {"total": total, **fwd.reference({**inputs, "x": total})}


def compare(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare total bit for bit, the rest as RMSNorm of the output's own total; return a line per wrong output."""
    total, want = outputs["total"], expected["total"]
    return same_bits("total", total, want) or fwd.compare(case, {**inputs, "x": total}, outputs, expected)


def traffic(case: Case) -> Traffic:
    """Return the bytes of x, residual and weight read; of y, its transpose, total and rsigma written."""
    M, N, size = case["M"], case["N"], ITEMSIZE[case.dtype]
    write = (fwd.output_bytes(case) + size) * M * N + 4 * M
    return Traffic(read=2 * size * M * N + contract.weight_bytes(case), write=write)


class RMSNormSum(NamedTuple):
    """Results of `rmsnorm_add_fwd`.

    Attributes:
        y: (M, N).
        total: x + residual (M, N).
        rsigma: (M,) fp32, of total.
        y_t: (N, M) fp8, or None.
        scale_inv: (1,) fp32, or None.
    """

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
        x: (M, N) bf16, fp16 or fp32; rows may be any distance apart, elements of a row must be adjacent.
        residual: (M, N), likewise, of x's dtype.
        weight, eps, quant, scale, amax, fp8_format, zero_centered, config: as in `rmsnorm_fwd`.
    """
    fwd.check(x, weight, eps, quant, scale, amax, fp8_format, None, zero_centered)
    check_matrix("residual", residual)
    check_like("residual", residual, tuple(x.shape), x.dtype, x.device)
    if config is not None:
        check_config(config, FwdConfig, least_ctas=0)
        if config.reload:
            raise ValueError(f"config: reload must be False where a residual is added, got {config}")
    elif x.numel():
        axes, options = (("M", x.shape[0]), ("N", x.shape[1])), sum_options(zero_centered, weight, x)
        config = _choose(axes, DTYPE_NAMES[x.dtype], quant, options)
    return RMSNormSum(*normalize(x, residual, weight, eps, quant, scale, amax, fp8_format, zero_centered, None, config))


def _two_launches(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's addition, then `rmsnorm_fwd`, as a model that is not fused."""
    total = inputs["x"] + inputs["residual"]
    out = rmsnorm_fwd(total, **{name: value for name, value in inputs.items() if name not in ("x", "residual")})
    return {"total": total} | {name: value for name, value in out._asdict().items() if value is not None}


OP = Op(
    name="rmsnorm_add_fwd",
    quants=contract.QUANTS,
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        Variant("baseline", _two_launches),
        Variant("optimized", run_of(rmsnorm_add_fwd), FwdConfig, space, invalid, default),
        *peers.ADD_FORWARD,
    ),
    module=__name__,
    **contract.SUM,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
