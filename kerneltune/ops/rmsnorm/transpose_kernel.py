"""RMSNorm into fp8 and its transpose, x read from memory once. May import tl_lib, tl_transpose, tl_exchange.

Either a program has whole rows (`_rmsnorm_fwd_stripes`), or PARTS programs share ROWS rows, a tile each. Each publishes its part
of the sums of squares, some add them up, a few rows each, and publish 1 / rms, for which all wait before they write the tile: out
of registers, while the next one is on its way (`_rmsnorm_fwd_held`), or read again from L2 (`_rmsnorm_fwd_transpose`). The latter
runs two tiles ahead with the first, and one with the second, so that the waits are over when they begin.

16-bit numbers come in PAIRS, as int32, in four interleaved sub-tiles: the four bytes that lie side by side in
the transpose belong to one thread, which moves words instead of bytes. Those words are made of integers, never of a transposed
fp8 tile: ptxas 12.8 and 12.9 corrupt a dual fp8 store on sm_90 (triton-lang/triton#11111).
"""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_exchange import await_all, await_published, close_launch, launch_tag, publish, published
from kerneltune.kernel_lib.tl_lib import held, only_if, quantize, reciprocal, saturate, to_fp8_pair, values, wide
from kerneltune.kernel_lib.tl_transpose import store_turned


@triton.jit
def _load_quads(
    x_ptr, tile, M, first_col, N: tl.constexpr, stride: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """A tile as four (ROWS / 4, COLS) sub-tiles; sub-tile k has the rows 4i + k. Zeros outside x. AGAIN: keep it in L2."""
    policy: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    cols = first_col + tl.arange(0, COLS)
    left = M - tile * ROWS
    tile_ptr = x_ptr + wide(tile * ROWS) * stride
    tiles = ()
    for k in tl.static_range(4):
        rows = tl.arange(0, ROWS // 4) * 4 + k
        mask = only_if(tl.full((1, 1), True, tl.int1), left > 0)
        if not EVEN_ROWS:
            mask = mask & (rows < left)[:, None]
        if not EVEN:
            mask = mask & (cols < N)[None, :]
        tiles = tiles + (
            tl.load(tile_ptr + (rows[:, None] * stride + cols[None, :]), mask=mask, other=0, eviction_policy=policy),
        )
    return tiles


@triton.jit
def _squares(x, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Sums of squares of a sub-tile's rows."""
    low = values(x, 0, PAIRS, dtype)
    squares = low * low
    if PAIRS == 2:
        high = values(x, 1, PAIRS, dtype)
        squares += high * high
    return tl.sum(squares, axis=1)


@triton.jit
def _publish_parts(
    xs, ws_ptr, tile, part, tag, live, ROWS: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """This part of the sums of squares of a tile's rows: (ROWS, PARTS) words, row by row."""
    quads = tl.arange(0, ROWS // 4)
    for k in tl.static_range(4):
        index = (tile * ROWS + quads * 4 + k) * PARTS + part
        publish(ws_ptr, index, _squares(xs[k], PAIRS, dtype), tag, only_if(quads >= 0, live))


@triton.jit
def _rsigma(partials, parts, eps, N: tl.constexpr, PARTS: tl.constexpr):
    """1 / rms of rows from their (rows, parts) sums, added in the same order in every program and every run."""
    return tl.rsqrt(tl.sum(tl.where((parts < PARTS)[None, :], partials, 0.0), axis=1) * (1.0 / N) + eps)


@triton.jit
def _publish_rsigma(
    ws_ptr, rsigma_ptr, tile, part, M, eps, tag, totals, N: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Add up the parts of this program's share of a tile's rows; 1 / rms goes to the others, from word `totals`, and out.

    Programs left without a share repeat the last row, same word, same value: a branch Triton's pipeline would move to the loop's
    end, behind the wait for what it publishes.
    """
    SHARE: tl.constexpr = triton.next_power_of_2((ROWS + PARTS - 1) // PARTS)
    rows = tile * ROWS + tl.minimum(part * SHARE + tl.arange(0, SHARE), ROWS - 1)
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    index = rows[:, None] * PARTS + tl.where(parts < PARTS, parts, 0)[None, :]
    r = _rsigma(await_published(ws_ptr, index, tag), parts, eps, N, PARTS)
    publish(ws_ptr, totals + rows, r, tag, rows >= 0)
    tl.store(rsigma_ptr + rows, r, mask=rows < M)


@triton.jit
def _collect_rsigma(ws_ptr, rsigma_ptr, tile, part, M, eps, N: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """1 / rms of a tile's rows, four (ROWS / 4,) tensors, from the parts that an earlier launch published."""
    quads = tl.arange(0, ROWS // 4)
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    rs = ()
    for k in tl.static_range(4):
        rows = tile * ROWS + quads * 4 + k
        index = rows[:, None] * PARTS + tl.where(parts < PARTS, parts, 0)[None, :]
        rs = rs + (_rsigma(published(ws_ptr, index), parts, eps, N, PARTS),)
        tl.store(rsigma_ptr + rows, rs[k], mask=only_if(rows < M, part == 0))
    return rs


@triton.jit
def _folded(x):
    """(QUADS, COLS // 4): the largest of four neighbours, which one thread holds."""
    return tl.max(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 4)), axis=2)


@triton.jit
def _write_tile(
    xs, rs, gamma, gamma_high, y_ptr, yt_ptr, scale, tile, first_col, live, M, N: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr,
    EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, PACKED: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Store a tile of y and of its transpose; returns (ROWS / 4, COLS), the largest |y| of its columns before scaling."""
    QUADS: tl.constexpr = ROWS // 4
    quads = tl.arange(0, QUADS)
    lanes = tl.arange(0, COLS)
    left = M - tile * ROWS
    first_row = wide(tile * ROWS)
    y_cols = first_col + lanes
    if HELD:  # or a thread would store 16 bytes of y, and load 32 of x, half a sector at a time, whose other half L2 sends again
        y_cols = tl.max_contiguous(y_cols, [16 // (xs[0].dtype.primitive_bitwidth // 8)])
    yt_base = wide(first_col * PAIRS) * M + first_row
    bytes_of_rows = ()
    largest = tl.zeros((QUADS, COLS), dtype=tl.float32)
    for k in tl.static_range(4):
        rows = quads * 4 + k
        mask = live[None, :]
        if not EVEN_ROWS:
            mask = mask & (rows < left)[:, None]
        y_tile = y_ptr + first_row * N + (rows[:, None] * N + y_cols[None, :])
        x = held(xs[k]) if HELD else xs[k]
        y = values(x, 0, PAIRS, dtype) * rs[k][:, None] * gamma
        largest = tl.maximum(largest, tl.abs(y))
        if PAIRS == 2:
            high = values(x, 1, PAIRS, dtype) * rs[k][:, None] * gamma_high
            largest = tl.maximum(largest, tl.abs(high))
            q = to_fp8_pair(saturate(y * scale, FP8_MAX), saturate(high * scale, FP8_MAX), fp8)
        else:
            q = quantize(y, scale, FP8_MAX, fp8)
        tl.store(y_tile, q, mask=mask, cache_modifier=".cs")
        bytes_of_rows = bytes_of_rows + (q,)
    end = tl.minimum(left, ROWS)
    store_turned(yt_ptr, yt_base, M, 0, end, live, bytes_of_rows, False, EVEN, PACKED, PAIRS)
    return largest


@triton.jit
def _rmsnorm_fwd_transpose(
    x_ptr, g_ptr, y_ptr, yt_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, ws_ptr, M, eps,
    N: tl.constexpr, stride: tl.constexpr, ZERO_CENTERED: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr, PHASE: tl.constexpr,
    EVEN_ROWS: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """fp8 y (M, N) and its transpose (N, M).

    In PAIRS x and gamma are int32 and y int16, and N, COLS and stride count words of two numbers of `dtype`. PACKED: M is a
    multiple of 4. ONE_TILE: every program has one, and holds it.
    """
    PARTS: tl.constexpr = (N + COLS - 1) // COLS
    EVEN: tl.constexpr = N % COLS == 0
    QUADS: tl.constexpr = ROWS // 4
    part = tl.program_id(0) % PARTS
    first_tile = tl.program_id(0) // PARTS
    step = tl.num_programs(0) // PARTS
    tiles = tl.cdiv(M, ROWS)
    last_tile = first_tile + (tiles - 1 - first_tile) // step * step
    totals = tiles * ROWS * PARTS
    quads = tl.arange(0, QUADS)
    lanes = tl.arange(0, COLS)
    first_col = part * COLS
    live = first_col + lanes < N
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0 and PHASE != 1:
        tl.store(scale_inv_ptr, reciprocal(scale))
    amax = tl.zeros((QUADS, COLS // 4), dtype=tl.float32)
    g = tl.load(g_ptr + first_col + lanes, mask=live, other=0, eviction_policy="evict_last")
    gamma = _gamma(g, 0, ZERO_CENTERED, PAIRS, dtype)
    gamma_high = _gamma(g, PAIRS - 1, ZERO_CENTERED, PAIRS, dtype)
    if PARTS > 1:
        tag = launch_tag(ws_ptr)

    if PARTS > 1 and PHASE != 2:
        for early in tl.static_range(1 if ONE_TILE else 2):
            ahead = first_tile + early * step
            xs = _load_quads(x_ptr, tl.minimum(ahead, tiles - 1), M, first_col, N, stride, ROWS, COLS, EVEN, EVEN_ROWS, True)
            _publish_parts(xs, ws_ptr, ahead, part, tag, ahead < tiles, ROWS, PARTS, PAIRS, dtype)
    if PARTS > 1 and PHASE == 0 and first_tile < tiles:
        _publish_rsigma(ws_ptr, rsigma_ptr, first_tile, part, M, eps, tag, totals, N * PAIRS, ROWS, PARTS)

    for tile in tl.range(first_tile, tiles, step, num_stages=STAGES, disable_licm=True):
        if PARTS > 1 and PHASE != 2 and not ONE_TILE:
            ahead = tile + 2 * step
            xs = _load_quads(x_ptr, tl.minimum(ahead, tiles - 1), M, first_col, N, stride, ROWS, COLS, EVEN, EVEN_ROWS, True)
            _publish_parts(xs, ws_ptr, ahead, part, tag, ahead < tiles, ROWS, PARTS, PAIRS, dtype)
        if PARTS > 1 and PHASE == 0 and not ONE_TILE:
            _publish_rsigma(
                ws_ptr, rsigma_ptr, tl.minimum(tile + step, last_tile), part, M, eps, tag, totals, N * PAIRS, ROWS, PARTS
            )
        if PHASE != 1 and tile < tiles:  # a branch, over which no pipeline moves what belongs behind the wait
            if PARTS == 1 or PHASE == 2 or not ONE_TILE:
                xs = _load_quads(x_ptr, tile, M, first_col, N, stride, ROWS, COLS, EVEN, EVEN_ROWS, False)
            rs = ()
            if PARTS == 1:
                for k in tl.static_range(4):
                    rows = tile * ROWS + quads * 4 + k
                    rs = rs + (tl.rsqrt(_squares(xs[k], PAIRS, dtype) * (1.0 / (N * PAIRS)) + eps),)
                    tl.store(rsigma_ptr + rows, rs[k], mask=rows < M)
            elif PHASE == 2:
                rs = _collect_rsigma(ws_ptr, rsigma_ptr, tile, part, M, eps, N * PAIRS, ROWS, PARTS)
            else:
                rs = _await_rsigma(ws_ptr, totals + tile * ROWS, tag, ROWS)
            largest = _write_tile(
                xs, rs, gamma, gamma_high, y_ptr, yt_ptr, scale, tile, first_col, live, M, N, FP8_MAX,
                ROWS, COLS, PAIRS, dtype, fp8, EVEN, EVEN_ROWS, PACKED, ONE_TILE,
            )  # fmt: skip
            amax = tl.maximum(amax, _folded(largest))
    if PHASE != 1:
        tl.atomic_max(amax_ptr, tl.max(amax), sem="relaxed")
    if PARTS > 1 and PHASE == 0:
        close_launch(ws_ptr, tag)


@triton.jit
def _await_rsigma(ws_ptr, first, tag, ROWS: tl.constexpr):
    """1 / rms of a tile's rows, four (ROWS / 4,) tensors, from word `first` on, as soon as all are published."""
    await_all(ws_ptr, first + tl.arange(0, ROWS), tag)
    rs = ()
    for k in tl.static_range(4):
        rs = rs + (published(ws_ptr, first + tl.arange(0, ROWS // 4) * 4 + k),)
    return rs


@triton.jit
def _rmsnorm_fwd_held(
    x_ptr, g_ptr, y_ptr, yt_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, ws_ptr, M, eps,
    N: tl.constexpr, stride: tl.constexpr, ZERO_CENTERED: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr, PHASE: tl.constexpr,
    EVEN_ROWS: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same by programs that hold a tile in registers while the next one comes, and so read nothing again.

    A turn of the loop sums the tile `ahead`, writes the one before, and adds up the parts of the one ahead, which the others have
    published meanwhile.
    """
    PARTS: tl.constexpr = (N + COLS - 1) // COLS
    EVEN: tl.constexpr = N % COLS == 0
    QUADS: tl.constexpr = ROWS // 4
    part = tl.program_id(0) % PARTS
    first_tile = tl.program_id(0) // PARTS
    step = tl.num_programs(0) // PARTS
    tiles = tl.cdiv(M, ROWS)
    totals = tiles * ROWS * PARTS
    quads = tl.arange(0, QUADS)
    lanes = tl.arange(0, COLS)
    first_col = part * COLS
    live = first_col + lanes < N
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0 and PHASE != 1:
        tl.store(scale_inv_ptr, reciprocal(scale))
    amax = tl.zeros((QUADS, COLS // 4), dtype=tl.float32)
    g = tl.load(g_ptr + first_col + lanes, mask=live, other=0, eviction_policy="evict_last")
    gamma = _gamma(g, 0, ZERO_CENTERED, PAIRS, dtype)
    gamma_high = _gamma(g, PAIRS - 1, ZERO_CENTERED, PAIRS, dtype)
    if PARTS > 1:
        tag = launch_tag(ws_ptr)

    nothing = tl.zeros((QUADS, COLS), dtype=x_ptr.dtype.element_ty)
    xs = (nothing, nothing, nothing, nothing)
    for ahead in tl.range(first_tile, tiles + step, step, num_stages=STAGES, disable_licm=True):
        next_xs = _load_quads(x_ptr, ahead, M, first_col, N, stride, ROWS, COLS, EVEN, EVEN_ROWS, False)
        if PARTS > 1 and PHASE != 2:
            _publish_parts(next_xs, ws_ptr, ahead, part, tag, ahead < tiles, ROWS, PARTS, PAIRS, dtype)
        if ahead < tiles + step:  # a branch, over which no pipeline moves what belongs behind the waits
            if PHASE != 1 and ahead > first_tile:
                tile = ahead - step
                rs = ()
                if PARTS == 1:
                    for k in tl.static_range(4):
                        rows = tile * ROWS + quads * 4 + k
                        rs = rs + (tl.rsqrt(_squares(xs[k], PAIRS, dtype) * (1.0 / (N * PAIRS)) + eps),)
                        tl.store(rsigma_ptr + rows, rs[k], mask=rows < M)
                elif PHASE == 2:
                    rs = _collect_rsigma(ws_ptr, rsigma_ptr, tile, part, M, eps, N * PAIRS, ROWS, PARTS)
                else:
                    rs = _await_rsigma(ws_ptr, totals + tile * ROWS, tag, ROWS)
                largest = _write_tile(
                    xs, rs, gamma, gamma_high, y_ptr, yt_ptr, scale, tile, first_col, live, M, N, FP8_MAX,
                    ROWS, COLS, PAIRS, dtype, fp8, EVEN, EVEN_ROWS, PACKED, True,
                )  # fmt: skip
                amax = tl.maximum(amax, _folded(largest))
            if PARTS > 1 and PHASE == 0 and ahead < tiles:
                _publish_rsigma(ws_ptr, rsigma_ptr, ahead, part, M, eps, tag, totals, N * PAIRS, ROWS, PARTS)
        xs = next_xs
    if PHASE != 1:
        tl.atomic_max(amax_ptr, tl.max(amax), sem="relaxed")
    if PARTS > 1 and PHASE == 0:
        close_launch(ws_ptr, tag)


@triton.jit
def _add_squares(sums, xs, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Four (ROWS / 4, COLS / 4) sums of squares, raised by those of a tile's four neighbours, which one thread holds."""
    raised = ()
    for k in tl.static_range(4):
        low = values(xs[k], 0, PAIRS, dtype)
        squares = low * low
        if PAIRS == 2:
            high = values(xs[k], 1, PAIRS, dtype)
            squares += high * high
        raised = raised + (sums[k] + tl.sum(tl.reshape(squares, (sums[k].shape[0], sums[k].shape[1], 4)), axis=2),)
    return raised


@triton.jit
def _rmsnorm_fwd_stripes(
    x_ptr, g_ptr, y_ptr, yt_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr, M, eps,
    N: tl.constexpr, stride: tl.constexpr, ZERO_CENTERED: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr,
    EVEN_ROWS: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same by programs that have whole rows, ROWS at a time, and so wait for nobody.

    While a stripe of rows is written, read again from L2, the squares of the program's next one are summed: memory is read and
    written all the time.
    """
    EVEN: tl.constexpr = N % COLS == 0
    QUADS: tl.constexpr = ROWS // 4
    stripes = tl.cdiv(M, ROWS)
    quads = tl.arange(0, QUADS)
    lanes = tl.arange(0, COLS)
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, reciprocal(scale))
    amax = tl.zeros((QUADS, COLS // 4), dtype=tl.float32)
    nothing = tl.zeros((QUADS, COLS // 4), dtype=tl.float32)
    s0, s1, s2, s3 = nothing, nothing, nothing, nothing
    for first_col in tl.range(0, N, COLS, num_stages=STAGES):
        xs = _load_quads(x_ptr, tl.program_id(0), M, first_col, N, stride, ROWS, COLS, EVEN, EVEN_ROWS, True)
        s0, s1, s2, s3 = _add_squares((s0, s1, s2, s3), xs, PAIRS, dtype)

    for stripe in range(tl.program_id(0), stripes, tl.num_programs(0)):
        ahead = stripe + tl.num_programs(0)
        rs = ()
        sums = (s0, s1, s2, s3)
        for k in tl.static_range(4):
            rows = stripe * ROWS + quads * 4 + k
            rs = rs + (tl.rsqrt(tl.sum(sums[k], axis=1) * (1.0 / (N * PAIRS)) + eps),)
            tl.store(rsigma_ptr + rows, rs[k], mask=rows < M)
        s0, s1, s2, s3 = nothing, nothing, nothing, nothing
        for first_col in tl.range(0, N, COLS, num_stages=STAGES):
            next_xs = _load_quads(x_ptr, ahead, M, first_col, N, stride, ROWS, COLS, EVEN, False, True)
            live = first_col + lanes < N
            g = tl.load(g_ptr + first_col + lanes, mask=live, other=0, eviction_policy="evict_last")
            gamma = _gamma(g, 0, ZERO_CENTERED, PAIRS, dtype)
            gamma_high = _gamma(g, PAIRS - 1, ZERO_CENTERED, PAIRS, dtype)
            xs = _load_quads(x_ptr, stripe, M, first_col, N, stride, ROWS, COLS, EVEN, EVEN_ROWS, False)
            largest = _write_tile(
                xs, rs, gamma, gamma_high, y_ptr, yt_ptr, scale, stripe, first_col, live, M, N, FP8_MAX,
                ROWS, COLS, PAIRS, dtype, fp8, EVEN, EVEN_ROWS, PACKED, False,
            )  # fmt: skip
            amax = tl.maximum(amax, _folded(largest))
            s0, s1, s2, s3 = _add_squares((s0, s1, s2, s3), next_xs, PAIRS, dtype)
    tl.atomic_max(amax_ptr, tl.max(amax), sem="relaxed")


@triton.jit
def _gamma(g, HALF: tl.constexpr, ZERO_CENTERED: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr):
    gamma = values(g, HALF, PAIRS, dtype)
    return (gamma + 1.0 if ZERO_CENTERED else gamma)[None, :]
