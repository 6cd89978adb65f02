"""Multiply groups of fp8 matrices: persistent programs walk over the tiles of all groups in a pipelined loop."""

import contextvars
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT
from kerneltune.kernel_lib.launch import resident
from kerneltune.kernel_lib.tl_lib import aligned_start, wide
from kerneltune.ops.fp8_grouped_gemm.operands import Product
from kerneltune.rounding import cdiv, next_power_of_2

if TYPE_CHECKING:
    from kerneltune.ops.fp8_grouped_gemm.gemm import GemmConfig

_TMA_BYTES = tl.constexpr(16)
"""A descriptor begins at a multiple of so many bytes."""


def multiply_groups(
    p: Product,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    mode_a: int,
    mode_b: int,
    c: "GemmConfig",
) -> None:
    """Write the product of checked operands into out; `scale_modes` gives mode_a and mode_b."""
    most_strips = p.groups * cdiv(p.rows, c.rows) if p.rows else p.tokens // c.rows + p.groups
    programs = min(most_strips * cdiv(p.cols, c.cols), resident(a.device, c.ctas))
    left: Any = a
    right: Any = b.transpose(-2, -1)
    result: Any = out
    strides = (left.stride(0), right.stride(0))
    if p.rows:
        result = TensorDescriptor(out, [p.groups, p.rows, p.cols], [p.rows * p.cols, p.cols, 1], [1, c.rows, c.cols // c.parts])
        if p.aligned:
            left = TensorDescriptor(left, [p.rows, p.tokens], [strides[0], 1], [c.rows, c.depth])
            right = TensorDescriptor(right, [p.cols, p.tokens], [strides[1], 1], [c.cols, c.depth])
    else:
        left = TensorDescriptor(left, [p.tokens, p.depth], [strides[0], 1], [c.rows, c.depth])
        right = TensorDescriptor(right, [p.groups * p.cols, p.depth], [p.depth, 1], [c.cols, c.depth])
    arguments = (scale_a, scale_b, offs, p.tokens, *strides)
    sizes = {"ROWS": p.rows, "COLS": p.cols, "E": p.groups, "GROUPS": next_power_of_2(p.groups)}
    modes = {"SCALE_A": mode_a, "SCALE_B": mode_b}
    # descriptors that the kernel makes lie in memory that Triton asks for; the caller's allocator stays as it is
    contextvars.copy_context().run(
        _with_scratch,
        (programs,),
        (left, right, result, *arguments),
        {
            **modes, "ALIGNMENT": GROUP_ALIGNMENT if p.aligned else 0, "PARTS": c.parts, "STAGES": c.stages, "num_warps": c.warps,
            "SHAPE": Shape.of(rows=p.rows, cols=p.cols, depth=p.depth, experts=p.groups, padded=next_power_of_2(p.groups)),
            "TILE": ProductTile.of(rows=c.rows, cols=c.cols, depth=c.depth, band=c.band, run=c.run),
        },
    )  # fmt: skip
    if p.rows and not p.aligned:
        _weight_gradient_of_the_rest[(resident(a.device, 4),)](
            left, right, out, *arguments, **sizes, **modes, BM=32, BN=64, BK=64, num_warps=4
        )


def clear_behind_groups(p: Product, out: torch.Tensor, offs: torch.Tensor) -> None:
    """Write zeros to the rows of a forward product's result that lie behind the last group."""
    programs = min(p.tokens, resident(out.device, 1))
    _clear_behind_groups[(programs,)](out, offs, p.tokens, COLS=p.cols, E=p.groups, BN=1024, num_warps=4)


def _with_scratch(grid: tuple[int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    device = arguments[3].device
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=device))
    _grouped_gemm[grid](*arguments, **constants)


@dataclass(frozen=True, eq=False, repr=False)
class Shape(Constants):
    """Hold the sizes of a product that a kernel is compiled for.

    Attributes:
        rows: rows of each group's result; 0 where the group's tokens are its rows.
        cols: columns of the result.
        depth: k of the forward pass.
        experts: groups.
        padded: the next power of two of the groups.
    """

    rows: int
    cols: int
    depth: int
    experts: int
    padded: int


@dataclass(frozen=True, eq=False, repr=False)
class ProductTile(Constants):
    """Hold the tile of a program and the order of tiles; the fields are knobs of `GemmConfig`."""

    rows: int
    cols: int
    depth: int
    band: int
    run: int


@triton.jit
def _bounds(offs_ptr, group, M):
    """Return the first row of a group and the row after its last, inside [0, M] whatever offs holds."""
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group)
    start = tl.minimum(tl.maximum(start, 0), M)
    return start, tl.maximum(tl.minimum(end, M), start)


@triton.jit
def _ranks(tokens, E: tl.constexpr):
    """Return the rank (GROUPS,) of each group, the group of most tokens first, so that the tiles of the last wave are short."""
    groups = tl.arange(0, tokens.shape[0])
    longer = tokens[None, :] > tokens[:, None]
    before = (tokens[None, :] == tokens[:, None]) & (groups[None, :] < groups[:, None])
    return tl.sum(((longer | before) & (groups[None, :] < E)).to(tl.int32), axis=1)


@triton.jit
def _run_in_wave(wave):
    """Return the number of this program's run in a wave: waves alternate their direction, so that no program is always first."""
    return tl.where(wave % 2 == 0, tl.program_id(0), tl.num_programs(0) - 1 - tl.program_id(0))


@triton.jit
def _nth_tile(nth, RUN: tl.constexpr):
    """Return the nth tile of this program. In each wave every program takes a run of RUN tiles that follow each other."""
    wave = nth // RUN
    return (wave * tl.num_programs(0) + _run_in_wave(wave)) * RUN + nth % RUN


@triton.jit
def _share(tiles, RUN: tl.constexpr):
    """Return the number of tiles that this program takes of the first `tiles` tiles."""
    wave = tiles // (RUN * tl.num_programs(0))
    rest = tiles % (RUN * tl.num_programs(0)) - _run_in_wave(wave) * RUN
    return wave * RUN + tl.minimum(tl.maximum(rest, 0), RUN)


@triton.jit
def _locate(
    tile, ranks, tile_ends, offs_ptr, M, ROWS: tl.constexpr, TILE_COLS: tl.constexpr, BM: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    """Return the group, its bounds, and the strip and column of a tile.

    A strip is BM rows of a group's result. Tiles go down BAND strips, then to the next column. tile_ends: (GROUPS,) number of
    tiles up to the end of each group. ROWS: rows of every group's result, 0 where the group's tokens are its rows.
    """
    if ROWS:
        strips = (ROWS + BM - 1) // BM
        groups = tl.arange(0, ranks.shape[0])
        group = tl.sum(tl.where(ranks == tile // (strips * TILE_COLS), groups, 0), axis=0)
        local_tile = tile % (strips * TILE_COLS)
        start, end = _bounds(offs_ptr, group, M)
    else:
        group = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
        local_tile = tile - tl.max(tl.where(tile_ends <= tile, tile_ends, 0), axis=0)
        start, end = _bounds(offs_ptr, group, M)
        strips = tl.cdiv(end - start, BM)
    band = local_tile // (BAND * TILE_COLS)
    local_tile = local_tile % (BAND * TILE_COLS)
    height = tl.minimum(strips - band * BAND, BAND)
    return group, start, end, band * BAND + local_tile % height, local_tile // height


@triton.jit
def _scaled(
    acc, scale_a_ptr, scale_b_ptr, group, rows, row_end, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr,
):  # fmt: skip
    """Return acc times its scales. SCALE_…: 0 one value, 1 per group, 2 per row or column."""
    if SCALE_A == 2:
        scale = tl.load(scale_a_ptr + group * ROWS + rows, mask=rows < row_end, other=0.0)[:, None]
    else:
        scale = tl.load(scale_a_ptr + group * SCALE_A)
    if SCALE_B == 2:
        acc *= tl.load(scale_b_ptr + group * COLS + cols, mask=cols < COLS, other=0.0)[None, :]
    else:
        scale *= tl.load(scale_b_ptr + group * SCALE_B)
    return acc * scale


@triton.jit
def _scaled_store(
    acc, out, scale_a_ptr, scale_b_ptr, group, row, row_end, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr,
):  # fmt: skip
    """Store acc times its scales to rows [row, row_end) of a result.

    out: a pointer to (M, COLS), or, with ROWS, a descriptor of (E, ROWS, COLS).
    """
    rows = row + tl.arange(0, acc.shape[0])
    cols = col + tl.arange(0, acc.shape[1])
    if not ROWS:
        live = (rows < row_end)[:, None] & (cols < COLS)[None, :]
    acc = _scaled(acc, scale_a_ptr, scale_b_ptr, group, rows, row_end, cols, ROWS, COLS, SCALE_A, SCALE_B)
    if ROWS:
        out.store([group, row, col], acc.to(out.dtype).reshape(1, acc.shape[0], acc.shape[1]))
    else:
        at = (wide(group) * ROWS + rows)[:, None] * COLS + cols[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=live)


@triton.jit
def _halves(acc):
    """Return the left and the right half of a tile, without moving it."""
    return acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _epilogue(
    acc, out, scale_a_ptr, scale_b_ptr, group, row, row_end, col,
    ROWS: tl.constexpr, COLS: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Call `_scaled_store` for parts of the columns, one at a time, so that shared memory need not hold the tile."""
    if PARTS == 1:
        _scaled_store(acc, out, scale_a_ptr, scale_b_ptr, group, row, row_end, col, ROWS, COLS, SCALE_A, SCALE_B)
    else:
        WIDTH: tl.constexpr = acc.shape[1] // 2
        left, right = _halves(acc)
        _epilogue(left, out, scale_a_ptr, scale_b_ptr, group, row, row_end, col, ROWS, COLS, SCALE_A, SCALE_B, PARTS // 2)
        _epilogue(
            right, out, scale_a_ptr, scale_b_ptr, group, row, row_end, col + WIDTH, ROWS, COLS, SCALE_A, SCALE_B, PARTS // 2
        )


@triton.jit
def _columns(x_ptr, start, size, rows, stride, HEIGHT: tl.constexpr, BK: tl.constexpr):
    """Describe the columns [start, start + size) of x by a descriptor; its loads read 0 outside of these columns."""
    return tl.make_tensor_descriptor(x_ptr + start, [rows, size], [wide(stride), 1], [HEIGHT, BK])


@triton.jit
def _has_descriptor(start, end):
    """Return whether the group [start, end) has tokens and begins where a descriptor can begin."""
    return (start % _TMA_BYTES == 0) & (start < end)


@triton.jit
def _clear_rest(out_ptr, first, M, COLS: tl.constexpr, BN: tl.constexpr):
    """Write zeros to the rows [first, M) of a result, which are of no group."""
    for row in range(first + tl.program_id(0), M, tl.num_programs(0)):
        for col in range(0, COLS, BN):
            cols = col + tl.arange(0, BN)
            tl.store(out_ptr + wide(row) * COLS + cols, tl.zeros((BN,), dtype=out_ptr.dtype.element_ty), mask=cols < COLS)


@triton.jit(do_not_specialize=["M"])
def _clear_behind_groups(out_ptr, offs_ptr, M, COLS: tl.constexpr, E: tl.constexpr, BN: tl.constexpr):
    _clear_rest(out_ptr, tl.minimum(tl.maximum(tl.load(offs_ptr + E - 1), 0), M), M, COLS, BN)


@triton.jit
def _schedule(offs_ptr, M, SHAPE: tl.constexpr, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return the order of all tiles, and the number of steps of this program.

    Returns the most rows that groups can have together; the rank of each group; the number of tiles up to each group's end; the
    steps of k of all tiles that this program takes.
    """
    ROWS: tl.constexpr = SHAPE.rows
    BM: tl.constexpr = TILE.rows
    BN: tl.constexpr = TILE.cols
    BK: tl.constexpr = TILE.depth
    RUN: tl.constexpr = TILE.run
    TILE_COLS: tl.constexpr = (SHAPE.cols + BN - 1) // BN
    STEPS: tl.constexpr = (SHAPE.depth + BK - 1) // BK
    groups = tl.arange(0, SHAPE.padded)
    starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < SHAPE.experts), other=0)
    ends = tl.load(offs_ptr + groups, mask=groups < SHAPE.experts, other=0)
    limit = (
        (M // ALIGNMENT - SHAPE.experts + 1) * ALIGNMENT - 1 if ALIGNMENT else M
    )  # the most rows that groups can have together
    starts = tl.minimum(tl.maximum(starts, 0), limit)
    ends = tl.maximum(tl.minimum(ends, limit), starts)
    tokens = ends - starts
    if ROWS:
        ranks = _ranks(tokens, SHAPE.experts) if SHAPE.padded <= 128 else groups
        tiles = tl.where(groups < SHAPE.experts, (ROWS + BM - 1) // BM * TILE_COLS, 0)
        tile_ends = (ranks + 1) * tiles
        covered = tokens if ALIGNMENT else tl.where(_has_descriptor(starts, ends), tokens + starts % BK, 0)
        steps = tl.maximum(tl.cdiv(covered, BK), 1)  # a group of no tokens has a result too, of zeros
    else:
        ranks = groups
        tiles = tl.cdiv(tokens, BM) * TILE_COLS
        tile_ends = tl.cumsum(tiles, axis=0)
        steps = STEPS
    num_steps = tl.sum((_share(tile_ends, RUN) - _share(tile_ends - tiles, RUN)) * steps, axis=0)
    return limit, ranks, tile_ends, num_steps


@triton.jit(do_not_specialize=["M"])
def _grouped_gemm(
    a, b, out, scale_a_ptr, scale_b_ptr, offs_ptr, M, stride_a, stride_b,
    SHAPE: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, ALIGNMENT: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply. Forward (ROWS 0): a and b are descriptors of (M, DEPTH) and (E COLS, DEPTH), out is a pointer to (M, COLS).

    Weight gradient: a and b are pointers to (ROWS, M) and (COLS, M), rows stride_… apart, out a descriptor of (E, ROWS,
    COLS). With ALIGNMENT a and b are descriptors of the same, in which a group begins at its `aligned_start`, with zeros
    behind it up to a multiple of ALIGNMENT. Without ALIGNMENT a group that `_has_descriptor` excludes gets zeros here, and its
    result from `_weight_gradient_of_the_rest`.
    """
    ROWS: tl.constexpr = SHAPE.rows
    COLS: tl.constexpr = SHAPE.cols
    BM: tl.constexpr = TILE.rows
    BN: tl.constexpr = TILE.cols
    BK: tl.constexpr = TILE.depth
    RUN: tl.constexpr = TILE.run
    TILE_COLS: tl.constexpr = (COLS + BN - 1) // BN
    STEPS: tl.constexpr = (SHAPE.depth + BK - 1) // BK
    limit, ranks, tile_ends, num_steps = _schedule(offs_ptr, M, SHAPE, TILE, ALIGNMENT)

    nth_loaded = -1
    nth_stored = -1
    k, a_row, b_row = 0, 0, 0
    if ROWS:
        tile_steps = 1
    else:
        tile_steps: tl.constexpr = STEPS
    if ROWS and not ALIGNMENT:
        first = 0
        size = M
        a_desc = _columns(a, first, size, ROWS, stride_a, BM, BK)
        b_desc = _columns(b, first, size, COLS, stride_b, BN, BK)
    else:
        a_desc = a
        b_desc = b
    # A single loop over the steps of all tiles, so that the pipeline loads the next tile while the last steps of a tile
    # multiply.
    step = tile_steps - 1  # the first iteration begins a tile
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in tl.range(num_steps, num_stages=STAGES):
        step += 1
        if step == tile_steps:
            step = 0
            nth_loaded += 1
            group, start, end, strip, column = _locate(
                _nth_tile(nth_loaded, RUN), ranks, tile_ends, offs_ptr, limit, ROWS, TILE_COLS, BM, TILE.band
            )
            if ROWS:
                a_row = strip * BM
                b_row = column * BN
                if ALIGNMENT:
                    k = tl.where(start < end, aligned_start(start, group, ALIGNMENT), M)  # M: past all columns, loads give 0
                    tile_steps = tl.maximum(tl.cdiv(end - start, BK), 1)
                else:
                    lead = start % BK  # so that steps begin at cache lines
                    has_descriptor = _has_descriptor(start, end)
                    clipped = has_descriptor & ((lead != 0) | ((end - start) % BK != 0))  # a step reaches into another group
                    had_first, had_size = first, size
                    first = tl.where(clipped, start, 0)
                    size = tl.where(clipped, end - start, M)
                    k = tl.where(has_descriptor, start - first - lead, (M // BK + 1) * BK)  # else past all columns
                    tile_steps = tl.where(has_descriptor, tl.cdiv(end - start + lead, BK), 1)
                    if (first != had_first) | (size != had_size):
                        a_desc = _columns(a, first, size, ROWS, stride_a, BM, BK)
                        b_desc = _columns(b, first, size, COLS, stride_b, BN, BK)
            else:
                a_row = start + strip * BM
                b_row = group * COLS + column * BN
        at = k + step * BK
        acc = tl.dot(a_desc.load([a_row, at]), b_desc.load([b_row, at]).T, acc)
        if step == tile_steps - 1:
            nth_stored += 1
            group, start, end, strip, column = _locate(
                _nth_tile(nth_stored, RUN), ranks, tile_ends, offs_ptr, limit, ROWS, TILE_COLS, BM, TILE.band
            )
            if ROWS:
                row = strip * BM
                row_end = ROWS
            else:
                row = start + strip * BM
                row_end = end
            _epilogue(
                acc, out, scale_a_ptr, scale_b_ptr, group, row, row_end, column * BN,
                ROWS, COLS, SCALE_A, SCALE_B, PARTS,
            )  # fmt: skip
            acc = tl.zeros((BM, BN), dtype=tl.float32)
    if not ROWS:
        _clear_rest(out, tl.minimum(tl.maximum(tl.load(offs_ptr + SHAPE.experts - 1), 0), M), M, COLS, BN)


@triton.jit(do_not_specialize=["M"])
def _weight_gradient_of_the_rest(
    a_ptr, b_ptr, out_ptr, scale_a_ptr, scale_b_ptr, offs_ptr, M, stride_a, stride_b,
    ROWS: tl.constexpr, COLS: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr,
    SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the weight gradients of the groups that no descriptor can begin with, loaded by single bytes; leave all other groups.

    Tiles are too small for wgmma: ptxas 12.8 makes wrong code of a wgmma whose operand is in registers.
    """
    TILE_COLS: tl.constexpr = (COLS + BN - 1) // BN
    TILES: tl.constexpr = (ROWS + BM - 1) // BM * TILE_COLS
    groups = tl.arange(0, GROUPS)
    starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < E), other=0)
    if tl.sum((starts % _TMA_BYTES != 0).to(tl.int32), axis=0) > 0:
        for group in range(E):
            start, end = _bounds(offs_ptr, group, M)
            if (start < end) & (start % _TMA_BYTES != 0):
                for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
                    rows = tile // TILE_COLS * BM + tl.arange(0, BM)
                    cols = tile % TILE_COLS * BN + tl.arange(0, BN)
                    acc = tl.zeros((BM, BN), dtype=tl.float32)
                    for at in range(start, end, BK):
                        k = at + tl.arange(0, BK)
                        mask = (rows < ROWS)[:, None] & (k < end)[None, :]
                        x = tl.load(a_ptr + (wide(rows)[:, None] * stride_a + k[None, :]), mask=mask, other=0.0)
                        mask = (cols < COLS)[:, None] & (k < end)[None, :]
                        y = tl.load(b_ptr + (wide(cols)[:, None] * stride_b + k[None, :]), mask=mask, other=0.0)
                        acc = tl.dot(x.to(tl.float16), y.to(tl.float16).T, acc)  # fp16 holds every e4m3 value
                    acc = _scaled(acc, scale_a_ptr, scale_b_ptr, group, rows, ROWS, cols, ROWS, COLS, SCALE_A, SCALE_B)
                    to = (wide(group) * ROWS + rows)[:, None] * COLS + cols[None, :]
                    live = (rows < ROWS)[:, None] & (cols < COLS)[None, :]
                    tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=live)
