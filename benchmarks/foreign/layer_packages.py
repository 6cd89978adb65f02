"""Run layers of packages: `python layer_packages.py norms|convolution|diffusion|optimizers|ternary`.

norms: flash-attn's norms, rotation and cross entropy; convolution: spconv-triton's sparse convolutions, whose autotuners keep
choices on disk; diffusion: comfy-kitchen's int8 layers and casts; optimizers: bitsandbytes, whose kernels update in place;
ternary: onebitllms, whose kernels reduce over a grid.
"""

import sys
from typing import Any

import torch
from measured_step import BF16, DEVICE, leaf, run, sized, trained

TOKENS, WIDTH = sized(8192, 48), sized(4096, 128)


def norms() -> Any:
    """Train a norm with a residual, a rotation and a loss."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
    from flash_attn.ops.triton.rotary import apply_rotary

    x, residual, weight = leaf(TOKENS, WIDTH), leaf(TOKENS, WIDTH, scale=0.5), leaf(WIDTH, scale=0.2)
    y, kept = rms_norm_fn(x, weight, None, residual=residual, prenorm=True, eps=1e-6)
    z = layer_norm_fn(y, weight, leaf(WIDTH, scale=0.3), eps=1e-5)
    heads = leaf(2, TOKENS // 2, sized(32, 2), 64).detach()
    turned = apply_rotary(heads, *(leaf(TOKENS // 2, 32, scale=s).detach() for s in (0.9, 0.4)))
    words = sized(32000, 96)
    logits = leaf(TOKENS // 4, words)
    losses, _ = cross_entropy_loss(logits, torch.arange(TOKENS // 4, device=DEVICE) * 7919 % words)
    return [*trained(z + kept, x, residual, weight), turned, *trained(losses, logits)]


def convolution() -> Any:
    """Train two sparse convolutions over voxels."""
    import spconv_triton.pytorch as spconv

    torch.manual_seed(11)
    side, count, channels = sized(64, 8), sized(40000, 60), sized(64, 16)
    cells = torch.randperm(side**3, device="cpu")[:count]
    places = torch.stack([torch.zeros_like(cells), cells // side**2, cells // side % side, cells % side], 1).int().to(DEVICE)
    layers = spconv.SparseSequential(
        spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="same"),
        spconv.SparseConv3d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
    ).to(DEVICE, torch.float16)
    features = leaf(count, channels, dtype=torch.float16)
    out = layers(spconv.SparseConvTensor(features, places, [side] * 3, 1))
    return trained(out.features, features, *layers.parameters())


def diffusion() -> Any:
    """Multiply in int8, modulate, rotate and cast."""
    from comfy_kitchen.backends.triton import adaln, quantization

    x, weight = leaf(TOKENS, WIDTH).detach(), leaf(WIDTH, WIDTH, scale=40.0).detach().to(torch.int8)
    scales = torch.rand(WIDTH, device=DEVICE) * 0.01
    found = [
        quantization.int8_linear(x, weight, scales, bias=leaf(WIDTH).detach()),
        quantization.int8_linear(x, weight, scales[:1]),
    ]
    one = torch.full((1,), 0.05, device=DEVICE)
    narrow = quantization.quantize_per_tensor_fp8(x, one)
    found += [narrow.float(), quantization.dequantize_per_tensor_fp8(narrow, one, BF16)]
    picture = x.reshape(2, TOKENS // 2, WIDTH)
    return [*found, adaln.adaln(picture, leaf(2, 1, WIDTH).detach(), leaf(2, 1, WIDTH, scale=0.1).detach())]


def optimizers() -> Any:
    """Cast to four and eight bits and back, and take steps of optimizers from the same state."""
    from bitsandbytes.backends.triton import kernels_4bit, kernels_8bit_quant, kernels_optim

    x = leaf(TOKENS, WIDTH).detach()
    block, found = 64, list[torch.Tensor]()
    packed, largest = (
        torch.empty(x.numel() // 2, 1, dtype=torch.uint8, device=DEVICE),
        torch.empty(x.numel() // block, device=DEVICE),
    )
    kernels_4bit.quantize_4bit_blockwise_triton(x, block, "nf4", x.numel() // block, largest, x.numel(), packed)
    back = torch.empty_like(x)
    kernels_4bit.dequantize_4bit_impl(packed, largest, block, "nf4", BF16, out=back)
    code = torch.linspace(-1, 1, 256, device=DEVICE)
    narrow, scales = kernels_8bit_quant.quantize_blockwise_triton(x, code, 256)
    found += [packed, largest, back, kernels_8bit_quant.dequant_8bit_blockwise(narrow, scales, code, 256, dtype=BF16)]
    for name in ("adam", "momentum"):
        weight, gradient = (
            leaf(TOKENS * WIDTH // 4, dtype=torch.float32).detach().clone(),
            x.flatten()[: TOKENS * WIDTH // 4].float(),
        )
        states = torch.zeros_like(weight), torch.zeros_like(weight)
        for step in (1, 2):
            kernels_optim.optimizer_update_32bit_impl(
                name, gradient, weight, *states, None, 0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.01, step, 1e-3
            )
        found += [weight, *states]
    return found


def ternary() -> Any:
    """Cast activations by their largest value in each row, and weights by their mean."""
    from onebitllms.kernels.activation_quant import activation_quant_triton
    from onebitllms.kernels.weight_quant import weight_quant_triton

    return activation_quant_triton(leaf(2, TOKENS // 2, WIDTH).detach()), weight_quant_triton(leaf(WIDTH, WIDTH).detach())


PARTS = {part.__name__: part for part in (norms, convolution, diffusion, optimizers, ternary)}

if __name__ == "__main__":
    run(PARTS[sys.argv[1]])
