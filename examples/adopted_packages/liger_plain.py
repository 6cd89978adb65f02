"""Modules of liger-kernel 0.8.5 whose kernels no autotuner wraps, forward and backward at four sizes each; imports no kerneltune.

`python liger_plain.py RESULTS.pt [EXPECTED.pt]` prints one line of JSON: the results of both files that differ, and how far they
differ. Needs a GPU and liger-kernel; with TRITON_INTERPRET=1 it runs small sizes on the CPU.
"""

import os
import sys
from collections.abc import Callable

import torch
from compare_runs import report

IS_CPU = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, ROWS = ("cpu", 4) if IS_CPU else ("cuda", 4096)
WIDTHS = (64, 96) if IS_CPU else (2048, 4096, 8192, 16384)
VOCABULARIES = (320, 512) if IS_CPU else (32000, 65536, 128256, 151936)
FOUND: dict[str, torch.Tensor] = {}
BF16 = torch.bfloat16


def leaf(*sizes: int, scale: float = 1.0) -> torch.Tensor:
    """Return random values that want a gradient."""
    return (torch.randn(*sizes, device=DEVICE) * scale).to(BF16).requires_grad_()


def run(name: str, y: torch.Tensor, *leaves: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """Run the backward pass, and keep a sample of the result and of the gradients."""
    result = y.detach().clone()  # because a backward pass may write into its saved tensors
    y.backward(torch.randn_like(y) if gradient is None else gradient)
    for number, tensor in enumerate((result, *(one.grad for one in leaves))):
        if tensor is not None:
            FOUND[f"{name}.{number}"] = tensor.detach().flatten()[: 1 << 20].float().cpu()


def rmsnorm(width: int) -> None:
    """Run the module RMSNorm on (rows, width)."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, weight = leaf(ROWS, width), leaf(width)
    run(f"rmsnorm {width}", LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False), x, weight)


def layernorm(width: int) -> None:
    """Run LayerNorm on (rows, width)."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    x, weight, bias = leaf(ROWS, width), leaf(width), leaf(width)
    run(f"layernorm {width}", LigerLayerNormFunction.apply(x, weight, bias, 1e-6), x, weight, bias)


def swiglu(width: int) -> None:
    """Run SwiGLU on two tensors of (rows, width)."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = leaf(ROWS, width), leaf(ROWS, width)
    run(f"swiglu {width}", LigerSiLUMulFunction.apply(gate, up), gate, up)


def geglu(width: int) -> None:
    """Run GeGLU on two tensors of (rows, width)."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    gate, up = leaf(ROWS, width), leaf(ROWS, width)
    run(f"geglu {width}", LigerGELUMulFunction.apply(gate, up), gate, up)


def softmax(width: int) -> None:
    """Run softmax over the last dimension of (rows, width)."""
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    x = leaf(ROWS, width)
    run(f"softmax {width}", LigerSoftmaxFunction.apply(x), x)


def rope(width: int) -> None:
    """Rotate queries of width / 128 heads, and keys of a quarter as many."""
    from liger_kernel.ops.rope import LigerRopeFunction

    heads, side = (4, width // 4) if IS_CPU else (width // 128, 128)
    q, k = leaf(1, heads, ROWS, side), leaf(1, heads // 4, ROWS, side)
    angles = torch.outer(torch.arange(ROWS, device=DEVICE), 1e4 ** (-torch.arange(side, device=DEVICE) % (side // 2) / side))
    rotated_q, rotated_k = LigerRopeFunction.apply(q, k, angles.cos()[None].to(BF16), angles.sin()[None].to(BF16))
    results = [one.detach().clone() for one in (rotated_q, rotated_k)]
    torch.autograd.backward((rotated_q, rotated_k), (torch.randn_like(rotated_q), torch.randn_like(rotated_k)))
    for number, tensor in enumerate((*results, q.grad, k.grad)):
        FOUND[f"rope {width}.{number}"] = tensor.flatten()[: 1 << 20].float().cpu()  # type: ignore[union-attr]


def cross_entropy(vocabulary: int) -> None:
    """Run cross entropy over (rows / 2, vocabulary); the gradient of the loss is not 1, so that the gradient is scaled."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    x = leaf(ROWS // 2, vocabulary)
    target = torch.randint(vocabulary, (ROWS // 2,), device=DEVICE)
    loss = LigerCrossEntropyFunction.apply(x, target, None)[0]
    run(f"cross_entropy {vocabulary}", loss, x, gradient=torch.full_like(loss, 0.5))


def fused_linear_cross_entropy(vocabulary: int) -> None:
    """Run the product with the vocabulary and its cross entropy, hidden size 2048."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden = 64 if IS_CPU else 2048
    x, weight = leaf(ROWS // 2, hidden), leaf(vocabulary, hidden, scale=hidden**-0.5)
    target = torch.randint(vocabulary, (ROWS // 2,), device=DEVICE)
    loss = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]
    run(f"fused_linear_cross_entropy {vocabulary}", loss, x, weight, gradient=torch.full_like(loss, 0.5))


def distributions(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of a student, which want a gradient, and of a teacher, each (rows / 2, vocabulary)."""
    student, teacher = (torch.randn(ROWS // 2, vocabulary, device=DEVICE, dtype=BF16).log_softmax(-1) for _ in range(2))
    return student.requires_grad_(), teacher


def kl_div(vocabulary: int) -> None:
    """Run the Kullback-Leibler divergence of two distributions."""
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    student, teacher = distributions(vocabulary)
    loss = LigerKLDivLossFunction.apply(student, teacher, "batchmean", True)
    run(f"kl_div {vocabulary}", loss, student, gradient=torch.full_like(loss, 0.5))


def jsd(vocabulary: int) -> None:
    """Run the Jensen-Shannon divergence of two distributions."""
    from liger_kernel.ops.jsd import LigerJSDFunction

    student, teacher = distributions(vocabulary)
    loss = LigerJSDFunction.apply(student, teacher)
    run(f"jsd {vocabulary}", loss, student, gradient=torch.full_like(loss, 0.5))


def tvd(vocabulary: int) -> None:
    """Run the total variation distance of two distributions."""
    from liger_kernel.ops.tvd import LigerTVDLossFunction

    student, teacher = (one.detach().exp() for one in distributions(vocabulary))
    loss = LigerTVDLossFunction.apply(student.requires_grad_(), teacher)
    run(f"tvd {vocabulary}", loss, student, gradient=torch.full_like(loss, 0.5))


PARTS: dict[Callable[[int], None], tuple[int, ...]] = {
    **dict.fromkeys((rmsnorm, layernorm, swiglu, geglu, softmax, rope), WIDTHS),
    **dict.fromkeys((cross_entropy, fused_linear_cross_entropy, kl_div, jsd, tvd), VOCABULARIES),
}


if __name__ == "__main__":
    report(PARTS, FOUND, *sys.argv[1:])
