r"""A linear layer of fp8 with scales of blocks, with the kernel and the tables of vLLM 0.33.0.

Needs the folder that `cut_kernels.py` writes:

    kerneltune adopt getter vllm_linear.py:get_w8a8_block_fp8_configs --call vllm_linear.py:case --size N=7168 --size K=2048 \
        --out linear --export vllm --named 'dtype=fp8_w8a8,block_shape=[128,128]'
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().with_name("cut")))

import torch
from vllm.model_executor.layers.quantization.utils.fp8_utils import get_w8a8_block_fp8_configs, w8a8_triton_block_scaled_mm

BLOCK = [128, 128]
__all__ = ["case", "get_w8a8_block_fp8_configs"]


def case(tokens: int, N: int, K: int, device: str, seed: int) -> Callable[[], torch.Tensor]:
    """Return a call that makes x @ w.T, (tokens, N) in bf16, of x (tokens, K) and w (N, K) in e4m3."""
    options = {"device": device, "generator": None if device == "meta" else torch.Generator(device).manual_seed(seed)}
    blocks_n, blocks_k = -(-N // BLOCK[0]), -(-K // BLOCK[1])
    x, w = (torch.randn(size, K, **options).to(torch.float8_e4m3fn) for size in (tokens, N))
    x_scale, w_scale = (torch.rand(size, blocks_k, **options).add_(0.5) for size in (tokens, blocks_n))
    return partial(w8a8_triton_block_scaled_mm, x, w, x_scale, w_scale, BLOCK, torch.bfloat16)
