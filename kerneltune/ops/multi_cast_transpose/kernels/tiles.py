"""Cast and transpose tiles of many matrices."""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.launch import resident, too_small_to_transpose
from kerneltune.kernel_lib.tl_lib import FP8_MAX, load_constant, quantize, reciprocal, wide
from kerneltune.kernel_lib.tl_transpose import store_transposed
from kerneltune.rounding import cdiv

if TYPE_CHECKING:
    from kerneltune.ops.multi_cast_transpose.cast_transpose import MultiCastConfig

_ODD_TILE = 64
"""Rows and columns of a tile of an odd matrix, of which an address or a size is no multiple of 16."""


def cast_transpose_all(
    xs: Sequence[torch.Tensor],
    casts: Sequence[torch.Tensor],
    transposes: Sequence[torch.Tensor],
    scale_inv: torch.Tensor,
    scales: torch.Tensor,
    amaxes: torch.Tensor,
    skip: torch.Tensor | None,
    fp8_format: str,
    c: "MultiCastConfig",
) -> None:
    """Launch once for the regular matrices, whose sizes and addresses are multiples of 16, and once for the odd matrices."""
    tensors = [(*_addresses(x, q, qt), *x.shape, i) for i, (x, q, qt) in enumerate(zip(xs, casts, transposes, strict=True))]
    regular = tuple(t for t in tensors if t[3] * t[4] and not _is_odd(t))
    odd = tuple(t for t in tensors if t[3] * t[4] and _is_odd(t))
    pointers = (xs[0], casts[0], scales, amaxes, scale_inv, amaxes if skip is None else skip)
    chosen = {"SKIP": skip is not None, "FP8_MAX": FP8_MAX[fp8_format]}
    if regular:
        if reason := too_small_to_transpose(c.rows, c.cols, c.warps):
            raise ValueError(f"config={c}: {reason}")
        table, total, is_same = table_of(regular, xs[0].device, c.rows, c.cols)
        cast_transpose_tiles[(min(total, resident(xs[0].device, c.ctas)) if c.ctas else total,)](
            table, *pointers, len(regular), total // len(regular), total, **chosen,
            SAME=is_same, T_LOG2=max(1, (len(regular) - 1).bit_length()), EVEN=all(t[4] % c.cols == 0 for t in regular),
            ROWS=c.rows, COLS=c.cols, GROUP=c.group, STAGES=c.stages, num_warps=c.warps,
        )  # fmt: skip
    if odd:
        table, total, is_same = table_of(odd, xs[0].device, _ODD_TILE, _ODD_TILE)
        cast_transpose_odd_tiles[(total,)](
            table, *pointers, len(odd), total // len(odd), total, **chosen,
            SAME=is_same, T_LOG2=max(1, (len(odd) - 1).bit_length()), ALIGNED=not any(value % 16 for t in odd for value in t[:3]),
            ROWS=_ODD_TILE, COLS=_ODD_TILE, GROUP=8, num_warps=4,
        )  # fmt: skip
    for *_, rows, columns, i in tensors:
        if not rows * columns:
            torch.reciprocal(scales[i : i + 1], out=scale_inv[i : i + 1])


def _is_odd(tensor: tuple[int, ...]) -> bool:
    """Return whether an address or a size, fields 0 to 4 of the table, is no multiple of 16."""
    return any(value % 16 for value in tensor[:5])


def _addresses(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(0 if t.device.type == "meta" else t.data_ptr() for t in tensors)


_Table = tuple[torch.Tensor, int, bool]

_captured: list[torch.Tensor] = []
"""Host tables that captured graphs copy from at every replay; they must outlive the graphs."""


def table_of(tensors: tuple[tuple[int, ...], ...], device: torch.device, rows: int, cols: int) -> _Table:
    """Return the table for the next launch on the current stream.

    The table is built once for the same tensors, and again in every captured graph, because no other launch may read its
    memory.
    """
    if device.type != "cuda":
        return _build(tensors, device, rows, cols)
    if torch.cuda.is_current_stream_capturing():
        return _build(tensors, device, rows, cols, _captured)
    return _of_stream(tensors, device, rows, cols, torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=256)
def _of_stream(tensors: tuple[tuple[int, ...], ...], device: torch.device, rows: int, cols: int, _stream: int) -> _Table:
    return _build(tensors, device, rows, cols)


def _build(
    tensors: tuple[tuple[int, ...], ...], device: torch.device, rows: int, cols: int, kept: list[torch.Tensor] | None = None
) -> _Table:
    """Return the table (T, 7) int64 on the device, of the fields in `_field`, the number of all tiles, and whether all are equal.

    kept: a list to which the host's copy of the table is appended.
    """
    counts = [cdiv(t[3], rows) * cdiv(t[4], cols) for t in tensors]
    firsts = [0, *itertools.accumulate(counts)]
    table = torch.tensor([(*t, first) for t, first in zip(tensors, firsts, strict=False)], dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory()
        if kept is not None:
            kept.append(table)
    return table.to(device, non_blocking=True), sum(counts), len(set(counts)) == 1


@triton.jit
def _field(table_ptr, tensor, FIELD: tl.constexpr):
    """Return a field of a matrix: 0 x, 1 q, 2 qᵀ, 3 rows, 4 columns, 5 index in the lists of the caller, 6 first tile."""
    return tl.load(table_ptr + tensor * 7 + FIELD)


@triton.jit
def _matrix_of(tile, table_ptr, T, tiles_each, SAME: tl.constexpr, T_LOG2: tl.constexpr):
    """Return the matrix of a tile, and the tile's number in the matrix. SAME: every matrix has `tiles_each` tiles."""
    if SAME:
        tensor = tile // tiles_each
        local_tile = tile - tensor * tiles_each
    else:
        tensor = tile * 0
        for bit in tl.static_range(T_LOG2):
            ahead = tensor + (1 << (T_LOG2 - 1 - bit))
            first = load_constant((table_ptr + tl.minimum(ahead, T - 1) * 7 + 6).to(tl.pointer_type(tl.int32)))
            tensor = tl.where((ahead < T) & (first <= tile), ahead, tensor)
        local_tile = tile - _field(table_ptr, tensor, 6).to(tl.int32)
    return tensor, local_tile


@triton.jit
def _place_of_tile(local_tile, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and column of a tile.

    GROUP row blocks follow each other: they write neighbouring pieces of the same rows of a transpose.
    """
    across = tl.cdiv(N, COLS)
    above = local_tile // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(M, ROWS) - above, GROUP)
    inside = local_tile % (GROUP * across)
    return (above + inside % height) * ROWS, inside // height * COLS


@triton.jit
def cast_transpose_tiles(
    table_ptr, first_x_ptr, first_q_ptr, scale_ptr, amax_ptr, scale_inv_ptr, skip_ptr, T, tiles_each, total,
    SKIP: tl.constexpr, FP8_MAX: tl.constexpr, SAME: tl.constexpr, T_LOG2: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cast and transpose matrices whose sizes and addresses are multiples of 16.

    EVEN: COLS divides all widths. SKIP: do nothing where the value at skip_ptr is not 0.
    """
    QUADS: tl.constexpr = ROWS // 4
    if SKIP:
        total = tl.where(tl.load(skip_ptr) != 0, 0, total)
    lanes = tl.arange(0, COLS)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        tensor, local_tile = _matrix_of(tile, table_ptr, T, tiles_each, SAME, T_LOG2)
        x_ptr = _field(table_ptr, tensor, 0).to(tl.pointer_type(first_x_ptr.dtype.element_ty))
        q_ptr = _field(table_ptr, tensor, 1).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        qt_ptr = _field(table_ptr, tensor, 2).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        M = _field(table_ptr, tensor, 3).to(tl.int32)
        N = _field(table_ptr, tensor, 4).to(tl.int32)
        x_ptr, q_ptr, qt_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(q_ptr, 16), tl.multiple_of(qt_ptr, 16)
        M, N = tl.multiple_of(M, 16), tl.multiple_of(N, 16)
        index = _field(table_ptr, tensor, 5).to(tl.int32)
        row0, col0 = _place_of_tile(local_tile, M, N, ROWS, COLS, GROUP)
        scale = tl.load(scale_ptr + index)
        if local_tile == 0:
            tl.store(scale_inv_ptr + index, reciprocal(scale))
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
        tl.atomic_max(amax_ptr + index, tl.max(amax), sem="relaxed")
        store_transposed(qt_ptr, wide(col0) * M + row0, M, 0, tl.minimum(M - row0, ROWS), live, qs, False, EVEN, True)


@triton.jit
def _cast_in_order(x_ptr, q_ptr, amax_ptr, scale, MASKED: tl.constexpr, left, ELEMENTS: tl.constexpr, FP8_MAX: tl.constexpr):
    """Cast the next ELEMENTS of a matrix in the order of memory; MASKED: only the first `left` elements."""
    elements = tl.arange(0, ELEMENTS)
    mask = elements < left if MASKED else None
    x = tl.load(x_ptr + elements, mask=mask, other=0.0 if MASKED else None).to(tl.float32)
    tl.store(q_ptr + elements, quantize(x, scale, FP8_MAX, q_ptr.dtype.element_ty), mask=mask)
    tl.atomic_max(amax_ptr, tl.max(tl.where(x == x, tl.abs(x), 0.0)), sem="relaxed")


@triton.jit
def _transpose_tile(
    x_ptr, qt_ptr, scale, M, N, height, width,
    MASKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Write qt[n, m] = fp8(x[m, n]) of a tile, element by element; MASKED: of only `height` rows and `width` columns."""
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
    """Cast and transpose matrices of any sizes and addresses, which are multiples of 16 if ALIGNED.

    A program first casts ELEMENTS in the order of memory, not as a tile. Then it loads and transposes a tile, because ptxas 12.8
    makes wrong code where one tile of fp8 is stored in both layouts byte by byte.
    """
    ELEMENTS: tl.constexpr = ROWS * COLS
    if SKIP:
        total = tl.where(tl.load(skip_ptr) != 0, 0, total)
    tile = tl.program_id(0)
    if tile < total:
        tensor, local_tile = _matrix_of(tile, table_ptr, T, tiles_each, SAME, T_LOG2)
        x_ptr = _field(table_ptr, tensor, 0).to(tl.pointer_type(first_x_ptr.dtype.element_ty))
        q_ptr = _field(table_ptr, tensor, 1).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        qt_ptr = _field(table_ptr, tensor, 2).to(tl.pointer_type(first_q_ptr.dtype.element_ty))
        if ALIGNED:
            x_ptr, q_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(q_ptr, 16)
        M = _field(table_ptr, tensor, 3).to(tl.int32)
        N = _field(table_ptr, tensor, 4).to(tl.int32)
        index = _field(table_ptr, tensor, 5).to(tl.int32)
        scale = tl.load(scale_ptr + index)
        if local_tile == 0:
            tl.store(scale_inv_ptr + index, reciprocal(scale))
        first = wide(local_tile) * ELEMENTS
        left = wide(M) * N - first
        if left >= ELEMENTS:
            _cast_in_order(x_ptr + first, q_ptr + first, amax_ptr + index, scale, False, ELEMENTS, ELEMENTS, FP8_MAX)
        elif left > 0:
            _cast_in_order(x_ptr + first, q_ptr + first, amax_ptr + index, scale, True, left.to(tl.int32), ELEMENTS, FP8_MAX)
        row0, col0 = _place_of_tile(local_tile, M, N, ROWS, COLS, GROUP)
        x_ptr += wide(row0) * N + col0
        qt_ptr += wide(col0) * M + row0
        if (M - row0 >= ROWS) & (N - col0 >= COLS):
            _transpose_tile(x_ptr, qt_ptr, scale, M, N, ROWS, COLS, False, ROWS, COLS, FP8_MAX)
        else:
            _transpose_tile(x_ptr, qt_ptr, scale, M, N, M - row0, N - col0, True, ROWS, COLS, FP8_MAX)
