"""Time steps of foreign programs whose kernels are autotuned: `python steps.py gla|blockwise|cast|experts`.

Prints one line of JSON: seconds from the first launch to the end, and for each size the GPU's and the host's ms of 100 steps.
Imports no kerneltune. `gla` is a layer of flash-linear-attention, `blockwise` torchao's fp8 casts and products, `cast` one of
these casts alone, `experts` Liger's fused mixture of experts.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

BF16 = torch.bfloat16
STEPS = 100


def leaf(*sizes: int, scale: float = 1.0) -> torch.Tensor:
    """Return random values that want a gradient."""
    return (torch.randn(*sizes, device="cuda") * scale).to(BF16).requires_grad_()


def gla(tokens: int) -> Callable[[], Any]:
    """Return a step of a gated-linear-attention layer, forward and backward, four sequences."""
    from fla.layers import GatedLinearAttention

    layer = GatedLinearAttention(hidden_size=2048, num_heads=16, expand_k=1.0, expand_v=1.0).to("cuda", BF16)
    x = leaf(4, tokens, 2048)
    return lambda: layer(x)[0].float().square().mean().backward()


def blockwise(tokens: int) -> Callable[[], Any]:
    """Return a step of torchao's blockwise casts and products: the forward product and the weight gradient of a linear layer."""
    from torchao.prototype.blockwise_fp8_training import kernels as k

    x, w, dy = (
        torch.randn(rows, width, device="cuda", dtype=BF16) for rows, width in ((tokens, 2048), (1536, 2048), (tokens, 1536))
    )

    def step() -> None:
        a, a_scale = k.triton_fp8_blockwise_act_quant_lhs(x)
        b, b_scale = k.triton_fp8_blockwise_weight_quant_transposed_rhs(w)
        left, left_scale = k.triton_fp8_blockwise_act_quant_transposed_lhs(dy)
        right, right_scale = k.triton_fp8_blockwise_act_quant_rhs(x)
        k.triton_fp8_gemm_1x128_128x128(a, b, a_scale, b_scale, out_dtype=BF16)
        k.triton_fp8_gemm_1x128_128x1(left, right, left_scale, right_scale, out_dtype=BF16)

    return step


def cast(tokens: int) -> Callable[[], Any]:
    """Return a step of a single launch, of torchao's blockwise cast of rows: the time of a launch shows."""
    from torchao.prototype.blockwise_fp8_training import kernels as k

    x = torch.randn(tokens, 2048, device="cuda", dtype=BF16)
    return lambda: k.triton_fp8_blockwise_act_quant_lhs(x)


def experts(tokens: int) -> Callable[[], Any]:
    """Return a step of Liger's fused mixture of 16 experts, forward and backward."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    x, gate_up, down = leaf(tokens, 1024, scale=0.1), leaf(16, 1024, 1024, scale=0.02), leaf(16, 1024, 512, scale=0.02)
    chosen = torch.rand(tokens, 16, device="cuda").topk(4).indices
    weights = torch.softmax(torch.randn(tokens, 4, device="cuda"), -1).to(BF16).requires_grad_()

    def step() -> None:
        y = LigerFusedMoEFunction.apply(x, gate_up, down, chosen, weights)
        y.backward(torch.ones_like(y))

    return step


PROGRAMS = {
    "gla": (gla, (4096,)), "blockwise": (blockwise, (1024, 16384)), "cast": (cast, (1024, 4096)),
    "experts": (experts, (1024, 8192)),
}  # fmt: skip


def times(step: Callable[[], Any]) -> dict[str, list[float]]:
    """Return the GPU's and the host's ms of each step, behind a warm-up; the GPU waits while the host queues a step."""
    for _ in range(5):
        step()
    found: dict[str, list[float]] = {"gpu_ms": [], "host_ms": []}
    for _ in range(STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        start.record()
        began = time.perf_counter()
        step()
        found["host_ms"].append(round((time.perf_counter() - began) * 1e3, 4))
        end.record()
        torch.cuda.synchronize()
        found["gpu_ms"].append(round(start.elapsed_time(end), 4))
    return found


def main(name: str) -> None:
    """Time the program at its sizes and print the line."""
    make, sizes = PROGRAMS[name]
    steps = {}
    for size in sizes:
        torch.manual_seed(size)
        steps[str(size)] = make(size)
    began = time.perf_counter()
    rows = {size: times(step) for size, step in steps.items()}
    print(json.dumps({"program": name, "seconds": round(time.perf_counter() - began, 1), "sizes": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
