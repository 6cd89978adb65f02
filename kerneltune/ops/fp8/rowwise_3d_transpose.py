"""Cast expert weights to fp8 and transpose them for dX, with a scale per expert and row over the last axis.

Shares config and kernel with `fp8_group_colwise`: an expert is a group of N rows in memory, whose columns the kernel casts.
Source: torchao's triton_fp8_rowwise_3d_transpose_rhs.
"""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import contract, group_colwise, peers
from kerneltune.ops.fp8.baselines import torchao
from kerneltune.ops.fp8.contract import CALL_OPTIONS, CAST, Cast, Pair, check_weights, fp8_dtype
from kerneltune.ops.fp8.group_colwise import GroupConfig, invalid, space
from kerneltune.ops.fp8.kernels.columns import cast_columns
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant


def default(case: Case) -> GroupConfig:
    """Return a config for any shape: tiles of 64 columns, small tiles where experts have few rows.

    H200, 2026-11-26, 26 cases: 0.94 of the tuned speed with the default of `fp8_group_colwise`, 1.01 with this default.
    """
    if case.dtype == "float32":
        return group_colwise.default(case)
    if case["N"] <= 3000:
        return GroupConfig(rows=128, cols=64, warps=2, ctas=6, stages=1, ahead=1, reload=True)
    return GroupConfig(rows=256, cols=64, warps=4, ctas=3, stages=1, ahead=1, reload=False)


def reference(inputs: Inputs) -> Outputs:
    """Cast over the last axis."""
    q, scale = contract.quantized(inputs["w"], 2, inputs)
    return {"q": q.transpose(1, 2), "scale": scale[:, :, 0]}


def _results(w: torch.Tensor, fp8_format: str, out: Pair | None = None) -> Pair:
    (E, K, N), (q, scale) = w.shape, out or (None, None)
    q = contract.column_major_result("out[0]", q, (E, N, K), fp8_dtype(fp8_format, w.device), w.device)
    return q, contract.contiguous_result("out[1]", scale, (E, K), torch.float32, w.device)


@torch_operator(_results)
@on_its_device
def fp8_rowwise_3d_transpose(
    w: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    out: Pair | None = None,
    config: GroupConfig | None = None,
) -> Pair:
    """Cast expert weights to fp8 and transpose them, with one scale per expert and row of `w`, over its last axis.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        out: tensors that receive the results, in place of new tensors.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.

    Returns:
        q (E, N, K) fp8, column-major: strides (N K, 1, N); scales (E, K) fp32. NaN makes its scale and all values under the
        scale NaN; infinity makes its scale 0.
    """
    check_weights("w", w)
    cast, (E, K, N) = Cast(fp8_format, pow2, inverse), w.shape
    q, scale = _results(w, fp8_format, out)
    if not w.numel():
        return q, scale.fill_(cast.scale_of_nothing)
    if config is None:
        config = _choose((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", CALL_OPTIONS)
    cast_columns(((w.transpose(1, 2).view(E * N, K), q, scale),), None, E, N, cast, config)
    return q, scale


OP = Op(
    name="fp8_rowwise_3d_transpose",
    axes=("E", "K", "N"),
    free_axes=("E",),
    reference=reference,
    traffic=lambda case: contract.cast_traffic(case, scales=case["E"] * case["K"]),
    variants=(
        torchao.TRANSPOSED_WEIGHTS,
        torchao.TRANSPOSED_WEIGHTS_BY_REDUCTION,
        Variant("optimized", run_of(fp8_rowwise_3d_transpose, "q", "scale"), GroupConfig, space, invalid, default),
        *peers.TRANSPOSED_WEIGHTS,
    ),
    module=__name__,
    **CAST,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
