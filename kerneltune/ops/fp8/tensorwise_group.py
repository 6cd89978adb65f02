"""Cast token groups to fp8 with a scale per group, after elements are made finite.

Shares config and kernels with `fp8_tensorwise_2d`. Source: torchao pull request 4179's fp8_tensorwise_per_group_quantize.
"""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_matrix, check_transposable
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.groups import bounds
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import peers, tensorwise_2d
from kerneltune.ops.fp8.baselines import torchao_tensorwise
from kerneltune.ops.fp8.contract import CALL_OPTIONS, CONTRACT, GROUP_DISTANCE, GROUP_OPTIONS, OPTIONS, Cast, check_offs
from kerneltune.ops.fp8.kernels.early import cast_with_one_scale
from kerneltune.ops.fp8.tensorwise_2d import LAYOUTS, SegmentConfig, SegmentOutput, invalid, space, traffic
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant


def default(case: Case) -> SegmentConfig:
    """Return a config for any shape: for transposes of 16-bit types larger tiles than `fp8_tensorwise_2d`.

    H200, 2026-11-23, layouts `col` and `both`, five shapes: 1.30 to 1.54 times as fast.
    """
    is_wide, is_long = case.option("layout") == "row", case["M"] > 7000 and case["G"] <= 64
    if case.dtype == "float32" or (is_wide and not (is_long and case["K"] > 512)):
        return tensorwise_2d.default(case)
    if is_wide:  # whole rows where they are many: H200, 2026-11-26, 19 cases: 0.97 of the tuned speed -> 1.00
        return SegmentConfig(rows=8, cols=1024, warps=2, ctas=0, stages=1)
    return SegmentConfig(rows=128, cols=128, warps=4, ctas=0, stages=1)


def reference(inputs: Inputs) -> Outputs:
    """Cast group by group."""
    parts = [tensorwise_2d.quantized(inputs["x"][None, start:end], inputs) for start, end in bounds(inputs["offs"])]
    q = torch.cat([q[0].view(torch.uint8) for q, _ in parts]).view(parts[0][0].dtype)
    return tensorwise_2d.in_layout(inputs, q, q, torch.cat([scale for _, scale in parts]))


def _results(x: torch.Tensor, offs: torch.Tensor, fp8_format: str, layout: str, aligned: bool) -> SegmentOutput:
    return tensorwise_2d.empty_results(x, fp8_format, layout, offs.shape[0], offs.shape[0] if aligned else 0)


@torch_operator(_results)
@on_its_device
def fp8_tensorwise_group(
    x: torch.Tensor,
    offs: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    layout: str = "row",
    pow2: bool = True,
    inverse: bool = False,
    aligned: bool = False,
    config: SegmentConfig | None = None,
) -> SegmentOutput:
    """Cast token groups to fp8 with one scale per group.

    Args:
        x: (M, K) as in `fp8_tensorwise_2d`.
        offs: (G,) int32, where each group's rows end, as in `fp8_group_colwise`.
        layout: `row`, `col` or `both`, from one pass.
        aligned: write q_t (aligned_size, K), column-major, as aligned groups for `fp8_grouped_gemm(aligned=True)`.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.

    Returns:
        q and q_t as from `fp8_tensorwise_2d`; scale (G,) fp32.
    """
    check_matrix("x", x)
    tensorwise_2d.check_layout(layout)
    cast, (M, K) = Cast(fp8_format, pow2, inverse), x.shape
    check_offs(offs, M, x.device)
    results = _results(x, offs, fp8_format, layout, aligned)
    if layout != "row":
        check_transposable("x", M)
    if config is None and x.numel():
        axes, options = (("M", M), ("K", K), ("G", offs.shape[0])), (*CALL_OPTIONS, ("layout", layout), ("groups", "balanced"))
        config = _choose(axes, DTYPE_NAMES[x.dtype], "fp8", options)
    cast_with_one_scale(x, offs, *results, cast, config, aligned=aligned)
    return results


OP = Op(
    name="fp8_tensorwise_group",
    axes=("M", "K", "G"),
    free_axes=("M", "G"),
    max_distance=GROUP_DISTANCE,
    options=OPTIONS | {"layout": LAYOUTS, "groups": GROUP_OPTIONS["groups"]},
    free_options=tuple(GROUP_OPTIONS),
    reference=reference,
    traffic=traffic,
    variants=(
        *torchao_tensorwise.VARIANTS,
        Variant("optimized", run_of(fp8_tensorwise_group), SegmentConfig, space, invalid, default),
        *peers.TENSORWISE,
    ),
    module=__name__,
    **CONTRACT,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
