"""The kernel of `int4_gemm` on packed weights: no shared memory on the way from memory to the tensor cores.

Each warp loads the codes of its 64 rows and its k straight into the registers in which mma.sync wants its second operand, all of
them before the first product; x comes as the first operand in the same way. Tensors have an axis for the four lanes that share a
row (c) and one for the eight rows of lanes (j), fastest first, since that is how Triton deals out lanes. May import triton and
tl_lib.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.tl_gemm import dot, is_last, sum_of_parts
from kerneltune.tl_lib import is_cuda, wide

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
"""Codes 1024 + q and 64 + q in fp16: q in the lowest bits of the mantissa of 1024, four bits higher in that of 64."""

_LOADS_BF16 = "".join(
    f"""
        shr.u32 t, $8, {4 * j};
        shr.u32 u, $9, {4 * j};
        lop3.b32 ${j}, t, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 ${j + 4}, u, 0x000f000f, 0x43004300, 0xea;"""
    for j in range(4)
)
"""128 + q in bf16."""


def _dequantise(loads: str, number: str, even: str, odd: str, zeros: bool) -> str:
    """PTX from two words of codes ($8, $9) and the scales of each ($10, $11), with `zeros` zero points ($12, $13), to eight pairs
    of weights. even, odd: what the loads of even and odd pairs are too large by, as two numbers of that type with their signs
    turned; 8 more where there are no zero points."""
    lines = ["{", ".reg .b32 t, u, a0, a1, b0, b1;", loads, f"mov.b32 a0, {even};", f"mov.b32 a1, {odd};"]
    if zeros:  # -1024 - z and -64 - z are exact
        lines += [f"sub.rn.{number} b{h}, a{h}, $13;" for h in range(2)] + [f"sub.rn.{number} a{h}, a{h}, $12;" for h in range(2)]
    for j in range(8):
        offset = "b" if zeros and j >= 4 else "a"
        lines.append(f"add.rn.{number} ${j}, ${j}, {offset}{j % 2};")
        lines.append(f"mul.rn.{number} ${j}, ${j}, ${10 + j // 4};")
    return "\n".join([*lines, "}"])


_FP16 = tl.constexpr(_dequantise(_LOADS_FP16, "f16x2", "0xe408e408", "0xd480d480", zeros=False))
_FP16_ZEROS = tl.constexpr(_dequantise(_LOADS_FP16, "f16x2", "0xe400e400", "0xd400d400", zeros=True))
_BF16 = tl.constexpr(_dequantise(_LOADS_BF16, "bf16x2", "0xc308c308", "0xc308c308", zeros=False))
_BF16_ZEROS = tl.constexpr(_dequantise(_LOADS_BF16, "bf16x2", "0xc300c300", "0xc300c300", zeros=True))
_CONSTRAINTS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")
_CONSTRAINTS_ZEROS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r")
_EIGHT_FP16 = tl.constexpr((tl.float16,) * 8)
_EIGHT_BF16 = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def _unpack(words, j: tl.constexpr):
    """Codes 2 j and 2 j + 1 of words (…), as (…, 2)."""
    return tl.join((words >> (4 * j)) & 15, (words >> (4 * j + 16)) & 15)


@triton.jit
def _eight(PTX: tl.constexpr, operands, DTYPES: tl.constexpr):
    """Eight tiles of pairs from the PTX of `_dequantise`."""
    return tl.inline_asm_elementwise(
        PTX, _CONSTRAINTS_ZEROS if len(operands) == 5 else _CONSTRAINTS, operands, dtype=DTYPES, is_pure=True, pack=2
    )


@triton.jit
def _weights_of(words, scale_a, scale_b, zero_a, zero_b, ZEROS: tl.constexpr):
    """Weights (…, 2 e, 2 word, 2, 2) of code words (…, 2 word): of word w the code 4 a + 2 b + e at [e, w, a, b]."""
    if is_cuda():
        if ZEROS:
            if scale_a.dtype == tl.float16:
                d = _eight(_FP16_ZEROS, [words, scale_a, scale_b, zero_a, zero_b], _EIGHT_FP16)
            else:
                d = _eight(_BF16_ZEROS, [words, scale_a, scale_b, zero_a, zero_b], _EIGHT_BF16)
        else:
            if scale_a.dtype == tl.float16:
                d = _eight(_FP16, [words, scale_a, scale_b], _EIGHT_FP16)
            else:
                d = _eight(_BF16, [words, scale_a, scale_b], _EIGHT_BF16)
        low = tl.join(tl.join(d[0], d[4]), tl.join(d[2], d[6]))
        high = tl.join(tl.join(d[1], d[5]), tl.join(d[3], d[7]))
        return tl.join(low, high)
    else:
        a, b = tl.split(words)
        low = tl.join(tl.join(_unpack(a, 0), _unpack(b, 0)), tl.join(_unpack(a, 2), _unpack(b, 2)))
        high = tl.join(tl.join(_unpack(a, 1), _unpack(b, 1)), tl.join(_unpack(a, 3), _unpack(b, 3)))
        steps = tl.join(low, high).to(tl.float32)  # (…, e, w, a, b)
        scale = tl.join(scale_a, scale_b).to(tl.float32)[:, :, :, :, :, :, None, None]
        if ZEROS:
            steps -= tl.join(zero_a, zero_b).to(tl.float32)[:, :, :, :, :, :, None, None]
        else:
            steps -= 8.0
        return (steps * scale).to(scale_a.dtype)


@triton.jit
def _all_issued(EARLY: tl.constexpr):
    """The loads before it are issued before those after it, though not waited for; the compiler would move them to their uses.

    EARLY: let the next kernel begin, and wait for the one in front to end. Otherwise there is nothing to wait for.
    """
    if is_cuda():
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _values_of(tile, q: tl.constexpr, GROUPS: tl.constexpr):
    """Of scales (4, 8, W, G, 8) those of quarter q of the block, as (4, 8, W, 8, 2): the same for both pairs of a word."""
    if GROUPS == 1:
        found = tl.reshape(tile, (tile.shape[0], tile.shape[1], tile.shape[2], tile.shape[4]))
    elif GROUPS == 2:
        first, second = tl.split(tl.permute(tile, (0, 1, 2, 4, 3)))
        found = first if q < 2 else second
    else:
        pairs = tl.permute(tl.reshape(tile, (tile.shape[0], tile.shape[1], tile.shape[2], 2, 2, 8)), (0, 1, 2, 5, 4, 3))
        first, second = tl.split(pairs)
        even, odd = tl.split(first if q < 2 else second)
        found = even if q % 2 == 0 else odd
    return tl.broadcast_to(found[:, :, :, :, None], (found.shape[0], found.shape[1], found.shape[2], 8, 2))


@triton.jit
def _sum_over_k(acc, ALONG: tl.constexpr, ACROSS: tl.constexpr, TOKENS: tl.constexpr):
    """(ALONG ACROSS, TOKENS, 64) to (ACROSS, TOKENS, 64), pairwise; splitting moves the parts to one thread in one exchange."""
    if ALONG == 1:
        return acc
    elif ALONG == 2:
        a, b = tl.split(tl.permute(tl.reshape(acc, (2, ACROSS, TOKENS, 64)), (1, 2, 3, 0)))
        return a + b
    elif ALONG == 4:
        a, b = tl.split(tl.permute(tl.reshape(acc, (2, 2, ACROSS, TOKENS, 64)), (2, 3, 4, 0, 1)))
        aa, ab = tl.split(a)
        ba, bb = tl.split(b)
        return (aa + ab) + (ba + bb)
    else:
        a, b = tl.split(tl.permute(tl.reshape(acc, (2, 2, 2, ACROSS, TOKENS, 64)), (3, 4, 5, 0, 1, 2)))
        aa, ab = tl.split(a)
        ba, bb = tl.split(b)
        aaa, aab = tl.split(aa)
        aba, abb = tl.split(ab)
        baa, bab = tl.split(ba)
        bba, bbb = tl.split(bb)
        return ((aaa + aab) + (aba + abb)) + ((baa + bab) + (bba + bbb))


@triton.jit
def _tokens(x_ptrs, token, k6, k: tl.constexpr, N, K, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Values of x from k on; 0 past the ends."""
    if FULL and EVEN:
        return tl.load(x_ptrs + k)
    elif EVEN:
        return tl.load(x_ptrs + k, mask=token < N, other=0.0)
    else:
        return tl.load(x_ptrs + k, mask=(token < N) & (k6 + k < K), other=0.0)


@triton.jit
def _load(ptrs, live, EVEN: tl.constexpr):
    """Codes or scales, read once; 0 past the ends."""
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        return tl.load(ptrs, mask=live, other=0, eviction_policy="evict_first")


@triton.jit
def _finish(y_ptr, bias_ptr, offsets, rows, mask, y, M, BIAS: tl.constexpr):
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def _int4_gemm(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, counter_ptr, N, M, K, stride_xn,
    GROUPS: tl.constexpr, ONE_GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    FULL: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
    TOKENS: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y (N, M): a program takes TOKENS rows of x, 64 ACROSS rows of w, and 128 ALONG STEPS of k; every warp 64 rows.

    FULL: N is a multiple of TOKENS. EVEN: blocks of k and rows are multiples of what a program takes, and K of 128. EARLY: read w
    while the kernel in front may still be running, wait for it, and only then touch anything else.
    """
    WARPS: tl.constexpr = ALONG * ACROSS
    row_blocks = tl.cdiv(M, 64)
    k_blocks = tl.cdiv(K, 128)
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    row_tiles = tl.cdiv(row_blocks, ACROSS)
    first_row_block = tile % row_tiles * ACROSS
    first_token = tile // row_tiles * TOKENS

    warp = tl.arange(0, WARPS)
    kb = split * (STEPS * ALONG) + warp // ACROSS
    rb = first_row_block + warp % ACROSS
    # five axes: c, j, warp, and two within a thread
    c5 = tl.arange(0, 4)[:, None, None, None, None]
    j5 = tl.arange(0, 8)[None, :, None, None, None]
    i_outer = tl.arange(0, 8)[None, None, None, :, None]
    i_inner = tl.arange(0, 8)[None, None, None, None, :]
    group = tl.arange(0, GROUPS)[None, None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, None, :]
    block = (wide(kb) * row_blocks + rb)[None, None, :, None, None]
    w_ptrs = w_ptr + (block * 1024 + (j5 * 16 + c5 * 4)) + (i_outer * 128 + word)
    s_block = rb[None, None, :, None, None] + tl.zeros_like(block) if ONE_GROUP else block
    s_offsets = s_block * (64 * GROUPS) + (j5 * (8 * GROUPS) + c5 * 0)
    s_inner = group * 8 + i_inner
    w_step = wide(ALONG) * row_blocks * 1024
    s_step = 0 if ONE_GROUP else wide(ALONG) * row_blocks * (64 * GROUPS)
    # six axes: c, token, warp, and token, quarter of the block and k within a thread
    c6 = tl.arange(0, 4)[:, None, None, None, None, None] * 8
    token = tl.arange(0, 8)[None, :, None, None, None, None] + tl.arange(0, TOKENS // 8)[None, None, None, :, None, None] * 8
    token = first_token + token
    quarter = tl.arange(0, 2)[None, None, None, None, :, None] * 32
    t6 = tl.arange(0, 8)[None, None, None, None, None, :]
    k6 = (kb * 128)[None, None, :, None, None, None] + c6
    x_ptrs = x_ptr + (wide(token) * stride_xn + k6) + (quarter + t6)

    scales, zeros, words = (), (), ()
    for step in tl.static_range(STEPS):
        live = ((kb + step * ALONG < k_blocks) & (rb < row_blocks))[None, None, :, None, None]
        s_ptrs = scale_ptr + (s_offsets + step * s_step)
        scales = scales + (_load(s_ptrs + s_inner, live, EVEN),)
        if ZEROS:
            z_ptrs = zero_ptr + (s_offsets + step * s_step)
            zeros = zeros + (_load(z_ptrs + s_inner, live, EVEN),)
    for step in tl.static_range(STEPS):
        live = ((kb + step * ALONG < k_blocks) & (rb < row_blocks))[None, None, :, None, None]
        words = words + (_load(w_ptrs + step * w_step, live, EVEN),)
    _all_issued(EARLY)
    xs = (_tokens(x_ptrs, token, k6 + quarter, 0, N, K, FULL, EVEN),)

    acc = tl.zeros((WARPS, TOKENS, 64), dtype=tl.float32)
    for half in tl.static_range(2 * STEPS):
        if half + 1 < 2 * STEPS:
            then = (half + 1) // 2 * (128 * ALONG) + (half + 1) % 2 * 64
            xs = xs + (_tokens(x_ptrs, token, k6 + quarter, then, N, K, FULL, EVEN),)
        pairs = tl.permute(tl.reshape(words[half // 2], (4, 8, WARPS, 8, 2, 2)), (0, 1, 2, 3, 5, 4))
        first, second = tl.split(pairs)
        q = half % 2 * 2
        scale_a, scale_b = _values_of(scales[half // 2], q, GROUPS), _values_of(scales[half // 2], q + 1, GROUPS)
        zero_a, zero_b = scale_a, scale_b
        if ZEROS:
            zero_a, zero_b = _values_of(zeros[half // 2], q, GROUPS), _values_of(zeros[half // 2], q + 1, GROUPS)
        w = _weights_of(first if half % 2 == 0 else second, scale_a, scale_b, zero_a, zero_b, ZEROS)
        # (c, j, warp, i, e, quarter, a, b) and (c, token, warp, token, quarter, a, b, e) to products over (quarter, a, c, b, e)
        w = tl.reshape(tl.permute(w, (2, 5, 6, 0, 7, 4, 3, 1)), (WARPS, 64, 64))
        x = tl.reshape(xs[half], (4, 8, WARPS, TOKENS // 8, 2, 2, 2, 2))
        x = tl.reshape(tl.permute(x, (2, 3, 1, 4, 5, 0, 6, 7)), (WARPS, TOKENS, 64))
        acc = dot(x, w, acc)

    y = tl.reshape(_sum_over_k(acc, ALONG, ACROSS, TOKENS), (ACROSS, TOKENS, 8, 8))  # (…, i, j)
    y = tl.reshape(tl.permute(y, (1, 0, 3, 2)), (TOKENS, 64 * ACROSS))
    tokens = first_token + tl.arange(0, TOKENS)[:, None]
    rows = first_row_block * 64 + tl.arange(0, 64 * ACROSS)[None, :]
    mask = (tokens < N) & (rows < M)
    offsets = wide(tokens) * M + rows
    if SPLITS == 1:
        _finish(y_ptr, bias_ptr, offsets, rows, mask, y, M, BIAS)
    else:
        tl.store(part_ptr + wide(split) * N * M + offsets, y, mask=mask, cache_modifier=".cg")
        if is_last(counter_ptr + tile, SPLITS):
            y = sum_of_parts(part_ptr + offsets, wide(N) * M, mask, SPLITS)
            _finish(y_ptr, bias_ptr, offsets, rows, mask, y, M, BIAS)
