"""Straightforward kernels, on codes in their natural order: K tiles no longer than a group, shift-and-mask unpacking.

A grid over tiles (`baseline`), the contraction in equal parts (`splitk`), or equal parts of all work (`streamk`).
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kerneltune.device import sm_count
from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.tl_gemm import dot, is_last, sum_of_parts
from kerneltune.kernel_lib.tl_lib import only_if, wide
from kerneltune.kernel_lib.workspace import counters
from kerneltune.ops.int4_gemm.packing import check_sizes
from kerneltune.ops.int4_gemm.reference import group_size, not_empty
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Outputs, Space, Variant


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """Config of a product that has a program per tile.

    Attributes:
        tokens: rows of a tile of x.
        rows: rows of a tile of w.
        depth: k of both tiles.
        warps: warps of a program.
        stages: stages of the load pipeline.
    """

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class SplitConfig(PlainConfig):
    """Config of a product that has several programs per tile: `PlainConfig`, and a knob.

    Attributes:
        splits: programs that share a tile's k.
    """

    splits: int


@dataclass(frozen=True, slots=True)
class StreamKConfig(PlainConfig):
    """Config of a product whose programs have equal parts of all work: `PlainConfig`, and a knob.

    Attributes:
        ctas: programs per SM.
    """

    ctas: int


@dataclass(frozen=True, eq=False, repr=False)
class PlainTile(Constants):
    """The knobs of `PlainConfig` that a kernel needs."""

    tokens: int
    rows: int
    depth: int
    stages: int


@triton.jit
def _product(
    x_ptr, q_ptr, scale_ptr, zero_ptr, first_token, first_row, start, end, N, M, K, groups, GROUP,
    ZEROS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (tokens, rows) fp32 of the tiles start … end - 1 of k."""
    TOKENS: tl.constexpr = TILE.tokens
    ROWS: tl.constexpr = TILE.rows
    DEPTH: tl.constexpr = TILE.depth
    tokens = first_token + tl.arange(0, TOKENS)
    rows = first_row + tl.arange(0, ROWS)
    live = (rows < M)[:, None]
    x_ptrs = x_ptr + wide(tokens)[:, None] * K + tl.arange(0, DEPTH)[None, :]
    q_ptrs = q_ptr + wide(rows)[:, None] * (K // 2) + tl.arange(0, DEPTH // 2)[None, :]
    acc = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for tile in tl.range(start, end, num_stages=TILE.stages):
        k = tile * DEPTH
        x = tl.load(x_ptrs + k, mask=(tokens < N)[:, None], other=0.0)
        codes = tl.load(q_ptrs + k // 2, mask=live, other=0)
        at = wide(rows)[:, None] * groups + k // GROUP
        scale = tl.load(scale_ptr + at, mask=live, other=0.0).to(tl.float32)
        zero = tl.load(zero_ptr + at, mask=live, other=0.0).to(tl.float32) if ZEROS else tl.full((ROWS, 1), 8.0, tl.float32)
        q = tl.reshape(tl.join(codes & 15, codes >> 4), (ROWS, DEPTH)).to(tl.float32)
        w = ((q - zero) * scale).to(x.dtype)
        acc = dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def _store(y_ptr, bias_ptr, y, tokens, rows, N, M, BIAS: tl.constexpr):
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    tl.store(y_ptr + wide(tokens) * M + rows, y.to(y_ptr.dtype.element_ty), mask=(tokens < N) & (rows < M))


@triton.jit(do_not_specialize=["N"])
def _plain(
    x_ptr, q_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, counter_ptr, N, M, K, groups, GROUP,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write a tile of y, or a part of its k: SPLITS programs share a tile."""
    TOKENS: tl.constexpr = TILE.tokens
    ROWS: tl.constexpr = TILE.rows
    DEPTH: tl.constexpr = TILE.depth
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    row_tiles = tl.cdiv(M, ROWS)
    first_token, first_row = tile // row_tiles * TOKENS, tile % row_tiles * ROWS
    depth = K // DEPTH
    share = tl.cdiv(depth, SPLITS)
    y = _product(
        x_ptr, q_ptr, scale_ptr, zero_ptr, first_token, first_row, split * share, tl.minimum(split * share + share, depth),
        N, M, K, groups, GROUP, ZEROS, TILE)  # fmt: skip
    tokens = first_token + tl.arange(0, TOKENS)[:, None]
    rows = first_row + tl.arange(0, ROWS)[None, :]
    if SPLITS == 1:
        _store(y_ptr, bias_ptr, y, tokens, rows, N, M, BIAS)
    else:
        mask = (tokens < N) & (rows < M)
        offsets = wide(tokens) * M + rows
        tl.store(part_ptr + wide(split) * N * M + offsets, y, mask=mask, cache_modifier=".cg")
        if is_last(counter_ptr + tile, SPLITS):
            y = sum_of_parts(part_ptr + offsets, wide(N) * M, mask, SPLITS)
            _store(y_ptr, bias_ptr, y, tokens, rows, N, M, BIAS)


@triton.jit(do_not_specialize=["N"])
def _streamk(
    x_ptr, q_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, counter_ptr, N, M, K, groups, GROUP, share,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Multiply in program p the `share` pieces of k from p share on, by tiles; at most PARTS programs share a tile."""
    TOKENS: tl.constexpr = TILE.tokens
    ROWS: tl.constexpr = TILE.rows
    DEPTH: tl.constexpr = TILE.depth
    depth = K // DEPTH
    row_tiles = tl.cdiv(M, ROWS)
    at = tl.program_id(0) * share
    end = tl.minimum(at + share, row_tiles * tl.cdiv(N, TOKENS) * depth)
    while at < end:
        tile = at // depth
        until = tl.minimum(end, tile * depth + depth)
        first_token, first_row = tile // row_tiles * TOKENS, tile % row_tiles * ROWS
        y = _product(
            x_ptr, q_ptr, scale_ptr, zero_ptr, first_token, first_row, at - tile * depth, until - tile * depth,
            N, M, K, groups, GROUP, ZEROS, TILE)  # fmt: skip
        tokens = first_token + tl.arange(0, TOKENS)[:, None]
        rows = first_row + tl.arange(0, ROWS)[None, :]
        first = tile * depth // share
        parts = (tile * depth + depth - 1) // share - first + 1
        if parts == 1:
            _store(y_ptr, bias_ptr, y, tokens, rows, N, M, BIAS)
        else:
            mask = (tokens < N) & (rows < M)
            part_ptrs = part_ptr + wide(tokens) * M + rows
            tl.store(part_ptrs + wide(tl.program_id(0) - first) * N * M, y, mask=mask, cache_modifier=".cg")
            if is_last(counter_ptr + tile, parts):
                y = tl.load(part_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
                for part in tl.static_range(1, PARTS):
                    there = only_if(mask, part < parts)
                    y += tl.load(part_ptrs + part * (wide(N) * M), mask=there, other=0.0, cache_modifier=".cg")
                _store(y_ptr, bias_ptr, y, tokens, rows, N, M, BIAS)
        at = until


def run_baseline(inputs: Inputs, config: PlainConfig) -> Outputs:
    """Run a program per tile."""
    return _run_split(inputs, SplitConfig(config.tokens, config.rows, config.depth, config.warps, config.stages, splits=1))


def run_splitk(inputs: Inputs, config: SplitConfig) -> Outputs:
    """Run `splits` programs per tile."""
    return _run_split(inputs, config)


def _run_split(inputs: Inputs, c: SplitConfig) -> Outputs:
    arguments, tile, y, tiles = _arguments(inputs, c)
    parts = torch.empty((c.splits, *y.shape), dtype=torch.float32, device=y.device) if c.splits > 1 else y
    (N, M), K = y.shape, inputs["x"].shape[1]
    with counters(tiles, y.device) if c.splits > 1 else nullcontext(y) as counts:
        _plain[(tiles * c.splits,)](
            *arguments, y, parts, counts, N, M, K, arguments[2].shape[1], inputs["weight"].group, SPLITS=c.splits, **tile
        )
    return {"y": y}


def run_streamk(inputs: Inputs, c: StreamKConfig) -> Outputs:
    """Run `ctas` programs per SM, with equal parts of the work of all tiles."""
    arguments, tile, y, tiles = _arguments(inputs, c)
    (N, M), K = y.shape, inputs["x"].shape[1]
    depth = K // c.depth
    share = cdiv(tiles * depth, c.ctas * sm_count(y.device.type, y.device.index))
    most = cdiv(depth - 1, share) + 1
    parts = torch.empty((most, N, M), dtype=torch.float32, device=y.device)
    programs = cdiv(tiles * depth, share)
    with counters(tiles, y.device) as counts:
        _streamk[(programs,)](
            *arguments, y, parts, counts, N, M, K, arguments[2].shape[1], inputs["weight"].group, share,
            PARTS=next_power_of_2(most), **tile,
        )  # fmt: skip
    return {"y": y}


def _arguments(inputs: Inputs, c: PlainConfig) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], torch.Tensor, int]:
    """Return the inputs of a kernel, its tile, y, and the count of tiles."""
    x, (codes, scales, zeros), bias = inputs["x"], inputs["forms"].plain, inputs.get("bias")
    N, M = x.shape[0], codes.shape[0]
    y = torch.empty((N, M), dtype=x.dtype, device=x.device)
    tile = {
        "ZEROS": zeros is not None, "BIAS": bias is not None, "num_warps": c.warps,
        "TILE": PlainTile.of(tokens=c.tokens, rows=c.rows, depth=c.depth, stages=c.stages),
    }  # fmt: skip
    tiles = cdiv(N, c.tokens) * cdiv(M, c.rows)
    return (x, codes, scales, scales if zeros is None else zeros, y if bias is None else bias), tile, y, tiles


def baseline_space(case: Case) -> Space:
    """Offer tiles of one group or less."""
    N = case["N"]
    return {
        "tokens": tuple(t for t in (16, 32, 64, 128) if t == 16 or t < 2 * N),
        "rows": (32, 64, 128),
        "depth": tuple(d for d in (32, 64, 128) if group_size(case) % d == 0 and case["K"] % d == 0),
        "warps": (4, 8),
        "stages": (2, 3, 4, 5),
    }


def split_space(case: Case) -> Space:
    """Offer tiles of one group or less, and counts of parts."""
    return {**baseline_space(case), "splits": (2, 4, 8, 16)}


def stream_space(case: Case) -> Space:
    """Offer tiles of one group or less, and programs per SM."""
    return {**baseline_space(case), "ctas": (1, 2, 4)}


def invalid(case: Case, config: PlainConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    if group_size(case) % config.depth or case["K"] % config.depth:
        return f"tiles of {config.depth} k in groups of {group_size(case)}"
    if config.tokens * config.rows > 8192:
        return f"{config.tokens}x{config.rows} sums"
    splits = config.splits if isinstance(config, SplitConfig) else 1
    return f"{splits} parts of {case['K'] // config.depth}" if splits > case["K"] // config.depth else None


def _tile(case: Case) -> dict[str, int]:
    """Return the knobs that all three designs have."""
    check_sizes(case["M"], case["K"], group_size(case))
    depth = next(d for d in (64, 32) if group_size(case) % d == 0 and case["K"] % d == 0)
    return {"tokens": 16 if case["N"] <= 16 else 32, "rows": 64, "depth": depth, "warps": 4, "stages": 3}


def baseline_default(case: Case) -> PlainConfig:
    """Return a config for any shape, by rule."""
    return PlainConfig(**_tile(case))


def split_default(case: Case) -> SplitConfig:
    """Return a config for any shape, by rule: as many parts, to eight, as there are tiles of k."""
    tile = _tile(case)
    return SplitConfig(**tile, splits=min(8, case["K"] // tile["depth"]))


def stream_default(case: Case) -> StreamKConfig:
    """Return a config for any shape, by rule."""
    return StreamKConfig(**_tile(case), ctas=2)


VARIANTS = (
    Variant("baseline", run_baseline, PlainConfig, baseline_space, invalid, baseline_default, not_empty),
    Variant("splitk", run_splitk, SplitConfig, split_space, invalid, split_default, not_empty),
    Variant("streamk", run_streamk, StreamKConfig, stream_space, invalid, stream_default, not_empty),
)
