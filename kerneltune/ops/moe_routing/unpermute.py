"""Sum the rows of each token's experts, times the router's weights: a gather, so that nothing is accumulated in memory."""

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import close
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

WEIGHTED = (True, False)
_choose = cache.Chooser(
    "moe_unpermute", RowsConfig, rows_valid, rows_default, ("T", "E", "K"), free_options=("routing", "weighted")
)


@on_its_device
def moe_unpermute(
    y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None, *, config: RowsConfig | None = None
) -> torch.Tensor:
    """Sum the rows of each token's choices, in fp32 and in the order of the choices, rounded once; the same in every run.

    Args:
        y: (M, H) bf16, fp16 or fp32, elements of a row adjacent.
        places: (T, K) int32, the row of each pair; one outside [0, M) adds nothing.
        weights: (T, K) bf16, fp16 or fp32, contiguous, what each row is multiplied by; None adds the rows as they are, which
            is the gradient of `moe_permute`.
        config: None takes the best known config.

    Returns:
        (T, H) of y's type.

    Raises:
        ValueError: a wrong shape, type, device or stride, which it names.
    """
    check_rows("y", y)
    check_index("places", places, (None, None), y.device)
    check_router_weights(weights, places)
    (T, K), (M, H) = places.shape, y.shape
    out = y.new_empty((T, H))
    if out.numel():
        if config is None:
            options = (("routing", "routed"), ("weighted", weights is not None))
            config = _choose((("T", T), ("H", H), ("E", 1), ("K", K)), DTYPE_NAMES[y.dtype], "none", options)
        rows.combine_rows[(cdiv(T, config.rows), cdiv(H, config.cols))](
            y, out, places, y if weights is None else weights, T, M, y.stride(0),
            K=K, H=H, WEIGHTED=weights is not None, ROWS=config.rows, COLS=config.cols, num_warps=config.warps,
        )  # fmt: skip
    return out


def check_router_weights(weights: torch.Tensor | None, places: torch.Tensor) -> None:
    """Check that weights, if there are any, are those of these places.

    Raises:
        ValueError: they are not.
    """
    if weights is None:
        return
    fits = weights.shape == places.shape and weights.dtype in DTYPE_NAMES and weights.device == places.device
    if not fits or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous {tuple(places.shape)} of {', '.join(DTYPE_NAMES.values())} on {places.device}, "
            f"got {tuple(weights.shape)} {weights.dtype} on {weights.device}, strides {weights.stride()}"
        )


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Return y (T K, H), places (T, K) and, if weighted, weights (T, K) fp32."""
    T, H, K = case["T"], case["H"], case["K"]
    _, places, _ = sorted_pairs(experts_of(case, "cpu", seed), case["E"])
    weights = values((T, K), "float32", device, seed + 1) if case.option("weighted") else None
    return {"y": values((T * K, H), case.dtype, device, seed), "places": places.to(device), "weights": weights}


def reference(inputs: Inputs) -> Outputs:
    """Sum in fp32; beside it what the order of fp32 sums may change."""
    y, places, weights = inputs["y"].float(), inputs["places"].long(), inputs["weights"]
    if not y.shape[0]:
        return {"out": inputs["y"].new_zeros((places.shape[0], y.shape[1])), "size": y.new_zeros(places.shape[0], y.shape[1])}
    rows_of = y[places.clamp(min=0)] * (places >= 0)[..., None]
    if weights is not None:
        rows_of = rows_of * weights[..., None]
    return {"out": rows_of.sum(1).to(inputs["y"].dtype), "size": rows_of.abs().sum(1)}


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare within one rounding of the result and those of fp32 sums."""
    want = expected["out"]
    if outputs["out"].dtype != want.dtype:
        return [f"out: {outputs['out'].dtype}, expected {want.dtype}"]
    return close("out", outputs["out"], want, torch.finfo(want.dtype).eps, 1e-6 * expected["size"] + 1e-30)


def traffic(case: Case) -> Traffic:
    """Count the rows, places and weights read; the sums written."""
    T, H, K, size = case["T"], case["H"], case["K"], ITEMSIZE[case.dtype]
    per_pair = 8 if case.option("weighted") else 4
    return Traffic(size * T * K * H + per_pair * T * K, size * T * H)


def run(inputs: Inputs, config: RowsConfig | None) -> Outputs:
    """Run `moe_unpermute` on a case's inputs."""
    return {"out": moe_unpermute(inputs["y"], inputs["places"], inputs["weights"], config=config)}
