"""Multiply on the fp8 tensor cores: codes become e4m3 in registers, the first operand of wgmma; tokens come from shared memory.

TMA copies both operands to shared memory. A thread reads bytes of two codes, and four bytes become two registers of four
e4m3 elements: the lower codes of the bytes, and the upper codes. So the k of a register are not neighbours. `cast_rows`
writes each 32 k of x in the order that the registers have, `ORDER`, so that neither operand is reordered here.

The byte u <= 16 is the e4m3 element u / 512. So a code q becomes (q - z) / 512 exactly, for every zero point z from 0 to 16.

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


def _less_zero_points(register: str) -> str:
    """Return PTX from four codes q in the lower halves of the bytes of `t` to bytes of q - z, sign and size, in a register.

    128 + q - z has bit 7 if q >= z. If not, the size is 127 less the lower bits, and 1 more.
    """
    return f"""
    and.b32 t, t, 0x0f0f0f0f;
    or.b32 t, t, 0x80808080;
    sub.u32 t, t, $3;
    not.b32 sign, t;
    and.b32 sign, sign, 0x80808080;
    shr.u32 one, sign, 7;
    sub.u32 flip, sign, one;
    and.b32 t, t, 0x7f7f7f7f;
    xor.b32 t, t, flip;
    add.u32 t, t, one;
    or.b32 {register}, t, sign;"""


_PTX_ZEROS = tl.constexpr(
    "{ .reg .b32 t, sign, one, flip; mov.b32 t, $2;"
    + _less_zero_points("$0")
    + "shr.u32 t, $2, 4;"
    + _less_zero_points("$1")
    + "}"
)
"""PTX from eight codes, and their zero point four times, to bytes of q - z."""


@dataclass(frozen=True, eq=False, repr=False)
class Fp8Work(Constants):
    """The work of a program.

    Attributes:
        tokens: rows of x.
        blocks: blocks of 64 rows of w.
        splits: programs that share a tile's k.
        stages: stages of the load pipeline.
    """

    tokens: int
    blocks: int
    splits: int
    stages: int


@triton.jit
def _elements(codes, zeros, ZEROS: tl.constexpr):
    """Return (q - z) / 512 in e4m3, (…, 2), of bytes (…) with two codes each.

    zeros: (…) uint8, equal for all bytes of a group of k. Without ZEROS each zero point is 8.
    """
    if is_cuda():
        if ZEROS:
            lower, upper = tl.inline_asm_elementwise(
                _PTX_ZEROS, "=&r,=&r,r,r", [codes, zeros], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
            )
        else:
            lower, upper = tl.inline_asm_elementwise(
                _PTX, "=&r,=&r,r", [codes], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
            )
        return tl.join(lower, upper)
    else:
        steps = tl.join(codes & 15, codes >> 4).to(tl.float32)
        if ZEROS:
            steps -= tl.join(zeros, zeros).to(tl.float32)
        else:
            steps -= 8.0
        return (steps * _UNIT).to(tl.float8e4nv)


@triton.jit
def _part(e, g: tl.constexpr, GROUPS: tl.constexpr):
    """Return group g of e (4 c, 8 j, W, 2 i, 4 q, 4, 2 h) as (c, j, W, i, 4 / GROUPS, 4, h)."""
    if GROUPS == 1:
        return e
    else:
        split = tl.reshape(e, (4, 8, e.shape[2], 2, 2, 2, 4, 2))
        first, second = tl.split(tl.permute(split, (0, 1, 2, 3, 5, 6, 7, 4)))
        half = first if g < GROUPS // 2 else second  # (c, j, W, i, 2, 4, h)
        if GROUPS == 2:
            return half
        else:
            even, odd = tl.split(tl.permute(half, (0, 1, 2, 3, 5, 6, 4)))
            return tl.reshape(even if g % 2 == 0 else odd, (4, 8, e.shape[2], 2, 1, 4, 2))


@triton.jit
def _row_scales(scales, g: tl.constexpr, GROUPS: tl.constexpr):
    """Return group g of scales (8 j, W, 2 i, GROUPS) as fp32 (16 W)."""
    W: tl.constexpr = scales.shape[1]
    if GROUPS == 1:
        of_group = tl.reshape(scales, (8, W, 2))
    elif GROUPS == 2:
        first, second = tl.split(scales)
        of_group = first if g == 0 else second
    else:
        even, odd = tl.split(tl.reshape(scales, (8, W, 2, 2, 2)))
        first, second = tl.split(even if g % 2 == 0 else odd)
        of_group = first if g < 2 else second
    return tl.reshape(tl.permute(of_group.to(tl.float32), (1, 2, 0)), (16 * W,))


@triton.jit
def _of_bytes(zeros, GROUPS: tl.constexpr):
    """Return zero points (8 j, W, 2 i, GROUPS) as uint8 of every byte of codes (4 c, 8 j, W, 2 i, 16)."""
    W: tl.constexpr = zeros.shape[1]
    repeated = tl.broadcast_to(zeros.to(tl.uint8)[:, :, :, :, None], (8, W, 2, GROUPS, 16 // GROUPS))
    return tl.broadcast_to(tl.reshape(repeated, (1, 8, W, 2, 16)), (4, 8, W, 2, 16))


@triton.jit
def _sums(
    x_desc, w_desc, scale_ptr, zero_ptr, first_token, row_block, tile, row_blocks, kb, steps,
    WEIGHT: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Return 1 / 512 of the product of a tile over `steps` blocks of k from kb on: fp32 (64 WORK.blocks, WORK.tokens).

    row_block: the block's index of each 16 rows of the program, at most the last block. Scales are loaded a step ahead.
    """
    GROUPS: tl.constexpr = WEIGHT.groups
    TOKENS: tl.constexpr = WORK.tokens
    DEPTH: tl.constexpr = 128 // GROUPS
    W: tl.constexpr = 4 * WORK.blocks
    warp = tl.arange(0, W)
    s_block = row_block if WEIGHT.one_group else wide(kb) * row_blocks + row_block
    s_offsets = (s_block * (64 * GROUPS) + warp % 4 * 2)[None, :, None, None] + tl.arange(0, 8)[:, None, None, None] * (
        8 * GROUPS
    )
    s_offsets += tl.arange(0, 2)[None, None, :, None] + tl.arange(0, GROUPS)[None, None, None, :] * 8
    s_step = 0 if WEIGHT.one_group else wide(row_blocks) * (64 * GROUPS)
    w_row = (kb * row_blocks + tile * WORK.blocks) * 32
    y = tl.zeros((16 * W, TOKENS), dtype=tl.float32)
    s0 = tl.load(scale_ptr + s_offsets)
    z0 = tl.load(zero_ptr + s_offsets) if WEIGHT.zeros else s0
    for step in tl.range(steps, num_stages=WORK.stages):
        s_offsets += s_step
        more = (step + 1 + 0 * warp < steps)[None, :, None, None]
        s1 = tl.load(scale_ptr + s_offsets, mask=more, other=0.0)
        z1 = tl.load(zero_ptr + s_offsets, mask=more, other=0.0) if WEIGHT.zeros else s1
        codes = tl.reshape(w_desc.load([w_row + step * (row_blocks * 32), 0]), (W, 2, 8, 4, 16))
        e = _elements(tl.permute(codes, (3, 2, 0, 1, 4)), _of_bytes(z0, GROUPS) if WEIGHT.zeros else 0, WEIGHT.zeros)
        e = tl.reshape(e, (4, 8, W, 2, 4, 4, 2))
        for g in tl.static_range(GROUPS):
            x = tl.trans(x_desc.load([first_token, (kb + step) * 128 + g * DEPTH]))
            w = tl.reshape(tl.permute(_part(e, g, GROUPS), (2, 3, 1, 4, 6, 0, 5)), (16 * W, DEPTH))
            sums = dot(w, x, tl.zeros((16 * W, TOKENS), dtype=tl.float32))
            y += sums * _row_scales(s0, g, GROUPS)[:, None]
        s0, z0 = s1, z1
    return y


@triton.jit
def _scaled_tokens(y, token_scale_ptr, first_token, N, token_scale_stride, WORK: tl.constexpr):
    """Return y (64 BLOCKS, TOKENS) times 512 and the scales of its tokens, as (TOKENS, 64 BLOCKS)."""
    token = first_token + tl.arange(0, WORK.tokens)
    of_tokens = tl.load(token_scale_ptr + token * token_scale_stride, mask=token < N, other=0.0)
    y = y * (of_tokens * 512.0)[None, :]
    return tl.reshape(tl.permute(tl.reshape(y, (WORK.blocks, 8, 8, WORK.tokens)), (3, 0, 2, 1)), (WORK.tokens, 64 * WORK.blocks))


@triton.jit(do_not_specialize=["N", "share"])
def int4_fp8_gemm(
    x_desc, w_desc, token_scale_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, N, M, K, share, token_scale_stride,
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
    y = _sums(x_desc, w_desc, scale_ptr, zero_ptr, first_token, row_block, tile, row_blocks, kb, steps, WEIGHT, WORK)
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
    x_desc, w_desc, token_scale_ptr, scale_ptr, zero_ptr, y_ptr, tile, at, row_block, row_blocks, first_token, end, M, K,
    token_scale_stride, WEIGHT: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Write a tile of y for WORK.tokens of a group from first_token on, or fewer at its end."""
    y = _sums(x_desc, w_desc, scale_ptr, zero_ptr, first_token, row_block, at, row_blocks, 0, tl.cdiv(K, 128), WEIGHT, WORK)
    y = _scaled_tokens(y, token_scale_ptr, first_token, end, token_scale_stride, WORK)
    finish(y_ptr, y_ptr, y_ptr, 0, tile, first_token, y, end, M, 1, False)


@triton.jit(do_not_specialize=["E", "N"])
def int4_fp8_groups(
    x_desc, x32_desc, x16_desc, w_desc, token_scale_ptr, scale_ptr, zero_ptr, end_ptr, y_ptr, M, K, E, N, token_scale_stride,
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
                x_desc, w_desc, token_scale_ptr, scale_ptr, zero_ptr, y_ptr, tile, at, row_block, row_blocks, first_token, end,
                M, K, token_scale_stride, WEIGHT, WORK,
            )  # fmt: skip
        elif (WORK.tokens > 16) & (left > 16):
            _step_of_group(
                x32_desc, w_desc, token_scale_ptr, scale_ptr, zero_ptr, y_ptr, tile, at, row_block, row_blocks, first_token, end,
                M, K, token_scale_stride, WEIGHT, WORK32,
            )  # fmt: skip
        else:
            _step_of_group(
                x16_desc, w_desc, token_scale_ptr, scale_ptr, zero_ptr, y_ptr, tile, at, row_block, row_blocks, first_token, end,
                M, K, token_scale_stride, WEIGHT, WORK16,
            )  # fmt: skip


@triton.jit
def cast_rows(x_ptr, q_ptr, scale_ptr, stride, K, REORDER: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row of x in e4m3, and its scale: an element of x is its e4m3 element times the scale.

    REORDER writes each 32 k in `ORDER`. Elements from K to a multiple of 128 are zeros.
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
    tl.store(scale_ptr + row, reciprocal(scale))


@triton.jit
def _in_order(q):
    """Return elements (BLOCK) with each 32 k in `ORDER`."""
    k = tl.reshape(q, (q.shape[0] // 32, 4, 2, 2, 2))  # c, e0, h, e1
    return tl.reshape(tl.permute(k, (0, 3, 1, 4, 2)), (q.shape[0],))


@triton.jit
def norm_rows(
    x_ptr, add_ptr, g_ptr, sum_ptr, q_ptr, scale_ptr, stride_x, stride_add, K, inverse, eps,
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
