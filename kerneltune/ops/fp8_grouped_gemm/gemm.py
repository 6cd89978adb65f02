"""Multiply groups of fp8 matrices as training of experts does: forward, input gradient, weight gradient.

Formula: reference.py. Source: torch's _scaled_grouped_mm and _grouped_mm, and their layouts.
"""

from dataclasses import dataclass, replace

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_like
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8_grouped_gemm import peers, reference
from kerneltune.ops.fp8_grouped_gemm.kernels.tiles import clear_behind_groups, multiply_groups
from kerneltune.ops.fp8_grouped_gemm.operands import Product, check_operands, scale_modes
from kerneltune.spec import Case, Op, Option, Space, Variant

_FREE_OPTIONS = ("scales", "groups", "values")
"""Options that change no tile, so that a config serves all of their values."""
_SHARED_BYTES = 232448 - 1024
"""Shared memory of an SM of sm_90 that programs may use, 227 KiB, without the 1 KiB that a program takes for itself."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Config of a grouped product.

    Attributes:
        backend: `triton`, or `cutlass` for torch's own kernel, which ignores the other knobs.
        rows: rows of a tile.
        cols: columns of a tile.
        depth: k of a step of the contraction.
        warps: warps of a program.
        stages: depth of the load pipeline.
        ctas: programs per SM.
        band: tiles that follow each other down the rows before the next column.
        run: tiles that a program takes at a time.
        parts: parts in which a tile's columns are stored.
    """

    backend: str
    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    ctas: int
    band: int
    run: int
    parts: int


CUTLASS = GemmConfig("cutlass", rows=64, cols=128, depth=128, warps=4, stages=4, ctas=1, band=1, run=1, parts=1)
"""The one config of that backend."""


def space(case: Case) -> Space:
    """Offer tiles of 64 x 128 to 128 x 256 and 256 x 128."""
    short = case.option("product") == "weights" and case["M"] <= 128 * case["E"]
    return {
        "backend": ("triton", "cutlass"),
        "rows": (64, 128, 256),
        "cols": (128, 256),
        "depth": (128, 64) if short else (128,),
        "warps": (4, 8),
        "stages": (3, 4, 5, 6),
        "ctas": (1, 2),
        "band": (1, 4, 64),
        "run": (1, 8) if case.option("product") == "weights" else (1,),
        "parts": (1, 2, 4),
    }


def invalid(case: Case, config: GemmConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    if config.backend == "cutlass":
        if case.option("product") == "weights":
            return "CUTLASS's kernel takes groups of multiples of 16 tokens, and else ends the CUDA context"
        if case.dtype != "bfloat16":
            return "CUTLASS's kernel gives bfloat16"
        return None if config == CUTLASS else "its tiles are its own"
    per_thread = config.rows * config.cols / (32 * config.warps)
    if not 32 <= per_thread <= 128:
        return f"{per_thread:g} accumulators per thread"
    if config.warps == 8 and config.rows == 64:
        return "64 rows are one warpgroup's"
    if config.ctas * config.warps * 32 * (per_thread + 64) > 65536:
        return "more registers than an SM has"
    if config.rows >= 256 and case.option("product") == "rows" and case["M"] <= 128 * case["E"]:
        return "most groups are shorter than a tile"
    if _shared_bytes(case, config) > _SHARED_BYTES // config.ctas:
        return f"{_shared_bytes(case, config)} bytes of shared memory"
    return None


def _shared_bytes(case: Case, config: GemmConfig) -> int:
    tiles = config.stages * (config.rows + config.cols) * config.depth
    return tiles + config.rows * config.cols * ITEMSIZE[case.dtype] // config.parts


def default(case: Case) -> GemmConfig:
    """Return a config for any shape: tiles as large as the rows of a group and the columns fill.

    A comment gives the geometric mean of the tuned time over a clause's time, H200, 2026-11-26.
    """
    is_weights, tokens = case.option("product") == "weights", case["M"] // max(1, case["E"])
    rows, columns = (case["N"], case["K"]) if is_weights else (tokens, case["N"])
    wide = 2 if case.dtype == "float32" else 1
    if rows <= 64:
        return GemmConfig("triton", 64, 128, 128, warps=4, stages=6, ctas=1, band=1, run=1, parts=1)
    if columns <= 128:
        return GemmConfig("triton", 128, 128, 128, warps=8, stages=4, ctas=1, band=4, run=1, parts=1)
    if is_weights and tokens <= 512:
        # sums over few tokens: two programs per SM with short pipelines; 18 cases: 0.84 with the last config below, 0.96 so
        is_aligned = case.option("groups") == "routed"
        band, run = (4, 1) if is_aligned else (64, 8)
        return GemmConfig("triton", 128, 128, 128, warps=4, stages=3, ctas=2, band=band, run=run, parts=2 * wide)
    if not is_weights and (case["K"] <= 1536 or 0 < columns % 256 <= 128):
        # short sums, or columns that leave half of a wide tile empty: 12 cases: 0.97 with the last config below, 1.00 so
        return GemmConfig("triton", 128, 128, 128, warps=4, stages=3, ctas=2, band=4, run=1, parts=2 * wide)
    if not is_weights and tokens > 700:
        # many tokens: 64 tiles with the same weights follow each other; 19 cases: 0.98 with the last config below, 1.00 so
        return GemmConfig("triton", 128, 256, 128, warps=8, stages=3, ctas=1, band=64, run=1, parts=wide)
    return GemmConfig("triton", 128, 256, 128, warps=8, stages=4, ctas=1, band=4, run=1, parts=2 * wide)


def promising(case: Case) -> tuple[GemmConfig, ...]:
    """Return the other backend, and each kind of tile once."""
    tiles = (
        GemmConfig("triton", 128, 256, 128, warps=8, stages=4, ctas=1, band=64, run=1, parts=2),
        GemmConfig("triton", 256, 128, 128, warps=8, stages=4, ctas=1, band=4, run=1, parts=2),
        GemmConfig("triton", 128, 128, 128, warps=4, stages=3, ctas=2, band=4, run=1, parts=2),
        GemmConfig("triton", 64, 256, 128, warps=4, stages=5, ctas=1, band=1, run=1, parts=2),
        GemmConfig("triton", 64, 128, 128, warps=4, stages=4, ctas=2, band=1, run=1, parts=1),
    )
    return tuple(config for config in (CUTLASS, *tiles) if invalid(case, config) is None)


def as_called(case: Case) -> Case:
    """Return the case that a call looks up: of scales, values and groups, a call knows whether the groups are aligned."""
    is_weights = case.option("product") == "weights"
    is_aligned = is_weights and case.option("groups") == "routed"
    axes = dict(case.axes)
    if is_aligned:
        axes["M"] -= axes["M"] % GROUP_ALIGNMENT
    return replace(case, axes=tuple(axes.items()), options=_called_options(is_weights, is_aligned))


def _called_options(is_weights: bool, is_aligned: bool) -> tuple[tuple[str, Option], ...]:
    """Return the options of a call's case; scales do not change which config is best, and the host does not know the groups."""
    groups = "routed" if is_aligned else "balanced"
    return (("product", "weights" if is_weights else "rows"), ("scales", "rowwise"), ("groups", groups), ("values", "normal"))


def _results(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    shape = (a.shape[0], b.shape[-1])
    return a.new_empty(shape if b.ndim == 3 else (offs.shape[0], *shape), dtype=out_dtype)


@torch_operator(_results)
@on_its_device
def fp8_grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    aligned: bool = False,
    out: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Multiply groups of tokens, (a @ b) * scale_a * scale_b, accumulated in fp32 as fast as the tensor cores do.

    With b (E, K, N), groups of rows of a: the forward product and, with transposed weights, the input gradient. With b (M,
    K), groups along the contraction: the weight gradient. Nothing waits for the GPU; M may change without a compilation.

    Args:
        a: e4m3, row-major: (M, K) tokens, or (N, M), the transposed output gradient.
        b: e4m3, column-major: (E, K, N) weights, strides (K N, 1, K), or (M, K) tokens, stride 1 along M. M may be any
            number; where M is contiguous, the other stride is a multiple of 16.
        scale_a: fp32, factors of the values of a: one element; for b (E, K, N) also (M,) or (M, 1); for b (M, K) also
            (E,), (E, N) or (E N,).
        scale_b: likewise for b: one element; for b (E, K, N) also (E,), (E, N) or (E, 1, N); for b (M, K) also (E,), (E, K)
            or (E K,).
        offs: (E,) int32, where each group's tokens end, not decreasing, at most M. Groups may be empty and of any size. Not
            read by the host: under TRITON_DEBUG=1 the device asserts the order. Without it, groups of offsets in disorder
            have undefined results, and no byte outside the tensors is read or written.
        aligned: for b (M, K), a and b hold aligned groups, as casts with `aligned=True` write them: M is `aligned_size` of
            the tokens, and offs still counts tokens. Side by side, groups that begin at no multiple of 16 are slow.
        out_dtype: bfloat16, float16 or float32.
        out: written and returned, if given.
        config: None takes the best known config.

    Returns:
        (M, N), zeros in rows past the last group; or (E, N, K), zeros for empty groups.

    Source: torch's _scaled_grouped_mm, its layouts and alignments.
    """
    p = check_operands(a, b, offs, aligned)
    modes = scale_modes(p, a, scale_a, scale_b)
    if out_dtype not in DTYPE_NAMES:
        raise ValueError(f"out_dtype must be one of {', '.join(DTYPE_NAMES.values())}, got {out_dtype}")
    if out is not None:
        _check_out(out, p, out_dtype, a.device)
    if not p.tokens:
        return torch.zeros(p.shape, dtype=out_dtype, device=a.device) if out is None else out.zero_()
    c = config
    if c is None:
        c = _choose(p.axes, DTYPE_NAMES[out_dtype], "fp8", _called_options(bool(p.rows), p.aligned))
    if c.backend == "cutlass":
        if p.rows:
            raise ValueError(f"{c.backend} takes no groups of any size, which a weight gradient may have")
        if out_dtype != torch.bfloat16:
            raise ValueError(f"{c.backend} gives torch.bfloat16, got {out_dtype=}")
        ends = offs.clamp(0, p.tokens).cummax(0).values  # other ends would cost the CUDA context
        result = peers.scaled_mm(a, b, scale_a, scale_b, ends)
        clear_behind_groups(p, result, offs)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(p.shape, dtype=out_dtype, device=a.device)
    multiply_groups(p, a, b, out, scale_a, scale_b, offs, *modes, c)
    return out


def _check_out(out: torch.Tensor, p: Product, dtype: torch.dtype, where: torch.device) -> None:
    check_like("out", out, p.shape, dtype, where)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    if p.rows and out.data_ptr() % 16:
        raise ValueError(f"out must begin at a multiple of 16 bytes, got {out.storage_offset()=}")


OP = Op(
    name="fp8_grouped_gemm",
    axes=("M", "N", "K", "E"),
    dtypes=tuple(ITEMSIZE),
    quants=("fp8",),
    options=reference.OPTIONS,
    free_axes=("M", "E"),
    max_distance=0.5,  # tiles follow the rows of a group, M / E; H200, 2026-11-26, shapes left out: 0.99 of tuned, 0.96 with 4
    free_options=_FREE_OPTIONS,
    as_called=as_called,
    inputs=reference.inputs,
    reference=reference.reference,
    compare=reference.compare,
    traffic=reference.traffic,
    flops=reference.flops,
    variants=(
        peers.BASELINE,
        Variant("optimized", run_of(fp8_grouped_gemm, "out"), GemmConfig, space, invalid, default, promising=promising),
        peers.BF16,
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
