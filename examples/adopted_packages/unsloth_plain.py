"""Kernel modules of Unsloth 2026.10.9, forward and backward at three sizes each; imports no kerneltune.

`python unsloth_plain.py RESULTS.pt [EXPECTED.pt]` prints one line of JSON: the results of both files that differ, and how far
they differ. Needs a GPU and the folder that `cut_kernels.py` writes; with TRITON_INTERPRET=1 it runs small sizes on the CPU.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

os.environ["UNSLOTH_ALLOW_CPU"] = "1"  # so that its modules can be imported by processes that compile without a GPU
sys.path.append(str(Path(__file__).resolve().with_name("cut")))

import torch
from compare_runs import report
from unsloth.kernels import cross_entropy_loss, geglu, layernorm, rms_layernorm, rope_embedding
from unsloth.kernels import swiglu as swiglu_kernels

IS_CPU = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, ROWS = ("cpu", 4) if IS_CPU else ("cuda", 4096)
WIDTHS = (128, 192) if IS_CPU else (2048, 4096, 8192)
VOCABULARIES = (320, 512) if IS_CPU else (32000, 128256, 151936)
FOUND: dict[str, torch.Tensor] = {}
BF16 = torch.bfloat16


def leaf(*sizes: int) -> torch.Tensor:
    """Return random values that want a gradient."""
    return torch.randn(*sizes, device=DEVICE).to(BF16).requires_grad_()


def keep(name: str, *tensors: torch.Tensor | None) -> None:
    """Keep a sample of results."""
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            FOUND[f"{name}.{number}"] = tensor.detach().flatten()[: 1 << 20].float().cpu()


def rmsnorm(width: int) -> None:
    """Run RMSNorm on (rows, width), with a trained and with a frozen weight."""
    for is_trained in (True, False):
        x, weight = leaf(1, ROWS, width), leaf(width).detach().requires_grad_(is_trained)
        y = rms_layernorm.fast_rms_layernorm(SimpleNamespace(weight=weight, eps=1e-6), x)
        y.backward(torch.randn_like(y))
        keep(f"rmsnorm {width} {is_trained}", y, x.grad, weight.grad)


def layer_norm(width: int) -> None:
    """Run LayerNorm on (rows, width)."""
    x, weight, bias = leaf(1, ROWS, width), leaf(width), leaf(width)
    y = layernorm.fast_layernorm(SimpleNamespace(weight=weight, bias=bias, eps=1e-6, elementwise_affine=True), x)
    y.backward(torch.randn_like(y))
    keep(f"layernorm {width}", y, x.grad, weight.grad, bias.grad)


def gated(name: str, width: int, forward: Callable[..., torch.Tensor], backward: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """Run a gated activation on two tensors of (rows, width); its backward pass writes into its arguments."""
    gate, up, dy = (torch.randn(ROWS, width, device=DEVICE).to(BF16) for _ in range(3))
    keep(f"{name} {width}", forward(gate[None], up[None]), *backward(dy, gate, up))


def swiglu(width: int) -> None:
    """Run SwiGLU."""
    gated("swiglu", width, swiglu_kernels.swiglu_fg_kernel, swiglu_kernels.swiglu_DWf_DW_dfg_kernel)


def geglu_exact(width: int) -> None:
    """Run GeGLU with erf."""
    gated("geglu exact", width, geglu.geglu_exact_forward_kernel, geglu.geglu_exact_backward_kernel)


def geglu_approx(width: int) -> None:
    """Run GeGLU with tanh."""
    gated("geglu approx", width, geglu.geglu_approx_forward_kernel, geglu.geglu_approx_backward_kernel)


def rope(width: int) -> None:
    """Rotate queries of width / 128 heads, and keys of a quarter as many."""
    heads, side = (4, width // 4) if IS_CPU else (width // 128, 128)
    q, k = leaf(1, heads, ROWS, side), leaf(1, heads // 4, ROWS, side)
    angles = torch.outer(torch.arange(ROWS, device=DEVICE), 1e4 ** (-torch.arange(side, device=DEVICE) % (side // 2) / side))
    rotated = rope_embedding.fast_rope_embedding(q * 1.0, k * 1.0, angles.cos().to(BF16), angles.sin().to(BF16))
    kept = [one.detach().clone() for one in rotated]
    torch.autograd.backward(rotated, [torch.randn_like(one) for one in rotated])
    keep(f"rope {width}", *kept, q.grad, k.grad)


def cross_entropy(vocabulary: int) -> None:
    """Run cross entropy over (rows / 2, vocabulary)."""
    x = leaf(1, ROWS // 2, vocabulary)
    target = torch.randint(vocabulary, (1, ROWS // 2), device=DEVICE)
    loss = cross_entropy_loss.fast_cross_entropy_loss(x * 1.0, target)
    loss.backward(torch.full_like(loss, 0.5))
    keep(f"cross_entropy {vocabulary}", loss, x.grad)


PARTS: dict[Callable[[int], None], tuple[int, ...]] = {
    **dict.fromkeys((rmsnorm, layer_norm, swiglu, geglu_exact, geglu_approx, rope), WIDTHS),
    cross_entropy: VOCABULARIES,
}


if __name__ == "__main__":
    report(PARTS, FOUND, *sys.argv[1:])
