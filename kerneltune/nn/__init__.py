"""What a model imports: functions with autograd and modules, built from the operators.

Every function is a custom operator of torch's, so it compiles without a graph break. May import torch and ops.
"""

from kerneltune.nn.int4_linear import Int4Linear
from kerneltune.nn.rmsnorm import RMSNorm, rms_norm

__all__ = ["Int4Linear", "RMSNorm", "rms_norm"]
