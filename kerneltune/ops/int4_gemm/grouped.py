"""Multiply groups of tokens by weights of four bits, a weight for each group, as experts do in a decoding step.

    y[i] = w[e] · x[i] for every token i of group e; axes and formula of a group as in `int4_gemm`, casts as in `int4_fp8_gemm`

N tokens of all groups, M rows of each weight, K summed over, E groups. The weights are packed together as a weight of E M rows.
"""

from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import NormalDist
from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.compat import assert_group_ends
from kerneltune.kernel_lib.arguments import check_like, debugging
from kerneltune.kernel_lib.groups import bounds, group_ends
from kerneltune.kernel_lib.launch import on_its_device, too_much_shared
from kerneltune.kernel_lib.tl_lib import since_sm_90
from kerneltune.ops.int4_gemm import configs, estimate, fastest, fp8_gemm, gemm, packing, peers, reference
from kerneltune.ops.int4_gemm.fp8_gemm import Fp8Tokens, cast_in_order
from kerneltune.ops.int4_gemm.kernels.fp8 import Fp8Work, int4_fp8_groups
from kerneltune.ops.int4_gemm.packing import DEPTH, ROWS, Int4Weight
from kerneltune.rounding import next_power_of_2
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant

_SPREAD = 0.284
"""Variance over squared mean of the experts' probabilities, by which the default expects tokens: as the cases' router has."""
_HELD = 8, 5
"""Programs of 16 tokens with one and two blocks that an SM holds where a step has one group of k: by registers, on sm_90."""
_MAXNREG = {(32, 1): 80, (32, 2): 128, (64, 1): 128}
"""Registers of a thread, by tokens and blocks, with which an SM holds one program more than the compiler would have it hold."""


class _Load(NamedTuple):
    """Hold the work that a router is expected to deal to a GPU.

    Attributes:
        mean: tokens of a group.
        largest: tokens of the largest group.
        programs: programs of one block of groups that have tokens, for an SM.
        launched: programs of one block of all groups that may have tokens, for an SM.
    """

    mean: float
    largest: float
    programs: float
    launched: float


class _Scales(NamedTuple):
    """Hold how many groups of k a step has, and whether they have zero points."""

    groups: int
    zeros: bool


@dataclass(frozen=True, slots=True)
class Int4GroupedConfig:
    """Config of a grouped product.

    Attributes:
        tokens: most rows of x per step of a program, which walks over all tokens of its group; a step has 32 or 16 rows where no
            more are left.
        blocks: blocks of 64 rows of w per program.
        warps: warps of a program; four warps multiply 64 rows of w at once.
        stages: stages of the load pipeline.
        early: whether the kernel begins while the cast of x still runs.
        maxnreg: most registers of a thread, so that an SM holds more programs; 0 leaves the number to the compiler.
        k_blocks, rest: as of `Int4Fp8Config`.
    """

    tokens: int
    blocks: int
    warps: int
    stages: int
    early: bool
    maxnreg: int = 0
    k_blocks: int = 1
    rest: int = 0


@on_its_device
def int4_fp8_grouped_gemm(
    x: torch.Tensor | Fp8Tokens, weight: Int4Weight, offs: torch.Tensor, *, config: Int4GroupedConfig | None = None
) -> torch.Tensor:
    """Return the product of each group of tokens with its weight of four bits, x cast to e4m3, fp32 inside.

    Args:
        x: (N, K) fp16 or bf16, the tokens of group after group, or the result of `cast_tokens`.
        weight: (E M, K), from `pack`: the rows of group e are e M to (e + 1) M. M is a multiple of 64.
        offs: (E,) int32, the row of x at which each group ends, not decreasing, at most N. Rows of no group are not written, so
            they are undefined. Not read by the host: under TRITON_DEBUG=1 the device asserts the order. Without it, ends
            below 0 or beyond N are taken for 0 or N, rows from a smaller end on are undefined, and no byte outside the tensors
            is read or written.
        config: None takes the best known config.

    Returns:
        (N, M) of x's type, contiguous. The same inputs and config give the same bits.
    """
    count = fp8_gemm.check("int4_fp8_grouped_gemm", x, weight, None)
    E = offs.numel() if isinstance(offs, torch.Tensor) else 0
    check_like("offs", offs, (E,), torch.int32, weight.packed.device)
    if not E or weight.rows % (ROWS * E):
        raise ValueError(f"weight must have a multiple of {ROWS} rows for each of {E} groups, got {weight.rows} rows")
    if debugging():
        assert_group_ends(offs, count)
    M = weight.rows // E
    y = torch.empty((count, M), dtype=x.dtype, device=offs.device)
    if not count:
        return y
    c: Int4GroupedConfig = gemm.look_up(_choose, count, weight, x.dtype, experts=E, groups="routed") if config is None else config
    if M % (ROWS * c.blocks):
        raise ValueError(f"config={c}: {c.blocks} blocks of {ROWS} rows, of which {M} rows are no multiple")
    rest, early = fp8_gemm.rest_of(weight, c.rest), c.early and since_sm_90()
    tokens = fp8_gemm.tokens_of(x, rest)
    x_desc, w_desc = fp8_gemm.descriptors(tokens, weight, c)
    fewer = min(c.tokens, 32), 16  # rows of the steps at the end of a group
    int4_fp8_groups[(M // (ROWS * c.blocks), min(count, E))](
        x_desc, *(replace(x_desc, block_shape=[rows, x_desc.block_shape[1]]) for rows in fewer), w_desc,
        tokens.scale, tokens.sums, weight.scales, weight.scales if weight.zeros is None else weight.zeros, offs, y,
        weight.depth, E, count, int(tokens.scale.shape[0] > 1), gemm.constants(weight, False),
        *(
            Fp8Work.of(tokens=rows, blocks=c.blocks, splits=1, stages=c.stages, k_blocks=c.k_blocks, rest=rest)
            for rows in (c.tokens, *fewer)
        ),
        GROUPS=max(32, next_power_of_2(E)), EARLY=early, num_warps=c.warps,
        **({"launch_pdl": True} if early else {}), **({"maxnreg": c.maxnreg} if c.maxnreg else {}),
    )  # fmt: skip
    return y


def space(case: Case) -> Space:
    """Offer tiles of few tokens."""
    return {
        "tokens": (16, 32, 64),
        "blocks": (1, 2),
        "warps": (4, 8),
        "stages": (3, 4, 5),
        "early": (True, False),
        "maxnreg": (0, 80, 128),
        "k_blocks": (1, 2),
        "rest": (16, 32) if case.option("zeros") else (0, 16, 32),
    }


def invalid(case: Case, config: Int4GroupedConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    c = config
    if case["M"] % (ROWS * c.blocks):
        return f"{c.blocks} blocks of {ROWS} rows, of which {case['M']} rows are no multiple"
    if c.warps > 4 * c.blocks:
        return f"{c.warps} warps to {c.blocks} blocks of rows"
    sums = ROWS * c.blocks * c.tokens // (32 * c.warps)
    if sums > 64:
        return f"{sums} sums to a thread, and as many of a group"
    if c.maxnreg and (c.warps > 4 or c.maxnreg != _MAXNREG.get((c.tokens, c.blocks))):
        return f"{c.maxnreg} registers for {c.tokens} tokens, {c.blocks} blocks of rows and {c.warps} warps"
    if c.tokens > 16 and c.tokens >= 2 * case["N"]:
        return f"steps of {c.tokens} tokens where there are {case['N']}"
    depth, groups = fp8_gemm.sizes_of(case)[2:]
    if c.rest and groups > 1 and not case.option("zeros"):
        return f"a rest for each of {groups} groups of {DEPTH} k"
    if c.k_blocks > depth or c.rest > max(16, groups * depth):
        return f"steps of {c.k_blocks} blocks of k and rests of {c.rest} groups where there are {depth} blocks"
    return too_much_shared(c.stages * c.k_blocks * DEPTH * (c.tokens + ROWS // 2 * c.blocks))


def default(case: Case) -> Int4GroupedConfig:
    """Return a config for any shape, by the sizes of groups that a router with unequal experts is expected to deal."""
    N, rows, depth, groups = fp8_gemm.sizes_of(case)
    E, mean = case["E"], N / case["E"]
    largest = mean + sqrt(mean + _SPREAD * mean * mean) * NormalDist().inv_cdf((E - 0.375) / (E + 0.25))  # Blom's formula
    reached = E * (1 - (1 + _SPREAD * mean) ** (-1 / _SPREAD))  # groups that have tokens: a negative binomial distribution
    load = _Load(mean, largest, reached * rows / estimate.sms(), min(N, E) * rows / estimate.sms())
    scales = _Scales(groups, bool(case.option("zeros")))
    tokens, blocks = _shape(load, scales, rows % 2 == 0)
    tokens, blocks = min(tokens, 64 if N > 32 else 32 if N > 16 else 16), blocks if rows % 2 == 0 else 1
    is_held = load.programs <= {(32, 2): 6, (32, 1): 5 if groups == 1 else 4, (64, 1): 2.9}.get((tokens, blocks), 0)
    maxnreg = 0 if is_held else _MAXNREG.get((tokens, blocks), 0)
    has_few = groups < 4 and load.launched <= 2 and depth > 1
    k_blocks = 2 if not maxnreg and (has_few or (groups == 1 and depth > 32)) else 1
    return Int4GroupedConfig(tokens, blocks, 4, 3, _is_early(N, load, blocks), maxnreg, k_blocks, 16 if scales.zeros else 0)


def _is_early(N: int, load: _Load, blocks: int) -> bool:
    """Return whether programs begin while the cast of x runs.

    An SM on which the cast still runs gets fewer programs, so that other SMs get more, and the launch takes up to 1.9 times as
    long. An early begin costs nothing where the cast is short, or where an SM gets many programs.
    """
    if N <= 8 or (N <= 64 and load.launched <= blocks):
        return True
    if N <= 32:
        return load.launched > 4 * blocks
    return load.programs > (10 if blocks == 1 else 16)


def _shape(load: _Load, scales: _Scales, is_even: bool) -> tuple[int, int]:
    """Return the tokens and the blocks of rows of a program; is_even: whether a weight has an even number of blocks.

    Limits with a reason beside them follow from what an SM holds. All other numbers here and in the functions that follow were
    found by trying, on 1301 cases (H200, 2026-11-28, docs/notes/int4.md); `benchmarks/fit_int4_estimate.py --today` judges them.
    """
    groups, programs = scales.groups, load.programs
    few = 22 if groups == 2 and is_even and programs > 8 else 12.7 if programs > 4 else 11.5
    if load.largest <= few:
        return _shape_of_few(load, scales, is_even)
    if load.launched <= 4:
        return 64, 2 if load.launched > 3 else 1  # an SM holds three programs of one block
    is_costly = groups == 4 or scales.zeros
    most = 17 if not is_even else 15 if scales.zeros else 25 if groups == 1 else 22
    if load.mean > most:
        return 64, 2 if is_costly else 1  # a block's codes are converted once for each step, whatever its tokens
    if programs <= (6 if groups == 2 else 5):
        return 32, 1
    return (64, 1) if 6 < programs <= 12 and load.mean > 16 else (32, 2)


def _shape_of_few(load: _Load, scales: _Scales, is_even: bool) -> tuple[int, int]:
    """Return the shape where steps of 16 tokens suffice for nearly all groups."""
    if load.programs < (1 if scales.groups == 4 else 3):
        return 16, 1
    if scales.groups == 4 and not is_even:
        return 32, 1
    if scales.groups > 1 or scales.zeros:
        return 16, 2
    if min(_HELD[1], int(load.launched / 2)) > ceil(load.programs / 2):
        return 32, 2  # the GPU deals programs by their number, those that end at once included: hold as few as an SM needs
    one, two = (1.02 * load.programs / blocks / held for blocks, held in enumerate(_HELD, 1))
    return (16, 2) if one <= 1 or two / ceil(two) > 0.8 * one / ceil(one) else (16, 1)  # where the last wave is fuller


def unsupported(case: Case) -> str | None:
    """Say which sizes are not supported."""
    if case["M"] % ROWS:
        return f"needs M % {ROWS} == 0"
    return configs.unsupported(case)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw the inputs of `int4_gemm` for all weights together, and offs (E,) int32."""
    axes = (("N", case["N"]), ("M", case["E"] * case["M"]), ("K", case["K"]))
    whole = replace(case, axes=axes, options=(*case.options, ("bias", False)))
    ends = group_ends(replace(case, axes=(("M", case["N"]),)), case["E"], device, seed)
    return {**reference.inputs(whole, device=device, seed=seed), "offs": ends}


def expected(inputs: Inputs) -> Outputs:
    """Return y in fp64 for x cast to e4m3, and spread, group by group as `int4_fp8_gemm` has them."""
    weight, offs = inputs["weight"], inputs["offs"]
    parts = [
        fp8_gemm.expected({"x": inputs["x"][start:end], "weight": _weight_of(weight, e, offs.shape[0])})
        for e, (start, end) in enumerate(bounds(offs))
        if end > start
    ]
    if not parts:
        return {name: inputs["x"].new_empty((0, weight.rows // offs.shape[0])) for name in ("y", "spread")}
    return {name: torch.cat([part[name] for part in parts]) for name in ("y", "spread")}


def _weight_of(weight: Int4Weight, e: int, E: int) -> Int4Weight:
    """Return the weight of a group."""
    of_group = slice(e * weight.rows // E // ROWS, (e + 1) * weight.rows // E // ROWS)
    packed, scales = weight.packed[:, of_group].contiguous(), weight.scales[:, of_group].contiguous()
    zeros = None if weight.zeros is None else weight.zeros[:, of_group].contiguous()
    return Int4Weight(packed, scales, zeros, weight.rows // E, weight.depth, weight.group)


def traffic(case: Case) -> Traffic:
    """Return the bytes of x, group ends, and of the weights that can have tokens, read; of y written."""
    N, M, K = case["N"], case["M"], case["K"]
    kb, rb = packing.block_shape(M, K)[:2]
    scales = torch.Size(packing.scale_shape(M, K, reference.group_size(case))).numel() * (2 if case.option("zeros") else 1)
    return Traffic(2 * N * K + 4 * case["E"] + min(N, case["E"]) * (kb * rb * 4096 + 2 * scales), 2 * N * M)


def run(inputs: Inputs, config: Int4GroupedConfig | None) -> Outputs:
    """Run `int4_fp8_grouped_gemm` on a case's inputs, the cast of x included."""
    return {"y": int4_fp8_grouped_gemm(inputs["x"], inputs["weight"], inputs["offs"], config=config)}


def run_bf16(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's grouped product with weights of 16 bits."""
    offs, w = inputs["offs"], inputs["forms"].dequantised
    y = torch.nn.functional.grouped_mm(inputs["x"], w.view(offs.shape[0], -1, w.shape[1]).transpose(1, 2), offs=offs)
    return {"y": y, "rounding": reference.E4M3_ROUNDING}


def run_fp8(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's grouped product with a scale for every token and every row of w, the cast of x included."""
    offs, w = inputs["offs"], inputs["forms"].other("fp8", lambda forms: fastest.to_fp8(forms.dequantised))
    (q, scale), E = cast_in_order(inputs["x"]), offs.shape[0]
    y = peers.scaled_grouped_mm(q, w.q.view(E, -1, q.shape[1]), scale, w.scale.view(E, -1), offs)
    return {"y": y, "rounding": reference.E4M3_ROUNDING}


def not_torch(case: Case) -> str | None:
    """Say why torch's grouped products do not support a case."""
    if case.dtype != "bfloat16" or not torch.cuda.is_available():
        return "needs bfloat16 and a GPU"
    return "needs K % 16 == 0" if case["K"] % 16 else unsupported(case) or reference.not_empty(case)


OP = Op(
    name="int4_fp8_grouped_gemm",
    axes=("N", "M", "K", "E"),
    dtypes=("bfloat16", "float16"),
    quants=("int4",),
    options={"group": (128, 64, 32, 0), "zeros": (False, True), "groups": ("routed", "balanced", "zipf", "ragged")},
    free_axes=("N",),
    free_options=("group", "zeros", "groups"),
    unseen_options=("groups",),
    max_distance=0.5,  # shapes follow the tokens of a group; H200, 2026-11-28, tuned sizes left out: worst 0.76 with 4
    flops=reference.flops,
    inputs=inputs,
    reference=expected,
    compare=fp8_gemm.compare,
    traffic=traffic,
    variants=(
        Variant("baseline", run_bf16, unsupported=not_torch, requires=("torch",)),
        Variant("optimized", run, Int4GroupedConfig, space, invalid, default, unsupported),
        Variant("scaled_grouped_mm", run_fp8, unsupported=not_torch, requires=("torch",)),
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
