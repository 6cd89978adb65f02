"""Row-wise quantisation: activations for the forward product, and expert weights in the layout they have.

Kernel in row_kernels.py. May import cache, spec, tl_lib, launch.
"""

from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_apart, check_matrix
from kerneltune.kernel_lib.launch import on_its_device, resident, too_much_shared
from kerneltune.ops.fp8 import reference, row_kernels
from kerneltune.ops.fp8.common import FREE_OPTIONS, QUANT_OPTIONS, Cast, check_weights, target
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Outputs, Space, Traffic

_MOST_CHUNKS = 16
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowConfig:
    """rows: of a tile; cols: of a load, of which a row takes several; warps: of a program; ctas: programs per multiprocessor,
    each looping over tiles, or 0 for a program per tile; stages: depth of the pipeline of the program's loop, over tiles or,
    with reload, over the loads of a row; reload: read the row once more, from L2, instead of holding it."""

    rows: int
    cols: int
    warps: int
    ctas: int
    stages: int
    reload: bool


@on_its_device
def fp8_rowwise_2d(
    x: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    config: RowConfig | None = None,
) -> _Pair:
    """Activations in fp8 with one scale per row.

    Args:
        x: (M, K) bf16, fp16 or fp32; rows may be less than 2^27 numbers apart, elements of a row must be adjacent.
        fp8_format: `e4m3`, `e5m2`, `e4m3fnuz` or `e5m2fnuz`.
        pow2: round scales down to powers of two.
        inverse: return 1 / scale, which scaled matrix products want, instead of the multiplier.
        config: None takes the best known config.

    Returns:
        q (M, K) fp8, contiguous; scales (M, 1) fp32. NaN makes its row's scale and values NaN; infinity makes its row's scale
        0, the finite 0 and the infinite NaN.

    Raises:
        ValueError: a wrong shape, stride, dtype or value, which it names.

    Source: torchao's triton_fp8_rowwise_2d_scale_and_cast.
    """
    check_matrix("x", x)
    cast = Cast(fp8_format, pow2, inverse, x.device)
    M, K = x.shape
    q = torch.empty((M, K), dtype=cast.dtype, device=x.device)
    scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    if config is None and x.numel():
        config = _choose_rows((("M", M), ("K", K)), DTYPE_NAMES[x.dtype], "fp8", QUANT_OPTIONS)
    _launch(x, q, scale, cast, config)
    return q, scale


@on_its_device
def fp8_colwise_3d(
    w: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    pow2: bool = True,
    inverse: bool = False,
    out: _Pair | None = None,
    config: RowConfig | None = None,
) -> _Pair:
    """Expert weights in fp8 for the forward product, one scale per expert and column of `w`, in the layout they have.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.
        out: tensors like those returned, to be written in their place.

    Returns:
        q (E, K, N) fp8, strides of w; scales (E, 1, N) fp32. NaN and infinity as in `fp8_rowwise_2d`.

    Raises:
        ValueError: a wrong shape, stride, dtype or value, which it names.

    Source: torchao's triton_fp8_colwise_3d_scale_and_cast.
    """
    check_weights("w", w)
    cast = Cast(fp8_format, pow2, inverse, w.device)
    E, K, N = w.shape
    rows = w.transpose(1, 2).reshape(E * N, K)
    given_q, given_scale = out or (None, None)
    q = target("out[0]", given_q, (E, N, K), cast.dtype, w.device, turned=True)
    scale = target("out[1]", given_scale, (E, 1, N), torch.float32, w.device)
    if config is None and w.numel():
        config = _choose_weights((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", QUANT_OPTIONS)
    _launch(rows, q, scale, cast, config)
    return q.transpose(1, 2), scale


def _launch(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, cast: Cast, config: RowConfig | None) -> None:
    """config: None where there is nothing to cast."""
    if config is None or not x.numel():
        scale.fill_(cast.scale_of_nothing)
        return
    (M, K), c = x.shape, config
    check_apart("x", x, c.rows)
    tiles = cdiv(M, c.rows)
    programs = min(tiles, resident(x.device, c.ctas)) if c.ctas else tiles
    row_kernels._cast_rows[(programs,)](
        x, q, scale, M, K, x.stride(0),
        ROWS=c.rows, COLS=c.cols, CHUNKS=cdiv(K, c.cols), EVEN=K % c.cols == 0, STAGES=c.stages, RELOAD=c.reload,
        num_warps=c.warps, **cast.constants,
    )  # fmt: skip


def space(case: Case) -> Space:
    """Loads from an eighth of a row to a whole row; up to four rows, more where they are short."""
    K = case["K"]
    whole = next_power_of_2(K)
    most = 8192 if whole > 16384 else 4096
    return {
        "rows": (4, 8, 16) if K <= 256 else (1, 2, 4) if K <= 4096 else (1, 2) if K <= 8192 else (1,),
        "cols": tuple(cols for cols in (8192, 4096, 2048, 1024, 512) if cols <= most and cols < 2 * K) or (max(16, whole),),
        "warps": (1, 2, 4, 8, 16),
        "ctas": (0, 2, 4, 6, 8),
        "stages": (1, 2, 3),
        "reload": (False, True) if whole >= 8192 else (False,),
    }


def valid(case: Case, config: RowConfig) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    K, itemsize = case["K"], ITEMSIZE[case.dtype]
    chunks = cdiv(K, config.cols)
    if chunks > 1 and chunks * config.cols > K * 1.15:
        return f"{chunks} loads of {config.cols} leave more than an eighth of the lanes idle"
    per_load = config.rows * config.cols / (32 * config.warps)
    if per_load * itemsize < 16 and config.warps > 1:
        return f"loads of {per_load * itemsize:g} bytes"
    if config.reload:
        if config.ctas or chunks < 2 or per_load > 64:
            return "reloading pays where a program has one long row, read by parts"
        if config.stages > 1 and config.ctas * config.stages * config.rows * config.cols * itemsize > 200_000:
            return "more shared memory than a multiprocessor has"
        return None
    if chunks > _MOST_CHUNKS:
        return f"{chunks} loads to a row"
    if (config.ctas == 0) != (config.stages == 1):
        return "a pipeline of loads needs a loop over tiles, and the loop needs the pipeline"
    words = per_load * chunks * itemsize / 4
    if words > 64:
        return f"{words:g} registers of input per thread"
    if not 8 <= config.ctas * config.warps <= 64 and config.ctas:
        return f"{config.ctas * config.warps} warps per multiprocessor"
    if config.ctas * config.warps * 32 * (words * 1.25 + 24) > 65536 + 8192:
        return "more registers than a multiprocessor has"
    shared = config.ctas * (config.stages - 1) * config.rows * chunks * config.cols * itemsize
    return too_much_shared(shared)


def default(case: Case) -> RowConfig:
    """A config for any shape, by rule: 16 to 64 elements of a row in every thread, little idle at its end."""
    K, itemsize = case["K"], ITEMSIZE[case.dtype]
    if K <= 256:
        cols = max(16, next_power_of_2(K))
        return RowConfig(rows=min(16, 1024 // cols), cols=cols, warps=1, ctas=0, stages=1, reload=False)
    held = 64 * 32 * 2 // itemsize  # elements that a warp can hold
    for cols in (1024, 2048, 4096, 8192, 512, 256):
        warps = max(1, cols // 256)
        chunks = cdiv(K, cols)
        if (chunks == 1 and cols >= 2 * K) or chunks > 8 or chunks * cols >= held * warps:
            continue
        if chunks * cols <= K * 1.1:
            return RowConfig(1, cols, warps, ctas=0, stages=1, reload=False)
    if K <= 8192:
        cols = next_power_of_2(K)
        return RowConfig(1, cols, warps=min(16, max(1, cols // 512)), ctas=0, stages=1, reload=False)
    cols = 2048 if K % 2048 == 0 or K > 20000 else 1024
    return RowConfig(1, cols, warps=cols // 256, ctas=0, stages=1, reload=True)


_choose_rows = cache.Chooser("fp8_rowwise_2d", RowConfig, valid, default, ("M",), free_options=FREE_OPTIONS, space=space)
_choose_weights = cache.Chooser("fp8_colwise_3d", RowConfig, valid, default, ("E", "N"), free_options=FREE_OPTIONS, space=space)


def rows_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x (M, K)."""
    x = reference.values((case["M"], case["K"]), getattr(torch, case.dtype), device, seed, bool(case.option("special")))
    return {"x": x} | reference.options(case)


def rows_reference(inputs: Inputs) -> Outputs:
    """Over the last axis."""
    q, scale = reference.quantised(inputs["x"], 1, inputs)
    return {"q": q, "scale": scale}


def weights_reference(inputs: Inputs) -> Outputs:
    """Over the middle axis, expert by expert."""
    w = inputs["w"]
    E, K, N = w.shape
    q = torch.empty((E, N, K), dtype=reference.FP8[inputs["fp8_format"]], device=w.device).transpose(1, 2)
    scale = torch.empty((E, 1, N), dtype=torch.float32, device=w.device)
    for expert in range(E):
        q[expert], scale[expert] = reference.quantised(w[expert], 0, inputs)
    return {"q": q, "scale": scale}


def rows_traffic(case: Case) -> Traffic:
    """x read; q and the scales written."""
    elements = case["M"] * case["K"]
    return Traffic(ITEMSIZE[case.dtype] * elements, elements + 4 * case["M"])


def weights_traffic(case: Case) -> Traffic:
    """w read; q and the scales written."""
    elements = case["E"] * case["K"] * case["N"]
    return Traffic(ITEMSIZE[case.dtype] * elements, elements + 4 * case["E"] * case["N"])


def run_rows(inputs: Inputs, config: RowConfig | None) -> Outputs:
    """`fp8_rowwise_2d` on a case's inputs."""
    q, scale = fp8_rowwise_2d(inputs["x"], config=config, **reference.chosen(inputs))
    return {"q": q, "scale": scale}


def run_weights(inputs: Inputs, config: RowConfig | None) -> Outputs:
    """`fp8_colwise_3d` on a case's inputs."""
    q, scale = fp8_colwise_3d(inputs["w"], config=config, **reference.chosen(inputs))
    return {"q": q, "scale": scale}
