"""Decode with Int4Linear in the place of every linear layer of a tiny model, and hold the logits against its own weights."""

from functools import partial

import torch
import transformers
from torch import nn

from kerneltune.nn import Int4Linear
from kerneltune.ops.int4_gemm import dequantise

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}


def main():
    """Decode tokens one by one with a cache of keys and values: few tokens, and many with a calibrated scale of inputs."""
    torch.manual_seed(0)
    hidden = 512 if HAS_GPU else 256
    config = transformers.CONFIG_MAPPING["llama"](**SIZES, hidden_size=hidden, intermediate_size=2 * hidden)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE).eval()
    changed = 0
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    int4 = Int4Linear.from_linear(child, group=64)
                    child.weight.data = dequantise(int4.weight, child.weight.dtype)  # the reference has the same values
                    setattr(parent, name, int4)
                    int4.plain = [child]
                    changed += 1
    print(f"{changed} layers are Int4Linear")
    assert changed == 14
    int4_layers = [layer for layer in model.modules() if isinstance(layer, Int4Linear)]
    with torch.no_grad():
        for batch in (1, 8):
            compare(model, int4_layers, batch, limit=0.02)
        largest = {}
        hooks = [layer.register_forward_pre_hook(partial(calibrate, largest)) for layer in int4_layers]
        compare(model, int4_layers, 160, limit=0.02)
        for layer, hook in zip(int4_layers, hooks, strict=True):
            hook.remove()
            layer.activations = "fp8"
            layer.keep_fp8_weight(x_scale=largest[layer] / 448)
        compare(model, int4_layers, 160, limit=0.2)  # both operands of each product in e4m3
    print("done")


def calibrate(largest, layer, args):
    """Keep the largest magnitude of a layer's inputs."""
    largest[layer] = max(largest.get(layer, 0.0), float(args[0].abs().amax()))


def compare(model, int4_layers, batch, *, limit):
    """Hold the logits of a batch against those of the plain layers."""
    tokens = torch.randint(0, SIZES["vocab_size"], (batch, 4), device=DEVICE)
    steps = [decode(model, tokens)]
    for layer in int4_layers:
        layer.forward = layer.plain[0].forward
    steps.append(decode(model, tokens))
    for layer in int4_layers:
        del layer.forward
    error = (steps[0] - steps[1]).norm() / steps[1].norm()
    print(f"batch {batch}, activations={int4_layers[0].activations}: relative difference {error:.5f}")
    assert error < limit


def decode(model, tokens):
    """Return the logits of every step."""
    past, steps = None, []
    for step in range(tokens.shape[1]):
        out = model(tokens[:, step : step + 1], past_key_values=past, use_cache=True)
        past = out.past_key_values
        steps.append(out.logits.float())
    assert all(bool(logits.isfinite().all()) for logits in steps)
    return torch.cat(steps, 1)


if __name__ == "__main__":
    main()
