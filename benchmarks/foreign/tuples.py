"""Run a kernel that takes tensors in a tuple, and a product that takes tensor descriptors: `python tuples.py`."""

import torch
import triton
import triton.language as tl
from measured_step import BF16, DEVICE, leaf, run, sized
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, WIDTH = sized(8192, 70), sized(4096, 64)
M = N = K = sized(4096, 64)
BLOCKS = [64, 128] if M > 64 else [32, 64]


@triton.autotune([triton.Config({"BLOCK": b}, num_warps=w) for b in (1024, 2048, 4096) for w in (4, 8)], key=["elements"])
@triton.jit
def gated(inputs, out, elements, BLOCK: tl.constexpr):
    """Multiply the sigmoid of the first tensor by the second."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(inputs[0] + at, mask=at < elements), tl.load(inputs[1] + at, mask=at < elements)
    tl.store(out + at, tl.sigmoid(gate.to(tl.float32)) * up, mask=at < elements)


def with_blocks(given):
    """Give descriptors the blocks of a config."""
    given["a"].block_shape = [given["BM"], given["BK"]]
    given["b"].block_shape = [given["BN"], given["BK"]]


CONFIGS = [
    triton.Config({"BM": m, "BN": n, "BK": 32 if M <= 64 else 64}, num_warps=w, num_stages=3, pre_hook=with_blocks)
    for m in BLOCKS for n in BLOCKS for w in (4, 8)
]  # fmt: skip


@triton.autotune(CONFIGS, key=["m", "n", "k"])
@triton.jit
def product(a, b, c_ptr, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiply A (m, k) by the transpose of B (n, k)."""
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        total += tl.dot(a.load([row, at]), b.load([column, at]).T)
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], total.to(c_ptr.dtype.element_ty), mask=(rows < m)[:, None])


def step() -> list[torch.Tensor]:
    """Return the results of both kernels."""
    gate, up = leaf(ROWS, WIDTH).detach(), leaf(ROWS, WIDTH, scale=0.5).detach()
    out = torch.empty_like(gate)
    gated[lambda meta: (triton.cdiv(gate.numel(), meta["BLOCK"]),)]((gate, up), out, gate.numel())
    a, b = leaf(M, K).detach(), leaf(N, K, scale=0.1).detach()
    c = torch.empty(M, N, device=DEVICE, dtype=BF16)
    block = [BLOCKS[0], CONFIGS[0].kwargs["BK"]]
    first, second = TensorDescriptor.from_tensor(a, block), TensorDescriptor.from_tensor(b, block)
    product[lambda meta: (triton.cdiv(M, meta["BM"]), triton.cdiv(N, meta["BN"]))](first, second, c, M, N, K)
    return [out, c]


if __name__ == "__main__":
    run(step)
