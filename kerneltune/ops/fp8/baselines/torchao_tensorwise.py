"""Published designs of tensor-wise quantization, written anew: the variants `baseline` and `staged`.

Blocks of elements in the order of memory: their maxima, then the cast; a transpose is a copy afterwards. `baseline`, torchao
pull request 4179, takes the maximum by atomic max into a cleared tensor. In `staged`, pull request 4389, every block writes
its own maximum, and one program takes the maximum of these. Left out: one group per block, at most 16 groups, 32-bit
offsets, at most 65536 blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.functions import constant
from kerneltune.kernel_lib.tl_lib import FP8_MAX, amax_to_scale, magnitude_to_fp32, to_fp8, wide
from kerneltune.ops.fp8.baselines.torchao import nothing_to_do
from kerneltune.ops.fp8.contract import FP8
from kerneltune.ops.fp8.kernels.tensorwise import finite, finite_magnitude
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Inputs, Outputs, Variant

_LANES = 1024
"""Blocks whose maximum a program takes at a time."""


@dataclass(frozen=True, slots=True)
class FlatConfig:
    """Config of a cast of blocks.

    Attributes:
        block: elements per program.
        warps: warps of a program.
    """

    block: int
    warps: int


@triton.jit
def _first_and_last(offs_ptr, first, last, C, G, GROUPS: tl.constexpr):
    """Return the groups of two elements between which lie elements of no other group."""
    groups = tl.arange(0, GROUPS)
    ends = tl.load(offs_ptr + groups, mask=groups < G, other=2147483647).to(tl.int64) * C
    return tl.sum((ends <= first).to(tl.int32), axis=0), tl.sum((ends <= last).to(tl.int32), axis=0)


@triton.jit
def _inside(offs_ptr, group, at, C):
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0).to(tl.int64) * C
    end = tl.load(offs_ptr + group).to(tl.int64) * C
    return (at >= start) & (at < end)


@triton.jit
def _magnitudes(x_ptr, at, elements):
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0)
    return magnitude_to_fp32(finite_magnitude(x), x.dtype)


@triton.jit
def _amax_flat(
    x_ptr, amax_ptr, offs_ptr, elements, C, G, JAGGED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    segment = wide(tl.program_id(1))
    first = wide(tl.program_id(0)) * BLOCK
    at = first + tl.arange(0, BLOCK)
    m = _magnitudes(x_ptr + segment * elements, at, elements)
    if JAGGED:
        last = tl.minimum(first + BLOCK, elements) - 1
        lo, hi = _first_and_last(offs_ptr, first, last, C, G, GROUPS)
        for group in range(lo, hi + 1):
            tl.atomic_max(amax_ptr + group, tl.max(tl.where(_inside(offs_ptr, group, at, C), m, 0.0), axis=0))
    else:
        tl.atomic_max(amax_ptr + segment, tl.max(m, axis=0))


@triton.jit
def _partials_flat(
    x_ptr, partial_ptr, offs_ptr, elements, C, G, JAGGED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the largest magnitude of every block, a row of blocks for every segment.

    A block that several groups share has a maximum of each group, of empty groups between them too: that of group g is at
    index block + g.
    """
    segment = wide(tl.program_id(1))
    block = tl.program_id(0)
    first = wide(block) * BLOCK
    at = first + tl.arange(0, BLOCK)
    m = _magnitudes(x_ptr + segment * elements, at, elements)
    if JAGGED:
        last = tl.minimum(first + BLOCK, elements) - 1
        lo, hi = _first_and_last(offs_ptr, first, last, C, G, GROUPS)
        for group in range(lo, hi + 1):
            tl.store(partial_ptr + block + group, tl.max(tl.where(_inside(offs_ptr, group, at, C), m, 0.0), axis=0))
    else:
        tl.store(partial_ptr + segment * tl.num_programs(0) + block, tl.max(m, axis=0))


@triton.jit
def _amax_of_partials(
    partial_ptr, amax_ptr, offs_ptr, blocks, C, JAGGED: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Take the largest of a segment's blocks, by one program; 0 of a group without rows."""
    segment = tl.program_id(0)
    if JAGGED:
        start = tl.load(offs_ptr + segment - 1, mask=segment > 0, other=0).to(tl.int64) * C
        end = tl.load(offs_ptr + segment).to(tl.int64) * C
        first = start // BLOCK + segment
        behind = tl.where(end > start, (end - 1) // BLOCK + 1 + segment, first)
    else:
        first = wide(segment) * blocks
        behind = first + blocks
    lanes = tl.arange(0, LANES)
    top = tl.zeros((LANES,), dtype=tl.float32)
    for at in range(first, behind, LANES):
        top = tl.maximum(top, tl.load(partial_ptr + at + lanes, mask=at + lanes < behind, other=0.0))
    tl.store(amax_ptr + segment, tl.max(top, axis=0))


@triton.jit
def _cast_flat(
    x_ptr, q_ptr, amax_ptr, scale_ptr, offs_ptr, elements, C, G,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, JAGGED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = wide(tl.program_id(1))
    first = wide(tl.program_id(0)) * BLOCK
    at = first + tl.arange(0, BLOCK)
    live = at < elements
    q_ptr += segment * elements
    x = finite(tl.load(x_ptr + segment * elements + at, mask=live, other=0.0))
    if JAGGED:
        last = tl.minimum(first + BLOCK, elements) - 1
        lo, hi = _first_and_last(offs_ptr, first, last, C, G, GROUPS)
        for group in range(lo, hi + 1):
            scale = amax_to_scale(tl.load(amax_ptr + group), FP8_MAX, POW2)
            q = to_fp8(x * scale, q_ptr.dtype.element_ty)
            tl.store(q_ptr + at, q, mask=live & _inside(offs_ptr, group, at, C))
        if tl.program_id(0) == 0:
            groups = tl.arange(0, GROUPS)
            amaxes = tl.load(amax_ptr + groups, mask=groups < G, other=0.0)
            tl.store(scale_ptr + groups, amax_to_scale(amaxes, FP8_MAX, POW2), mask=groups < G)
    else:
        scale = amax_to_scale(tl.load(amax_ptr + segment), FP8_MAX, POW2)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + segment, scale)
        tl.store(q_ptr + at, to_fp8(x * scale, q_ptr.dtype.element_ty), mask=live)


def run(inputs: Inputs, config: FlatConfig) -> Outputs:
    """Cast the tensor, the experts or the groups of the inputs; the maximum by atomic max."""
    return _run(inputs, config, _atomic)


def run_staged(inputs: Inputs, config: FlatConfig) -> Outputs:
    """Cast the tensor, the experts or the groups of the inputs; the maximum in two stages."""
    return _run(inputs, config, _staged)


def _run(inputs: Inputs, config: FlatConfig, amax_of: Callable[..., torch.Tensor]) -> Outputs:
    offs = inputs.get("offs")
    x = inputs["x"] if "x" in inputs else inputs["w"].transpose(1, 2)
    segments = x.shape[0] if x.ndim == 3 else 1
    scales = segments if offs is None else offs.shape[0]
    elements = x.numel() // segments
    q = torch.empty(x.shape, dtype=FP8[inputs["fp8_format"]], device=x.device)
    grid = (cdiv(elements, config.block), segments)
    groups = {"JAGGED": offs is not None, "GROUPS": next_power_of_2(scales)}
    ends = x if offs is None else offs
    size = (elements, x.shape[-1], scales)
    amax = amax_of(grid, x, ends, size, groups, config)
    scale = torch.empty_like(amax)
    _cast_flat[grid](
        x, q, amax, scale, ends, *size, FP8_MAX=FP8_MAX[inputs["fp8_format"]], POW2=inputs["pow2"], **groups,
        BLOCK=config.block, num_warps=config.warps,
    )  # fmt: skip
    outputs = {"scale": scale.reciprocal() if inputs["inverse"] else scale}
    if inputs["layout"] != "row":
        outputs["q_t"] = q.transpose(-2, -1).contiguous().transpose(-2, -1)
    if inputs["layout"] != "col":
        outputs["q"] = q.transpose(1, 2) if q.ndim == 3 else q
    return outputs


def _atomic(
    grid: tuple[int, int], x: torch.Tensor, ends: torch.Tensor, size: tuple[int, int, int], groups: dict[str, Any], c: FlatConfig
) -> torch.Tensor:
    amax = torch.zeros(size[2], dtype=torch.float32, device=x.device)
    _amax_flat[grid](x, amax, ends, *size, **groups, BLOCK=c.block, num_warps=c.warps)
    return amax


def _staged(
    grid: tuple[int, int], x: torch.Tensor, ends: torch.Tensor, size: tuple[int, int, int], groups: dict[str, Any], c: FlatConfig
) -> torch.Tensor:
    (blocks, segments), (_, width, scales) = grid, size
    amax = torch.empty(scales, dtype=torch.float32, device=x.device)
    partials = torch.empty(blocks * segments + scales, dtype=torch.float32, device=x.device)
    _partials_flat[grid](x, partials, ends, *size, **groups, BLOCK=c.block, num_warps=c.warps)
    _amax_of_partials[(scales,)](
        partials, amax, ends, blocks, width, JAGGED=groups["JAGGED"], BLOCK=c.block, LANES=_LANES, num_warps=8
    )  # fmt: skip
    return amax


_SPACE = constant({"block": (8192, 4096, 2048), "warps": (4,)})
"""The pull request's configs on NVIDIA; the first is the default."""
_DEFAULT = constant(FlatConfig(block=8192, warps=4))
"""The largest block that is offered."""

VARIANTS = (
    Variant("baseline", run, FlatConfig, _SPACE, default=_DEFAULT, unsupported=nothing_to_do),
    Variant("staged", run_staged, FlatConfig, _SPACE, default=_DEFAULT, unsupported=nothing_to_do),
)
