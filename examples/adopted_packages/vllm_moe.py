r"""An expert layer with the product kernel and the getter of vLLM 0.33.0; its sort and activation, which vLLM compiles, are ours.

Needs the folder that `cut_kernels.py` writes:

    kerneltune adopt getter vllm_moe.py:try_get_optimal_moe_config --call vllm_moe.py:fused_experts \
        --model config.json --tp 8 --out moe --export vllm
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().with_name("cut")))

import torch
import triton
import triton.language as tl
from fused_moe import align, silu_and_multiply, sum_of_pairs
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel, try_get_optimal_moe_config


def fused_experts(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts; arguments as of `fused_moe.fused_experts`."""
    tokens, hidden = hidden_states.shape
    experts, _, inner = w2.shape
    top_k, pairs = topk_ids.shape[1], topk_ids.numel()
    config = try_get_optimal_moe_config(tuple(w1.shape), tuple(w2.shape), top_k, None, tokens)
    rows, block_experts, used = align(topk_ids, experts, config["BLOCK_SIZE_M"])
    wide, narrow = hidden_states.new_empty(tokens, top_k, 2 * inner), hidden_states.new_empty(pairs, inner)
    parts, out = hidden_states.new_empty(tokens, top_k, hidden), torch.empty_like(hidden_states)

    def multiply(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, of_token: int, is_weighted: bool) -> None:
        invoke_fused_moe_triton_kernel(
            x, w, y, None, None, topk_weights, rows, block_experts, used, is_weighted, of_token, config,
            compute_type=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
            use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
        )  # fmt: skip

    multiply(hidden_states, w1, wide, top_k, False)
    silu_and_multiply[(pairs, triton.cdiv(inner, 1024))](wide, narrow, inner, 1024)
    multiply(narrow, w2, parts, 1, True)
    sum_of_pairs[(tokens, triton.cdiv(hidden, 1024))](parts, out, hidden, top_k, 1024)
    return out
