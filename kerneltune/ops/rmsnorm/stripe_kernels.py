"""RMSNorm to fp8 and its transpose out of registers: x is read once, y never.

A stripe, ROWS rows, is shared by PARTS programs of neighbouring ids. Each loads its columns, publishes their sums of squares,
waits for those of the others inside the launch (PHASE 0; 1 publishes and 2 collects, in two launches), and stores y both ways.
16-bit numbers come in PAIRS, as int32: what a loop holds as 16-bit tensors takes a register each. May
import tl_lib, tl_exchange, tl_transpose and kernels.
"""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_exchange import await_quads, close_launch, launch_tag, publish, published
from kerneltune.kernel_lib.tl_lib import held, only_if, reciprocal, saturate, to_fp8, to_fp8_pair, values, wide
from kerneltune.kernel_lib.tl_transpose import store_turned
from kerneltune.ops.rmsnorm.kernels import raise_amax


@triton.jit
def _load_part(
    x_ptr, stripe, stride, first_col, M,
    QUADS: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, ALWAYS: tl.constexpr,
):  # fmt: skip
    """CHUNKS times WORDS columns of a stripe as four (QUADS, WORDS) tiles each; tile k has the rows 4i + k. Zeros below M.

    ALWAYS: the stripe is one of the matrix. EVEN: stripes are all whole.
    """
    left = M - stripe * (4 * QUADS)
    rows = tl.arange(0, QUADS) * 4
    tile = x_ptr + wide(stripe * (4 * QUADS)) * stride + first_col + (rows[:, None] * stride + tl.arange(0, WORDS)[None, :])
    xs = ()
    for c in tl.static_range(CHUNKS):
        for k in tl.static_range(4):
            at = tile + k * stride + c * WORDS
            if EVEN and ALWAYS:
                x = tl.load(at, eviction_policy="evict_first")
            else:
                mask = only_if(rows >= 0, left > 0) if EVEN else rows < left - k
                x = tl.load(at, mask=mask[:, None], other=0, eviction_policy="evict_first")
            xs = xs + (x,)
    return xs


@triton.jit
def _publish_part(
    xs, ws_ptr, stripe, part, tag, live,
    QUADS: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Word ((4 stripe + k) QUADS + i) PARTS + part: the sum of squares of this part of row 4i + k."""
    quads = tl.arange(0, QUADS)
    for k in tl.static_range(4):
        squares = tl.zeros(xs[0].shape, dtype=tl.float32)
        for c in tl.static_range(CHUNKS):
            for half in tl.static_range(PAIRS):
                x = values(xs[c * 4 + k], half, PAIRS, dtype)
                squares += x * x
        index = ((stripe * 4 + k) * QUADS + quads) * PARTS + part
        publish(ws_ptr, index, tl.sum(squares, axis=1), tag, only_if(quads >= 0, live))


@triton.jit
def _collect(
    ws_ptr, stripe, tag, QUADS: tl.constexpr, PARTS: tl.constexpr, PHASE: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """The sums of the rows 4i + k, four (QUADS,), added in the same order in every program and every run.

    A warp has the rows that it has of x, and a thread one part in 32 of each, so that nothing moves between warps.
    """
    EACH: tl.constexpr = max(1, QUADS // WARPS)
    s0 = tl.zeros((QUADS, 32), dtype=tl.float32)
    s1, s2, s3 = s0, s0, s0
    for first in tl.static_range(0, PARTS, 32):
        parts = first + tl.arange(0, 32)
        mask = (parts < PARTS)[None, :]
        index = (stripe * 4 * QUADS + tl.arange(0, QUADS)[:, None]) * PARTS + tl.minimum(parts, PARTS - 1)[None, :]
        if PHASE == 0:
            w0, w1, w2, w3 = await_quads(ws_ptr, index, tag, QUADS * PARTS, EACH)
        else:
            w0, w1 = published(ws_ptr, index), published(ws_ptr, index + QUADS * PARTS)
            w2, w3 = published(ws_ptr, index + 2 * QUADS * PARTS), published(ws_ptr, index + 3 * QUADS * PARTS)
        s0, s1 = s0 + tl.where(mask, w0, 0.0), s1 + tl.where(mask, w1, 0.0)
        s2, s3 = s2 + tl.where(mask, w2, 0.0), s3 + tl.where(mask, w3, 0.0)
    return tl.sum(s0, axis=1), tl.sum(s1, axis=1), tl.sum(s2, axis=1), tl.sum(s3, axis=1)


@triton.jit
def _raised(amax, y):
    """amax (R, C // k), raised to |y| (R, C) by k neighbours, which one thread holds; NaN is passed over."""
    neighbours: tl.constexpr = y.shape[1] // amax.shape[1]
    return tl.maximum(amax, tl.max(tl.reshape(tl.abs(y), (y.shape[0], amax.shape[1], neighbours)), axis=2))


@triton.jit
def _normalised(x, r, g, HALF: tl.constexpr, ZERO_CENTERED: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr):
    gamma = values(g, HALF, PAIRS, dtype)
    if ZERO_CENTERED:
        gamma += 1.0
    return values(x, HALF, PAIRS, dtype) * r[:, None] * gamma[None, :]


@triton.jit
def _rmsnorm_fwd_stripes(
    x_ptr, g_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, y_t_ptr, ws_ptr,
    M, N: tl.constexpr, stride_xm, eps,
    ZERO_CENTERED: tl.constexpr, FP8_MAX: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WORDS: tl.constexpr, PHASE: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """y (M, N) and y_t (N, M) as fp8, M a multiple of 4, N of COLS. A program has COLS columns of every so many stripes, loaded
    WORDS at a time. N, COLS, WORDS and the stride of x count words, each of one or two (PAIRS) numbers of `dtype`, in y as well.
    """
    QUADS: tl.constexpr = ROWS // 4
    PARTS: tl.constexpr = N // COLS
    CHUNKS: tl.constexpr = COLS // WORDS
    part = tl.program_id(0) % PARTS
    first_stripe = tl.program_id(0) // PARTS
    step = tl.num_programs(0) // PARTS
    stripes = tl.cdiv(M, ROWS)
    first_col = part * COLS
    words = tl.arange(0, WORDS)
    quads = tl.arange(0, QUADS)
    tag = launch_tag(ws_ptr)
    scale = tl.load(scale_ptr)
    seen = tl.load(amax_ptr, cache_modifier=".cg")
    gs = ()
    for c in tl.static_range(CHUNKS):
        gs = gs + (tl.load(g_ptr + first_col + c * WORDS + words, eviction_policy="evict_last"),)
    if tl.program_id(0) == 0 and PHASE != 1:
        tl.store(scale_inv_ptr, reciprocal(scale))
    amax = tl.zeros((QUADS, WORDS // 4), dtype=tl.float32)

    xs_next = ()
    if AHEAD:
        xs_next = _load_part(x_ptr, first_stripe, stride_xm, first_col, M, QUADS, WORDS, CHUNKS, EVEN, True)
        if PHASE != 2:
            _publish_part(xs_next, ws_ptr, first_stripe, part, tag, first_stripe < stripes, QUADS, CHUNKS, PARTS, PAIRS, dtype)

    for stripe in tl.range(first_stripe, stripes, step, num_stages=STAGES, disable_licm=True):
        if AHEAD:
            xs = xs_next
            ahead = stripe + step
            xs_next = _load_part(x_ptr, ahead, stride_xm, first_col, M, QUADS, WORDS, CHUNKS, EVEN, False)
            if PHASE != 2:
                _publish_part(xs_next, ws_ptr, ahead, part, tag, ahead < stripes, QUADS, CHUNKS, PARTS, PAIRS, dtype)
        else:
            xs = _load_part(x_ptr, stripe, stride_xm, first_col, M, QUADS, WORDS, CHUNKS, EVEN, True)
            if PHASE != 2:
                _publish_part(xs, ws_ptr, stripe, part, tag, stripe >= 0, QUADS, CHUNKS, PARTS, PAIRS, dtype)
        if PHASE != 1:
            totals = _collect(ws_ptr, stripe, tag, QUADS, PARTS, PHASE, WARPS)
            left = M - stripe * ROWS
            height = ROWS if EVEN else tl.minimum(left, ROWS)
            rs = ()
            for k in tl.static_range(4):
                rs = rs + (tl.rsqrt(totals[k] * (1.0 / (N * PAIRS)) + eps),)
                if part == 0:
                    tl.store(rsigma_ptr + stripe * ROWS + quads * 4 + k, rs[k], mask=quads * 4 + k < left)
            # aligned to four words, for all that Triton knows: a thread that stored eight would have to load them in two pieces
            y_tile = y_ptr + wide(stripe * ROWS) * N + held(first_col + 0) // 4 * 4 + (quads[:, None] * (4 * N) + words[None, :])
            t_base = wide(first_col * PAIRS) * M + stripe * ROWS
            for c in tl.static_range(CHUNKS):
                g = held(gs[c])
                qs = ()
                for k in tl.static_range(4):
                    x = held(xs[c * 4 + k])
                    y0 = _normalised(x, rs[k], g, 0, ZERO_CENTERED, PAIRS, dtype)
                    amax = _raised(amax, y0)
                    if PAIRS == 2:
                        y1 = _normalised(x, rs[k], g, 1, ZERO_CENTERED, PAIRS, dtype)
                        amax = _raised(amax, y1)
                        q = to_fp8_pair(saturate(y0 * scale, FP8_MAX), saturate(y1 * scale, FP8_MAX), fp8)
                    else:
                        q = to_fp8(saturate(y0 * scale, FP8_MAX), fp8)
                    at = y_tile + (k * N + c * WORDS)
                    if EVEN:
                        tl.store(at, q, cache_modifier=".cs")
                    else:
                        tl.store(at, q, mask=(quads * 4 < left - k)[:, None], cache_modifier=".cs")
                    qs = qs + (q,)
                base = t_base + wide(c * WORDS * PAIRS) * M
                store_turned(y_t_ptr, base, M, 0, height, words >= 0, qs, False, True, True, PAIRS)
    if PHASE != 1:
        raise_amax(amax_ptr, amax, seen, True)
    if PHASE == 0:
        close_launch(ws_ptr, tag)
