r"""A linear layer of fp8 with scales of blocks, with the kernel and the tables of vLLM 0.33.0.

vLLM looks a table of all numbers of tokens up, or None, not a config. So the getter is a function of this file, whose config
becomes the only row of the table. Needs the folder that `cut_kernels.py` writes:

    kerneltune adopt getter vllm_linear.py:get_config --call vllm_linear.py:case --size N=7168 --size K=2048 --out linear \
        --export vllm --named 'dtype=fp8_w8a8,block_shape=[128,128]'
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().with_name("cut")))

import torch
from vllm.model_executor.layers.quantization.utils import fp8_utils

BLOCK = [128, 128]
DEFAULT = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32, "num_warps": 4, "num_stages": 2}
"""vLLM's config of a weight without a table."""
table_of = fp8_utils.get_w8a8_block_fp8_configs


def get_config(tokens: int, rows: int, columns: int) -> dict[str, int]:
    """Return the config that vLLM takes for a weight (rows, columns)."""
    table = table_of(rows, columns, *BLOCK)
    return table[min(table, key=lambda known: abs(known - tokens))] if table else DEFAULT


def linear(x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """Return x @ w.T, (tokens, rows) in bf16.

    Args:
        x, w: (tokens, columns) and (rows, columns), e4m3.
        x_scale, w_scale: (tokens, columns / 128) and (rows / 128, columns / 128), rounded up, float32.
    """
    table = {len(x): get_config(len(x), *w.shape)}
    fp8_utils.get_w8a8_block_fp8_configs = lambda *_: table
    return fp8_utils.w8a8_triton_block_scaled_mm(x, w, x_scale, w_scale, BLOCK, torch.bfloat16)


def case(tokens: int, N: int, K: int, device: str, seed: int) -> Callable[[], torch.Tensor]:
    """Return a call of the layer."""
    options = {"device": device, "generator": None if device == "meta" else torch.Generator(device).manual_seed(seed)}
    blocks_n, blocks_k = -(-N // BLOCK[0]), -(-K // BLOCK[1])
    x, w = (torch.randn(size, K, **options).to(torch.float8_e4m3fn) for size in (tokens, N))
    x_scale, w_scale = (torch.rand(size, blocks_k, **options).add_(0.5) for size in (tokens, blocks_n))
    return partial(linear, x, w, x_scale, w_scale)
