"""FP8 quantization of MoE training with fresh scales: the operands of scaled grouped matrix products.

Formula and NaN policy: contract.py. Source: torchao 0.18's float8 kernels for MoE training and their contract.
"""

from kerneltune.ops.fp8.colwise_3d import fp8_colwise_3d
from kerneltune.ops.fp8.group_both import fp8_group_both
from kerneltune.ops.fp8.group_colwise import GroupConfig, fp8_group_colwise
from kerneltune.ops.fp8.group_colwise_dual import fp8_group_colwise_dual
from kerneltune.ops.fp8.rowwise_2d import RowConfig, fp8_rowwise_2d
from kerneltune.ops.fp8.rowwise_3d_both import BothConfig, BothLayouts, fp8_rowwise_3d_both
from kerneltune.ops.fp8.rowwise_3d_transpose import fp8_rowwise_3d_transpose
from kerneltune.ops.fp8.swiglu_2d import fp8_swiglu_2d
from kerneltune.ops.fp8.swiglu_bwd_2d import fp8_swiglu_bwd_2d
from kerneltune.ops.fp8.tensorwise_2d import SegmentConfig, SegmentOutput, fp8_delayed_2d, fp8_tensorwise_2d
from kerneltune.ops.fp8.tensorwise_3d import fp8_tensorwise_3d
from kerneltune.ops.fp8.tensorwise_group import fp8_tensorwise_group
from kerneltune.ops.fp8.transpose_2d import TransposeConfig, fp8_transpose_2d

__all__ = [
    "BothConfig", "BothLayouts", "GroupConfig", "RowConfig", "SegmentConfig", "SegmentOutput", "TransposeConfig",
    "fp8_colwise_3d", "fp8_delayed_2d", "fp8_group_both", "fp8_group_colwise", "fp8_group_colwise_dual",
    "fp8_rowwise_2d", "fp8_rowwise_3d_both", "fp8_rowwise_3d_transpose", "fp8_swiglu_2d", "fp8_swiglu_bwd_2d",
    "fp8_tensorwise_2d", "fp8_tensorwise_3d", "fp8_tensorwise_group", "fp8_transpose_2d",
]  # fmt: skip
