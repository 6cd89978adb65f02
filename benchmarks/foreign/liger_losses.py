"""Train losses, norms or elementwise kernels of liger-kernel: `python liger_losses.py losses|norms|elementwise`."""

import sys

import torch
from measured_step import DEVICE, leaf, run, sized, trained

ROWS, WIDTH, WORDS = sized(4096, 6), sized(4096, 32), sized(32000, 77)


def losses() -> list[torch.Tensor]:
    """Return fused linear cross entropy, JSD and KL divergence, with gradients."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.jsd import LigerJSDFunction
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    x, w = leaf(ROWS, WIDTH, scale=0.1), leaf(WORDS, WIDTH, scale=0.02)
    target = torch.arange(ROWS, device=DEVICE) * 7 % WORDS
    found = [*trained(LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0], x, w)]
    rows = ROWS // 2
    first, second = (leaf(rows, WORDS, dtype=torch.float32, scale=s).log_softmax(1).detach().requires_grad_() for s in (1.0, 0.9))
    loss = LigerJSDFunction.apply(first * 1, second.detach())
    found += trained(loss, first)
    return found + trained(LigerKLDivLossFunction.apply(second * 1, first.detach().exp()), second)


def norms() -> list[torch.Tensor]:
    """Return RMSNorm, LayerNorm and GroupNorm, with gradients."""
    from liger_kernel.ops.group_norm import LigerGroupNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, w, b = leaf(ROWS, WIDTH), leaf(WIDTH), leaf(WIDTH)
    found = trained(LigerRMSNormFunction.apply(x * 1, w, 1e-6), x, w)
    found += trained(LigerLayerNormFunction.apply(x * 1, w, b, 1e-6), x, w, b)
    image, scale, shift = leaf(sized(16, 2), 32, sized(4096, 33)), leaf(32), leaf(32)
    return found + trained(LigerGroupNormFunction.apply(image, scale, shift, 32, 8, 1e-6), image, scale, shift)


def elementwise() -> list[torch.Tensor]:
    """Return RoPE, GeGLU and SwiGLU, with gradients."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    tokens, width = sized(2048, 5), sized(128, 16)
    q, k = leaf(2, sized(32, 3), tokens, width), leaf(2, sized(8, 1), tokens, width)
    angles = leaf(1, tokens, width, dtype=torch.float32).detach()
    rotated = LigerRopeFunction.apply(q * 1, k * 1, angles.cos(), angles.sin())
    a, b = leaf(ROWS, 3 * WIDTH), leaf(ROWS, 3 * WIDTH, scale=0.5)
    found = [*trained(rotated[0], q), rotated[1]]
    found += trained(LigerGELUMulFunction.apply(a * 1, b * 1), a, b)
    return found + trained(LigerSiLUMulFunction.apply(a * 1, b * 1), a, b)


if __name__ == "__main__":
    run({"losses": losses, "norms": norms, "elementwise": elementwise}[sys.argv[1]])
