"""Cast expert weights to fp8 with a scale per expert, after elements are made finite, for Y, for dX, or for both.

Shares config and kernels with `fp8_tensorwise_2d`. Source: torchao pull request 4179's fp8_tensorwise_quantize_3d.
"""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import contract, peers, tensorwise_2d
from kerneltune.ops.fp8.baselines import torchao_tensorwise
from kerneltune.ops.fp8.contract import CALL_OPTIONS, CONTRACT, OPTIONS, Cast, check_weights, fp8_dtype
from kerneltune.ops.fp8.kernels.early import cast_with_one_scale
from kerneltune.ops.fp8.tensorwise_2d import LAYOUTS, SegmentConfig, SegmentOutput, default, invalid, space, traffic
from kerneltune.spec import Inputs, Op, Outputs, Variant


def reference(inputs: Inputs) -> Outputs:
    """Cast every expert as a segment."""
    q, scale = tensorwise_2d.quantized(inputs["w"].transpose(1, 2), inputs)
    return tensorwise_2d.in_layout(inputs, q.transpose(1, 2), q, scale)


def _results(w: torch.Tensor, fp8_format: str, layout: str, out: SegmentOutput | None = None) -> SegmentOutput:
    tensorwise_2d.check_layout(layout)
    (E, K, N), dtype, device = w.shape, fp8_dtype(fp8_format, w.device), w.device
    q, q_t, scale = out or (None, None, None)
    return SegmentOutput(
        contract.column_major_result("out.q", q, (E, K, N), dtype, device) if layout != "col" else None,
        contract.column_major_result("out.q_t", q_t, (E, N, K), dtype, device) if layout != "row" else None,
        contract.contiguous_result("out.scale", scale, (E,), torch.float32, device),
    )


@torch_operator(_results, without=("amax",))
@on_its_device
def fp8_tensorwise_3d(
    w: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    layout: str = "row",
    pow2: bool = True,
    inverse: bool = False,
    amax: torch.Tensor | None = None,
    out: SegmentOutput | None = None,
    config: SegmentConfig | None = None,
) -> SegmentOutput:
    """Cast expert weights to fp8 with one scale per expert.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        layout: `row`, as w lies in memory; `col`, transposed; `both`.
        amax: (E,) fp32, the expected largest magnitudes, 0 for an unknown one; overwritten by the largest magnitudes of w.
            The results do not depend on amax: if a scale is as expected, no tile of the expert is cast twice. Without pow2
            amax is neither read nor written.
        out: tensors that receive the results, in place of new tensors.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.

    Returns:
        q (E, K, N) fp8, strides of w, or None; q_t (E, N, K), strides (N K, 1, N), or None; scale (E,) fp32.
    """
    check_weights("w", w)
    cast, (E, K, N) = Cast(fp8_format, pow2, inverse), w.shape
    found = _results(w, fp8_format, layout, out)
    if amax is not None:
        check_like("amax", amax, (E,), torch.float32, w.device)
    if config is None and w.numel():
        config = _choose((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", (*CALL_OPTIONS, ("layout", layout)))
    q_rows = None if found.q is None else found.q.transpose(1, 2)
    cast_with_one_scale(w.transpose(1, 2).reshape(E * N, K), None, q_rows, found.q_t, found.scale, cast, config, amax)
    return found


OP = Op(
    name="fp8_tensorwise_3d",
    axes=("E", "K", "N"),
    free_axes=("E",),
    options=OPTIONS | {"layout": LAYOUTS},
    free_options=tuple(OPTIONS),
    reference=reference,
    traffic=traffic,
    variants=(
        *torchao_tensorwise.VARIANTS,
        Variant("optimized", run_of(fp8_tensorwise_3d), SegmentConfig, space, invalid, default),
        *peers.TENSORWISE,
    ),
    module=__name__,
    **CONTRACT,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
