"""The kernel of kernels.py in programs that take equal parts of all rows and all of k: as many as the chip holds at once.

A part begins and ends anywhere in k. The program that has the first k of a block of rows adds up what others have of it: it comes
to that block last, they began with theirs. May import triton, kernels, tl_gemm and tl_lib.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.kernel_lib.tl_gemm import leave_part, with_parts
from kerneltune.kernel_lib.tl_lib import is_cuda, since_sm_90, wide
from kerneltune.ops.int4_gemm.kernels import _codes, _finish, _half_block, _halves, _into_l2, _sum_over_warps, _tokens

_STEPS_AHEAD = tl.constexpr(8)
"""Blocks of k of every warp that are asked for while the kernel in front runs."""


@triton.jit
def _ask_for(
    w_ptr, scale_ptr, zero_ptr, row_blocks, rb, first, end, COUNT: tl.constexpr,
    GROUPS: tl.constexpr, ONE_GROUP: tl.constexpr, ZEROS: tl.constexpr, R: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """Ask L2 for COUNT steps of block of rows rb, from block of k `first` of the first warp on."""
    PIECES: tl.constexpr = 8 // R
    lane = tl.arange(0, 4)[:, None, None] + tl.arange(0, 8)[None, :, None]
    warp = tl.arange(0, ALONG * PIECES)
    piece = (warp % PIECES)[None, None, :]
    for step in tl.static_range(COUNT):
        kb = (first + step * ALONG + warp // PIECES)[None, None, :]
        live = (kb < end) & (rb < row_blocks)
        block = wide(kb) * row_blocks + rb
        if step == 0 or not ONE_GROUP:
            s_block = rb + tl.zeros_like(block) if ONE_GROUP else block
            _into_l2(scale_ptr + s_block * (64 * GROUPS), lane + piece, live, 128 * GROUPS)
            if ZEROS:
                _into_l2(zero_ptr + s_block * (64 * GROUPS), lane + piece, live, 128 * GROUPS)
        _into_l2(w_ptr + block * 1024 + piece * (128 * R), lane, live, 512 * R)


_TWO_FP16 = tl.constexpr((tl.float16, tl.float16))
_TWO_BF16 = tl.constexpr((tl.bfloat16, tl.bfloat16))


@triton.jit
def _in_words(x):
    """Values (…, 8) as pairs in words (…, 4): of values on their way to another block of code the compiler makes words again and
    again."""
    if is_cuda():
        low, high = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], x.shape[3], 2, 4, 2)))
        return tl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip
    else:
        return x


@triton.jit
def _from_words(words, dtype: tl.constexpr):
    if is_cuda():
        TWO: tl.constexpr = _TWO_FP16 if dtype == tl.float16 else _TWO_BF16
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=TWO, is_pure=True, pack=1)  # fmt: skip
        return tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1], words.shape[2], words.shape[3], 2, 8))
    else:
        return words


@triton.jit(do_not_specialize=["N"])
def _int4_stream(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, N, M, K, stride_xn,
    GROUPS: tl.constexpr, ONE_GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    FULL: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, ALONG: tl.constexpr, AHEAD: tl.constexpr, LATE: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """y (N, M): as `kernels._int4_gemm`. A step is 128 ALONG of k of 64 rows; a program takes an equal part of all steps, which
    are numbered along k first. EVEN: K is a multiple of 128 ALONG. LATE: codes are loaded between the halves of a block.
    NEXT: steps of the next rows that L2 is asked for before these."""
    R: tl.constexpr = ROWS // 8
    PIECES: tl.constexpr = 64 // ROWS
    W: tl.constexpr = ALONG * PIECES
    row_blocks, blocks = tl.cdiv(M, 64), tl.cdiv(K, 128)
    depth = tl.cdiv(K, 128 * ALONG)
    programs = tl.num_programs(0)
    part = programs - 1 - tl.program_id(0)  # a program waits for those that have later parts, which began before it
    first_token = tl.program_id(1) * TOKENS
    steps = row_blocks * depth
    start, end = steps * part // programs, steps * (part + 1) // programs
    warp = tl.arange(0, W)
    piece = (warp % PIECES)[None, None, :]
    if PREFETCH:
        gdc_launch_dependents()
        lane = tl.arange(0, 4)[:, None, None] + tl.arange(0, 8)[None, :, None]
        shares = tl.maximum(programs // TOKENS, 1)  # of a row of x: for every program another
        width = tl.cdiv(K, 8 * shares) * 8
        first_k = part // TOKENS * width
        row = first_token + part % TOKENS
        x_slice = x_ptr + wide(row) * stride_xn + first_k
        mine = (row < N) & (first_k < K) & (warp == 0)[None, None, :]
        _into_l2(x_slice + tl.zeros_like(lane * piece), lane + warp[None, None, :], mine, 2 * (tl.minimum(K, first_k + width) - first_k))
        _ask_for(w_ptr, scale_ptr, zero_ptr, row_blocks, start // depth, start % depth * ALONG, blocks, _STEPS_AHEAD,
                 GROUPS, ONE_GROUP, ZEROS, R, ALONG)  # fmt: skip
        gdc_wait()
    # five axes: c, j, warp, and two within a thread
    c5 = tl.arange(0, 4)[:, None, None, None, None]
    j5 = tl.arange(0, 8)[None, :, None, None, None]
    i_outer = tl.arange(0, R)[None, None, None, :, None]
    i_inner = tl.arange(0, R)[None, None, None, None, :]
    group = tl.arange(0, GROUPS)[None, None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, None, :]
    piece5 = piece[:, :, :, None, None]
    s_inner = group * 8 + i_inner
    w_step = wide(ALONG) * row_blocks * 1024
    s_step = 0 if ONE_GROUP else wide(ALONG) * row_blocks * (64 * GROUPS)
    # six axes: c, token, warp, and token, quarter of the block and k within a thread
    c6 = tl.arange(0, 4)[:, None, None, None, None, None] * 8
    token = tl.arange(0, 8)[None, :, None, None, None, None] + tl.arange(0, TOKENS // 8)[None, None, None, :, None, None] * 8
    token = first_token + token
    quarter = tl.arange(0, 2)[None, None, None, None, :, None] * 32
    t6 = tl.arange(0, 8)[None, None, None, None, None, :]

    for rb in tl.range(start // depth, tl.cdiv(end, depth), num_stages=1):
        first, last = tl.maximum(start - rb * depth, 0), tl.minimum(end - rb * depth, depth)
        if PREFETCH:
            _ask_for(w_ptr, scale_ptr, zero_ptr, row_blocks, rb + 1, 0, tl.minimum(blocks, (end - (rb + 1) * depth) * ALONG),
                     NEXT, GROUPS, ONE_GROUP, ZEROS, R, ALONG)  # fmt: skip
        tl.assume(first < last)
        kb = first * ALONG + warp // PIECES
        block = (wide(kb) * row_blocks + rb)[None, None, :]
        s_block = rb + tl.zeros_like(block) if ONE_GROUP else block
        w_ptrs = w_ptr + (block[:, :, :, None, None] * 1024 + piece5 * (128 * R) + (j5 * 16 + c5 * 4)) + (i_outer * 128 + word)
        s_offsets = s_block[:, :, :, None, None] * (64 * GROUPS) + piece5 * R + (j5 * (8 * GROUPS) + c5 * 0)
        k6 = (kb * 128)[None, None, :, None, None, None] + c6
        x_ptrs = x_ptr + (wide(token) * stride_xn + k6) + (quarter + t6)
        k6 += quarter
        live = (kb < blocks)[None, None, :, None, None]
        s0, w0 = _codes(scale_ptr + s_offsets + s_inner, live, EVEN), _codes(w_ptrs, live, EVEN)
        if since_sm_90():
            gdc_wait()  # the compiler would put the loads of x in front of these
        if AHEAD:
            x0 = _in_words(_tokens(x_ptrs, token < N, k6, K, FULL, EVEN))
            x1 = _in_words(_tokens(x_ptrs + 64, token < N, k6 + 64, K, FULL, EVEN))
        y = tl.zeros((W, R, 8, TOKENS // 8, 4, 2), dtype=tl.float32)
        for step in tl.range(first, last, num_stages=1):
            if not AHEAD:
                x0 = _in_words(_tokens(x_ptrs, token < N, k6, K, FULL, EVEN))
                x1 = _in_words(_tokens(x_ptrs + 64, token < N, k6 + 64, K, FULL, EVEN))
            zeros = s0
            if ZEROS:
                live = (kb < blocks)[None, None, :, None, None]
                zeros = _codes(zero_ptr + s_offsets + s_inner, live, EVEN)
            there = tl.where(step + 1 < last, 1, 0)  # after the last the same again
            x_ptrs += there * (128 * ALONG)
            k6 += there * (128 * ALONG)
            kb += there * ALONG
            w_ptrs += there * w_step
            s_offsets += there * s_step
            live = (kb < blocks)[None, None, :, None, None]
            first_half, second_half = _halves(w0)
            if not LATE:
                s1, w1 = _codes(scale_ptr + s_offsets + s_inner, live, EVEN), _codes(w_ptrs, live, EVEN)
            y += _half_block(first_half, s0, zeros, _from_words(x0, x_ptr.dtype.element_ty), 0, GROUPS, ZEROS)
            if AHEAD:
                x0 = _in_words(_tokens(x_ptrs, token < N, k6, K, FULL, EVEN))
            if LATE:
                s1, w1 = _codes(scale_ptr + s_offsets + s_inner, live, EVEN), _codes(w_ptrs, live, EVEN)
            y += _half_block(second_half, s0, zeros, _from_words(x1, x_ptr.dtype.element_ty), 1, GROUPS, ZEROS)
            if AHEAD:
                x1 = _in_words(_tokens(x_ptrs + 64, token < N, k6 + 64, K, FULL, EVEN))
            w0, s0 = w1, s1

        y = _sum_over_warps(tl.reshape(y, (W, 8 * R, TOKENS)), ALONG, PIECES, R, TOKENS)
        y = tl.reshape(tl.permute(tl.reshape(y, (PIECES, R, 8, TOKENS)), (3, 2, 0, 1)), (TOKENS, 64))
        own = tl.arange(0, TOKENS)[:, None]
        column = tl.arange(0, 64)[None, :]
        rows = rb * 64 + column
        mask = (first_token + own < N) & (rows < M)
        words = (wide(tl.program_id(1)) * programs * (TOKENS * 64)) + (own * 64 + column)
        word_ptrs = part_ptr.to(tl.pointer_type(tl.int32)) + words
        if rb * depth < start:
            leave_part(word_ptrs + part * (TOKENS * 64), y, mask)
        else:
            last_part = ((rb * depth + depth) * programs - 1) // steps
            for other in tl.range(part + 1, last_part + 1, num_stages=1):
                y = with_parts(word_ptrs + other * (TOKENS * 64), 0, y, mask, 1)
            _finish(y_ptr, bias_ptr, wide(first_token + own) * M + rows, rows, mask, y, M, BIAS)
