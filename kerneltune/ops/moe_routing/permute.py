"""Copy the rows of tokens to their experts: each row of x is read once and written to the places of all its choices.

Source: the permute of MoE training frameworks, by their contract.
"""

from dataclasses import dataclass

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import all_same_bits
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE
from kerneltune.kernel_lib.check_values import draw
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.moe_routing import peers
from kerneltune.ops.moe_routing.contract import CALL_OPTIONS, ROWS, check_index, check_rows, routed
from kerneltune.ops.moe_routing.kernels.rows import scatter_rows
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Hold the part of a matrix of tokens that a program copies.

    Attributes:
        rows: tokens of a program.
        cols: columns that a program copies at a time, a power of two.
        warps: warps of a program.
    """

    rows: int
    cols: int
    warps: int


def space(case: Case) -> Space:
    """Offer 1 to 8 tokens per program, and from 256 columns to a whole row."""
    padded = max(256, next_power_of_2(case["H"]))
    return {
        "rows": (1, 2, 4, 8),
        "cols": tuple(cols for cols in (256, 512, 1024, 2048, 4096, 8192) if cols <= padded),
        "warps": (1, 2, 4, 8),
    }


def invalid(case: Case, config: RowsConfig) -> str | None:
    """Say why a config cannot be worth running: 16 to 128 bytes of a row per thread."""
    size = config.rows * config.cols * ITEMSIZE[case.dtype] / (32 * config.warps)
    if config.cols > max(256, next_power_of_2(case["H"])):
        return f"{config.cols} columns of {case['H']}"
    return None if 16 <= size <= 128 else f"{size:g} bytes per thread"


def default(case: Case) -> RowsConfig:
    """Return a config for any shape, by rule: 32 bytes per thread, in rows as long as eight warps take them."""
    itemsize = ITEMSIZE[case.dtype]
    cols = min(max(256, next_power_of_2(case["H"])), 8192 // itemsize)
    warps = max(1, min(8, cols * itemsize // 1024))
    rows = max(1, 1024 * warps // (cols * itemsize))
    return RowsConfig(rows, cols, warps)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x (T, H), places (T, K) and offs (E,)."""
    index = routed(case, device, seed)
    x = draw("normal_", (case["T"], case["H"]), getattr(torch, case.dtype), device, seed)
    return {"x": x, "places": index["places"], "offs": index["offs"]}


def reference(inputs: Inputs) -> Outputs:
    """Copy rows by plain torch."""
    x, places = inputs["x"], inputs["places"]
    T, K = places.shape
    flat = places.reshape(-1).long()
    there = flat >= 0
    y = x.new_zeros((T * K, x.shape[1]))
    y[flat[there]] = x.repeat_interleave(K, 0)[there]
    return {"y": y}


def traffic(case: Case) -> Traffic:
    """Count the bytes of x, places and offs read; the rows written."""
    T, H, K, size = case["T"], case["H"], case["K"], ITEMSIZE[case.dtype]
    return Traffic(size * T * H + 4 * (T * K + case["E"]), size * T * K * H)


def _results(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.new_empty((places.numel(), x.shape[1]))


@torch_operator(_results)
@on_its_device
def moe_permute(x: torch.Tensor, places: torch.Tensor, offs: torch.Tensor, *, config: RowsConfig | None = None) -> torch.Tensor:
    """Copy rows of tokens to the places of their experts, as `moe_sort` found them.

    Args:
        x: (T, H) bf16, fp16 or fp32, elements of a row adjacent.
        places: (T, K) int32, the row of each pair; -1 for none. Rows outside the result are not written.
        offs: (E,) int32, where each expert's rows end.
        config: None takes the best known config.

    Returns:
        (T K, H) of x's type: y[places[t, j]] = x[t], and zeros behind the last expert's rows.
    """
    check_rows("x", x)
    T, H = x.shape
    check_index("places", places, (T, None), x.device)
    check_index("offs", offs, (None,), x.device)
    K, E = places.shape[1], offs.shape[0]
    y = _results(x, places)
    if y.numel():
        sizes = (("T", T), ("H", H), ("E", E), ("K", K))
        c = _choose(sizes, DTYPE_NAMES[x.dtype], "none", CALL_OPTIONS) if config is None else config
        scatter_rows[(cdiv(T, c.rows), cdiv(H, c.cols))](
            x, y, places, offs[-1:], T, T * K, x.stride(0), K=K, H=H, ROWS=c.rows, COLS=c.cols, num_warps=c.warps
        )
    return y


OP = Op(
    name="moe_permute",
    inputs=inputs,
    reference=reference,
    compare=all_same_bits,
    traffic=traffic,
    variants=(
        peers.PERMUTE.eager,
        Variant("optimized", run_of(moe_permute, "y"), RowsConfig, space, invalid, default),
        peers.PERMUTE.compiled,
    ),
    module=__name__,
    **ROWS,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
