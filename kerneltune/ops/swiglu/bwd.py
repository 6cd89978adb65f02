"""Differentiate y = silu(gate) * up, where gate and up are the halves of each row, in one launch that reads every value once.

Because torch.compile writes both halves as a concatenation, it computes each half for all columns and drops half of the
values: 1.3 ms for 196608 x 2 x 1408 in bf16, twice the time that the bytes take; H200, 2026-11-23. Source: the gate of
Llama's feed-forward layers.
"""

from dataclasses import dataclass
from functools import partial

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_apart, check_matrix
from kerneltune.kernel_lib.check_values import draw
from kerneltune.kernel_lib.compiled import DEFAULT, EAGER, torch_run
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.swiglu.kernels.gradient import gate_gradient
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant


@dataclass(frozen=True, slots=True)
class SwigluConfig:
    """Hold the part of a matrix that a program differentiates.

    Attributes:
        rows: rows of a program.
        cols: columns of each half that a program takes, a power of two.
        warps: warps of a program.
    """

    rows: int
    cols: int
    warps: int


def space(case: Case) -> Space:
    """Offer 1 to 8 rows and 128 to 2048 columns of each half."""
    padded = max(128, next_power_of_2(case["N"]))
    return {
        "rows": (1, 2, 4, 8),
        "cols": tuple(cols for cols in (128, 256, 512, 1024, 2048) if cols <= padded),
        "warps": (1, 2, 4, 8),
    }


def invalid(case: Case, config: SwigluConfig) -> str | None:
    """Say why a config cannot be worth running: 16 to 64 bytes of each half of a row per thread."""
    size = config.rows * config.cols * ITEMSIZE[case.dtype] / (32 * config.warps)
    if config.cols > max(128, next_power_of_2(case["N"])):
        return f"{config.cols} columns of {case['N']}"
    return None if 16 <= size <= 64 else f"{size:g} bytes per thread"


def default(case: Case) -> SwigluConfig:
    """Return a config for any shape, by rule: a whole row of up to 2048 columns, 16 bytes of each half per thread.

    H200, 2026-11-23, bf16: 680 µs of 196608 x 1408, 490 of 262144 x 768; tiles of 128 columns 705 and 514.
    """
    cols = min(2048, max(128, next_power_of_2(case["N"])))
    warps = max(1, cols // 256)
    return SwigluConfig(max(1, 512 * warps // (cols * ITEMSIZE[case.dtype])), cols, warps)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw dy (M, N) and x (M, 2N)."""
    M, N, dtype = case["M"], case["N"], getattr(torch, case.dtype)
    sizes = {"dy": (M, N), "x": (M, 2 * N)}
    return {name: draw("normal_", size, dtype, device, seed + i) for i, (name, size) in enumerate(sizes.items())}


def reference(inputs: Inputs) -> Outputs:
    """Differentiate in fp64, term by term."""
    dy, (gate, up) = inputs["dy"].double(), inputs["x"].double().chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    dx = torch.cat([dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid], dim=1)
    return {"dx": dx.to(inputs["x"].dtype)}


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare within two roundings of the result's type, and the fp32 rounding errors of terms that cancel."""
    want = expected["dx"]
    if outputs["dx"].dtype != want.dtype:
        return [f"dx: {outputs['dx'].dtype}, expected {want.dtype}"]
    terms = (inputs["dy"].float() * inputs["x"].float()[:, inputs["dy"].shape[1] :]).abs()
    return close("dx", outputs["dx"], want, 2 * torch.finfo(want.dtype).eps, 1e-6 * torch.cat([terms, terms], 1) + 1e-6)


def traffic(case: Case) -> Traffic:
    """Count the bytes of dy and x read; of dx written."""
    half = case["M"] * case["N"] * ITEMSIZE[case.dtype]
    return Traffic(3 * half, 2 * half)


def _in_torch(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    """Differentiate as autograd does silu(gate) * up."""
    gate, up = x.chunk(2, dim=1)
    dgate = torch.ops.aten.silu_backward(dy * up, gate)
    return (torch.cat([dgate, dy * torch.nn.functional.silu(gate)], dim=1),)


_run = torch_run(_in_torch, "dy x", "dx")


def _results(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch_operator(_results)
@on_its_device
def swiglu_bwd(dy: torch.Tensor, x: torch.Tensor, *, config: SwigluConfig | None = None) -> torch.Tensor:
    """Differentiate y = silu(x[:, :N]) * x[:, N:] with respect to x; in fp32, rounded once.

    Args:
        dy: (M, N) of x's type, elements of a row adjacent.
        x: (M, 2N) bf16, fp16 or fp32, elements of a row adjacent.
        config: None takes the best known config.

    Returns:
        (M, 2N) of x's type, contiguous.
    """
    check_matrix("x", x)
    check_matrix("dy", dy)
    (M, N), width = dy.shape, x.shape[1]
    if x.shape != (M, 2 * N) or x.dtype != dy.dtype or x.device != dy.device:
        raise ValueError(
            f"x must be ({M}, {2 * N}) {dy.dtype} on {dy.device} as dy is, got {tuple(x.shape)} {x.dtype} on {x.device}"
        )
    dx = x.new_empty((M, width))
    if dx.numel():
        if config is None:
            config = _choose((("M", M), ("N", N)), DTYPE_NAMES[x.dtype])
        check_apart("x", x, config.rows)
        check_apart("dy", dy, config.rows)
        gate_gradient[(cdiv(M, config.rows), cdiv(N, config.cols))](
            dy, x, dx, M, dy.stride(0), x.stride(0), N=N, ROWS=config.rows, COLS=config.cols, num_warps=config.warps
        )
    return dx


OP = Op(
    name="swiglu_bwd",
    axes=("M", "N"),
    free_axes=("M",),
    dtypes=tuple(DTYPE_NAMES.values()),
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        Variant("baseline", partial(_run, EAGER)),
        Variant("optimized", run_of(swiglu_bwd, "dx"), SwigluConfig, space, invalid, default),
        Variant("compile", partial(_run, DEFAULT), requires=("torch",), compiles=True),
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
