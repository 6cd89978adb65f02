"""Mistakes of kernels of the field: attention masks, in-place updates, kept results, quantisation, split sums, hints."""

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import Knobs, Mistaken, mistakes_of, rows_of, values

from kerneltune.kernel_lib.agreement import rowwise
from kerneltune.spec import Case, Inputs, Outputs

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="mistakes that Triton's interpreter finds")


@triton.jit
def _softmax(x_ptr, y_ptr, N, stride, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0) * stride if MISTAKE == "stride in 32 bits" else tl.program_id(0).to(tl.int64) * stride
    top, total = -float("inf"), 0.0
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < N, other=-float("inf"))
        new = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), 0)
        top = new
    safe = tl.where(top == -float("inf"), 0.0, top)
    factor = 1 / total if MISTAKE == "sum of zero" else tl.where(total > 0, 1 / total, 0.0)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < N, other=-float("inf"))
        tl.store(y_ptr + row + at, tl.exp(x - safe) * factor, at < N)


def softmax(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    if x.stride(-1) != 1:
        raise ValueError("elements of a row must be adjacent")
    y = torch.empty_strided(x.shape, x.stride(), device=x.device)
    _softmax[(x.shape[0],)](x, y, x.shape[1], x.stride(0), config.block, mistake)
    return {"y": y}


def masked_rows(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = values(seed, device, case["M"], case["N"])
    x[-1] = -float("inf")
    return {"x": x}


@triton.jit
def _rope(q_ptr, cos_ptr, sin_ptr, H, half, position_stride, head_stride, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    position, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    row = position * position_stride + head * head_stride
    if MISTAKE == "strides swapped":
        row = position * head_stride + head * position_stride
    if MISTAKE == "contiguous heads":
        row = (position * H + head) * half * 2
    at = tl.arange(0, BLOCK)
    mask = at < half
    cos = tl.load(cos_ptr + position * half + at, mask, other=0.0)
    sin = tl.load(sin_ptr + position * half + at, mask, other=0.0)
    a, b = tl.load(q_ptr + row + at, mask, other=0.0), tl.load(q_ptr + row + half + at, mask, other=0.0)
    tl.store(q_ptr + row + at, a * cos - b * sin, mask)
    if MISTAKE == "reads what it wrote":
        a = tl.load(q_ptr + row + at, mask, other=0.0)
    tl.store(q_ptr + row + half + at, b * cos + a * sin, mask)


def rope(mistake: str, inputs: Inputs, _config: Knobs) -> Outputs:
    q = inputs["qkv"][:, :2]
    if q.stride(-1) != 1:
        raise ValueError("elements of a head must be adjacent")
    S, H, D = q.shape
    _rope[(S * H,)](
        q, inputs["cos"], inputs["sin"], H, D // 2, q.stride(0), q.stride(1), triton.next_power_of_2(D // 2), mistake
    )  # fmt: skip
    return {"q": q}


def heads(case: Case, *, device: str, seed: int = 0) -> Inputs:
    S, half = case["M"], case["N"]
    shapes = {"qkv": (S, 6, 2 * half), "cos": (S, half), "sin": (S, half)}
    return {name: values(seed + number, device, *shape) for number, (name, shape) in enumerate(shapes.items())}


def rotated(inputs: Inputs) -> Outputs:
    (a, b), cos, sin = inputs["qkv"][:, :2].chunk(2, 2), inputs["cos"][:, None], inputs["sin"][:, None]
    return {"q": torch.cat([a * cos - b * sin, b * cos + a * sin], 2)}


@triton.jit
def _int8(x_ptr, q_ptr, scale_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, amax = tl.program_id(0).to(tl.int64) * N, 0.0
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < N, other=0.0)
        x = x if MISTAKE == "maximum without sign" else tl.abs(x)
        amax = tl.max(x, 0) if MISTAKE == "maximum of the last tile" else tl.maximum(amax, tl.max(x, 0))
    scale = amax / (128 if MISTAKE == "largest is 128" else 127)
    tl.store(scale_ptr + tl.program_id(0), scale)
    factor = 1 / scale if MISTAKE == "row of zeros" else tl.where(scale > 0, 1 / scale, 0.0)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < N, other=0.0) * factor
        q = x if MISTAKE == "truncation" else tl.where(x < 0, tl.ceil(x - 0.5), tl.floor(x + 0.5))
        tl.store(q_ptr + row + at, q.to(tl.int8), at < N)


def int8(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    q, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0])
    _int8[(x.shape[0],)](x, q, scale, x.shape[1], config.block, mistake)
    return {"q": q, "scale": scale}


def compare_int8(_case: Case, inputs: Inputs, outputs: Outputs, _expected: Outputs) -> list[str]:
    return rowwise("q", outputs["q"], outputs["scale"], inputs["x"])


@triton.jit
def _split(x_ptr, y_ptr, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    part = N // SPLITS if MISTAKE == "remainder" else tl.cdiv(N, SPLITS)
    begin, total = tl.program_id(1) * part, 0.0
    for offset in range(0, part, BLOCK):
        at = offset + tl.arange(0, BLOCK)
        mask = begin + at < N if MISTAKE == "overlap" else (begin + at < N) & (at < part)
        total += tl.sum(tl.load(x_ptr + tl.program_id(0).to(tl.int64) * N + begin + at, mask, other=0.0), 0)
    if MISTAKE == "plain store":
        tl.store(y_ptr + tl.program_id(0), total)
    else:
        tl.atomic_add(y_ptr + tl.program_id(0), total)


KEPT: dict[tuple[str, int, bool], torch.Tensor] = {}


def split(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = x.new_empty(x.shape[0]) if mistake == "not zeroed" else x.new_zeros(x.shape[0])
    if mistake in ("sum kept", "buffer kept"):
        y = KEPT.setdefault((mistake, x.shape[0], x.is_meta), y)
    if mistake == "buffer kept":
        y.zero_()
    _split[(x.shape[0], config.parts)](x, y, x.shape[1], config.parts, config.block, mistake)
    return {"y": y}


def divide(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    """Divide by the largest element, which a mistake keeps for each size."""
    x, top = inputs["x"], inputs["x"].abs().amax().reshape(1)
    if mistake == "maximum kept":
        top = KEPT.setdefault((mistake, x.numel(), x.is_meta), top)
    y = torch.empty_like(x)
    _divide[(triton.cdiv(x.numel(), config.block),)](x, top, y, x.numel(), x.shape[1], config.block, mistake)
    return {"y": y}


@triton.jit
def _divide(x_ptr, top_ptr, y_ptr, count, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    if MISTAKE == "multiple_of":
        N = tl.multiple_of(N, 16)
    if MISTAKE == "assume":
        tl.assume(N % 16 == 0)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < count, other=0.0) / tl.load(top_ptr), at < count)


@triton.jit
def _variance(x_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, count, mean, squares = tl.program_id(0).to(tl.int64) * N, 0.0, 0.0, 0.0
    for begin in range(0, N, BLOCK):
        mask = begin + tl.arange(0, BLOCK) < N
        x = tl.load(x_ptr + row + begin + tl.arange(0, BLOCK), mask, other=0.0)
        own = BLOCK * 1.0 if MISTAKE == "count of the tile" else tl.sum(mask.to(tl.float32), 0)
        own_mean = tl.sum(x, 0) / own
        centred = tl.where(mask, x - own_mean, 0.0)
        delta = own_mean - mean
        squares += tl.sum(centred * centred, 0)
        if MISTAKE != "tiles without their means":
            squares += delta * delta * count * own / (count + own)
        mean = (mean + own_mean) / 2 if MISTAKE == "mean of means" and begin > 0 else mean + delta * own / (count + own)
        count += own
    tl.store(y_ptr + tl.program_id(0), squares / count)


def variance(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    y = inputs["x"].new_empty(inputs["x"].shape[0])
    _variance[(y.numel(),)](inputs["x"], y, inputs["x"].shape[1], config.block, mistake)
    return {"y": y}


@triton.jit
def _weight_gradient(x_ptr, dy_ptr, dw_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < N
        dw = tl.load(x_ptr + row + at, mask, other=0.0) * tl.load(dy_ptr + row + at, mask, other=0.0)
        if MISTAKE == "store":
            tl.store(dw_ptr + at, dw, mask)
        elif MISTAKE == "lost update":
            tl.store(dw_ptr + at, tl.load(dw_ptr + at, mask, other=0.0) + dw, mask)
        else:
            tl.atomic_add(dw_ptr + at, dw, mask if MISTAKE != "mask of one more" else at <= N)


def weight_gradient(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    dw = inputs["x"].new_zeros(inputs["x"].shape[1])
    _weight_gradient[(inputs["x"].shape[0],)](inputs["x"], inputs["dy"], dw, dw.numel(), config.block, mistake)
    return {"dw": dw}


def two_of(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {name: values(seed + number, device, case["M"], case["N"]) for number, name in enumerate(("x", "dy"))}


OPERATORS = {
    "softmax": Mistaken(
        softmax, masked_rows, lambda inputs: {"y": torch.softmax(inputs["x"], 1).nan_to_num(0.0)},
        ("sum of zero", "stride in 32 bits"),
    ),
    "rope": Mistaken(rope, heads, rotated, ("strides swapped", "contiguous heads", "reads what it wrote")),
    "int8": Mistaken(
        int8, rows_of, lambda inputs: {"q": inputs["x"], "scale": inputs["x"]},
        ("maximum without sign", "maximum of the last tile", "largest is 128", "row of zeros", "truncation"), compare_int8,
    ),
    "split": Mistaken(
        split, two_of, lambda inputs: {"y": inputs["x"].sum(1)},
        ("remainder", "overlap", "plain store", "not zeroed", "sum kept", "buffer kept"),
    ),
    "divide": Mistaken(
        divide, two_of, lambda inputs: {"y": inputs["x"] / inputs["x"].abs().amax()}, ("maximum kept", "multiple_of", "assume")
    ),
    "variance": Mistaken(
        variance, two_of, lambda inputs: {"y": inputs["x"].double().var(1, unbiased=False)},
        ("count of the tile", "tiles without their means", "mean of means"),
    ),
    "weight_gradient": Mistaken(
        weight_gradient, two_of, lambda inputs: {"dw": (inputs["x"] * inputs["dy"]).sum(0)},
        ("store", "lost update", "mask of one more"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), mistakes_of(OPERATORS))
def test_check_finds_a_mistake_of_the_field(name: str, mistake: str) -> None:
    KEPT.clear()
    assert OPERATORS[name].findings(mistake)


@pytest.mark.parametrize("name", OPERATORS)
def test_check_finds_nothing_in_a_right_operator_of_the_field(name: str) -> None:
    assert OPERATORS[name].findings("") == []
