"""Token groups in both layouts, row by row for the product and column by column of every group for wgrad, in one launch.

Kernel in both_kernels.py. May import its neighbours, cache, spec, launch.
"""

from dataclasses import replace

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_matrix, check_turned
from kerneltune.kernel_lib.groups import group_ends
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import both, groups, reference, rows
from kerneltune.ops.fp8.both import BothConfig, BothLayouts
from kerneltune.ops.fp8.both_kernels import cast_both_groups
from kerneltune.ops.fp8.common import FREE_GROUP_OPTIONS, GROUP_OPTIONS, Cast, check_offs
from kerneltune.rounding import next_power_of_2
from kerneltune.spec import Case, Inputs, Outputs, Traffic


@on_its_device
def fp8_group_both(
    x: torch.Tensor,
    offs: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    config: BothConfig | None = None,
) -> BothLayouts:
    """`fp8_rowwise_2d` and `fp8_group_colwise` of the same tokens in one launch, bit for bit.

    Args:
        x: (M, K) bf16, fp16 or fp32; rows may be less than 2^24 numbers apart, elements of a row must be adjacent.
        offs: (G,) int32, where each group's rows end, not decreasing; the last is M, or rows behind it are not written. Groups
            may be empty and of any size. Nobody waits for the GPU to check it (under TRITON_DEBUG=1 the device asserts it): where
            they decrease or exceed M, bytes elsewhere are written, and this launch or a later one may wait for ever.
        fp8_format: `e4m3`, `e5m2`, `e4m3fnuz` or `e5m2fnuz`.
        pow2: round scales down to powers of two.
        inverse: return 1 / scale instead of the multiplier.
        config: None takes the best known config.

    Returns:
        q (M, K), contiguous, and scale (M, 1) of every row; q_t (M, K), strides (1, M), and scale_t (G K,) of the columns of
        every group, group by group.

    Raises:
        ValueError: a wrong shape, stride, dtype, device or value, which it names.

    Source: torchao's triton_fp8_rowwise_2d_scale_and_cast and triton_fp8_per_group_colwise_scales, which read the tokens each.
    """
    check_matrix("x", x)
    check_turned("x", x.shape[0])
    cast = Cast(fp8_format, pow2, inverse, x.device)
    (M, K), G = x.shape, offs.numel()
    check_offs(offs, M, x.device, whole=False)
    q = torch.empty((M, K), dtype=cast.dtype, device=x.device)
    q_t = torch.empty((K, M), dtype=cast.dtype, device=x.device)
    scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    scale_t = torch.empty(G * K, dtype=torch.float32, device=x.device)
    if not x.numel():
        for scales in (scale, scale_t):
            scales.fill_(cast.scale_of_nothing)
    else:
        if config is None:
            config = _choose((("M", M), ("K", K), ("G", G)), DTYPE_NAMES[x.dtype], "fp8", GROUP_OPTIONS)
        # a group has one slot more than there are multiples of a block's rows in it
        blocks, tile_blocks = M // config.rows + G, M // both.TILE_ROWS + G
        both.launch(
            cast_both_groups, x, (q, q_t, scale, scale_t), G, blocks, tile_blocks, cast, config,
            offs_ptr=offs, M=M, stride=x.stride(0), GROUPS=next_power_of_2(G),
        )  # fmt: skip
    return BothLayouts(q, scale, q_t.t(), scale_t)


def default(case: Case) -> BothConfig:
    """A config for any shape: that of weights with so many rows, but 32 of a program unless there are few, and a lag of 4."""
    weights = both.by_rule(Case(case.name, (("E", 1), ("K", case["K"]), ("N", case["M"])), case.dtype, case.quant), 32)
    return replace(weights, rows=16 if case["M"] < both.MANY_ROWS else 32, lag=4)


_choose = cache.Chooser(
    "fp8_group_both", BothConfig, both.valid, default, ("M", "G"), free_options=FREE_GROUP_OPTIONS, space=both.space
)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x (M, K) and offs (G,)."""
    return {**rows.rows_inputs(case, device=device, seed=seed), "offs": group_ends(case, case["G"], device, seed)}


def both_reference(inputs: Inputs) -> Outputs:
    """Over the rows, and over the columns group by group."""
    along, down = rows.rows_reference(inputs), groups.group_reference(inputs)
    return {"q": along["q"], "scale": along["scale"], "q_t": down["q"], "scale_t": down["scale"]}


def traffic(case: Case) -> Traffic:
    """x and offs read; both layouts and both sets of scales written."""
    elements = case["M"] * case["K"]
    return Traffic(ITEMSIZE[case.dtype] * elements + 4 * case["G"], 2 * elements + 4 * (case["M"] + case["G"] * case["K"]))


def run(inputs: Inputs, config: BothConfig | None) -> Outputs:
    """`fp8_group_both` on a case's inputs."""
    return fp8_group_both(inputs["x"], inputs["offs"], config=config, **reference.chosen(inputs))._asdict()


def run_separately(inputs: Inputs, _config: None) -> Outputs:
    """The two operators that it replaces, each in its best config, one after the other."""
    q, scale = rows.fp8_rowwise_2d(inputs["x"], **reference.chosen(inputs))
    q_t, scale_t = groups.fp8_group_colwise(inputs["x"], inputs["offs"], **reference.chosen(inputs))
    return {"q": q, "scale": scale, "q_t": q_t, "scale_t": scale_t}
