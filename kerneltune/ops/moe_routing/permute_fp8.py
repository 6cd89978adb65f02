"""Copy fp8 rows of tokens to their experts in both layouts that grouped products take, in one pass.

Tokens are cast before they are copied: K times fewer elements, and under a scale of the whole tensor the same bytes. Source:
the permute of MoE training frameworks, by their contract.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.kernel_lib.check_values import draw
from kerneltune.kernel_lib.functions import constant, run_of, torch_operator
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT, align_groups, aligned_size, aligned_starts, bounds
from kerneltune.kernel_lib.launch import on_its_device, resident
from kerneltune.ops.moe_routing import peers
from kerneltune.ops.moe_routing.contract import CALL_OPTIONS, CONTRACT, check_index, check_rows, routed
from kerneltune.ops.moe_routing.kernels.both import clear_rest, gather_both
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
"""Types of the rows that are gathered: fp8, or its bytes."""


@dataclass(frozen=True, slots=True)
class PermuteFp8Config:
    """Hold the tile that a program copies.

    Attributes:
        rows: rows of a tile, 64 or 128.
        cols: columns of a tile.
        warps: warps of a program.
    """

    rows: int
    cols: int
    warps: int


def invalid(_case: Case, config: PermuteFp8Config) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    size = config.rows * config.cols / (32 * config.warps)
    if config.rows not in (64, 128):
        return f"{config.rows} rows do not divide {GROUP_ALIGNMENT}"
    return None if 32 <= size <= 256 else f"{size:g} bytes per thread"


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x (T, H) of bytes, pairs (T K,) and offs (E,)."""
    x = draw("random_", (case["T"], case["H"]), torch.uint8, device, seed, 0, 256)
    index = routed(case, device, seed)
    return {"x": x, "pairs": index["pairs"], "offs": index["offs"], "top_k": case["K"]}


def reference(inputs: Inputs) -> Outputs:
    """Copy by plain torch."""
    x, pairs, offs = inputs["x"], inputs["pairs"].long(), inputs["offs"]
    q = x.new_zeros((pairs.shape[0], x.shape[1]))
    q[pairs >= 0] = x[pairs[pairs >= 0] // inputs["top_k"]]
    return {"q": q, "q_t": align_groups(q, offs)}


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare every byte that is defined: columns between groups are not."""
    q_t = outputs["q_t"]
    if q_t.shape != expected["q_t"].shape:
        return [f"q_t: {tuple(q_t.shape)}, expected {tuple(expected['q_t'].shape)}"]
    defined = torch.zeros(q_t.shape[0], dtype=torch.bool, device=q_t.device)
    for (start, end), to in zip(bounds(inputs["offs"]), aligned_starts(inputs["offs"]).tolist(), strict=True):
        defined[to : to + cdiv(end - start, GROUP_ALIGNMENT) * GROUP_ALIGNMENT] = True
    got, want = q_t[defined].contiguous(), expected["q_t"][defined]
    return [*same_bits("q", outputs["q"], expected["q"]), *same_bits("q_t", got, want)]


def traffic(case: Case) -> Traffic:
    """Count the bytes of x, pairs and offs read once; both layouts written."""
    T, H, M = case["T"], case["H"], case["T"] * case["K"]
    return Traffic(T * H + 4 * (M + case["E"]), (M + aligned_size(M, case["E"])) * H)


class PermutedFp8(NamedTuple):
    """The rows of experts in both layouts.

    Attributes:
        q: (M, H), contiguous, zeros behind the last expert's rows.
        q_t: (aligned_size, H), column-major: aligned groups, for `fp8_grouped_gemm(aligned=True)`.
    """

    q: torch.Tensor
    q_t: torch.Tensor


def _results(x: torch.Tensor, pairs: torch.Tensor, offs: torch.Tensor) -> PermutedFp8:
    (M,), H = pairs.shape, x.shape[1]
    return PermutedFp8(x.new_empty((M, H)), x.new_empty((H, aligned_size(M, offs.shape[0]))).t())


@torch_operator(_results)
@on_its_device
def moe_permute_fp8(
    x: torch.Tensor, pairs: torch.Tensor, offs: torch.Tensor, top_k: int, *, config: PermuteFp8Config | None = None
) -> PermutedFp8:
    """Copy fp8 rows to their experts as rows and, transposed, as aligned groups.

    Args:
        x: (T, H) e4m3, e5m2 or uint8, elements of a row adjacent.
        pairs: (M,) int32, the pair token * top_k + choice of each row, as `moe_sort` returns; -1 for none.
        offs: (E,) int32, where each expert's rows end.
        top_k: choices of a token.
        config: None takes the best known config.
    """
    check_rows("x", x, _FP8)
    check_index("pairs", pairs, (None,), x.device)
    check_index("offs", offs, (None,), x.device)
    (T, H), M, G = x.shape, pairs.shape[0], offs.shape[0]
    if top_k < 1 or T * top_k != M:
        raise ValueError(f"pairs must be {T} tokens times {top_k=}, got {M}")
    q, q_t = _results(x, pairs, offs)
    if q.numel():
        c = config or _choose((("T", T), ("H", H), ("E", G), ("K", top_k)), "uint8", "fp8", CALL_OPTIONS)
        width = q_t.shape[0]
        blocks = width // c.rows
        as_bytes = [t.view(torch.uint8) for t in (x, q, q_t.t())]
        gather_both[(blocks * cdiv(H, c.cols),)](
            *as_bytes, pairs, offs, T, M, blocks, width, x.stride(0), K=top_k, H=H, G=G,
            GROUPS_LOG2=(G - 1).bit_length(), ALIGNMENT=GROUP_ALIGNMENT, ROWS=c.rows, COLS=c.cols, num_warps=c.warps,
        )  # fmt: skip
        clear_rest[(resident(x.device, 4),)](as_bytes[1], offs, M, H=H, G=G, COLS=1024, num_warps=4)
    return PermutedFp8(q, q_t)


_SPACE = constant({"rows": (64, 128), "cols": (64, 128, 256), "warps": (2, 4, 8)})
"""Tiles of 64 or 128 rows and 64 to 256 bytes of each. The default is the fastest of five configs at sizes of models with
16B and 671B parameters (H200, 2026-11-23)."""
OP = Op(
    name="moe_permute_fp8",
    dtypes=("uint8",),
    quants=("fp8",),
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        peers.PERMUTE_FP8.eager,
        Variant("optimized", run_of(moe_permute_fp8), PermuteFp8Config, _SPACE, invalid, constant(PermuteFp8Config(128, 256, 8))),
        peers.PERMUTE_FP8.compiled,
    ),
    module=__name__,
    **CONTRACT,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
