"""What a model imports: functions with autograd and modules, built from the operators.

Every function is a custom operator of torch's, so it compiles without a graph break. May import torch and ops.
"""

from kerneltune.nn.alignment import aligned_groups
from kerneltune.nn.convert import convert_to_fp8_training
from kerneltune.nn.delayed import DelayedScaling, update_scales
from kerneltune.nn.grouped_linear import GroupedLinear
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.int4_linear import Int4Linear
from kerneltune.nn.recipes import Recipe
from kerneltune.nn.rmsnorm import RMSNorm, rms_norm

__all__ = [
    "DelayedScaling",
    "GroupedLinear",
    "Int4Linear",
    "RMSNorm",
    "Recipe",
    "aligned_groups",
    "convert_to_fp8_training",
    "fp8_grouped_mm",
    "rms_norm",
    "update_scales",
]
