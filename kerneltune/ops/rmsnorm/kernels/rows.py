"""Define device functions of RMSNorm's forward pass on tiles of rows: load, sum, write, find the largest magnitude."""

from dataclasses import dataclass

import triton
import triton.language as tl

from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.tl_lib import held, is_cuda, quantize, reciprocal, wide


@dataclass(frozen=True, eq=False, repr=False)
class Output(Constants):
    """Describe the output y.

    Attributes:
        zero_centered: whether 1 is added to the weight.
        fp8: whether y is cast to fp8.
        fp8_max: the largest finite value of the fp8 type.
        keep: whether y is stored so that L2 has it for the next kernel.
    """

    zero_centered: bool
    fp8: bool
    fp8_max: float
    keep: bool


@dataclass(frozen=True, eq=False, repr=False)
class FullRows(Constants):
    """Hold the work of a program that writes full rows.

    Attributes:
        rows: rows of a program.
        cols: elements of a load.
        held: number of loads of x that stay in registers between the sum and the output. The other loads are read again from
            L2, `held` loads ahead of their use. If a matrix is added to x, all loads are held.
        gammas: number of loads of the weight that are issued ahead of their use; more loads take more registers, fewer wait
            for memory.
        by_warps: whether each warp publishes its own largest magnitude, which ends a large program without a barrier.
        policy: the eviction policy of the loads of x that are held.
    """

    rows: int
    cols: int
    held: int
    gammas: int
    by_warps: bool
    policy: str


@triton.jit
def inside(lanes, left, cols, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the mask of a tile: which of `lanes` rows, `left` of them in the matrix, and which columns exist."""
    if ROWS == 1 and N % COLS == 0:
        return tl.full((1, COLS), True, tl.int1)
    elif ROWS == 1:
        return (cols < N)[None, :]
    elif N % COLS == 0:
        return (lanes < left)[:, None]
    else:
        return (lanes < left)[:, None] & (cols < N)[None, :]


@triton.jit
def load_tile(
    ptr, tile, stride, cols, M, N, ROWS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Load (ROWS, COLS) of a matrix; zeros outside it."""
    rows = tl.arange(0, ROWS)
    mask = (rows < M - tile * ROWS)[:, None]
    if not EVEN:
        mask = mask & (cols < N)[None, :]
    base = wide(tile * ROWS) * stride
    return tl.load(ptr + base + (rows[:, None] * stride + cols[None, :]), mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_sum_tile(
    x_ptr, add_ptr, sum_ptr, tile, stride_xm, stride_am, cols, M, N, ROWS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Load a tile of x; if there is something to add, add it in fp32, round, and store the sum (M, N) as well."""
    x = load_tile(x_ptr, tile, stride_xm, cols, M, N, ROWS, EVEN)
    if add_ptr is not None:
        other = load_tile(add_ptr, tile, stride_am, cols, M, N, ROWS, EVEN)
        x = (x.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
        rows = tl.arange(0, ROWS)
        mask = (rows < M - tile * ROWS)[:, None]
        if not EVEN:
            mask = mask & (cols < N)[None, :]
        tl.store(sum_ptr + wide(tile * ROWS) * N + (rows[:, None] * N + cols[None, :]), x, mask=mask, cache_modifier=".cs")
    return x


@triton.jit
def load_chunk(x_rows, c, lanes, left, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, POLICY: tl.constexpr):
    """Load (ROWS, COLS) of x, columns [c * COLS, …); zeros outside it."""
    cols = c * COLS + tl.arange(0, COLS)
    return tl.load(x_rows + cols[None, :], mask=inside(lanes, left, cols, N, ROWS, COLS), other=0.0, eviction_policy=POLICY)


@triton.jit
def load_gamma(g_ptr, cols, N):
    """Load the weight as stored, or the value 1 without a weight; load it before the sums that it has to wait for."""
    if g_ptr is None:
        return tl.full((1,), 1.0, tl.float32)
    else:
        return tl.load(g_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")


@triton.jit
def gamma(g, ZERO_CENTERED: tl.constexpr):
    """Return the weight (1, C) in fp32 of a result of `load_gamma`."""
    g = g.to(tl.float32)
    return (g + 1.0 if ZERO_CENTERED else g)[None, :]


@triton.jit
def sum_of_squares(x):
    """Return the sums of x² (R,), in fp32, of a tile (R, C)."""
    x32 = x.to(tl.float32)
    return tl.sum(x32 * x32, axis=1)


@triton.jit
def max_magnitude(amax, y):
    """Return the larger of amax (R, C // k) and |y| (R, C) of k neighbours, which one thread holds; pass over NaN."""
    neighbours: tl.constexpr = y.shape[1] // amax.shape[1]
    return tl.maximum(amax, tl.max(tl.reshape(tl.abs(y), (y.shape[0], amax.shape[1], neighbours)), axis=2))


@triton.jit
def raise_amax(amax_ptr, amax, seen, BY_WARPS: tl.constexpr):
    """Take the atomic max of *amax_ptr and the tensor amax ≥ 0, unless *amax_ptr, or its earlier value `seen`, is large enough.

    BY_WARPS: every warp publishes its own magnitude, so that a large program ends without a barrier and the next program
    begins sooner.
    """
    if BY_WARPS and is_cuda():  # in any layout of `amax`; the bits of values ≥ 0 have the order of the values
        tl.inline_asm_elementwise(
            """{
            .reg .pred larger, still;
            .reg .b32 top, now, lane;
            redux.sync.max.u32 top, $1, 0xffffffff;
            setp.gt.f32 larger, top, $2;
            mov.u32 lane, %laneid;
            setp.eq.and.u32 larger, lane, 0, larger;
            @larger ld.relaxed.gpu.global.b32 now, [$3];
            setp.gt.and.f32 still, top, now, larger;
            @still red.relaxed.gpu.global.max.u32 [$3], top;
            mov.b32 $0, 0;
            }""",
            "=r,r,r,l", [amax, seen, amax_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    else:
        largest = tl.max(amax)
        if largest > tl.load(amax_ptr, cache_modifier=".cg"):
            tl.atomic_max(amax_ptr, largest, sem="relaxed")


@triton.jit
def write_rows(
    x, g, r, y_ptr, scale, mask, amax, OUTPUT: tl.constexpr
):  # fmt: skip
    """Store (rows, cols) of y; return the larger of amax and the magnitudes of y."""
    y = x.to(tl.float32) * r[:, None] * gamma(g, OUTPUT.zero_centered)
    if OUTPUT.fp8:
        amax = max_magnitude(amax, y)
        y = quantize(y, scale, OUTPUT.fp8_max, y_ptr.dtype.element_ty)
    tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier="" if OUTPUT.keep else ".cs")
    return amax


@triton.jit
def write_full_rows(
    tile,
    x_ptr, g_ptr, add_ptr, sum_ptr, y_ptr, rsigma_ptr, scale_ptr, amax_ptr, scale_inv_ptr,
    M, N: tl.constexpr, stride_xm, stride_am, eps, OUTPUT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the rows of a tile of y: add up the squares of the held elements, then scale and store them load by load."""
    ROWS: tl.constexpr = WHOLE.rows
    COLS: tl.constexpr = WHOLE.cols
    HELD: tl.constexpr = WHOLE.held
    GAMMAS: tl.constexpr = WHOLE.gammas
    tl.static_assert(add_ptr is None or HELD == (N + COLS - 1) // COLS)
    CHUNKS: tl.constexpr = (N + COLS - 1) // COLS
    lanes = tl.arange(0, ROWS)
    left = M - tile * ROWS
    cols = tl.arange(0, COLS)
    scale = 1.0
    if OUTPUT.fp8:
        scale = tl.load(scale_ptr)
        if tile == 0:
            tl.store(scale_inv_ptr, reciprocal(scale))
    amax = tl.zeros((ROWS, COLS // 8), dtype=tl.float32)
    x_rows = x_ptr + wide(tile * ROWS) * stride_xm + lanes[:, None] * stride_xm
    y_rows = y_ptr + wide(tile * ROWS) * N + lanes[:, None] * N
    squares = tl.zeros((ROWS, COLS), dtype=tl.float32)
    xs = ()
    gs = ()
    for c in tl.static_range(HELD, CHUNKS):
        x = load_chunk(x_rows, c, lanes, left, N, ROWS, COLS, "evict_last")
        squares += x.to(tl.float32) * x.to(tl.float32)
    for c in tl.static_range(HELD):
        x = load_chunk(x_rows, c, lanes, left, N, ROWS, COLS, WHOLE.policy)
        if add_ptr is not None:
            add_rows = add_ptr + wide(tile * ROWS) * stride_am + lanes[:, None] * stride_am
            other = load_chunk(add_rows, c, lanes, left, N, ROWS, COLS, WHOLE.policy)
            x = (x.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
            sum_rows = sum_ptr + wide(tile * ROWS) * N + lanes[:, None] * N
            mask = inside(lanes, left, c * COLS + cols, N, ROWS, COLS)
            tl.store(sum_rows + (c * COLS + cols)[None, :], x, mask=mask, cache_modifier="" if OUTPUT.keep else ".cs")
        squares += x.to(tl.float32) * x.to(tl.float32)
        xs = xs + (x,)
        if c < GAMMAS:
            gs = gs + (load_gamma(g_ptr, c * COLS + cols, N),)
    seen = 0.0
    if OUTPUT.fp8 and WHOLE.by_warps:
        seen = tl.load(amax_ptr, cache_modifier=".cg")  # long before it is needed
    r = tl.rsqrt(tl.sum(squares, axis=1) * (1.0 / N) + eps)
    tl.store(rsigma_ptr + tile * ROWS + lanes, r, mask=lanes < left)
    for c in tl.static_range(CHUNKS):
        mask = inside(lanes, left, c * COLS + cols, N, ROWS, COLS)
        if c + HELD < CHUNKS:
            xs = xs + (load_chunk(x_rows, c + HELD, lanes, left, N, ROWS, COLS, "evict_first"),)
        x = held(xs[c]) if HELD > 0 else xs[c]
        if c + GAMMAS < CHUNKS:
            gs = gs + (load_gamma(g_ptr, (c + GAMMAS) * COLS + cols, N),)
        y_tile = y_rows + (c * COLS + cols)[None, :]
        amax = write_rows(x, gs[c], r, y_tile, scale, mask, amax, OUTPUT)
    if OUTPUT.fp8:
        raise_amax(amax_ptr, amax, seen, WHOLE.by_warps)
