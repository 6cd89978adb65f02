"""FP8 quantisation of MoE training with fresh scales: what feeds the scaled grouped matrix products.

Formula and NaN policy: reference.py. Source: torchao 0.18's float8 kernels for MoE training and their contract.
"""

from collections.abc import Callable
from typing import Any

from kerneltune.ops.fp8 import groups, peers, reference, rows, torchao
from kerneltune.ops.fp8.groups import GroupConfig, fp8_group_colwise, fp8_group_colwise_dual, fp8_rowwise_3d_transpose
from kerneltune.ops.fp8.rows import RowConfig, fp8_colwise_3d, fp8_rowwise_2d
from kerneltune.spec import Case, Op, Variant

__all__ = [
    "OPS",
    "GroupConfig",
    "RowConfig",
    "fp8_colwise_3d",
    "fp8_group_colwise",
    "fp8_group_colwise_dual",
    "fp8_rowwise_2d",
    "fp8_rowwise_3d_transpose",
]

_DTYPES = ("bfloat16", "float16", "float32")
_GROUPS = {**reference.OPTIONS, "groups": ("balanced", "zipf", "ragged")}
_Run = Callable[[Any, Any], Any]


def _peers(
    torchao_run: _Run, compile_run: _Run, eager_run: _Run, not_torchao: Callable[[Case], str | None] = peers.not_torchao
) -> tuple[Variant, ...]:
    return (
        Variant("torchao", torchao_run, unsupported=not_torchao, requires=("torchao",)),
        Variant("compile", compile_run, unsupported=peers.not_torch, requires=("torch",)),
        Variant("eager", eager_run, unsupported=peers.not_torch, requires=("torch",)),
    )


def _groups_baseline(run: _Run) -> Variant:
    return Variant(
        "baseline", run, torchao.TileConfig, torchao.group_space, torchao.tile_valid, torchao.group_default, torchao.nothing_to_do
    )


OPS = (
    Op(
        name="fp8_rowwise_2d",
        axes=("M", "K"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=reference.OPTIONS,
        free_axes=("M",),
        inputs=rows.rows_inputs,
        reference=rows.rows_reference,
        compare=groups.compare,
        traffic=rows.rows_traffic,
        module="kerneltune.ops.fp8.rows",
        variants=(
            Variant(
                "baseline",
                torchao.run_rows,
                torchao.LoopConfig,
                torchao.rows_space,
                default=torchao.rows_default,
                unsupported=torchao.nothing_to_do,
            ),
            Variant("optimized", rows.run_rows, rows.RowConfig, rows.space, rows.valid, default=rows.default),
            *_peers(peers.torchao_rows, peers.compile_rows, peers.eager_rows),
        ),
    ),
    Op(
        name="fp8_colwise_3d",
        axes=("E", "K", "N"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=reference.OPTIONS,
        free_axes=("E", "N"),
        inputs=groups.weight_inputs,
        reference=rows.weights_reference,
        compare=groups.compare,
        traffic=rows.weights_traffic,
        module="kerneltune.ops.fp8.rows",
        variants=(
            Variant(
                "baseline",
                torchao.run_weights,
                torchao.TileConfig,
                torchao.weights_space,
                torchao.tile_valid,
                default=torchao.weights_default,
                unsupported=torchao.nothing_to_do,
            ),
            Variant("optimized", rows.run_weights, rows.RowConfig, rows.space, rows.valid, default=rows.default),
            *_peers(peers.torchao_weights, peers.compile_weights, peers.eager_weights),
        ),
    ),
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
        variants=(
            Variant(
                "baseline",
                torchao.run_atomic,
                torchao.TileConfig,
                torchao.tile_space,
                torchao.tile_valid,
                default=torchao.tile_default,
                unsupported=torchao.atomics_pass_nan_over,
            ),
            Variant(
                "reduction",
                torchao.run_reduction,
                torchao.TileConfig,
                torchao.reduction_space,
                torchao.tile_valid,
                default=torchao.reduction_default,
                unsupported=torchao.nothing_to_do,
            ),
            Variant("optimized", groups.run_weights, GroupConfig, groups.space, groups.valid, default=groups.default),
            *_peers(peers.torchao_transpose, peers.compile_transpose, peers.eager_transpose),
        ),
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
        variants=(
            _groups_baseline(torchao.run_group),
            Variant("optimized", groups.run_group, GroupConfig, groups.space, groups.valid, default=groups.default),
            *_peers(peers.torchao_group, peers.compile_group, peers.eager_group, peers.not_torchao_group),
        ),
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
        variants=(
            _groups_baseline(torchao.run_dual),
            Variant("optimized", groups.run_dual, GroupConfig, groups.space, groups.valid, default=groups.default),
            *_peers(peers.torchao_dual, peers.compile_dual, peers.eager_dual),
        ),
    ),
)
