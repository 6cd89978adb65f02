"""Transpose an fp8 matrix byte by byte, into the layout that the second operand of a scaled product needs.

Source: the copy that torchao makes after its tensor-wise casts.
"""

from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.kernel_lib.check_values import draw
from kerneltune.kernel_lib.functions import constant, run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.kernel_lib.tl_transpose import transpose_bytes
from kerneltune.ops.fp8.contract import FP8
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

_ROW_BLOCKS = 512
"""Tiles that follow each other down the matrix; with 8 an H200 took 1 to 7 % longer in seven shapes (2026-11-21)."""


@dataclass(frozen=True, slots=True)
class TransposeConfig:
    """Config of a transpose of bytes.

    Attributes:
        rows: rows of a tile.
        cols: columns of a tile.
        warps: warps of a program, which has one tile.
    """

    rows: int
    cols: int
    warps: int


def invalid(_case: Case, config: TransposeConfig) -> str | None:
    """Say why a config cannot be worth running."""
    per_thread = config.rows * config.cols // (32 * config.warps)
    return None if 16 <= per_thread <= 256 else f"{per_thread} bytes per thread"


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x (M, N) out of all bytes."""
    x = draw("random_", (case["M"], case["N"]), torch.uint8, device, seed, 0, 256)
    return {"x": x.view(FP8[str(case.option("fp8_format"))])}


def reference(inputs: Inputs) -> Outputs:
    """Transpose byte for byte."""
    return {"q": inputs["x"].view(torch.uint8).t().contiguous().view(inputs["x"].dtype)}


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare every byte, of NaN too."""
    q, want = outputs["q"], expected["q"]
    if q.dtype != want.dtype or not q.is_contiguous():
        return [f"q: {q.dtype} strides {q.stride()}, expected {want.dtype} contiguous"]
    return same_bits("q", q.view(torch.uint8), want.view(torch.uint8))


def traffic(case: Case) -> Traffic:
    """Return the bytes of x, read and written once."""
    return Traffic(case["M"] * case["N"], case["M"] * case["N"])


def run_copy(inputs: Inputs, _config: None) -> Outputs:
    """Copy as torchao does after its tensor-wise casts."""
    return {"q": inputs["x"].t().contiguous()}


def _results(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)


@torch_operator(_results)
@on_its_device
def fp8_transpose_2d(x: torch.Tensor, *, config: TransposeConfig | None = None) -> torch.Tensor:
    """Transpose an fp8 matrix, byte for byte, NaN included.

    Args:
        x: (M, N) of an fp8 type; rows may be any distance apart, elements of a row must be adjacent.
        config: None takes the best known config.

    Returns:
        (N, M) of x's type, contiguous.
    """
    if x.ndim != 2 or x.dtype not in FP8.values():
        raise ValueError(f"x must be a matrix of an fp8 type ({', '.join(FP8)}), got shape {tuple(x.shape)} {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"elements of a row of x must be adjacent, got strides {x.stride()}")
    M, N = x.shape
    q = _results(x)
    if not x.numel():
        return q
    c: TransposeConfig = config or _choose((("M", M), ("N", N)), "uint8", "fp8", (("fp8_format", "e4m3"),))
    transpose_bytes[(cdiv(M, c.rows) * cdiv(N, c.cols),)](
        x.view(torch.uint8), q.view(torch.uint8), M, N, x.stride(0),
        ROWS=c.rows, COLS=c.cols, GROUP=_ROW_BLOCKS, BACKWARDS=False, num_warps=c.warps,
    )  # fmt: skip
    return q


_SPACE = constant({"rows": (64, 128, 256), "cols": (64, 128, 256), "warps": (2, 4, 8)})
"""Tiles whose rows and columns have two to eight memory sectors."""
OP = Op(
    name="fp8_transpose_2d",
    axes=("M", "N"),
    free_axes=("M",),
    dtypes=("uint8",),
    quants=("fp8",),
    options={"fp8_format": tuple(FP8)},
    free_options=("fp8_format",),
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        Variant("baseline", run_copy, requires=("torch",)),
        Variant(
            "optimized", run_of(fp8_transpose_2d, "q"), TransposeConfig, _SPACE, invalid, constant(TransposeConfig(64, 128, 4))
        ),
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
