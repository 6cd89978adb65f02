"""Run kernels of conch for inference: `python conch_kernels.py decode|products|vision`."""

import sys
from typing import Any

import torch
from measured_step import BF16, DEVICE, leaf, run, sized

TOKENS, HEADS, WIDTH, BLOCK = sized(64, 3), sized(32, 2), sized(128, 16), 16
CONTEXT = sized(4096, 64)


def decode() -> Any:
    """Attend over a paged cache, turn queries, add and normalize, multiply gate and up."""
    from conch.ops.activation.silu_and_mul import silu_and_mul
    from conch.ops.attention.varlen_attention import varlen_attention
    from conch.ops.embedding.rotary_embedding import rotary_embedding
    from conch.ops.normalization.rms_norm import fused_add_rms_norm, rms_norm

    pages = CONTEXT // BLOCK
    q = leaf(TOKENS, HEADS, WIDTH).detach()
    cache = [leaf(TOKENS * pages, BLOCK, HEADS // 2, WIDTH, scale=s).detach() for s in (0.5, 2.0)]
    torch.manual_seed(3)
    table = torch.randperm(TOKENS * pages).reshape(TOKENS, pages).int().to(DEVICE)
    lengths = torch.randint(1, CONTEXT, (TOKENS,)).int().to(DEVICE)
    starts = torch.arange(TOKENS + 1, dtype=torch.int32, device=DEVICE)
    out = varlen_attention(q, *cache, starts, 1, lengths, int(lengths.max()), table, causal=True)
    rows, positions = leaf(TOKENS, HEADS * WIDTH).detach(), torch.arange(TOKENS, device=DEVICE)
    turned = rotary_embedding(positions, rows.clone(), rows.clone(), WIDTH, leaf(CONTEXT, WIDTH).detach())
    weight = leaf(HEADS * WIDTH).detach()
    added = fused_add_rms_norm(rows.clone(), rows.clone(), weight, 1e-6)
    return out, turned, added, rms_norm(rows, weight, 1e-6), silu_and_mul(rows)


def products() -> Any:
    """Multiply rows in int8, cast rows to int8 and fp8 with a given scale, and in blocks to four bits and back."""
    from conch.ops.quantization.bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from conch.ops.quantization.fp8 import scaled_fp8_quant
    from conch.ops.quantization.gemm import scaled_gemm
    from conch.ops.quantization.int8 import scaled_int8_quant

    rows, weight = leaf(TOKENS * 8, HEADS * WIDTH).detach(), leaf(HEADS * WIDTH, HEADS * WIDTH).detach()
    scale = torch.full((1,), 0.03, device=DEVICE)
    codes = scaled_int8_quant(rows, scale)[0]
    eight = (weight * 30).clamp(-127, 127).to(torch.int8)
    product = scaled_gemm(
        codes, eight, scale.expand(len(codes), 1).contiguous(), torch.ones(eight.shape[1], 1, device=DEVICE), BF16
    )
    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return codes, product, scaled_fp8_quant(rows, scale)[0], packed, dequantize_4bit(packed, state)


def vision() -> Any:
    """Suppress overlapping boxes."""
    from conch.ops.vision.nms import nms

    torch.manual_seed(4)
    corner = torch.rand(sized(4000, 40), 2, device=DEVICE) * 500
    boxes = torch.cat([corner, corner + 5 + 40 * torch.rand_like(corner)], 1)
    return nms(boxes, torch.rand(len(boxes), device=DEVICE), 0.5)


if __name__ == "__main__":
    run({"decode": decode, "products": products, "vision": vision}[sys.argv[1]])
