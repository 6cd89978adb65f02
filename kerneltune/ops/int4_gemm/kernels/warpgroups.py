"""Multiply by warpgroups (wgmma): codes go straight into registers, x through shared memory.

A warp has sixteen rows of w, the warpgroup of a block its 64, and all warps of a program read one tile of x from shared
memory, half a block of k at a time. wgmma multiplies sixteen k at once, of which a lane holds two neighbours and the two k
that are eight further. Because the packed layout gives a lane eight neighbours, x is put into the order of the codes on its
way to shared memory. With 32 tokens, an SM has room for sixteen warps of this kernel, but only for eight warps of `warps`.
Both tiles of x of a step are stored before the first is read, so that a step has two barriers with Triton 3.6. Triton 3.7.1
also moves the elements of w and the scales through shared memory, with six barriers to a step.

ptxas before 13.3 may overwrite the registers of a wgmma that still reads them. Here every wgmma is waited for before the
next codes become elements, and all configs must multiply integers exactly before they are timed.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.kernel_lib.tl_gemm import dot
from kerneltune.kernel_lib.tl_lib import only_if, since_sm_90, wide
from kerneltune.ops.int4_gemm.kernels.warps import (
    elements_of,
    finish,
    into_l2,
    load_codes,
    split_halves,
    values_of_quarter,
    weight_places,
)


@triton.jit
def _in_order(x):
    """Return x (TOKENS, 64) as (64, TOKENS), its k in the order in which `elements_of` makes elements of two words."""
    TOKENS: tl.constexpr = x.shape[0]
    x = tl.reshape(x, (TOKENS, 2, 4, 2, 2, 2))  # quarter, c, a, b, e
    return tl.trans(tl.reshape(tl.permute(x, (0, 1, 4, 3, 2, 5)), (TOKENS, 64)))


@triton.jit
def _load_tokens(x_ptrs, live, needed, k, K):
    """Load x, 0 past the ends. live: whether each token exists; needed: whether there is a step to load x for."""
    return tl.load(x_ptrs, mask=only_if(live & (k < K), needed), other=0.0)


@triton.jit
def _product(words, zeros, x, sums, HALF: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """Add half a block of k, without its scales, to sums: words (4, 8, W, 2, 2), x (64, TOKENS), sums (16 W, TOKENS)."""
    W: tl.constexpr = words.shape[2]
    q: tl.constexpr = 2 * HALF
    w = elements_of(words, values_of_quarter(zeros, q, GROUPS), values_of_quarter(zeros, q + 1, GROUPS), ZEROS, x.dtype)
    return dot(tl.reshape(tl.permute(w, (2, 3, 1, 5, 7, 6, 0, 4)), (16 * W, 64)), x, sums)


@triton.jit
def _scaled(sums, scales, q: tl.constexpr, GROUPS: tl.constexpr):
    """Multiply sums (16 W, TOKENS) with the scales of a quarter of the block."""
    W: tl.constexpr = scales.shape[2]
    TOKENS: tl.constexpr = sums.shape[1]
    scale = tl.permute(values_of_quarter(scales, q, GROUPS).to(tl.float32), (2, 3, 1, 0))[:, :, :, None, :, None]
    return tl.reshape(tl.reshape(sums, (W, 2, 8, TOKENS // 8, 4, 2)) * scale, (16 * W, TOKENS))


@triton.jit(do_not_specialize=["N"])
def _int4_gemm_by_warpgroups(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, N, M, K, stride_xn,
    WEIGHT: tl.constexpr, WORK: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    """Write y (N, M).

    The last split takes the rest of k. LEAD: steps that L2 is asked for in advance, 0 for none. The weight has at most two
    groups in 128 of k.
    """
    GROUPS: tl.constexpr = WEIGHT.groups
    ONE_GROUP: tl.constexpr = WEIGHT.one_group
    ZEROS: tl.constexpr = WEIGHT.zeros
    TOKENS: tl.constexpr = WORK.tokens
    STEPS: tl.constexpr = WORK.steps
    BLOCKS: tl.constexpr = WORK.blocks
    W: tl.constexpr = 4 * BLOCKS
    row_blocks = tl.cdiv(M, 64)
    split, tile = tl.program_id(0), tl.program_id(1)
    first_token = tl.program_id(2) * TOKENS
    k_block = split * STEPS
    steps = tl.minimum(tl.cdiv(K, 128) - k_block, STEPS)
    tl.assume(steps > 0)
    warp = tl.arange(0, W)
    piece = (warp % 4)[None, None, :]
    row_block = tl.minimum(tile * BLOCKS + warp // 4, row_blocks - 1)  # past the end, load the last block
    block = (wide(k_block) * row_blocks + row_block)[None, None, :]
    scale_block = row_block[None, None, :] + tl.zeros_like(block) if ONE_GROUP else block
    w_step = wide(row_blocks) * 1024
    s_step = 0 if ONE_GROUP else wide(row_blocks) * (64 * GROUPS)
    if LEAD:
        gdc_launch_dependents()
        lane = tl.arange(0, 4)[:, None, None] + tl.arange(0, 8)[None, :, None]
        # Because programs read the same x, each warp asks for another token.
        row = first_token + (tile * W + warp)[None, None, :] % TOKENS
        x_slice = x_ptr + wide(row) * stride_xn + k_block * 128
        into_l2(x_slice + tl.zeros_like(lane), lane, row < N, 2 * (tl.minimum(K, (k_block + STEPS) * 128) - k_block * 128))
        for step in tl.static_range(min(STEPS, LEAD)):
            live = (step + 0 * warp < steps)[None, None, :]
            if step == 0 or not ONE_GROUP:
                into_l2(scale_ptr + scale_block * (64 * GROUPS) + step * s_step, lane + piece, live, 128 * GROUPS)
                if ZEROS:
                    into_l2(zero_ptr + scale_block * (64 * GROUPS) + step * s_step, lane + piece, live, 128 * GROUPS)
            into_l2(w_ptr + block * 1024 + piece * 256 + step * w_step, lane, live, 1024)
        gdc_wait()
    w_ptrs, s_offsets, s_inner = weight_places(w_ptr, block, scale_block, piece, 2, GROUPS)
    s_offsets += s_inner
    token = first_token + tl.arange(0, TOKENS)[:, None]
    k = k_block * 128 + tl.arange(0, 64)[None, :]
    x_ptrs = x_ptr + (wide(token) * stride_xn + k)

    s0, w0 = tl.load(scale_ptr + s_offsets), tl.load(w_ptrs)
    z0 = tl.load(zero_ptr + s_offsets) if ZEROS else s0
    if since_sm_90():
        gdc_wait()  # the compiler would put the loads of x in front of these
    live = token < N
    xa0 = _load_tokens(x_ptrs, live, steps > 0, k, K)
    xb0 = _load_tokens(x_ptrs + 64, live, steps > 0, k + 64, K)
    y = tl.zeros((16 * W, TOKENS), dtype=tl.float32)
    for step in tl.range(
        steps, num_stages=1
    ):  # w0, xa0, xb0, …: of this step (halves a, b of the block); w1, …: of the next step
        has_next = step + 1 < steps
        w_ptrs += w_step
        s_offsets += s_step
        x_ptrs += 128
        k += 128
        has_next5 = (step + 1 + 0 * warp < steps)[None, None, :, None, None]
        w1 = load_codes(w_ptrs, has_next5, False)
        s1 = load_codes(scale_ptr + s_offsets, has_next5, False)
        z1 = load_codes(zero_ptr + s_offsets, has_next5, False) if ZEROS else s1
        xa1 = _load_tokens(x_ptrs, live, has_next, k, K)
        xb1 = _load_tokens(x_ptrs + 64, live, has_next, k + 64, K)
        first, second = split_halves(w0)
        xa, xb = _in_order(xa0), _in_order(xb0)
        no_sums = tl.zeros((16 * W, TOKENS), dtype=tl.float32)
        sums = _product(first, z0, xa, no_sums, 0, GROUPS, ZEROS)
        if GROUPS == 2:
            y += _scaled(sums, s0, 0, GROUPS)
            sums = no_sums
        y += _scaled(_product(second, z0, xb, sums, 1, GROUPS, ZEROS), s0, 2, GROUPS)
        w0, s0, z0, xa0, xb0 = w1, s1, z1, xa1, xb1
    y = tl.reshape(tl.permute(tl.reshape(y, (BLOCKS, 4, 2, 8, TOKENS)), (4, 0, 3, 1, 2)), (TOKENS, 64 * BLOCKS))
    finish(y_ptr, bias_ptr, part_ptr, split, tile, first_token, y, N, M, WORK.splits, WEIGHT.bias)


int4_gemm_by_warpgroups = _int4_gemm_by_warpgroups
"""The public name; the compiled kernel keeps the name that recorded facts have."""
