"""Copy the rows of tokens to their experts: each row of x is read once and written to the places of all its choices."""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.moe_routing.common import (
    RowsConfig,
    check_index,
    check_rows,
    experts_of,
    rows_default,
    rows_valid,
    sorted_pairs,
    values,
)
from kerneltune.ops.moe_routing.kernels import rows
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Traffic

_OPTIONS = (("routing", "routed"),)
_choose = cache.Chooser("moe_permute", RowsConfig, rows_valid, rows_default, ("T", "E", "K"), free_options=("routing",))


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

    Raises:
        ValueError: a wrong shape, type, device or stride, which it names.
    """
    check_rows("x", x)
    T, H = x.shape
    check_index("places", places, (T, None), x.device)
    check_index("offs", offs, (None,), x.device)
    K, E = places.shape[1], offs.shape[0]
    y = x.new_empty((T * K, H))
    if y.numel():
        sizes = (("T", T), ("H", H), ("E", E), ("K", K))
        c = _choose(sizes, DTYPE_NAMES[x.dtype], "none", _OPTIONS) if config is None else config
        rows.scatter_rows[(cdiv(T, c.rows), cdiv(H, c.cols))](
            x, y, places, offs[-1:], T, T * K, x.stride(0), K=K, H=H, ROWS=c.rows, COLS=c.cols, num_warps=c.warps
        )
    return y


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Return x (T, H), places (T, K) and offs (E,)."""
    _, places, offs = sorted_pairs(experts_of(case, "cpu", seed), case["E"])
    return {
        "x": values((case["T"], case["H"]), case.dtype, device, seed),
        "places": places.to(device),
        "offs": offs.to(device),
    }


def permuted(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Copy rows by plain torch."""
    T, K = places.shape
    flat = places.reshape(-1).long()
    there = flat >= 0
    y = x.new_zeros((T * K, x.shape[1]))
    y[flat[there]] = x.repeat_interleave(K, 0)[there]
    return y


def reference(inputs: Inputs) -> Outputs:
    """Copy rows by plain torch."""
    return {"y": permuted(inputs["x"], inputs["places"])}


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare every bit."""
    return same_bits("y", outputs["y"], expected["y"])


def traffic(case: Case) -> Traffic:
    """Count x, places and offs read; the rows written."""
    T, H, K, size = case["T"], case["H"], case["K"], ITEMSIZE[case.dtype]
    return Traffic(size * T * H + 4 * (T * K + case["E"]), size * T * K * H)


def run(inputs: Inputs, config: RowsConfig | None) -> Outputs:
    """Run `moe_permute` on a case's inputs."""
    return {"y": moe_permute(inputs["x"], inputs["places"], inputs["offs"], config=config)}
