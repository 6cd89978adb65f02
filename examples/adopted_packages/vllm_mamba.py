"""Kernel modules of Mamba layers of vLLM 0.33.0: the scan of a prompt and steps of decoding; imports no kerneltune.

`python vllm_mamba.py RESULTS.pt [EXPECTED.pt]` prints one line of JSON: the results of both files that differ, and how far they
differ. Needs a GPU and the folder that `cut_kernels.py` writes; captured with TRITON_INTERPRET=1 it runs small sizes on the CPU.
Sizes are of Mamba-Codestral 7B: 128 heads of 64, 8 groups, states of 128, chunks of 256.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().with_name("cut")))

import torch
from compare_runs import report
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated
from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

IS_CPU = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_CPU else "cuda"
HEADS, SIDE, GROUPS, STATE, CHUNK = (4, 16, 2, 16, 16) if IS_CPU else (128, 64, 8, 128, 256)
INNER = HEADS * SIDE
CHANNELS = INNER + 2 * GROUPS * STATE
PROMPTS = (40,) if IS_CPU else (2048, 8192)
BATCHES = (2, 3) if IS_CPU else (16, 64, 256)
FOUND: dict[str, torch.Tensor] = {}
BF16 = torch.bfloat16


def values(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return random values."""
    return torch.randn(*sizes, device=DEVICE).to(dtype)


def keep(name: str, *tensors: torch.Tensor) -> None:
    """Keep a sample of results."""
    for number, tensor in enumerate(tensors):
        FOUND[f"{name}.{number}"] = tensor.flatten()[: 1 << 20].float().cpu()


def whole(*numbers: int) -> torch.Tensor:
    """Return whole numbers, as indices are."""
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def scan(tokens: int) -> None:
    """Scan a prompt in chunks."""
    chunks = [*range(0, tokens, CHUNK), tokens]
    out = torch.empty(tokens, HEADS, SIDE, dtype=BF16, device=DEVICE)
    states = mamba_chunk_scan_combined_varlen(
        values(tokens, HEADS, SIDE), values(tokens, HEADS), -torch.rand(HEADS, device=DEVICE) - 0.5,
        values(tokens, GROUPS, STATE), values(tokens, GROUPS, STATE), CHUNK,
        cu_seqlens=whole(0, tokens), cu_chunk_seqlens=whole(*chunks), last_chunk_indices=whole(len(chunks) - 2),
        seq_idx=whole(*[0] * (len(chunks) - 1)), out=out, D=torch.ones(HEADS, device=DEVICE),
        dt_bias=torch.zeros(HEADS, device=DEVICE), dt_softplus=True, state_dtype=torch.float32,
    )  # fmt: skip
    keep(f"scan {tokens}", out, states)


def convolution(tokens: int) -> None:
    """Convolve a prompt of four tokens' width."""
    state = torch.zeros(2, 3, CHANNELS, dtype=BF16, device=DEVICE).transpose(1, 2)
    y = causal_conv1d_fn(
        values(tokens, CHANNELS).T, values(CHANNELS, 4), values(CHANNELS), state, whole(0, tokens), cache_indices=whole(1),
        has_initial_state=torch.zeros(1, dtype=torch.bool, device=DEVICE),
    )  # fmt: skip
    keep(f"convolution {tokens}", y, state)


def gated_norm(tokens: int) -> None:
    """Normalize the rows of a prompt in groups."""
    y = rms_norm_gated(
        values(tokens, INNER), values(INNER), None, z=values(tokens, INNER), group_size=INNER // GROUPS, norm_before_gate=False
    )
    keep(f"gated_norm {tokens}", y)


def state_update(batch: int) -> None:
    """Decode a token of each sequence."""
    state = values(batch + 1, HEADS, SIDE, STATE)
    dt = values(batch, HEADS)[:, :, None].expand(-1, -1, SIDE)
    a = (-torch.rand(HEADS, device=DEVICE) - 0.5)[:, None, None].expand(-1, SIDE, STATE)
    out = torch.empty(batch, HEADS, SIDE, dtype=BF16, device=DEVICE)
    selective_state_update(
        state, values(batch, HEADS, SIDE), dt, a, values(batch, GROUPS, STATE), values(batch, GROUPS, STATE),
        torch.ones(HEADS, device=DEVICE)[:, None].expand(-1, SIDE), torch.zeros(HEADS, device=DEVICE)[:, None].expand(-1, SIDE),
        dt_softplus=True, state_batch_indices=torch.arange(1, batch + 1, dtype=torch.int32, device=DEVICE), out=out,
    )  # fmt: skip
    keep(f"state_update {batch}", out, state)


def convolution_update(batch: int) -> None:
    """Convolve a token of each sequence."""
    state = values(batch + 1, 3, CHANNELS).transpose(1, 2)
    indices = torch.arange(1, batch + 1, dtype=torch.int32, device=DEVICE)
    y = causal_conv1d_update(
        values(batch, CHANNELS), state, values(CHANNELS, 4), values(CHANNELS), "silu", conv_state_indices=indices
    )
    keep(f"convolution_update {batch}", y, state)


PARTS: dict[Callable[[int], None], tuple[int, ...]] = {
    **dict.fromkeys((scan, convolution, gated_norm), PROMPTS),
    **dict.fromkeys((state_update, convolution_update), BATCHES),
}


if __name__ == "__main__":
    report(PARTS, FOUND, *sys.argv[1:])
