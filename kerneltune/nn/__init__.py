"""Give models functions with autograd and modules, built from the operators.

The functions are custom operators of torch, so they compile without a graph break. Modules do, too, except for delayed
scaling, weights that GroupedLinear keeps from microbatch to microbatch, and converted modules of unknown kinds that call
`torch._grouped_mm`. The import also registers the casts, `kerneltune::fp8_…` and `kerneltune::multi_cast_transpose`, with
torch.
"""

from kerneltune.nn.alignment import aligned_groups
from kerneltune.nn.convert import Conversion, convert_to_fp8_training, revert_from_fp8_training
from kerneltune.nn.delayed import DelayedScaling, update_scales
from kerneltune.nn.fp8_linear import Fp8Linear, GroupedLinear
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.int4_linear import Int4Linear
from kerneltune.nn.kept_weights import set_first_microbatch
from kerneltune.nn.recipes import Recipe
from kerneltune.nn.rmsnorm import RMSNorm, rms_norm
from kerneltune.nn.routing import Routing, permute_tokens, sort_tokens, unpermute_tokens

__all__ = [
    "Conversion", "DelayedScaling", "Fp8Linear", "GroupedLinear", "Int4Linear", "RMSNorm", "Recipe", "Routing",
    "aligned_groups", "convert_to_fp8_training", "fp8_grouped_mm", "permute_tokens", "revert_from_fp8_training",
    "rms_norm", "set_first_microbatch", "sort_tokens", "unpermute_tokens", "update_scales",
]  # fmt: skip
