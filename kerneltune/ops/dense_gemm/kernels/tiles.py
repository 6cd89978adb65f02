"""Multiply few rows of x with dense weights, tile by tile, the contraction of a tile shared by several programs."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_gemm import dot, is_last, sum_of_parts
from kerneltune.kernel_lib.tl_lib import wide
from kerneltune.kernel_lib.workspace import counters
from kerneltune.rounding import cdiv

if TYPE_CHECKING:
    from kerneltune.ops.dense_gemm.configs import DenseConfig


def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    out_dtype: torch.dtype,
    c: "DenseConfig",
) -> torch.Tensor:
    """Return x · wᵀ of out_dtype, times the scales of x and w if there are any."""
    (N, K), M = x.shape, w.shape[0]
    y = torch.empty((N, M), dtype=out_dtype, device=x.device)
    tiles = cdiv(N, c.tokens) * cdiv(M, c.rows)
    parts = torch.empty((c.splits, N, M), dtype=torch.float32, device=x.device) if c.splits > 1 else y
    with counters(tiles, x.device) if c.splits > 1 else nullcontext(y) as counts:
        _dense_gemm[(tiles * c.splits,)](
            x, w, *(scales or (x, x)), y, parts, counts, N, M, K, x.stride(0),
            SCALED=scales is not None, FULL=N % c.tokens == 0 and M % c.rows == 0, EVEN=K % c.depth == 0, SWAP=c.swap,
            TOKENS=c.tokens, ROWS=c.rows, DEPTH=c.depth, STAGES=c.stages, SPLITS=c.splits, num_warps=c.warps,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["N"])
def _dense_gemm(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, y_ptr, part_ptr, counter_ptr, N, M, K, stride_xn,
    SCALED: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of x and of w, or a share of its k.

    FULL: N is a multiple of TOKENS, and M of ROWS. EVEN: K is a multiple of DEPTH.
    """
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    row_tiles = tl.cdiv(M, ROWS)
    tokens = tile // row_tiles * TOKENS + tl.arange(0, TOKENS)
    rows = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    ks = tl.arange(0, DEPTH)
    depth = tl.cdiv(K, DEPTH)
    share = tl.cdiv(depth, SPLITS)
    x_ptrs = x_ptr + wide(tokens)[:, None] * stride_xn + ks[None, :]
    w_ptrs = w_ptr + wide(rows)[:, None] * K + ks[None, :]
    acc = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), dtype=tl.float32)
    for piece in tl.range(split * share, tl.minimum(split * share + share, depth), num_stages=STAGES):
        k = piece * DEPTH
        x_mask, w_mask = (tokens < N)[:, None], (rows < M)[:, None]
        if not EVEN:
            x_mask, w_mask = x_mask & (ks + k < K)[None, :], w_mask & (ks + k < K)[None, :]
        if FULL and EVEN:
            x = tl.load(x_ptrs + k)
            w = tl.load(w_ptrs + k, eviction_policy="evict_first")
        else:
            x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            w = tl.load(w_ptrs + k, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if SWAP:
            acc = dot(w, tl.trans(x), acc)
        else:
            acc = dot(x, tl.trans(w), acc)
    if SCALED:
        acc *= tl.load(x_scale_ptr) * tl.load(w_scale_ptr)
    if SWAP:
        acc = tl.trans(acc)
    mask = (tokens < N)[:, None] & (rows < M)[None, :]
    offsets = wide(tokens)[:, None] * M + rows[None, :]
    if SPLITS == 1:
        tl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(part_ptr + wide(split) * N * M + offsets, acc, mask=mask, cache_modifier=".cg")
        if is_last(counter_ptr + tile, SPLITS):
            acc = sum_of_parts(part_ptr + offsets, wide(N) * M, mask, SPLITS)
            tl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)
