"""Expert weights in both layouts, for the forward product and for dgrad, each with its own scales, from one read.

Kernel in both_kernels.py. May import cache, common, groups, reference, rows, spec, tl_lib, launch, workspace.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, in_pairs
from kerneltune.kernel_lib.launch import on_its_device, phases, resident, too_much_shared
from kerneltune.kernel_lib.tl_lib import TL_DTYPES
from kerneltune.kernel_lib.workspace import workspace
from kerneltune.ops.fp8 import groups, reference, rows
from kerneltune.ops.fp8.both_kernels import cast_both
from kerneltune.ops.fp8.common import QUANT_OPTIONS, Cast, check_weights
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Space, Traffic


@dataclass(frozen=True, slots=True)
class BothConfig:
    """rows, cols: of a tile; warps: of a program; ctas: programs per multiprocessor, each looping over tiles."""

    rows: int
    cols: int
    warps: int
    ctas: int


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
    config: BothConfig | None = None,
) -> BothLayouts:
    """`fp8_colwise_3d` and `fp8_rowwise_3d_transpose` of the same weights in one launch, bit for bit.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        fp8_format: `e4m3`, `e5m2`, `e4m3fnuz` or `e5m2fnuz`.
        pow2: round scales down to powers of two.
        inverse: return 1 / scale instead of the multiplier.
        config: None takes the best known config.

    Raises:
        ValueError: a wrong shape, stride, dtype or value, which it names.

    Source: torchao's pull request 4389 for the idea, with a scale per row and column instead of one in all.
    """
    cast = Cast(fp8_format, pow2, inverse)
    check_weights("w", w)
    E, K, N = w.shape
    q = torch.empty((E, N, K), dtype=cast.dtype, device=w.device)
    q_t = torch.empty((E, K, N), dtype=q.dtype, device=w.device)
    scale = torch.empty((E, 1, N), dtype=torch.float32, device=w.device)
    scale_t = torch.empty((E, K), dtype=torch.float32, device=w.device)
    out = BothLayouts(q.transpose(1, 2), scale, q_t.transpose(1, 2), scale_t)
    if not w.numel():
        for scales in (scale, scale_t):
            scales.fill_(cast.scale_of_nothing)
        return out
    if config is None:
        config = _choose((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", QUANT_OPTIONS)
    _launch(w.transpose(1, 2).view(E * N, K), q, q_t, scale, scale_t, (E, K, N), cast, config)
    return out


def _launch(x, q, q_t, scale, scale_t, shape, cast: Cast, c: BothConfig) -> None:
    E, K, N = shape
    stripes = cdiv(K, c.cols)
    total = E * stripes * cdiv(N, c.rows)
    programs = min(total, resident(x.device, c.ctas))
    ws = workspace(E + E * N + E * stripes * c.cols, x.device)
    pairs = 2 if in_pairs(x) else 1
    dtype = TL_DTYPES[x.dtype]
    if pairs == 2:
        x, q = x.view(torch.int32), q.view(torch.int16)
    for phase, options in phases(c.warps, c.ctas):
        cast_both[(programs,)](
            x, q, q_t, scale, scale_t, ws, E, total,
            N=N, C=K // pairs, ROWS=c.rows, COLS=c.cols // pairs, PAIRS=pairs, dtype=dtype, PHASE=phase, PACKED=N % 4 == 0,
            num_warps=c.warps, **cast.constants, **options,
        )  # fmt: skip


def space(case: Case) -> Space:
    """Tiles from 64 x 64 to 256 x 256; 64 rows where experts have no more."""
    tall = (64, 128, 256) if case["N"] > 64 else (64,)
    return {"rows": tall, "cols": (64, 128, 256), "warps": (2, 4, 8), "ctas": (1, 2, 3, 4, 5, 6, 8)}


def valid(case: Case, config: BothConfig) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    per_thread = config.rows * config.cols / (32 * config.warps)
    if not 16 <= per_thread <= 128:
        return f"{per_thread:g} elements per thread"
    if 32 * config.warps * config.ctas * (per_thread * ITEMSIZE[case.dtype] / 4 + 32) > 65536:
        return "more registers than a multiprocessor has"
    shared = config.ctas * config.rows * config.cols
    return too_much_shared(shared)


def default(case: Case) -> BothConfig:
    """A config for any shape, by rule."""
    return BothConfig(rows=64 if case.dtype == "float32" else 128, cols=64, warps=4, ctas=3)


_choose = cache.Chooser("fp8_rowwise_3d_both", BothConfig, valid, default, ("E",))


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
