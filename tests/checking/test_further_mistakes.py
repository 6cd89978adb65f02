"""Mistakes in eight kernels: softmax, normalization, rotation, entropy, quantisation, transpose, sums and a gather."""

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import Knobs, Mistaken, mistakes_of

from kerneltune.kernel_lib.agreement import rowwise, same_bits
from kerneltune.kernel_lib.check_values import vary_rows
from kerneltune.spec import Case, Inputs, Outputs

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="mistakes that Triton's interpreter finds")
FP8 = torch.float8_e4m3fn


@triton.jit
def _softmax(x_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * (BLOCK if MISTAKE == "stride of the block" else N)
    x = tl.load(x_ptr + row + at, at < N, other=0.0 if MISTAKE == "zero for minus infinity" else -float("inf"))
    top = tl.max(tl.where(at < N, x, 0.0) if MISTAKE == "maximum with zero" else x, 0)
    e = tl.exp(x if MISTAKE == "maximum not subtracted" else x - top)
    tl.store(y_ptr + row + at, e / tl.sum(e, 0), at < N)


def softmax(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x, y = inputs["x"], torch.empty_like(inputs["x"])
    _softmax[(x.shape[0],)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]), mistake)
    return {"y": y}


@triton.jit
def _layernorm(x_ptr, weight_ptr, y_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (row < M) & (at < N)
    x = tl.load(x_ptr + row * N + at, mask, other=0.0)
    centred = x - tl.sum(x, 1)[:, None] / (BLOCK if MISTAKE == "mean over the block" else N)
    if MISTAKE != "variance without mask":
        centred = tl.where(mask, centred, 0.0)
    variance = tl.sum(centred * centred, 1)[:, None] / (N - 1 if MISTAKE == "unbiased variance" else N)
    scale = 1 / (tl.sqrt(variance) + 1e-6) if MISTAKE == "epsilon outside of the root" else tl.rsqrt(variance + 1e-6)
    weight = tl.load(weight_ptr + (row + 0 * at if MISTAKE == "weight of the row" else at + 0 * row), mask, other=0.0)
    tl.store(y_ptr + row * N + at, centred * scale * weight, mask)


def layernorm(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x, y = inputs["x"], torch.empty_like(inputs["x"])
    (M, N), grid = x.shape, (triton.cdiv(x.shape[0], config.parts),)
    _layernorm[grid](x, inputs["weight"], y, M, N, config.parts, triton.next_power_of_2(N), mistake)
    return {"y": y}


@triton.jit
def _rope(x_ptr, cos_ptr, y_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    half = N // 2
    first = tl.program_id(0) if MISTAKE == "position of the program" else tl.program_id(0) * ROWS
    row, at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (row < M) & (at < half)
    angle_row = first + tl.arange(0, ROWS)[:, None]
    cos = tl.load(
        cos_ptr + angle_row * half + at, (angle_row < M) & (at < (N if MISTAKE == "mask of all columns" else half)), other=0.0
    )
    a = tl.load(x_ptr + row * N + at, mask, other=0.0)
    b = tl.load(x_ptr + row * N + half + at, mask, other=0.0)
    sin = tl.sqrt(1 - cos * cos)
    tl.store(y_ptr + row * N + at, a * cos - b * sin, mask)
    tl.store(y_ptr + row * N + half + at, (b * cos - a * sin) if MISTAKE == "sign" else (b * cos + a * sin), mask)


def rope(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x, y = inputs["x"], torch.empty_like(inputs["x"])
    (M, N), grid = x.shape, (triton.cdiv(x.shape[0], config.parts),)
    _rope[grid](x, inputs["cos"], y, M, N, config.parts, triton.next_power_of_2(N), mistake)
    return {"y": y}


@triton.jit
def _cross_entropy(x_ptr, label_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, total = -float("inf"), 0.0
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, at < N, other=-float("inf"))
        new = tl.maximum(top, tl.max(x, 0))
        total = (total if MISTAKE == "sum not rescaled" else total * tl.exp(top - new)) + tl.sum(tl.exp(x - new), 0)
        top = new
    label = tl.load(label_ptr + row)
    is_ignored = label < 0
    picked = (
        tl.load(x_ptr + row * N + label)
        if MISTAKE == "ignored label is read"
        else tl.load(x_ptr + row * N + label, not is_ignored, other=0.0)
    )
    tl.store(y_ptr + row, tl.where(is_ignored, 0.0, top + tl.log(total) - picked))


def cross_entropy(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty(x.shape[0], device=x.device)
    _cross_entropy[(x.shape[0],)](x, inputs["label"], y, x.shape[1], config.block, mistake)
    return {"y": y}


@triton.jit
def _quantize(x_ptr, q_ptr, scale_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (row < M) & (at < N)
    x = tl.load(x_ptr + row * N + at, mask, other=0.0)
    amax = tl.max(tl.abs(x), 1)[:, None]
    if MISTAKE == "amax of the tile":
        amax = tl.max(amax, 0)[None, :] + 0 * tl.abs(amax)
    scale = amax / 448.0 if MISTAKE == "zeros divided by zero" else tl.where(amax > 0, amax / 448.0, 1.0)
    q = x / scale
    if MISTAKE == "truncation":
        q = (q.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    tl.store(q_ptr + row * N + at, q.to(tl.float8e4nv), mask)
    tl.store(scale_ptr + row + 0 * at, 1 / scale if MISTAKE == "inverse scale" else scale, mask & (at == 0))


def quantize(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    (M, N), grid = x.shape, (triton.cdiv(x.shape[0], config.parts),)
    q, scale = torch.empty(M, N, dtype=FP8, device=x.device), torch.empty(M, device=x.device)
    _quantize[grid](x, q, scale, M, N, config.parts, triton.next_power_of_2(N), mistake)
    return {"q": q, "scale": scale}


@triton.jit
def _transpose(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * N + at, (row < M) & (at < N), other=0.0)
    tl.store(
        y_ptr + at * M + row,
        x,
        (row < N) & (at < M) if MISTAKE == "swapped mask" else at < N if MISTAKE == "mask of one axis" else (row < M) & (at < N),
    )


def transpose(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    (M, N) = x.shape
    y = torch.empty(N, M, device=x.device)
    _transpose[(triton.cdiv(M, config.parts), triton.cdiv(N, config.block))](x, y, M, N, config.parts, config.block, mistake)
    return {"y": y}


@triton.jit
def _column_sums(x_ptr, y_ptr, M, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = M // SPLITS if MISTAKE == "rest of the rows" else tl.cdiv(M, SPLITS)
    begin = tl.program_id(1) * rows
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(begin, min(begin + rows, M)):
        total += tl.load(x_ptr + row.to(tl.int64) * N + at, at < N, other=0.0)
    if MISTAKE == "sum without atomics":
        tl.store(y_ptr + at, tl.load(y_ptr + at, at < N, other=0.0) + total, at < N)
    else:
        tl.atomic_add(y_ptr + at, total, at < N)


def column_sums(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    (M, N) = x.shape
    y = (torch.empty if mistake == "sums not zeroed" else torch.zeros)(N, device=x.device)
    _column_sums[(triton.cdiv(N, config.block), config.parts)](x, y, M, N, config.parts, config.block, mistake)
    return {"y": y}


@triton.jit
def _gather(x_ptr, index_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source = tl.load(index_ptr + row)
    if MISTAKE == "32 bits":
        source, row = source.to(tl.int32), tl.program_id(0)
    for begin in range(0, BLOCK if MISTAKE == "first block alone" else N, BLOCK):
        mask = begin + at < N
        tl.store(y_ptr + row * N + begin + at, tl.load(x_ptr + source * N + begin + at, mask, other=0.0), mask)


def gather(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x, y = inputs["x"], torch.empty_like(inputs["x"])
    _gather[(x.shape[0],)](x, inputs["index"], y, x.shape[1], config.block, mistake)
    return {"y": y}


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    M, N = case["M"], case["N"]
    if device == "meta":
        shapes = {"x": (M, N), "weight": (N,), "cos": (M, N // 2)}
        whole = {"label": (M,), "index": (M,)}
        return {n: torch.empty(s, device=device) for n, s in shapes.items()} | {
            n: torch.empty(s, dtype=torch.int64, device=device) for n, s in whole.items()
        }
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(N, (M,), generator=random)
    label[1:2] = -100
    return {
        "x": vary_rows(torch.randn(M, N, generator=random)),
        "weight": torch.randn(N, generator=random),
        "cos": torch.rand(M, N // 2, generator=random),
        "label": label,
        "index": torch.randint(M, (M,), generator=random),
    }


def _layernorm_reference(inputs: Inputs) -> Outputs:
    x = inputs["x"].double()
    scale = torch.rsqrt(x.var(1, correction=0, keepdim=True) + 1e-6)
    return {"y": ((x - x.mean(1, keepdim=True)) * scale * inputs["weight"]).float()}


def _rope_reference(inputs: Inputs) -> Outputs:
    (a, b), cos = inputs["x"].chunk(2, 1), inputs["cos"]
    sin = (1 - cos * cos).sqrt()
    return {"y": torch.cat([a * cos - b * sin, b * cos + a * sin], 1)}


def _exact(_case: Case, _inputs: Inputs, got: Outputs, want: Outputs) -> list[str]:
    return same_bits("y", got["y"], want["y"])


def _quantized(_case: Case, inputs: Inputs, got: Outputs, _want: Outputs) -> list[str]:
    return rowwise("q", got["q"], got["scale"], inputs["x"])


OPERATORS = {
    "softmax": Mistaken(
        softmax, _inputs, lambda inputs: {"y": inputs["x"].softmax(1)},
        ("stride of the block", "zero for minus infinity", "maximum with zero", "maximum not subtracted"),
    ),
    "layernorm": Mistaken(
        layernorm, _inputs, _layernorm_reference,
        ("mean over the block", "variance without mask", "unbiased variance", "epsilon outside of the root", "weight of the row"),
    ),
    "rope": Mistaken(rope, _inputs, _rope_reference, ("position of the program", "mask of all columns", "sign")),
    "cross_entropy": Mistaken(
        cross_entropy, _inputs,
        lambda inputs: {"y": torch.nn.functional.cross_entropy(inputs["x"], inputs["label"], reduction="none")},
        ("sum not rescaled", "ignored label is read"),
    ),
    "quantize": Mistaken(
        quantize, _inputs, lambda inputs: {"q": inputs["x"], "scale": inputs["x"]},
        ("amax of the tile", "zeros divided by zero", "truncation", "inverse scale"), _quantized,
    ),
    "transpose": Mistaken(
        transpose, _inputs, lambda inputs: {"y": inputs["x"].t().contiguous()}, ("swapped mask", "mask of one axis"), _exact
    ),
    "column_sums": Mistaken(
        column_sums, _inputs, lambda inputs: {"y": inputs["x"].sum(0)},
        ("rest of the rows", "sum without atomics", "sums not zeroed"),
    ),
    "gather": Mistaken(
        gather, _inputs, lambda inputs: {"y": inputs["x"][inputs["index"]]}, ("32 bits", "first block alone"), _exact
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), mistakes_of(OPERATORS))
def test_check_finds_a_mistake(name: str, mistake: str) -> None:
    assert OPERATORS[name].findings(mistake)


@pytest.mark.usefixtures("short_launches")
@pytest.mark.parametrize("name", OPERATORS)
def test_check_finds_nothing_in_a_right_operator(name: str) -> None:
    assert OPERATORS[name].findings("") == []
