"""Sum the rows of each token's experts, times the router's weights: a gather, so that nothing is accumulated in memory.

Shares config, space, validity and default with `moe_permute`. Source: the unpermute of MoE training frameworks.
"""

from dataclasses import replace

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE
from kerneltune.kernel_lib.check_values import draw
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.moe_routing import peers
from kerneltune.ops.moe_routing.contract import CALL_OPTIONS, OPTIONS, ROWS, check_index, check_router_weights, check_rows, routed
from kerneltune.ops.moe_routing.kernels.rows import combine_rows
from kerneltune.ops.moe_routing.permute import RowsConfig, default, invalid, space
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

_OPTIONS = {**OPTIONS, "weighted": (True, False)}
_EXPERTS = 64
"""Experts of the case that a call looks up, because a call does not know their number; at least the choices of a token."""


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw y (T K, H), places (T, K) and, if weighted, weights (T, K) fp32."""
    T, H, K = case["T"], case["H"], case["K"]
    weights = draw("normal_", (T, K), torch.float32, device, seed + 1) if case.option("weighted") else None
    y = draw("normal_", (T * K, H), getattr(torch, case.dtype), device, seed)
    return {"y": y, "places": routed(case, device, seed)["places"], "weights": weights}


def reference(inputs: Inputs) -> Outputs:
    """Sum in fp32; beside it the error that the order of fp32 sums allows."""
    y, places, weights = inputs["y"].float(), inputs["places"].long(), inputs["weights"]
    if not y.shape[0]:
        return {"out": inputs["y"].new_zeros((places.shape[0], y.shape[1])), "size": y.new_zeros(places.shape[0], y.shape[1])}
    rows_of = y[places.clamp(min=0)] * (places >= 0)[..., None]
    if weights is not None:
        rows_of = rows_of * weights[..., None]
    return {"out": rows_of.sum(1).to(inputs["y"].dtype), "size": rows_of.abs().sum(1)}


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare within the rounding of the result and of fp32 sums."""
    want = expected["out"]
    if outputs["out"].dtype != want.dtype:
        return [f"out: {outputs['out'].dtype}, expected {want.dtype}"]
    return close("out", outputs["out"], want, torch.finfo(want.dtype).eps, 1e-6 * expected["size"] + 1e-30)


def traffic(case: Case) -> Traffic:
    """Count the bytes of the rows, places and weights read; the sums written."""
    T, H, K, size = case["T"], case["H"], case["K"], ITEMSIZE[case.dtype]
    per_pair = 8 if case.option("weighted") else 4
    return Traffic(size * T * K * H + per_pair * T * K, size * T * H)


def as_called(case: Case) -> Case:
    """Return the case that a call looks up: a call knows neither the number of experts nor how tokens fall to them."""
    options = (*CALL_OPTIONS, ("weighted", case.option("weighted")))
    return replace(case, axes=_called_sizes(case["T"], case["H"], case["K"]), options=options)


def _called_sizes(T: int, H: int, K: int) -> tuple[tuple[str, int], ...]:
    return ("T", T), ("H", H), ("E", max(_EXPERTS, K)), ("K", K)


def _results(y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return y.new_empty((places.shape[0], y.shape[1]))


@torch_operator(_results)
@on_its_device
def moe_unpermute(
    y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None, *, config: RowsConfig | None = None
) -> torch.Tensor:
    """Sum the rows of each token's choices, in fp32 and in the order of the choices, rounded once; the same in every run.

    Args:
        y: (M, H) bf16, fp16 or fp32, elements of a row adjacent.
        places: (T, K) int32, the row of each pair; a place outside [0, M) adds nothing.
        weights: (T, K) bf16, fp16 or fp32, contiguous, the factor of each row; None adds the rows as they are, which
            is the gradient of `moe_permute`.
        config: None takes the best known config.

    Returns:
        (T, H) of y's type.
    """
    check_rows("y", y)
    check_index("places", places, (None, None), y.device)
    check_router_weights(weights, places)
    (T, K), (M, H) = places.shape, y.shape
    out = _results(y, places)
    if out.numel():
        if config is None:
            options = (*CALL_OPTIONS, ("weighted", weights is not None))
            config = _choose(_called_sizes(T, H, K), DTYPE_NAMES[y.dtype], "none", options)
        combine_rows[(cdiv(T, config.rows), cdiv(H, config.cols))](
            y, out, places, y if weights is None else weights, T, M, y.stride(0),
            K=K, H=H, WEIGHTED=weights is not None, ROWS=config.rows, COLS=config.cols, num_warps=config.warps,
        )  # fmt: skip
    return out


OP = Op(
    name="moe_unpermute",
    as_called=as_called,
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        peers.UNPERMUTE.eager,
        Variant("optimized", run_of(moe_unpermute, "out"), RowsConfig, space, invalid, default),
        peers.UNPERMUTE.compiled,
    ),
    module=__name__,
    **{**ROWS, "options": _OPTIONS, "free_options": tuple(_OPTIONS)},
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
