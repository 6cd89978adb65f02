"""Run a product whose kernel makes its tensor descriptors, for which host code sets an allocator: `python descriptors.py`."""

import torch
import triton
import triton.language as tl
from measured_step import BF16, DEVICE, leaf, run, sized

M = N = K = sized(4096, 64)
CONFIGS = [
    triton.Config({"BM": m, "BN": n, "BK": sized(64, 32)}, num_warps=w, num_stages=3)
    for m in (sized(64, 32), sized(128, 64)) for n in (sized(64, 32), sized(128, 64)) for w in (4, 8)
]  # fmt: skip


@triton.autotune(CONFIGS, key=["m", "n", "k"])
@triton.jit
def product(a_ptr, b_ptr, c_ptr, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiply A (m, k) by the transpose of B (n, k)."""
    a = tl.make_tensor_descriptor(a_ptr, shape=[m, k], strides=[k, 1], block_shape=[BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, shape=[n, k], strides=[k, 1], block_shape=[BN, BK])
    c = tl.make_tensor_descriptor(c_ptr, shape=[m, n], strides=[n, 1], block_shape=[BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        total += tl.dot(a.load([row, at]), b.load([column, at]).T)
    c.store([row, column], total.to(BF16_TYPE))


BF16_TYPE = tl.constexpr(tl.bfloat16)


def step() -> list[torch.Tensor]:
    """Return a product."""
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=DEVICE))
    a, b = leaf(M, K).detach(), leaf(N, K, scale=0.1).detach()
    c = torch.empty(M, N, device=DEVICE, dtype=BF16)
    product[lambda meta: (triton.cdiv(M, meta["BM"]), triton.cdiv(N, meta["BN"]))](a, b, c, M, N, K)
    return [c]


if __name__ == "__main__":
    run(step)
