"""Mistakes that users commit in kernels of tiles: grids, splits, epilogues, carries, scratch, tables."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import SMALL, Knobs, Mistaken, mistakes_of, rows_of, values

from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Outputs

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="mistakes that Triton's interpreter finds")


@triton.jit
def _transpose(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, MISTAKE: tl.constexpr):
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    if MISTAKE == "blocks swapped in cdiv":
        num_m, num_n = tl.cdiv(M, BN), tl.cdiv(N, BM)
    pid = tl.program_id(0)
    in_group = GROUP * num_n
    first = pid // in_group * GROUP
    size = GROUP if MISTAKE == "last group of full size" else min(num_m - first, GROUP)
    pid_m, pid_n = first + pid % in_group % size, pid % in_group // size
    if MISTAKE == "division by the group size":
        pid_n = pid % in_group // GROUP
    row = (pid_m * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    col = (pid_n * BN + tl.arange(0, BN)).to(tl.int64)[None, :]
    mask = (row < M) & (col < N)
    if MISTAKE == "mask with the sizes swapped":
        mask = (row < N) & (col < M)
    x = tl.load(x_ptr + row * N + col, mask)
    tl.store(y_ptr + col * (N if MISTAKE == "row stride of the input" else M) + row, x, mask)


def transpose(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = torch.empty((N, M), device=x.device)
    bm, bn = config.parts, min(config.block, 64)
    grid = triton.cdiv(M, bm) * triton.cdiv(N, bn)
    if mistake == "grid of the swapped blocks":
        grid = triton.cdiv(M, bn) * triton.cdiv(N, bm)
    _transpose[(grid,)](x, y, M, N, bm, bn, 4, mistake)
    return {"y": y}


COLUMNS = 20


@triton.jit
def _gemm(  # noqa: C901
    a_ptr, b_ptr, bias_ptr, y_ptr, M, N, K, stride_bk, stride_bn, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, MISTAKE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    acc = tl.zeros((BM, BN), tl.float32)
    steps = K // (BK * SPLITS) if MISTAKE == "K rounded down" else tl.cdiv(K, BK * SPLITS)
    k = split * BK + tl.arange(0, BK)
    if MISTAKE == "split of consecutive blocks":
        k = split * BK * steps + tl.arange(0, BK)
    a_row = row if MISTAKE == "M a multiple of the block" else row % M
    a_at = a_ptr + a_row.to(tl.int64)[:, None] * K + k[None, :]
    if MISTAKE == "strides of b swapped":
        b_at = b_ptr + k.to(tl.int64)[:, None] * stride_bn + col[None, :] * stride_bk
    else:
        b_at = b_ptr + k.to(tl.int64)[:, None] * stride_bk + col[None, :] * stride_bn
    for step in range(steps):
        remaining = K - step * BK * SPLITS
        a_mask = k[None, :] < (K if MISTAKE == "mask of the first step" else remaining)
        a = tl.load(a_at, a_mask, other=0.0)
        b = tl.load(b_at, (k[:, None] < remaining) & (col[None, :] < N), other=0.0)
        if MISTAKE == "sum in bf16":
            acc = (acc + tl.dot(a, b, input_precision="ieee")).to(tl.bfloat16).to(tl.float32)
        elif MISTAKE == "default precision":
            acc = tl.dot(a, b, acc)
        elif MISTAKE == "sum added to itself":
            acc += tl.dot(a, b, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        a_at += BK * SPLITS
        b_at += BK if MISTAKE == "advance without the splits" else BK * SPLITS * stride_bk
    bias = tl.load(bias_ptr + col, col < N, other=0.0)
    if MISTAKE == "bias in each split" or split == 0:
        acc += bias[None, :]
    if MISTAKE == "activation before the sum":
        acc = tl.maximum(acc, 0.0)
    y_at = y_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    mask = (row[:, None] < M) & (col[None, :] < N)
    if MISTAKE == "wrapped rows are added":
        mask = col[None, :] < N
        y_at = y_ptr + (row % M).to(tl.int64)[:, None] * N + col[None, :]
    if MISTAKE == "zeroed by the first split" and split == 0:
        tl.store(y_at, tl.zeros((BM, BN), tl.float32), mask)
    tl.atomic_add(y_at, acc, mask)


@triton.jit
def _relu(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.maximum(tl.load(x_ptr + at, at < count), 0.0), at < count)


WORKSPACE: dict[object, torch.Tensor] = {}


def gemm(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    a, b = inputs["a"], inputs["b"]
    M, K = a.shape
    N = b.shape[1]
    y = torch.empty((M, N), device=a.device)
    sums = (torch.empty if mistake == "zeroed by the first split" else torch.zeros)((M, N), device=a.device)
    if mistake == "workspace of an earlier call":
        sums = WORKSPACE.setdefault((M, N, a.device), sums)
    block = min(config.block, 32)
    grid = triton.cdiv(M, 16), triton.cdiv(N, 16), config.parts
    _gemm[grid](a, b, inputs["bias"], sums, M, N, K, b.stride(0), b.stride(1), config.parts, 16, 16, block, mistake)
    if mistake == "activation before the sum":
        return {"y": sums}
    _relu[(triton.cdiv(M * N, 512),)](sums, y, M * N, 512)
    return {"y": y}


def factors(case: Case, *, device: str, seed: int = 0) -> Inputs:
    M, K = case["M"], case["N"]
    return {
        "a": values(seed, device, M, K),
        "b": values(seed + 1, device, COLUMNS, K).T,
        "bias": values(seed + 2, device, COLUMNS),
    }


def product(inputs: Inputs) -> Outputs:
    return {"y": (inputs["a"].double() @ inputs["b"].double() + inputs["bias"]).relu()}


def close32(_case: Case, _given: Inputs, got: Outputs, want: Outputs) -> list[str]:
    return close("y", got["y"], want["y"], 1e-5, 1e-4)


@triton.jit
def _after(a_left, b_left, a_right, b_right):
    return a_left * a_right, a_right * b_left + b_right


@triton.jit
def _before(a_left, b_left, a_right, b_right):
    return a_left * a_right, a_left * b_right + b_left


@triton.jit
def _recurrence(a_ptr, b_ptr, y_ptr, M, N, programs, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    carry = 0.0
    step = 8 if MISTAKE == "step of a constant" else programs
    for row in range(tl.program_id(0), M, step):
        if MISTAKE != "carry of the last row":
            carry = 0.0
        begin_of_row = row.to(tl.int64) * N
        for begin in range(0, N, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            a = tl.load(a_ptr + begin_of_row + at, at < N, other=1.0)
            b = tl.load(b_ptr + begin_of_row + at, at < N, other=0.0)
            if MISTAKE == "operands of the scan swapped":
                factor, h = tl.associative_scan((a, b), 0, _before)
            else:
                factor, h = tl.associative_scan((a, b), 0, _after)
            h += (1.0 if MISTAKE == "carry without its factor" else factor) * carry
            tl.store(y_ptr + begin_of_row + at, h, at < N)
            last = tl.arange(0, BLOCK) == (BLOCK - 1)
            carry = tl.sum(tl.where(last, h, 0.0), 0)


def recurrence(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    a, y = inputs["a"], torch.empty_like(inputs["a"])
    M, N = a.shape
    programs = min(M, 2 * config.parts)
    _recurrence[(programs,)](a, inputs["b"], y, M, N, programs, config.block, mistake)
    return {"y": y}


def gates(case: Case, *, device: str, seed: int = 0) -> Inputs:
    M = case["M"] if device == "meta" else min(case["M"], 5)
    a, b = (values(seed + number, device, M, case["N"]) for number in (0, 1))
    return {"a": a.sigmoid(), "b": b}


def recurred(inputs: Inputs) -> Outputs:
    h, rows = torch.zeros(inputs["a"].shape[0], dtype=torch.float64), []
    for a, b in zip(inputs["a"].double().T, inputs["b"].double().T, strict=True):
        h = a * h + b
        rows.append(h)
    return {"y": torch.stack(rows, 1)}


PAGE = 4


@triton.jit
def _decode(
    q_ptr,
    k_ptr,
    table_ptr,
    length_ptr,
    y_ptr,
    D,
    pages,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    MISTAKE: tl.constexpr,
):
    """Store in y[b, h] the sum of the scores of the tokens of a sequence."""
    b, h, H = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.load(length_ptr + (0 if MISTAKE == "length of the first sequence" else b))
    kv = h % GROUP if MISTAKE == "head modulo the group" else h // GROUP
    heads = H // GROUP
    at = tl.arange(0, BLOCK)
    total = 0.0
    for token in range(length + (1 if MISTAKE == "a token too many" else 0)):
        page = tl.load(table_ptr + b * pages + token // PAGE)
        offset = (page * PAGE + (token if MISTAKE == "token in place of its place" else token % PAGE)) * heads + kv
        score = 0.0
        for begin in range(0, D, BLOCK):
            q = tl.load(q_ptr + (b * H + h).to(tl.int64) * D + begin + at, begin + at < D, other=0.0)
            k = tl.load(k_ptr + offset.to(tl.int64) * D + begin + at, begin + at < D, other=0.0)
            score += tl.sum(q * k, 0)
        total += tl.exp(score * 0.01)
    tl.store(y_ptr + b * H + h, total)


def decode(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    q = inputs["q"]
    B, H, D = q.shape
    y = q.new_empty(B, H)
    _decode[(B, H)](
        q, inputs["k"], inputs["table"], inputs["length"], y, D, inputs["table"].shape[1], 3, PAGE, config.block, mistake
    )
    return {"y": y}


def sequences(case: Case, *, device: str, seed: int = 0) -> Inputs:
    B = case["M"] if device == "meta" else min(case["M"], 3)
    D, pages = min(case["N"], 20), 3
    table = (torch.arange(B * pages, device=device).flip(0)).reshape(B, pages)
    length = (torch.arange(B, device=device) * 5) % (pages * PAGE) + 1
    q, k = values(seed, device, B, 6, D), values(seed + 1, device, B * pages, PAGE, 2, D)
    return {"q": q, "k": k, "table": table, "length": length}


def decoded(inputs: Inputs) -> Outputs:
    y = []
    for q, pages, length in zip(inputs["q"].double(), inputs["table"], inputs["length"], strict=True):
        k = inputs["k"].double()[pages].flatten(0, 1)[:length].repeat_interleave(3, 1)
        y.append((torch.einsum("hd,thd->ht", q, k) * 0.01).exp().sum(1))
    return {"y": torch.stack(y)}


@triton.jit
def _columns(x_ptr, part_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr, MISTAKE: tl.constexpr):
    part, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * ROWS, min(M, part * ROWS + ROWS)):
        x = tl.load(x_ptr + row.to(tl.int64) * N + at, at < N, other=0.0)
        total += x * x if SQUARE else x
    tl.store(part_ptr + part * (BLOCK if MISTAKE == "scratch rows of a block" else N) + at, total, at < N)


@triton.jit
def _finish(part_ptr, y_ptr, parts, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        total += tl.load(part_ptr + part * N + at, at < N, other=0.0)
    tl.store(y_ptr + at, total, at < N)


SCRATCH: dict[object, torch.Tensor] = {}


def moments(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    """Return the sums of columns and of their squares, in two launches each."""
    x = inputs["x"]
    M, N = x.shape
    rows, block = 8 // config.parts, config.block
    parts = M // rows if mistake == "parts rounded down" else triton.cdiv(M, rows)
    sums = x.new_empty(2, N)
    scratch = [x.new_empty(parts, N), x.new_empty(parts, N)]
    if mistake == "one scratch for both":
        scratch[1] = scratch[0]
    if mistake == "scratch of the first config":
        scratch = [SCRATCH.setdefault((M, N, x.device, which), scratch[which]) for which in (0, 1)]
    for which in (0, 1):
        _columns[(parts, triton.cdiv(N, block))](x, scratch[which], M, N, rows, block, bool(which), mistake)
    for which in (0, 1):
        _finish[(triton.cdiv(N, block),)](scratch[which], sums[which], parts, N, block, mistake)
    return {"sums": sums}


def summed(inputs: Inputs) -> Outputs:
    x = inputs["x"].double()
    return {"sums": torch.stack([x.sum(0), (x * x).sum(0)])}


def close_sums(_case: Case, _given: Inputs, got: Outputs, want: Outputs) -> list[str]:
    return close("sums", got["sums"], want["sums"], 1e-4, 1e-3)


@triton.jit
def _experts(x_ptr, end_ptr, w_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    expert, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(end_ptr + expert - 1, expert > 0, other=0)
    end = tl.load(end_ptr + expert)
    if MISTAKE == "ends taken as sizes":
        end = begin + end
    if MISTAKE == "at least a row":
        end = tl.maximum(end, begin + 1)
    w = tl.load(w_ptr + expert * N + at, at < N)
    for row in range(begin, end):
        x = tl.load(x_ptr + row.to(tl.int64) * N + at, at < N)
        tl.store(y_ptr + row.to(tl.int64) * N + at, x * w, at < N)


def experts(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x, num = inputs["x"], inputs["w"].shape[0]
    y = torch.empty_like(x)
    grid_experts = num - 1 if mistake == "last expert left out" else num
    _experts[(grid_experts, triton.cdiv(x.shape[1], config.block))](
        x, inputs["end"], inputs["w"], y, x.shape[1], config.block, mistake
    )
    return {"y": y}


def routed(case: Case, *, device: str, seed: int = 0) -> Inputs:
    M, N = case["M"], case["N"]
    end = torch.tensor([M // 3, M // 3, M], device=device)
    return {"x": values(seed, device, M, N), "w": values(seed + 1, device, 3, N), "end": end}


def weighted(inputs: Inputs) -> Outputs:
    M = inputs["x"].shape[0]
    expert = torch.searchsorted(inputs["end"], torch.arange(M), right=True)
    return {"y": inputs["x"] * inputs["w"][expert]}


OPERATORS = {
    "transpose": Mistaken(
        transpose, rows_of, lambda inputs: {"y": inputs["x"].T},
        ("blocks swapped in cdiv", "last group of full size", "division by the group size",
         "mask with the sizes swapped", "row stride of the input", "grid of the swapped blocks"),
    ),
    "gemm": Mistaken(
        gemm, factors, product,
        ("K rounded down", "split of consecutive blocks", "M a multiple of the block", "strides of b swapped",
         "mask of the first step", "sum in bf16", "default precision", "sum added to itself", "advance without the splits",
         "bias in each split", "activation before the sum", "wrapped rows are added", "zeroed by the first split",
         "workspace of an earlier call"),
        close32,
    ),
    "recurrence": Mistaken(
        recurrence, gates, recurred,
        ("step of a constant", "carry of the last row", "operands of the scan swapped", "carry without its factor"),
    ),
    "decode": Mistaken(
        decode, sequences, decoded,
        ("length of the first sequence", "head modulo the group", "a token too many", "token in place of its place"),
    ),
    "moments": Mistaken(
        moments, rows_of, summed,
        ("scratch rows of a block", "parts rounded down", "one scratch for both", "scratch of the first config"), close_sums,
    ),
    "experts": Mistaken(experts, routed, weighted, ("ends taken as sizes", "at least a row", "last expert left out")),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), mistakes_of(OPERATORS))
def test_check_finds_a_mistake_in_tiles(name: str, mistake: str) -> None:
    assert replace(OPERATORS[name], cases=SMALL).findings(mistake)


@pytest.mark.usefixtures("short_launches")
@pytest.mark.parametrize("name", OPERATORS)
def test_check_finds_nothing_in_right_tiles(name: str) -> None:
    assert replace(OPERATORS[name], cases=SMALL).findings("") == []
