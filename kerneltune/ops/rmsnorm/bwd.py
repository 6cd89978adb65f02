"""Compute dx and dγ of RMSNorm's backward pass, and read dz and x once. Formula: contract.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_like, check_matrix
from kerneltune.kernel_lib.functions import run_of
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.rmsnorm import peers, tiles
from kerneltune.ops.rmsnorm.baselines import te
from kerneltune.ops.rmsnorm.contract import CONTRACT, ROUNDING, check_weight, gamma_of, rsigma_of, uniform
from kerneltune.ops.rmsnorm.kernels.backward import gradients
from kerneltune.ops.rmsnorm.tiles import Tiles, check_config
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant

_WARP_BYTES = 512
"""Bytes of a load of a warp: 16 of each thread."""


@dataclass(frozen=True, slots=True)
class BwdConfig(Tiles):
    """Config of the backward pass: `Tiles`; ctas is never 0."""

    def sum_rows(self, itemsize: int) -> int:
        """Return the number of rows of a program's sums for dγ: the rows that its warps load at once.

        The other rows of a column lie in the same thread, so that their sum moves no data between threads. The number is 1
        if the warps lie side by side along a row.
        """
        return min(self.rows, max(1, _WARP_BYTES * self.warps // (self.cols * itemsize)))


def space(case: Case) -> Space:
    """Offer tiles of up to eight rows, of more rows if rows are short; a row per program, or several programs per row."""
    padded = tiles.padded_length(case["N"])
    if padded <= tiles.SHORT:
        return {
            "rows": tiles.rows_of_short(padded, 8192),
            "cols": (padded,),
            "split": (False,),
            "warps": (2, 4, 8),
            "ctas": (2, 4, 8),
            "stages": (1, 2, 3),
        }
    smallest = 1024 if padded <= 8192 else 2048
    cols = tuple(cols for cols in (padded >> k for k in range(6)) if smallest <= cols <= 16384 or cols == padded <= 4096)
    return {
        "rows": (1, 2, 4, 8) if padded <= 1024 else (1, 2, 4),
        "cols": cols,
        "split": (False, True) if padded > 4096 else (False,),
        "warps": (4, 8, 16, 32) if padded > 8192 else (4, 8, 16),
        "ctas": (1, 2, 4),
        "stages": (2, 3, 4),
    }


def invalid(case: Case, config: BwdConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    if not config.ctas:
        return "dγ takes programs that loop over tiles: ctas must not be 0"
    reason = tiles.invalid_loads(case, config)
    if reason is not None:
        return reason
    loads = cdiv(case["N"], config.cols)
    if not config.split and loads > 8:
        return f"{loads} loads to a row"
    most = 64 if config.sum_rows(ITEMSIZE[case.dtype]) * 4 <= config.rows else 32  # the sums take registers too
    return tiles.invalid_tile(case, config, tensors=2, most=most)


def default(case: Case) -> BwdConfig:
    """Return a config for any shape, by rule: the first valid config among the fastest at rows of about this length."""
    return tiles.first_valid(case, likely(case), invalid)


def likely(case: Case) -> Iterator[BwdConfig]:
    """Generate configs, the likeliest first; the last runs anything."""
    M, N, padded = case["M"], case["N"], tiles.padded_length(case["N"])
    if padded <= 4096:
        yield from _likely_short(M, N, padded)
    if 4096 < N <= 6144:
        yield BwdConfig(1, 2048, False, warps=8, ctas=2, stages=4)
    if 4096 < N <= 8192:
        yield BwdConfig(1, 8192, False, warps=8, ctas=1, stages=3)
        yield BwdConfig(1, 2048, False, warps=8, ctas=1, stages=3)
    if 8192 < N <= 12288:
        yield BwdConfig(1, 4096, False, warps=16, ctas=1, stages=3)
    for rows in (4, 2, 1) if M >= 4 * tiles.FEW_ROWS else (2, 1):
        for stages in (3, 2):
            cols = max(2048, padded // tiles.MAX_PARTS)
            yield BwdConfig(rows, cols, cols < N, max(4 if padded > tiles.LONG else 8, cols // 512), ctas=2, stages=stages)
    for cols, warps in ((4096, 16), (8192, 16)):
        yield BwdConfig(1, max(cols, padded // tiles.MAX_PARTS), cols < N, warps, ctas=1, stages=2)
    yield BwdConfig(1, padded, False, warps=4, ctas=1, stages=2)


def _likely_short(M: int, N: int, padded: int) -> Iterator[BwdConfig]:
    """Generate the likeliest configs of rows of up to 4096 elements."""
    if padded <= 1024:
        for elements, ctas in ((2048, 4), (1024, 2)):
            yield BwdConfig(tiles.tile_rows(M, max(1, elements // padded)), padded, False, warps=4, ctas=ctas, stages=3)
    if padded == 2048:
        yield BwdConfig(tiles.tile_rows(M, 2), 2048, False, warps=4, ctas=2, stages=3)
    if 3584 < N <= 4096:
        yield BwdConfig(tiles.tile_rows(M, 2), 4096, False, warps=8, ctas=1, stages=3)
    if 1024 < padded <= 4096:
        for stages in (4, 3, 2):
            yield BwdConfig(1, 1024, False, warps=4, ctas=2, stages=stages)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw dz (M, N), x (M, N), weight (N,), and the rsigma (M,) of x."""
    M, N, dtype = case["M"], case["N"], getattr(torch, case.dtype)
    x = uniform((M, N), -2.0, 1.0, dtype, device, seed)
    return {
        "dz": uniform((M, N), -1.0, 1.0, dtype, device, seed + 3),
        "x": x,
        "rsigma": rsigma_of(x),
        "weight": uniform((N,), 0.5, 1.5, dtype, device, seed + 1),
        "zero_centered": case.option("zero_centered"),
    }


def reference(inputs: Inputs) -> Outputs:
    """Return dx and dgamma from the saved rsigma, in fp32, dgamma's terms before their sum as well."""
    x, dz, r = inputs["x"].float(), inputs["dz"].float(), inputs["rsigma"][:, None]
    dzg = dz * gamma_of(inputs)
    s = (dzg * x).sum(1, keepdim=True)
    terms = dz * x * r
    return {"dx": r * (dzg - r * r * s / max(x.shape[1], 1) * x), "dgamma": terms.sum(0), "dgamma_abs": terms.abs().sum(0)}


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare dx within its rounding, dgamma within its rounding and the error of an fp32 sum."""
    unit = ROUNDING[inputs["x"].dtype]
    dx_scale = float(expected["dx"].abs().max()) if expected["dx"].numel() else 0.0
    errors = close("dx", outputs["dx"], expected["dx"], rtol=unit, atol=1e-6 + 2e-6 * dx_scale)
    slack = 2e-6 * expected["dgamma_abs"] + 1e-6
    return errors + close("dgamma", outputs["dgamma"], expected["dgamma"], rtol=unit, atol=slack)


def traffic(case: Case) -> Traffic:
    """Return the bytes of dz, x, weight and rsigma read; of dx and dgamma written."""
    M, N, size = case["M"], case["N"], ITEMSIZE[case.dtype]
    return Traffic(read=size * (2 * M * N + N) + 4 * M, write=size * (M * N + N))


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
    """Compute dx (M, N) and dgamma (N,) of `rmsnorm_fwd` without quantization; the same bits in every run of one config.

    Args:
        dz: (M, N), the gradient of y; dz and x are copied if they are not contiguous.
        x: (M, N) of dz's dtype.
        rsigma: (M,) fp32, as the forward returned it.
        weight: (N,), dtype of x or fp32, or None, as in the forward.
        zero_centered: as in the forward.
        with_dgamma: False leaves dgamma out.
        config: None takes the best known config.

    Returns:
        dx, and dgamma of the weight's dtype, None without a weight.
    """
    check(dz, x, rsigma, weight, zero_centered)
    if config is not None:
        check_config(config, BwdConfig, least_ctas=1)
    elif x.numel():
        config = _choose((("M", x.shape[0]), ("N", x.shape[1])), DTYPE_NAMES[x.dtype], "none", _CALL_OPTIONS)
    return gradients(dz, x, rsigma, weight, None, zero_centered, with_dgamma, config)


def check(dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, weight: torch.Tensor | None, zero_centered: bool) -> None:
    """Check the arguments of a backward."""
    check_matrix("x", x)
    check_like("dz", dz, tuple(x.shape), x.dtype, x.device)
    check_like("rsigma", rsigma, (x.shape[0],), torch.float32, x.device)
    check_weight(weight, x, zero_centered)


OP = Op(
    name="rmsnorm_bwd",
    options={"zero_centered": (False, True)},
    free_options=("zero_centered",),
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        *te.BACKWARD,
        Variant("optimized", run_of(rmsnorm_bwd, "dx", "dgamma"), BwdConfig, space, invalid, default),
        *peers.BACKWARD,
    ),
    module=__name__,
    **CONTRACT,
)
_CALL_OPTIONS = tuple((option, values[0]) for option, values in OP.options.items())
"""The options under which a call looks its config up."""
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
