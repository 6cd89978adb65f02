"""Transpose bytes: a matrix, or tiles while they are stored, by words where addresses allow, byte by byte at the ends."""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_lib import only_if, pack_bytes, words_of_pairs


@triton.jit
def transpose_bytes(
    x_ptr, q_ptr, M, N, stride, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, BACKWARDS: tl.constexpr
):  # fmt: skip
    """Write q[n, m] = x[m, n] of x (M, N), a tile per program; both uint8, rows of x `stride` apart, rows of q adjacent.

    Programs go down a band of GROUP row blocks, then to the next column block, because tiles of a band are neighbouring pieces
    of the same rows of q. BACKWARDS: from the last tile to the first, because L2 still has the bytes that were written last.
    """
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLS)
    tile = tl.program_id(0)
    if BACKWARDS:
        tile = tl.num_programs(0) - 1 - tile
    group = tl.minimum(down, GROUP)
    blocks_above = tile // (group * across) * group
    height = tl.minimum(down - blocks_above, group)
    in_band = tile % (group * across)
    rows = (blocks_above + in_band % height) * ROWS + tl.arange(0, ROWS)
    cols = in_band // height * COLS + tl.arange(0, COLS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :]), mask=mask, other=0)
    tl.store(q_ptr + (cols.to(tl.int64)[:, None] * M + rows[None, :]), tl.trans(x), mask=tl.trans(mask))


@triton.jit
def store_transposed(q_ptr, base, ld, lo, hi, live, qs, JAGGED: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr):
    """Store rows [lo, hi) of four fp8 sub-tiles (QUADS, COLS) at byte base + col * ld + row; sub-tile k has the rows 4i + k.

    live: (COLS,), which columns exist, all of them under EVEN. PACKED: base and ld are multiples of 4, and the bytes go out as
    32-bit words, made of integers, never of a transposed fp8 tile (see `pack_bytes`). JAGGED: lo may be other than 0.
    """
    if PACKED:
        store_transposed_words(q_ptr, base, ld, lo, hi, live, pack_bytes(qs[0], qs[1], qs[2], qs[3]), JAGGED, EVEN)
    else:
        quads = tl.arange(0, qs[0].shape[0])
        cols = tl.arange(0, qs[0].shape[1])
        byte_ptr = q_ptr.to(tl.pointer_type(tl.uint8)) + base
        for k in tl.static_range(4):
            rows = quads * 4 + k
            mask = live[:, None] & ((rows >= lo) & (rows < hi))[None, :]
            tl.store(byte_ptr + (cols[:, None] * ld + rows[None, :]), tl.trans(qs[k].to(tl.uint8, bitcast=True)), mask=mask)


@triton.jit
def store_transposed_tile(
    q_ptr, base, ld, lo, hi, live, qs,
    JAGGED: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Call `store_transposed`; under PAIRS (2) sub-tiles are int16, each element the bytes of two neighbouring columns."""
    if PAIRS == 1:
        store_transposed(q_ptr, base, ld, lo, hi, live, qs, JAGGED, EVEN, PACKED)
    elif PACKED:
        lower, upper = words_of_pairs(qs[0], qs[1], qs[2], qs[3])
        store_transposed_words(q_ptr, base, ld * 2, lo, hi, live, lower, JAGGED, EVEN)
        store_transposed_words(q_ptr, base + ld, ld * 2, lo, hi, live, upper, JAGGED, EVEN)
    else:
        for half in tl.static_range(2):
            bytes_of_half = (byte_of(qs[0], half), byte_of(qs[1], half), byte_of(qs[2], half), byte_of(qs[3], half))
            store_transposed(q_ptr, base + half * ld, ld * 2, lo, hi, live, bytes_of_half, JAGGED, EVEN, False)


@triton.jit
def byte_of(pair, HALF: tl.constexpr):
    """Return the lower (HALF 0) or upper (1) byte of int16 pairs, as uint8."""
    return (pair >> (8 * HALF)).to(tl.uint8)


@triton.jit
def store_transposed_words(q_ptr, base, ld, lo, hi, live, words, JAGGED: tl.constexpr, EVEN: tl.constexpr):
    """Store as `store_transposed` does words (QUADS, COLS) uint32, each of four rows of a column; base, ld multiples of 4.

    Without JAGGED lo is 0 and hi a multiple of 4. With it, the words at both ends, which hold other rows as well, are stored
    byte by byte.
    """
    quads = tl.arange(0, words.shape[0])
    cols = tl.arange(0, words.shape[1])
    words = words.to(tl.int32, bitcast=True)
    mask = (quads < hi // 4)[None, :]
    if JAGGED:
        mask = mask & (quads >= (lo + 3) // 4)[None, :]
    if not EVEN:
        mask = mask & live[:, None]
    word_ptr = q_ptr.to(tl.pointer_type(tl.int32)) + base // 4
    tl.store(word_ptr + (cols[:, None] * (ld // 4) + quads[None, :]), tl.trans(words), mask=mask, cache_modifier=".cs")
    if JAGGED:
        if (lo % 4 != 0) | (hi % 4 != 0):
            byte_ptr = q_ptr.to(tl.pointer_type(tl.uint8)) + base
            _store_end(byte_ptr, lo // 4, ld, lo, hi, live, words)
            _store_end(byte_ptr, hi // 4, ld, lo, hi, live, words)


@triton.jit
def _store_end(byte_ptr, quad, ld, lo, hi, live, packed):
    """Store the rows in [lo, hi) of a quad of packed words (QUADS, COLS), byte by byte."""
    quads = tl.arange(0, packed.shape[0])
    cols = tl.arange(0, packed.shape[1])
    word = tl.sum(tl.where((quads == quad)[:, None], packed, 0), axis=0)
    for k in tl.static_range(4):
        row = quad * 4 + k
        mask = only_if(only_if(live, row >= lo), row < hi)
        tl.store(byte_ptr + (cols * ld + row), (word >> (8 * k)).to(tl.uint8), mask=mask)
