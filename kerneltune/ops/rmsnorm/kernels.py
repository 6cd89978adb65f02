"""Our RMSNorm kernels: every tensor is read from memory once.

Rows live in registers. A row too long for one program is shared by `PARTS` programs, which publish their partial sums and
wait for each other's inside the launch (PHASE 0), or in two launches (PHASE 1 publishes, PHASE 2 collects). A program
publishes its next tile before it waits for the present one, so that the wait is over when it begins. May import tl_lib.
"""

import triton
import triton.language as tl

from kerneltune.tl_lib import (
    await_published,
    await_published4,
    close_launch,
    held,
    launch_tag,
    pack_bytes,
    publish,
    published,
    quantize,
    reciprocal,
    wide,
)


@triton.jit
def _load_tile(
    ptr, tile, stride, cols, M, N,
    ROWS: tl.constexpr, STRIDED: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLS) of a matrix: the rows OFFSET + STRIDED * i of a tile; zeros outside the matrix. AGAIN: keep it in L2."""
    rows = tl.arange(0, ROWS) * STRIDED + OFFSET
    mask = (rows < M - tile * (ROWS * STRIDED))[:, None]
    if not EVEN:
        mask = mask & (cols < N)[None, :]
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    base = wide(tile * (ROWS * STRIDED)) * stride
    return tl.load(ptr + base + (rows[:, None] * stride + cols[None, :]), mask=mask, other=0.0, eviction_policy=policy)


@triton.jit
def _sum_of_squares(x):
    x32 = x.to(tl.float32)
    return tl.sum(x32 * x32, axis=1)


@triton.jit
def _load_gamma(g_ptr, cols, N):
    """The weight as stored; load it before the sums that it has to wait for."""
    return tl.load(g_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")


@triton.jit
def _gamma(g, ZERO_CENTERED: tl.constexpr):
    g = g.to(tl.float32)
    return (g + 1.0 if ZERO_CENTERED else g)[None, :]


@triton.jit
def _amax_by_eights(y):
    """|y| (R, C) to (R, C // 8): the largest of eight neighbours, which one thread holds; NaN is passed over."""
    return tl.max(tl.reshape(tl.abs(y), (y.shape[0], y.shape[1] // 8, 8)), axis=2)


@triton.jit
def _total(ws_ptr, tile, tag, ROWS: tl.constexpr, PARTS: tl.constexpr, PHASE: tl.constexpr):
    """The (ROWS,) sums over all parts of a tile's rows, added in the same order in every program and every run."""
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    index = (tile * PARTS + tl.where(parts < PARTS, parts, 0))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    partials = await_published(ws_ptr, index, tag) if PHASE == 0 else published(ws_ptr, index)
    return tl.sum(tl.where((parts < PARTS)[:, None], partials, 0.0), axis=0)


@triton.jit
def _rmsnorm_fwd_rows(
    x_ptr, g_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, ws_ptr,
    M, N, stride_xm, eps,
    ZERO_CENTERED: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, PHASE: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """y = x * rsqrt(mean(x²) + eps) * g. A program holds ROWS x (CHUNKS * COLS) of x; several PARTS have one chunk each."""
    part = tl.program_id(0) % PARTS
    first_tile = tl.program_id(0) // PARTS
    step = tl.num_programs(0) // PARTS
    tiles = tl.cdiv(M, ROWS)
    lanes = tl.arange(0, ROWS)
    inv_n = 1.0 / N
    scale = 1.0
    if FP8:
        scale = tl.load(scale_ptr)
        if tl.program_id(0) == 0 and PHASE != 1:
            tl.store(scale_inv_ptr, reciprocal(scale))
    amax = tl.zeros((ROWS, COLS // 8), dtype=tl.float32)
    if PARTS > 1:
        tag = launch_tag(ws_ptr)
        cols = part * COLS + tl.arange(0, COLS)
        slots = part * ROWS + lanes
        g_part = _load_gamma(g_ptr, cols, N)
        x_next = _load_tile(x_ptr, first_tile, stride_xm, cols, M, N, ROWS, 1, 0, EVEN, RELOAD)
        if PHASE != 2:
            publish(ws_ptr, first_tile * (PARTS * ROWS) + slots, _sum_of_squares(x_next), tag, lanes >= 0)

    for tile in tl.range(first_tile, tiles, step, num_stages=STAGES):
        left = M - tile * ROWS
        xs = ()
        gs = ()
        if PARTS > 1:
            xs = (x_next,)
            gs = (g_part,)
            ahead = tile + step
            x_next = _load_tile(x_ptr, ahead, stride_xm, cols, M, N, ROWS, 1, 0, EVEN, RELOAD)
            if PHASE != 2:
                publish(ws_ptr, ahead * (PARTS * ROWS) + slots, _sum_of_squares(x_next), tag, lanes * 0 + ahead < tiles)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            if PHASE != 1:
                total = _total(ws_ptr, tile, tag, ROWS, PARTS, PHASE)
        else:
            squares = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for c in tl.static_range(CHUNKS):
                x = _load_tile(x_ptr, tile, stride_xm, c * COLS + tl.arange(0, COLS), M, N, ROWS, 1, 0, EVEN, RELOAD)
                squares += x.to(tl.float32) * x.to(tl.float32)
                xs = xs + (x,)
                if not RELOAD:
                    gs = gs + (_load_gamma(g_ptr, c * COLS + tl.arange(0, COLS), N),)
            total = tl.sum(squares, axis=1)
        if PHASE != 1:
            r = tl.rsqrt(total * inv_n + eps)
            if part == 0:
                tl.store(rsigma_ptr + tile * ROWS + lanes, r, mask=lanes < left)
            y_tile = y_ptr + wide(tile * ROWS) * N
            for c in tl.static_range(CHUNKS):
                cols_c = (part * CHUNKS + c) * COLS + tl.arange(0, COLS)
                mask = (lanes < left)[:, None]
                if not EVEN:
                    mask = mask & (cols_c < N)[None, :]
                if RELOAD:
                    x = _load_tile(x_ptr, tile, stride_xm, cols_c, M, N, ROWS, 1, 0, EVEN, False)
                    g = _load_gamma(g_ptr, cols_c, N)
                else:
                    x = xs[c]
                    g = gs[c]
                y = held(x).to(tl.float32) * r[:, None] * _gamma(g, ZERO_CENTERED)
                if FP8:
                    amax = tl.maximum(amax, _amax_by_eights(y))
                    y = quantize(y, scale, FP8_MAX, y_ptr.dtype.element_ty)
                tl.store(
                    y_tile + (lanes[:, None] * N + cols_c[None, :]), y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs"
                )
    if FP8 and PHASE != 1:
        tl.atomic_max(amax_ptr, tl.max(amax), sem="relaxed")
    if PARTS > 1 and PHASE == 0:
        close_launch(ws_ptr, tag)


@triton.jit
def _load_quads(x_ptr, tile, stride, cols, M, N, QUADS: tl.constexpr, EVEN: tl.constexpr, AGAIN: tl.constexpr):
    """A tile of 4 * QUADS rows as four (QUADS, COLS) sub-tiles; sub-tile k has the rows 4i + k."""
    return (
        _load_tile(x_ptr, tile, stride, cols, M, N, QUADS, 4, 0, EVEN, AGAIN),
        _load_tile(x_ptr, tile, stride, cols, M, N, QUADS, 4, 1, EVEN, AGAIN),
        _load_tile(x_ptr, tile, stride, cols, M, N, QUADS, 4, 2, EVEN, AGAIN),
        _load_tile(x_ptr, tile, stride, cols, M, N, QUADS, 4, 3, EVEN, AGAIN),
    )


@triton.jit
def _publish_quads(ws_ptr, tile, part, sums, tag, mask, QUADS: tl.constexpr, PARTS: tl.constexpr):
    for k in tl.static_range(4):
        publish(ws_ptr, (tile * (4 * QUADS) + k * QUADS + tl.arange(0, QUADS)) * PARTS + part, sums[k], tag, mask)


@triton.jit
def _total_quads(ws_ptr, tile, tag, QUADS: tl.constexpr, PARTS: tl.constexpr, PHASE: tl.constexpr):
    """`_total` of four sub-tiles: four (QUADS,) tensors."""
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    live = (parts < PARTS)[None, :]
    index = (tile * (4 * QUADS) + tl.arange(0, QUADS))[:, None] * PARTS + tl.where(parts < PARTS, parts, 0)[None, :]
    if PHASE == 0:
        p0, p1, p2, p3 = await_published4(ws_ptr, index, QUADS * PARTS, tag)
    else:
        p0 = published(ws_ptr, index)
        p1 = published(ws_ptr, index + QUADS * PARTS)
        p2 = published(ws_ptr, index + 2 * QUADS * PARTS)
        p3 = published(ws_ptr, index + 3 * QUADS * PARTS)
    return (
        tl.sum(tl.where(live, p0, 0.0), axis=1),
        tl.sum(tl.where(live, p1, 0.0), axis=1),
        tl.sum(tl.where(live, p2, 0.0), axis=1),
        tl.sum(tl.where(live, p3, 0.0), axis=1),
    )


@triton.jit
def _squares_of_quads(xs):
    return _sum_of_squares(xs[0]), _sum_of_squares(xs[1]), _sum_of_squares(xs[2]), _sum_of_squares(xs[3])


@triton.jit
def _rmsnorm_fwd_transpose(
    x_ptr, g_ptr, y_ptr, yt_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, ws_ptr,
    M, N, stride_xm, eps,
    ZERO_CENTERED: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, PHASE: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """fp8 y (M, N) and its transpose (N, M) from one read of x.

    A program holds ROWS x COLS of x as four interleaved sub-tiles, so that the four bytes that lie side by side in the
    transpose belong to one thread, and the transpose moves 32-bit words instead of bytes. The transposed tile is made of
    packed integers, never of fp8: ptxas 12.8 and 12.9 corrupt a dual fp8 store on sm_90 (triton-lang/triton#11111). yt comes
    as int32 words, or as bytes where M is no multiple of 4. RELOAD: read x again, from L2, instead of holding it.
    """
    QUADS: tl.constexpr = ROWS // 4
    part = tl.program_id(0) % PARTS
    first_tile = tl.program_id(0) // PARTS
    step = tl.num_programs(0) // PARTS
    tiles = tl.cdiv(M, ROWS)
    lanes = tl.arange(0, COLS)
    quads = tl.arange(0, QUADS)
    cols = part * COLS + lanes
    inv_n = 1.0 / N
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0 and PHASE != 1:
        tl.store(scale_inv_ptr, reciprocal(scale))
    amax = tl.zeros((QUADS, COLS // 8), dtype=tl.float32)
    g_tile = _load_gamma(g_ptr, cols, N)
    if PARTS > 1:
        tag = launch_tag(ws_ptr)
    xs_next = _load_quads(x_ptr, first_tile, stride_xm, cols, M, N, QUADS, EVEN, RELOAD)
    squares_next = _squares_of_quads(xs_next)
    if PARTS > 1 and PHASE != 2:
        _publish_quads(ws_ptr, first_tile, part, squares_next, tag, quads >= 0, QUADS, PARTS)

    for tile in tl.range(first_tile, tiles, step, num_stages=STAGES, disable_licm=True):
        xs = xs_next
        totals = squares_next
        xs_next = _load_quads(x_ptr, tile + step, stride_xm, cols, M, N, QUADS, EVEN, RELOAD)
        squares_next = _squares_of_quads(xs_next)
        if PARTS > 1 and PHASE != 2:
            _publish_quads(ws_ptr, tile + step, part, squares_next, tag, quads * 0 + tile + step < tiles, QUADS, PARTS)
        if PHASE != 1:
            if PARTS > 1:
                totals = _total_quads(ws_ptr, tile, tag, QUADS, PARTS, PHASE)
            left = M - tile * ROWS
            first_row = wide(tile * ROWS)
            g = _gamma(g_tile, ZERO_CENTERED)
            y_tile = y_ptr + first_row * N
            qs = ()
            for k in tl.static_range(4):
                rows = quads * 4 + k
                mask = (rows < left)[:, None]
                if not EVEN:
                    mask = mask & (cols < N)[None, :]
                r = tl.rsqrt(totals[k] * inv_n + eps)
                if part == 0:
                    tl.store(rsigma_ptr + first_row + rows, r, mask=rows < left)
                if RELOAD:
                    x = _load_tile(x_ptr, tile, stride_xm, cols, M, N, QUADS, 4, k, EVEN, False)
                else:
                    x = xs[k]
                y = held(x).to(tl.float32) * r[:, None] * g
                amax = tl.maximum(amax, _amax_by_eights(y))
                q = quantize(y, scale, FP8_MAX, y_ptr.dtype.element_ty)
                tl.store(y_tile + (rows[:, None] * N + cols[None, :]), q, mask=mask)
                if PACKED:
                    qs = qs + (q,)
                else:
                    yt_tile = yt_ptr + wide(part * COLS) * M + first_row
                    tl.store(
                        yt_tile + (lanes[:, None] * M + rows[None, :]),
                        tl.trans(q.to(tl.uint8, bitcast=True)),
                        mask=tl.trans(mask),
                    )
            if PACKED:
                words = pack_bytes(qs[0], qs[1], qs[2], qs[3])
                yt_tile = yt_ptr + wide(part * COLS) * (M // 4) + wide(tile * QUADS)
                mask = (cols < N)[:, None] & (quads < left // 4)[None, :]
                tl.store(yt_tile + (lanes[:, None] * (M // 4) + quads[None, :]), tl.trans(words), mask=mask)
    if PHASE != 1:
        tl.atomic_max(amax_ptr, tl.max(amax), sem="relaxed")
    if PARTS > 1 and PHASE == 0:
        close_launch(ws_ptr, tag)


@triton.jit
def _rmsnorm_bwd_main(
    dz_ptr, x_ptr, rsigma_ptr, g_ptr, dx_ptr, dg_ptr, ws_ptr,
    M, N,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, PHASE: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and one fp32 row of dγ partials per group of PARTS programs: dg (groups, N)."""
    part = tl.program_id(0) % PARTS
    group = tl.program_id(0) // PARTS
    step = tl.num_programs(0) // PARTS
    tiles = tl.cdiv(M, ROWS)
    cols = part * COLS + tl.arange(0, COLS)
    lanes = tl.arange(0, ROWS)
    slots = part * ROWS + lanes
    inv_n = 1.0 / N
    g = _gamma(_load_gamma(g_ptr, cols, N), ZERO_CENTERED)
    dg = tl.zeros((ROWS, COLS), dtype=tl.float32)
    if PARTS > 1:
        tag = launch_tag(ws_ptr)
        x_next = _load_tile(x_ptr, group, N, cols, M, N, ROWS, 1, 0, EVEN, False)
        dz_next = _load_tile(dz_ptr, group, N, cols, M, N, ROWS, 1, 0, EVEN, False)
        if PHASE != 2:
            partial = tl.sum(dz_next.to(tl.float32) * g * x_next.to(tl.float32), axis=1)
            publish(ws_ptr, group * (PARTS * ROWS) + slots, partial, tag, lanes >= 0)
    for tile in tl.range(group, tiles, step, num_stages=STAGES):
        left = M - tile * ROWS
        if PARTS > 1:
            x = x_next
            dz = dz_next
            ahead = tile + step
            x_next = _load_tile(x_ptr, ahead, N, cols, M, N, ROWS, 1, 0, EVEN, False)
            dz_next = _load_tile(dz_ptr, ahead, N, cols, M, N, ROWS, 1, 0, EVEN, False)
            if PHASE != 2:
                partial = tl.sum(dz_next.to(tl.float32) * g * x_next.to(tl.float32), axis=1)
                publish(ws_ptr, ahead * (PARTS * ROWS) + slots, partial, tag, lanes * 0 + ahead < tiles)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            if PHASE != 1:
                total = _total(ws_ptr, tile, tag, ROWS, PARTS, PHASE)
        else:
            x = _load_tile(x_ptr, tile, N, cols, M, N, ROWS, 1, 0, EVEN, False)
            dz = _load_tile(dz_ptr, tile, N, cols, M, N, ROWS, 1, 0, EVEN, False)
            total = tl.sum(dz.to(tl.float32) * g * x.to(tl.float32), axis=1)
        if PHASE != 1:
            r = tl.load(rsigma_ptr + tile * ROWS + lanes, mask=lanes < left, other=0.0)
            mask = (lanes < left)[:, None]
            if not EVEN:
                mask = mask & (cols < N)[None, :]
            c = r * r * total * inv_n
            x32 = held(x).to(tl.float32)
            dz32 = held(dz).to(tl.float32)
            dx = r[:, None] * (dz32 * g - c[:, None] * x32)
            dx_tile = dx_ptr + wide(tile * ROWS) * N
            tl.store(
                dx_tile + (lanes[:, None] * N + cols[None, :]), dx.to(dx_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs"
            )
            dg += dz32 * x32 * r[:, None]
    if PHASE != 1:
        tl.store(dg_ptr + wide(group) * N + cols, tl.sum(dg, axis=0), mask=cols < N)
    if PARTS > 1 and PHASE == 0:
        close_launch(ws_ptr, tag)


@triton.jit
def _rmsnorm_bwd_dgamma(dg_ptr, dgamma_ptr, P, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """dγ = column sums of the (P, N) partials, in a fixed order."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, P, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(dg_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dgamma_ptr + cols, tl.sum(total, axis=0).to(dgamma_ptr.dtype.element_ty), mask=cols < N)
