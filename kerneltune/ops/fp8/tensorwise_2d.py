"""Cast a matrix to fp8 with one scale, after its elements are made finite.

    x' = 0 for NaN, ± the largest finite value of x's type for ± infinity      q = fp8(x' * s), s from max |x'|

Two launches, no host sync. If scales are powers of two, the launches read x once, and a second time the tiles that were cast
too early: their number depends on where the largest elements lie, at worst all. Other scales read x twice. Source: torchao
pull request 4179's fp8_tensorwise_quantize_2d, 4389's dual layout.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_like, check_matrix, check_transposable
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.kernel_lib.launch import on_its_device, too_much_shared
from kerneltune.ops.fp8 import contract, peers
from kerneltune.ops.fp8.baselines import torchao_tensorwise
from kerneltune.ops.fp8.contract import CALL_OPTIONS, CONTRACT, OPTIONS, Cast, Pair, check_offs, fp8_dtype
from kerneltune.ops.fp8.kernels.early import cast_with_known_scale, cast_with_one_scale
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant

LAYOUTS = ("row", "col", "both")
"""The outputs: rows of the cast, the transpose of the cast, or both."""


@dataclass(frozen=True, slots=True)
class SegmentConfig:
    """Config of a cast of segments that have one scale each.

    Attributes:
        rows: rows of a tile.
        cols: columns of a tile.
        warps: warps of a program.
        ctas: programs per SM, each looping over tiles; 0 for a program per tile.
        stages: depth of that loop's load pipeline.
    """

    rows: int
    cols: int
    warps: int
    ctas: int
    stages: int


def space(case: Case) -> Space:
    """Offer wide tiles for rows of the cast, tall tiles for its transpose."""
    wide = tuple(cols for cols in (128, 256, 512, 1024) if cols == 128 or cols < 2 * case["K"])
    return {
        "rows": (8, 16, 32, 64) if case.option("layout") == "row" else (64, 128),
        "cols": wide[-3:] if case.option("layout") == "row" else (64, 128, 256),
        "warps": (2, 4, 8),
        "ctas": (0, 2, 4, 6, 8),
        "stages": (1, 2, 3),
    }


def invalid(case: Case, config: SegmentConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    if config.rows % 4:
        return "tiles are of four interleaved parts: rows must be a multiple of 4"
    per_thread = config.rows * config.cols / (32 * config.warps)
    if not 16 <= per_thread <= 128:
        return f"{per_thread:g} elements per thread"
    if (config.ctas == 0) != (config.stages == 1):
        return "a pipeline of loads needs a loop over tiles, and the loop needs the pipeline"
    words = per_thread * ITEMSIZE[case.dtype] / 4
    if 32 * config.warps * config.ctas * (words * 1.25 + 32) > 65536:
        return "more registers than an SM has"
    shared = max(1, config.ctas) * config.rows * config.cols * ((config.stages - 1) * ITEMSIZE[case.dtype] + 1)
    return too_much_shared(shared)


def default(case: Case) -> SegmentConfig:
    """Return a config for any shape: wide tiles for rows, tall tiles for the transpose."""
    if case.option("layout") == "row":
        cols = 512 if case["K"] > 256 else 256 if case["K"] > 64 else 128
        rows = 8192 // cols
        return SegmentConfig(rows=rows, cols=cols, warps=8 if case.dtype == "float32" else 4, ctas=0, stages=1)
    if case.dtype == "float32":
        return SegmentConfig(rows=64, cols=64, warps=8, ctas=0, stages=1)
    if case.option("layout") == "both":
        # H200, 2026-11-26, 26 cases of matrices and weights: 0.96 of the tuned speed with 128 x 64 -> 0.99
        return SegmentConfig(rows=64, cols=128, warps=4, ctas=0, stages=1)
    return SegmentConfig(rows=128, cols=64, warps=8, ctas=0, stages=1)


class SegmentOutput(NamedTuple):
    """Results of a tensor-wise cast.

    Attributes:
        q: the quantized values in the layout of the input; None where the layout leaves them out.
        q_t: of a matrix (M, K), column-major: the bytes of the transpose; of weights (E, N, K), strides (N K, 1, N); or None.
        scale: (segments,) fp32.
    """

    q: torch.Tensor | None
    q_t: torch.Tensor | None
    scale: torch.Tensor


def quantized(x: torch.Tensor, inputs: Inputs) -> Pair:
    """Cast segments (segments, rows, columns), made finite, under the inputs' options; return the cast and the scales."""
    q, scale = contract.quantized(torch.nan_to_num(x).flatten(1), 1, inputs)
    return q.view(x.shape), scale[:, 0]


def in_layout(inputs: Inputs, q: torch.Tensor, q_t: torch.Tensor, scale: torch.Tensor) -> Outputs:
    """Return the outputs that the inputs' layout asks for."""
    outputs = {"row": {"q": q}, "col": {"q_t": q_t}, "both": {"q": q, "q_t": q_t}}[inputs["layout"]]
    return outputs | {"scale": scale}


def reference(inputs: Inputs) -> Outputs:
    """Cast a segment."""
    q, scale = quantized(inputs["x"][None], inputs)
    return in_layout(inputs, q[0], q[0], scale)


def traffic(case: Case) -> Traffic:
    """Return the bytes of the input read once, and of the layouts asked for and the scales written."""
    sizes = dict(case.axes)
    scales = sizes.get("G", 0) or sizes.get("E", 1)
    return contract.cast_traffic(case, scales, copies=2 if case.option("layout") == "both" else 1)


def check_layout(layout: str) -> None:
    """Check that the layout is offered."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout=}")


def empty_results(x: torch.Tensor, fp8_format: str, layout: str, scales: int, groups: int = 0) -> SegmentOutput:
    """Allocate the results of a matrix; groups: aligned groups of its transpose, if any."""
    check_layout(layout)
    (M, K), dtype = x.shape, fp8_dtype(fp8_format, x.device)
    columns = aligned_size(M, groups) if groups else M
    q = torch.empty((M, K), dtype=dtype, device=x.device) if layout != "col" else None
    q_t = torch.empty((K, columns), dtype=dtype, device=x.device).t() if layout != "row" else None
    return SegmentOutput(q, q_t, torch.empty((scales,), dtype=torch.float32, device=x.device))


def _results(x: torch.Tensor, fp8_format: str, layout: str, offs: torch.Tensor | None) -> SegmentOutput:
    return empty_results(x, fp8_format, layout, 1, 0 if offs is None else offs.shape[0])


@torch_operator(_results)
@on_its_device
def fp8_tensorwise_2d(
    x: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    layout: str = "row",
    pow2: bool = True,
    inverse: bool = False,
    offs: torch.Tensor | None = None,
    config: SegmentConfig | None = None,
) -> SegmentOutput:
    """Cast a matrix to fp8 with one scale; NaN becomes 0, infinity the largest finite value of x's type.

    Args:
        x: (M, K) bf16, fp16 or fp32; rows may be less than 2^24 elements apart, elements of a row must be adjacent.
        layout: `row`, `col` or `both`, from one pass.
        offs: (G,) int32, where groups of rows end, not decreasing, at most M. The scale is made of the rows of groups, and
            q_t holds aligned groups, for `fp8_grouped_gemm(aligned=True)`. Rows behind the last group are not written. If
            offs decreases or exceeds M, results are undefined, but nothing outside the tensors is read or written.
        fp8_format, pow2, inverse, config: as in `fp8_rowwise_2d`.

    Returns:
        q (M, K) fp8, contiguous, or None; q_t (M, K), column-major (the bytes of the transpose), or None; scale (1,)
        fp32. With offs q_t is (aligned_size, K), column-major.
    """
    check_matrix("x", x)
    cast, (M, K) = Cast(fp8_format, pow2, inverse), x.shape
    if offs is not None:
        check_offs(offs, M, x.device)
    found = _results(x, fp8_format, layout, offs)
    if layout != "row":
        check_transposable("x", M)
    if config is None and x.numel():
        config = _choose((("M", M), ("K", K)), DTYPE_NAMES[x.dtype], "fp8", (*CALL_OPTIONS, ("layout", layout)))
    cast_with_one_scale(x, offs, *found, cast, config, aligned=offs is not None)
    return found


def _known_results(x: torch.Tensor, offs: torch.Tensor, fp8_format: str, layout: str) -> SegmentOutput:
    return empty_results(x, fp8_format, layout, 1, offs.shape[0])


@torch_operator(_known_results, mutates=("amax",))
@on_its_device
def fp8_delayed_2d(
    x: torch.Tensor,
    offs: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    layout: str = "both",
    config: SegmentConfig | None = None,
) -> SegmentOutput:
    """Cast groups of rows by a scale known beforehand, in one launch: delayed scaling.

    Args:
        x: (M, K) as in `fp8_tensorwise_2d`.
        offs: (G,) int32, as there.
        scale: (1,) fp32, multiplies before the cast.
        amax: (1,) fp32, raised to the largest magnitude in the groups; to NaN or infinity if an element is NaN or infinity.
        fp8_format: `e4m3`, `e5m2`, `e4m3fnuz` or `e5m2fnuz`.
        layout: `row`, `col` or `both`.
        config: None takes the config of `fp8_tensorwise_2d`.

    Returns:
        What `fp8_tensorwise_2d` returns with offs; its scale is 1 / scale.
    """
    check_matrix("x", x)
    M, K = x.shape
    check_offs(offs, M, x.device)
    check_like("scale", scale, (1,), torch.float32, x.device)
    check_like("amax", amax, (1,), torch.float32, x.device)
    found = _known_results(x, offs, fp8_format, layout)
    if layout != "row":
        check_transposable("x", M)
    if not x.numel():
        torch.reciprocal(scale, out=found.scale)
        return found
    if config is None:
        config = _choose((("M", M), ("K", K)), DTYPE_NAMES[x.dtype], "fp8", (*CALL_OPTIONS, ("layout", layout)))
    cast_with_known_scale(x, offs, *found, scale, amax, fp8_format, config)
    return found


OP = Op(
    name="fp8_tensorwise_2d",
    axes=("M", "K"),
    free_axes=("M",),
    options=OPTIONS | {"layout": LAYOUTS},
    free_options=tuple(OPTIONS),
    reference=reference,
    traffic=traffic,
    variants=(
        *torchao_tensorwise.VARIANTS,
        Variant("optimized", run_of(fp8_tensorwise_2d), SegmentConfig, space, invalid, default),
        *peers.TENSORWISE,
    ),
    module=__name__,
    **CONTRACT,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
