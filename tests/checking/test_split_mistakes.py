"""Mistakes in kernels that divide their work: counted splits, scans in tiles, zero points, positions of tokens."""

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import Knobs, Mistaken, mistakes_of, rows_of, values

from kerneltune.kernel_lib.agreement import close, within_a_step
from kerneltune.spec import Case, Inputs, Outputs

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="mistakes that Triton's interpreter finds")


@triton.jit
def _counted(x_ptr, y_ptr, part_ptr, count_ptr, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, split, size, total = tl.program_id(0), tl.program_id(1), tl.cdiv(N, SPLITS), 0.0
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = (at < size) & (split * size + at < N)
        total += tl.sum(tl.load(x_ptr + row.to(tl.int64) * N + split * size + at, mask, other=0.0), 0)
    tl.store(part_ptr + row * SPLITS + split, total)
    if MISTAKE == "counter of all rows":
        done = tl.atomic_add(count_ptr, 1)
    else:
        done = tl.atomic_add(count_ptr + row, 1, sem="relaxed" if MISTAKE == "relaxed counter" else "acq_rel")
    if done == (SPLITS if MISTAKE == "a split too late" else SPLITS - 1):
        tl.store(y_ptr + row, tl.sum(tl.load(part_ptr + row * SPLITS + tl.arange(0, SPLITS)), 0))
        if MISTAKE != "counter kept":
            tl.store(count_ptr + row, 0)


COUNTERS: dict[tuple[object, ...], torch.Tensor] = {}


def counted(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    key = mistake, x.shape[0], config.parts, x.is_meta
    count = COUNTERS.setdefault(key, torch.zeros(x.shape[0], dtype=torch.int32, device=x.device))
    y, part = x.new_empty(x.shape[0]), x.new_empty(x.shape[0], config.parts)
    _counted[(x.shape[0], config.parts)](x, y, part, count, x.shape[1], config.parts, config.block, mistake)
    return {"y": y}


@triton.jit
def _scan(x_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, carry = tl.program_id(0).to(tl.int64) * N, 0.0
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < N, other=0.0)
        sums = tl.cumsum(x, 0)
        if MISTAKE == "exclusive after the first tile":
            sums -= x * (begin > 0)
        tl.store(y_ptr + row + at, sums + carry, at < N)
        carry = tl.sum(x, 0) if MISTAKE == "carry of the last tile" else carry + tl.sum(x, 0)


def scan(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    y = torch.empty_like(inputs["x"])
    _scan[(y.shape[0],)](inputs["x"], y, y.shape[1], config.block, mistake)
    return {"y": y}


@triton.jit
def _int8(x_ptr, q_ptr, scale_ptr, zero_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, low, high = tl.program_id(0).to(tl.int64) * N, 0.0, 0.0
    if MISTAKE == "range without zero":
        low, high = float("inf"), -float("inf")
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        low = tl.minimum(low, tl.min(tl.load(x_ptr + row + at, at < N, other=float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.load(x_ptr + row + at, at < N, other=-float("inf")), 0))
    scale = tl.where(high > low, (high - low) / 255, 1.0)
    zero = -128 - low / scale if MISTAKE == "zero point cut" else tl.floor(-128 - low / scale + 0.5)
    tl.store(scale_ptr + tl.program_id(0), scale)
    tl.store(zero_ptr + tl.program_id(0), zero.to(tl.int32))
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        q = tl.floor(tl.load(x_ptr + row + at, at < N, other=0.0) / scale + 0.5) + zero
        q = tl.minimum(tl.maximum(q, -127.0 if MISTAKE == "clamp from -127" else -128.0), 127.0)
        tl.store(q_ptr + row + at, q.to(tl.int8), at < N)


def int8(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    q, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0])
    zero = torch.empty_like(scale, dtype=torch.int32)
    _int8[(x.shape[0],)](x, q, scale, zero, x.shape[1], config.block, mistake)
    return {"q": q, "scale": scale, "zero": zero}


def quantized(inputs: Inputs) -> Outputs:
    x, low, high = inputs["x"], inputs["x"].amin(1).clamp(max=0), inputs["x"].amax(1).clamp(min=0)
    scale = torch.where(high > low, (high - low) / 255, 1.0)
    zero = (-128 - low / scale + 0.5).floor()
    q = ((x / scale[:, None] + 0.5).floor() + zero[:, None]).clamp(-128, 127)
    return {"q": q.to(torch.int8), "scale": scale, "zero": zero.to(torch.int32)}


def compare_quantized(_case: Case, _given: Inputs, got: Outputs, want: Outputs) -> list[str]:
    return [
        *close("scale", got["scale"], want["scale"], 1e-6, 0.0),
        *close("zero", got["zero"], want["zero"], 0.0, 1.0),
        *within_a_step("q", got["q"], want["q"]),
    ]


@triton.jit
def _rope(x_ptr, cos_ptr, position_ptr, y_ptr, half, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = token * 2 * half
    position = token if MISTAKE == "position is the token" else tl.load(position_ptr + token) + (MISTAKE == "position plus 1")
    for begin in range(0, half, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        cos = tl.load(cos_ptr + position * half + at, at < half, other=0.0)
        for part in tl.static_range(2):
            offsets = row + part * (BLOCK if MISTAKE == "half is the block" else half) + at
            tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, at < half, other=0.0) * cos, at < half)


def rope(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    y = torch.empty_like(inputs["x"])
    _rope[(y.shape[0],)](inputs["x"], inputs["cos"], inputs["position"], y, y.shape[1] // 2, config.block, mistake)
    return {"y": y}


def tokens(case: Case, *, device: str, seed: int = 0) -> Inputs:
    T, half = case["M"], case["N"]
    position = torch.arange(T, device=device) * 2 + 1
    return {"x": values(seed, device, T, 2 * half), "cos": values(seed + 1, device, 2 * T, half), "position": position}


OPERATORS = {
    "counted": Mistaken(
        counted, rows_of, lambda inputs: {"y": inputs["x"].sum(1)},
        ("relaxed counter", "counter of all rows", "a split too late", "counter kept"),
    ),
    "scan": Mistaken(
        scan, rows_of, lambda inputs: {"y": inputs["x"].double().cumsum(1)},
        ("exclusive after the first tile", "carry of the last tile"),
        lambda _case, _given, got, want: close("y", got["y"], want["y"], 1e-3, 1e-2),
    ),
    "int8": Mistaken(
        int8, rows_of, quantized, ("range without zero", "zero point cut", "clamp from -127"), compare_quantized,
    ),
    "rope": Mistaken(
        rope, tokens, lambda inputs: {"y": inputs["x"] * inputs["cos"].repeat(1, 2)[inputs["position"]]},
        ("position is the token", "position plus 1", "half is the block"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), mistakes_of(OPERATORS))
def test_check_finds_a_mistake_in_divided_work(name: str, mistake: str) -> None:
    COUNTERS.clear()
    assert OPERATORS[name].findings(mistake)


@pytest.mark.parametrize("name", OPERATORS)
def test_check_finds_nothing_in_rightly_divided_work(name: str) -> None:
    COUNTERS.clear()
    assert OPERATORS[name].findings("") == []
