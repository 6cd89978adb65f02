"""Compute SwiGLU of token groups, or its gradient, and cast the result with one scale as `early.py` casts a matrix.

`gate_early` computes every tile and casts it by the largest magnitude that was published until then. `gate_again` knows the
largest magnitude of all, and computes and casts once more the tiles that were cast by another scale. A value is computed in
fp32, rounded to the operand's type, and then cast, so that the bytes equal the bytes of two launches. Memory is read once.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kerneltune.kernel_lib.arguments import check_apart, in_pairs
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT, aligned_size
from kerneltune.kernel_lib.launch import registers, resident, too_small_to_transpose
from kerneltune.kernel_lib.tl_exchange import close_launch, launch_tag, load_published, publish, publish_max_and_load
from kerneltune.kernel_lib.tl_lib import (
    FP8_MAX,
    TL_DTYPES,
    TL_FP8,
    amax_to_scale,
    is_cuda,
    magnitude_to_fp32,
    reciprocal,
    since_sm_90,
    values,
)
from kerneltune.kernel_lib.workspace import workspace
from kerneltune.ops.fp8.contract import Cast
from kerneltune.ops.fp8.kernels.tensorwise import Out, finite_tile, finite_words, load_quads, store_tile, without_rows
from kerneltune.ops.fp8.kernels.tiles import Groups, Tile, locate_block
from kerneltune.rounding import cdiv

if TYPE_CHECKING:
    from kerneltune.ops.fp8.tensorwise_2d import SegmentConfig

_REPEATERS_PER_SM = 4
"""Programs per SM of `gate_again`, which repeats few tiles, where `gate_early` has a program per tile."""

_TILES_TOGETHER = 128
"""Tiles whose scales a program of `gate_again` compares at once."""


def gate_and_cast(
    dy: torch.Tensor | None,
    x: torch.Tensor,
    offs: torch.Tensor,
    q: torch.Tensor,
    q_t: torch.Tensor | None,
    scale: torch.Tensor,
    cast: Cast,
    c: "SegmentConfig",
) -> None:
    """Compute and cast the rows of groups that end at `offs`.

    Args:
        dy: (M, N), the gradient of the gated rows; None to gate.
        x: (M, 2N), gate, then up.
        q: (M, N), or (M, 2N) of the gradient.
        q_t: aligned groups of q's columns, or None.
        scale: (1,), written.
    """
    if q_t is not None and (reason := too_small_to_transpose(c.rows, c.cols, c.warps)):
        raise ValueError(f"{c}: {reason}")
    if GROUP_ALIGNMENT % c.rows:
        raise ValueError(f"{c}: rows must divide {GROUP_ALIGNMENT} where groups are aligned")
    M, N, groups, dtype = x.shape[0], x.shape[1] // 2, offs.shape[0], TL_DTYPES[x.dtype]
    if dy is not None and N % c.cols:
        raise ValueError(f"{c}: cols must divide the {N} columns of a gradient's half")
    pairs = 2 if in_pairs(x) and N % 4 == 0 and (dy is None or in_pairs(dy)) else 1
    check_apart("x", x, c.rows, pairs)
    if dy is not None:
        check_apart("dy", dy, c.rows, pairs)
    if pairs == 2:
        x, q, dy = x.view(torch.int32), q.view(torch.int16), None if dy is None else dy.view(torch.int32)
    cols, width, ld = c.cols // pairs, N // pairs, aligned_size(M, groups)
    num_tiles = ld // c.rows * cdiv(width, cols)
    programs = min(num_tiles, resident(x.device, c.ctas)) if c.ctas else num_tiles
    shared: dict[str, Any] = {
        "C": width, "stride": x.stride(0), "stride_dy": 0 if dy is None else dy.stride(0), "num_warps": c.warps,
        "GROUPS": Groups.of(
            jagged=True, alignment=GROUP_ALIGNMENT, one=True, log2=max(0, (groups - 1).bit_length()), even=False
        ),
        "OUT": Out.of(
            fp8=TL_FP8[cast.fp8_format], fp8_max=FP8_MAX[cast.fp8_format], inverse=cast.inverse,
            rowmajor=True, colmajor=q_t is not None, packed=True,
        ),
        "TILE": Tile.of(rows=c.rows, cols=cols, pairs=pairs, dtype=dtype),
        **(registers(c.warps, c.ctas) if c.ctas else {}),
    }  # fmt: skip
    operands = (dy, x, q, q if q_t is None else q_t.view(torch.uint8))
    sizes = (M, ld, groups, num_tiles)
    repeaters = min(num_tiles, resident(x.device, c.ctas or _REPEATERS_PER_SM))
    pdl = {"launch_pdl": True} if since_sm_90() else {}
    with workspace(1 + num_tiles, x.device) as ws:
        gate_early[(programs,)](*operands, offs, ws, *sizes, STAGES=c.stages, **shared)
        gate_again[(repeaters,)](*operands, scale, offs, ws, *sizes, LANES=_TILES_TOGETHER, **shared, **pdl)


_UNPACK_BF16 = "shl.b32 {0}l, {1}, 16; and.b32 {0}h, {1}, 0xffff0000;"
_UNPACK_FP16 = "{{ .reg .b16 l, h; mov.b32 {{l, h}}, {1}; cvt.f32.f16 {0}l, l; cvt.f32.f16 {0}h, h; }}"
_SIGMOID = """mul.f32 s{0}, g{0}, 0fBFB8AA3B; ex2.approx.ftz.f32 s{0}, s{0};
    add.f32 s{0}, s{0}, 0f3F800000; rcp.approx.ftz.f32 s{0}, s{0};"""
"""1 / (1 + exp2(-log2(e) * g)): without the scaling of Triton's exp and division the values that overflow are the same."""

# g * sigmoid(g) * u, and its gradients: u becomes the gradient of the gate, d the gradient of the up projection
_GATE = _SIGMOID + " mul.f32 g{0}, g{0}, s{0}; mul.f32 g{0}, g{0}, u{0};"
_GATE_GRADIENT = (
    _SIGMOID
    + """ mul.f32 g{0}, g{0}, s{0}; mul.f32 u{0}, d{0}, u{0}; mul.f32 d{0}, d{0}, g{0};
    sub.f32 t{0}, 0f3F800000, s{0}; fma.rn.f32 s{0}, g{0}, t{0}, s{0}; mul.f32 u{0}, u{0}, s{0};"""
)


def _ptx_of_pairs(unpack: str, packed: str, operands: dict[str, str], compute: str, results: str) -> str:
    """Return PTX that unpacks words of two 16-bit elements, computes each half in fp32, and packs the results.

    Args:
        unpack: the PTX that unpacks a word; packed: the type of a word's halves.
        operands: letter of the registers of an operand's halves -> the word.
        compute: the PTX that computes a half; results: letters of the registers that it leaves results in.
    """
    names = ", ".join(f"{name}{half}" for name in "gudst" for half in "lh")
    lines = [unpack.format(name, word) for name, word in operands.items()]
    lines += [compute.format(half) for half in "lh"]
    lines += [f"cvt.rn.{packed}.f32 ${place}, {name}h, {name}l;" for place, name in enumerate(results)]
    return "\n".join([f"{{ .reg .f32 {names};", *lines, "}"])


# The word of each operand by its letter (g gate, u up, d gradient of y), and the PTX of each type.
_GATED = {"g": "$1", "u": "$2"}
_DIFFERENTIATED = {"d": "$2", "g": "$3", "u": "$4"}
_GATE_BF16 = tl.constexpr(_ptx_of_pairs(_UNPACK_BF16, "bf16x2", _GATED, _GATE, "g"))
_GATE_FP16 = tl.constexpr(_ptx_of_pairs(_UNPACK_FP16, "f16x2", _GATED, _GATE, "g"))
_GRADIENT_BF16 = tl.constexpr(_ptx_of_pairs(_UNPACK_BF16, "bf16x2", _DIFFERENTIATED, _GATE_GRADIENT, "ud"))
_GRADIENT_FP16 = tl.constexpr(_ptx_of_pairs(_UNPACK_FP16, "f16x2", _DIFFERENTIATED, _GATE_GRADIENT, "ud"))


@triton.jit
def _pair(low, high, dtype: tl.constexpr):
    """Round fp32 values to a 16-bit type and put two by two into words."""
    lower = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16) | lower


@triton.jit
def _swiglu(gate, up):
    """Return silu(gate) * up; all fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gate_gradient(dy, gate, up):
    """Return the gradients of gate and up; all fp32."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    return dy * up * (sigmoid + silu * (1.0 - sigmoid)), dy * silu


@triton.jit
def _gated(gate, up, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Return `_swiglu` of sub-tiles out of `load_quads`, in their type."""
    if PAIRS == 1:
        return _swiglu(gate.to(tl.float32), up.to(tl.float32)).to(dtype)
    elif is_cuda():
        text: tl.constexpr = _GATE_FP16 if dtype == tl.float16 else _GATE_BF16
        return tl.inline_asm_elementwise(text, "=r,r,r", [gate, up], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low = _swiglu(values(gate, 0, PAIRS, dtype), values(up, 0, PAIRS, dtype))
        return _pair(low, _swiglu(values(gate, 1, PAIRS, dtype), values(up, 1, PAIRS, dtype)), dtype)


@triton.jit
def _gated_gradient(dy, gate, up, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Return `_gate_gradient` of sub-tiles out of `load_quads`, in their type."""
    if PAIRS == 1:
        dgate, dup = _gate_gradient(dy.to(tl.float32), gate.to(tl.float32), up.to(tl.float32))
        return dgate.to(dtype), dup.to(dtype)
    elif is_cuda():
        text: tl.constexpr = _GRADIENT_FP16 if dtype == tl.float16 else _GRADIENT_BF16
        return tl.inline_asm_elementwise(text, "=r,=r,r,r,r", [dy, gate, up], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        dgate, dup = _gate_gradient(values(dy, 0, PAIRS, dtype), values(gate, 0, PAIRS, dtype), values(up, 0, PAIRS, dtype))
        dgate1, dup1 = _gate_gradient(values(dy, 1, PAIRS, dtype), values(gate, 1, PAIRS, dtype), values(up, 1, PAIRS, dtype))
        return _pair(dgate, dgate1, dtype), _pair(dup, dup1, dtype)


@triton.jit
def _compute(
    dy_ptr, x_ptr, stride: tl.constexpr, stride_dy: tl.constexpr, C: tl.constexpr, at, GROUPS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return the tile `at`, gated, as four sub-tiles as `load_quads` does; of a gradient four of each half."""
    gates = load_quads(x_ptr, stride, C, at, GROUPS, TILE, False)
    ups = load_quads(x_ptr + C, stride, C, at, GROUPS, TILE, False)
    tiles = ()
    if dy_ptr is None:
        for k in tl.static_range(4):
            tiles = tiles + (_gated(gates[k], ups[k], TILE.pairs, TILE.dtype),)
    else:
        dys = load_quads(dy_ptr, stride_dy, C, at, GROUPS, TILE, False)
        second = ()
        for k in tl.static_range(4):
            dgate, dup = _gated_gradient(dys[k], gates[k], ups[k], TILE.pairs, TILE.dtype)
            tiles, second = tiles + (dgate,), second + (dup,)
        tiles = tiles + second
    return tiles


@triton.jit
def _second_half(at, stripes):
    """Return `at`, a tile of the gate's gradient, moved to the tile of the up projection's gradient."""
    group, stripe, columns, first_row, lo, hi = at
    return group, stripe + stripes, columns, first_row, lo, hi


@triton.jit
def gate_early(
    dy_ptr, x_ptr, q_ptr, qt_ptr, offs_ptr, ws_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    stride_dy: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write q and its transpose, some tiles by another multiplier than the multiplier of all groups.

    C columns of a half; x, dy, q, C and strides count words.
    Workspace: word 0 has the largest magnitude of all groups, word 1 + t the magnitude that tile t was cast by.
    """
    if since_sm_90():
        gdc_launch_dependents()  # programs of `gate_again` may become resident; they wait until this launch has ended
    tag = launch_tag(ws_ptr)
    stripes = tl.cdiv(C, TILE.cols)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        at = locate_block(tile, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
        xs = _compute(dy_ptr, x_ptr, stride, stride_dy, C, at, GROUPS, TILE)
        x0, x1, x2, x3, largest = finite_tile(xs[0], xs[1], xs[2], xs[3], TILE)
        if dy_ptr is not None:
            y0, y1, y2, y3, larger = finite_tile(xs[4], xs[5], xs[6], xs[7], TILE)
            largest = tl.maximum(largest, larger)
        live = (at[5] > 0) | (at[2] > 0)
        seen = publish_max_and_load(ws_ptr, 0, magnitude_to_fp32(largest, TILE.dtype), tag, live)
        if live:
            publish(ws_ptr, 1 + tile, seen, tag, live)
            multiplier = amax_to_scale(seen, OUT.fp8_max, True)
            width: tl.constexpr = C if dy_ptr is None else 2 * C
            store_tile((x0, x1, x2, x3), multiplier, q_ptr, qt_ptr, ld, at, width, GROUPS, OUT, TILE)
            if dy_ptr is not None:
                store_tile((y0, y1, y2, y3), multiplier, q_ptr, qt_ptr, ld, _second_half(at, stripes), width, GROUPS, OUT, TILE)


@triton.jit
def gate_again(
    dy_ptr, x_ptr, q_ptr, qt_ptr, scale_ptr, offs_ptr, ws_ptr, rows, ld, G, total, C: tl.constexpr, stride: tl.constexpr,
    stride_dy: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the scale; cast again the tiles that `gate_early` cast by another multiplier, found as `cast_again` finds them."""
    if since_sm_90():
        gdc_wait()
    stripes = tl.cdiv(C, TILE.cols)
    step = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    amax = tl.where(without_rows(offs_ptr, 0, rows, G, True), 0.0, load_published(ws_ptr, 0))
    multiplier = amax_to_scale(amax, OUT.fp8_max, True)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, reciprocal(multiplier) if OUT.inverse else multiplier)
    for first in range(tl.program_id(0), total, step * LANES):
        tiles = tl.minimum(first + lanes * step, total - 1)
        _groups, _stripes, _widths, _rows, _lo, his = locate_block(tiles, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
        wrong = (his > 0) & (amax_to_scale(load_published(ws_ptr, 1 + tiles), OUT.fp8_max, True) != multiplier)
        wrong = wrong & (first + lanes * step < total)
        lane = tl.min(tl.where(wrong, lanes, LANES), axis=0)
        while lane < LANES:
            at = locate_block(first + lane * step, total, offs_ptr, rows, stripes, G, GROUPS, TILE.rows)
            xs = _compute(dy_ptr, x_ptr, stride, stride_dy, C, at, GROUPS, TILE)
            width: tl.constexpr = C if dy_ptr is None else 2 * C
            words = finite_words((xs[0], xs[1], xs[2], xs[3]), TILE)
            store_tile(words, multiplier, q_ptr, qt_ptr, ld, at, width, GROUPS, OUT, TILE)
            if dy_ptr is not None:
                words = finite_words((xs[4], xs[5], xs[6], xs[7]), TILE)
                store_tile(words, multiplier, q_ptr, qt_ptr, ld, _second_half(at, stripes), width, GROUPS, OUT, TILE)
            lane = tl.min(tl.where(wrong & (lanes > lane), lanes, LANES), axis=0)
    close_launch(ws_ptr, launch_tag(ws_ptr))
