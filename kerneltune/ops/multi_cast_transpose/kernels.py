"""The kernel: a tile of one of many matrices, cast and transposed. May import tl_lib, tl_transpose."""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_lib import load_constant, quantize, reciprocal, wide
from kerneltune.kernel_lib.tl_transpose import store_transposed


@triton.jit
def _word(table_ptr, tensor, WORD: tl.constexpr):
    """A word of a matrix's row of the table: x, q, qᵀ, rows, columns, place in the list, first tile."""
    return tl.load(table_ptr + tensor * 7 + WORD)


@triton.jit
def cast_transpose_tiles(
    table_ptr, first_x_ptr, first_q_ptr, scale_ptr, amax_ptr, scale_inv_ptr, skip_ptr, T, tiles_each, total,
    SKIP: tl.constexpr, FP8_MAX: tl.constexpr, SAME: tl.constexpr, T_LOG2: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All sizes and addresses are multiples of 16. SAME: all tensors have tiles_each tiles. EVEN: COLS divides all widths.
    SKIP: do nothing where the number at skip_ptr is not 0. GROUP: row blocks whose tiles follow each other, for they write
    neighbouring pieces of the same rows of a transpose."""
    QUADS: tl.constexpr = ROWS // 4
    if SKIP:
        total = tl.where(tl.load(skip_ptr) != 0, 0, total)
    lanes = tl.arange(0, COLS)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
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
        x_ptr = _word(table_ptr, tensor, 0).to(tl.pointer_type(first_x_ptr.dtype.element_ty))
        q_ptr = _word(table_ptr, tensor, 1).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        qt_ptr = _word(table_ptr, tensor, 2).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        M = _word(table_ptr, tensor, 3).to(tl.int32)
        N = _word(table_ptr, tensor, 4).to(tl.int32)
        x_ptr, q_ptr, qt_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(q_ptr, 16), tl.multiple_of(qt_ptr, 16)
        M, N = tl.multiple_of(M, 16), tl.multiple_of(N, 16)
        place = _word(table_ptr, tensor, 5).to(tl.int32)
        across = tl.cdiv(N, COLS)
        above = local // (GROUP * across) * GROUP
        height = tl.minimum(tl.cdiv(M, ROWS) - above, GROUP)
        inside = local % (GROUP * across)
        row0 = (above + inside % height) * ROWS
        col0 = inside // height * COLS
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
