"""RMSNorm forward and backward, with FP8 and transposed-FP8 output under delayed scaling.

    r_i = 1 / sqrt(mean_j(x_ij²) + eps)      y_ij = x_ij * r_i * γ_j      q_ij = fp8(clamp(y_ij * scale))
    dx_ij = r_i * (dz_ij γ_j - r_i² s_i x_ij / N),  s_i = Σ_j dz_ij x_ij γ_j      dγ_j = Σ_i dz_ij x_ij r_i

All in fp32 inside; with zero-centred gamma γ = weight + 1, added in fp32. Source: the contract of TransformerEngine's Triton
RMSNorm and of its pull request 593.
"""

from collections.abc import Callable
from functools import partial

from kerneltune.ops.rmsnorm import add, add_peers, add_reference, configs, optimized, peers, reference, te
from kerneltune.ops.rmsnorm.add import RMSNormSum, rmsnorm_add_bwd, rmsnorm_add_fwd
from kerneltune.ops.rmsnorm.optimized import RMSNormOutput, rmsnorm_bwd, rmsnorm_fwd
from kerneltune.spec import Op, Outputs, Variant

__all__ = ["OPS", "RMSNormOutput", "RMSNormSum", "rmsnorm_add_bwd", "rmsnorm_add_fwd", "rmsnorm_bwd", "rmsnorm_fwd"]

_DTYPES = ("bfloat16", "float16", "float32")

_MODES = {"eager": "eager", "compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def _torch(run: Callable[..., Outputs]) -> tuple[Variant, ...]:
    return tuple(
        Variant(name, partial(run, mode), unsupported=peers.not_empty, requires=("torch",), compiles=mode != "eager")
        for name, mode in _MODES.items()
    )


RMSNORM_FWD = Op(
    name="rmsnorm_fwd",
    axes=("M", "N"),
    dtypes=_DTYPES,
    quants=("none", "fp8", "fp8_t"),
    options={"zero_centered": (False, True), "fp8_format": ("e4m3", "e5m2"), "row_pad": (0, 3, 8)},
    free_axes=("M",),
    free_options=("zero_centered", "fp8_format", "row_pad"),
    inputs=reference.fwd_inputs,
    reference=reference.fwd_reference,
    compare=reference.compare_fwd,
    traffic=reference.fwd_traffic,
    module=__name__,
    variants=(
        Variant(
            "baseline",
            te.run_baseline_fwd,
            te.TeFwdConfig,
            te.baseline_fwd_space,
            default=lambda _case: te.TeFwdConfig(8),
            unsupported=te.nothing_to_do,
        ),
        Variant(
            "pr593",
            te.run_pr593_fwd,
            te.TePr593FwdConfig,
            te.pr593_fwd_space,
            te.pr593_fwd_valid,
            default=lambda _case: te.TePr593FwdConfig(8, 64, 64, 4),
            unsupported=te.nothing_to_do,
        ),
        Variant(
            "optimized",
            optimized.run_fwd,
            configs.FwdConfig,
            configs.space_fwd,
            configs.valid_fwd,
            default=configs.default_fwd,
        ),
        *_torch(peers.fwd),
        Variant("liger", peers.liger_fwd, unsupported=peers.only_unquantised, requires=("liger_kernel",)),
        Variant("quack", peers.quack_fwd, unsupported=peers.only_plain_gamma, requires=("quack",), compiles=True),
    ),
)

RMSNORM_BWD = Op(
    name="rmsnorm_bwd",
    axes=("M", "N"),
    dtypes=_DTYPES,
    options={"zero_centered": (False, True)},
    free_axes=("M",),
    free_options=("zero_centered",),
    inputs=reference.bwd_inputs,
    reference=reference.bwd_reference,
    compare=reference.compare_bwd,
    traffic=reference.bwd_traffic,
    module=__name__,
    variants=(
        Variant(
            "baseline",
            te.run_baseline_bwd,
            te.TeBwdConfig,
            te.baseline_bwd_space,
            default=lambda _case: te.TeBwdConfig(8, 128, 64, 4),
            unsupported=te.nothing_to_do,
        ),
        Variant(
            "pr593",
            te.run_pr593_bwd,
            te.TeBwdConfig,
            te.pr593_bwd_space,
            te.pr593_bwd_valid,
            default=lambda _case: te.TeBwdConfig(8, 128, 64, 4),
            unsupported=te.nothing_to_do,
        ),
        Variant(
            "optimized",
            optimized.run_bwd,
            configs.BwdConfig,
            configs.space_bwd,
            configs.valid_bwd,
            default=configs.default_bwd,
        ),
        *_torch(peers.bwd),
        Variant("liger", peers.liger_bwd, unsupported=peers.only_unquantised, requires=("liger_kernel",)),
        Variant("quack", peers.quack_bwd, unsupported=peers.only_plain_gamma, requires=("quack",), compiles=True),
    ),
)

RMSNORM_ADD_FWD = Op(
    name="rmsnorm_add_fwd",
    axes=("M", "N"),
    dtypes=_DTYPES,
    quants=("none", "fp8", "fp8_t"),
    options=add_reference.OPTIONS,
    free_axes=("M",),
    free_options=tuple(add_reference.OPTIONS),
    inputs=add_reference.fwd_inputs,
    reference=add_reference.fwd_reference,
    compare=add_reference.compare_fwd,
    traffic=add_reference.fwd_traffic,
    module=__name__,
    variants=(
        Variant("baseline", add_peers.two_launches_fwd),
        Variant(
            "optimized",
            add.run_fwd,
            configs.FwdConfig,
            configs.space_add_fwd,
            configs.valid_add_fwd,
            default=configs.default_add_fwd,
        ),
        *_torch(add_peers.fwd),
        Variant("liger", add_peers.liger_fwd, unsupported=add_peers.only_weighted, requires=("liger_kernel",)),
        Variant("quack", add_peers.quack_fwd, unsupported=peers.only_plain_gamma, requires=("quack",), compiles=True),
    ),
)

RMSNORM_ADD_BWD = Op(
    name="rmsnorm_add_bwd",
    axes=("M", "N"),
    dtypes=_DTYPES,
    options=add_reference.OPTIONS,
    free_axes=("M",),
    free_options=tuple(add_reference.OPTIONS),
    inputs=add_reference.bwd_inputs,
    reference=add_reference.bwd_reference,
    compare=add_reference.compare_bwd,
    traffic=add_reference.bwd_traffic,
    module=__name__,
    variants=(
        Variant("baseline", add_peers.two_launches_bwd),
        Variant(
            "optimized",
            add.run_bwd,
            configs.BwdConfig,
            configs.space_add_bwd,
            configs.valid_add_bwd,
            default=configs.default_add_bwd,
        ),
        *_torch(add_peers.bwd),
        Variant("liger", add_peers.liger_bwd, unsupported=add_peers.only_weighted, requires=("liger_kernel",)),
        Variant("quack", add_peers.quack_bwd, unsupported=peers.only_plain_gamma, requires=("quack",), compiles=True),
    ),
)

OPS = (RMSNORM_FWD, RMSNORM_BWD, RMSNORM_ADD_FWD, RMSNORM_ADD_BWD)
