"""Column-wise quantisation of groups of rows into column-major fp8: expert weights for dgrad, token groups for wgrad.

Kernel in kernels.py. May import cache, spec, tl_lib, launch, workspace.
"""

from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_apart, check_matrix, check_turned, in_pairs
from kerneltune.kernel_lib.groups import bounds, group_ends
from kerneltune.kernel_lib.launch import on_its_device, phases, resident, too_much_shared
from kerneltune.kernel_lib.tl_lib import TL_DTYPES
from kerneltune.kernel_lib.workspace import workspace
from kerneltune.ops.fp8 import kernels, reference
from kerneltune.ops.fp8.common import (
    FREE_GROUP_OPTIONS,
    FREE_OPTIONS,
    GROUP_OPTIONS,
    QUANT_OPTIONS,
    Cast,
    check_offs,
    check_weights,
    target,
)
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Space, Traffic

_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """rows, cols: of a tile; warps: of a program; ctas: programs per multiprocessor, each looping over tiles; stages: depth of
    that loop's load pipeline; ahead: by how many tiles the amax runs ahead of the cast; reload: read the tile once more, from
    L2, instead of holding it, which takes ahead = 1."""

    rows: int
    cols: int
    warps: int
    ctas: int
    stages: int
    ahead: int
    reload: bool


@on_its_device
def fp8_rowwise_3d_transpose(
    w: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    out: _Pair | None = None,
    config: GroupConfig | None = None,
) -> _Pair:
    """Expert weights transposed for dgrad, one scale per expert and row of `w`, over its last axis.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        fp8_format: `e4m3`, `e5m2`, `e4m3fnuz` or `e5m2fnuz`.
        pow2: round scales down to powers of two.
        inverse: return 1 / scale, which scaled matrix products want, instead of the multiplier.
        out: tensors like those returned, to be written in their place.
        config: None takes the best known config.

    Returns:
        q (E, N, K) fp8, column-major: strides (N K, 1, N); scales (E, K) fp32. NaN makes its scale and all under it NaN;
        infinity makes its scale 0.

    Raises:
        ValueError: a wrong shape, stride, dtype or value, which it names.

    Source: torchao's triton_fp8_rowwise_3d_transpose_rhs.
    """
    check_weights("w", w)
    cast = Cast(fp8_format, pow2, inverse, w.device)
    E, K, N = w.shape
    given_q, given_scale = out or (None, None)
    q = target("out[0]", given_q, (E, K, N), cast.dtype, w.device, turned=True)
    scale = target("out[1]", given_scale, (E, K), torch.float32, w.device)
    if not w.numel():
        return q.transpose(1, 2), scale.fill_(cast.scale_of_nothing)
    if config is None:
        config = _choose_weights((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", QUANT_OPTIONS)
    rows = w.transpose(1, 2).view(E * N, K)
    _launch(((rows, q, scale),), None, E, N, cast, config)
    return q.transpose(1, 2), scale


@on_its_device
def fp8_group_colwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    config: GroupConfig | None = None,
) -> _Pair:
    """Token groups for wgrad: fp8 column-major, one scale per group and column.

    Args:
        x: (M, N) bf16, fp16 or fp32; rows may be less than 2^22 numbers apart, elements of a row must be adjacent.
        offs: (G,) int32, where each group's rows end, not decreasing; the last is M. Groups may be empty and of any size.
            Nobody waits for the GPU to check it (under TRITON_DEBUG=1 the device asserts it): where they decrease or exceed M,
            bytes elsewhere are written, and this launch or a later one may wait for ever.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_3d_transpose`.

    Returns:
        q (M, N) fp8, strides (1, M); scales (G N,) fp32, group by group.

    Raises:
        ValueError: a wrong shape, stride, dtype, device or value, which it names.

    Source: torchao's triton_fp8_per_group_colwise_scales.
    """
    return _colwise((x,), offs, (fp8_format, pow2, inverse), config)[0]


@on_its_device
def fp8_group_colwise_dual(
    x1: torch.Tensor,
    x2: torch.Tensor,
    offs: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    config: GroupConfig | None = None,
) -> tuple[_Pair, _Pair]:
    """`fp8_group_colwise` of two matrices with the same groups, in one launch.

    Args:
        x1, x2: (M, N1) and (M, N2) of one dtype, as there.
        offs: (G,) int32, where each group's rows end, not decreasing; the last is M. Groups may be empty and of any size.
            Nobody waits for the GPU to check it (under TRITON_DEBUG=1 the device asserts it): where they decrease or exceed M,
            bytes elsewhere are written, and this launch or a later one may wait for ever.
        fp8_format, pow2, inverse, config: as there.

    Returns:
        What `fp8_group_colwise` returns, of each.

    Raises:
        ValueError: a wrong shape, stride, dtype, device or value, which it names.
    """
    first, second = _colwise((x1, x2), offs, (fp8_format, pow2, inverse), config)
    return first, second


def _colwise(
    xs: tuple[torch.Tensor, ...], offs: torch.Tensor, how: tuple[str, bool, bool], config: GroupConfig | None
) -> list[_Pair]:
    names = ("x",) if len(xs) == 1 else ("x1", "x2")
    for name, x in zip(names, xs, strict=True):
        check_matrix(name, x)
        check_turned(name, x.shape[0])
        if x.shape[0] != xs[0].shape[0] or x.dtype != xs[0].dtype or x.device != xs[0].device:
            wanted = f"({xs[0].shape[0]}, N) {xs[0].dtype} on {xs[0].device}"
            raise ValueError(f"{name} must be {wanted} as x1 is, got {tuple(x.shape)} {x.dtype} on {x.device}")
    M, cast = xs[0].shape[0], Cast(*how, xs[0].device)
    check_offs(offs, M, xs[0].device)
    G, parts = offs.shape[0], []
    for x in xs:
        q = torch.empty((x.shape[1], M), dtype=cast.dtype, device=x.device)
        parts.append((x, q, torch.empty(G * x.shape[1], dtype=torch.float32, device=x.device)))
    if M == 0:
        for _, _, scale in parts:
            scale.fill_(cast.scale_of_nothing)
    elif any(x.shape[1] for x in xs):
        if config is None:
            choose, widths = (_choose_group, ("N",)) if len(xs) == 1 else (_choose_dual, ("N1", "N2"))
            axes = (("M", M), *((name, x.shape[1]) for name, x in zip(widths, xs, strict=True)), ("G", G))
            config = choose(axes, DTYPE_NAMES[xs[0].dtype], "fp8", GROUP_OPTIONS)
        _launch(tuple(parts), offs, G, M, cast, config)
    return [(q.t(), scale) for _, q, scale in parts]


def _launch(parts, offs, groups: int, rows: int, cast: Cast, c: GroupConfig) -> None:
    """One launch over one or two (input rows, output, scales); offs None: groups of `rows` rows each, else of `rows` in all."""
    (x, q, scale), (x2, q2, scale2) = parts[0], parts[-1]
    stripes = sum(cdiv(part[0].shape[1], c.cols) for part in parts)
    # a token group begins up to three rows before its first and may end anywhere in a tile
    blocks = groups * cdiv(rows, c.rows) if offs is None else (rows + groups * (c.rows + 2)) // c.rows
    longest = cdiv(rows + 3, c.rows)
    total = blocks * stripes
    programs = max(1, min(total, resident(x.device, c.ctas)))
    table = None if offs is None else torch.empty(groups + 1, dtype=torch.int32, device=x.device)
    # 16-bit numbers in pairs, where widths and addresses allow
    pairs = 2 if all(in_pairs(part[0]) for part in parts) else 1
    dtype = TL_DTYPES[x.dtype]
    for part in parts:
        check_apart("x", part[0], c.rows, pairs)
    if pairs == 2:
        x, x2 = x.view(torch.int32), x2.view(torch.int32)
    with workspace(groups * stripes * (c.cols + 1), x.device) as ws:
        for phase, options in phases(c.warps, c.ctas, together=longest <= (c.ahead + 1) * programs):
            kernels._cast_transpose_groups[(programs,)](
                x, x2, q, q2, scale, scale2, offs, table, ws, rows, groups, total,
                WEIGHT_ROWS=rows if offs is None else 0, C=x.shape[1], C2=x2.shape[1], stride=x.stride(0), stride2=x2.stride(0),
                DUAL=len(parts) > 1, GROUPS_LOG2=max(0, (groups - 1).bit_length()), ROWS=c.rows, COLS=c.cols // pairs,
                PAIRS=pairs, dtype=dtype, PHASE=phase, PACKED=rows % 4 == 0, STAGES=c.stages, AHEAD=c.ahead, RELOAD=c.reload,
                num_warps=c.warps, **cast.constants, **options,
            )  # fmt: skip


def space(case: Case) -> Space:
    """Tiles from 64 x 32 to 512 x 128; 64 rows where experts have no more."""
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


def valid(case: Case, config: GroupConfig) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    per_thread = config.rows * config.cols / (32 * config.warps)
    if not 16 <= per_thread <= 128:
        return f"{per_thread:g} elements per thread"
    if config.ahead > 1 and not config.reload:
        return "one tile ahead is held in registers, not more"
    words = per_thread * ITEMSIZE[case.dtype] / 4
    held = (1 if config.reload else 2) * words
    if 32 * config.warps * config.ctas * (held + 32) > 65536:
        return "more registers than a multiprocessor has"
    shared = config.ctas * ((config.stages - 1) * ITEMSIZE[case.dtype] + 1) * config.rows * config.cols
    return too_much_shared(shared)


def default(case: Case) -> GroupConfig:
    """A config for any shape, by rule: on an H200 within 6 % of the best found, on the five expert shapes where it was tried."""
    if case.dtype == "float32":
        return GroupConfig(rows=64, cols=64, warps=8, ctas=3, stages=2, ahead=1, reload=False)
    return GroupConfig(rows=128, cols=128, warps=4, ctas=3, stages=1, ahead=1, reload=True)


_choose_weights = cache.Chooser(
    "fp8_rowwise_3d_transpose", GroupConfig, valid, default, ("E",), free_options=FREE_OPTIONS, space=space
)
_choose_group = cache.Chooser(
    "fp8_group_colwise", GroupConfig, valid, default, ("M", "G"), free_options=FREE_GROUP_OPTIONS, space=space
)
_choose_dual = cache.Chooser(
    "fp8_group_colwise_dual", GroupConfig, valid, default, ("M", "G"), free_options=FREE_GROUP_OPTIONS, space=space
)


def weight_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """w (E, K, N), column-major."""
    E, K, N, dtype = case["E"], case["K"], case["N"], getattr(torch, case.dtype)
    w = reference.values((E, N, K), dtype, device, seed, bool(case.option("special")))
    return {"w": w.transpose(1, 2)} | reference.options(case)


def group_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x (M, N) and offs (G,)."""
    x = reference.values((case["M"], case["N"]), getattr(torch, case.dtype), device, seed, bool(case.option("special")))
    return {"x": x, "offs": group_ends(case, case["G"], device, seed)} | reference.options(case)


def dual_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x1 (M, N1), x2 (M, N2) and offs (G,)."""
    dtype, special = getattr(torch, case.dtype), bool(case.option("special"))
    xs = {f"x{i}": reference.values((case["M"], case[f"N{i}"]), dtype, device, seed + i, special) for i in (1, 2)}
    return xs | {"offs": group_ends(case, case["G"], device, seed)} | reference.options(case)


def weight_reference(inputs: Inputs) -> Outputs:
    """Over the last axis, expert by expert."""
    parts = [reference.quantised(w, 1, inputs) for w in inputs["w"]]
    if not parts:
        E, K, N = inputs["w"].shape
        empty = inputs["w"].new_empty((E, N, K), dtype=reference.FP8[inputs["fp8_format"]])
        return {"q": empty, "scale": inputs["w"].new_empty((E, K), dtype=torch.float32)}
    return {"q": torch.stack([q for q, _ in parts]).transpose(1, 2), "scale": torch.stack([s[:, 0] for _, s in parts])}


def group_reference(inputs: Inputs) -> Outputs:
    """Over the rows, group by group."""
    q, scale = _grouped(inputs["x"], inputs)
    return {"q": q, "scale": scale}


def dual_reference(inputs: Inputs) -> Outputs:
    """`group_reference` of both."""
    (q1, scale1), (q2, scale2) = _grouped(inputs["x1"], inputs), _grouped(inputs["x2"], inputs)
    return {"q1": q1, "scale1": scale1, "q2": q2, "scale2": scale2}


def _grouped(x: torch.Tensor, inputs: Inputs) -> _Pair:
    parts = [reference.quantised(x[start:end], 0, inputs) for start, end in bounds(inputs["offs"])]
    return torch.cat([q.view(torch.uint8) for q, _ in parts]).view(parts[0][0].dtype), torch.cat(
        [s.reshape(-1) for _, s in parts]
    )


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Every byte and every scale."""
    return list(reference.compare(outputs, expected))


def weight_traffic(case: Case) -> Traffic:
    """w read; q and the scales written."""
    elements = case["E"] * case["K"] * case["N"]
    return Traffic(ITEMSIZE[case.dtype] * elements, elements + 4 * case["E"] * case["K"])


def group_traffic(case: Case) -> Traffic:
    """x and offs read; q and the scales written."""
    widths = [size for axis, size in case.axes if axis.startswith("N")]
    elements = case["M"] * sum(widths)
    return Traffic(ITEMSIZE[case.dtype] * elements + 4 * case["G"], elements + 4 * case["G"] * sum(widths))


def run_weights(inputs: Inputs, config: GroupConfig | None) -> Outputs:
    """`fp8_rowwise_3d_transpose` on a case's inputs."""
    q, scale = fp8_rowwise_3d_transpose(inputs["w"], config=config, **reference.chosen(inputs))
    return {"q": q, "scale": scale}


def run_group(inputs: Inputs, config: GroupConfig | None) -> Outputs:
    """`fp8_group_colwise` on a case's inputs."""
    q, scale = fp8_group_colwise(inputs["x"], inputs["offs"], config=config, **reference.chosen(inputs))
    return {"q": q, "scale": scale}


def run_dual(inputs: Inputs, config: GroupConfig | None) -> Outputs:
    """`fp8_group_colwise_dual` on a case's inputs."""
    (q1, scale1), (q2, scale2) = fp8_group_colwise_dual(
        inputs["x1"], inputs["x2"], inputs["offs"], config=config, **reference.chosen(inputs)
    )
    return {"q1": q1, "scale1": scale1, "q2": q2, "scale2": scale2}
