"""RMSNorm forward and backward, alone and of a sum with a residual. Formula: contract.py."""

from kerneltune.ops.rmsnorm.add_bwd import rmsnorm_add_bwd
from kerneltune.ops.rmsnorm.add_fwd import RMSNormSum, rmsnorm_add_fwd
from kerneltune.ops.rmsnorm.bwd import BwdConfig, rmsnorm_bwd
from kerneltune.ops.rmsnorm.fwd import FwdConfig, RMSNormOutput, rmsnorm_fwd

__all__ = [
    "BwdConfig", "FwdConfig", "RMSNormOutput", "RMSNormSum", "rmsnorm_add_bwd", "rmsnorm_add_fwd", "rmsnorm_bwd",
    "rmsnorm_fwd",
]  # fmt: skip
