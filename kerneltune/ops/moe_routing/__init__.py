"""Route tokens to experts and back: the order of rows, the copies, the weighted sums and their gradients."""

from kerneltune.ops.moe_routing.permute import RowsConfig, moe_permute
from kerneltune.ops.moe_routing.permute_fp8 import PermutedFp8, PermuteFp8Config, moe_permute_fp8
from kerneltune.ops.moe_routing.sort import SortedPairs, moe_sort
from kerneltune.ops.moe_routing.unpermute import moe_unpermute
from kerneltune.ops.moe_routing.unpermute_bwd import moe_unpermute_bwd

__all__ = [
    "PermuteFp8Config", "PermutedFp8", "RowsConfig", "SortedPairs", "moe_permute", "moe_permute_fp8", "moe_sort",
    "moe_unpermute", "moe_unpermute_bwd",
]  # fmt: skip
