"""Compute dx and dγ of RMSNorm's backward pass, and read dz and x once.

Because a loop holds each 16-bit value in a register of its own, 16-bit values are loaded in PAIRS, as int32.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.kernel_lib.arguments import in_pairs
from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.tl_exchange import close_launch, launch_tag, publish, sum_of_published
from kerneltune.kernel_lib.tl_lib import TL_DTYPES, held, load_constant, since_sm_90, to_pairs, values, wide
from kerneltune.kernel_lib.workspace import workspace
from kerneltune.ops.rmsnorm.tiles import groups_of, phases_of
from kerneltune.rounding import cdiv, next_power_of_2

if TYPE_CHECKING:
    from kerneltune.ops.rmsnorm.bwd import BwdConfig

_MOST_EARLY = 1 << 25
"""Most elements of x for which the dγ reduction is launched when the main kernel begins. For more elements, and if programs
share rows, the reduction is launched when the main loops end. H200, 2026-11-22: the early launch is 1 to 6 % faster up to
8192 x 4096, 1 % slower at twice as many elements, and 6 % slower if programs share rows (docs/notes/rmsnorm.md)."""

_DGAMMA_TILE = 4096
"""Elements that a program of the dγ reduction loads at once: all partials of at least eight columns."""


def gradients(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    zero_centered: bool,
    with_dgamma: bool,
    config: "BwdConfig | None",
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    """Allocate dx and dγ and launch the kernels; dsum is added to dx. The caller checks arguments. config None: x is empty."""
    dz, x, dsum = dz.contiguous(), x.contiguous(), None if dsum is None else dsum.contiguous()
    M, N = x.shape
    dx = torch.empty_like(x)
    dgamma = None if weight is None or not with_dgamma else torch.empty_like(weight)
    if config is None or not x.numel():
        return dx, None if dgamma is None else dgamma.zero_()
    c = config
    tiles, (parts, chunks) = cdiv(M, c.rows), c.parts(N)
    groups = groups_of(x.device, tiles, parts, c)
    partials = None if dgamma is None else torch.empty((groups, N), dtype=torch.float32, device=x.device)
    pairs = _pairs(weight, x, dz, dsum)
    words = [t if t is None or pairs == 1 or t.element_size() == 4 else t.view(torch.int32) for t in (dz, x, weight, dsum, dx)]
    with workspace(tiles * parts * c.rows, x.device) if parts > 1 else nullcontext() as ws:
        for phase, options in phases_of(parts, c):
            _rmsnorm_bwd_main[(groups * parts,)](
                words[0], words[1], rsigma, *words[2:], partials, ws, M, N // pairs,
                LOOP=GradientLoop.of(
                    rows=c.rows, cols=c.cols // pairs, chunks=chunks, parts=parts, sum_rows=c.sum_rows(x.element_size()),
                    pairs=pairs, dtype=TL_DTYPES[x.dtype], zero_centered=zero_centered,
                ),
                PHASE=phase, EARLY=parts == 1 and M * N <= _MOST_EARLY, STAGES=c.stages, num_warps=c.warps, **options,
            )  # fmt: skip
    if dgamma is not None:
        padded_groups = next_power_of_2(groups)
        cols = max(8, _DGAMMA_TILE // padded_groups)
        _rmsnorm_bwd_dgamma[(cdiv(N, cols),)](
            partials, dgamma, groups, N, ROWS=padded_groups, COLS=cols, num_warps=8,
            **({"launch_pdl": True} if since_sm_90() else {}),
        )  # fmt: skip
    return dx, dgamma


def _pairs(weight: torch.Tensor | None, *matrices: torch.Tensor | None) -> int:
    """Return 2 where 16-bit values can be loaded two by two, as widths and addresses allow; else 1."""
    weight_fits = weight is None or weight.element_size() == 4 or weight.storage_offset() % 2 == 0
    return 2 if weight_fits and all(matrix is None or in_pairs(matrix) for matrix in matrices) else 1


@dataclass(frozen=True, eq=False, repr=False)
class GradientLoop(Constants):
    """Hold the work of a program.

    Attributes:
        rows: rows of a tile.
        cols: words of a load.
        chunks: number of loads of a row that one program holds; 1 if programs share rows.
        parts: number of programs that share a row.
        sum_rows: rows of the tile in which a program sums dγ; the tile's rows are added up at the end.
        pairs: elements of a word: 2 where 16-bit elements are loaded as int32, else 1.
        dtype: the type of an element.
        zero_centered: whether 1 is added to the weight.
    """

    rows: int
    cols: int
    chunks: int
    parts: int
    sum_rows: int
    pairs: int
    dtype: tl.dtype
    zero_centered: bool


@triton.jit
def _load(ptr, tile, first_col, M, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Load (ROWS, COLS) of a contiguous matrix; zeros outside it."""
    rows = tl.arange(0, ROWS)
    cols = first_col + tl.arange(0, COLS)
    mask = (rows < M - tile * ROWS)[:, None]
    if N % COLS != 0:
        mask = mask & (cols < N)[None, :]
    base = wide(tile * ROWS) * N
    return tl.load(ptr + base + (rows[:, None] * N + cols[None, :]), mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _times_gamma(dz32, g, HALF: tl.constexpr, g_ptr, LOOP: tl.constexpr):
    """Return dz γ, fp32, of a half of the words.

    g: the weight of the columns, words as dz has them, or in pairs the tensors of an fp32 weight's even and odd columns.
    """
    dzg = dz32
    if g_ptr is not None:
        if LOOP.pairs == 2 and g_ptr.dtype.element_ty == tl.float32:
            gamma = g[HALF]
        else:
            gamma = values(g[0], HALF, LOOP.pairs, LOOP.dtype)
        dzg = dz32 * (gamma + 1.0 if LOOP.zero_centered else gamma)[None, :]
    return dzg


@triton.jit
def _products(dz, x, g, g_ptr, LOOP: tl.constexpr):
    """Return dz γ x, summed over the halves of words."""
    PAIRS: tl.constexpr = LOOP.pairs
    dtype: tl.constexpr = LOOP.dtype
    dz32 = values(dz, 0, PAIRS, dtype)
    s = _times_gamma(dz32, g, 0, g_ptr, LOOP) * values(x, 0, PAIRS, dtype)
    if PAIRS == 2:
        dz32 = values(dz, 1, PAIRS, dtype)
        s += _times_gamma(dz32, g, 1, g_ptr, LOOP) * values(x, 1, PAIRS, dtype)
    return s


@triton.jit
def _to_rows(x, ROWS: tl.constexpr):
    """Sum x (R, C) to ROWS rows: row i of the result is the sum of rows i, i + ROWS, ..., which one thread holds."""
    if x.shape[0] == ROWS:
        return x
    elif ROWS == 1:
        return tl.sum(x, axis=0)[None, :]
    else:
        return tl.sum(tl.reshape(x, (x.shape[0] // ROWS, ROWS, x.shape[1])), axis=0)


@triton.jit
def _load_weight(g_ptr, first_col, N: tl.constexpr, LOOP: tl.constexpr):
    """Load the weight of all loads of a program: for each a tuple, as `_times_gamma` takes it."""
    COLS: tl.constexpr = LOOP.cols
    gs = ()
    for c in tl.static_range(LOOP.chunks):
        cols = first_col + c * COLS + tl.arange(0, COLS)
        if g_ptr is None:
            gs = gs + ((0,),)
        elif LOOP.pairs == 2 and g_ptr.dtype.element_ty == tl.float32:
            even = tl.load(g_ptr + cols * 2, mask=cols < N, other=0, eviction_policy="evict_last")
            gs = gs + ((even, tl.load(g_ptr + cols * 2 + 1, mask=cols < N, other=0, eviction_policy="evict_last")),)
        else:
            gs = gs + ((tl.load(g_ptr + cols, mask=cols < N, other=0, eviction_policy="evict_last"),),)
    return gs


@triton.jit
def _write_tile(
    xs, dzs, dsums, gs, dgs, r, total, tile, first_col, lanes, left,
    g_ptr, dsum_ptr, dx_ptr, dg_ptr, N: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Write dx of a tile whose sums of dz γ x are `total`; return the sums for dγ with the tile added."""
    COLS: tl.constexpr = LOOP.cols
    PAIRS: tl.constexpr = LOOP.pairs
    dtype: tl.constexpr = LOOP.dtype
    slope = (r * r * total * (1.0 / (N * PAIRS)))[:, None]
    r = r[:, None]
    dgs_next = ()
    for c in tl.static_range(LOOP.chunks):
        cols = first_col + c * COLS + tl.arange(0, COLS)
        mask = (lanes < left)[:, None]
        if N % COLS != 0:
            mask = mask & (cols < N)[None, :]
        x = held(xs[c])
        dz = held(dzs[c])
        x32 = values(x, 0, PAIRS, dtype)
        dz32 = values(dz, 0, PAIRS, dtype)
        dx = r * (_times_gamma(dz32, gs[c], 0, g_ptr, LOOP) - slope * x32)
        if dsum_ptr is not None:
            dx += values(dsums[c], 0, PAIRS, dtype)
        if dg_ptr is not None:
            dgs_next = dgs_next + (dgs[c * PAIRS] + _to_rows(dz32 * x32 * r, LOOP.sum_rows),)
        if PAIRS == 2:
            x32 = values(x, 1, PAIRS, dtype)
            dz32 = values(dz, 1, PAIRS, dtype)
            high = r * (_times_gamma(dz32, gs[c], 1, g_ptr, LOOP) - slope * x32)
            if dsum_ptr is not None:
                high += values(dsums[c], 1, PAIRS, dtype)
            if dg_ptr is not None:
                dgs_next = dgs_next + (dgs[c * PAIRS + 1] + _to_rows(dz32 * x32 * r, LOOP.sum_rows),)
            dx = to_pairs(dx, high, dtype)
        else:
            dx = dx.to(dtype)
        dx_tile = dx_ptr + wide(tile * LOOP.rows) * N
        tl.store(dx_tile + (lanes[:, None] * N + cols[None, :]), dx, mask=mask, cache_modifier=".cs")
    return dgs_next


@triton.jit
def _write_partials(dgs, group, first_col, dg_ptr, N: tl.constexpr, LOOP: tl.constexpr):
    """Write a program's row of dγ partials from its sums; in pairs even and odd columns are put side by side again."""
    COLS: tl.constexpr = LOOP.cols
    PAIRS: tl.constexpr = LOOP.pairs
    for c in tl.static_range(LOOP.chunks):
        cols = first_col + c * COLS + tl.arange(0, COLS)
        dg = tl.sum(dgs[c * PAIRS], axis=0)
        if PAIRS == 2:
            cols = (first_col + c * COLS) * 2 + tl.arange(0, COLS * 2)
            dg = tl.reshape(tl.join(dg, tl.sum(dgs[c * PAIRS + 1], axis=0)), (COLS * 2,))
        tl.store(dg_ptr + wide(group) * (N * PAIRS) + cols, dg, mask=cols < N * PAIRS)


@triton.jit
def _rmsnorm_bwd_main(
    dz_ptr, x_ptr, rsigma_ptr, g_ptr, dsum_ptr, dx_ptr, dg_ptr, ws_ptr, M, N: tl.constexpr,
    LOOP: tl.constexpr, PHASE: tl.constexpr, EARLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx, and an fp32 row of dγ partials for each group of programs that share rows: dg (groups, all columns).

    g_ptr None: γ is 1. dg_ptr None: no dγ. dsum_ptr: a gradient that is added to dx, or None.

    Programs share a row, each with a load, or a program holds all loads of its row. In pairs dz, x, 16-bit γ, dsum and dx
    are int32, and N counts words. EARLY: the dγ reduction is launched at the begin, not when the loops are over.
    """
    ROWS: tl.constexpr = LOOP.rows
    COLS: tl.constexpr = LOOP.cols
    PARTS: tl.constexpr = LOOP.parts
    if EARLY and since_sm_90():
        gdc_launch_dependents()
    part = tl.program_id(0) % PARTS
    group = tl.program_id(0) // PARTS
    step = tl.num_programs(0) // PARTS
    tiles = tl.cdiv(M, ROWS)
    first_col = part * COLS
    lanes = tl.arange(0, ROWS)
    slots = part * ROWS + lanes
    gs = _load_weight(g_ptr, first_col, N, LOOP)
    dgs = ()
    if dg_ptr is not None:
        for _ in tl.static_range(LOOP.chunks * LOOP.pairs):
            dgs = dgs + (tl.zeros((LOOP.sum_rows, COLS), dtype=tl.float32),)
    # Publish the first tile before the loop, so that each iteration waits for sums that the iteration before has published.
    if PARTS > 1:
        tag = launch_tag(ws_ptr)
        x_next = _load(x_ptr, group, first_col, M, N, ROWS, COLS)
        dz_next = _load(dz_ptr, group, first_col, M, N, ROWS, COLS)
        if PHASE != 2:
            partial = tl.sum(_products(dz_next, x_next, gs[0], g_ptr, LOOP), axis=1)
            publish(ws_ptr, group * (PARTS * ROWS) + slots, partial, tag, lanes >= 0)
    r_next = load_constant(rsigma_ptr + tl.minimum(group * ROWS + lanes, M - 1))
    for tile in tl.range(group, tiles, step, num_stages=STAGES, disable_licm=True):
        left = M - tile * ROWS
        r = r_next
        r_next = load_constant(rsigma_ptr + tl.minimum((tile + step) * ROWS + lanes, M - 1))
        xs = ()
        dzs = ()
        dsums = ()
        if PARTS > 1:
            xs = (x_next,)
            dzs = (dz_next,)
            ahead = tile + step
            x_next = _load(x_ptr, ahead, first_col, M, N, ROWS, COLS)
            dz_next = _load(dz_ptr, ahead, first_col, M, N, ROWS, COLS)
            if PHASE != 2:
                partial = tl.sum(_products(dz_next, x_next, gs[0], g_ptr, LOOP), axis=1)
                publish(ws_ptr, ahead * (PARTS * ROWS) + slots, partial, tag, lanes * 0 + ahead < tiles)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            if PHASE != 1:
                total = sum_of_published(ws_ptr, tile, tag, ROWS, PARTS, PHASE)
        else:
            sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for c in tl.static_range(LOOP.chunks):
                x = _load(x_ptr, tile, c * COLS, M, N, ROWS, COLS)
                dz = _load(dz_ptr, tile, c * COLS, M, N, ROWS, COLS)
                sums += _products(dz, x, gs[c], g_ptr, LOOP)
                xs = xs + (x,)
                dzs = dzs + (dz,)
            total = tl.sum(sums, axis=1)
        if dsum_ptr is not None:
            for c in tl.static_range(LOOP.chunks):
                dsums = dsums + (_load(dsum_ptr, tile, first_col + c * COLS, M, N, ROWS, COLS),)
        # Write the tile out of registers: its sums are known now.
        if PHASE != 1:
            dgs = _write_tile(
                xs, dzs, dsums, gs, dgs, r, total, tile, first_col, lanes, left, g_ptr, dsum_ptr, dx_ptr, dg_ptr, N, LOOP
            )
    if PHASE != 1 and dg_ptr is not None:
        if not EARLY and since_sm_90():
            gdc_launch_dependents()
        _write_partials(dgs, group, first_col, dg_ptr, N, LOOP)
    if PARTS > 1 and PHASE == 0:
        close_launch(ws_ptr, tag)


@triton.jit
def _rmsnorm_bwd_dgamma(dg_ptr, dgamma_ptr, P, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write dγ, the column sums of the (P, N) partials, P ≤ ROWS, in a fixed order; the main kernel may run at the begin."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.arange(0, ROWS)
    mask = (rows < P)[:, None] & (cols < N)[None, :]
    if since_sm_90():
        gdc_wait()
    partials = tl.load(dg_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dgamma_ptr + cols, tl.sum(partials, axis=0).to(dgamma_ptr.dtype.element_ty), mask=cols < N)
