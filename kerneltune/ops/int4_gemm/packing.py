"""Pack weights of four bits in the layout that `int4_gemm` reads, and quantize 16-bit weights to codes.

Codes q are 0 … 15; a weight is (q - z) s with a scale s and a zero point z per row and group of consecutive k; z is 8
if no zero points are given. The module launches no kernel of its own.
"""

import reprlib
from typing import NamedTuple

import torch

from kerneltune.kernel_lib.tl_lib import FP8_MAX
from kerneltune.rounding import cdiv

ROWS = 64
"""Rows in a block of the packed layout."""
DEPTH = 128
"""k in a block of the packed layout."""
GROUPS = (32, 64, 128)
"""Sizes of groups; a single group of all k is supported, too."""
MIDDLE = 8
"""The zero point where none are given."""

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""ORDER[i] is the index, among eight consecutive codes, of the code in nibble i: codes 2 j and 2 j + 1 lie 16 bits apart.
AWQ has the same order."""
MOST_CODE = 15
MOST_ZERO = 16
"""The largest code, of four bits, and the largest zero point: GPTQ stores z - 1 in four bits, so that z may be 16."""


class Codes(NamedTuple):
    """Hold an unpacked weight: codes (M, K) uint8; scales (M, K / group) fp16 or bf16; zeros as scales, uint8, or None for 8."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


class Int4Weight(NamedTuple):
    """Hold a packed weight, the operand of `int4_gemm`; all tensors are contiguous. `pack` makes it, `unpack` reverses `pack`.

    Attributes:
        packed: (⌈K/128⌉, ⌈M/64⌉, 8, 8, 4, 4) int32. Word [b, r, i, j, c, q] holds row 64 r + 8 j + i, k = 128 b + 32 q + 8 c
            + t for t = 0 … 7; code t = (0, 2, 4, 6, 1, 3, 5, 7)[p] in bits 4 p … 4 p + 3.
        scales: (B, ⌈M/64⌉, 8, G, 8), B = ⌈K/128⌉ and G = 128 / group, or G = 1 from group 128 on, where B counts the groups.
            [b, r, j, g, i] is the scale of row 64 r + 8 j + i and group G b + g. fp16 or bf16.
        zeros: the zero points in the shape and type of the scales; None for 8.
        rows, depth, group: M, K and the group size, K for one group.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    rows: int
    depth: int
    group: int


def check_tensors(*, optional: str = "", **values: object) -> None:
    """Check that arguments, by their names, are tensors; the optional argument may be None."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) and (value is not None or name != optional):
            raise ValueError(f"{name} must be a tensor, got {reprlib.repr(value)}")


def check_sizes(rows: int, depth: int, group: int) -> None:
    """Check that a weight of these sizes can be packed."""
    if group not in GROUPS and group != depth:
        raise ValueError(f"group must be {', '.join(map(str, GROUPS))} or all of k, got {group=} k={depth}")
    if depth < 1 or depth % group or depth % 32:
        raise ValueError(f"k must be a multiple of the group and of 32, got k={depth} {group=}")
    if rows < 1 or rows % 2:
        raise ValueError(f"m must be even and at least 2, got m={rows}")


def block_shape(rows: int, depth: int) -> tuple[int, ...]:
    """Return the shape of `Int4Weight.packed`."""
    return cdiv(depth, DEPTH), cdiv(rows, ROWS), 8, 8, 4, 4


def scale_shape(rows: int, depth: int, group: int) -> tuple[int, ...]:
    """Return the shape of `Int4Weight.scales`."""
    blocks = cdiv(depth, group if group not in GROUPS else DEPTH)
    return blocks, cdiv(rows, ROWS), 8, _groups_per_block(group), 8


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> Int4Weight:
    """Return codes in the packed layout; rows and k are padded to whole blocks with weights of 0.

    Args:
        codes: (M, K) uint8, 0 … 15.
        scales: (M, K / group) fp16 or bf16.
        zeros: (M, K / group) uint8, 0 … 16; None for 8.

    Raises:
        ValueError: a shape, type, device or value that does not fit, NaN among the scales included.
    """
    rows, depth, group = check_codes(codes, scales, zeros)
    check_sizes(rows, depth, group)
    kb, rb = block_shape(rows, depth)[:2]
    padded = codes.new_full((rb * ROWS, kb * DEPTH), MIDDLE)
    padded[:rows, :depth] = codes
    # (rb, j, i, kb, q, c, t) -> (kb, rb, i, j, c, q, t)
    split = padded.view(rb, 8, 8, kb, 4, 4, 8).permute(3, 0, 2, 1, 5, 4, 6)
    packed = into_words(split[..., list(ORDER)])
    z = None if zeros is None else _arrange(zeros.to(scales.dtype), rows, depth, group)
    return Int4Weight(packed, _arrange(scales, rows, depth, group), z, rows, depth, group)


def unpack(weight: Int4Weight) -> Codes:
    """Return the arguments of `pack`."""
    rows, depth, group = weight.rows, weight.depth, weight.group
    kb, rb = weight.packed.shape[:2]
    nibbles = out_of_words(weight.packed)[..., [ORDER.index(t) for t in range(8)]]  # (kb, rb, i, j, c, q, t)
    codes = nibbles.permute(1, 3, 2, 0, 5, 4, 6).reshape(rb * ROWS, kb * DEPTH)[:rows, :depth].contiguous()
    zeros = None if weight.zeros is None else _rearrange(weight.zeros, rows, depth // group).to(torch.uint8)
    return Codes(codes, _rearrange(weight.scales, rows, depth // group), zeros)


def quantise(w: torch.Tensor, group: int, zeros: bool = False) -> Codes:
    """Quantize weights (M, K) of fp16 or bf16 to the nearest codes, group by group.

    Codes are -8 … 7 times a scale that fits the largest, or with zero points 0 … 15 from the smallest to the largest.
    """
    if w.ndim != 2 or w.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"w must be (M, K) float16 or bfloat16, got {tuple(w.shape)} {w.dtype}")
    if not bool(w.isfinite().all()):
        raise ValueError(f"w must be finite, got {int((~w.isfinite()).sum())} that are not")
    rows, depth = w.shape
    check_sizes(rows, depth, group)
    groups = w.float().view(rows, -1, group)
    if not zeros:
        scales = (groups.abs().amax(-1) / 7.5).clamp(min=torch.finfo(w.dtype).tiny).to(w.dtype)
        codes = (groups / scales.float()[:, :, None]).round().clamp(-8, 7) + MIDDLE
        return Codes(codes.to(torch.uint8).view(rows, depth), scales)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=torch.finfo(w.dtype).tiny).to(w.dtype)
    z = (-low / scales.float()).round().clamp(0, 15)
    codes = ((groups / scales.float()[:, :, None]).round() + z[:, :, None]).clamp(0, 15)
    return Codes(codes.to(torch.uint8).view(rows, depth), scales, z.to(torch.uint8))


def to_e4m3(t: torch.Tensor, *, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in e4m3, and its scale (1,) or the scale of each row: an element is its e4m3 element times the scale."""
    scale = t.abs().amax(1 if by_row else (), keepdim=True).float().clamp(min=1e-12) / FP8_MAX["e4m3"]
    return (t.float() / scale).to(torch.float8_e4m3fn), scale.flatten()


def dequantise(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights (M, K): codes less zero points, exactly, times scales, in `dtype`."""
    codes, scales, zeros = unpack(weight)
    z = torch.full_like(scales, MIDDLE) if zeros is None else zeros
    steps = codes.view(weight.rows, -1, weight.group).to(dtype) - z.to(dtype)[:, :, None]
    return (steps * scales.to(dtype)[:, :, None]).view(weight.rows, weight.depth)


def check_codes(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> tuple[int, int, int]:
    """Check codes, scales and zero points as in `Codes`, and return M, K and the group size."""
    check_tensors(codes=codes, scales=scales, zeros=zeros, optional="zeros")
    if codes.ndim != 2 or codes.dtype != torch.uint8 or not codes.numel():
        raise ValueError(f"codes must be (M, K) uint8, got {tuple(codes.shape)} {codes.dtype}")
    if int(codes.max()) > MOST_CODE:
        raise ValueError(f"codes must be 0 … {MOST_CODE}, got {int(codes.max())}")
    rows, depth = codes.shape
    if scales.ndim != 2 or scales.shape[0] != rows or scales.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"scales must be ({rows}, groups) float16 or bfloat16, got {tuple(scales.shape)} {scales.dtype}")
    if not scales.shape[1] or depth % scales.shape[1]:
        raise ValueError(f"k must be a multiple of the group: k={depth} is not {scales.shape[1]} whole groups")
    if scales.device != codes.device or (zeros is not None and zeros.device != codes.device):
        where = ", ".join(str(t.device) for t in (codes, scales, zeros) if t is not None)
        raise ValueError(f"codes, scales and zeros must be on one device, got {where}")
    if not bool(scales.isfinite().all()):
        raise ValueError(f"scales must be finite, got {int((~scales.isfinite()).sum())} that are not")
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != torch.uint8):
        raise ValueError(f"zeros must be {tuple(scales.shape)} uint8, got {tuple(zeros.shape)} {zeros.dtype}")
    if zeros is not None and int(zeros.max()) > MOST_ZERO:
        raise ValueError(f"zeros must be 0 … {MOST_ZERO}, got {int(zeros.max())}")
    return rows, depth, depth // scales.shape[1]


def _groups_per_block(group: int) -> int:
    return DEPTH // group if group in GROUPS else 1


def _arrange(values: torch.Tensor, rows: int, depth: int, group: int) -> torch.Tensor:
    """Return values (M, groups) in the layout of `Int4Weight.scales`, padded with zeros."""
    blocks, rb, _, per_block, _ = scale_shape(rows, depth, group)
    padded = values.new_zeros((rb * ROWS, blocks * per_block))
    padded[:rows, : values.shape[1]] = values
    return padded.view(rb, 8, 8, blocks, per_block).permute(3, 0, 1, 4, 2).contiguous()  # (blocks, rb, j, g, i)


def _rearrange(values: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Return the values (M, groups) of `_arrange`."""
    blocks, rb, _, per_block, _ = values.shape
    return values.permute(1, 2, 4, 0, 3).reshape(rb * ROWS, blocks * per_block)[:rows, :groups].contiguous()


def into_words(nibbles: torch.Tensor) -> torch.Tensor:
    """Return words (…) int32 of eight nibbles (…, 8) each, the first nibble in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=nibbles.device)
    words = (nibbles.to(torch.int64) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def out_of_words(words: torch.Tensor) -> torch.Tensor:
    """Return the nibbles (…, 8) uint8 of words (…)."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)
