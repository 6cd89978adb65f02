"""Differentiate `moe_unpermute`: the gradients of the experts' rows and of the router's weights, every row read once.

Shares config and space with `moe_permute`. Source: the unpermute of MoE training frameworks.
"""

from dataclasses import replace

import torch

from kerneltune import cache
from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_like
from kerneltune.kernel_lib.check_values import draw
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.moe_routing import peers, permute
from kerneltune.ops.moe_routing.contract import CALL_OPTIONS, ROWS, check_index, check_router_weights, check_rows, routed
from kerneltune.ops.moe_routing.kernels.rows import spread_gradient
from kerneltune.ops.moe_routing.permute import RowsConfig
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

_MOST_BYTES = 256
"""Bytes of a token's rows that a thread may load at once; the elements stay in registers until they are summed."""


def invalid(case: Case, config: RowsConfig) -> str | None:
    """Say why a config cannot be worth running: a thread loads its columns of all K rows of a token at once."""
    per_row = config.rows * config.cols * ITEMSIZE[case.dtype] // (32 * config.warps)
    if per_row > 16 and case["K"] * per_row > _MOST_BYTES:
        return f"{case['K'] * per_row} bytes of a token's rows per thread"
    return permute.invalid(case, config)


def default(case: Case) -> RowsConfig:
    """Return a config for any shape, by rule: the forward's config, or half its columns or rows where a thread loads too much."""
    config = permute.default(case)
    if invalid(case, config) is None:
        return config
    return replace(config, rows=config.rows // 2) if config.rows > 1 else replace(config, cols=config.cols // 2)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw dout (T, H), y (T K, H), places (T, K), weights (T, K) fp32 and offs (E,)."""
    T, H, K, dtype = case["T"], case["H"], case["K"], getattr(torch, case.dtype)
    index = routed(case, device, seed)
    return {
        "dout": draw("normal_", (T, H), dtype, device, seed),
        "y": draw("normal_", (T * K, H), dtype, device, seed + 1),
        "places": index["places"],
        "weights": draw("normal_", (T, K), torch.float32, device, seed + 2),
        "offs": index["offs"],
    }


def reference(inputs: Inputs) -> Outputs:
    """Differentiate in fp32; beside it the error that the order of fp32 sums allows."""
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
    """Compare dy within its rounding, dweights within the rounding of fp32 sums."""
    want = expected["dy"]
    if outputs["dy"].dtype != want.dtype:
        return [f"dy: {outputs['dy'].dtype}, expected {want.dtype}"]
    errors = close("dy", outputs["dy"], want, torch.finfo(want.dtype).eps, 1e-30)
    return errors + close("dweights", outputs["dweights"], expected["dweights"], 1e-6, 1e-6 * expected["size"] + 1e-30)


def traffic(case: Case) -> Traffic:
    """Count the bytes of dout, the rows, places, weights and ends read; the gradients written."""
    T, H, K, size = case["T"], case["H"], case["K"], ITEMSIZE[case.dtype]
    return Traffic(size * T * (K + 1) * H + 8 * T * K + 4 * case["E"], size * T * K * H + 4 * T * K)


def _results(y: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y.new_empty(y.shape), torch.empty_like(weights)


@torch_operator(_results)
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
    """Return the gradients of the rows and the weights of a weighted `moe_unpermute`.

    Args:
        dout: (T, H), the gradient of the sums; elements of a row adjacent.
        y: (M, H) bf16, fp16 or fp32, as given to `moe_unpermute`; M = T K.
        places: (T, K) int32, as given there.
        weights: (T, K), as given there.
        offs: (E,) int32, where each expert's rows end.
        config: None takes the best known config.

    Returns:
        dy (M, H) of y's type, zeros behind the last expert's rows; dweights (T, K) of the weights' type, summed in fp32, 0
        for a pair of no expert.
    """
    check_rows("dout", dout)
    check_rows("y", y)
    (T, H), K = dout.shape, places.shape[-1]
    check_index("places", places, (T, None), dout.device)
    check_index("offs", offs, (None,), dout.device)
    check_like("y", y, (T * K, H), y.dtype, dout.device)
    check_router_weights(weights, places)
    dy, dweights = _results(y, weights)
    if not dy.numel():
        return dy, dweights.zero_()
    if config is None:
        sizes = (("T", T), ("H", H), ("E", offs.shape[0]), ("K", K))
        config = _choose(sizes, DTYPE_NAMES[y.dtype], "none", CALL_OPTIONS)
    spread_gradient[(cdiv(T, config.rows),)](
        dout, y, places, weights, offs[-1:], dy, dweights, T, T * K, dout.stride(0), y.stride(0),
        K=K, H=H, ROWS=config.rows, COLS=config.cols, LANES=16 // y.element_size(), num_warps=config.warps,
    )  # fmt: skip
    return dy, dweights


OP = Op(
    name="moe_unpermute_bwd",
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        peers.UNPERMUTE_BWD.eager,
        Variant("optimized", run_of(moe_unpermute_bwd, "dy", "dweights"), RowsConfig, permute.space, invalid, default),
        peers.UNPERMUTE_BWD.compiled,
    ),
    module=__name__,
    **ROWS,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
