"""Mistakes that users commit in kernels of rows: strides, masks, tiles of a row, scales of groups, maxima."""

import functools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import SMALL, Knobs, Mistaken, mistakes_of, rows_of, values

from kerneltune.kernel_lib.agreement import close, within_a_step
from kerneltune.kernel_lib.check_values import vary_rows
from kerneltune.spec import Case, Inputs, Outputs

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="mistakes that Triton's interpreter finds")


@triton.jit
def _softmax(x_ptr, y_ptr, M, N, stride_m, stride_n, ROWS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    begin_of_row = row.to(tl.int64) * stride_m
    step = 1 if MISTAKE == "column stride left out" else stride_n
    other = 1.2e-38 if MISTAKE == "smallest positive number" else -float("inf")
    top, total = tl.full((ROWS, 1), other, tl.float32), tl.zeros((ROWS, 1), tl.float32)
    num_tiles = (N + BLOCK - 2) // BLOCK if MISTAKE == "cdiv minus 2" else tl.cdiv(N, BLOCK)
    for tile in range(num_tiles):
        at = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + begin_of_row + at.to(tl.int64) * step, (row < M) & (at < N), other=other)
        new = tl.maximum(top, tl.max(x, 1)[:, None])
        e = tl.where(at < N, tl.exp(x - new), 0.0)
        total = total * tl.exp(top - new) + tl.sum(e, 1)[:, None]
        top = new
    for tile in range(num_tiles):
        at = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (row < M) & (at < N)
        if MISTAKE == "second load without mask":
            x = tl.load(x_ptr + begin_of_row + at.to(tl.int64) * step)
        else:
            x = tl.load(x_ptr + begin_of_row + at.to(tl.int64) * step, mask)
        tl.store(y_ptr + row.to(tl.int64) * N + at, tl.exp(x - top) / total, mask)


def softmax(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = x.contiguous() if mistake == "contiguous is no copy" else torch.empty((M, N), device=x.device)
    rows = config.parts
    grid = M // rows if mistake == "grid rounded down" else triton.cdiv(M, rows)
    _softmax[(grid,)](x, y, M, N, x.stride(0), x.stride(1), rows, config.block, mistake)
    return {"y": y}


def columns_of(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Return a transposed view."""
    x = rows_of(case, device=device, seed=seed)["x"]
    return {"x": torch.empty((case["N"], case["M"]), device=device).copy_(x.T).T if device != "meta" else x.T.contiguous().T}


@triton.jit
def _layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    total, squares = tl.full((), 0.0, tl.bfloat16 if MISTAKE == "sum in bf16" else tl.float32), 0.0
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < N, other=0.0).to(tl.float32)
        total += tl.sum(x, 0).to(total.dtype)
        squares += tl.sum(x * x, 0)
    mean = total.to(tl.float32) / N
    variance = squares / N - mean * mean
    if MISTAKE != "difference of squares":
        variance = 0.0
        for begin in range(0, N, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row + at, at < N, other=0.0).to(tl.float32)
            d = x - mean if MISTAKE == "masked elements minus the mean" else tl.where(at < N, x - mean, 0.0)
            variance += tl.sum(d * d, 0) / N
    factor = tl.rsqrt(variance + 1e-5)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        at_weight = tl.arange(0, BLOCK) if MISTAKE == "weight of the first tile" else at
        x = tl.load(x_ptr + row + at, at < N, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + at_weight, at_weight < N, other=0.0)
        b = tl.load(b_ptr + at, at < N, other=0.0)
        y = ((x - mean) * factor + b) * w if MISTAKE == "bias before weight" else (x - mean) * factor * w + b
        tl.store(y_ptr + row + at, y.to(y_ptr.dtype.element_ty), at < N)


def layer_norm(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    _layer_norm[(x.shape[0],)](x, inputs["w"], inputs["b"], y, x.shape[1], config.block, mistake)
    return {"y": y}


def normed_rows(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = rows_of(case, device=device, seed=seed)["x"]
    return {"x": x, "w": values(seed + 1, device, case["N"]), "b": values(seed + 2, device, case["N"])}


def normed(inputs: Inputs) -> Outputs:
    x, w, b = (inputs[name].double() for name in ("x", "w", "b"))
    return {"y": torch.nn.functional.layer_norm(x, w.shape, w, b, 1e-5)}


def close_rows(_case: Case, _given: Inputs, got: Outputs, want: Outputs) -> list[str]:
    return close("y", got["y"], want["y"], 1e-3, 1e-3)


@triton.jit
def _quantize(x_ptr, q_ptr, s_ptr, M, N, GROUP: tl.constexpr, MISTAKE: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_groups = N // GROUP if MISTAKE == "groups rounded down" else tl.cdiv(N, GROUP)
    at = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(x_ptr + row * N + at, at < N, other=0.0)
    amax = tl.max(tl.abs(x), 0)
    largest = 240.0 if MISTAKE == "largest of fnuz" else 448.0
    floor = 1e-4 if MISTAKE == "amax of at least 1e-4" else 1e-30
    scale = tl.maximum(amax, floor) / largest
    if MISTAKE == "scale in fp16":
        scale = scale.to(tl.float16).to(tl.float32)
    if MISTAKE == "scale of the next group" and group + 1 < num_groups:
        tl.store(s_ptr + row * num_groups + group + 1, scale)
    elif MISTAKE == "scales transposed":
        tl.store(s_ptr + group * M + row, scale)
    else:
        tl.store(s_ptr + row * num_groups + group, scale)
    tl.store(q_ptr + row * N + at, (x / scale).to(tl.float8e4nv), at < N)


def quantize(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x, group = inputs["x"], 16
    M, N = x.shape
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(M, triton.cdiv(N, group))
    _quantize[(M, triton.cdiv(N, group))](x, q, scale, M, N, group, mistake)
    return {"q": q, "scale": scale}


def grouped(inputs: Inputs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    padded = torch.nn.functional.pad(x, (0, -N % 16)).reshape(M, -1, 16)
    scale = padded.abs().amax(2).clamp(min=1e-30) / 448
    return {"q": (padded / scale[:, :, None]).reshape(M, -1)[:, :N].to(torch.float8_e4m3fn), "scale": scale}


def compare_groups(_case: Case, _given: Inputs, got: Outputs, want: Outputs) -> list[str]:
    return [*close("scale", got["scale"], want["scale"], 1e-5, 0.0), *within_a_step("q", got["q"], want["q"])]


@triton.jit
def _scale(x_ptr, y_ptr, count, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    pid = tl.program_id(0)
    at = (pid if MISTAKE == "count in 32 bits" else pid.to(tl.int64)) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count)
    tl.store(y_ptr + at, (x * 3.0).to(tl.float32), at < count)


@functools.cache
def _block_of(M: int) -> list[int]:
    return []


def scale(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    if mistake == "view taken as contiguous":
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        flat = x
    else:
        flat = x.contiguous()
        y = torch.empty_like(flat)
    count = x.numel()
    grid = triton.cdiv(count, config.block)
    if mistake == "grid of the default block":
        grid = triton.cdiv(count, 512)
    if mistake == "grid cached by rows":
        kept = _block_of(x.shape[0])
        kept.append(grid)
        grid = kept[0]
    _scale[(grid,)](flat, y, count, config.block, mistake)
    return {"y": y}


def padded_rows(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = values(seed, device, case["M"], case["N"] + 3)
    return {"x": x[:, : case["N"]] if device == "meta" else vary_rows(x)[:, : case["N"]]}


@triton.jit
def _amax(x_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * N + at, at < N, other=-float("inf"))
    top = tl.max(x, 0)
    if MISTAKE == "bits of negative numbers":
        tl.atomic_max(y_ptr.to(tl.pointer_type(tl.int32)) + tl.program_id(0), top.to(tl.int32, bitcast=True))
    else:
        tl.atomic_max(y_ptr + tl.program_id(0), top)


def row_max(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = x.new_zeros(M) if mistake == "starts at zero" else x.new_full((M,), -float("inf"))
    _amax[(M, triton.cdiv(N, config.block))](x, y, N, config.block, mistake)
    return {"y": y}


@triton.jit
def _argmax(x_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    top, top_index = -float("inf"), 0
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < N, other=-float("inf"))
        best, index = tl.max(x, 0), tl.argmax(x, 0)
        if MISTAKE != "index in the tile":
            index += begin
        is_better = best >= top if MISTAKE == "tie goes to the last tile" else best > top
        top_index, top = tl.where(is_better, index, top_index), tl.where(is_better, best, top)
    tl.store(y_ptr + tl.program_id(0), top_index)


def argmax(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    _argmax[(x.shape[0],)](x, y, x.shape[1], config.block, mistake)
    return {"y": y}


def whole_rows(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = values(seed, device, case["M"], case["N"])
    return {"x": (x * 2).round()}


OPERATORS = {
    "softmax": Mistaken(
        softmax, columns_of, lambda inputs: {"y": inputs["x"].double().softmax(1)},
        ("column stride left out", "grid rounded down", "cdiv minus 2", "smallest positive number", "second load without mask",
         "contiguous is no copy"),
    ),
    "layer_norm": Mistaken(
        layer_norm, normed_rows, normed,
        ("sum in bf16", "difference of squares", "masked elements minus the mean", "weight of the first tile",
         "bias before weight"),
        close_rows,
    ),
    "quantize": Mistaken(
        quantize, rows_of, grouped,
        ("groups rounded down", "largest of fnuz", "amax of at least 1e-4", "scale in fp16", "scale of the next group",
         "scales transposed"),
        compare_groups,
    ),
    "scale": Mistaken(
        scale, padded_rows, lambda inputs: {"y": inputs["x"] * 3},
        ("count in 32 bits", "view taken as contiguous", "grid of the default block", "grid cached by rows"),
    ),
    "row_max": Mistaken(
        row_max, rows_of, lambda inputs: {"y": inputs["x"].amax(1)}, ("bits of negative numbers", "starts at zero")
    ),
    "argmax": Mistaken(
        argmax, whole_rows, lambda inputs: {"y": inputs["x"].argmax(1)}, ("index in the tile", "tie goes to the last tile"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), mistakes_of(OPERATORS))
def test_check_finds_a_mistake_in_rows(name: str, mistake: str) -> None:
    assert replace(OPERATORS[name], cases=SMALL).findings(mistake)


@pytest.mark.parametrize("name", OPERATORS)
def test_check_finds_nothing_in_right_rows(name: str) -> None:
    assert replace(OPERATORS[name], cases=SMALL).findings("") == []
