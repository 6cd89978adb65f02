"""Move rows between tokens and experts: each token's row to its K places, and the rows of its K places back.

A program takes ROWS tokens and COLS columns at a time. places (T, K) holds the row of each pair, -1 for a pair of no expert;
whatever it holds, no row outside the matrix is touched.
"""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_lib import wide


@triton.jit
def _place(places_ptr, tokens, T, M, choice, K: tl.constexpr):
    """Return the row of each token's choice, and whether the choice has a row."""
    place = tl.load(places_ptr + tokens * K + choice, mask=tokens < T, other=-1)
    return place, (place >= 0) & (place < M)


@triton.jit
def _clear_rest(y_ptr, last_ptr, tokens, T, M, cols, in_row, K: tl.constexpr, H: tl.constexpr):
    """Write zeros to rows behind the last expert: row total + p for each choice p = token * K + j of these tokens."""
    total = tl.load(last_ptr)
    if total < M:
        for choice in tl.static_range(K):
            row = tl.maximum(total, 0) + tokens * K + choice
            zeros = tl.zeros((tokens.shape[0], cols.shape[0]), dtype=y_ptr.dtype.element_ty)
            tl.store(y_ptr + (wide(row)[:, None] * H + cols[None, :]), zeros, mask=((tokens < T) & (row < M))[:, None] & in_row)


@triton.jit
def scatter_rows(
    x_ptr, y_ptr, places_ptr, last_ptr, T, M, stride,
    K: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write y[places[t, j]] = x[t]; x is read once. Rows of x lie `stride` elements apart."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    in_row = (cols < H)[None, :]
    x = tl.load(x_ptr + (wide(tokens)[:, None] * stride + cols[None, :]), mask=(tokens < T)[:, None] & in_row, other=0.0)
    for choice in tl.static_range(K):
        place, exists = _place(places_ptr, tokens, T, M, choice, K)
        tl.store(y_ptr + (wide(place)[:, None] * H + cols[None, :]), x, mask=exists[:, None] & in_row, cache_modifier=".cs")
    _clear_rest(y_ptr, last_ptr, tokens, T, M, cols, in_row, K, H)


@triton.jit
def combine_rows(
    y_ptr, out_ptr, places_ptr, weights_ptr, T, M, stride,
    K: tl.constexpr, H: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write out[t] = sum over j of weights[t, j] * y[places[t, j]], in fp32, in the order of the choices."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    in_row = (cols < H)[None, :]
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for choice in tl.static_range(K):
        place, exists = _place(places_ptr, tokens, T, M, choice, K)
        y = tl.load(
            y_ptr + (wide(place)[:, None] * stride + cols[None, :]), mask=exists[:, None] & in_row, other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        if WEIGHTED:
            weight = tl.load(weights_ptr + tokens * K + choice, mask=exists, other=0.0).to(tl.float32)
            acc += y.to(tl.float32) * weight[:, None]
        else:
            acc += y.to(tl.float32)
    to = out_ptr + (wide(tokens)[:, None] * H + cols[None, :])
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & in_row)


@triton.jit
def spread_gradient(
    dout_ptr, y_ptr, places_ptr, weights_ptr, last_ptr, dy_ptr, dweights_ptr, T, M, stride_d, stride_y,
    K: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write dy[places[t, j]] = weights[t, j] * dout[t] and dweights[t, j] = dout[t] · y[places[t, j]]; read each row once.

    LANES neighbouring columns, which one thread holds, are summed at once: a thread keeps COLS / LANES sums of each choice.
    """
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = ()
    for _ in tl.static_range(K):
        sums = sums + (tl.zeros((ROWS, COLS // LANES), dtype=tl.float32),)
    for first in range(0, H, COLS):
        cols = first + tl.arange(0, COLS)
        in_row = (cols < H)[None, :]
        at = wide(tokens)[:, None] * stride_d + cols[None, :]
        dout = tl.load(dout_ptr + at, mask=(tokens < T)[:, None] & in_row, other=0.0).to(tl.float32)
        added = ()
        for choice in tl.static_range(K):
            place, exists = _place(places_ptr, tokens, T, M, choice, K)
            mask = exists[:, None] & in_row
            y = tl.load(
                y_ptr + (wide(place)[:, None] * stride_y + cols[None, :]), mask=mask, other=0.0, eviction_policy="evict_first"
            )
            weight = tl.load(weights_ptr + tokens * K + choice, mask=exists, other=0.0).to(tl.float32)
            to = dy_ptr + (wide(place)[:, None] * H + cols[None, :])
            tl.store(to, (dout * weight[:, None]).to(dy_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
            products = tl.reshape(dout * y.to(tl.float32), (ROWS, COLS // LANES, LANES))
            added = added + (sums[choice] + tl.sum(products, axis=2),)
        sums = added
    if tl.load(last_ptr) < M:
        for first in range(0, H, COLS):
            cols = first + tl.arange(0, COLS)
            _clear_rest(dy_ptr, last_ptr, tokens, T, M, cols, (cols < H)[None, :], K, H)
    for choice in tl.static_range(K):
        _, exists = _place(places_ptr, tokens, T, M, choice, K)
        dweight = tl.where(exists, tl.sum(sums[choice], axis=1), 0.0)
        tl.store(dweights_ptr + tokens * K + choice, dweight.to(dweights_ptr.dtype.element_ty), mask=tokens < T)
