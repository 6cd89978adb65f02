"""FP8 quantisation of MoE training with fresh scales: what feeds the scaled grouped matrix products.

Formula and NaN policy: reference.py. Source: torchao 0.18's float8 kernels for MoE training and their contract.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from kerneltune.ops.fp8 import both, flat, group_both, groups, peers, reference, rows, segments, tensorwise, torchao, transpose
from kerneltune.ops.fp8.both import BothConfig, BothLayouts, fp8_rowwise_3d_both
from kerneltune.ops.fp8.common import FREE_GROUP_OPTIONS, FREE_OPTIONS
from kerneltune.ops.fp8.group_both import fp8_group_both
from kerneltune.ops.fp8.groups import GroupConfig, fp8_group_colwise, fp8_group_colwise_dual, fp8_rowwise_3d_transpose
from kerneltune.ops.fp8.rows import RowConfig, fp8_colwise_3d, fp8_rowwise_2d
from kerneltune.ops.fp8.segments import SegmentConfig
from kerneltune.ops.fp8.tensorwise import SegmentOutput, fp8_tensorwise_2d, fp8_tensorwise_3d, fp8_tensorwise_group
from kerneltune.ops.fp8.transpose import TransposeConfig, fp8_transpose_2d
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant

__all__ = [
    "OPS",
    "BothConfig",
    "BothLayouts",
    "GroupConfig",
    "RowConfig",
    "SegmentConfig",
    "SegmentOutput",
    "TransposeConfig",
    "fp8_colwise_3d",
    "fp8_group_both",
    "fp8_group_colwise",
    "fp8_group_colwise_dual",
    "fp8_rowwise_2d",
    "fp8_rowwise_3d_both",
    "fp8_rowwise_3d_transpose",
    "fp8_tensorwise_2d",
    "fp8_tensorwise_3d",
    "fp8_tensorwise_group",
    "fp8_transpose_2d",
]

_DTYPES = ("bfloat16", "float16", "float32")
_GROUPS = {**reference.OPTIONS, "groups": ("balanced", "zipf", "ragged")}
_LAYOUTS = {**reference.OPTIONS, "layout": tensorwise.LAYOUTS}
_Run = Callable[..., Any]


def _torch(run: _Run) -> tuple[Variant, ...]:
    return tuple(
        Variant(name, partial(run, compiled), unsupported=peers.not_torch, requires=("torch",))
        for name, compiled in (("compile", True), ("eager", False))
    )


def _peers(
    torchao_run: _Run, torch_run: _Run, not_torchao: Callable[[Case], str | None] = peers.not_torchao
) -> tuple[Variant, ...]:
    return (Variant("torchao", torchao_run, unsupported=not_torchao, requires=("torchao",)), *_torch(torch_run))


def _groups_baseline(run: _Run) -> Variant:
    return Variant(
        "baseline", run, torchao.TileConfig, torchao.group_space, torchao.tile_valid, torchao.group_default, torchao.nothing_to_do
    )


def _tensorwise(
    name: str,
    axes: tuple[str, ...],
    free_axes: tuple[str, ...],
    inputs: Callable[..., Inputs],
    formula: Callable[[Inputs], Outputs],
    run: _Run,
) -> Op:
    return Op(
        name=name,
        axes=axes,
        dtypes=_DTYPES,
        quants=("fp8",),
        options=_LAYOUTS | ({"groups": _GROUPS["groups"]} if "G" in axes else {}),
        free_axes=free_axes,
        free_options=FREE_GROUP_OPTIONS if "G" in axes else FREE_OPTIONS,
        inputs=inputs,
        reference=formula,
        compare=groups.compare,
        traffic=tensorwise.traffic,
        module="kerneltune.ops.fp8.tensorwise",
        variants=(
            Variant("baseline", flat.run, flat.FlatConfig, flat.space, default=flat.default, unsupported=torchao.nothing_to_do),
            Variant(
                "staged", flat.run_staged, flat.FlatConfig, flat.space, default=flat.default, unsupported=torchao.nothing_to_do
            ),
            Variant("optimized", run, SegmentConfig, segments.space, segments.valid, default=segments.default),
            *_torch(peers.tensorwise),
        ),
    )


OPS = (
    Op(
        name="fp8_rowwise_2d",
        axes=("M", "K"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=reference.OPTIONS,
        free_axes=("M",),
        free_options=FREE_OPTIONS,
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
            *_peers(peers.torchao_rows, peers.rows),
        ),
    ),
    Op(
        name="fp8_colwise_3d",
        axes=("E", "K", "N"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=reference.OPTIONS,
        free_axes=("E", "N"),
        free_options=FREE_OPTIONS,
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
            *_peers(peers.torchao_weights, peers.weights),
        ),
    ),
    Op(
        name="fp8_rowwise_3d_transpose",
        axes=("E", "K", "N"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=reference.OPTIONS,
        free_axes=("E",),
        free_options=FREE_OPTIONS,
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
            *_peers(peers.torchao_transpose, peers.transposed_weights),
        ),
    ),
    Op(
        name="fp8_rowwise_3d_both",
        axes=("E", "K", "N"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=reference.OPTIONS,
        free_axes=("E",),
        free_options=FREE_OPTIONS,
        inputs=groups.weight_inputs,
        reference=both.both_reference,
        compare=groups.compare,
        traffic=both.both_traffic,
        module="kerneltune.ops.fp8.both",
        variants=(
            Variant("baseline", both.run_separately),
            Variant("optimized", both.run_both, BothConfig, both.space, both.valid, default=both.default),
            *_peers(peers.torchao_both_of_weights, peers.both_of_weights),
        ),
    ),
    Op(
        name="fp8_group_colwise",
        axes=("M", "N", "G"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=_GROUPS,
        free_axes=("M", "G"),
        free_options=FREE_GROUP_OPTIONS,
        inputs=groups.group_inputs,
        reference=groups.group_reference,
        compare=groups.compare,
        traffic=groups.group_traffic,
        module="kerneltune.ops.fp8.groups",
        variants=(
            _groups_baseline(torchao.run_group),
            Variant("optimized", groups.run_group, GroupConfig, groups.space, groups.valid, default=groups.default),
            *_peers(peers.torchao_group, peers.group, peers.not_torchao_group),
        ),
    ),
    Op(
        name="fp8_group_colwise_dual",
        axes=("M", "N1", "N2", "G"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=_GROUPS,
        free_axes=("M", "G"),
        free_options=FREE_GROUP_OPTIONS,
        inputs=groups.dual_inputs,
        reference=groups.dual_reference,
        compare=groups.compare,
        traffic=groups.group_traffic,
        module="kerneltune.ops.fp8.groups",
        variants=(
            _groups_baseline(torchao.run_dual),
            Variant("optimized", groups.run_dual, GroupConfig, groups.space, groups.valid, default=groups.default),
            *_peers(peers.torchao_dual, peers.dual),
        ),
    ),
    Op(
        name="fp8_group_both",
        axes=("M", "K", "G"),
        dtypes=_DTYPES,
        quants=("fp8",),
        options=_GROUPS,
        free_axes=("M", "G"),
        free_options=FREE_GROUP_OPTIONS,
        inputs=group_both.inputs,
        reference=group_both.both_reference,
        compare=groups.compare,
        traffic=group_both.traffic,
        module="kerneltune.ops.fp8.group_both",
        variants=(
            Variant("baseline", group_both.run_separately),
            Variant("optimized", group_both.run, BothConfig, both.space, both.valid, default=group_both.default),
            *_peers(peers.torchao_both_of_groups, peers.both_of_groups, peers.not_torchao_group),
        ),
    ),
    _tensorwise(
        "fp8_tensorwise_2d",
        ("M", "K"),
        ("M",),
        tensorwise.matrix_inputs,
        tensorwise.matrix_reference,
        tensorwise.run_matrix,
    ),
    _tensorwise(
        "fp8_tensorwise_3d",
        ("E", "K", "N"),
        ("E",),
        tensorwise.weight_inputs,
        tensorwise.weight_reference,
        tensorwise.run_weights,
    ),
    _tensorwise(
        "fp8_tensorwise_group",
        ("M", "K", "G"),
        ("M", "G"),
        tensorwise.group_inputs,
        tensorwise.group_reference,
        tensorwise.run_group,
    ),
    Op(
        name="fp8_transpose_2d",
        axes=("M", "N"),
        dtypes=("uint8",),
        quants=("fp8",),
        options={"fp8_format": reference.OPTIONS["fp8_format"]},
        free_axes=("M",),
        free_options=("fp8_format",),
        inputs=transpose.inputs,
        reference=transpose.reference,
        compare=transpose.compare,
        traffic=transpose.traffic,
        module="kerneltune.ops.fp8.transpose",
        variants=(
            Variant("baseline", transpose.run_copy),
            Variant("optimized", transpose.run, TransposeConfig, transpose.space, transpose.valid, default=transpose.default),
        ),
    ),
)
