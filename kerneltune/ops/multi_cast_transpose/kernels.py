"""The kernels: a tile of one of many matrices, cast and transposed. May import tl_lib, tl_transpose."""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_lib import load_constant, quantize, reciprocal, wide
from kerneltune.kernel_lib.tl_transpose import store_transposed


@triton.jit
def _word(table_ptr, tensor, WORD: tl.constexpr):
    """A word of a matrix's row of the table: x, q, qᵀ, rows, columns, place in the list, first tile."""
    return tl.load(table_ptr + tensor * 7 + WORD)


@triton.jit
def _matrix_of(tile, table_ptr, T, tiles_each, SAME: tl.constexpr, T_LOG2: tl.constexpr):
    """Which matrix a tile is of, and its number there. SAME: all have tiles_each."""
    if SAME:
        tensor = tile // tiles_each
        local = tile - tensor * tiles_each
    else:
        tensor = tile * 0
        for bit in tl.static_range(T_LOG2):
            ahead = tensor + (1 << (T_LOG2 - 1 - bit))
            first = load_constant((table_ptr + tl.minimum(ahead, T - 1) * 7 + 6).to(tl.pointer_type(tl.int32)))
            tensor = tl.where((ahead < T) & (first <= tile), ahead, tensor)
        local = tile - _word(table_ptr, tensor, 6).to(tl.int32)
    return tensor, local


@triton.jit
def _place_of_tile(local, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile. GROUP row blocks follow each other: they write neighbouring pieces of the same rows of a
    transpose."""
    across = tl.cdiv(N, COLS)
    above = local // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(M, ROWS) - above, GROUP)
    inside = local % (GROUP * across)
    return (above + inside % height) * ROWS, inside // height * COLS


@triton.jit
def cast_transpose_tiles(
    table_ptr, first_x_ptr, first_q_ptr, scale_ptr, amax_ptr, scale_inv_ptr, skip_ptr, T, tiles_each, total,
    SKIP: tl.constexpr, FP8_MAX: tl.constexpr, SAME: tl.constexpr, T_LOG2: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All sizes and addresses are multiples of 16. EVEN: COLS divides all widths. SKIP: do nothing where the number at skip_ptr
    is not 0."""
    QUADS: tl.constexpr = ROWS // 4
    if SKIP:
        total = tl.where(tl.load(skip_ptr) != 0, 0, total)
    lanes = tl.arange(0, COLS)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        tensor, local = _matrix_of(tile, table_ptr, T, tiles_each, SAME, T_LOG2)
        x_ptr = _word(table_ptr, tensor, 0).to(tl.pointer_type(first_x_ptr.dtype.element_ty))
        q_ptr = _word(table_ptr, tensor, 1).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        qt_ptr = _word(table_ptr, tensor, 2).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        M = _word(table_ptr, tensor, 3).to(tl.int32)
        N = _word(table_ptr, tensor, 4).to(tl.int32)
        x_ptr, q_ptr, qt_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(q_ptr, 16), tl.multiple_of(qt_ptr, 16)
        M, N = tl.multiple_of(M, 16), tl.multiple_of(N, 16)
        place = _word(table_ptr, tensor, 5).to(tl.int32)
        row0, col0 = _place_of_tile(local, M, N, ROWS, COLS, GROUP)
        scale = tl.load(scale_ptr + place)
        if local == 0:
            tl.store(scale_inv_ptr + place, reciprocal(scale))
        live = col0 + lanes < N
        first = wide(row0) * N + col0
        amax = tl.zeros((QUADS, COLS), dtype=tl.float32)
        qs = ()
        for k in tl.static_range(4):
            rows = tl.arange(0, QUADS) * 4 + k
            mask = (rows < M - row0)[:, None]
            if not EVEN:
                mask = mask & live[None, :]
            offsets = rows[:, None] * N + lanes[None, :]
            x = tl.load(x_ptr + first + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            amax = tl.maximum(amax, tl.abs(x))
            q = quantize(x, scale, FP8_MAX, first_q_ptr.dtype.element_ty)
            tl.store(q_ptr + first + offsets, q, mask=mask)
            qs = qs + (q,)
        tl.atomic_max(amax_ptr + place, tl.max(amax), sem="relaxed")
        store_transposed(qt_ptr, wide(col0) * M + row0, M, 0, tl.minimum(M - row0, ROWS), live, qs, False, EVEN, True)


@triton.jit
def _cast_in_order(x_ptr, q_ptr, amax_ptr, scale, MASKED: tl.constexpr, left, NUMBERS: tl.constexpr, FP8_MAX: tl.constexpr):
    """The next numbers of a matrix as they lie; MASKED: only `left` of them."""
    numbers = tl.arange(0, NUMBERS)
    mask = numbers < left if MASKED else None
    x = tl.load(x_ptr + numbers, mask=mask, other=0.0 if MASKED else None).to(tl.float32)
    tl.store(q_ptr + numbers, quantize(x, scale, FP8_MAX, q_ptr.dtype.element_ty), mask=mask)
    tl.atomic_max(amax_ptr, tl.max(tl.where(x == x, tl.abs(x), 0.0)), sem="relaxed")


@triton.jit
def _turn_tile(
    x_ptr, qt_ptr, scale, M, N, height, width,
    MASKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """qt[n, m] = fp8(x[m, n]) of a tile, number by number; MASKED: of only `height` rows and `width` columns."""
    rows, cols = tl.arange(0, ROWS)[None, :], tl.arange(0, COLS)[:, None]
    mask = (rows < height) & (cols < width) if MASKED else None
    x = tl.load(x_ptr + (rows * N + cols), mask=mask, other=0.0 if MASKED else None).to(tl.float32)
    tl.store(qt_ptr + (cols * M + rows), quantize(x, scale, FP8_MAX, qt_ptr.dtype.element_ty), mask=mask)


@triton.jit
def cast_transpose_odd_tiles(
    table_ptr, first_x_ptr, first_q_ptr, scale_ptr, amax_ptr, scale_inv_ptr, skip_ptr, T, tiles_each, total,
    SKIP: tl.constexpr, FP8_MAX: tl.constexpr, SAME: tl.constexpr, T_LOG2: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sizes of any kind, and addresses, which are multiples of 16 if ALIGNED.

    A program casts as many numbers as a tile has, as they lie, whatever the sizes are; and then a tile that it transposes. Of one
    tile of fp8 that is stored both ways byte by byte ptxas 12.8 would make wrong code.
    """
    NUMBERS: tl.constexpr = ROWS * COLS
    if SKIP:
        total = tl.where(tl.load(skip_ptr) != 0, 0, total)
    tile = tl.program_id(0)
    if tile < total:
        tensor, local = _matrix_of(tile, table_ptr, T, tiles_each, SAME, T_LOG2)
        x_ptr = _word(table_ptr, tensor, 0).to(tl.pointer_type(first_x_ptr.dtype.element_ty))
        q_ptr = _word(table_ptr, tensor, 1).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        qt_ptr = _word(table_ptr, tensor, 2).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        if ALIGNED:
            x_ptr, q_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(q_ptr, 16)
        M = _word(table_ptr, tensor, 3).to(tl.int32)
        N = _word(table_ptr, tensor, 4).to(tl.int32)
        place = _word(table_ptr, tensor, 5).to(tl.int32)
        scale = tl.load(scale_ptr + place)
        if local == 0:
            tl.store(scale_inv_ptr + place, reciprocal(scale))
        first = wide(local) * NUMBERS
        left = wide(M) * N - first
        if left >= NUMBERS:
            _cast_in_order(x_ptr + first, q_ptr + first, amax_ptr + place, scale, False, NUMBERS, NUMBERS, FP8_MAX)
        elif left > 0:
            _cast_in_order(x_ptr + first, q_ptr + first, amax_ptr + place, scale, True, left.to(tl.int32), NUMBERS, FP8_MAX)
        row0, col0 = _place_of_tile(local, M, N, ROWS, COLS, GROUP)
        x_ptr += wide(row0) * N + col0
        qt_ptr += wide(col0) * M + row0
        if (M - row0 >= ROWS) & (N - col0 >= COLS):
            _turn_tile(x_ptr, qt_ptr, scale, M, N, ROWS, COLS, False, ROWS, COLS, FP8_MAX)
        else:
            _turn_tile(x_ptr, qt_ptr, scale, M, N, M - row0, N - col0, True, ROWS, COLS, FP8_MAX)
