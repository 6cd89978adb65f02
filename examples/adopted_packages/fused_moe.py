r"""An expert layer in the style of vLLM's: its host sorts tokens by the block size of a config that a function gives.

`get_config` reads the nearest key of `E=<experts>,N=<inner>,device_name=<gpu>.json` in the folder FUSED_MOE_CONFIGS, or guesses.
Another block size needs another sort, so that no launch of the products can be tuned alone:

    kerneltune adopt getter fused_moe.py:get_config --call fused_moe.py:fused_experts \
        --model config.json --tp 8 --out moe --export vllm
    FUSED_MOE_CONFIGS=moe python program.py
"""

import functools
import json
import os
from pathlib import Path

import torch
import triton
import triton.language as tl

FOLDER = "FUSED_MOE_CONFIGS"


@functools.cache
def table(experts: int, inner: int) -> dict[int, dict[str, int]]:
    """Return the configs of a layer by tokens; empty without a file for this GPU."""
    gpu = torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "none"
    path = Path(os.environ.get(FOLDER, "."), f"E={experts},N={inner},device_name={gpu}.json")
    return {int(tokens): config for tokens, config in json.loads(path.read_text()).items()} if path.is_file() else {}


def get_config(tokens: int, experts: int, inner: int) -> dict[str, int]:
    """Return the config of both products."""
    configs = table(experts, inner)
    if configs:
        return configs[min(configs, key=lambda known: abs(known - tokens))]
    if tokens <= experts:
        return {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    return {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}


@triton.jit
def count_pairs(ids, counts, ranks, PAIRS, CHUNK: tl.constexpr):
    """Count the pairs of each expert, and number each pair among those of its expert."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < PAIRS, other=0)
    tl.store(ranks + at, tl.atomic_add(counts + expert, 1, mask=at < PAIRS), mask=at < PAIRS)


@triton.jit
def place_pairs(
    ids, counts, ranks, rows, block_experts, used, PAIRS, BLOCKS,
    E: tl.constexpr, E2: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store each pair at the row of its number among its expert's padded rows, and the expert of each block of rows."""
    at, known = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), tl.arange(0, E2)
    padded = (tl.load(counts + known, mask=known < E, other=0) + BLOCK - 1) // BLOCK * BLOCK
    expert = tl.load(ids + at, mask=at < PAIRS, other=0)
    start = tl.sum(tl.where(known[None, :] < expert[:, None], padded[None, :], 0), 1)
    tl.store(rows + start + tl.load(ranks + at, mask=at < PAIRS, other=0), at, mask=at < PAIRS)
    owner = tl.sum((tl.cumsum(padded, 0)[None, :] <= at[:, None] * BLOCK).to(tl.int32), 1)
    tl.store(block_experts + at, tl.minimum(owner, E - 1), mask=at < BLOCKS)
    tl.store(used, tl.sum(padded, 0), mask=tl.program_id(0) == 0)


def align(topk_ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs of token and expert by expert, each expert's rows padded to a multiple of the block.

    Returns:
        The pair of each row (R,), or the number of pairs for padding; the expert of each block (R / block,); the used rows (1,).
    """
    pairs, chunk = topk_ids.numel(), 64
    blocks = min(pairs, triton.cdiv(pairs, block) + experts)
    rows = torch.full((blocks * block,), pairs, dtype=torch.int32, device=topk_ids.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=topk_ids.device)
    ranks, block_experts, used = (torch.empty(n, dtype=torch.int32, device=topk_ids.device) for n in (pairs, blocks, 1))
    wide, grid = triton.next_power_of_2(experts), (triton.cdiv(pairs, chunk),)
    count_pairs[grid](topk_ids, counts, ranks, pairs, chunk)
    place_pairs[grid](topk_ids, counts, ranks, rows, block_experts, used, pairs, blocks, experts, wide, block, chunk)
    return rows, block_experts, used


@triton.jit
def expert_product(
    x, w, y, weights, rows, block_experts, used, N, K, PAIRS,
    TOP_K: tl.constexpr, IS_WEIGHTED: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x by the transposed weight of their expert: y[pair] = x[pair // TOP_K] @ w[expert].T."""
    used_rows = tl.load(used)
    blocks_m, blocks_n = tl.cdiv(used_rows, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    in_group = GROUP_SIZE_M * blocks_n
    first_m = tl.program_id(0) // in_group * GROUP_SIZE_M
    group = tl.maximum(tl.minimum(blocks_m - first_m, GROUP_SIZE_M), 1)
    block_m = first_m + tl.program_id(0) % in_group % group
    block_n = tl.program_id(0) % in_group // group
    if (block_m < blocks_m) & (block_n < blocks_n):
        pair = tl.load(rows + block_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M))
        is_pair = pair < PAIRS
        expert = tl.load(block_experts + block_m).to(tl.int64)
        column = block_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        depth = tl.arange(0, BLOCK_SIZE_K)
        x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * K + depth[None, :]
        w_at = w + expert * N * K + column[None, :] * K + depth[:, None]
        product = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):
            left = depth < K - k * BLOCK_SIZE_K
            a = tl.load(x_at, mask=is_pair[:, None] & left[None, :], other=0.0)
            b = tl.load(w_at, mask=left[:, None] & (column[None, :] < N), other=0.0)
            product = tl.dot(a, b, product)
            x_at += BLOCK_SIZE_K
            w_at += BLOCK_SIZE_K
        if IS_WEIGHTED:
            product *= tl.load(weights + pair, mask=is_pair, other=0.0)[:, None]
        y_at = y + pair.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(y_at, product.to(y.dtype.element_ty), mask=is_pair[:, None] & (column[None, :] < N))


@triton.jit
def silu_and_multiply(x, y, N, BLOCK: tl.constexpr):
    """Multiply the second half of a row by SiLU of the first half."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * N + column, mask=column < N, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(y + row * N + column, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=column < N)


@triton.jit
def sum_of_pairs(x, y, N, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the rows of each token's pairs."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for pair in tl.static_range(TOP_K):
        total += tl.load(x + (row * TOP_K + pair) * N + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(y + row * N + column, total.to(y.dtype.element_ty), mask=column < N)


def fused_experts(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts.

    Args:
        hidden_states: (tokens, hidden).
        w1: gate and up, (experts, 2 inner, hidden).
        w2: down, (experts, hidden, inner).
        topk_weights, topk_ids: (tokens, top_k), float32 and int32.
    """
    tokens, hidden = hidden_states.shape
    experts, _, inner = w2.shape
    top_k, pairs = topk_ids.shape[1], topk_ids.numel()
    config = dict(get_config(tokens, experts, inner))
    rows, block_experts, used = align(topk_ids, experts, config["BLOCK_SIZE_M"])
    wide, narrow = hidden_states.new_empty(pairs, 2 * inner), hidden_states.new_empty(pairs, inner)
    parts, out = hidden_states.new_empty(pairs, hidden), torch.empty_like(hidden_states)

    def multiply(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, of_token: int, is_weighted: bool) -> None:
        n, k = w.shape[1:]
        grid = (block_experts.numel() * triton.cdiv(n, config["BLOCK_SIZE_N"]),)
        expert_product[grid](x, w, y, topk_weights, rows, block_experts, used, n, k, pairs, of_token, is_weighted, **config)

    multiply(hidden_states, w1, wide, top_k, False)
    silu_and_multiply[(pairs, triton.cdiv(inner, 1024))](wide, narrow, inner, 1024)
    multiply(narrow, w2, parts, 1, True)
    sum_of_pairs[(tokens, triton.cdiv(hidden, 1024))](parts, out, hidden, top_k, 1024)
    return out


def checked_by(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return what `fused_experts` must return, by plain torch in float32."""
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    for token in range(hidden_states.shape[0]):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            gate, up = (w1[expert].float() @ hidden_states[token].float()).chunk(2)
            out[token] += weight * (w2[expert].float() @ (torch.nn.functional.silu(gate) * up))
    return out.to(hidden_states.dtype)
