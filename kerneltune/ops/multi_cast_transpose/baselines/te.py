"""The published design: one launch per weight of TransformerEngine's Triton cast-transpose, under delayed scaling.

Source: ROCm/TransformerEngine's te_cast_transpose_noop_triton, written anew from its contract: a tile is stored twice from
the registers that loaded it, where sizes are multiples of 16, programs are ordered in groups of row blocks, every tile
raises amax by atomic max; NaN does not.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.functions import constant
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES, FP8_MAX, quantize, reciprocal, wide
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Variant

_PUBLISHED = {64: (1, 8), 128: (8,)}
"""Row groups that were published for a tile."""


@dataclass(frozen=True, slots=True)
class TeCastConfig:
    """Config of the cast of a weight.

    Attributes:
        block: rows and columns of a tile.
        group: row blocks that follow each other.
        warps: warps of a program.
    """

    block: int
    group: int
    warps: int


@triton.jit
def _cast_transpose_te(
    x_ptr, q_ptr, qt_ptr, scale_ptr, amax_ptr, scale_inv_ptr, M, N,
    FP8_MAX: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Cast and transpose a tile. WHOLE: M and N are multiples of 16.

    For other sizes x is loaded a second time, by columns: of one tile of fp8 that is stored both ways byte by byte ptxas
    12.8 makes wrong code.
    """
    down, across = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    rows = (first + inside % height) * BLOCK + tl.arange(0, BLOCK)
    cols = inside // height * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, reciprocal(scale))
    x = tl.load(x_ptr + wide(rows)[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    q = quantize(x, scale, FP8_MAX, q_ptr.dtype.element_ty)
    tl.store(q_ptr + wide(rows)[:, None] * N + cols[None, :], q, mask=mask)
    if WHOLE:
        tl.store(qt_ptr + wide(cols)[None, :] * M + rows[:, None], q, mask=mask)
    else:
        by_columns = tl.load(x_ptr + wide(rows)[None, :] * N + cols[:, None], mask=tl.trans(mask), other=0.0).to(tl.float32)
        q = quantize(by_columns, scale, FP8_MAX, q_ptr.dtype.element_ty)
        tl.store(qt_ptr + wide(cols)[:, None] * M + rows[None, :], q, mask=tl.trans(mask))
    m = tl.where(x == x, tl.abs(x), 0.0)
    tl.atomic_max(amax_ptr, tl.max(tl.max(m, axis=1), axis=0), sem="relaxed")


def cast_transpose(
    x: torch.Tensor,
    q: torch.Tensor,
    qt: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    scale_inv: torch.Tensor,
    fp8_format: str,
    c: TeCastConfig,
) -> None:
    """Cast x (M, N) into q (M, N) and qt (N, M); scale, amax and scale_inv are (1,) fp32."""
    M, N = x.shape
    _cast_transpose_te[(cdiv(M, c.block) * cdiv(N, c.block),)](
        x, q, qt, scale, amax, scale_inv, M, N,
        FP8_MAX=FP8_MAX[fp8_format], WHOLE=M % 16 == 0 and N % 16 == 0, BLOCK=c.block, GROUP=c.group, num_warps=c.warps,
    )  # fmt: skip


def run(inputs: Inputs, config: TeCastConfig) -> Outputs:
    """Run weight by weight on a case's inputs."""
    scales, amaxes, dtype = inputs["scales"], inputs["amaxes"], FP8_DTYPES[inputs["fp8_format"]]
    scale_inv = torch.empty_like(scales)
    outputs: dict[str, torch.Tensor] = {"scale_inv": scale_inv}
    for i in range(scales.shape[0]):
        x, one = inputs[f"x{i}"], slice(i, i + 1)
        q, qt = (torch.empty(shape, dtype=dtype, device=x.device) for shape in (x.shape, x.shape[::-1]))
        cast_transpose(x, q, qt, scales[one], amaxes[one], scale_inv[one], inputs["fp8_format"], config)
        outputs |= {f"q{i}": q, f"qt{i}": qt}
    return outputs


def invalid(_case: Case, config: TeCastConfig) -> str | None:
    """Say whether a config was published."""
    published = config.group in _PUBLISHED[config.block] and config.warps == config.block // 16
    return None if published else "not among the published configs"


def unsupported(case: Case) -> str | None:
    """Refuse more weights than a graph of single launches is recorded for, and empty weights."""
    if case["M"] == 0 or case["N"] == 0:
        return "nothing to launch"
    return None if case["T"] <= 256 else "one launch per matrix is recorded for 256 matrices at most"


_SPACE = constant({"block": (64, 128), "group": (1, 8), "warps": (4, 8)})
"""The sizes of the three published configs."""
BASELINE = Variant("baseline", run, TeCastConfig, _SPACE, invalid, constant(TeCastConfig(64, 1, 4)), unsupported)
