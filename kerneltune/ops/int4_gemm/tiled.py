"""The kernel of `int4_gemm` for many tokens: each weight is unpacked once per tile of tokens, into shared memory for wgmma.

A step takes 128 k of ROWS rows: codes come into registers a step ahead and go as scaled weights, which have been rounded to x's
type, into shared memory; x is copied there some steps ahead. Eight rows of lanes (i) are next to each other in shared memory and
four lanes share a row (c), so that eight lanes write to all banks. May import triton, kernels, tl_gemm and tl_lib.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from kerneltune.kernel_lib.tl_gemm import dot, leave_part, times, with_parts
from kerneltune.kernel_lib.tl_lib import since_sm_90, wide
from kerneltune.ops.int4_gemm.kernels import eight_pairs, finish, into_l2

_STEPS_AHEAD = tl.constexpr(16)
"""Steps whose codes L2 is asked for."""


@triton.jit
def _of_quarters(values, GROUPS: tl.constexpr):
    """(8 i, 4 c, J, G) as (8, 4, J, 2, 2) over the quarters of a block of k."""
    if GROUPS == 4:
        return tl.reshape(values, (8, 4, values.shape[2], 2, 2))
    else:
        return tl.broadcast_to(values[:, :, :, :, None], (8, 4, values.shape[2], 2, 2))


@triton.jit
def _weights(words, scales, zeros, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """(8 J, 128) of words (8 i, 4 c, J, 4), scales and zeros (8 i, 4 c, J, G)."""
    J: tl.constexpr = words.shape[2]
    scales = _of_quarters(scales, GROUPS)
    zero_a, zero_b = tl.split(_of_quarters(zeros, GROUPS))
    d = eight_pairs(tl.reshape(words, (8, 4, J, 2, 2)), zero_a, zero_b, ZEROS, scales.dtype)
    low = tl.join(tl.join(d[0], d[4]), tl.join(d[1], d[5]))
    high = tl.join(tl.join(d[2], d[6]), tl.join(d[3], d[7]))
    w = tl.join(low, high)  # (i, c, J, half of the block, half of the pair, word, and two of the pairs)
    w = times(w, scales[:, :, :, :, None, :, None, None])
    return tl.reshape(tl.permute(w, (2, 0, 3, 5, 1, 7, 6, 4)), (8 * J, 128))


@triton.jit
def _tokens(x_ptrs, live, k, K, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Values of x; 0 past the ends."""
    if FULL and EVEN:
        return tl.load(x_ptrs)
    elif EVEN:
        return tl.load(x_ptrs, mask=live, other=0.0)
    else:
        return tl.load(x_ptrs, mask=live & (k < K)[None, :], other=0.0)


@triton.jit
def _ask_for(ptr, row_blocks, tile, block, live, BYTES: tl.constexpr, ROWS: tl.constexpr):
    """Ask L2 for blocks of k of ROWS rows, of BYTES for 64 rows."""
    BLOCKS: tl.constexpr = ROWS // 64
    count = tl.minimum(BLOCKS, row_blocks - tile * BLOCKS) * BYTES
    at = (wide(block) * row_blocks + tile * BLOCKS) * BYTES
    into_l2(ptr.to(tl.pointer_type(tl.int8)) + at, 0 * block, live, count)


@triton.jit(do_not_specialize=["N"])
def _int4_tiles(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, N, M, K, stride_xn,
    GROUPS: tl.constexpr, ONE_GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    FULL: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y (N, M): a program takes TOKENS rows of x, ROWS of w and a part of k; the last SLICES of the programs that share a tile
    add up its parts, each for some of the tokens.

    FULL: N is a multiple of TOKENS. EVEN: K is one of 128. PREFETCH: as `kernels._int4_gemm` has it.
    """
    J: tl.constexpr = ROWS // 8
    row_blocks = tl.cdiv(M, 64)
    split, tile = tl.program_id(0), tl.program_id(1)
    first_token = tl.program_id(2) * TOKENS
    blocks = tl.cdiv(K, 128)
    start, end = blocks * split // SPLITS, blocks * (split + 1) // SPLITS
    if PREFETCH:
        gdc_launch_dependents()
        thread = tl.arange(0, num_threads())
        live = thread < tl.minimum(end - start, _STEPS_AHEAD)
        _ask_for(w_ptr, row_blocks, tile, start + thread, live, 4096, ROWS)
        first = 0 if ONE_GROUP else start
        live &= (thread == 0) if ONE_GROUP else (thread >= 0)
        _ask_for(scale_ptr, row_blocks, tile, first + thread, live, 128 * GROUPS, ROWS)
        if ZEROS:
            _ask_for(zero_ptr, row_blocks, tile, first + thread, live, 128 * GROUPS, ROWS)
        gdc_wait()
    i = tl.arange(0, 8)[:, None, None, None]
    c = tl.arange(0, 4)[None, :, None, None]
    j = tl.arange(0, J)[None, None, :, None]
    block = wide(tl.minimum(tile * (ROWS // 64) + j // 8, row_blocks - 1))
    w_step = wide(row_blocks) * 1024
    s_step = 0 if ONE_GROUP else wide(row_blocks) * (64 * GROUPS)
    w_ptrs = w_ptr + start * w_step + (block * 1024 + (i * 128 + j % 8 * 16 + c * 4)) + tl.arange(0, 4)[None, None, None, :]
    # as a sum no compiler sees that scales of eight lanes are adjacent: a thread would load them all and hand on seven
    i = (i & 3) + (i & 4)
    s_offsets = start * s_step + block * (64 * GROUPS) + (j % 8 * (8 * GROUPS) + c * 0 + i)
    s_offsets += tl.arange(0, GROUPS)[None, None, None, :] * 8
    s_ptrs, z_ptrs = scale_ptr + s_offsets, zero_ptr + s_offsets
    w0, s0 = tl.load(w_ptrs), tl.load(s_ptrs)
    z0 = tl.load(z_ptrs) if ZEROS else s0
    if since_sm_90():
        gdc_wait()  # the compiler would put the loads of x in front of these
    tokens = first_token + tl.arange(0, TOKENS)[:, None]
    k = tl.arange(0, 128)
    x_ptrs = x_ptr + wide(tokens) * stride_xn + (start * 128 + k)[None, :]
    y = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for step in tl.range(start, end, num_stages=STAGES):
        x = _tokens(x_ptrs, tokens < N, step * 128 + k, K, FULL, EVEN)
        x_ptrs += 128
        w = _weights(w0, s0, z0, GROUPS, ZEROS)
        there = tl.where(step + 1 < end, 1, 0)  # after the last the same again
        w_ptrs += there * w_step
        s_ptrs += there * s_step
        z_ptrs += there * s_step
        w0, s0 = tl.load(w_ptrs), tl.load(s_ptrs)
        z0 = tl.load(z_ptrs) if ZEROS else s0
        y = dot(x, tl.trans(w), y)
    rows = tile * ROWS + tl.arange(0, ROWS)[None, :]
    mask = (tokens < N) & (rows < M)
    offsets = wide(tokens) * M + rows
    if SPLITS == 1:
        finish(y_ptr, bias_ptr, offsets, rows, mask, y, M, BIAS)
    else:
        part_ptr = part_ptr.to(tl.pointer_type(tl.int32))
        leave_part(part_ptr + wide(split) * N * M + offsets, y, mask)
        share = split - (SPLITS - SLICES)
        if share >= 0:
            own = first_token + share * (TOKENS // SLICES) + tl.arange(0, TOKENS // SLICES)[:, None]
            own_mask = (own < N) & (rows < M)
            own_offsets = wide(own) * M + rows
            nothing = tl.zeros((TOKENS // SLICES, ROWS), dtype=tl.float32)
            total = with_parts(part_ptr + own_offsets, wide(N) * M, nothing, own_mask, SPLITS)
            finish(y_ptr, bias_ptr, own_offsets, rows, own_mask, total, M, BIAS)
