"""Cast expert weights to fp8 for the forward product, in the layout of the weights, with a scale per expert and column.

Shares config, space, validity, default and kernel with `fp8_rowwise_2d`: a column of the weights is a row in memory.
Source: torchao's triton_fp8_colwise_3d_scale_and_cast.
"""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import contract, peers
from kerneltune.ops.fp8.baselines import torchao
from kerneltune.ops.fp8.contract import CALL_OPTIONS, CAST, Cast, Pair, check_weights, fp8_dtype
from kerneltune.ops.fp8.kernels.rows import cast_rows
from kerneltune.ops.fp8.rowwise_2d import RowConfig, default, invalid, space
from kerneltune.spec import Inputs, Op, Outputs, Variant


def reference(inputs: Inputs) -> Outputs:
    """Cast over the middle axis."""
    q, scale = contract.quantized(inputs["w"], 1, inputs)
    return {"q": q, "scale": scale}


def _results(w: torch.Tensor, fp8_format: str, out: Pair | None = None) -> Pair:
    (E, K, N), (q, scale), device = w.shape, out or (None, None), w.device
    q = contract.column_major_result("out[0]", q, (E, K, N), fp8_dtype(fp8_format, device), device)
    return q, contract.contiguous_result("out[1]", scale, (E, 1, N), torch.float32, device)


@torch_operator(_results)
@on_its_device
def fp8_colwise_3d(
    w: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    out: Pair | None = None,
    config: RowConfig | None = None,
) -> Pair:
    """Cast expert weights to fp8 with a scale per expert and column of `w`, in the layout of `w`.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        out: tensors that receive the results, in place of new tensors.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.

    Returns:
        q (E, K, N) fp8, strides of w; scales (E, 1, N) fp32. NaN and infinity as in `fp8_rowwise_2d`.
    """
    check_weights("w", w)
    cast, (E, K, N) = Cast(fp8_format, pow2, inverse), w.shape
    q, scale = _results(w, fp8_format, out)
    if config is None and w.numel():
        config = _choose((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", CALL_OPTIONS)
    cast_rows(w.transpose(1, 2).reshape(E * N, K), q, scale, cast, config)
    return q, scale


OP = Op(
    name="fp8_colwise_3d",
    axes=("E", "K", "N"),
    free_axes=("E", "N"),
    reference=reference,
    traffic=lambda case: contract.cast_traffic(case, scales=case["E"] * case["N"]),
    variants=(
        torchao.COLUMNS_OF_WEIGHTS,
        Variant("optimized", run_of(fp8_colwise_3d, "q", "scale"), RowConfig, space, invalid, default),
        *peers.COLUMNS_OF_WEIGHTS,
    ),
    module=__name__,
    **CAST,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
