"""Route tokens to experts and back: the order of rows, the copies, the weighted sums and their gradients.

Formulas stand in the operators' modules. Source: the permute and unpermute of MoE training frameworks, by their contract.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.ops.moe_routing import common, peers, permute, permute_fp8, sort, unpermute, unpermute_bwd
from kerneltune.ops.moe_routing.common import RowsConfig
from kerneltune.ops.moe_routing.permute import moe_permute
from kerneltune.ops.moe_routing.permute_fp8 import PermutedFp8, TileConfig, moe_permute_fp8
from kerneltune.ops.moe_routing.sort import SortedPairs, moe_sort
from kerneltune.ops.moe_routing.unpermute import moe_unpermute
from kerneltune.ops.moe_routing.unpermute_bwd import moe_unpermute_bwd
from kerneltune.spec import Op, Variant

__all__ = [
    "OPS",
    "PermutedFp8",
    "RowsConfig",
    "SortedPairs",
    "TileConfig",
    "moe_permute",
    "moe_permute_fp8",
    "moe_sort",
    "moe_unpermute",
    "moe_unpermute_bwd",
]

_DTYPES = tuple(DTYPE_NAMES.values())
_AXES = ("T", "H", "E", "K")


def _torch(run: Callable[..., Any]) -> tuple[Variant, ...]:
    return (
        Variant("compile", partial(run, True), unsupported=peers.not_torch, requires=("torch",)),
        Variant("baseline", partial(run, False), unsupported=peers.not_torch),
    )


def _rows(run: Callable[..., Any], valid: Callable[..., Any], default: Callable[..., Any]) -> Variant:
    return Variant("optimized", run, RowsConfig, common.rows_space, valid, default=default)


def _op(name: str, module: Any, optimized: Variant, torch_run: Callable[..., Any], **others: Any) -> Op:
    compiled, eager = _torch(torch_run)
    return Op(
        name=name,
        inputs=module.inputs,
        reference=module.reference,
        compare=module.compare,
        traffic=module.traffic,
        module=module.__name__,
        variants=(eager, optimized, compiled),
        **{
            "axes": _AXES,
            "dtypes": _DTYPES,
            "options": common.OPTIONS,
            "free_axes": ("T", "E", "K"),
            "free_options": ("routing",),
            **others,
        },
    )


OPS = (
    _op("moe_sort", sort, Variant("optimized", sort.run), peers.sort, axes=("T", "E", "K"), dtypes=("int64",)),
    _op("moe_permute", permute, _rows(permute.run, common.rows_valid, common.rows_default), peers.permute),
    _op(
        "moe_permute_fp8",
        permute_fp8,
        Variant("optimized", permute_fp8.run, TileConfig, permute_fp8.space, permute_fp8.valid, default=permute_fp8.default),
        peers.permute_fp8,
        dtypes=("uint8",),
        quants=("fp8",),
    ),
    _op(
        "moe_unpermute",
        unpermute,
        _rows(unpermute.run, common.rows_valid, common.rows_default),
        peers.unpermute,
        options={**common.OPTIONS, "weighted": unpermute.WEIGHTED},
        free_options=("routing", "weighted"),
        unseen_options=("routing",),
    ),
    _op(
        "moe_unpermute_bwd",
        unpermute_bwd,
        _rows(unpermute_bwd.run, unpermute_bwd.valid, unpermute_bwd.default),
        peers.unpermute_bwd,
    ),
)
