"""Run casts and products of torchao: `python torchao_casts.py blockwise|mx|attention`."""

import sys
from typing import Any

import torch
from measured_step import DEVICE, leaf, run, sized

TOKENS, K, N = sized(4096, 128), sized(3072, 256), sized(5120, 128)


def blockwise() -> Any:
    """Cast in blocks of 128 and multiply in fp8."""
    from torchao.prototype.blockwise_fp8_training import kernels as k

    x, w = leaf(TOKENS, K).detach(), leaf(N, K).detach()
    a, a_scale = k.triton_fp8_blockwise_act_quant_lhs(x)
    b, b_scale = k.triton_fp8_blockwise_weight_quant_transposed_rhs(w)
    c = k.triton_fp8_gemm_1x128_128x128(a, b, a_scale, b_scale, out_dtype=torch.bfloat16)
    return a, a_scale, b, b_scale, c, k.triton_fp8_blockwise_act_quant_rhs(x), k.triton_fp8_blockwise_weight_quant_rhs(w)


def mx() -> Any:
    """Cast values back from mxfp8, and reorder the scales of its products."""
    from torchao.prototype.mx_formats import kernels as k

    torch.manual_seed(0)
    x = torch.randn(TOKENS, K, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 134, (TOKENS, K // 32), device=DEVICE, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    back = k.triton_mxfp8_dequant_dim0(x, scale, torch.bfloat16, 32)
    return back, k.triton_mx_block_rearrange(scale).view(torch.uint8)


def attention() -> Any:
    """Cast queries, keys and values of an attention layer to fp8, one scale per head."""
    from torchao.prototype.fp8_sdpa_inference.fp8_sdpa_quantization import fp8_sdpa_quantize_func as quantize

    sizes = (2, sized(16, 2), sized(2048, 40), sized(128, 16))
    return quantize(*(leaf(*sizes, scale=s).detach() for s in (1.0, 0.5, 2.0)))


if __name__ == "__main__":
    run({"blockwise": blockwise, "mx": mx, "attention": attention}[sys.argv[1]])
