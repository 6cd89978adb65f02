"""Forward kernels of RMSNorm: every tensor is read from memory once.

Rows live in registers. A row too long for one program is shared by `PARTS` programs, which publish their partial sums and
wait for each other's inside the launch (PHASE 0), or in two launches (PHASE 1 publishes, PHASE 2 collects). A program
publishes its next tile before it waits for the present tile, so that the sums are complete when the wait begins.

`tensors` and `sizes` are the first arguments of every kernel, by position; * is None without a weight, residual or fp8:

    tensors   x (M, N)   weight* (N,)   add* (M, N)   sum* (M, N)   y (M, N)   rsigma (M,)   scale*, amax*, scale_inv* (1,)
    sizes     M   N   elements between rows of x   elements between rows of add*   eps
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.arguments import check_apart
from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.launch import registers
from kerneltune.kernel_lib.tl_exchange import (
    await_count,
    close_launch,
    count_in,
    count_out,
    launch_tag,
    publish,
    sum_of_published,
)
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES, FP8_MAX, INTERPRETED, held, is_cuda, quantize, reciprocal, wide
from kerneltune.kernel_lib.tl_transpose import store_transposed, transpose_bytes
from kerneltune.kernel_lib.workspace import counters, workspace
from kerneltune.ops.rmsnorm.kernels.rows import (
    FullRows,
    Output,
    gamma,
    inside,
    load_chunk,
    load_gamma,
    load_sum_tile,
    max_magnitude,
    raise_amax,
    sum_of_squares,
    write_full_rows,
    write_rows,
)
from kerneltune.ops.rmsnorm.tiles import SHARING, SHORT, TRANSPOSED_ROWS, groups_of, phases_of
from kerneltune.rounding import cdiv

if TYPE_CHECKING:
    from kerneltune.ops.rmsnorm.fwd import FwdConfig

_MOST_BESIDE_GAMMA = 32768
"""Elements of x that a program can hold beside the weight: more need 32 warps, whose threads have 64 registers."""

_TILE_ROWS, _TILE_COLS = 64, 128
"""Rows and columns of the transpose's tiles. They are not searched. fp8_transpose_2d, whose x is cold, prefers 64 x 256 and
groups of 512 row blocks."""

_BLOCK, _TILE = 128, 128
"""Rows and columns of the tiles that are transposed while other programs write rows."""

BEHIND_COLS = range(8192, 16385)
"""Lengths of rows that are transposed in the launch that writes them."""

BEHIND_BYTES = 8_000_000
"""Bytes of y by which the transpose stays behind the writers, so that y is still in L2. H200, 2026-11-22: 3 to 7 % faster
than a second launch; level at rows of 4096 elements, slower for shorter rows, and for longer rows, which looping programs
write faster (docs/notes/rmsnorm.md). In a matrix of less than three times the bytes
little of the transpose overlaps with the writers."""

_MOST_WITHOUT_HINTS = 512
"""Elements of a row up to which L2 is not told that x and y are used once. H200, 2026-11-23, 268 MB of x: rows of 64
elements 134.1 → 130.7 µs, of 128 132.6 → 130.4, of 256 130.9 → 128.7, of 512 129.6 → 129.2; longer rows 0.95 to 1.04 times
as fast. L2 is not told either if a matrix is added to x, which makes four streams: 1.02 to 1.07 times as fast at rows of
2048 to 8192."""


def normalize(
    x: torch.Tensor,
    add: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    quant: str,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    fp8_format: str,
    zero_centered: bool,
    out_dtype: torch.dtype | None,
    config: "FwdConfig | None",
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]":
    """Allocate the outputs and launch the forward of x, or of x + add; arguments are checked, config is None where x is empty.

    Returns:
        y; x + add, or x where add is None; rsigma; y_t or None; scale_inv or None.
    """
    M, N = x.shape
    y = x.new_empty((M, N), dtype=out_dtype if quant == "none" else FP8_DTYPES[fp8_format])
    rsigma = x.new_empty((M,), dtype=torch.float32)
    total = x if add is None else x.new_empty((M, N))
    y_t = y.new_empty((N, M)) if quant == "fp8_t" else None
    scale_inv = x.new_empty((1,), dtype=torch.float32) if quant != "none" else None
    if config is None or not x.numel():
        if scale_inv is not None and scale is not None:
            torch.reciprocal(scale, out=scale_inv)
        return y, total, rsigma, y_t, scale_inv
    for name, matrix in (("x", x), ("residual", add)):
        if matrix is not None:
            check_apart(name, matrix, config.rows)
    tensors = (x, weight, add, None if add is None else total, y, rsigma, scale, amax, scale_inv)
    sizes = (M, N, x.stride(0), None if add is None else add.stride(0), eps)
    output = {"zero_centered": zero_centered, "fp8": quant != "none", "fp8_max": FP8_MAX[fp8_format]}
    if y_t is not None and M % config.rows == 0 and transposes_at_once(N, config):
        _write_both_at_once(tensors, y_t, sizes, output, config)
        return y, total, rsigma, y_t, scale_inv
    if y_t is not None and _transposes_behind(y, config):
        write_both(tensors, y_t, sizes, output, config)
        return y, total, rsigma, y_t, scale_inv
    _write_rows_of(tensors, sizes, output, y_t is not None, config)
    if y_t is not None:
        transpose_bytes[(cdiv(M, _TILE_ROWS) * cdiv(N, _TILE_COLS),)](
            y.view(torch.uint8), y_t.view(torch.uint8), M, N, N,
            ROWS=_TILE_ROWS, COLS=_TILE_COLS, GROUP=8, BACKWARDS=True, num_warps=4,
        )  # fmt: skip
    return y, total, rsigma, y_t, scale_inv


def _write_rows_of(tensors: tuple[Any, ...], sizes: tuple[Any, ...], output: dict[str, Any], keep: bool, c: "FwdConfig") -> None:
    """Write y. keep: store y so that L2 still has it for the next kernel."""
    (M, N), x, no_hints = sizes[:2], tensors[0], _has_no_l2_hints(tensors, sizes)
    tiles = cdiv(M, c.rows)
    if not c.ctas:
        _rmsnorm_fwd_once[(tiles,)](
            *tensors, *sizes, OUTPUT=Output.of(**output, keep=keep or no_hints), **_full_rows(N, c, no_hints)
        )
        return
    parts, chunks = c.parts(N)
    with workspace(tiles * parts * c.rows, x.device) if parts > 1 else nullcontext() as ws:
        for phase, options in phases_of(parts, c):
            _rmsnorm_fwd_loop[(groups_of(x.device, tiles, parts, c) * parts,)](
                *tensors, ws, *sizes, OUTPUT=Output.of(**output, keep=keep),
                LOOP=RowLoop.of(rows=c.rows, cols=c.cols, chunks=chunks, parts=parts, even=N % c.cols == 0), PHASE=phase,
                STAGES=c.stages, num_warps=c.warps, **options,
            )  # fmt: skip


def transposes_at_once(N: int, c: "FwdConfig") -> bool:
    """Return whether a program holds tiles of full rows, and enough rows to write the transpose by sectors of memory."""
    return N <= SHORT and c.cols >= N and c.rows >= TRANSPOSED_ROWS and not c.ctas


def _write_both_at_once(
    tensors: tuple[Any, ...], y_t: torch.Tensor, sizes: tuple[Any, ...], output: dict[str, Any], c: "FwdConfig"
) -> None:
    """Write y of short rows in full tiles, and the transpose from registers; all else is as in `_rmsnorm_fwd_once`.

    If the number of rows is no multiple of 4, ptxas 12.8 makes wrong code. A tile that is not full has not run on a GPU.
    """
    _rmsnorm_fwd_at_once[(cdiv(sizes[0], c.rows),)](
        *tensors, y_t, *sizes, OUTPUT=Output.of(**output, keep=False), ROWS=c.rows, COLS=c.cols, num_warps=c.warps
    )


def _transposes_behind(y: torch.Tensor, c: "FwdConfig") -> bool:
    """Return whether one launch writes and transposes y; its writers must begin before its transposers."""
    M, N = y.shape
    in_order = is_cuda() or INTERPRETED
    return in_order and not c.ctas and M % 4 == 0 and N in BEHIND_COLS and M * N >= 3 * BEHIND_BYTES


def write_both(
    tensors: tuple[Any, ...], y_t: torch.Tensor, sizes: tuple[Any, ...], output: dict[str, Any], c: "FwdConfig"
) -> None:
    """Write y and its transpose in one launch, the transpose behind the writers of y."""
    (M, N), x = sizes[:2], tensors[0]
    blocks = cdiv(M, _BLOCK)
    with counters(cdiv(blocks, 2), x.device) as done:
        _rmsnorm_fwd_transposed[(blocks * (_BLOCK // c.rows + cdiv(N, _TILE)),)](
            *tensors, y_t.view(torch.uint8), done.view(torch.int32), *sizes, cdiv(BEHIND_BYTES, _BLOCK * N),
            OUTPUT=Output.of(**output, keep=True), PLACE=TransposedBlock.of(rows=_BLOCK, cols=_TILE),
            **_full_rows(N, c, _has_no_l2_hints(tensors, sizes)),
        )  # fmt: skip


def _has_no_l2_hints(tensors: tuple[Any, ...], sizes: tuple[Any, ...]) -> bool:
    """Return whether L2 is not told that programs that write full rows use x and y once: rows are short, or there is a sum."""
    return sizes[1] <= _MOST_WITHOUT_HINTS or tensors[2] is not None


def _full_rows(N: int, c: "FwdConfig", no_hints: bool) -> dict[str, Any]:
    """Return the constants and options of programs that write full rows."""
    loads = cdiv(N, c.cols)
    if c.reload:
        num_held = min(c.stages - 1, loads)
        num_gammas = min(1, num_held)
    else:
        num_held = loads
        num_gammas = 0 if c.rows * loads * c.cols > _MOST_BESIDE_GAMMA else loads
    policy = "" if no_hints else "evict_first"
    rows = FullRows.of(rows=c.rows, cols=c.cols, held=num_held, gammas=num_gammas, by_warps=c.warps >= 16, policy=policy)
    options = {"WHOLE": rows, "num_warps": c.warps}
    return options | registers(c.warps, SHARING) if c.reload and num_held else options


@dataclass(frozen=True, eq=False, repr=False)
class TransposedBlock(Constants):
    """Hold the rows of a block, whose writers share a counter, and the columns of a tile of the block that is transposed."""

    rows: int
    cols: int


@dataclass(frozen=True, eq=False, repr=False)
class RowLoop(Constants):
    """Hold the work of a program that loops over tiles.

    Attributes:
        rows: rows of a tile.
        cols: elements of a load.
        chunks: number of loads of a row that one program holds; 1 if programs share rows.
        parts: number of programs that share a row.
        even: whether the length of a row is a multiple of a load.
    """

    rows: int
    cols: int
    chunks: int
    parts: int
    even: bool


@triton.jit
def _rmsnorm_fwd_once(
    x_ptr, g_ptr, add_ptr, sum_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr,
    M, N: tl.constexpr, stride_xm, stride_am, eps, OUTPUT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write y = x * rsqrt(mean(x²) + eps) * g, a program for every ROWS rows.

    g_ptr None: g is 1. add_ptr: a matrix that is added to x first; sum_ptr: where the sum goes; or both None.
    """
    write_full_rows(
        tl.program_id(0), x_ptr, g_ptr, add_ptr, sum_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr,
        M, N, stride_xm, stride_am, eps, OUTPUT, WHOLE,
    )  # fmt: skip


@triton.jit
def _rmsnorm_fwd_at_once(
    x_ptr, g_ptr, add_ptr, sum_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, y_t_ptr,
    M, N: tl.constexpr, stride_xm, stride_am, eps, OUTPUT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write y as fp8 and its transpose (N, M), a program for ROWS full rows, which it holds as four tiles of every fourth row.

    M is a multiple of ROWS. All other arguments are as in `_rmsnorm_fwd_once`.
    """
    tile = tl.program_id(0)
    left = M - tile * ROWS
    quads = tl.arange(0, ROWS // 4)
    cols = tl.arange(0, COLS)
    g = load_gamma(g_ptr, cols, N)
    scale = tl.load(scale_ptr)
    if tile == 0:
        tl.store(scale_inv_ptr, reciprocal(scale))
    x_rows = x_ptr + wide(tile * ROWS) * stride_xm
    xs = ()
    for k in tl.static_range(4):
        rows = quads * 4 + k
        x = load_chunk(x_rows + rows[:, None] * stride_xm, 0, rows, left, N, ROWS, COLS, "")
        if add_ptr is not None:
            add_rows = add_ptr + wide(tile * ROWS) * stride_am + rows[:, None] * stride_am
            other = load_chunk(add_rows, 0, rows, left, N, ROWS, COLS, "")
            x = (x.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
        xs = xs + (x,)
    amax = tl.zeros((ROWS // 4, COLS // 8), dtype=tl.float32)
    qs = ()
    for k in tl.static_range(4):
        rows = quads * 4 + k
        to = wide(tile * ROWS) * N + (rows[:, None] * N + cols[None, :])
        mask = inside(rows, left, cols, N, ROWS, COLS)
        if add_ptr is not None:
            tl.store(sum_ptr + to, xs[k], mask=mask)
        x = xs[k].to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / N) + eps)
        tl.store(rsigma_ptr + tile * ROWS + rows, r, mask=rows < left)
        y = x * r[:, None] * gamma(g, OUTPUT.zero_centered)
        amax = max_magnitude(amax, y)
        q = quantize(y, scale, OUTPUT.fp8_max, y_ptr.dtype.element_ty)
        tl.store(y_ptr + to, q, mask=mask)
        qs = qs + (q,)
    base = wide(tile * ROWS)
    store_transposed(y_t_ptr, base, M, 0, tl.minimum(left, ROWS), cols < N, qs, JAGGED=False, EVEN=N == COLS, PACKED=True)
    raise_amax(amax_ptr, amax, 0.0, False)


@triton.jit
def _rmsnorm_fwd_transposed(
    x_ptr, g_ptr, add_ptr, sum_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, y_t_ptr, done_ptr,
    M, N: tl.constexpr, stride_xm, stride_am, eps, lag, OUTPUT: tl.constexpr, WHOLE: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Write y as fp8, and its transpose (N, M), M a multiple of 4.

    A tile of BLOCK rows and TILE columns is transposed by a program whose id comes `lag` blocks after the programs that
    write its rows, so that it seldom waits for them and L2 still has them. B is the number of blocks:

    | programs | `place` from | write | transpose |
    |---|---|---|---|
    | WRITERS for each i < lag | below 0 | block i | |
    | WRITERS + TRANSPOSERS for each i < B - lag | 0 | block lag + i | block i |
    | TRANSPOSERS for each i < lag | `past` from 0 | | block B - lag + i |

    done_ptr: a 32-bit counter per block of rows, 0 before and after.
    """
    BLOCK: tl.constexpr = PLACE.rows
    TILE: tl.constexpr = PLACE.cols
    ROWS: tl.constexpr = WHOLE.rows
    WRITERS: tl.constexpr = BLOCK // ROWS
    TRANSPOSERS: tl.constexpr = (N + TILE - 1) // TILE
    BOTH: tl.constexpr = WRITERS + TRANSPOSERS
    blocks = tl.cdiv(M, BLOCK)
    lag = tl.minimum(lag, blocks)
    first = lag * WRITERS
    place = tl.program_id(0) - first
    past = place - (blocks - lag) * BOTH
    transposes = True
    if place < 0:
        block, place, transposes = tl.program_id(0) // WRITERS, tl.program_id(0) % WRITERS, False
    elif past < 0:
        block, place = place // BOTH, place % BOTH
        transposes = place >= WRITERS
        if transposes:
            place -= WRITERS
        else:
            block += lag
    else:
        block, place = blocks - lag + past // TRANSPOSERS, past % TRANSPOSERS
    if transposes:
        await_count(done_ptr + block, WRITERS)
        count_out(done_ptr + block, WRITERS + TRANSPOSERS)
        _transpose_tile(y_ptr, y_t_ptr, block, place * TILE, M, N, BLOCK, TILE)
    else:
        tile = block * WRITERS + place
        if tile * ROWS < M:
            write_full_rows(
                tile, x_ptr, g_ptr, add_ptr, sum_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr,
                M, N, stride_xm, stride_am, eps, OUTPUT, WHOLE,
            )  # fmt: skip
        count_in(done_ptr + block)


@triton.jit
def _transpose_tile(y_ptr, y_t_ptr, block, first_col, M, N: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Write y_t[n, m] = y[m, n] of a block of rows and TILE columns, out of L2."""
    quads = tl.arange(0, BLOCK // 4)
    cols = tl.arange(0, TILE)
    live = first_col + cols < N
    left = M - block * BLOCK
    mask = (quads < left // 4)[:, None] & live[None, :]
    rows = y_ptr.to(tl.pointer_type(tl.uint8)) + wide(block * BLOCK) * N + first_col
    qs = ()
    for k in tl.static_range(4):
        qs = qs + (tl.load(rows + (quads[:, None] * 4 + k) * N + cols[None, :], mask=mask, other=0, cache_modifier=".cg"),)
    base = wide(first_col) * M + block * BLOCK
    store_transposed(y_t_ptr, base, M, 0, tl.minimum(left, BLOCK), live, qs, JAGGED=False, EVEN=N % TILE == 0, PACKED=True)


@triton.jit
def _rmsnorm_fwd_loop(
    x_ptr, g_ptr, add_ptr, sum_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, ws_ptr,
    M, N, stride_xm, stride_am, eps, OUTPUT: tl.constexpr, LOOP: tl.constexpr, PHASE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write y by resident programs that loop over tiles; several programs share a row, or a program holds all loads of its row.

    The weight stays in registers, as it is stored: loaded in the loop it would take as much shared memory as x does.
    """
    ROWS: tl.constexpr = LOOP.rows
    COLS: tl.constexpr = LOOP.cols
    CHUNKS: tl.constexpr = LOOP.chunks
    PARTS: tl.constexpr = LOOP.parts
    EVEN: tl.constexpr = LOOP.even
    part = tl.program_id(0) % PARTS
    first_tile = tl.program_id(0) // PARTS
    step = tl.num_programs(0) // PARTS
    tiles = tl.cdiv(M, ROWS)
    lanes = tl.arange(0, ROWS)
    inv_n = 1.0 / N
    scale = 1.0
    if OUTPUT.fp8:
        scale = tl.load(scale_ptr)
        if tl.program_id(0) == 0 and PHASE != 1:
            tl.store(scale_inv_ptr, reciprocal(scale))
    amax = tl.zeros((ROWS, COLS // 2), dtype=tl.float32)  # by eights it would cost 14 registers more
    gs = ()
    for c in tl.static_range(CHUNKS):
        gs = gs + (load_gamma(g_ptr, (part * CHUNKS + c) * COLS + tl.arange(0, COLS), N),)
    # Publish the first tile before the loop, so that each iteration waits for sums that the iteration before has published.
    if PARTS > 1:
        tag = launch_tag(ws_ptr)
        cols = part * COLS + tl.arange(0, COLS)
        slots = part * ROWS + lanes
        x_next = load_sum_tile(x_ptr, add_ptr, sum_ptr, first_tile, stride_xm, stride_am, cols, M, N, ROWS, EVEN)
        if PHASE != 2:
            publish(ws_ptr, first_tile * (PARTS * ROWS) + slots, sum_of_squares(x_next), tag, lanes >= 0)

    for tile in tl.range(first_tile, tiles, step, num_stages=STAGES, disable_licm=True):
        left = M - tile * ROWS
        xs = ()
        if PARTS > 1:
            xs = (x_next,)
            ahead = tile + step
            x_next = load_sum_tile(x_ptr, add_ptr, sum_ptr, ahead, stride_xm, stride_am, cols, M, N, ROWS, EVEN)
            if PHASE != 2:
                publish(ws_ptr, ahead * (PARTS * ROWS) + slots, sum_of_squares(x_next), tag, lanes * 0 + ahead < tiles)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            if PHASE != 1:
                total = sum_of_published(ws_ptr, tile, tag, ROWS, PARTS, PHASE)
        else:
            squares = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for c in tl.static_range(CHUNKS):
                cols_c = c * COLS + tl.arange(0, COLS)
                x = load_sum_tile(x_ptr, add_ptr, sum_ptr, tile, stride_xm, stride_am, cols_c, M, N, ROWS, EVEN)
                squares += x.to(tl.float32) * x.to(tl.float32)
                xs = xs + (x,)
            total = tl.sum(squares, axis=1)
        # Store the tile out of registers: the squares of its rows are added up now.
        if PHASE != 1:
            r = tl.rsqrt(total * inv_n + eps)
            if part == 0:
                tl.store(rsigma_ptr + tile * ROWS + lanes, r, mask=lanes < left)
            for c in tl.static_range(CHUNKS):
                cols_c = (part * CHUNKS + c) * COLS + tl.arange(0, COLS)
                mask = (lanes < left)[:, None]
                if not EVEN:
                    mask = mask & (cols_c < N)[None, :]
                y_tile = y_ptr + wide(tile * ROWS) * N + (lanes[:, None] * N + cols_c[None, :])
                amax = write_rows(held(xs[c]), held(gs[c]), r, y_tile, scale, mask, amax, OUTPUT)
    if OUTPUT.fp8 and PHASE != 1:
        tl.atomic_max(amax_ptr, tl.max(amax), sem="relaxed")
    if PARTS > 1 and PHASE == 0:
        close_launch(ws_ptr, tag)
