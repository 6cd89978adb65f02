"""Cast token groups to column-major fp8 for the product that gives dW, with a scale per group and column.

Source: torchao's triton_fp8_per_group_colwise_scales.
"""

from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_matrix, check_transposable
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.kernel_lib.launch import on_its_device, too_much_shared
from kerneltune.ops.fp8 import contract, peers
from kerneltune.ops.fp8.baselines import torchao
from kerneltune.ops.fp8.contract import GROUP_CALL_OPTIONS, GROUP_CAST, Cast, Pair, check_offs, fp8_dtype
from kerneltune.ops.fp8.kernels.columns import cast_columns
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Variant


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """Hold the config of a cast of the columns of groups of rows.

    Attributes:
        rows: rows of a tile.
        cols: columns of a tile.
        warps: warps of a program.
        ctas: programs per SM, each looping over tiles.
        stages: depth of that loop's load pipeline.
        ahead: tiles by which a program publishes largest magnitudes ahead of its cast.
        reload: whether the tile is read a second time, from L2, instead of held in registers, which needs ahead = 1.
    """

    rows: int
    cols: int
    warps: int
    ctas: int
    stages: int
    ahead: int
    reload: bool


def space(case: Case) -> Space:
    """Offer tiles from 64 x 32 to 512 x 128; 64 rows where experts have no more."""
    rows = (64, 128, 256, 512) if "M" in dict(case.axes) else (64, 128, 256) if case["N"] > 64 else (64,)
    return {
        "rows": rows,
        "cols": (32, 64, 128),
        "warps": (2, 4, 8),
        "ctas": (1, 2, 3, 4, 5, 6, 8),
        "stages": (1, 2, 3),
        "ahead": (1, 2, 3),
        "reload": (False, True),
    }


def invalid(case: Case, config: GroupConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    per_thread = config.rows * config.cols / (32 * config.warps)
    if not 16 <= per_thread <= 128:
        return f"{per_thread:g} elements per thread"
    if config.ahead > 1 and not config.reload:
        return "one tile ahead is held in registers, not more"
    words = per_thread * ITEMSIZE[case.dtype] / 4
    held = (1 if config.reload else 2) * words
    if 32 * config.warps * config.ctas * (held + 32) > 65536:
        return "more registers than an SM has"
    shared = config.ctas * ((config.stages - 1) * ITEMSIZE[case.dtype] + 1) * config.rows * config.cols
    return too_much_shared(shared)


def default(case: Case) -> GroupConfig:
    """Return a config for any shape, by rule: on an H200 within 6 % of the best found, on the five expert shapes tried."""
    if case.dtype == "float32":
        return GroupConfig(rows=64, cols=64, warps=8, ctas=3, stages=2, ahead=1, reload=False)
    return GroupConfig(rows=128, cols=128, warps=4, ctas=3, stages=1, ahead=1, reload=True)


def reference(inputs: Inputs) -> Outputs:
    """Cast over the rows, group by group."""
    q, scale = contract.quantized_groups(inputs["x"], inputs)
    return {"q": q, "scale": scale}


def empty_results(x: torch.Tensor, offs: torch.Tensor, fp8_format: str, aligned: bool) -> Pair:
    """Allocate the results of a matrix."""
    rows = aligned_size(x.shape[0], offs.shape[0]) if aligned else x.shape[0]
    q = torch.empty((x.shape[1], rows), dtype=fp8_dtype(fp8_format, x.device), device=x.device)
    return q.t(), torch.empty(offs.shape[0] * x.shape[1], dtype=torch.float32, device=x.device)


@torch_operator(empty_results)
@on_its_device
def fp8_group_colwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    aligned: bool = False,
    config: GroupConfig | None = None,
) -> Pair:
    """Cast token groups to column-major fp8 with one scale per group and column.

    Args:
        x: (M, N) bf16, fp16 or fp32; rows may be less than 2^22 elements apart, elements of a row must be adjacent.
        offs: (G,) int32, where each group's rows end, not decreasing, at most M. Groups may be empty and of any size. Rows
            behind the last are not written. The host does not wait for the GPU to check it; under TRITON_DEBUG=1 the device
            asserts it. Where ends decrease or exceed M, results are undefined, and nothing outside the tensors is read or
            written.
        aligned: write q as aligned groups, (aligned_size, N), strides (1, aligned_size), for
            `fp8_grouped_gemm(aligned=True)`.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.

    Returns:
        q (M, N) fp8, strides (1, M); scales (G N,) fp32, group by group. NaN makes its scale and all values under this
        scale NaN; infinity makes its scale 0.
    """
    check_matrix("x", x)
    check_transposable("x", x.shape[0])
    cast, (M, N) = Cast(fp8_format, pow2, inverse), x.shape
    check_offs(offs, M, x.device)
    q, scale = empty_results(x, offs, fp8_format, aligned)
    if M == 0:
        scale.fill_(cast.scale_of_nothing)
    elif N:
        if config is None:
            config = _choose((("M", M), ("N", N), ("G", offs.shape[0])), DTYPE_NAMES[x.dtype], "fp8", GROUP_CALL_OPTIONS)
        cast_columns(((x, q, scale),), offs, offs.shape[0], M, cast, config, aligned)
    return q, scale


OP = Op(
    name="fp8_group_colwise",
    axes=("M", "N", "G"),
    free_axes=("M", "G"),
    reference=reference,
    traffic=lambda case: contract.cast_traffic(case, scales=case["G"] * case["N"]),
    variants=(
        torchao.GROUPS,
        Variant("optimized", run_of(fp8_group_colwise, "q", "scale"), GroupConfig, space, invalid, default),
        *peers.GROUPS,
    ),
    module=__name__,
    **GROUP_CAST,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
