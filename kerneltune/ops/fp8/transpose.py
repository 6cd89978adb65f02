"""Transpose of an fp8 matrix, bytes as they are: the layout that the other operand of a scaled product wants.

May import cache, spec, launch, tl_transpose.
"""

from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.kernel_lib.tl_transpose import transpose_bytes
from kerneltune.ops.fp8.reference import FP8
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Space, Traffic

_ROW_BLOCKS = 512
"""Tiles that follow each other down the matrix; with 8 an H200 took 1 to 7 % longer in seven shapes (2026-11-21)."""


@dataclass(frozen=True, slots=True)
class TransposeConfig:
    """rows, cols: of a tile; warps: of a program, which has one tile."""

    rows: int
    cols: int
    warps: int


@on_its_device
def fp8_transpose_2d(x: torch.Tensor, *, config: TransposeConfig | None = None) -> torch.Tensor:
    """The transpose of an fp8 matrix, copied byte for byte, NaN included.

    Args:
        x: (M, N) of an fp8 type; rows may be any distance apart, elements of a row must be adjacent.
        config: None takes the best known config.

    Returns:
        (N, M) of x's type, contiguous.

    Raises:
        ValueError: a wrong shape, stride or dtype, which it names.

    Source: what torchao copies after its tensor-wise casts.
    """
    if x.ndim != 2 or x.dtype not in FP8.values():
        raise ValueError(f"x must be a matrix of an fp8 type ({', '.join(FP8)}), got shape {tuple(x.shape)} {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"elements of a row of x must be adjacent, got strides {x.stride()}")
    M, N = x.shape
    q = torch.empty((N, M), dtype=x.dtype, device=x.device)
    if not x.numel():
        return q
    c: TransposeConfig = config or _choose((("M", M), ("N", N)), "uint8", "fp8", (("fp8_format", "e4m3"),))
    transpose_bytes[(cdiv(M, c.rows) * cdiv(N, c.cols),)](
        x.view(torch.uint8), q.view(torch.uint8), M, N, x.stride(0),
        ROWS=c.rows, COLS=c.cols, GROUP=_ROW_BLOCKS, BACKWARDS=False, num_warps=c.warps,
    )  # fmt: skip
    return q


def space(_case: Case) -> Space:
    """Tiles of which a row of either side is two memory sectors to eight."""
    return {"rows": (64, 128, 256), "cols": (64, 128, 256), "warps": (2, 4, 8)}


def valid(_case: Case, config: TransposeConfig) -> str | None:
    """Why a config cannot be worth running."""
    per_thread = config.rows * config.cols // (32 * config.warps)
    return None if 16 <= per_thread <= 256 else f"{per_thread} bytes per thread"


def default(_case: Case) -> TransposeConfig:
    """A config for any shape."""
    return TransposeConfig(rows=64, cols=128, warps=4)


_choose = cache.Chooser("fp8_transpose_2d", TransposeConfig, valid, default, ("M",), free_options=("fp8_format",), space=space)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x (M, N) of all bytes there are."""
    x = torch.empty((case["M"], case["N"]), dtype=torch.uint8, device=device)
    if device != "meta":
        x.random_(0, 256, generator=torch.Generator(device=device).manual_seed(seed))
    return {"x": x.view(FP8[str(case.option("fp8_format"))])}


def reference(inputs: Inputs) -> Outputs:
    """Byte for byte."""
    return {"q": inputs["x"].view(torch.uint8).t().contiguous().view(inputs["x"].dtype)}


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Every byte, of NaN too."""
    q, want = outputs["q"], expected["q"]
    if q.shape != want.shape or q.dtype != want.dtype or not q.is_contiguous():
        return [f"q: {tuple(q.shape)} {q.dtype} strides {q.stride()}, expected {tuple(want.shape)} {want.dtype} contiguous"]
    wrong = int((q.view(torch.uint8) != want.view(torch.uint8)).sum())
    return [f"q: {wrong} of {want.numel()} bytes wrong"] if wrong else []


def traffic(case: Case) -> Traffic:
    """Every byte read and written once."""
    return Traffic(case["M"] * case["N"], case["M"] * case["N"])


def run(inputs: Inputs, config: TransposeConfig | None) -> Outputs:
    """`fp8_transpose_2d` on a case's inputs."""
    return {"q": fp8_transpose_2d(inputs["x"], config=config)}


def run_copy(inputs: Inputs, _config: None) -> Outputs:
    """torch's copy, as torchao makes it after its tensor-wise casts."""
    return {"q": inputs["x"].t().contiguous()}
