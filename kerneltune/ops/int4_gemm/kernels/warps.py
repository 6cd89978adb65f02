"""Multiply by single warps (mma.sync), without shared memory on the way from memory to the tensor cores.

Each warp loads the codes of its rows and its k into the registers from which mma.sync reads its first operand, and loads the
codes of the next block while it multiplies. x is loaded into the registers of the second operand in the same way. Codes
minus their zero points are exact in 16 bits, so the sum over a group is a sum of integers times x, which a single scale
multiplies. Tensors have an axis for the four lanes that share a row (c) and an axis for the eight rows of lanes (j), the
fastest axis first, because Triton distributes lanes in this order. `warpgroups` unpacks codes by the same functions.

The warps of several blocks of rows in a program read the same x at the same time, so that x goes from L2 to L1 once for all
of them. If registers are left, warps load x a step ahead. With 16 tokens and more than two steps, x takes the registers of
the next codes, which are then loaded half a step later. With 32 tokens a warp needs so many registers that an SM holds eight
warps, too few to hide the latency of L2. For 32 tokens, m = 3584 and k = 8192 in 112 programs of eight warps, a scheduler
issues 8 steps x 2 warps x 411 instructions, 3.4 us; 14.7 MB of codes and 29.4 MB of x go through L2.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.tl_gemm import dot, gather_parts
from kerneltune.kernel_lib.tl_lib import is_cuda, only_if, since_sm_90, wide

_LOADS_FP16 = """
        shr.u32 t, $8, 8;
        shr.u32 u, $9, 8;
        lop3.b32 $0, $8, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $1, $8, 0x00f000f0, 0x54005400, 0xea;
        lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $3, t, 0x00f000f0, 0x54005400, 0xea;
        lop3.b32 $4, $9, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $5, $9, 0x00f000f0, 0x54005400, 0xea;
        lop3.b32 $6, u, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $7, u, 0x00f000f0, 0x54005400, 0xea;"""
"""PTX that makes fp16 values 1024 + q and 64 + q of codes q: q in the lowest bits of the mantissa of 1024, and four bits higher
in the mantissa of 64."""

_LOADS_BF16 = "".join(
    f"""
        shr.u32 t, $8, {4 * j};
        shr.u32 u, $9, {4 * j};
        lop3.b32 ${j}, t, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 ${j + 4}, u, 0x000f000f, 0x43004300, 0xea;"""
    for j in range(4)
)
"""PTX that makes bf16 values 128 + q of codes q."""


def _dequantize_ptx(loads: str, number: str, even: str, odd: str, zeros: bool) -> str:
    """Return PTX that makes eight pairs of q - z ($0 … $7) of two words of codes ($8, $9).

    loads: `_LOADS_…`, whose values exceed q. even, odd: two values, minus the excess in even and in odd pairs, and without zero
    points minus 8 more. zeros: subtract the zero points of each word ($10, $11), too.
    """
    lines = ["{", ".reg .b32 t, u, a0, a1, b0, b1;", loads, f"mov.b32 a0, {even};", f"mov.b32 a1, {odd};"]
    if zeros:  # -1024 - z and -64 - z are exact
        lines += [f"sub.rn.{number} b{h}, a{h}, $11;" for h in range(2)] + [f"sub.rn.{number} a{h}, a{h}, $10;" for h in range(2)]
    lines += [f"add.rn.{number} ${j}, ${j}, {'b' if zeros and j >= 4 else 'a'}{j % 2};" for j in range(8)]
    return "\n".join([*lines, "}"])


_FP16 = tl.constexpr(_dequantize_ptx(_LOADS_FP16, "f16x2", "0xe408e408", "0xd480d480", zeros=False))
_FP16_ZEROS = tl.constexpr(_dequantize_ptx(_LOADS_FP16, "f16x2", "0xe400e400", "0xd400d400", zeros=True))
_BF16 = tl.constexpr(_dequantize_ptx(_LOADS_BF16, "bf16x2", "0xc308c308", "0xc308c308", zeros=False))
_BF16_ZEROS = tl.constexpr(_dequantize_ptx(_LOADS_BF16, "bf16x2", "0xc300c300", "0xc300c300", zeros=True))
_CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r")
_CONSTRAINTS_ZEROS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")
_EIGHT_FP16 = tl.constexpr((tl.float16,) * 8)
_EIGHT_BF16 = tl.constexpr((tl.bfloat16,) * 8)
"""PTX of `_dequantize_ptx`, its constraints with and without zero points, and the types of its results. The negated excess is
-(1024 + 8) and -(64 + 8) in fp16, and -(128 + 8) in bf16; with zero points the 8 is left out."""


@dataclass(frozen=True, eq=False, repr=False)
class Weight(Constants):
    """Describe the weight.

    Attributes:
        groups: groups of k that have scales of their own, in 128 of k.
        one_group: whether all of k shares one scale.
        zeros: whether there are zero points; else every zero point is 8.
        bias: whether a bias is added to the product.
    """

    groups: int
    one_group: bool
    zeros: bool
    bias: bool


@dataclass(frozen=True, eq=False, repr=False)
class Work(Constants):
    """Hold the work of a program.

    Attributes:
        tokens: rows of x.
        rows: rows of w of a warp; 16 of a warpgroup's warp.
        along: warps that share the k of a program.
        steps: steps of a program, each of 128 `along` of k.
        splits: programs that share a tile's k.
        blocks: blocks of 64 rows of w.
    """

    tokens: int
    rows: int
    along: int
    steps: int
    splits: int
    blocks: int


@triton.jit
def _unpack(words, j: tl.constexpr):
    """Return codes 2 j and 2 j + 1 of words (…), as (…, 2)."""
    return tl.join((words >> (4 * j)) & 15, (words >> (4 * j + 16)) & 15)


@triton.jit
def _eight(PTX: tl.constexpr, operands, DTYPES: tl.constexpr):
    """Return eight tiles of pairs from the PTX of `_dequantize_ptx`."""
    return tl.inline_asm_elementwise(
        PTX, _CONSTRAINTS_ZEROS if len(operands) == 3 else _CONSTRAINTS, operands, dtype=DTYPES, is_pure=True, pack=2
    )


@triton.jit
def _of_both_words(values):
    """Return a value of two words, (…, i), for each word, (…, i, 2)."""
    shape: tl.constexpr = values.shape
    return tl.broadcast_to(values[:, :, :, :, None], (shape[0], shape[1], shape[2], shape[3], 2))


@triton.jit
def elements_of(words, zero_a, zero_b, ZEROS: tl.constexpr, dtype: tl.constexpr):
    """Return q - z (c, j, W, i, 2 e, 2 word, 2, 2) of code words (c, j, W, i, 2 word) and the zero points (c, j, W, i) of each.

    The code 4 a + 2 b + e of word w lies at [e, w, a, b].
    """
    if is_cuda():
        if ZEROS:
            operands = [words, _of_both_words(zero_a), _of_both_words(zero_b)]
            if dtype == tl.float16:
                d = _eight(_FP16_ZEROS, operands, _EIGHT_FP16)
            else:
                d = _eight(_BF16_ZEROS, operands, _EIGHT_BF16)
        else:
            if dtype == tl.float16:
                d = _eight(_FP16, [words], _EIGHT_FP16)
            else:
                d = _eight(_BF16, [words], _EIGHT_BF16)
        low = tl.join(tl.join(d[0], d[4]), tl.join(d[2], d[6]))
        high = tl.join(tl.join(d[1], d[5]), tl.join(d[3], d[7]))
        return tl.join(low, high)
    else:
        a, b = tl.split(words)
        low = tl.join(tl.join(_unpack(a, 0), _unpack(b, 0)), tl.join(_unpack(a, 2), _unpack(b, 2)))
        high = tl.join(tl.join(_unpack(a, 1), _unpack(b, 1)), tl.join(_unpack(a, 3), _unpack(b, 3)))
        steps = tl.join(low, high).to(tl.float32)  # (…, e, w, a, b)
        if ZEROS:
            steps -= tl.join(zero_a, zero_b).to(tl.float32)[:, :, :, :, None, :, None, None]
        else:
            steps -= 8.0
        return steps.to(dtype)


@triton.jit
def values_of_quarter(tile, q: tl.constexpr, GROUPS: tl.constexpr):
    """Return the scales or zero points of quarter q of the block, (4, 8, W, i), out of a tile (4, 8, W, G, i)."""
    if GROUPS == 1:
        return tl.reshape(tile, (tile.shape[0], tile.shape[1], tile.shape[2], tile.shape[4]))
    elif GROUPS == 2:
        first, second = tl.split(tl.permute(tile, (0, 1, 2, 4, 3)))
        return first if q < 2 else second
    else:
        split = tl.reshape(tile, (tile.shape[0], tile.shape[1], tile.shape[2], 2, 2, tile.shape[4]))
        first, second = tl.split(tl.permute(split, (0, 1, 2, 5, 4, 3)))
        even, odd = tl.split(first if q < 2 else second)
        return even if q % 2 == 0 else odd


@triton.jit
def _scaled_sums(w, x, scale, Q: tl.constexpr, R: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr):
    """Return scale times the product over Q quarters of a block, as (W, i, j, TOKENS / 8, 4, 2).

    w as in `elements_of`; x (c, token, W, token, Q, 2, 2, 2).
    """
    # both over (quarter, b, c, a, e)
    w = tl.reshape(tl.permute(w, (2, 3, 1, 5, 7, 0, 6, 4)), (W, 8 * R, 32 * Q))
    x = tl.reshape(tl.permute(x, (2, 4, 6, 0, 5, 7, 3, 1)), (W, 32 * Q, TOKENS))
    sums = dot(w, x, tl.zeros((W, 8 * R, TOKENS), dtype=tl.float32))
    scale = tl.permute(scale.to(tl.float32), (2, 3, 1, 0))[:, :, :, None, :, None]
    return tl.reshape(sums, (W, R, 8, TOKENS // 8, 4, 2)) * scale


@triton.jit
def _half_block(words, scales, zeros, x, HALF: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """Sum half a block of k: words (4, 8, W, i, 2), scales and zeros (4, 8, W, G, i), x (4, 8, W, TOKENS / 8, 2, 8)."""
    W: tl.constexpr = words.shape[2]
    R: tl.constexpr = words.shape[3]
    TOKENS: tl.constexpr = 8 * x.shape[3]
    q: tl.constexpr = 2 * HALF
    w = elements_of(words, values_of_quarter(zeros, q, GROUPS), values_of_quarter(zeros, q + 1, GROUPS), ZEROS, x.dtype)
    x = tl.reshape(x, (4, 8, W, TOKENS // 8, 2, 2, 2, 2))
    first, second = values_of_quarter(scales, q, GROUPS), values_of_quarter(scales, q + 1, GROUPS)
    if GROUPS < 4:
        return _scaled_sums(w, x, first, 2, R, W, TOKENS)
    else:
        wa, wb = tl.split(tl.permute(w, (0, 1, 2, 3, 4, 6, 7, 5)))
        xa, xb = tl.split(tl.permute(x, (0, 1, 2, 3, 5, 6, 7, 4)))
        wa, wb = wa[:, :, :, :, :, None, :, :], wb[:, :, :, :, :, None, :, :]
        xa, xb = xa[:, :, :, :, None, :, :, :], xb[:, :, :, :, None, :, :, :]
        return _scaled_sums(wa, xa, first, 1, R, W, TOKENS) + _scaled_sums(wb, xb, second, 1, R, W, TOKENS)


@triton.jit
def _sum_over_warps(y, ALONG: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr):
    """Sum (ALONG PIECES, 8 i, TOKENS) to (PIECES, 8 i, TOKENS) by pairs.

    `tl.split` moves the parts of a thread in a single exchange.
    """
    if ALONG == 1:
        return y
    elif ALONG == 2:
        a, b = tl.split(tl.permute(tl.reshape(y, (2, PIECES, 8 * R, TOKENS)), (1, 2, 3, 0)))
        return a + b
    elif ALONG == 4:
        a, b = tl.split(tl.permute(tl.reshape(y, (2, 2, PIECES, 8 * R, TOKENS)), (2, 3, 4, 0, 1)))
        aa, ab = tl.split(a)
        ba, bb = tl.split(b)
        return (aa + ab) + (ba + bb)
    else:
        a, b = tl.split(tl.permute(tl.reshape(y, (2, 2, 2, PIECES, 8 * R, TOKENS)), (3, 4, 5, 0, 1, 2)))
        aa, ab = tl.split(a)
        ba, bb = tl.split(b)
        aaa, aab = tl.split(aa)
        aba, abb = tl.split(ab)
        baa, bab = tl.split(ba)
        bba, bbb = tl.split(bb)
        return ((aaa + aab) + (aba + abb)) + ((baa + bab) + (bba + bbb))


@triton.jit
def into_l2(ptrs, lane, live, count):
    """Prefetch `count` bytes from the pointer of lane 0 of each live warp into L2, without a wait; both are multiples of 16."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
        "=r,l,r,r", [ptrs.to(tl.int64), ((lane == 0) & live).to(tl.int32), tl.zeros_like(lane) + count],
        dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def _load_tokens(x_ptrs, live, k6, K, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Load x; 0 for tokens that are not live, and past K."""
    if FULL and EVEN:
        return tl.load(x_ptrs)
    elif EVEN:
        return tl.load(x_ptrs, mask=live, other=0.0)
    else:
        return tl.load(x_ptrs, mask=live & (k6 < K), other=0.0)


@triton.jit
def load_codes(ptrs, live, EVEN: tl.constexpr):
    """Load codes or scales; 0 past the ends."""
    if EVEN:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=live, other=0)


@triton.jit
def split_halves(words):
    """Split the words of a block of k into its halves."""
    shape: tl.constexpr = words.shape
    return tl.split(tl.permute(tl.reshape(words, (4, 8, shape[2], shape[3], 2, 2)), (0, 1, 2, 3, 5, 4)))


@triton.jit
def finish(
    y_ptr, bias_ptr, part_ptr, split, tile, first_token, y, N, M, SPLITS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Store y (tokens, rows) with the parts of all splits and the bias added."""
    TOKENS: tl.constexpr = y.shape[0]
    ROWS: tl.constexpr = y.shape[1]
    tokens = first_token + tl.arange(0, TOKENS)[:, None]
    rows = tile * ROWS + tl.arange(0, ROWS)[None, :]
    mask = (tokens < N) & (rows < M)
    if SPLITS > 1:  # the program of the last split began after the programs of all other splits
        tile_index = wide(tl.program_id(2)) * tl.num_programs(1) + tile
        words_of_split = wide(tl.num_programs(2)) * tl.num_programs(1) * (TOKENS * ROWS)
        part_words = part_ptr.to(tl.pointer_type(tl.int32)) + tile_index * (TOKENS * ROWS)
        y = gather_parts(part_words, words_of_split, split, y, SPLITS)
        mask = only_if(mask, split == SPLITS - 1)
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    tl.store(y_ptr + (wide(tokens) * M + rows), y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rows_of_warps(warp, tile, row_blocks, BLOCKS: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Return, of each warp, 0 if it is the first of a row block, its row block, and the row block that it loads.

    Warps side by side read the same x at the same time: the first warp from L2, all other warps from L1.
    """
    if BLOCKS == 1:
        return warp, tile, tile
    else:
        PIECES: tl.constexpr = PER_BLOCK * BLOCKS
        first_of_block = warp // PIECES + warp % PER_BLOCK
        row_block = tile * BLOCKS + warp % PIECES // PER_BLOCK
        return first_of_block, row_block, tl.minimum(row_block, row_blocks - 1)  # past the end, load the last block


@triton.jit
def _ask_l2(
    operands, stride_xn, N, K, split, first_token, row_block_of_warp, first_of_block, warp, piece, k_block, end,
    block, scale_block, w_step, s_step, WEIGHT: tl.constexpr, WORK: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    """Ask L2 for the x of a program and the first LEAD blocks of each warp, then wait for the end of the kernel in front.

    The kernel in front may write any operand: nothing is read here, and L2 is where all SMs meet.
    """
    x_ptr, w_ptr, scale_ptr, zero_ptr = operands
    R: tl.constexpr = WORK.rows // 8
    STEPS: tl.constexpr = WORK.steps
    ALONG: tl.constexpr = WORK.along
    GROUPS: tl.constexpr = WEIGHT.groups
    gdc_launch_dependents()
    lane = tl.arange(0, 4)[:, None, None] + tl.arange(0, 8)[None, :, None]
    start = split * (STEPS * ALONG * 128)
    # Because programs read the same x, each row block asks for another token.
    row = first_token + (row_block_of_warp + tl.zeros_like(warp))[None, None, :] % WORK.tokens
    x_slice = x_ptr + wide(row) * stride_xn + start
    bytes_of_x = 2 * (tl.minimum(K, start + STEPS * ALONG * 128) - start)
    into_l2(x_slice + tl.zeros_like(lane), lane + first_of_block[None, None, :], (row < N) & (start < K), bytes_of_x)
    for step in tl.static_range(min(STEPS, LEAD)):
        exists = (k_block + step * ALONG < end)[None, None, :]
        if step == 0 or not WEIGHT.one_group:
            into_l2(scale_ptr + scale_block * (64 * GROUPS) + step * s_step, lane + piece, exists, 128 * GROUPS)
            if WEIGHT.zeros:
                into_l2(zero_ptr + scale_block * (64 * GROUPS) + step * s_step, lane + piece, exists, 128 * GROUPS)
        into_l2(w_ptr + block * 1024 + piece * (128 * R) + step * w_step, lane, exists, 512 * R)
    gdc_wait()


@triton.jit
def weight_places(w_ptr, block, scale_block, piece, R: tl.constexpr, GROUPS: tl.constexpr):
    """Return the pointers of a warp's codes and the offsets of its scales: five axes, c, j, warp, and two within a thread."""
    c5 = tl.arange(0, 4)[:, None, None, None, None]
    j5 = tl.arange(0, 8)[None, :, None, None, None]
    i_outer = tl.arange(0, R)[None, None, None, :, None]
    i_inner = tl.arange(0, R)[None, None, None, None, :]
    group = tl.arange(0, GROUPS)[None, None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, None, :]
    piece5 = piece[:, :, :, None, None]
    w_ptrs = w_ptr + (block[:, :, :, None, None] * 1024 + piece5 * (128 * R) + (j5 * 16 + c5 * 4)) + (i_outer * 128 + word)
    s_offsets = scale_block[:, :, :, None, None] * (64 * GROUPS) + piece5 * R + (j5 * (8 * GROUPS) + c5 * 0)
    return w_ptrs, s_offsets, group * 8 + i_inner


@triton.jit
def _token_places(x_ptr, stride_xn, k_block, first_token, TOKENS: tl.constexpr):
    """Return the places of x in a block: six axes, c, token, warp, and token, quarter of the block and k within a thread.

    Returns tokens, offsets of the quarters, offsets of k within a thread, k without these offsets, and pointers without
    offsets.
    """
    c6 = tl.arange(0, 4)[:, None, None, None, None, None] * 8
    token = tl.arange(0, 8)[None, :, None, None, None, None] + tl.arange(0, TOKENS // 8)[None, None, None, :, None, None] * 8
    token = first_token + token
    quarter = tl.arange(0, 2)[None, None, None, None, :, None] * 32
    t6 = tl.arange(0, 8)[None, None, None, None, None, :]
    k6 = (k_block * 128)[None, None, :, None, None, None] + c6
    x_rows = x_ptr + (wide(token) * stride_xn + k6)
    return token, quarter, t6, k6, x_rows


@triton.jit
def _join_rows(y, WORK: tl.constexpr):
    """Return y of all warps as (tokens, rows of w): add up warps that share rows, then put the rows of all warps side by side."""
    TOKENS: tl.constexpr = WORK.tokens
    R: tl.constexpr = WORK.rows // 8
    PER_BLOCK: tl.constexpr = 64 // WORK.rows
    PIECES: tl.constexpr = PER_BLOCK * WORK.blocks
    y = _sum_over_warps(tl.reshape(y, (WORK.along * PIECES, 8 * R, TOKENS)), WORK.along, PIECES, R, TOKENS)
    if WORK.blocks == 1:
        y = tl.reshape(tl.permute(tl.reshape(y, (PIECES, R, 8, TOKENS)), (3, 2, 0, 1)), (TOKENS, 64))
    else:
        y = tl.permute(tl.reshape(y, (WORK.blocks, PER_BLOCK, R, 8, TOKENS)), (4, 0, 3, 1, 2))
        y = tl.reshape(y, (TOKENS, 64 * WORK.blocks))
    return y


@triton.jit(do_not_specialize=["N"])
def _int4_gemm(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, N, M, K, stride_xn,
    WEIGHT: tl.constexpr, WORK: tl.constexpr, LEAD: tl.constexpr,
    FULL: tl.constexpr, EVEN: tl.constexpr, LAST_SHORTER: tl.constexpr, AHEAD: tl.constexpr, LAST_APART: tl.constexpr,
):  # fmt: skip
    """Write y (N, M).

    LEAD: steps that L2 is asked for in advance, 0 for none. FULL: N is a multiple of a program's tokens. EVEN: the programs
    take exactly K; LAST_SHORTER: programs of the last split take fewer steps. AHEAD: load x a step ahead of its use.
    LAST_APART: the last step is peeled off the loop, so that the loop loads nothing past the end; the loop loads the next codes
    between the halves of a block. Only with EVEN, AHEAD and no zero points.
    """
    STEPS: tl.constexpr = WORK.steps
    ALONG: tl.constexpr = WORK.along
    GROUPS: tl.constexpr = WEIGHT.groups
    R: tl.constexpr = WORK.rows // 8
    PER_BLOCK: tl.constexpr = 64 // WORK.rows
    W: tl.constexpr = ALONG * PER_BLOCK * WORK.blocks
    row_blocks = tl.cdiv(M, 64)
    split, tile = tl.program_id(0), tl.program_id(1)
    first_token = tl.program_id(2) * WORK.tokens
    end = tl.minimum(tl.cdiv(K, 128), (split + 1) * (STEPS * ALONG))
    warp = tl.arange(0, W)
    k_block = split * (STEPS * ALONG) + warp // (PER_BLOCK * WORK.blocks)
    piece = (warp % PER_BLOCK)[None, None, :]
    first_of_block, row_block_of_warp, row_block = _rows_of_warps(warp, tile, row_blocks, WORK.blocks, PER_BLOCK)
    block = (wide(k_block) * row_blocks + row_block)[None, None, :]
    scale_at = (row_block if WORK.blocks == 1 else row_block[None, None, :]) + tl.zeros_like(block) if WEIGHT.one_group else block
    w_step = wide(ALONG) * row_blocks * 1024
    s_step = 0 if WEIGHT.one_group else wide(ALONG) * row_blocks * (64 * GROUPS)
    if LEAD:
        _ask_l2(
            (x_ptr, w_ptr, scale_ptr, zero_ptr), stride_xn, N, K, split, first_token, row_block_of_warp, first_of_block, warp,
            piece, k_block, end, block, scale_at, w_step, s_step, WEIGHT, WORK, LEAD,
        )  # fmt: skip
    w_ptrs, s_offsets, s_inner = weight_places(w_ptr, block, scale_at, piece, R, GROUPS)
    token, quarter, t6, k6, x_rows = _token_places(x_ptr, stride_xn, k_block, first_token, WORK.tokens)
    x_ptrs = x_rows + (quarter + t6)
    k6 += quarter
    live = (k_block < end)[None, None, :, None, None]
    s0 = load_codes(scale_ptr + s_offsets + s_inner, live, EVEN)
    w0 = load_codes(w_ptrs, live, EVEN)
    if since_sm_90():
        gdc_wait()  # the compiler would put the loads of x in front of these
    y = tl.zeros((W, R, 8, WORK.tokens // 8, 4, 2), dtype=tl.float32)
    if not LAST_SHORTER:
        steps: tl.constexpr = STEPS
    else:
        steps = tl.minimum((end - split * (STEPS * ALONG)) // ALONG, STEPS)
        tl.assume(steps > 0)  # else ptxas takes x apart in every step
    if AHEAD:
        x0 = _load_tokens(x_ptrs, token < N, k6, K, FULL, EVEN)
        x1 = _load_tokens(x_ptrs + 64, token < N, k6 + 64, K, FULL, EVEN)
    # Multiply a block while the next codes are loaded: a pipeline by hand, because Triton's would use shared memory.
    for step in tl.range(steps - 1 if LAST_APART else steps, num_stages=1):
        if not AHEAD:
            x0 = _load_tokens(x_ptrs, token < N, k6, K, FULL, EVEN)
            x1 = _load_tokens(x_ptrs + 64, token < N, k6 + 64, K, FULL, EVEN)
        # After the last step the same x is loaded again, because no x follows.
        x_step = tl.where(step + 1 < steps, 128 * ALONG, 0) if AHEAD and not LAST_APART else 128 * ALONG
        if WORK.blocks == 1:
            x_ptrs += x_step
        else:  # half as many pointers to keep
            x_rows += x_step
            x_ptrs = x_rows + (quarter + t6)
        k6 += x_step
        zeros = s0
        if WEIGHT.zeros:
            live = (k_block + step * ALONG < end)[None, None, :, None, None]
            zeros = load_codes(zero_ptr + s_offsets + s_inner, live, EVEN)
        w_ptrs += w_step
        s_offsets += s_step
        live = (k_block + (step + 1) * ALONG < end)[None, None, :, None, None]
        first, second = split_halves(w0)
        if not LAST_APART:
            s1, w1 = load_codes(scale_ptr + s_offsets + s_inner, live, False), load_codes(w_ptrs, live, False)
        y += _half_block(first, s0, zeros, x0, 0, GROUPS, WEIGHT.zeros)
        if AHEAD:
            x0 = _load_tokens(x_ptrs, token < N, k6, K, FULL, EVEN)
        if LAST_APART:
            s1, w1 = load_codes(scale_ptr + s_offsets + s_inner, live, EVEN), load_codes(w_ptrs, live, EVEN)
        y += _half_block(second, s0, zeros, x1, 1, GROUPS, WEIGHT.zeros)
        if AHEAD:
            x1 = _load_tokens(x_ptrs + 64, token < N, k6 + 64, K, FULL, EVEN)
        w0, s0 = w1, s1
    if LAST_APART:
        first, second = split_halves(w0)
        y += _half_block(first, s0, s0, x0, 0, GROUPS, False)
        y += _half_block(second, s0, s0, x1, 1, GROUPS, False)
    finish(y_ptr, bias_ptr, part_ptr, split, tile, first_token, _join_rows(y, WORK), N, M, WORK.splits, WEIGHT.bias)


int4_gemm_by_warps = _int4_gemm
"""The public name; the compiled kernel keeps the name that recorded facts have."""
