"""Kernels of flash-linear-attention 0.6.0 whose keys leave out batch and length, at several of both; imports no kerneltune.

`python omitted_sizes.py [LENGTHxBATCH …]`, 4 heads of 128 each, prints one line of JSON: the GPU time of each step and the config
that each kernel ran with. Under triton.autotune the first size decides for all. Needs a GPU and flash-linear-attention.
"""

import json
import sys

import torch
from fla.ops.common.chunk_h import chunk_bwd_dh, chunk_bwd_kernel_dh, chunk_fwd_h, chunk_fwd_kernel_h
from fla.ops.gla.chunk import chunk_gla_bwd_dqk_intra, chunk_gla_bwd_kernel_intra

HEADS, WIDTH, CHUNK = 4, 128, 64
SIZES = ("1024x1", "8192x1", "65536x1", "1024x16", "8192x16")
KERNELS = {"state": chunk_fwd_kernel_h, "state_gradient": chunk_bwd_kernel_dh, "intra": chunk_gla_bwd_kernel_intra}


def tensors(length: int, batch: int) -> dict[str, torch.Tensor]:
    """Return inputs of a size; gates are summed over each chunk, as the layer sums them."""
    shape = (batch, length, HEADS, WIDTH)
    torch.manual_seed(length + batch)
    named = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name in ("q", "k", "v", "do")}
    gates = -0.05 * torch.rand(batch, length // CHUNK, CHUNK, HEADS, WIDTH, device="cuda")
    named["g"] = gates.cumsum(2).view(shape)
    named["dA"] = torch.randn(batch, length, HEADS, CHUNK, device="cuda")
    return named


def step(t: dict[str, torch.Tensor]) -> None:
    """Launch the three kernels once."""
    chunk_fwd_h(t["k"], t["v"], gk=t["g"])
    chunk_bwd_dh(t["q"], t["k"], t["v"], t["do"], None, None, WIDTH**-0.5, gk=t["g"])
    chunk_gla_bwd_dqk_intra(t["q"], t["k"], t["g"], t["dA"])


def gpu_us(t: dict[str, torch.Tensor], times: int = 5) -> float:
    """Return the GPU time of a step in µs, the mean of some after a first."""
    step(t)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        step(t)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times * 1e3


def inner(kernel: object) -> object:
    """Return the autotuner below heuristics."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn  # type: ignore[attr-defined]
    return kernel


def main(sizes: list[str]) -> None:
    """Run every size and print."""
    rows = {}
    for size in sizes:
        length, batch = map(int, size.split("x"))
        us = gpu_us(tensors(length, batch))
        configs = {name: str(getattr(inner(kernel), "best_config", None)) for name, kernel in KERNELS.items()}
        rows[size] = {"step_us": round(us, 1), "configs": configs}
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:] or list(SIZES))
