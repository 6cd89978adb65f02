"""Casts with one power-of-two scale per segment that read memory once: tiles are cast before their segment's scale is known.

`cast_early` casts every tile by the largest magnitude of its segment seen until then, its own included. Most tiles see the binade
of the segment's largest, so that their scale is right: the k-th to arrive only fails to if that binade is in none of the first
k, and not where a largest of that binade was expected. `cast_again`, the second launch, knows the largest and repeats the others.
Scales and bytes are those of two passes, whatever was expected and in whatever order tiles arrive. Nobody waits for anybody. May
import tensorwise_kernels, tiles, tl_lib, tl_exchange.
"""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_exchange import close_launch, launch_tag, publish, published, raised
from kerneltune.kernel_lib.tl_lib import amax_to_scale, load_constant, magnitude_to_fp32, reciprocal
from kerneltune.ops.fp8.tensorwise_kernels import largest_magnitude, load_quads, sanitised_words, store_tile
from kerneltune.ops.fp8.tiles import locate_block, start_of


@triton.jit
def cast_early(
    x_ptr, q_ptr, qt_ptr, offs_ptr, amax_ptr, ws_ptr, rows, G, total, C: tl.constexpr, stride: tl.constexpr,
    FP8_MAX: tl.constexpr, JAGGED: tl.constexpr, GROUPS_LOG2: tl.constexpr, ROWMAJOR: tl.constexpr, COLMAJOR: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr,
    EVEN_ROWS: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q and its transpose as from `_cast_segments`, some tiles by another scale. amax_ptr: None, or what is expected per segment.

    Workspace: word g the largest magnitude of segment g, word G + t the one that tile t was cast by.
    """
    tag = launch_tag(ws_ptr)
    stripes = tl.cdiv(C, COLS)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        group, stripe, _tiles, first_row, lo, hi = locate_block(
            tile, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS
        )  # fmt: skip
        xs = load_quads(x_ptr, stride, C, stripe, first_row, lo, hi, ROWS // 4, COLS, EVEN_ROWS, JAGGED, False)
        x0, x1, x2, x3 = xs
        largest = largest_magnitude((x0, x1, x2, x3), PAIRS, dtype)
        if PAIRS == 2:
            infinite: tl.constexpr = 0x7C00 if dtype == tl.float16 else 0x7F80
            if largest >= infinite:  # the tile holds NaN or infinity, and only then costs the making finite
                x0, x1, x2, x3 = sanitised_words((x0, x1, x2, x3), PAIRS, dtype)
                largest = largest_magnitude((x0, x1, x2, x3), PAIRS, dtype)
        seen = raised(ws_ptr, group, magnitude_to_fp32(largest, dtype), tag, hi > 0)
        if amax_ptr is not None:
            seen = tl.maximum(seen, tl.load(amax_ptr + group))
        if hi > 0:
            publish(ws_ptr, G + tile, seen, tag, hi > 0)
            store_tile(
                (x0, x1, x2, x3), amax_to_scale(seen, FP8_MAX, True), q_ptr, qt_ptr, rows, group, stripe, first_row, lo, hi, C,
                JAGGED, ROWMAJOR, COLMAJOR, ROWS, COLS, PAIRS, dtype, fp8, EVEN_ROWS, PACKED,
            )  # fmt: skip


@triton.jit
def cast_again(
    x_ptr, q_ptr, qt_ptr, scale_ptr, offs_ptr, amax_ptr, ws_ptr, rows, G, total, C: tl.constexpr, stride: tl.constexpr,
    FP8_MAX: tl.constexpr, INVERSE: tl.constexpr,
    JAGGED: tl.constexpr, GROUPS_LOG2: tl.constexpr, ROWMAJOR: tl.constexpr, COLMAJOR: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr, fp8: tl.constexpr,
    EVEN_ROWS: tl.constexpr, PACKED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The scales, and at amax_ptr the largest magnitudes, and once more the tiles that `cast_early` cast by another; closes the
    launch.

    A program looks at LANES tiles at a time, each as far from the next as there are programs: wrong ones lie side by side.
    """
    stripes = tl.cdiv(C, COLS)
    step = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    for group in range(tl.program_id(0), G, step):
        amax = published(ws_ptr, group)
        if JAGGED:
            amax = tl.where(start_of(offs_ptr, group) == load_constant(offs_ptr + group), 0.0, amax)
        if amax_ptr is not None:
            tl.store(amax_ptr + group, amax)
        scale = amax_to_scale(amax, FP8_MAX, True)
        tl.store(scale_ptr + group, reciprocal(scale) if INVERSE else scale)
    for first in range(tl.program_id(0), total, step * LANES):
        tiles = tl.minimum(first + lanes * step, total - 1)
        groups, _stripes, _tiles, _rows, _lo, his = locate_block(
            tiles, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS
        )  # fmt: skip
        right = amax_to_scale(published(ws_ptr, groups), FP8_MAX, True)
        wrong = (his > 0) & (amax_to_scale(published(ws_ptr, G + tiles), FP8_MAX, True) != right)
        wrong = wrong & (first + lanes * step < total)
        at = tl.min(tl.where(wrong, lanes, LANES), axis=0)
        while at < LANES:
            tile = first + at * step
            group, stripe, _t, first_row, lo, hi = locate_block(
                tile, total, offs_ptr, rows, stripes, G, JAGGED, GROUPS_LOG2, ROWS
            )  # fmt: skip
            xs = load_quads(x_ptr, stride, C, stripe, first_row, lo, hi, ROWS // 4, COLS, EVEN_ROWS, JAGGED, False)
            xs = sanitised_words(xs, PAIRS, dtype)
            store_tile(
                xs, amax_to_scale(published(ws_ptr, group), FP8_MAX, True), q_ptr, qt_ptr, rows, group, stripe, first_row, lo, hi,
                C, JAGGED, ROWMAJOR, COLMAJOR, ROWS, COLS, PAIRS, dtype, fp8, EVEN_ROWS, PACKED,
            )  # fmt: skip
            at = tl.min(tl.where(wrong & (lanes > at), lanes, LANES), axis=0)
    close_launch(ws_ptr, launch_tag(ws_ptr))
