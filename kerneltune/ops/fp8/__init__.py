"""FP8 quantisation of MoE training with fresh scales: what feeds the scaled grouped matrix products.

Formula and NaN policy: reference.py. Source: torchao 0.18's float8 kernels for MoE training and their contract.
"""

from kerneltune.ops.fp8 import groups, reference
from kerneltune.ops.fp8.groups import GroupConfig, fp8_group_colwise, fp8_group_colwise_dual, fp8_rowwise_3d_transpose
from kerneltune.spec import Op, Variant

__all__ = ["OPS", "GroupConfig", "fp8_group_colwise", "fp8_group_colwise_dual", "fp8_rowwise_3d_transpose"]

_DTYPES = ("bfloat16", "float16", "float32")
_GROUPS = {**reference.OPTIONS, "groups": ("balanced", "zipf", "ragged")}

OPS = (
    Op(
        name="fp8_rowwise_3d_transpose",
        axes=("E", "K", "N"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=reference.OPTIONS,
        free_axes=("E",),
        inputs=groups.weight_inputs,
        reference=groups.weight_reference,
        compare=groups.compare,
        traffic=groups.weight_traffic,
        module="kerneltune.ops.fp8.groups",
        variants=(Variant("optimized", groups.run_weights, GroupConfig, groups.space, groups.valid, default=groups.default),),
    ),
    Op(
        name="fp8_group_colwise",
        axes=("M", "N", "G"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=_GROUPS,
        free_axes=("M", "G"),
        inputs=groups.group_inputs,
        reference=groups.group_reference,
        compare=groups.compare,
        traffic=groups.group_traffic,
        module="kerneltune.ops.fp8.groups",
        variants=(Variant("optimized", groups.run_group, GroupConfig, groups.space, groups.valid, default=groups.default),),
    ),
    Op(
        name="fp8_group_colwise_dual",
        axes=("M", "N1", "N2", "G"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=_GROUPS,
        free_axes=("M", "G"),
        inputs=groups.dual_inputs,
        reference=groups.dual_reference,
        compare=groups.compare,
        traffic=groups.group_traffic,
        module="kerneltune.ops.fp8.groups",
        variants=(Variant("optimized", groups.run_dual, GroupConfig, groups.space, groups.valid, default=groups.default),),
    ),
)
