"""The kernel of `int4_gemm` for more tokens than a few: x and the codes on their way to the tensor cores wait in shared memory.

A program takes 128 or 256 rows of w, so that fewer programs read the same x; a code is unpacked once for all tokens of the
program. Scales multiply weights, rounded to the type of x as they are in a product with dequantised weights, so that one sum per
result is all that registers hold. Loads run several blocks of k ahead. May import triton, kernels, tl_gemm and tl_lib.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.kernel_lib.tl_gemm import dot, is_last, sum_of_parts
from kerneltune.kernel_lib.tl_lib import is_cuda, wide
from kerneltune.ops.int4_gemm.kernels import (
    _STEPS_AHEAD,
    _finish,
    _into_l2,
    _once,
    _steps_of,
    _sum_over_warps,
    _tokens,
    _values_of,
)


@triton.jit
def _scaled(w, scale):
    """w times scale, in their type. Triton's interpreter multiplies the bits of bf16 as integers (3.7.1), so it gets fp32."""
    if is_cuda():
        return w * scale
    else:
        return (w.to(tl.float32) * scale.to(tl.float32)).to(w.dtype)


@triton.jit
def _by_warp(values, GROUPS: tl.constexpr):
    """Scales or zero points of pairs of warps (W / 2, 64 GROUPS) as (1, j, W, G, i)."""
    pairs: tl.constexpr = values.shape[0]
    return tl.reshape(tl.permute(tl.reshape(values, (pairs, 8, GROUPS, 2, 4)), (1, 0, 3, 2, 4)), (1, 8, 2 * pairs, GROUPS, 4))


@triton.jit
def _add_half_block(y, words, scales, zeros, x, HALF: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """y (W, 32, TOKENS) and what half a block of k adds: words (4, 8, W, i, 2), scales and zeros (1, 8, W, G, i), x (2 quarters,
    ALONG, TOKENS, 32)."""
    W: tl.constexpr = words.shape[2]
    ALONG: tl.constexpr = x.shape[1]
    TOKENS: tl.constexpr = x.shape[2]
    q: tl.constexpr = 2 * HALF
    w = _steps_of(words, _values_of(zeros, q, GROUPS), _values_of(zeros, q + 1, GROUPS), ZEROS, x.dtype)
    if GROUPS < 4:
        w = _scaled(w, _values_of(scales, q, GROUPS)[:, :, :, :, None, None, None, None])
    else:
        both = tl.join(_values_of(scales, q, GROUPS), _values_of(scales, q + 1, GROUPS))
        w = _scaled(w, both[:, :, :, :, None, :, None, None])
    # both over (quarter, b, c, a, e)
    w = tl.reshape(tl.permute(w, (2, 3, 1, 5, 7, 0, 6, 4)), (W, 32, 64))
    x = tl.reshape(tl.permute(tl.reshape(x, (2, ALONG, TOKENS, 4, 2, 2, 2)), (1, 0, 5, 3, 4, 6, 2)), (ALONG, 1, 64, TOKENS))
    return dot(w, tl.reshape(tl.broadcast_to(x, (ALONG, W // ALONG, 64, TOKENS)), (W, 64, TOKENS)), y)


@triton.jit(do_not_specialize=["N"])
def _int4_gemm_wide(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, counter_ptr, N, M, K, stride_xn,
    GROUPS: tl.constexpr, ONE_GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    FULL: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, ALONG: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y (N, M): a program takes TOKENS rows of x, ROWS rows of w, and 128 ALONG STEPS of k; a warp 32 rows and 128 STEPS of k.

    Constants as those of `_int4_gemm`; STAGES: of the load pipeline.
    """
    PIECES: tl.constexpr = ROWS // 32
    W: tl.constexpr = ALONG * PIECES
    row_blocks = tl.cdiv(M, 64)
    split, tile = tl.program_id(0), tl.program_id(1)
    first_token = tl.program_id(2) * TOKENS
    first_block = split * (STEPS * ALONG)
    end = tl.minimum(tl.cdiv(K, 128), first_block + STEPS * ALONG)

    # a pair of warps has the same 64 rows and the same k
    pair = tl.arange(0, W // 2)
    kb = first_block + pair // (ROWS // 64)
    rb = tl.minimum(tile * (ROWS // 64) + pair % (ROWS // 64), row_blocks - 1)
    block = wide(kb) * row_blocks + rb
    s_block = rb + tl.zeros_like(block) if ONE_GROUP else block
    w_step = wide(ALONG) * row_blocks * 1024
    s_step = 0 if ONE_GROUP else wide(ALONG) * row_blocks * (64 * GROUPS)
    if PREFETCH:
        gdc_launch_dependents()
        lane = tl.arange(0, 32)[None, :] + tl.zeros_like(pair)[:, None]
        for turn in tl.static_range(2):
            row = tile * W + pair * 2 + turn
            ahead = tl.minimum(K, (first_block + STEPS * ALONG) * 128) - first_block * 128
            x_slices = x_ptr + wide(first_token + row) * stride_xn + first_block * 128
            live = (row < TOKENS) & (first_token + row < N) & (ahead > 0)
            _into_l2(x_slices[:, None] + tl.zeros_like(lane), lane, live[:, None], 2 * ahead)
        for step in tl.static_range(min(STEPS, _STEPS_AHEAD)):
            live = (kb + step * ALONG < end)[:, None]
            if step == 0 or not ONE_GROUP:
                s_ahead = (s_block * (64 * GROUPS) + step * s_step)[:, None] + tl.zeros_like(lane)
                _into_l2(scale_ptr + s_ahead, lane, live, 128 * GROUPS)
                if ZEROS:
                    _into_l2(zero_ptr + s_ahead, lane, live, 128 * GROUPS)
            _into_l2((w_ptr + block * 1024 + step * w_step)[:, None] + tl.zeros_like(lane), lane, live, 4096)
        gdc_wait()

    w_ptrs = w_ptr + block[:, None, None] * 1024
    w_ptrs += tl.arange(0, 8)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    s_offsets = s_block[:, None] * (64 * GROUPS) + tl.arange(0, 64 * GROUPS)[None, :]
    # axes of x: quarter of half a block, warps along k, token, k
    k = (first_block + tl.arange(0, ALONG))[None, :, None, None] * 128 + tl.arange(0, 2)[:, None, None, None] * 32
    token = first_token + tl.arange(0, TOKENS)[None, None, :, None]
    x_ptrs = x_ptr + (wide(token) * stride_xn + k) + tl.arange(0, 32)[None, None, None, :]
    y = tl.zeros((W, 32, TOKENS), dtype=tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        here = kb + step * ALONG < end
        words = _once(w_ptrs, here[:, None, None], EVEN)
        scales = _by_warp(_once(scale_ptr + s_offsets, here[:, None], EVEN), GROUPS)
        zeros = scales
        if ZEROS:
            zeros = _by_warp(_once(zero_ptr + s_offsets, here[:, None], EVEN), GROUPS)
        x0 = _tokens(x_ptrs, token < N, k, K, FULL, EVEN)
        x1 = _tokens(x_ptrs + 64, token < N, k + 64, K, FULL, EVEN)
        # (W, i, j, c, half, quarter) to (c, j, W, i, quarter, half)
        words = tl.permute(tl.reshape(words, (W, 4, 8, 4, 2, 2)), (3, 2, 0, 1, 5, 4))
        first, second = tl.split(words)
        y = _add_half_block(y, first, scales, zeros, x0, 0, GROUPS, ZEROS)
        y = _add_half_block(y, second, scales, zeros, x1, 1, GROUPS, ZEROS)
        w_ptrs += w_step
        s_offsets += s_step
        x_ptrs += 128 * ALONG
        k += 128 * ALONG

    y = tl.reshape(_sum_over_warps(y, ALONG, PIECES, 4, TOKENS), (PIECES // 2, 2, 4, 8, TOKENS))
    y = tl.reshape(tl.permute(y, (4, 0, 3, 1, 2)), (TOKENS, ROWS))
    tokens = first_token + tl.arange(0, TOKENS)[:, None]
    rows = tile * ROWS + tl.arange(0, ROWS)[None, :]
    mask = (tokens < N) & (rows < M)
    offsets = wide(tokens) * M + rows
    if SPLITS == 1:
        _finish(y_ptr, bias_ptr, offsets, rows, mask, y, M, BIAS)
    else:
        tl.store(part_ptr + wide(split) * N * M + offsets, y, mask=mask, cache_modifier=".cg")
        if is_last(counter_ptr + tl.program_id(2) * tl.num_programs(1) + tile, SPLITS):
            y = sum_of_parts(part_ptr + offsets, wide(N) * M, mask, SPLITS)
            _finish(y_ptr, bias_ptr, offsets, rows, mask, y, M, BIAS)
