"""RMSNorm forward, with FP8 and transposed-FP8 output under delayed scaling. Formula: contract.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import close, same_bits, within_a_step
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_format, check_like, check_matrix
from kerneltune.kernel_lib.functions import run_of
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES
from kerneltune.ops.rmsnorm import contract, peers, tiles
from kerneltune.ops.rmsnorm.baselines import te
from kerneltune.ops.rmsnorm.contract import CONTRACT, EPS, FP8, ROUNDING, check_weight, gamma_of, rsigma_of
from kerneltune.ops.rmsnorm.kernels.forward import normalize, transposes_at_once
from kerneltune.ops.rmsnorm.tiles import Tiles, check_config
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant

_LARGE = 1 << 25
"""Elements of x beyond which a program reads x again instead of holding it, so that more programs fit an SM. Up to 8192 rows of
4096 elements holding x was level or faster (H200, 2026-11-23)."""

_VECTOR = 16
"""A row's length must be a multiple of this for Triton to load vectors. Other rows are loaded element by element, so that reading
x again costs more than it frees: 20000 rows of 3400 and of 7000 elements took 1.10x to 1.20x the time (H100, 2026-11-27, trials
in benchmarks/trials)."""


@dataclass(frozen=True, slots=True)
class FwdConfig(Tiles):
    """Config of the forward pass: `Tiles`, and a knob.

    Attributes:
        reload: whether x is read again from L2 for the output, instead of held in registers. With stages over 1 and no loop,
            `stages - 1` loads are held, and all other loads are read `stages - 1` loads ahead.
    """

    reload: bool


def space(case: Case) -> Space:
    """Offer loads from half a row, or an eighth of a long or uneven row, to a full row; tiles of many rows if rows are short."""
    padded = tiles.padded_length(case["N"])
    if padded <= tiles.SHORT:
        transposed = case.quant == "fp8_t"
        return {
            "rows": (32, 64, 128, 256) if transposed else tiles.rows_of_short(padded, 16384),
            "cols": (padded,),
            "split": (False,),
            "warps": (2, 4, 8, 16) if transposed else (1, 2, 4, 8),
            "ctas": (0,) if transposed else (0, 2, 4, 8),
            "stages": (1,) if transposed else (1, 2, 3),
            "reload": (False,),
        }
    long = padded > 8192
    may_be_partly_held = padded > tiles.LONG
    smallest = max(4096, padded >> 4) if may_be_partly_held else max(512, padded >> 3 if case["N"] % 8 or long else padded >> 1)
    return {
        "rows": (1, 2, 4, 8) if padded <= 1024 else (1, 2, 4) if padded <= 2048 else (1,) if long else (1, 2),
        "cols": tuple(cols for cols in (padded >> k for k in range(5)) if smallest <= cols <= 16384 or cols == padded <= 32768),
        "split": (False, True) if long else (False,),
        "warps": (2, 4, 8, 16, 32) if padded > 1024 else (1, 2, 4, 8),
        "ctas": (0, 2, 4) if padded <= 16384 else (0, 1, 2, 4),
        "stages": (1, 2, 3, 5, 7) if may_be_partly_held else (1, 2, 3),
        "reload": (False, True) if padded >= 2048 else (False,),
    }


def invalid(case: Case, config: FwdConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    loads = cdiv(case["N"], config.cols)
    is_partly_held = config.reload and not config.ctas and config.stages > 1
    reason = tiles.invalid_loads(case, config)
    if reason is not None:
        return reason
    if loads > (16 if is_partly_held else 8) and (not config.split or config.cols < 8192):
        return f"{loads} loads to a row"
    if config.reload and (config.split or config.ctas):
        return "reloading pays where one program has the whole row, and there are many programs"
    if is_partly_held:
        return _invalid_partly_held(case, config, loads)
    if (config.ctas == 0) != (config.stages == 1):
        return "a pipeline of loads needs a loop over tiles, and the loop needs the pipeline"
    if config.stages > 3:
        return f"{config.stages} tiles in the pipeline"
    if case.quant == "fp8_t" and case["N"] <= tiles.SHORT and not transposes_at_once(case["N"], config):
        return f"short rows are transposed where they are held, {tiles.TRANSPOSED_ROWS} at least"
    return tiles.invalid_tile(case, config, tensors=1, most=64, held=1 if config.reload else None)


def _invalid_partly_held(case: Case, c: FwdConfig, loads: int) -> str | None:
    """Say why programs that hold a part of their rows, without a loop, cannot be worth running.

    H200, 2026-11-22: wide programs, two per SM, that load 8 elements per thread won at long rows.
    """
    registers = 2 * ITEMSIZE[case.dtype] * (c.stages + 2)  # of the held elements, the load ahead and the weight
    if case["N"] <= tiles.LONG:
        return f"rows of at most {tiles.LONG} are held or read again as a whole"
    if c.stages > loads:
        return f"{c.stages - 1} of {loads} loads held leave none to read again"
    if c.warps < 16 or c.rows * c.cols != 256 * c.warps:
        return "rows are held in part by at least 16 warps, 8 elements of a load per thread"
    if registers * 8 > tiles.REGISTERS // (tiles.SHARING * 32 * c.warps) * 5:
        return f"{registers} registers per thread for loads"
    return None


def default(case: Case) -> FwdConfig:
    """Return a config for any shape, by rule: the first valid config among the fastest at rows of about this length."""
    return tiles.first_valid(case, likely(case, reload=True), invalid)


def likely(case: Case, reload: bool) -> Iterator[FwdConfig]:
    """Generate configs, the likeliest first; the last runs anything. reload: whether x may be read again."""
    M, padded = case["M"], tiles.padded_length(case["N"])
    if padded <= tiles.SHORT and case.quant == "fp8_t":
        rows = max(tiles.TRANSPOSED_ROWS, tiles.tile_rows(M, min(128, 16384 // padded)))
        yield FwdConfig(rows, padded, False, max(1, rows * padded // 2048), ctas=0, stages=1, reload=False)
    if padded <= 1024:
        rows = tiles.tile_rows(M, max(1, 2048 // padded))
        warps = 2 if case.quant != "none" or 128 < padded <= tiles.SHORT else 4
        yield FwdConfig(rows, padded, False, min(warps, max(1, rows * padded // 512)), ctas=0, stages=1, reload=False)
    if M < tiles.FEW_ROWS and padded > 4096:
        yield FwdConfig(1, max(4096, padded // tiles.MAX_PARTS), True, warps=8, ctas=2, stages=2, reload=False)
    again = reload and padded > 2048 and M * case["N"] > _LARGE and case["N"] % _VECTOR == 0
    if case.quant != "none" and padded <= 8192:
        cols, is_held = 4096 if padded == 8192 else 2048, reload and padded > 2048 and not again
        rows = 2 if 2 * tiles.MIN_TILES <= M and not is_held else 1
        yield FwdConfig(rows, cols, False, cols // 1024, ctas=0, stages=1, reload=again)
    if padded > tiles.LONG and reload:
        for cols, stages in ((4096, 5), (4096, 3), (8192, 2)):
            yield FwdConfig(1, cols, False, cols // 256, ctas=0, stages=stages, reload=True)
    if padded > tiles.LONG:
        for cols in (4096, 8192):
            yield FwdConfig(1, max(cols, padded // tiles.MAX_PARTS), True, warps=cols // 512, ctas=1, stages=2, reload=False)
    cols, warps = (min(padded, 2048), 4) if padded <= 4096 else (4096, 8 if padded <= 8192 else 16)
    for reads_again in (True, False) if again else (False,):
        yield FwdConfig(1, cols, False, warps, ctas=0, stages=1, reload=reads_again)
    yield FwdConfig(1, padded, False, warps=1 if padded <= 512 else 4, ctas=0, stages=1, reload=False)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x (M, N) with rows `row_pad` elements apart, weight (N,), and scale (1,), amax (1,) where y is quantized."""
    M, N, dtype = case["M"], case["N"], getattr(torch, case.dtype)
    pad = int(case.option("row_pad"))
    inputs = {
        "eps": EPS,
        "x": contract.uniform((M, N + pad), -2.0, 1.0, dtype, device, seed)[:, :N],
        "weight": contract.uniform((N,), 0.5, 1.5, dtype, device, seed + 1),
        "quant": case.quant,
        "fp8_format": case.option("fp8_format"),
        "zero_centered": case.option("zero_centered"),
    }
    return {**inputs, **contract.scalars(case, device, seed)}


def reference(inputs: Inputs) -> Outputs:
    """Return y, rsigma, and under fp8 amax of y, amax before the call, scale_inv; the transpose is y's, byte for byte."""
    rsigma = rsigma_of(inputs["x"])
    before = {} if inputs["quant"] == "none" else {"amax_before": inputs["amax"].clone()}
    return _normalized(inputs, rsigma) | before | {"rsigma": rsigma}


def _normalized(inputs: Inputs, rsigma: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return y, and under fp8 amax and scale_inv, of given rsigma."""
    x = inputs["x"]
    y = x.float() * rsigma[:, None] * gamma_of(inputs)
    if inputs["quant"] == "none":
        return {"y": y.to(x.dtype)}
    dtype = FP8[inputs["fp8_format"]]
    limit = torch.finfo(dtype).max
    quantized = (y * inputs["scale"]).clamp(-limit, limit).to(dtype)
    amax = y.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().max() if y.numel() else y.new_zeros(())
    return {"y": quantized, "amax": amax.reshape(1), "scale_inv": 1.0 / inputs["scale"]}


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Return a line per wrong output of a forward.

    rsigma is a sum, so it is held to a tolerance. Everything after it is held to the bits that follow from the output's
    own rsigma, if the variant returns it.
    """
    errors: list[str] = []
    rsigma = outputs.get("rsigma")
    if rsigma is not None:
        errors += close("rsigma", rsigma, expected["rsigma"], rtol=5e-5, atol=1e-6)
        if errors:
            return errors
        expected = {**expected, **_normalized(inputs, rsigma)}
    y, want = outputs["y"], expected["y"]
    if inputs["quant"] == "none":
        units = 1.0 if rsigma is not None else 4.0
        exact = rsigma is not None and y.dtype != torch.float32
        errors += same_bits("y", y, want) if exact else close("y", y, want, rtol=units * ROUNDING[y.dtype], atol=1e-5)
        return errors
    errors += (within_a_step if rsigma is None else same_bits)("y", y, want)
    if inputs["quant"] == "fp8_t":
        errors += same_bits("y_t", outputs["y_t"], y.t())
    amax = torch.maximum(expected["amax"], expected["amax_before"])
    errors += close("amax", inputs["amax"], amax, rtol=1e-6 if rsigma is not None else 5e-5, atol=0.0)
    errors += close("scale_inv", outputs["scale_inv"], expected["scale_inv"], rtol=1e-7, atol=0.0)
    return errors


def traffic(case: Case) -> Traffic:
    """Return the bytes of x and weight read; of y, its transpose and rsigma written. The scalars of quantization do not count."""
    M, N, size = case["M"], case["N"], ITEMSIZE[case.dtype]
    return Traffic(read=size * (M * N + N), write=output_bytes(case) * M * N + 4 * M)


def output_bytes(case: Case) -> int:
    """Return the bytes of an element of y and of its transpose."""
    return {"none": ITEMSIZE[case.dtype], "fp8": 1, "fp8_t": 2}[case.quant]


class RMSNormOutput(NamedTuple):
    """Results of `rmsnorm_fwd`.

    Attributes:
        y: (M, N).
        rsigma: (M,) fp32.
        y_t: (N, M) fp8, or None.
        scale_inv: (1,) fp32, or None.
    """

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
        weight: (N,), dtype of x or fp32. None multiplies by 1.
        eps: added to the mean of the squares, 0 or more.
        quant: `none`, `fp8`, or `fp8_t` (y and its transpose). NaN stays NaN, ±Inf saturates.
        scale: (1,) fp32, multiplies y before the cast.
        amax: (1,) fp32 ≥ 0, raised to max |y| before scaling; never cleared; NaN is passed over.
        fp8_format: `e4m3` or `e5m2`.
        zero_centered: multiply by weight + 1, added in fp32.
        out_dtype: type of y without quantization; None for x's. fp32 x may become bf16 or fp16.
        config: None takes the best known config.

    Source: the contract of ROCm/TransformerEngine's te_rmsnorm_fwd_triton.
    """
    check(x, weight, eps, quant, scale, amax, fp8_format, out_dtype, zero_centered)
    if config is not None:
        check_config(config, FwdConfig, least_ctas=0)
    elif x.numel():
        config = _choose((("M", x.shape[0]), ("N", x.shape[1])), DTYPE_NAMES[x.dtype], quant, _CALL_OPTIONS)
    y, _, rsigma, y_t, scale_inv = normalize(
        x, None, weight, eps, quant, scale, amax, fp8_format, zero_centered, out_dtype, config
    )
    return RMSNormOutput(y, rsigma, y_t, scale_inv)


def check(
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
    """Check the arguments of a forward."""
    check_matrix("x", x)
    where = x.device
    check_weight(weight, x, zero_centered)
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


OP = Op(
    name="rmsnorm_fwd",
    quants=contract.QUANTS,
    options={"zero_centered": (False, True), "fp8_format": tuple(FP8), "row_pad": (0, 3, 8)},
    free_options=("zero_centered", "fp8_format", "row_pad"),
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        *te.FORWARD,
        Variant("optimized", run_of(rmsnorm_fwd), FwdConfig, space, invalid, default),
        *peers.FORWARD,
    ),
    module=__name__,
    **CONTRACT,
)
_CALL_OPTIONS = tuple((option, values[0]) for option, values in OP.options.items())
"""The options under which a call looks its config up."""
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
