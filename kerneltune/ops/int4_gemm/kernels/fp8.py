"""Multiply on the fp8 tensor cores: codes become e4m3 in registers, the first operand of wgmma; tokens come from shared memory.

TMA copies both operands to shared memory. A thread reads bytes of two codes, and four bytes become two registers of four
e4m3 elements: the lower codes of the bytes, and the upper codes. So the k of a register are not neighbours. `cast_rows`
writes each 32 k of x in the order that the registers have, `ORDER`, so that neither operand is reordered here.

The byte u <= 16 is the e4m3 element u / 512. So a code q becomes (q - 8) / 512 exactly. With a rest, codes become q / 512 and
(q - 15) / 512, which takes three instructions for eight codes, not ten, for every zero point. The product then
lacks scales times sums of x over each group. They are added at the end; the kernel that casts x writes the sums.

ptxas before 13.3 may overwrite the registers of a wgmma that still reads them. Here every wgmma is waited for before the
next codes become elements, and all configs must multiply integers exactly before they are timed.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.tl_gemm import dot
from kerneltune.kernel_lib.tl_lib import (
    amax_to_scale,
    is_cuda,
    magnitude,
    magnitude_to_fp32,
    quantize,
    reciprocal,
    since_sm_90,
    wide,
)
from kerneltune.ops.int4_gemm.kernels.warps import finish, into_l2

ORDER = tuple(8 * c + 4 * e0 + 2 * h + e1 for h in range(2) for c in range(4) for e1 in range(2) for e0 in range(2))
"""The k, among 32, at each place of a cast token: register h of lane c has the codes 4 e0 + 2 h + e1 of the lane's word."""

_UNIT = tl.constexpr(2.0**-9)
"""Value of the e4m3 element whose byte is 1."""

_PTX = tl.constexpr(
    """{
    .reg .b32 negative, size, upper, lower;
    shr.u32 negative, $2, 3;
    lop3.b32 negative, negative, 0x11111111, 0, 0x0c;
    sub.u32 size, 0x88888888, negative;
    xor.b32 size, size, $2;
    add.u32 size, size, negative;
    shl.b32 lower, negative, 7;
    shl.b32 upper, negative, 3;
    lop3.b32 $0, size, lower, 0x0f0f0f0f, 0xe4;
    shr.u32 size, size, 4;
    lop3.b32 $1, size, upper, 0x0f0f0f0f, 0xe4;
    }"""
)
"""PTX from eight codes q to bytes of q - 8, sign and size. negative: 1 in each of eight nibbles if q < 8. size: |q - 8|, as
q ^ 8 or as (q ^ 7) + 1. Then the sign goes to bit 7 of its byte."""
_PTX_RAW = tl.constexpr(
    """{
    .reg .b32 upper;
    lop3.b32 $0, $2, 0x0f0f0f0f, 0, 0xc0;
    shr.u32 upper, $2, 4;
    lop3.b32 $1, upper, 0x0f0f0f0f, 0x80808080, 0xae;
    }"""
)
"""PTX from eight codes q to bytes of q, of the lower half of each byte, and of q - 15, sign and size, of the upper half."""


@dataclass(frozen=True, eq=False, repr=False)
class Fp8Work(Constants):
    """The work of a program.

    Attributes:
        tokens: rows of x.
        blocks: blocks of 64 rows of w.
        splits: programs that share a tile's k.
        stages: stages of the load pipeline.
        k_blocks: blocks of 128 k of a step.
        rest: groups of k whose rest is added at once; 0 where codes become q - 8.
    """

    tokens: int
    blocks: int
    splits: int
    stages: int
    k_blocks: int
    rest: int


@triton.jit
def _elements(codes, IS_RAW: tl.constexpr):
    """Return (q - 8) / 512 in e4m3, (…, 2), of bytes (…) with two codes each; under IS_RAW q / 512 and (q - 15) / 512."""
    if is_cuda():
        lower, upper = tl.inline_asm_elementwise(
            _PTX_RAW if IS_RAW else _PTX, "=&r,=&r,r", [codes], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
        )
        return tl.join(lower, upper)
    else:
        codes = tl.join(codes & 15, codes >> 4).to(tl.float32)
        codes -= tl.arange(0, 2) * 15.0 if IS_RAW else 8.0
        return (codes * _UNIT).to(tl.float8e4nv)


@triton.jit
def _part(e, g: tl.constexpr, GROUPS: tl.constexpr):
    """Return group g of e (4 c, 8 j, W, 2 i, Q, 4, 2 h) as (c, j, W, i, Q / GROUPS, 4, h)."""
    if GROUPS == 1:
        return e
    else:
        split = tl.reshape(e, (4, 8, e.shape[2], 2, 2, e.shape[4] // 2, 4, 2))
        first, second = tl.split(tl.permute(split, (0, 1, 2, 3, 5, 6, 7, 4)))
        return _part(first if g < GROUPS // 2 else second, g % (GROUPS // 2), GROUPS // 2)


@triton.jit
def _row_scales(scales, g: tl.constexpr, GROUPS: tl.constexpr):
    """Return group g of scales (8 j, W, 2 i, GROUPS) as fp32 (16 W)."""
    if GROUPS == 1:
        W: tl.constexpr = scales.shape[1]
        return tl.reshape(tl.permute(tl.reshape(scales.to(tl.float32), (8, W, 2)), (1, 2, 0)), (16 * W,))
    else:
        split = tl.reshape(scales, (8, scales.shape[1], 2, 2, GROUPS // 2))
        first, second = tl.split(tl.permute(split, (0, 1, 2, 4, 3)))
        return _row_scales(first if g < GROUPS // 2 else second, g % (GROUPS // 2), GROUPS // 2)


@triton.jit
def _multiply_twice(a, b, y):
    """Add a · b to y; a is exact in its type, b in fp32 is taken for the sum of two of that type."""
    high = b.to(a.dtype)
    return dot(a, (b - high.to(tl.float32)).to(a.dtype), dot(a, high, y))


@triton.jit
def _sums_of_x(sum_ptr, step, stride, is_inside, GROUPS: tl.constexpr):
    """Return sums of x over groups of k, (tokens, groups).

    sum_ptr: the first sum of each token. step: the block of k of each group.
    The sums of the first quarters of all blocks of k lie together, then those of further quarters, then those of whole blocks.
    """
    place = tl.arange(0, step.shape[0]) % GROUPS
    if GROUPS == 1:
        return tl.load(sum_ptr[:, None] + (4 * stride + step)[None, :], mask=is_inside, other=0.0)
    elif GROUPS == 4:
        return tl.load(sum_ptr[:, None] + (place * stride + step)[None, :], mask=is_inside, other=0.0)
    else:
        first = sum_ptr[:, None] + (place * 2 * stride + step)[None, :]
        return tl.load(first, mask=is_inside, other=0.0) + tl.load(first + stride, mask=is_inside, other=0.0)


@triton.jit
def _load_rest(
    sum_ptr, scale_ptr, zero_ptr, first, first_token, end, row_block, row_blocks, kb, steps, K,
    WEIGHT: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Return what `_add_rest` takes, of WORK.rest groups from step `first` on: scales (64 blocks, groups), x (tokens, groups).

    x: sums over each group. With zero points also these, and the sums that they multiply.
    """
    GROUPS: tl.constexpr = WEIGHT.groups
    W: tl.constexpr = 4 * WORK.blocks
    stride = tl.cdiv(K, 128)
    group = tl.arange(0, WORK.rest)
    row = tl.arange(0, 16 * W)
    block = tl.reshape(tl.broadcast_to(row_block[:, None], (W, 16)), (16 * W,))
    at = row % 8 * (8 * GROUPS) + row // 16 % 4 * 2 + row // 8 % 2
    token = first_token + tl.arange(0, WORK.tokens)
    x_sums = sum_ptr + wide(token) * (10 * stride)
    step = first + group // GROUPS
    is_step = (step < steps)[None, :]
    s_block = block[:, None] + 0 * step[None, :] if WEIGHT.one_group else wide(kb + step)[None, :] * row_blocks + block[:, None]
    offsets = s_block * (64 * GROUPS) + at[:, None] + (group % GROUPS * 8)[None, :]
    is_inside = (token < end)[:, None] & is_step
    scales = tl.load(scale_ptr + offsets, mask=is_step, other=0.0)
    sums = _sums_of_x(x_sums, kb + step, stride, is_inside, GROUPS)
    if WEIGHT.zeros:
        zeros = tl.load(zero_ptr + offsets, mask=is_step, other=8.0)
        return scales, sums, zeros, _sums_of_x(x_sums + 5 * stride, kb + step, stride, is_inside, GROUPS)
    else:
        return scales, sums


@triton.jit
def _add_rest(y, rest, ZEROS: tl.constexpr):
    """Add to 1 / 512 of a product, (64 blocks, tokens), what raw codes leave out: scales times sums of x."""
    # Triton copies an operand to shared memory as soon as it is loaded: as integers the scales are waited for here, not there.
    scales = rest[0].to(tl.int16, bitcast=True).to(rest[0].dtype, bitcast=True)
    y = _multiply_twice(scales, tl.trans(rest[1]), y)
    if ZEROS:
        shifts = scales.to(tl.float32) * (8.0 - rest[2].to(tl.float32))
        high = shifts.to(scales.dtype)
        sums = tl.trans(rest[3])
        y = _multiply_twice(high, sums, y)
        y = dot((shifts - high.to(tl.float32)).to(scales.dtype), sums.to(scales.dtype), y)
    return y


@triton.jit
def _sums(
    x_desc, w_desc, sum_ptr, scale_ptr, zero_ptr, first_token, end, row_block, tile, row_blocks, kb, steps, K,
    WEIGHT: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Return 1 / 512 of the product of a tile over `steps` blocks of k from kb on: fp32 (64 WORK.blocks, WORK.tokens).

    row_block: the block's index of each 16 rows of the program, at most the last block. Scales are loaded a step ahead, and
    the first part of the rest ahead of all steps where registers suffice.
    """
    PER_BLOCK: tl.constexpr = WEIGHT.groups
    DEPTH: tl.constexpr = 128 // PER_BLOCK
    GROUPS: tl.constexpr = WORK.k_blocks * PER_BLOCK
    TOKENS: tl.constexpr = WORK.tokens
    W: tl.constexpr = 4 * WORK.blocks
    AT_ONCE: tl.constexpr = WORK.rest // PER_BLOCK
    IS_AHEAD: tl.constexpr = TOKENS * WORK.blocks <= 2 * WORK.rest
    warp = tl.arange(0, W)
    group = tl.arange(0, GROUPS)
    s_block = row_block if WEIGHT.one_group else wide(kb) * row_blocks + row_block
    s_offsets = (s_block * (64 * PER_BLOCK) + warp % 4 * 2)[None, :, None, None] + tl.arange(0, 8)[:, None, None, None] * (
        8 * PER_BLOCK
    )
    s_block_step = 0 if WEIGHT.one_group else wide(row_blocks) * (64 * PER_BLOCK)
    s_offsets += tl.arange(0, 2)[None, None, :, None]
    s_offsets += (group // PER_BLOCK * s_block_step + group % PER_BLOCK * 8)[None, None, None, :]
    of_step = (group // PER_BLOCK)[None, None, None, :] + 0 * warp[None, :, None, None]
    y = tl.zeros((16 * W, TOKENS), dtype=tl.float32)
    if IS_AHEAD:
        rest = _load_rest(sum_ptr, scale_ptr, zero_ptr, 0, first_token, end, row_block, row_blocks, kb, steps, K, WEIGHT, WORK)
    s0 = tl.load(scale_ptr + s_offsets, mask=of_step < steps, other=0.0)
    for step in tl.range(0, steps, WORK.k_blocks, num_stages=WORK.stages):
        s_offsets += WORK.k_blocks * s_block_step
        s1 = tl.load(scale_ptr + s_offsets, mask=step + WORK.k_blocks + of_step < steps, other=0.0)
        words = _codes(w_desc, kb + step, tile * (WORK.blocks * 32), WORK.k_blocks)
        for block in tl.static_range(WORK.k_blocks):
            codes = tl.reshape(words[block], (W, 2, 8, 4, 16))
            e = tl.reshape(_elements(tl.permute(codes, (3, 2, 0, 1, 4)), WORK.rest > 0), (4, 8, W, 2, 4, 4, 2))
            if block == 0:  # the first codes are converted before x is waited for
                xs = _loads(x_desc, first_token, (kb + step) * 128, DEPTH, GROUPS)
            for g in tl.static_range(PER_BLOCK):
                w = tl.reshape(tl.permute(_part(e, g, PER_BLOCK), (2, 3, 1, 4, 6, 0, 5)), (16 * W, DEPTH))
                sums = dot(w, tl.trans(xs[block * PER_BLOCK + g]), tl.zeros((16 * W, TOKENS), dtype=tl.float32))
                y += sums * _row_scales(s0, block * PER_BLOCK + g, GROUPS)[:, None]
        s0 = s1
    if IS_AHEAD:
        y = _add_rest(y, rest, WEIGHT.zeros)
    if WORK.rest:
        for first in tl.range(AT_ONCE if IS_AHEAD else 0, steps, AT_ONCE, num_stages=1):
            rest = _load_rest(
                sum_ptr, scale_ptr, zero_ptr, first, first_token, end, row_block, row_blocks, kb, steps, K, WEIGHT, WORK
            )
            y = _add_rest(y, rest, WEIGHT.zeros)
    return y


@triton.jit
def _codes(w_desc, block, row, BLOCKS: tl.constexpr):
    """Return the codes of blocks of k, a tuple; loads that follow each other share a barrier."""
    if BLOCKS == 1:
        return (w_desc.load([block, row, 0]),)
    else:
        return _codes(w_desc, block, row, BLOCKS // 2) + _codes(w_desc, block + BLOCKS // 2, row, BLOCKS // 2)


@triton.jit
def _loads(x_desc, token, k, DEPTH: tl.constexpr, GROUPS: tl.constexpr):
    """Return x of each group of a step, a tuple; loads that follow each other share a barrier."""
    if GROUPS == 1:
        return (x_desc.load([token, k]),)
    else:
        return _loads(x_desc, token, k, DEPTH, GROUPS // 2) + _loads(x_desc, token, k + GROUPS // 2 * DEPTH, DEPTH, GROUPS // 2)


@triton.jit
def _scaled_tokens(y, token_scale_ptr, first_token, N, token_scale_stride, WORK: tl.constexpr):
    """Return y (64 BLOCKS, TOKENS) times 512 and the scales of its tokens, as (TOKENS, 64 BLOCKS)."""
    token = first_token + tl.arange(0, WORK.tokens)
    of_tokens = tl.load(token_scale_ptr + token * token_scale_stride, mask=token < N, other=0.0)
    y = y * (of_tokens * 512.0)[None, :]
    return tl.reshape(tl.permute(tl.reshape(y, (WORK.blocks, 8, 8, WORK.tokens)), (3, 0, 2, 1)), (WORK.tokens, 64 * WORK.blocks))


@triton.jit(do_not_specialize=["N", "share"])
def int4_fp8_gemm(
    x_desc, w_desc, token_scale_ptr, sum_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, N, M, K, share,
    token_scale_stride,
    WEIGHT: tl.constexpr, WORK: tl.constexpr, EARLY: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    """Write y (N, M); x (N, ⌈K/128⌉ 128) in `ORDER`, zeros past K; w as rows of 128 bytes.

    share: steps of 128 k of a program; the last split takes the rest. EARLY: begin while the kernel in front still runs,
    which may write any operand, and ask L2 for the first LEAD steps of w.
    """
    row_blocks = tl.cdiv(M, 64)
    split, tile = tl.program_id(0), tl.program_id(1)
    first_token = tl.program_id(2) * WORK.tokens
    kb = split * share
    steps = tl.minimum(tl.cdiv(K, 128) - kb, share)
    warp = tl.arange(0, 4 * WORK.blocks)
    row_block = tl.minimum(tile * WORK.blocks + warp // 4, row_blocks - 1)  # the last once more past the end
    if EARLY:
        lane = tl.arange(0, 4)[:, None, None] + tl.arange(0, 8)[None, :, None]
        for step in tl.static_range(LEAD):
            at = (wide(kb + step) * row_blocks + row_block) * 4096 + warp % 4 * 1024
            into_l2(w_ptr + at[None, None, :], lane, (step + 0 * warp < steps)[None, None, :], 1024)
        gdc_wait()
    y = _sums(
        x_desc, w_desc, sum_ptr, scale_ptr, zero_ptr, first_token, N, row_block, tile, row_blocks, kb, steps, K, WEIGHT, WORK
    )
    if EARLY:
        gdc_launch_dependents()
    y = _scaled_tokens(y, token_scale_ptr, first_token, N, token_scale_stride, WORK)
    finish(y_ptr, bias_ptr, part_ptr, split, tile, first_token, y, N, M, WORK.splits, WEIGHT.bias)


@triton.jit
def _group_of(place, end_ptr, E, GROUPS: tl.constexpr):
    """Return the group at a place among the groups that have tokens, E if there are fewer. GROUPS: a power of two from E on.

    Groups of more than 16 tokens come first, because their programs take longest.
    """
    group = tl.arange(0, GROUPS)
    size = tl.load(end_ptr + group, group < E, 0) - tl.load(end_ptr + group - 1, (group > 0) & (group < E), 0)
    is_large = size > 16
    counts = tl.where(is_large, 65536, tl.where(size > 0, 1, 0))  # large groups in the upper half, other groups in the lower
    upto = tl.cumsum(counts, 0)
    places = tl.where(is_large, upto >> 16, (tl.sum(counts) >> 16) + (upto & 65535)) - 1
    return E + tl.sum(tl.where((places == place) & (size > 0), group - E, 0))


@triton.jit
def _step_of_group(
    x_desc, w_desc, token_scale_ptr, sum_ptr, scale_ptr, zero_ptr, y_ptr, tile, at, row_block, row_blocks, first_token, end,
    M, K, token_scale_stride, WEIGHT: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Write a tile of y for WORK.tokens of a group from first_token on, or fewer at its end."""
    y = _sums(
        x_desc, w_desc, sum_ptr, scale_ptr, zero_ptr, first_token, end, row_block, at, row_blocks, 0, tl.cdiv(K, 128), K,
        WEIGHT, WORK,
    )  # fmt: skip
    y = _scaled_tokens(y, token_scale_ptr, first_token, end, token_scale_stride, WORK)
    finish(y_ptr, y_ptr, y_ptr, 0, tile, first_token, y, end, M, 1, False)


@triton.jit(do_not_specialize=["E", "N"])
def int4_fp8_groups(
    x_desc, x32_desc, x16_desc, w_desc, token_scale_ptr, sum_ptr, scale_ptr, zero_ptr, end_ptr, y_ptr, K, E, N,
    token_scale_stride,
    WEIGHT: tl.constexpr, WORK: tl.constexpr, WORK32: tl.constexpr, WORK16: tl.constexpr, GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write y (N, M); x as in `int4_fp8_gemm`, the weights of E groups stacked. A program walks over the tokens of its group.

    A step has WORK.tokens, or 32 or 16 where no more are left. x32_desc, x16_desc: x in blocks of as many rows. Groups are
    limited to rows of x whatever their ends are.
    """
    if EARLY:
        gdc_wait()
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    M = tiles * (64 * WORK.blocks)
    group = _group_of(tl.program_id(1), end_ptr, E, GROUPS)
    start = tl.maximum(tl.load(end_ptr + group - 1, (group > 0) & (group < E), 0), 0)
    end = tl.minimum(tl.load(end_ptr + group, group < E, 0), N)
    at = group * tiles + tile
    row_block = at * WORK.blocks + tl.arange(0, 4 * WORK.blocks) // 4
    row_blocks = tiles * WORK.blocks * E
    for first_token in tl.range(start, end, WORK.tokens, num_stages=1):
        left = end - first_token
        if (WORK.tokens > 32) & (left > 32):
            _step_of_group(
                x_desc, w_desc, token_scale_ptr, sum_ptr, scale_ptr, zero_ptr, y_ptr, tile, at, row_block, row_blocks,
                first_token, end, M, K, token_scale_stride, WEIGHT, WORK,
            )  # fmt: skip
        elif (WORK.tokens > 16) & (left > 16):
            _step_of_group(
                x32_desc, w_desc, token_scale_ptr, sum_ptr, scale_ptr, zero_ptr, y_ptr, tile, at, row_block, row_blocks,
                first_token, end, M, K, token_scale_stride, WEIGHT, WORK32,
            )  # fmt: skip
        else:
            _step_of_group(
                x16_desc, w_desc, token_scale_ptr, sum_ptr, scale_ptr, zero_ptr, y_ptr, tile, at, row_block, row_blocks,
                first_token, end, M, K, token_scale_stride, WEIGHT, WORK16,
            )  # fmt: skip


@triton.jit
def _store_sums(q, is_upper, sum_ptr, first, blocks):
    """Write the sums of each 32 and each 128 of q (BLOCK), in units of 512, as `_sums_of_x` reads them.

    first: the first block of 128 k among the blocks of the row. The sums are of 7 q where is_upper, else of -8 q; then of q.
    """
    COUNT: tl.constexpr = q.shape[0] // 128
    q = q.to(tl.float32) * _UNIT
    block, quarter = first + tl.arange(0, COUNT), tl.arange(0, 4)
    at = sum_ptr + block
    for values in tl.static_range(2):
        sums = tl.sum(tl.reshape(q if values else tl.where(is_upper, 7.0, -8.0) * q, (COUNT, 4, 32)), 2)
        tl.store(at[:, None] + quarter[None, :] * blocks, sums, (block < blocks)[:, None])
        tl.store(at + 4 * blocks, tl.sum(sums, 1), block < blocks)
        at += 5 * blocks


@triton.jit
def cast_rows(
    x_ptr, q_ptr, scale_ptr, sum_ptr, stride, K, REORDER: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write a row of x in e4m3, and its scale: an element of x is its e4m3 element times the scale.

    REORDER writes each 32 k in `ORDER`, and the sums unless sum_ptr is None. Elements from K to a multiple of 128 are zeros.
    """
    if since_sm_90():
        gdc_launch_dependents()
        gdc_wait()
    row = wide(tl.program_id(0))
    place = tl.arange(0, BLOCK)
    k = place
    if REORDER:  # place 16 h + 4 c + 2 e1 + e0 of 32 takes k 8 c + 4 e0 + 2 h + e1
        k = (place & -32) | ((place & 12) << 1) | ((place & 1) << 2) | ((place & 16) >> 3) | ((place & 2) >> 1)
    top = magnitude(tl.zeros((BLOCK,), dtype=x_ptr.dtype.element_ty))
    for step in tl.static_range(STEPS):
        top = tl.maximum(top, magnitude(tl.load(x_ptr + row * stride + step * BLOCK + place, step * BLOCK + place < K, 0.0)))
    scale = amax_to_scale(magnitude_to_fp32(tl.max(top, 0), x_ptr.dtype.element_ty), 448.0, False)
    padded = tl.cdiv(K, 128) * 128
    for step in tl.static_range(STEPS):
        x = tl.load(x_ptr + row * stride + step * BLOCK + k, step * BLOCK + k < K, 0.0)
        q = quantize(x.to(tl.float32), scale, 448.0, tl.float8e4nv)
        tl.store(q_ptr + row * padded + step * BLOCK + place, q, step * BLOCK + place < padded)
        if sum_ptr is not None:
            _store_sums(q, (place & 16) > 0, sum_ptr + row * (padded // 128 * 10), step * (BLOCK // 128), padded // 128)
    tl.store(scale_ptr + row, reciprocal(scale))


@triton.jit
def _in_order(q):
    """Return elements (BLOCK) with each 32 k in `ORDER`."""
    k = tl.reshape(q, (q.shape[0] // 32, 4, 2, 2, 2))  # c, e0, h, e1
    return tl.reshape(tl.permute(k, (0, 3, 1, 4, 2)), (q.shape[0],))


@triton.jit
def norm_rows(
    x_ptr, add_ptr, g_ptr, sum_ptr, q_ptr, scale_ptr, sums_ptr, stride_x, stride_add, K, inverse, eps,
    ZERO_CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the RMSNorm of a row of x, rounded to x's type, as `cast_rows` writes a row in `ORDER`.

    add_ptr: a matrix that is added to x first, sum_ptr: where the sum goes; or both None. g_ptr None: the weight is 1.
    inverse: 1 / K. The program holds the row.
    """
    if since_sm_90():
        gdc_launch_dependents()
        gdc_wait()
    row = wide(tl.program_id(0))
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + k, k < K, 0.0)
    g = tl.full((1,), 1.0, tl.float32) if g_ptr is None else tl.load(g_ptr + k, k < K, 0.0).to(tl.float32)
    if add_ptr is not None:
        x = (x.to(tl.float32) + tl.load(add_ptr + row * stride_add + k, k < K, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * K + k, x, k < K)
    # Normalize, with the roundings of `rmsnorm_fwd`.
    x32 = x.to(tl.float32)
    r = tl.rsqrt(tl.sum(x32 * x32, 0) * inverse + eps)
    y = (x32 * r * (g + 1.0 if ZERO_CENTERED else g)).to(x.dtype)
    # Cast.
    scale = amax_to_scale(magnitude_to_fp32(tl.max(magnitude(y), 0), y.dtype), 448.0, False)
    q = quantize(y.to(tl.float32), scale, 448.0, tl.float8e4nv)
    padded = tl.cdiv(K, 128) * 128
    tl.store(q_ptr + row * padded + k, _in_order(q), k < padded)
    _store_sums(q, (k & 2) > 0, sums_ptr + row * (padded // 128 * 10), 0, padded // 128)
    tl.store(scale_ptr + row, reciprocal(scale))


@triton.jit
def scale_sums(sums_ptr, token_scale_ptr, row_scale_ptr, bias_ptr, y_ptr, M, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Write y (N, M): sums in the scale of row 0 squared, in the scales of their token and row instead, plus a bias under BIAS.

    y may be the sums themselves.
    """
    if since_sm_90():
        gdc_launch_dependents()
        gdc_wait()
    token = wide(tl.program_id(1))
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < M
    first = tl.load(row_scale_ptr)
    multiplier = tl.load(row_scale_ptr + row, inside, 0.0) / first * (tl.load(token_scale_ptr + token) / first)
    y = tl.load(sums_ptr + token * M + row, inside, 0.0).to(tl.float32) * multiplier
    if BIAS:
        y += tl.load(bias_ptr + row, inside, 0.0).to(tl.float32)
    tl.store(y_ptr + token * M + row, y, inside)


@triton.jit
def cast_by(x_ptr, q_ptr, scale_ptr, count, BLOCK: tl.constexpr):
    """Write the elements of x over a scale in e4m3; those beyond 448 become 448."""
    if since_sm_90():
        gdc_launch_dependents()
        gdc_wait()
    place = wide(tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, place < count, 0.0).to(tl.float32)
    tl.store(q_ptr + place, quantize(x, reciprocal(tl.load(scale_ptr)), 448.0, tl.float8e4nv), place < count)
