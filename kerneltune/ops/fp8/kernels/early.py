"""Cast with one scale per segment; where scales are powers of two, read memory once.

`cast_early` casts every tile by the largest magnitude of its segment that was published until then, its own included: before
the scale of the segment is known. Most tiles see the binade of the segment's largest element, so that their scale is right.
The k-th tile to arrive sees another binade only if none of the first k tiles has an element of the segment's binade, and the
expected magnitude lies in another binade, too. `cast_again`, the second launch, knows the largest magnitude and repeats the
tiles that were cast by another scale. Scales and bytes equal the results of two passes, for any expected magnitude and any
order in which tiles arrive. No program spins.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.kernel_lib.arguments import check_apart, in_pairs
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT, aligned_size
from kerneltune.kernel_lib.launch import registers, resident, too_small_to_transpose
from kerneltune.kernel_lib.relaunch import Launch, relaunch
from kerneltune.kernel_lib.tl_exchange import close_launch, launch_tag, load_published, publish, publish_max_and_load
from kerneltune.kernel_lib.tl_lib import (
    FP8_MAX,
    TL_DTYPES,
    TL_FP8,
    amax_to_scale,
    magnitude,
    magnitude_to_fp32,
    reciprocal,
    since_sm_90,
)
from kerneltune.kernel_lib.workspace import workspace
from kerneltune.ops.fp8.contract import Cast
from kerneltune.ops.fp8.kernels.tensorwise import (
    Out,
    amax_segments,
    cast_segments,
    finite_tile,
    finite_words,
    largest_magnitude,
    load_quads,
    segment_of,
    store_tile,
    without_rows,
)
from kerneltune.ops.fp8.kernels.tiles import Groups, Tile, locate_block
from kerneltune.rounding import cdiv

if TYPE_CHECKING:
    from kerneltune.ops.fp8.tensorwise_2d import SegmentConfig

_REPEATERS_PER_SM = 4
"""Programs per SM of `cast_again`, which repeats few tiles, where `cast_early` has a program per tile."""

_TILES_TOGETHER = 128
"""Tiles whose scales a program of `cast_again` compares at once."""


def cast_with_one_scale(
    x: torch.Tensor,
    offs: torch.Tensor | None,
    q: torch.Tensor | None,
    q_t: torch.Tensor | None,
    scale: torch.Tensor,
    cast: Cast,
    config: "SegmentConfig | None",
    amax: torch.Tensor | None = None,
    aligned: bool = False,
) -> None:
    """Cast the rows of x in as many equal segments as there are scales, or in the groups of `offs`.

    1. On a GPU with powers of two: if a call of the same `key` (shapes, layouts, which tensors are None, config; no addresses)
       has compiled both kernels, launch them on the addresses of these tensors without the work of the host below.
    2. Check the config, choose pairs, count tiles and programs, and gather the keywords that the kernels share.
    3. With powers of two launch `cast_early` and `cast_again`, and keep them for the next call of this key; else launch
       `amax_segments` and `cast_segments`.

    Args:
        q, q_t: rows of the cast, and the cast column-major; None to leave the output out.
        config: None where x is empty.
        amax: the expected largest magnitude of each segment.
        aligned: whether q_t holds aligned groups. If there is one scale then, all groups share the scale.
    """
    if config is None or not x.numel():
        scale.fill_(cast.scale_of_nothing)
        return
    key: Hashable = None
    if x.is_cuda and cast.pow2:
        tensors = (x, q, q_t, scale, offs, amax)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        if not any(address % 16 for address in addresses):
            counts = (scale.shape[0], 0 if offs is None else offs.shape[0], *(address == 0 for address in addresses))
            key = (x.shape, x.stride(), x.dtype, x.device, counts, cast, config, aligned)
            launches = _KNOWN_LAUNCHES.get(key)
            if launches is not None:
                _launch_again(launches, x.device, addresses)
                return
    c, segments = config, scale.shape[0]
    if q_t is not None and (reason := too_small_to_transpose(c.rows, c.cols, c.warps)):
        raise ValueError(f"{config=}: {reason}")
    groups = segments if offs is None else offs.shape[0]
    if aligned and GROUP_ALIGNMENT % c.rows:
        raise ValueError(f"{config=}: rows must divide {GROUP_ALIGNMENT} where groups are aligned")
    rows = x.shape[0] // segments if offs is None else x.shape[0]
    ld = aligned_size(rows, groups) if aligned else rows
    pairs = _pairs(x, q, q_t)
    dtype = TL_DTYPES[x.dtype]
    check_apart("x", x, c.rows, pairs)
    if pairs == 2:
        x, q = x.view(torch.int32), None if q is None else q.view(torch.int16)
    cols = c.cols // pairs
    blocks = segments * cdiv(rows, c.rows) if offs is None else rows // c.rows + groups
    if aligned:
        blocks = ld // c.rows
    num_tiles = blocks * cdiv(x.shape[1], cols)
    programs = min(num_tiles, resident(x.device, c.ctas)) if c.ctas else num_tiles
    offs_or_any = x if offs is None else offs
    shared: dict[str, Any] = {
        "C": x.shape[1], "stride": x.stride(0), "num_warps": c.warps,
        "GROUPS": Groups.of(
            jagged=offs is not None, alignment=GROUP_ALIGNMENT if aligned else 0, one=aligned and segments == 1,
            log2=max(0, (groups - 1).bit_length()), even=offs is None and rows % c.rows == 0,
        ),
        "TILE": Tile.of(rows=c.rows, cols=cols, pairs=pairs, dtype=dtype),
    }  # fmt: skip
    if c.ctas:
        shared |= registers(c.warps, c.ctas)
    out = Out.of(
        fp8=TL_FP8[cast.fp8_format], fp8_max=FP8_MAX[cast.fp8_format], inverse=cast.inverse,
        rowmajor=q is not None, colmajor=q_t is not None, packed=ld % 4 == 0,
    )  # fmt: skip
    sizes = (rows, ld, groups, num_tiles)
    q_or_any, q_t_or_any = x if q is None else q, x if q_t is None else q_t.view(torch.uint8)
    if cast.pow2:
        if not c.ctas and (offs is None or aligned) and x.itemsize == 4:
            shared |= registers(c.warps, _at_most(c, 4 // pairs))
        with_out = {"OUT": out, **shared}
        repeaters = min(num_tiles, resident(x.device, c.ctas or _REPEATERS_PER_SM))
        casts = (x, q_or_any, q_t_or_any)
        early_options: dict[str, Any] = {**with_out, "STAGES": c.stages}
        again_options: dict[str, Any] = {**with_out, "LANES": _TILES_TOGETHER}
        pdl = {"launch_pdl": True} if since_sm_90() else {}
        with workspace(segments + num_tiles, x.device) as ws:
            first = cast_early[(programs,)](*casts, offs_or_any, amax, ws, *sizes, **early_options)
            second = cast_again[(repeaters,)](*casts, scale, offs_or_any, amax, ws, *sizes, **again_options, **pdl)
        if key is not None:
            sizes_by_name = dict(zip(("rows", "ld", "G", "total"), sizes, strict=True))
            _keep(key, segments + num_tiles, relaunch(cast_early, first, programs, 6, early_options | sizes_by_name),
                  relaunch(cast_again, second, repeaters, 7, again_options | sizes_by_name))  # fmt: skip
        return
    shared |= {"STAGES": c.stages}
    with workspace(segments, x.device) as ws:
        amax_segments[(programs,)](x, offs_or_any, ws, *sizes, **shared)
        cast_segments[(programs,)](x, q_or_any, q_t_or_any, scale, offs_or_any, ws, *sizes, OUT=out, **shared)


class _Launches(NamedTuple):
    """Hold what another launch of a cast needs: the number of workspace words, and the compiled kernels."""

    words: int
    early: Launch
    again: Launch


_KNOWN_LAUNCHES: dict[Hashable, _Launches] = {}
"""The kernels of each `key` of `cast_with_one_scale`."""
_MOST_LAUNCHES = 4096
"""Most entries of `_KNOWN_LAUNCHES`. A full dictionary is cleared, because sizes may change with every step."""


def _keep(key: Hashable, words: int, early: Launch | None, again: Launch | None) -> None:
    if early is None or again is None:
        return
    if len(_KNOWN_LAUNCHES) >= _MOST_LAUNCHES:
        _KNOWN_LAUNCHES.clear()
    _KNOWN_LAUNCHES[key] = _Launches(words, early, again)


def _launch_again(launches: _Launches, device: torch.device, addresses: list[int]) -> None:
    """Launch both kernels on tensors at these addresses: x, q, q_t, scale, offs and amax, 0 for none."""
    x, q, q_t, scale, offs, amax = addresses
    matrices, offs_and_amax = (x, q or x, q_t or x), (offs or x, amax or None)
    with workspace(launches.words, device) as ws:
        words = ws.data_ptr()
        launches.early(*matrices, *offs_and_amax, words)
        launches.again(*matrices, scale, *offs_and_amax, words)


def cast_with_known_scale(
    x: torch.Tensor,
    offs: torch.Tensor,
    q: torch.Tensor | None,
    q_t: torch.Tensor | None,
    scale_inv: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    fp8_format: str,
    c: "SegmentConfig",
) -> None:
    """Cast the groups of x by a scale known beforehand, in one launch; q_t holds aligned groups.

    Args:
        q, q_t: as in `cast_with_one_scale`.
        scale_inv: (1,), written.
        scale: (1,), the multiplier.
        amax: (1,), set to the larger of its value and the largest magnitude of the groups.
    """
    if q_t is not None and (reason := too_small_to_transpose(c.rows, c.cols, c.warps)):
        raise ValueError(f"{c}: {reason}")
    if GROUP_ALIGNMENT % c.rows:
        raise ValueError(f"{c}: rows must divide {GROUP_ALIGNMENT} where groups are aligned")
    (rows, groups), dtype = (x.shape[0], offs.shape[0]), TL_DTYPES[x.dtype]
    pairs = _pairs(x, q, q_t)
    check_apart("x", x, c.rows, pairs)
    if pairs == 2:
        x, q = x.view(torch.int32), None if q is None else q.view(torch.int16)
    ld, cols = aligned_size(rows, groups), c.cols // pairs
    total = ld // c.rows * cdiv(x.shape[1], cols)
    cast_known[(min(total, resident(x.device, c.ctas)) if c.ctas else total,)](
        x, x if q is None else q, x if q_t is None else q_t.view(torch.uint8), scale_inv, scale, amax, offs,
        rows, ld, groups, total,
        C=x.shape[1], stride=x.stride(0),
        GROUPS=Groups.of(jagged=True, alignment=GROUP_ALIGNMENT, one=True, log2=(groups - 1).bit_length(), even=False),
        OUT=Out.of(
            fp8=TL_FP8[fp8_format], fp8_max=FP8_MAX[fp8_format], inverse=True,
            rowmajor=q is not None, colmajor=q_t is not None, packed=True,
        ),
        TILE=Tile.of(rows=c.rows, cols=cols, pairs=pairs, dtype=dtype),
        STAGES=c.stages, num_warps=c.warps, **(registers(c.warps, c.ctas) if c.ctas else {}),
    )  # fmt: skip


def _pairs(x: torch.Tensor, q: torch.Tensor | None, q_t: torch.Tensor | None) -> int:
    """Return 2 where 16-bit elements are cast in pairs, if widths and addresses allow.

    Because both layouts of 66 columns were wrong on an H200 in pairs, an odd number of pairs that is written both ways is
    cast element by element.
    """
    both = q is not None and q_t is not None
    return 2 if in_pairs(x) and not (both and x.shape[1] % 4) else 1


def _at_most(c: "SegmentConfig", itemsize: int) -> int:
    """Return how many programs an SM has registers for: a thread takes 1.5 times its share of the tile, and 32 registers."""
    words = c.rows * c.cols * itemsize / (128 * c.warps)
    return max(1, int(65536 / (32 * c.warps * (1.5 * words + 32))))


@triton.jit
def cast_early(
    x_ptr, q_ptr, qt_ptr, offs_ptr, amax_ptr, ws_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write q and its transpose as `cast_segments` does, some tiles by another multiplier.

    amax_ptr: None, or the largest magnitudes expected per segment.

    Workspace: word g has the largest magnitude of segment g, word G + t the magnitude that tile t was cast by.
    """
    if since_sm_90():
        gdc_launch_dependents()  # programs of `cast_again` may become resident; they wait until this launch has ended
    tag = launch_tag(ws_ptr)
    stripes = tl.cdiv(C, TILE.cols)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        at = locate_block(tile, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
        group, _stripe, columns, _first_row, _lo, hi = at
        x0, x1, x2, x3 = load_quads(x_ptr, stride, C, at, GROUPS, TILE, False)
        x0, x1, x2, x3, largest = finite_tile(x0, x1, x2, x3, TILE)
        live = (hi > 0) | (columns > 0 if GROUPS.alignment else False)
        seen = publish_max_and_load(ws_ptr, segment_of(group, GROUPS.one), magnitude_to_fp32(largest, TILE.dtype), tag, live)
        if amax_ptr is not None:
            seen = tl.maximum(seen, tl.load(amax_ptr + group))
        if live:
            publish(ws_ptr, (1 if GROUPS.one else G) + tile, seen, tag, live)
            multiplier = amax_to_scale(seen, OUT.fp8_max, True)
            store_tile((x0, x1, x2, x3), multiplier, q_ptr, qt_ptr, ld, at, C, GROUPS, OUT, TILE)


@triton.jit
def cast_again(
    x_ptr, q_ptr, qt_ptr, scale_ptr, offs_ptr, amax_ptr, ws_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the scales and, at amax_ptr, the largest magnitudes; repeat the tiles that `cast_early` cast by another multiplier.

    A program looks at LANES tiles at a time, each as far from the next as there are programs, because wrong tiles lie side
    by side.
    """
    if since_sm_90():
        gdc_wait()
    stripes = tl.cdiv(C, TILE.cols)
    step = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    segments = 1 if GROUPS.one else G
    for group in range(tl.program_id(0), segments, step):
        amax = load_published(ws_ptr, group)
        if GROUPS.jagged:
            amax = tl.where(without_rows(offs_ptr, group, rows, G, GROUPS.one), 0.0, amax)
        if amax_ptr is not None:
            tl.store(amax_ptr + group, amax)
        multiplier = amax_to_scale(amax, OUT.fp8_max, True)
        tl.store(scale_ptr + group, reciprocal(multiplier) if OUT.inverse else multiplier)
    # Search LANES tiles together for a multiplier that turned out wrong, because most tiles are final and a load is slow.
    for first in range(tl.program_id(0), total, step * LANES):
        tiles = tl.minimum(first + lanes * step, total - 1)
        groups, _stripes, _tiles, _rows, _lo, his = locate_block(tiles, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
        final = amax_to_scale(load_published(ws_ptr, segment_of(groups, GROUPS.one)), OUT.fp8_max, True)
        wrong = (his > 0) & (amax_to_scale(load_published(ws_ptr, segments + tiles), OUT.fp8_max, True) != final)
        wrong = wrong & (first + lanes * step < total)
        lane = tl.min(tl.where(wrong, lanes, LANES), axis=0)
        while lane < LANES:
            at = locate_block(first + lane * step, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
            xs = finite_words(load_quads(x_ptr, stride, C, at, GROUPS, TILE, False), TILE)
            group = at[0]
            multiplier = amax_to_scale(load_published(ws_ptr, segment_of(group, GROUPS.one)), OUT.fp8_max, True)
            store_tile(xs, multiplier, q_ptr, qt_ptr, ld, at, C, GROUPS, OUT, TILE)
            lane = tl.min(tl.where(wrong & (lanes > lane), lanes, LANES), axis=0)
    close_launch(ws_ptr, launch_tag(ws_ptr))


@triton.jit
def cast_known(
    x_ptr, q_ptr, qt_ptr, scale_inv_ptr, scale_ptr, amax_ptr, offs_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write q and its transpose as `cast_segments` does, by the multiplier at scale_ptr; update amax, write the factor."""
    multiplier = tl.load(scale_ptr)
    stripes = tl.cdiv(C, TILE.cols)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, reciprocal(multiplier))
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        at = locate_block(tile, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
        xs = load_quads(x_ptr, stride, C, at, GROUPS, TILE, False)
        if at[2] > 0:
            if TILE.pairs == 2:
                largest = largest_magnitude(xs, TILE)
            else:  # NaN and infinity count, too
                m01, m23 = tl.maximum(magnitude(xs[0]), magnitude(xs[1])), tl.maximum(magnitude(xs[2]), magnitude(xs[3]))
                largest = tl.max(tl.max(tl.maximum(m01, m23), axis=1), axis=0)
            tl.atomic_max(amax_ptr, magnitude_to_fp32(largest, TILE.dtype), sem="relaxed")
            store_tile(xs, multiplier, q_ptr, qt_ptr, ld, at, C, GROUPS, OUT, TILE)
