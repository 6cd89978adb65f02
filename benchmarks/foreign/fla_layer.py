"""Train a layer of flash-linear-attention: `python fla_layer.py NAME`."""

import importlib
import sys

import torch
from measured_step import BF16, DEVICE, leaf, run, sized, trained

HIDDEN = sized(2048, 64)
TOKENS = sized(1024 if "mamba2" in sys.argv else 4096, 64)  # without mamba_ssm the scan is torch code, which fills the GPU
HEADS = sized(16, 2)
WIDTH = HIDDEN // HEADS
LAYERS = {
    "rwkv7": ("RWKV7Attention", {"head_dim": sized(64, 16), "layer_idx": 0, "num_hidden_layers": 12}),
    "kda": ("KimiDeltaAttention", {"head_dim": WIDTH, "num_heads": HEADS}),
    "mamba2": ("Mamba2", {"head_dim": sized(64, 16), "state_size": sized(128, 16), "chunk_size": sized(256, 32), "layer_idx": 0}),
    "nsa": ("NativeSparseAttention", {
        "num_heads": sized(64, 16), "num_kv_heads": sized(4, 1), "head_dim": sized(64, 16), "block_size": sized(64, 16),
        "block_counts": sized(16, 2), "window_size": 0, "layer_idx": 0,
    }),
    "hgrn2": ("HGRN2Attention", {"expand_ratio": WIDTH}),
    "forgetting_attn": ("ForgettingAttention", {"num_heads": HEADS, "layer_idx": 0}),
    "gated_deltanet": ("GatedDeltaNet", {"head_dim": sized(256, 16), "num_heads": sized(6, 2)}),
    "delta_net": ("DeltaNet", {"num_heads": HEADS}),
    "multiscale_retention": ("MultiScaleRetention", {"num_heads": sized(8, 2)}),
}  # fmt: skip


def main(name: str) -> None:
    """Train the layer on two sequences."""
    x = leaf(2, TOKENS, HIDDEN)
    if name == "lightning":
        from fla.ops.lightning_attn import chunk_lightning_attn

        q, k, v = (leaf(2, TOKENS, HEADS, WIDTH, scale=0.5 + 0.1 * n) for n in range(3))
        run(lambda: trained(chunk_lightning_attn(q, k, v, layer_idx=3, num_layers=12)[0], q, k, v))
        return
    kind, sizes = LAYERS[name]
    torch.manual_seed(0)
    layer = getattr(importlib.import_module(f"fla.layers.{name}"), kind)(hidden_size=HIDDEN, **sizes).to(DEVICE, BF16)
    weights = [weight for weight in layer.parameters() if weight.ndim == 2]

    def step() -> list[torch.Tensor]:
        return trained(layer(x)[0], x, *weights[:2])

    run(step)


if __name__ == "__main__":
    main(sys.argv[1])
