"""Expert weights in both layouts, for the forward product and for dgrad, each with its own scales, in one launch.

Kernel in both_kernels.py. May import cache, common, groups, reference, rows, spec, tl_lib, launch, workspace.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_apart, in_pairs
from kerneltune.kernel_lib.launch import on_its_device, resident
from kerneltune.kernel_lib.tl_lib import INTERPRETED, is_cuda
from kerneltune.kernel_lib.workspace import counters, workspace
from kerneltune.ops.fp8 import groups, reference, rows
from kerneltune.ops.fp8.both_kernels import cast_both
from kerneltune.ops.fp8.common import FREE_OPTIONS, QUANT_OPTIONS, Cast, check_weights, target
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Outputs, Space, Traffic

TILE_ROWS, TILE_COLS_OF_WARP = 128, 16
"""Of a tile that a program turns: 64 elements of a thread, and 128 bytes of a row of the transpose."""

_MOST_STEP = 16
"""Rows at a time, where rows are so short that the registers would take more."""

MANY_ROWS = 4 * 132 * 32
"""In all: 32 for each of four programs of every multiprocessor of an H200."""


@dataclass(frozen=True, slots=True)
class BothConfig:
    """rows: of a program that casts rows, step: at a time, cols: of a load, of which a row takes several; warps: of it and of one
    that turns a tile; lag: how many programs that cast rows, per multiprocessor, go ahead of those that turn, with weights beside
    all of an expert."""

    rows: int
    step: int
    cols: int
    warps: int
    lag: int


class BothLayouts(NamedTuple):
    """q (E, K, N) and scale (E, 1, N) of `fp8_colwise_3d`; q_t (E, N, K) and scale_t (E, K) of `fp8_rowwise_3d_transpose`."""

    q: torch.Tensor
    scale: torch.Tensor
    q_t: torch.Tensor
    scale_t: torch.Tensor


@on_its_device
def fp8_rowwise_3d_both(
    w: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    out: BothLayouts | None = None,
    config: BothConfig | None = None,
) -> BothLayouts:
    """`fp8_colwise_3d` and `fp8_rowwise_3d_transpose` of the same weights in one launch, bit for bit.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        fp8_format: `e4m3`, `e5m2`, `e4m3fnuz` or `e5m2fnuz`.
        pow2: round scales down to powers of two.
        inverse: return 1 / scale instead of the multiplier.
        out: tensors like those returned, to be written in their place.
        config: None takes the best known config.

    Raises:
        ValueError: a wrong shape, stride, dtype or value, which it names.

    Source: torchao's pull request 4389 for the idea, with a scale per row and column instead of one in all.
    """
    check_weights("w", w)
    cast = Cast(fp8_format, pow2, inverse, w.device)
    E, K, N = w.shape
    given = out or (None, None, None, None)
    q = target("out.q", given[0], (E, N, K), cast.dtype, w.device, turned=True)
    scale = target("out.scale", given[1], (E, 1, N), torch.float32, w.device)
    q_t = target("out.q_t", given[2], (E, K, N), cast.dtype, w.device, turned=True)
    scale_t = target("out.scale_t", given[3], (E, K), torch.float32, w.device)
    found = BothLayouts(q.transpose(1, 2), scale, q_t.transpose(1, 2), scale_t)
    if not w.numel():
        for scales in (scale, scale_t):
            scales.fill_(cast.scale_of_nothing)
        return found
    if config is None:
        config = _choose((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", QUANT_OPTIONS)
    x = w.transpose(1, 2).view(E * N, K)
    blocks, tile_blocks = cdiv(N, config.rows), E * cdiv(N, TILE_ROWS)
    launch(cast_both, x, (q, q_t, scale, scale_t), E, E * blocks, tile_blocks, cast, config, ahead=blocks, N=N)
    return found


def launch(
    kernel: Any,
    x: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    groups: int,
    blocks: int,
    tile_blocks: int,
    cast: Cast,
    c: BothConfig,
    ahead: int = 0,
    **arguments: Any,
) -> None:
    """Both passes of `cast_both` or `cast_both_groups` in one launch, or in two where programs may not wait for each other.

    Args:
        outputs: q, q_t, scale, scale_t as the kernel has them.
        blocks: row programs. tile_blocks: turn programs of every stripe. ahead: row programs that go first, beside the lag's.
        arguments: those of this kernel alone.
    """
    check_apart("x", x, max(TILE_ROWS, c.rows))
    K, tile_cols = x.shape[1], TILE_COLS_OF_WARP * c.warps
    pairs = 2 if in_pairs(x) else 1
    tiles = tile_blocks * cdiv(K, tile_cols)
    lag = min(blocks, ahead + resident(x.device, c.lag))
    together = is_cuda() or INTERPRETED
    with workspace(groups * K, x.device) as ws, counters(cdiv(groups, 2), x.device) as done:
        for phase, programs in ((0, lag + blocks + tiles),) if together else ((1, blocks), (2, tiles)):
            kernel[(programs,)](
                x, *outputs, ws_ptr=ws, done_ptr=done.view(torch.int32), G=groups, lag=lag, **arguments,
                K=K, ROWS=c.rows, STEP=c.step, ABREAST=min(c.step, _abreast(c)), LANES=c.cols // pairs, PAIRS=pairs,
                TILE_ROWS=TILE_ROWS, TILE_COLS=tile_cols, PHASE=phase, num_warps=c.warps, **cast.constants,
            )  # fmt: skip


def _abreast(config: BothConfig) -> int:
    """Rows that the warps of a program load side by side, 16 elements of a thread each, stored as 16 bytes."""
    return max(1, config.warps * 512 // config.cols)


def space(case: Case) -> Space:
    """16 to 64 rows of a program, as many at a time as fill 17 to 64 registers; in loads of 8 or 16 elements of a thread."""
    return {
        "rows": (16, 32, 64),
        "step": (1, 2, 4, 8, 16),
        "cols": tuple(sorted({_at_most_a_row(case, cols) for cols in (1024, 2048, 4096)})),
        "warps": (4, 8),
        "lag": (1, 2, 4, 8),
    }


def valid(case: Case, config: BothConfig) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    c, K = config, case["K"]
    side_by_side = min(_abreast(c), _MOST_STEP)
    if not side_by_side <= c.step <= c.rows:
        return f"{c.step} of {c.rows} rows at a time, where the warps hold {side_by_side} side by side"
    if not _at_most_a_row(case, 256 * c.warps) <= c.cols <= 512 * c.warps:
        return f"loads of {c.cols}, neither 8 nor 16 elements of a thread"
    if cdiv(K, c.cols) > 1 and cdiv(K, c.cols) * c.cols > K * 1.7:
        return f"loads of {c.cols} leave two lanes in five idle"
    words = _registers(case, c.step, c.cols, c.warps)
    if words > 64 and c.step > 1:
        return f"{words:g} registers of input per thread"
    if words <= 16 and c.step < _MOST_STEP:
        return f"no more than {words:g} registers of input per thread"
    return None


def default(case: Case) -> BothConfig:
    """A config for any shape, by rule: up to 32 registers of input, 64 where a load takes whole rows."""
    return by_rule(case, 64)


def by_rule(case: Case, of_whole_rows: int) -> BothConfig:
    """A config of few idle lanes, up to 32 registers of input, or `of_whole_rows` where a load takes them whole; 16 rows of a
    program where there are few in all, or where rows are those of 2048 bf16: what runs ahead then stays in L2."""
    K, few = case["K"], case["E"] * case["N"] < MANY_ROWS
    warps = next((w for w in (4, 8) if _registers(case, 1, 512 * w, w) <= 32), 16)
    cols = _at_most_a_row(case, 512 * warps)
    held = cdiv(K, cols) * cols
    if held > max(cols, K * 1.7) or (held > max(cols, K * 1.25) and _registers(case, 2, cols // 2, warps) <= 32):
        cols //= 2
    step, most = min(max(1, warps * 512 // cols), _MOST_STEP), of_whole_rows if cols >= K else 32
    while step < _MOST_STEP and _registers(case, 2 * step, cols, warps) <= most:
        step *= 2
    return BothConfig(rows=16 if few or step == most // 8 else 32, step=step, cols=cols, warps=warps, lag=2)


def _at_most_a_row(case: Case, cols: int) -> int:
    return min(cols, max(16, next_power_of_2(case["K"])))


def _registers(case: Case, step: int, cols: int, warps: int) -> float:
    """Of a thread, for the input of so many rows at a time."""
    return step * cdiv(case["K"], cols) * cols * ITEMSIZE[case.dtype] / (128 * warps)


_choose = cache.Chooser("fp8_rowwise_3d_both", BothConfig, valid, default, ("E",), free_options=FREE_OPTIONS, space=space)


def both_reference(inputs: Inputs) -> Outputs:
    """Over the rows and over the columns of every expert."""
    w = inputs["w"]
    E, K, N = w.shape
    down = groups.weight_reference(inputs)
    along = [reference.quantised(expert, 0, inputs) for expert in w]
    if not along:
        empty = w.new_empty((E, K, N), dtype=reference.FP8[inputs["fp8_format"]])
        return {"q": empty, "scale": w.new_empty((E, 1, N), dtype=torch.float32), "q_t": down["q"], "scale_t": down["scale"]}
    q = torch.stack([part for part, _ in along])
    return {"q": q, "scale": torch.stack([part for _, part in along]), "q_t": down["q"], "scale_t": down["scale"]}


def both_traffic(case: Case) -> Traffic:
    """w read; both layouts and both sets of scales written."""
    elements = case["E"] * case["K"] * case["N"]
    return Traffic(ITEMSIZE[case.dtype] * elements, 2 * elements + 4 * case["E"] * (case["K"] + case["N"]))


def run_both(inputs: Inputs, config: BothConfig | None) -> Outputs:
    """`fp8_rowwise_3d_both` on a case's inputs."""
    return fp8_rowwise_3d_both(inputs["w"], config=config, **reference.chosen(inputs))._asdict()


def run_separately(inputs: Inputs, _config: None) -> Outputs:
    """The two operators that it replaces, each in its best config, one after the other."""
    q, scale = rows.fp8_colwise_3d(inputs["w"], **reference.chosen(inputs))
    q_t, scale_t = groups.fp8_rowwise_3d_transpose(inputs["w"], **reference.chosen(inputs))
    return {"q": q, "scale": scale, "q_t": q_t, "scale_t": scale_t}
