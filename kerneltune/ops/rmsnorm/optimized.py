"""The `optimized` variants: the public functions, which check, take the best known config and launch.

May import cache, spec, arguments, launch, tl_lib, tl_transpose, workspace.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_apart, check_format, check_like, check_matrix, in_pairs
from kerneltune.kernel_lib.launch import on_its_device, phases, registers, resident
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES, FP8_MAX, INTERPRETED, TL_DTYPES, is_cuda, since_sm_90
from kerneltune.kernel_lib.tl_transpose import transpose_bytes
from kerneltune.kernel_lib.workspace import counters, workspace
from kerneltune.ops.rmsnorm import backward_kernels, kernels
from kerneltune.ops.rmsnorm.configs import (
    SHARING,
    BwdConfig,
    FwdConfig,
    check_config,
    default_bwd,
    default_fwd,
    space_bwd,
    space_fwd,
    valid_bwd,
    valid_fwd,
)
from kerneltune.ops.rmsnorm.reference import EPS
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Inputs, Outputs

# options under which configs are cached; they do not change which is best
_FWD_OPTIONS = (("zero_centered", False), ("fp8_format", "e4m3"), ("row_pad", 0))
_BWD_OPTIONS = (("zero_centered", False),)
_MOST_BESIDE_GAMMA = 32768
"""Numbers of x that a forward program can hold beside the weight: more need 32 warps, whose threads have 64 registers."""

_TILE_ROWS, _TILE_COLS = 64, 128
"""Of the transpose's tiles; not searched: fp8_transpose_2d prefers 64 x 256 and groups of 512 row blocks, where x is cold."""

_SHORT = 1 << 25
"""Numbers of x up to which the dγ reduction is launched as the main kernel begins: on an H200 (2026-11-22) 1 to 6 % faster up to
8192 x 4096, 1 % slower at twice that and 6 % where programs share rows, and there launched when the main loops are over
(docs/notes/h200.md)."""

_DGAMMA_TILE = 4096
"""Numbers that a program of the dγ reduction has in flight: all partials of some columns, of eight at least."""

_BLOCK, _TILE = 128, 128
"""Rows and columns of tiles that are turned beside the rows in work."""

_BEHIND_COLS = range(8192, 16385)
_BEHIND_BYTES = 8_000_000
"""Rows of so many numbers are turned in the launch that writes them, so many bytes of y behind: on an H200 (2026-11-22) 3 to 7 %
faster than in a second launch; level at 4096 numbers, slower for fewer, and for more, which looping programs write faster
(docs/notes/h200.md). A matrix of less than three times the bytes leaves little to do beside."""

_PLAIN = 512
"""Elements of a row up to which L2 is not told that x and y are used once. H200, 2026-11-23, 268 MB of x: rows of 64 elements
134.1 → 130.7 µs, of 128 132.6 → 130.4, of 256 130.9 → 128.7, of 512 129.6 → 129.2; longer rows were not tried."""

_choose_fwd = cache.Chooser(
    "rmsnorm_fwd", FwdConfig, valid_fwd, default_fwd, ("M",), free_options=tuple(dict(_FWD_OPTIONS)), space=space_fwd
)
_choose_bwd = cache.Chooser(
    "rmsnorm_bwd", BwdConfig, valid_bwd, default_bwd, ("M",), free_options=tuple(dict(_BWD_OPTIONS)), space=space_bwd
)


class RMSNormOutput(NamedTuple):
    """y (M, N); rsigma (M,) fp32; y_t (N, M) fp8 or None; scale_inv (1,) fp32 or None."""

    y: torch.Tensor
    rsigma: torch.Tensor
    y_t: torch.Tensor | None
    scale_inv: torch.Tensor | None


@on_its_device
def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    quant: str = "none",
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    fp8_format: str = "e4m3",
    zero_centered: bool = False,
    out_dtype: torch.dtype | None = None,
    config: FwdConfig | None = None,
) -> RMSNormOutput:
    """Compute y = x * rsqrt(mean(x², 1) + eps) * weight, in fp32 inside; under fp8 clamp(y * scale) and the largest |y|.

    Args:
        x: (M, N) bf16, fp16 or fp32; rows may be any distance apart, elements of a row must be adjacent.
        weight: (N,), dtype of x or fp32; with `zero_centered` 1 is added to it, in fp32. None multiplies by 1.
        quant: `none`, `fp8`, or `fp8_t` (y and its transpose). NaN stays NaN, ±Inf saturates.
        scale: (1,) fp32, multiplies y before the cast.
        amax: (1,) fp32 ≥ 0, raised to max |y| before scaling; never cleared; NaN is passed over.
        fp8_format: `e4m3` or `e5m2`.
        out_dtype: of y without quantisation; None for x's. fp32 x may become bf16 or fp16.
        config: None takes the best known config.

    Raises:
        ValueError: a wrong shape, stride, dtype, device, value or config, which it names.

    Source: the contract of ROCm/TransformerEngine's te_rmsnorm_fwd_triton.
    """
    check_fwd(x, weight, eps, quant, scale, amax, fp8_format, out_dtype, zero_centered)
    if config is not None:
        check_config(config, FwdConfig, least_ctas=0)
    elif x.numel():
        config = _choose_fwd((("M", x.shape[0]), ("N", x.shape[1])), DTYPE_NAMES[x.dtype], quant, _FWD_OPTIONS)
    return launch_fwd(x, None, weight, eps, quant, scale, amax, fp8_format, zero_centered, out_dtype, config)[0]


def launch_fwd(
    x: torch.Tensor,
    add: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    quant: str,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    fp8_format: str,
    zero_centered: bool,
    out_dtype: torch.dtype | None,
    config: FwdConfig | None,
) -> tuple[RMSNormOutput, torch.Tensor]:
    """Allocate the outputs and launch the forward of x, or of x + add; arguments are checked, config is None where x is empty.

    Returns:
        The output, and x + add; x where there is nothing to add.
    """
    M, N = x.shape
    y = x.new_empty((M, N), dtype=out_dtype if quant == "none" else FP8_DTYPES[fp8_format])
    rsigma = x.new_empty((M,), dtype=torch.float32)
    total = x if add is None else x.new_empty((M, N))
    y_t = y.new_empty((N, M)) if quant == "fp8_t" else None
    scale_inv = x.new_empty((1,), dtype=torch.float32) if quant != "none" else None
    out = RMSNormOutput(y, rsigma, y_t, scale_inv)
    if config is None or not x.numel():
        if scale_inv is not None and scale is not None:
            torch.reciprocal(scale, out=scale_inv)
        return out, total
    for name, matrix in (("x", x), ("residual", add)):
        if matrix is not None:
            check_apart(name, matrix, config.rows)
    addition = (None, None) if add is None else (add, total)
    strides = (x.stride(0), None if add is None else add.stride(0))
    scalars = (scale, amax, scale_inv)
    if y_t is not None and _turns_behind(y, config):
        _launch_turned(x, weight, addition, y, y_t, rsigma, *scalars, strides, eps, zero_centered, fp8_format, config)
        return out, total
    keep = y_t is not None
    _launch_rows(x, weight, addition, y, rsigma, *scalars, strides, eps, zero_centered, quant != "none", keep, fp8_format, config)
    if y_t is not None:
        transpose_bytes[(cdiv(M, _TILE_ROWS) * cdiv(N, _TILE_COLS),)](
            y.view(torch.uint8), y_t.view(torch.uint8), M, N, N,
            ROWS=_TILE_ROWS, COLS=_TILE_COLS, GROUP=8, BACKWARDS=True, num_warps=4,
        )  # fmt: skip
    return out, total


@on_its_device
def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    zero_centered: bool = False,
    with_dgamma: bool = True,
    config: BwdConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute dx (M, N) and dgamma (N,) of `rmsnorm_fwd` without quantisation; the same bits in every run of one config.

    Args:
        dz, x: (M, N), one dtype; copied where they are not contiguous.
        rsigma: (M,) fp32, as the forward returned it.
        weight: (N,), dtype of x or fp32, or None, as in the forward.
        with_dgamma: False leaves dgamma out.

    Returns:
        dx, and dgamma of the weight's dtype, None without a weight.

    Raises:
        ValueError: a wrong shape, dtype, device or config, which it names.
    """
    check_bwd(dz, x, rsigma, weight, zero_centered)
    if config is not None:
        check_config(config, BwdConfig, least_ctas=1)
    elif x.numel():
        config = _choose_bwd((("M", x.shape[0]), ("N", x.shape[1])), DTYPE_NAMES[x.dtype], "none", _BWD_OPTIONS)
    return launch_bwd(dz, x, rsigma, weight, None, zero_centered, with_dgamma, config)


def launch_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    zero_centered: bool,
    with_dgamma: bool,
    config: BwdConfig | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate dx and dγ and launch the backward; dsum is added to dx. Arguments are checked, config is None where x is empty."""
    dz, x, dsum = dz.contiguous(), x.contiguous(), None if dsum is None else dsum.contiguous()
    M, N = x.shape
    dx = torch.empty_like(x)
    dgamma = None if weight is None or not with_dgamma else torch.empty_like(weight)
    if config is None or not x.numel():
        return dx, None if dgamma is None else dgamma.zero_()
    c = config
    loads, tiles = cdiv(N, c.cols), cdiv(M, c.rows)
    parts, chunks = (loads, 1) if c.split else (1, loads)
    groups = _groups(x, tiles, parts, c.ctas)
    partials = None if dgamma is None else torch.empty((groups, N), dtype=torch.float32, device=x.device)
    pairs = _pairs(weight, x, dz, dsum)
    words = [t if t is None or pairs == 1 or t.element_size() == 4 else t.view(torch.int32) for t in (dz, x, weight, dsum, dx)]
    with workspace(tiles * parts * c.rows, x.device) if parts > 1 else nullcontext() as ws:
        for phase, options in _phases(parts, c):
            backward_kernels._rmsnorm_bwd_main[(groups * parts,)](
                words[0], words[1], rsigma, *words[2:], partials, ws, M, N // pairs,
                ZERO_CENTERED=zero_centered, ROWS=c.rows, COLS=c.cols // pairs, CHUNKS=chunks, PARTS=parts, PHASE=phase,
                PAIRS=pairs, dtype=TL_DTYPES[x.dtype], DG_ROWS=c.sum_rows(x.element_size()),
                EARLY=parts == 1 and M * N <= _SHORT, STAGES=c.stages, num_warps=c.warps, **options,
            )  # fmt: skip
    if dgamma is not None:
        rows = next_power_of_2(groups)
        cols = max(8, _DGAMMA_TILE // rows)
        backward_kernels._rmsnorm_bwd_dgamma[(cdiv(N, cols),)](
            partials, dgamma, groups, N, ROWS=rows, COLS=cols, num_warps=8,
            **({"launch_pdl": True} if since_sm_90() else {}),
        )  # fmt: skip
    return dx, dgamma


def _pairs(weight: torch.Tensor | None, *matrices: torch.Tensor | None) -> int:
    """Return 2 where 16-bit values can be loaded two by two, as widths and addresses allow; else 1."""
    even = weight is None or weight.element_size() == 4 or weight.storage_offset() % 2 == 0
    return 2 if even and all(matrix is None or in_pairs(matrix) for matrix in matrices) else 1


def _launch_rows(
    x, weight, addition, y, rsigma, scale, amax, scale_inv, strides, eps, zero_centered, fp8, keep, fp8_format, c
) -> None:
    M, N = x.shape
    loads, tiles = cdiv(N, c.cols), cdiv(M, c.rows)
    if not c.ctas:
        kernels._rmsnorm_fwd_once[(tiles,)](
            x, weight, *addition, y, rsigma, scale, amax, scale_inv, M, N, *strides, eps,
            ZERO_CENTERED=zero_centered, FP8=fp8, FP8_MAX=FP8_MAX[fp8_format], KEEP=keep or N <= _PLAIN,
            **_options(N, c),
        )  # fmt: skip
        return
    parts, chunks = (loads, 1) if c.split else (1, loads)
    with workspace(tiles * parts * c.rows, x.device) if parts > 1 else nullcontext() as ws:
        for phase, options in _phases(parts, c):
            kernels._rmsnorm_fwd_loop[(_groups(x, tiles, parts, c.ctas) * parts,)](
                x, weight, *addition, y, rsigma, scale, amax, scale_inv, ws, M, N, *strides, eps,
                ZERO_CENTERED=zero_centered, FP8=fp8, FP8_MAX=FP8_MAX[fp8_format], KEEP=keep, ROWS=c.rows, COLS=c.cols,
                CHUNKS=chunks, PARTS=parts, PHASE=phase, EVEN=N % c.cols == 0, STAGES=c.stages, num_warps=c.warps, **options,
            )  # fmt: skip


def _turns_behind(y: torch.Tensor, c: FwdConfig) -> bool:
    """Whether the programs that turn y belong into the launch of those that write it, which must begin before them."""
    M, N = y.shape
    in_order = is_cuda() or INTERPRETED
    return in_order and not c.ctas and M % 4 == 0 and N in _BEHIND_COLS and M * N >= 3 * _BEHIND_BYTES


def _launch_turned(
    x, weight, addition, y, y_t, rsigma, scale, amax, scale_inv, strides, eps, zero_centered, fp8_format, c
) -> None:
    M, N = x.shape
    blocks = cdiv(M, _BLOCK)
    with counters(cdiv(blocks, 2), x.device) as done:
        kernels._rmsnorm_fwd_turned[(blocks * (_BLOCK // c.rows + cdiv(N, _TILE)),)](
            x, weight, *addition, y, rsigma, scale, amax, scale_inv, y_t.view(torch.uint8), done.view(torch.int32),
            M, N, *strides, eps, cdiv(_BEHIND_BYTES, _BLOCK * N), ZERO_CENTERED=zero_centered, FP8_MAX=FP8_MAX[fp8_format],
            BLOCK=_BLOCK, TILE=_TILE, **_options(N, c),
        )  # fmt: skip


def _options(N: int, c: FwdConfig) -> dict[str, Any]:
    """What programs that write whole rows are told."""
    loads = cdiv(N, c.cols)
    if c.reload:
        held = min(c.stages - 1, loads)
        gammas = min(1, held)
    else:
        held = loads
        gammas = 0 if c.rows * loads * c.cols > _MOST_BESIDE_GAMMA else loads
    sizes = {
        "ROWS": c.rows, "COLS": c.cols, "HELD": held, "GAMMAS": gammas, "BY_WARPS": c.warps >= 16,
        "POLICY": "" if N <= _PLAIN else "evict_first", "num_warps": c.warps,
    }  # fmt: skip
    return sizes | registers(c.warps, SHARING) if c.reload and held else sizes


def _groups(x: torch.Tensor, tiles: int, parts: int, ctas: int) -> int:
    """How many groups of `parts` programs to launch: no more than are resident together where `ctas` limits them."""
    return max(1, min(tiles, resident(x.device, ctas) // parts)) if ctas else tiles


def _phases(parts: int, c: Any) -> list[tuple[int, dict[str, Any]]]:
    """The launches and their options: only programs that share rows wait for each other."""
    return [(0, registers(c.warps, c.ctas))] if parts == 1 else phases(c.warps, c.ctas)


def run_fwd(inputs: Inputs, config: FwdConfig | None) -> Outputs:
    """`rmsnorm_fwd` on a case's inputs."""
    out = rmsnorm_fwd(
        inputs["x"], inputs["weight"], EPS, quant=inputs["quant"], scale=inputs.get("scale"), amax=inputs.get("amax"),
        fp8_format=inputs["fp8_format"], zero_centered=inputs["zero_centered"], config=config,
    )  # fmt: skip
    return {name: value for name, value in out._asdict().items() if value is not None}


def run_bwd(inputs: Inputs, config: BwdConfig | None) -> Outputs:
    """`rmsnorm_bwd` on a case's inputs."""
    dx, dgamma = rmsnorm_bwd(
        inputs["dz"], inputs["x"], inputs["rsigma"], inputs["weight"], zero_centered=inputs["zero_centered"], config=config
    )
    assert dgamma is not None
    return {"dx": dx, "dgamma": dgamma}


def check_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    quant: str,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    fp8_format: str,
    out_dtype: torch.dtype | None,
    zero_centered: bool,
) -> None:
    """Check the arguments of a forward.

    Raises:
        ValueError: the first that does not fit.
    """
    check_matrix("x", x)
    where = x.device
    _check_weight(weight, x, zero_centered)
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps=}")
    if quant not in ("none", "fp8", "fp8_t"):
        raise ValueError(f"quant must be none, fp8 or fp8_t, got {quant=}")
    check_format(fp8_format, FP8_DTYPES, where)
    if out_dtype is not None:
        known = () if quant != "none" else tuple(DTYPE_NAMES) if x.dtype == torch.float32 else (x.dtype,)
        if out_dtype not in known:
            allowed = ", ".join(map(str, known)) or "None"
            raise ValueError(f"out_dtype must be {allowed} for {x.dtype} x and {quant=}, got {out_dtype=}")
    if quant != "none":
        if scale is None or amax is None:
            raise ValueError(f"{quant=} needs scale and amax, got {scale=} {amax=}")
        check_like("scale", scale, (1,), torch.float32, where)
        check_like("amax", amax, (1,), torch.float32, where)


def check_bwd(dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, weight: torch.Tensor | None, zero_centered: bool) -> None:
    """Check the arguments of a backward.

    Raises:
        ValueError: the first that does not fit.
    """
    check_matrix("x", x)
    check_like("dz", dz, tuple(x.shape), x.dtype, x.device)
    check_like("rsigma", rsigma, (x.shape[0],), torch.float32, x.device)
    _check_weight(weight, x, zero_centered)


def _check_weight(weight: torch.Tensor | None, x: torch.Tensor, zero_centered: bool) -> None:
    if weight is None:
        if zero_centered:
            raise ValueError("zero_centered needs a weight, got weight=None")
        return
    wide = isinstance(weight, torch.Tensor) and weight.dtype == torch.float32
    check_like("weight", weight, x.shape[1:], torch.float32 if wide else x.dtype, x.device)
