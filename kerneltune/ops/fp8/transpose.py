"""Transpose of an fp8 matrix, bytes as they are: the layout that the other operand of a scaled product wants.

May import arguments, cache, spec, tl_lib, tl_transpose, launch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kerneltune import cache
from kerneltune.kernel_lib.arguments import check_turned
from kerneltune.kernel_lib.launch import on_its_device, resident, too_much_shared
from kerneltune.kernel_lib.tl_lib import wide
from kerneltune.kernel_lib.tl_transpose import store_transposed
from kerneltune.ops.fp8.reference import FP8
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Space, Traffic


@dataclass(frozen=True, slots=True)
class TransposeConfig:
    """rows, cols: of a tile; warps: of a program; ctas: programs per multiprocessor, each looping over tiles, or 0 for a
    program per tile; stages: depth of that loop's load pipeline."""

    rows: int
    cols: int
    warps: int
    ctas: int
    stages: int


@dataclass(frozen=True, slots=True)
class BytesConfig:
    """rows, cols: of a tile; warps."""

    rows: int
    cols: int
    warps: int


@triton.jit
def _load_quarter(x_ptr, stride, left, live, k: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    """The rows 4i + k of a tile."""
    rows = tl.arange(0, ROWS // 4) * 4 + k
    mask = (rows < left)[:, None]
    if not EVEN:
        mask = mask & live[None, :]
    offsets = rows[:, None] * stride + tl.arange(0, COLS)[None, :]
    return tl.load(x_ptr + offsets, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _transpose_words(
    x_ptr, q_ptr, M, N, stride, tiles,
    ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q[n, m] = x[m, n]: four interleaved sub-tiles, of which four bytes make a word, and words are transposed."""
    lanes = tl.arange(0, COLS)
    blocks = tl.cdiv(M, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        first_row = wide(tile % blocks) * ROWS
        first_col = tile // blocks * COLS
        left = (M - first_row).to(tl.int32)
        live = first_col + lanes < N
        tile_ptr = x_ptr + first_row * stride + first_col
        qs = (
            _load_quarter(tile_ptr, stride, left, live, 0, ROWS, COLS, EVEN),
            _load_quarter(tile_ptr, stride, left, live, 1, ROWS, COLS, EVEN),
            _load_quarter(tile_ptr, stride, left, live, 2, ROWS, COLS, EVEN),
            _load_quarter(tile_ptr, stride, left, live, 3, ROWS, COLS, EVEN),
        )
        base = wide(first_col) * M + first_row
        store_transposed(q_ptr, base, M, 0, tl.minimum(left, ROWS), live, qs, False, EVEN, PACKED)


@triton.jit
def _transpose_bytes(x_ptr, q_ptr, M, N, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :]), mask=mask, other=0)
    tl.store(q_ptr + (cols.to(tl.int64)[:, None] * M + rows[None, :]), tl.trans(x), mask=tl.trans(mask))


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
    check_turned("x", x.shape[0])
    M, N = x.shape
    q = torch.empty((N, M), dtype=x.dtype, device=x.device)
    if not x.numel():
        return q
    c: TransposeConfig = config or _choose((("M", M), ("N", N)), "uint8", "fp8", (("fp8_format", "e4m3"),))
    tiles = cdiv(M, c.rows) * cdiv(N, c.cols)
    programs = min(tiles, resident(x.device, c.ctas)) if c.ctas else tiles
    _transpose_words[(programs,)](
        x.view(torch.uint8), q.view(torch.uint8), M, N, x.stride(0), tiles,
        ROWS=c.rows, COLS=c.cols, EVEN=N % c.cols == 0, PACKED=M % 4 == 0, STAGES=c.stages, num_warps=c.warps,
    )  # fmt: skip
    return q


def space(_case: Case) -> Space:
    """Tiles of which a row of either side is two memory sectors to eight."""
    return {"rows": (64, 128, 256), "cols": (64, 128, 256), "warps": (4, 8), "ctas": (0, 2, 4, 8), "stages": (1, 2, 3)}


def valid(_case: Case, config: TransposeConfig) -> str | None:
    """Why a config cannot run, or cannot be worth running."""
    per_thread = config.rows * config.cols / (32 * config.warps)
    if not 32 <= per_thread <= 256:
        return f"{per_thread:g} bytes per thread"
    if (config.ctas == 0) != (config.stages == 1):
        return "a pipeline of loads needs a loop over tiles, and the loop needs the pipeline"
    if 32 * config.warps * config.ctas * (per_thread / 4 * 2.5 + 32) > 65536 + 8192:
        return "more registers than a multiprocessor has"
    shared = max(1, config.ctas) * config.stages * config.rows * config.cols
    return too_much_shared(shared)


def default(_case: Case) -> TransposeConfig:
    """A config for any shape."""
    return TransposeConfig(rows=128, cols=128, warps=8, ctas=0, stages=1)


_choose = cache.Chooser("fp8_transpose_2d", TransposeConfig, valid, default, ("M",))


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


def run_bytes(inputs: Inputs, config: BytesConfig) -> Outputs:
    """A program per tile, transposed as bytes."""
    x = inputs["x"].view(torch.uint8)
    M, N = x.shape
    q = torch.empty((N, M), dtype=torch.uint8, device=x.device)
    _transpose_bytes[(cdiv(M, config.rows), cdiv(N, config.cols))](
        x, q, M, N, x.stride(0), ROWS=config.rows, COLS=config.cols, num_warps=config.warps
    )
    return {"q": q.view(inputs["x"].dtype)}


def run_eager(inputs: Inputs, _config: None) -> Outputs:
    """torch's copy."""
    return {"q": inputs["x"].t().contiguous()}


def bytes_space(_case: Case) -> Space:
    """Square and oblong tiles."""
    return {"rows": (64, 128), "cols": (64, 128), "warps": (4, 8)}


def bytes_default(_case: Case) -> BytesConfig:
    """A config for any shape."""
    return BytesConfig(rows=64, cols=64, warps=4)
