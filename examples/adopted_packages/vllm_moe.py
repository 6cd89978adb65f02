r"""An expert layer with the product kernel and getter of vLLM 0.33.0; sort, activation and casts, which vLLM compiles, are ours.

Needs the folder that `cut_kernels.py` writes:

    kerneltune adopt getter vllm_moe.py:try_get_optimal_moe_config --call vllm_moe.py:fused_experts_impl \
        --model config.json --tp 8 --out moe --export vllm --named 'dtype=fp8_w8a8,block_shape=[128,128]'
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().with_name("cut")))

import torch
import triton
import triton.language as tl
from fused_moe import align, silu_and_multiply, sum_of_pairs
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel, try_get_optimal_moe_config


@triton.jit
def cast_groups(x, y, scales, GROUPS, GROUPS2: tl.constexpr, GROUP: tl.constexpr):
    """Cast a row to e4m3, each group of GROUP elements with the scale at which its largest is 448."""
    row, group = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS2)
    at = (row * GROUPS + group[:, None]) * GROUP + tl.arange(0, GROUP)[None, :]
    is_group = group < GROUPS
    values = tl.load(x + at, mask=is_group[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-10) / 448.0
    tl.store(y + at, tl.clamp(values / scale[:, None], -448.0, 448.0).to(tl.float8e4nv), mask=is_group[:, None])
    tl.store(scales + row * GROUPS + group, scale, mask=is_group)


def in_fp8(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (rows, columns) in e4m3, and its scales (rows, columns / group) in float32."""
    rows, groups = x.shape[0], x.shape[1] // group
    codes, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(rows, groups, dtype=torch.float32)
    cast_groups[(rows,)](x, codes, scales, groups, triton.next_power_of_2(groups), group, num_warps=8)
    return codes, scales


def fused_experts_impl(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    use_fp8_w8a8: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts; arguments as of `fused_moe.fused_experts`, and vLLM's of fp8.

    Args:
        w1_scale, w2_scale: a scale for each block of a weight of e4m3, (experts, rows / block, columns / block), float32.
        block_shape: rows and columns of a block. Activations have a scale for as many columns of a token.
    """
    tokens, hidden = hidden_states.shape
    experts, _, inner = w2.shape
    top_k, pairs = topk_ids.shape[1], topk_ids.numel()
    dtype = "fp8_w8a8" if use_fp8_w8a8 else None
    config = try_get_optimal_moe_config(tuple(w1.shape), tuple(w2.shape), top_k, dtype, tokens, block_shape)
    rows, block_experts, used = align(topk_ids, experts, config["BLOCK_SIZE_M"])
    wide, narrow = hidden_states.new_empty(tokens, top_k, 2 * inner), hidden_states.new_empty(pairs, inner)
    parts, out = hidden_states.new_empty(tokens, top_k, hidden), torch.empty_like(hidden_states)

    def multiply(
        x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, y: torch.Tensor, of_token: int, is_weighted: bool
    ) -> None:
        codes, x_scale = in_fp8(x, block_shape[1]) if use_fp8_w8a8 else (x, None)
        invoke_fused_moe_triton_kernel(
            codes, w, y, x_scale, scale, topk_weights, rows, block_experts, used, is_weighted, of_token, config,
            compute_type=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16, use_fp8_w8a8=use_fp8_w8a8,
            use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False, block_shape=block_shape,
        )  # fmt: skip

    multiply(hidden_states, w1, w1_scale, wide, top_k, False)
    silu_and_multiply[(pairs, triton.cdiv(inner, 1024))](wide, narrow, inner, 1024)
    multiply(narrow, w2, w2_scale, parts, 1, True)
    sum_of_pairs[(tokens, triton.cdiv(hidden, 1024))](parts, out, hidden, top_k, 1024)
    return out
