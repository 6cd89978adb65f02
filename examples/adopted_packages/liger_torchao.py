"""Autotuned kernels of liger-kernel 0.8.5 and torchao 0.18 at several sizes, forward and backward.

`python liger_torchao.py NAME RESULTS.pt [EXPECTED.pt]` prints one line of JSON. Needs a GPU, liger-kernel and torchao.
"""

import json
import sys
from collections.abc import Callable

import torch
from compare_runs import differences, run_parts
from meter import Meter, chosen_configs, serving_counts

METER = Meter().start()
FOUND: dict[str, torch.Tensor] = {}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def leaf(*sizes: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return random values that want a gradient."""
    return (torch.randn(*sizes, device="cuda") * scale).to(dtype).requires_grad_()


def keep(name: str, *tensors: torch.Tensor | None) -> None:
    """Remember results."""
    FOUND.update({f"{name}.{n}": t.detach().float().cpu() for n, t in enumerate(tensors) if t is not None})


def dynamic_tanh(rows: int) -> None:
    """Run Liger's DyT on (rows, 4096); its key leaves the rows out."""
    from liger_kernel.ops.dyt import LigerDyTFunction

    x, gamma, beta = leaf(rows, 4096), leaf(4096, dtype=torch.float32), leaf(4096, dtype=torch.float32)
    alpha = torch.full((1,), 0.5, device="cuda", requires_grad=True)
    y = LigerDyTFunction.apply(x, alpha, gamma, beta)
    y.backward(torch.ones_like(y))
    keep(f"dyt{rows}", y, x.grad, gamma.grad, alpha.grad)


def gated_mlp(tokens: int) -> None:
    """Run Liger's MLP, whose configs set the blocks of TMA descriptors in their pre_hooks."""
    from liger_kernel.ops.mlp import LigerMLPFunction

    x, gate, up, down = leaf(1, tokens, 2048, scale=0.1), *(leaf(5632, 2048, scale=0.02) for _ in range(2)), leaf(2048, 5632)
    y = LigerMLPFunction.apply(x, gate, up, down)
    y.backward(torch.ones_like(y) * 0.01)
    keep(f"mlp{tokens}", y, x.grad, gate.grad, down.grad)


def experts(tokens: int) -> None:
    """Run Liger's fused mixture of experts."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    x, gate_up, down = leaf(tokens, 1024, scale=0.1), leaf(16, 1024, 1024, scale=0.02), leaf(16, 1024, 512, scale=0.02)
    chosen = torch.rand(tokens, 16, device="cuda").topk(4).indices
    weights = torch.softmax(torch.randn(tokens, 4, device="cuda"), -1).to(BF16).requires_grad_()
    y = LigerFusedMoEFunction.apply(x, gate_up, down, chosen, weights)
    y.backward(torch.ones_like(y) * 0.01)
    keep(f"moe{tokens}", y, x.grad, gate_up.grad, down.grad)


def blockwise(tokens: int) -> None:
    """Run torchao's blockwise fp8 casts and products."""
    from torchao.prototype.blockwise_fp8_training import kernels as k

    x, w = (torch.randn(rows, 2048, device="cuda", dtype=BF16) for rows in (tokens, 1536))
    a, a_scale = k.triton_fp8_blockwise_act_quant_lhs(x)
    b, b_scale = k.triton_fp8_blockwise_weight_quant_transposed_rhs(w)
    left, left_scale = k.triton_fp8_blockwise_act_quant_transposed_lhs(torch.randn(tokens, 1536, device="cuda", dtype=BF16))
    right, right_scale = k.triton_fp8_blockwise_act_quant_rhs(x)
    keep(f"casts{tokens}", a, a_scale, b, b_scale, right, right_scale, *k.triton_fp8_blockwise_weight_quant_rhs(w))
    keep(f"product{tokens}", k.triton_fp8_gemm_1x128_128x128(a, b, a_scale, b_scale, out_dtype=BF16))
    keep(f"gradient{tokens}", k.triton_fp8_gemm_1x128_128x1(left, right, left_scale, right_scale, out_dtype=BF16))


def rowwise(tokens: int) -> None:
    """Run torchao's row-wise fp8 casts."""
    from torchao.prototype.moe_training.kernels import float8_rowwise as k

    x, w = torch.randn(tokens, 2048, device="cuda", dtype=BF16), torch.randn(8, 2048, 1408, device="cuda", dtype=BF16)
    keep(f"rows{tokens}", *k.triton_fp8_rowwise_2d_scale_and_cast(x, FP8)[:2])
    keep(f"experts{tokens}", *k.triton_fp8_rowwise_3d_transpose_rhs(w)[:2])
    keep(f"reduced{tokens}", *k.triton_fp8_rowwise_3d_transpose_rhs_fused_reduction(w)[:2])


PARTS: dict[Callable[[int], None], tuple[int, ...]] = {
    dynamic_tanh: (1024, 8192, 32768),
    gated_mlp: (1024, 8192),
    experts: (1024, 8192),
    blockwise: (1024, 16384),
    rowwise: (1024, 16384),
}


def main(name: str, results: str, expected: str = "") -> None:
    """Run every part and print the line."""
    failed = run_parts(PARTS)
    apart = differences(FOUND, results, expected)
    row = {
        "what": name, "autotuner_s": METER.total_s, "of_it_compiling_and_launching_s": METER.launch_s, "launches": METER.launches,
        "failed": failed, "compared": len(apart), "largest_difference": max(apart.values(), default=None),
        "serving": serving_counts(), "configs": chosen_configs(),
    }  # fmt: skip
    print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
