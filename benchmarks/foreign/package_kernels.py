"""Run kernels of packages: `python package_kernels.py NAME`.

adam: turboadam, whose optimizer writes to all that it reads; blocks: torch.sparse and stanford-stk, products of block-sparse
matrices; experts: moe_ops, routing and grouped products; mamba: mamba-ssm, whose hooks set outputs to zero; maxsim:
late-interaction-kernels, whose autotuner keeps choices on disk; sinkhorn: flash-sinkhorn, autotuners made of a kernel with
heuristics; splash: adasplash; swiglu: flash-swiglu-mlp, which reads the choice of its autotuner; attention: jvp-flash-attention;
lion: lion-pytorch, whose kernel updates in place; selected: native-sparse-attention-pytorch, whose kernels compile for 40 s;
linear: lightning-attn; codebooks: aqlm, configs that differ in options alone.
"""

import sys
from typing import Any

import torch
from measured_step import DEVICE, leaf, run, sized, trained


def adam() -> Any:
    """Take three steps of an optimizer from the same state."""
    from turboadam import TurboAdam

    weights = [leaf(sized(4096, 128), width) for width in (sized(4096, 64), sized(1000, 96))]
    optimizer = TurboAdam(weights, lr=1e-2, weight_decay=0.1)
    for number in range(3):
        for weight in weights:
            weight.grad = leaf(*weight.shape, scale=0.1 * (number + 1)).detach()
        optimizer.step()
    return weights


def blocks() -> Any:
    """Multiply matrices of which a half of the blocks is zero."""
    import stk
    from torch.sparse import _triton_ops

    size, block = sized(4096, 256), sized(64, 32)
    dense, right = leaf(size, size).detach(), leaf(size, size, scale=0.1).detach()
    torch.manual_seed(5)
    kept = torch.rand(size // block, size // block, device=DEVICE) < 0.5
    masked = dense * kept.repeat_interleave(block, 0).repeat_interleave(block, 1)
    rows = masked.to_sparse_bsr((block, block))
    sampled = _triton_ops.sampled_addmm(rows, dense, right, alpha=0.5)
    found = [_triton_ops.bsr_dense_addmm(dense, rows, right, beta=0.5), _triton_ops.bsr_dense_mm(rows, right), sampled.values()]
    kept = torch.rand(size // 128, size // 128, device=DEVICE) < 0.5
    kept[0, 0] = True
    matrix = stk.ops.to_sparse(dense * kept.repeat_interleave(128, 0).repeat_interleave(128, 1), 128)
    return [*found, stk.ops.dsd(matrix, right), stk.ops.sdd(dense, right, matrix).data]


def experts() -> Any:
    """Train a layer of experts: choose, sort rows, multiply, put rows back."""
    import moe_ops

    tokens, hidden, inner, count, chosen = sized(4096, 48), sized(2048, 64), sized(1408, 128), sized(32, 4), sized(4, 2)
    x, logits = leaf(tokens, hidden), leaf(tokens, count)
    up, down = leaf(count, inner, hidden, scale=0.05), leaf(count, hidden, inner, scale=0.05)
    weights, indices = moe_ops.fused_topk_softmax(logits, chosen)
    rows, places, offsets = moe_ops.permute(x, indices, 0, count)
    rows = moe_ops.grouped_gemm(torch.nn.functional.silu(moe_ops.grouped_gemm(rows, up, offsets)), down, offsets)
    return trained(moe_ops.unpermute(rows, places, weights, tokens, chosen), x, logits)


def mamba() -> Any:
    """Train a state-space scan over chunks, with and without a gate."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    batch, length, heads, width, states = 2, sized(4096, 64), sized(32, 2), 64, sized(128, 16)
    x, z, b, c = (leaf(batch, length, n, w, scale=s) for n, w, s in (
        (heads, width, 1.0), (heads, width, 0.7), (1, states, 0.5), (1, states, 0.4),
    ))  # fmt: skip
    step, decay = leaf(batch, length, heads, scale=0.1), -leaf(heads, dtype=torch.float32).detach().exp()
    plain = mamba_chunk_scan_combined(x, step, decay, b, c, sized(256, 32), dt_softplus=True)
    gated = mamba_chunk_scan_combined(x, step, decay, b, c, sized(256, 32), z=z, dt_softplus=True)
    return trained(plain, x, step, b, c) + trained(gated, x, z)


def maxsim() -> Any:
    """Train the scores of queries and documents by their best words."""
    from late_interaction_kernels import maxsim, maxsim_varlen

    queries, documents = leaf(sized(32, 2), 32, 128), leaf(sized(64, 3), sized(300, 20), 128, scale=0.7)
    lengths = torch.arange(len(documents), device=DEVICE) % 5 + documents.shape[1] - 5
    mask = torch.arange(documents.shape[1], device=DEVICE)[None, :] < lengths[:, None]
    found = trained(maxsim(queries, documents, d_mask=mask, normalize=True), queries, documents)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    starts = torch.arange(0, queries.numel() // 128 + 1, 32, dtype=torch.int32, device=DEVICE)
    scores = maxsim_varlen(queries.detach().reshape(-1, 128), documents.detach()[mask], starts, ends)
    return [*found, scores]


def sinkhorn() -> Any:
    """Train the distance between two clouds of points."""
    from flash_sinkhorn import SamplesLoss

    x, y = leaf(sized(4096, 70), 64, dtype=torch.float32), leaf(sized(3000, 50), 64, scale=0.8, dtype=torch.float32)
    loss = SamplesLoss("sinkhorn", blur=1.0, backend="alternating", n_iters=5, use_epsilon_scaling=False, eps=1.0)
    return trained(loss(x, y.detach()), x)


def splash() -> Any:
    """Train sparse causal attention and entmax over rows."""
    from adasplash import adasplash, triton_entmax

    batch, heads, length, width = 2, sized(16, 1), sized(2048, 64), sized(64, 16)
    q = leaf(batch, heads, length, width)
    k, v = (leaf(batch, max(1, heads // 4), length, width, scale=s) for s in (0.5, 0.8))
    rows = leaf(sized(4096, 6), sized(4000, 50), dtype=torch.float32)
    return trained(adasplash(q, k, v), q, k, v) + trained(triton_entmax(rows * 1, alpha=1.5), rows)


def swiglu() -> Any:
    """Train an MLP whose backward pass takes the blocks that its forward pass chose, in the memory of the forward pass."""
    from flash_swiglu_mlp import flash_swiglu

    hidden, inner = sized(2048, 64), sized(5632, 256)
    x = leaf(2, sized(2048, 32), hidden)
    gate, up, down = leaf(inner, hidden, scale=0.05), leaf(inner, hidden, scale=0.04), leaf(hidden, inner, scale=0.05)
    return trained(flash_swiglu(x, gate, up, down), x, gate, up, down)


def attention() -> Any:
    """Train attention, whose kernels make descriptors on the device."""
    from jvp_flash_attention.jvp_attention import attention

    q, k, v = (leaf(2, sized(8, 1), sized(1024, 64), 64, scale=s) for s in (1.0, 0.5, 0.8))
    return trained(attention(q, k, v, causal=True), q, k, v)


def lion() -> Any:
    """Take three steps of an optimizer from the same state."""
    from lion_pytorch.triton import update_fn

    weights = [leaf(sized(4096, 128), width).detach() for width in (sized(4096, 64), sized(1000, 96))]
    averages = [torch.zeros_like(weight) for weight in weights]
    for number in range(3):
        for weight, average in zip(weights, averages, strict=True):
            update_fn(weight, leaf(*weight.shape, scale=0.1 * (number + 1)).detach(), average, 1e-2, 0.1, 0.9, 0.99)
    return weights, averages


def selected() -> Any:
    """Train attention to two selected blocks of keys."""
    from native_sparse_attention_pytorch.triton_native_sparse_attention import native_sparse_attend

    length, heads, kept = sized(1024, 64), sized(8, 2), 2
    q, k, v = (leaf(1, n, length, 64, scale=s) for n, s in ((heads, 1.0), (heads // 2, 0.5), (heads // 2, 0.8)))
    torch.manual_seed(3)
    blocks = torch.randint(0, length // 32, (1, heads // 2, length, kept), device=DEVICE)
    return trained(native_sparse_attend(q, k, v, 32, blocks, torch.ones_like(blocks, dtype=torch.bool)), q, k, v)


def linear() -> Any:
    """Train linear attention with and without decay."""
    from lightning_attn.ops import lightning_attn2, lightning_attn2_no_decay

    q, k, v = (leaf(2, sized(16, 2), sized(2048, 128), 64, scale=s) for s in (0.2, 0.1, 0.8))
    decay = torch.linspace(0.01, 0.2, q.shape[1], device=DEVICE)
    return trained(lightning_attn2(q, k, v, decay), q, k, v) + trained(lightning_attn2_no_decay(q, k, v), q, k, v)


def codebooks() -> Any:
    """Multiply two tokens by weights of two codebooks."""
    from aqlm.inference_kernels.triton_kernel import triton_matmul

    inner, outer = sized(4096, 64), sized(4096, 32)
    torch.manual_seed(4)
    codes = torch.randint(-128, 128, (outer, inner // 8, 2), device=DEVICE).to(torch.int8)
    books, scales = leaf(2, 256, 1, 8, scale=0.1).detach(), leaf(outer, 1, 1, 1).detach()
    return triton_matmul(leaf(2, inner).detach(), codes, books, scales, None)


STEPS = {
    "adam": adam, "blocks": blocks, "experts": experts, "mamba": mamba, "maxsim": maxsim, "sinkhorn": sinkhorn, "splash": splash,
    "swiglu": swiglu, "attention": attention, "lion": lion, "selected": selected, "linear": linear,
    "codebooks": codebooks,
}  # fmt: skip

if __name__ == "__main__":
    run(STEPS[sys.argv[1]])
