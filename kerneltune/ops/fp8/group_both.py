"""Cast token groups into both layouts in one launch: rows for Y or dX, the columns of every group for dW.

Shares config and kernel with `fp8_rowwise_3d_both`. Source: torchao's triton_fp8_rowwise_2d_scale_and_cast and
triton_fp8_per_group_colwise_scales, which read the tokens each.
"""

from dataclasses import replace
from typing import Any

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_matrix, check_transposable
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import contract, group_colwise, peers, rowwise_2d
from kerneltune.ops.fp8.contract import GROUP_CALL_OPTIONS, GROUP_CAST, Cast, check_offs, fp8_dtype
from kerneltune.ops.fp8.kernels.both import TILE_ROWS, cast_into_both
from kerneltune.ops.fp8.rowwise_3d_both import MANY_ROWS, BothConfig, BothLayouts, config_for_rows, invalid, space
from kerneltune.rounding import next_power_of_2
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant


def default(case: Case) -> BothConfig:
    """Return a config for any shape: the config of weights of as many rows.

    Few groups of short rows have a lag of 4 and, where rows are many, 32 rows per program. Long rows or many groups have 16
    rows per program and the weights' lag of 2: H200, 2026-11-26, 20 cases: 0.96 of the tuned speed -> 0.99.
    """
    weights = config_for_rows(Case(case.name, (("E", 1), ("K", case["K"]), ("N", case["M"])), case.dtype, case.quant), 32)
    if case["G"] == 1 and case["M"] >= 32768:
        # a single group, as of a dense layer: H200, 2026-11-26, 7 cases of 32768 rows had 0.95 of the tuned speed with fewer
        # rows
        step = max(1, 8192 // next_power_of_2(case["K"])) if case["K"] > 2500 else weights.step
        return replace(weights, rows=64, step=step, lag=1)
    if case["K"] > 2500 or case["G"] >= 32:
        return replace(weights, rows=16)
    return replace(weights, rows=16 if case["M"] < MANY_ROWS else 32, lag=4)


def reference(inputs: Inputs) -> Outputs:
    """Cast over the rows, and over the columns group by group."""
    along, down = rowwise_2d.reference(inputs), group_colwise.reference(inputs)
    return {**along, "q_t": down["q"], "scale_t": down["scale"]}


def run_separately(inputs: Inputs, _config: None) -> Outputs:
    """Run the row-wise and the column-wise operator, each in its best config."""
    q, scale = rowwise_2d.fp8_rowwise_2d(**{name: value for name, value in inputs.items() if name != "offs"})
    q_t, scale_t = group_colwise.fp8_group_colwise(**inputs)
    return {"q": q, "scale": scale, "q_t": q_t, "scale_t": scale_t}


def _results(x: torch.Tensor, offs: torch.Tensor, fp8_format: str, aligned: bool) -> BothLayouts:
    (M, K), dtype, device = x.shape, fp8_dtype(fp8_format, x.device), x.device
    q = torch.empty((M, K), dtype=dtype, device=device)
    q_t = torch.empty((K, aligned_size(M, offs.shape[0]) if aligned else M), dtype=dtype, device=device).t()
    scale = torch.empty((M, 1), dtype=torch.float32, device=device)
    return BothLayouts(q, scale, q_t, torch.empty(offs.shape[0] * K, dtype=torch.float32, device=device))


@torch_operator(_results)
@on_its_device
def fp8_group_both(
    x: torch.Tensor,
    offs: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    aligned: bool = False,
    config: BothConfig | None = None,
) -> BothLayouts:
    """Cast as `fp8_rowwise_2d` and `fp8_group_colwise` do the same tokens, in one launch, bit for bit.

    Args:
        x: (M, K) bf16, fp16 or fp32; rows may be less than 2^24 elements apart, elements of a row must be adjacent.
        offs: (G,) int32, where each group's rows end, as in `fp8_group_colwise`.
        aligned: write q_t (aligned_size, K), column-major, as aligned groups for `fp8_grouped_gemm(aligned=True)`.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.

    Returns:
        q (M, K), contiguous, and scale (M, 1) of every row; q_t (M, K), column-major (the bytes of the transpose), and
        scale_t (G K,) of the columns of every group, group by group.
    """
    check_matrix("x", x)
    check_transposable("x", x.shape[0])
    cast, (M, K) = Cast(fp8_format, pow2, inverse), x.shape
    check_offs(offs, M, x.device)
    found, G = _results(x, offs, fp8_format, aligned), offs.shape[0]
    if not x.numel():
        for scales in (found.scale, found.scale_t):
            scales.fill_(cast.scale_of_nothing)
        return found
    if config is None:
        config = _choose((("M", M), ("K", K), ("G", G)), DTYPE_NAMES[x.dtype], "fp8", GROUP_CALL_OPTIONS)
    # A group has a slot more than it has multiples of a block's rows (`_slots_before`).
    blocks, tile_blocks = M // config.rows + G, M // TILE_ROWS + G
    outputs = (found.q, found.q_t, found.scale, found.scale_t)
    of_groups: dict[str, Any] = {"offs_ptr": offs, "M": M, "stride": x.stride(0), "GROUPS": next_power_of_2(G)}
    of_groups |= {"ld": found.q_t.stride(1), "ALIGNED": aligned}
    cast_into_both(x, outputs, G, blocks, tile_blocks, cast, config, **of_groups)
    return found


OP = Op(
    name="fp8_group_both",
    axes=("M", "K", "G"),
    free_axes=("M", "G"),
    reference=reference,
    traffic=lambda case: contract.cast_traffic(case, scales=case["M"] + case["G"] * case["K"], copies=2),
    variants=(
        Variant("baseline", run_separately),
        Variant("optimized", run_of(fp8_group_both), BothConfig, space, invalid, default),
        *peers.BOTH_OF_GROUPS,
    ),
    module=__name__,
    **GROUP_CAST,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
