"""Cast two matrices with the same token groups to fp8 for dW, in one launch.

Shares config, space and validity with `fp8_group_colwise`. Source: torchao's triton_fp8_per_group_colwise_scales_dual.
"""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_matrix, check_transposable
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import contract, group_colwise, peers
from kerneltune.ops.fp8.baselines import torchao
from kerneltune.ops.fp8.contract import GROUP_CALL_OPTIONS, GROUP_CAST, Cast, Pair, check_offs
from kerneltune.ops.fp8.group_colwise import GroupConfig, empty_results, invalid, space
from kerneltune.ops.fp8.kernels.columns import cast_columns
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant


def default(case: Case) -> GroupConfig:
    """Return a config for any shape: narrow tiles and eight programs per SM where groups are long.

    H200, 2026-11-26, 17 cases: 0.99 of the tuned speed with the default of `fp8_group_colwise`, 1.02 with this default.
    """
    if case.dtype == "float32":
        return group_colwise.default(case)
    if case["M"] // max(1, case["G"]) > 192:
        return GroupConfig(rows=128, cols=64, warps=2, ctas=8, stages=1, ahead=1, reload=True)
    return GroupConfig(rows=128, cols=128, warps=4, ctas=4, stages=1, ahead=1, reload=True)


def reference(inputs: Inputs) -> Outputs:
    """Cast both matrices over the rows, group by group."""
    (q1, scale1), (q2, scale2) = (contract.quantized_groups(inputs[name], inputs) for name in ("x1", "x2"))
    return {"q1": q1, "scale1": scale1, "q2": q2, "scale2": scale2}


def _results(x1: torch.Tensor, x2: torch.Tensor, offs: torch.Tensor, fp8_format: str, aligned: bool) -> tuple[Pair, Pair]:
    return empty_results(x1, offs, fp8_format, aligned), empty_results(x2, offs, fp8_format, aligned)


@torch_operator(_results)
@on_its_device
def fp8_group_colwise_dual(
    x1: torch.Tensor,
    x2: torch.Tensor,
    offs: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    aligned: bool = False,
    config: GroupConfig | None = None,
) -> tuple[Pair, Pair]:
    """Cast two matrices with the same token groups as `fp8_group_colwise` does, in one launch.

    Args:
        x1: (M, N1), as in `fp8_group_colwise`.
        x2: (M, N2) of the same dtype.
        offs: (G,) int32, where each group's rows end, as in `fp8_group_colwise`.
        aligned: write aligned groups, as there.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.

    Returns:
        q and scales of x1, then q and scales of x2, each pair as `fp8_group_colwise` returns it.
    """
    for name, x in (("x1", x1), ("x2", x2)):
        check_matrix(name, x)
        check_transposable(name, x.shape[0])
        if x.shape[0] != x1.shape[0] or x.dtype != x1.dtype or x.device != x1.device:
            wanted = f"({x1.shape[0]}, N) {x1.dtype} on {x1.device}"
            raise ValueError(f"{name} must be {wanted} as x1 is, got {tuple(x.shape)} {x.dtype} on {x.device}")
    cast, (M, N1), N2 = Cast(fp8_format, pow2, inverse), x1.shape, x2.shape[1]
    check_offs(offs, M, x1.device)
    (q1, scale1), (q2, scale2) = _results(x1, x2, offs, fp8_format, aligned)
    if M == 0:
        for scale in (scale1, scale2):
            scale.fill_(cast.scale_of_nothing)
    elif N1 or N2:
        if config is None:
            axes = (("M", M), ("N1", N1), ("N2", N2), ("G", offs.shape[0]))
            config = _choose(axes, DTYPE_NAMES[x1.dtype], "fp8", GROUP_CALL_OPTIONS)
        cast_columns(((x1, q1, scale1), (x2, q2, scale2)), offs, offs.shape[0], M, cast, config, aligned)
    return (q1, scale1), (q2, scale2)


OP = Op(
    name="fp8_group_colwise_dual",
    axes=("M", "N1", "N2", "G"),
    free_axes=("M", "G"),
    reference=reference,
    traffic=lambda case: contract.cast_traffic(case, scales=case["G"] * (case["N1"] + case["N2"])),
    variants=(
        torchao.TWO_OF_GROUPS,
        Variant(
            "optimized", run_of(fp8_group_colwise_dual, "q1", "scale1", "q2", "scale2"), GroupConfig, space, invalid, default
        ),
        *peers.TWO_OF_GROUPS,
    ),
    module=__name__,
    **GROUP_CAST,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
