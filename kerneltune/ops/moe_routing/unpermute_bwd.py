"""Differentiate `moe_unpermute`: the gradients of the experts' rows and of the router's weights, every row read once."""

from dataclasses import replace

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_like
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
from kerneltune.ops.moe_routing.unpermute import check_router_weights
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Outputs, Traffic

_MOST_SUMS = 96
"""Of a thread. Because 128 reach 2.3 TB/s at 671B sizes, where 64 reach 3.8 at Qwen3's; H200, 2026-11-23."""


def valid(case: Case, config: RowsConfig) -> str | None:
    """Return why a config cannot be worth running: a thread sums K gradients of the weights over its columns."""
    sums = case["K"] * config.rows * config.cols // (32 * config.warps)
    if sums > max(_MOST_SUMS, case["K"] * 16 // ITEMSIZE[case.dtype]):
        return f"{sums} sums per thread"
    return rows_valid(case, config)


def default(case: Case) -> RowsConfig:
    """Return a config for any shape, by rule: that of the forward, or half its columns or rows where a thread has many sums."""
    config = rows_default(case)
    if valid(case, config) is None:
        return config
    return replace(config, rows=config.rows // 2) if config.rows > 1 else replace(config, cols=config.cols // 2)


_choose = cache.Chooser("moe_unpermute_bwd", RowsConfig, valid, default, ("T", "E", "K"), free_options=("routing",))


@on_its_device
def moe_unpermute_bwd(
    dout: torch.Tensor,
    y: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor,
    *,
    config: RowsConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of what `moe_unpermute` summed with weights.

    Args:
        dout: (T, H), the gradient of the sums; elements of a row adjacent.
        y: (M, H) bf16, fp16 or fp32, as given to `moe_unpermute`; M = T K.
        places: (T, K) int32, as given there.
        weights: (T, K), as given there.
        offs: (E,) int32, where each expert's rows end.
        config: None takes the best known config.

    Returns:
        dy (M, H) of y's type, zeros behind the last expert's rows; dweights (T, K) of the weights' type, summed in fp32, 0 for
        a pair of no expert.

    Raises:
        ValueError: a wrong shape, type, device or stride, which it names.
    """
    check_rows("dout", dout)
    check_rows("y", y)
    (T, H), K = dout.shape, places.shape[-1]
    check_index("places", places, (T, None), dout.device)
    check_index("offs", offs, (None,), dout.device)
    check_like("y", y, (T * K, H), y.dtype, dout.device)
    check_router_weights(weights, places)
    dy, dweights = y.new_empty((T * K, H)), torch.empty_like(weights)
    if not dy.numel():
        return dy, dweights.zero_()
    if config is None:
        sizes = (("T", T), ("H", H), ("E", offs.shape[0]), ("K", K))
        config = _choose(sizes, DTYPE_NAMES[y.dtype], "none", (("routing", "routed"),))
    rows.spread_gradient[(cdiv(T, config.rows),)](
        dout, y, places, weights, offs[-1:], dy, dweights, T, T * K, dout.stride(0), y.stride(0),
        K=K, H=H, ROWS=config.rows, COLS=config.cols, num_warps=config.warps,
    )  # fmt: skip
    return dy, dweights


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Return dout (T, H), y (T K, H), places (T, K), weights (T, K) fp32 and offs (E,)."""
    T, H, K = case["T"], case["H"], case["K"]
    _, places, offs = sorted_pairs(experts_of(case, "cpu", seed), case["E"])
    return {
        "dout": values((T, H), case.dtype, device, seed),
        "y": values((T * K, H), case.dtype, device, seed + 1),
        "places": places.to(device),
        "weights": values((T, K), "float32", device, seed + 2),
        "offs": offs.to(device),
    }


def reference(inputs: Inputs) -> Outputs:
    """Differentiate in fp32; beside it what the order of fp32 sums may change."""
    dout, y, places = inputs["dout"].float(), inputs["y"].float(), inputs["places"].long()
    T, K = places.shape
    flat, there = places.reshape(-1), (places >= 0).reshape(-1)
    dy = torch.zeros_like(y)
    spread = dout.repeat_interleave(K, 0) * inputs["weights"].reshape(-1, 1)
    dy[flat[there]] = spread[there]
    if not T:
        return {"dy": dy.to(inputs["y"].dtype), "dweights": inputs["weights"].clone(), "size": inputs["weights"].clone()}
    products = y[places.clamp(min=0)] * dout[:, None] * (places >= 0)[..., None]
    return {"dy": dy.to(inputs["y"].dtype), "dweights": products.sum(2), "size": products.abs().sum(2)}


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare dy within one rounding, dweights within those of fp32 sums."""
    want = expected["dy"]
    if outputs["dy"].dtype != want.dtype:
        return [f"dy: {outputs['dy'].dtype}, expected {want.dtype}"]
    errors = close("dy", outputs["dy"], want, torch.finfo(want.dtype).eps, 1e-30)
    return errors + close("dweights", outputs["dweights"], expected["dweights"], 1e-6, 1e-6 * expected["size"] + 1e-30)


def traffic(case: Case) -> Traffic:
    """Count dout, the rows, places, weights and ends read; the gradients written."""
    T, H, K, size = case["T"], case["H"], case["K"], ITEMSIZE[case.dtype]
    return Traffic(size * T * (K + 1) * H + 8 * T * K + 4 * case["E"], size * T * K * H + 4 * T * K)


def run(inputs: Inputs, config: RowsConfig | None) -> Outputs:
    """Run `moe_unpermute_bwd` on a case's inputs."""
    names = ("dout", "y", "places", "weights", "offs")
    dy, dweights = moe_unpermute_bwd(*(inputs[name] for name in names), config=config)
    return {"dy": dy, "dweights": dweights}
