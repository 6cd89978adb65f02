"""Right kernels of unusual style raise no alarm: locks, chains, work counters, pointer tables, views, descriptors."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import SMALL, Knobs, Mistaken, rows_of, values

from kerneltune.checking.jobs import CaseJob, coverage_lines, run_jobs
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant
from kerneltune.task import Run, Task

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels that Triton's interpreter runs")


@triton.jit
def _block_ptr(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    y = tl.make_block_ptr(y_ptr, (M, N), (N, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    for _ in range(0, N, BN):
        tl.store(y, tl.load(x, boundary_check=(0, 1), padding_option="zero") * 2, boundary_check=(0, 1))
        x = tl.advance(x, (0, BN))
        y = tl.advance(y, (0, BN))


def block_ptr(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    M, N = x.shape
    _block_ptr[(triton.cdiv(M, 4 * config.parts),)](x, y, M, N, 4 * config.parts, config.block)
    return {"y": y}


@triton.jit
def _descriptor(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BM, BN])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BM, BN])
    y.store([tl.program_id(0) * BM, tl.program_id(1) * BN], x.load([tl.program_id(0) * BM, tl.program_id(1) * BN]) * 2)


def descriptor(inputs: Inputs, config: Knobs) -> Outputs:
    x = torch.nn.functional.pad(inputs["x"], (0, -inputs["x"].shape[1] % 4))
    y = torch.empty_like(x)
    M, N = x.shape
    _descriptor[(triton.cdiv(M, 4 * config.parts), triton.cdiv(N, config.block))](x, y, M, N, 4 * config.parts, config.block)
    return {"y": y[:, : inputs["x"].shape[1]]}


@triton.jit
def _dynamic(x_ptr, y_ptr, count_ptr, M, N, BLOCK: tl.constexpr):
    row = tl.atomic_add(count_ptr, 1)
    while row < M:
        for begin in tl.range(0, N, BLOCK, num_stages=2):
            at = begin + tl.arange(0, BLOCK)
            tl.store(y_ptr + row.to(tl.int64) * N + at, tl.load(x_ptr + row.to(tl.int64) * N + at, at < N) * 2, at < N)
        row = tl.atomic_add(count_ptr, 1)


def dynamic(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    n = torch.zeros(1, dtype=torch.int32, device=x.device)
    _dynamic[(2 * config.parts,)](x, y, n, *x.shape, config.block)
    return {"y": y}


@triton.jit
def _locked(x_ptr, y_ptr, lock_ptr, M, N, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    part, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(part, M, PARTS):
        total += tl.load(x_ptr + row.to(tl.int64) * N + at, at < N, other=0.0)
    lock = lock_ptr + tl.program_id(1)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    total += tl.load(y_ptr + at, at < N, other=0.0)
    tl.store(y_ptr + at, total, at < N)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def locked(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = x.new_zeros(N)
    tiles = triton.cdiv(N, config.block)
    lock = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    _locked[(config.parts, tiles)](x, y, lock, M, N, config.parts, config.block)
    return {"y": y}


@triton.jit
def _chained(x_ptr, y_ptr, sum_ptr, flag_ptr, N, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < N, other=0.0)
    before = 0.0
    if pid > 0:
        while tl.atomic_add(flag_ptr + pid - 1, 0, sem="acquire") == 0:
            pass
        before = tl.load(sum_ptr + pid - 1)
    tl.store(sum_ptr + pid, before + tl.sum(x, 0))
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, 1, sem="release")
    tl.store(y_ptr + at, before + tl.cumsum(x, 0), at < N)


def chained(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"].reshape(-1)
    y = torch.empty_like(x)
    tiles = triton.cdiv(x.numel(), config.block)
    _chained[(tiles,)](x, y, x.new_empty(tiles), torch.zeros(tiles, dtype=torch.int32, device=x.device), x.numel(), config.block)
    return {"y": y}


@triton.jit
def _table(table_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr = tl.load(table_ptr + row).to(tl.pointer_type(tl.float32))
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(y_ptr + row.to(tl.int64) * N + at, tl.load(x_ptr + at, at < N) * 2, at < N)


def table(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    ptrs = torch.tensor([0] * len(x) if x.is_meta else [row.data_ptr() for row in x], dtype=torch.int64, device=x.device)
    _table[(x.shape[0],)](ptrs, y, x.shape[1], config.block)
    return {"y": y}


@triton.jit
def _reversed(x_ptr, s_ptr, y_ptr, N, s_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    last = x_ptr + row * N + (N - 1)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(y_ptr + row * N + at, tl.load(last - at, at < N) * tl.load(s_ptr + row * s_stride), at < N)


def backwards(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    s = torch.full((1,), 2.0, device=x.device).expand(x.shape[0])
    _reversed[(x.shape[0],)](x, s, y, x.shape[1], s.stride(0), config.block)
    return {"y": y}


@triton.jit
def _unpack(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count)
    low, high = (x & 15).to(tl.int8), (x >> 4).to(tl.int8)
    both = tl.interleave(low - 8, high - 8)
    to = tl.program_id(0).to(tl.int64) * BLOCK * 2 + tl.arange(0, BLOCK * 2)
    tl.store(y_ptr + to, both, to < 2 * count)


def unpack(inputs: Inputs, config: Knobs) -> Outputs:
    q = inputs["q"]
    y = torch.empty(q.numel() * 2, dtype=torch.int8, device=q.device)
    _unpack[(triton.cdiv(q.numel(), config.block),)](q, y, q.numel(), config.block)
    return {"y": y}


def packed(case: Case, *, device: str, seed: int = 0) -> Inputs:
    count, random = case["M"] * case["N"], torch.Generator().manual_seed(seed)
    if device == "meta":
        return {"q": torch.empty(count, dtype=torch.uint8, device=device)}
    return {"q": torch.randint(0, 256, (count,), dtype=torch.uint8, generator=random)}


def unpacked(inputs: Inputs) -> Outputs:
    q = inputs["q"]
    return {"y": torch.stack([(q & 15).to(torch.int8) - 8, (q >> 4).to(torch.int8) - 8], 1).reshape(-1)}


@triton.jit
def _early(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= M:
        return
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row.to(tl.int64) * N + at, at < N)
        tl.store(y_ptr + row.to(tl.int64) * N + at, tl.where(at < N, x * 2, 0.0), at < N)
    tl.store(y_ptr + row.to(tl.int64) * N, tl.load(x_ptr + row.to(tl.int64) * N) * 2)


def early(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    _early[(triton.next_power_of_2(x.shape[0]) + 1,)](x, y, *x.shape, config.block)
    return {"y": y}


@triton.jit
def _inplace(x_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(x_ptr + row + at, tl.load(x_ptr + row + at, at < N) * 2, at < N)


def inplace(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    _inplace[(x.shape[0],)](x, x.shape[1], config.block)
    return {"y": x}


@triton.jit
def _views(x_ptr, a_ptr, b_ptr, stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, at < N)
        tl.store(a_ptr + row * stride + at, x * 2, at < N)
        tl.store(b_ptr + row * stride + at, x * 3, at < N)


def views(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    both = x.new_empty(M, 2, N)
    _views[(M,)](x, both[:, 0], both[:, 1], 2 * N, N, config.block)
    return {"a": both[:, 0], "b": both[:, 1]}


@triton.jit
def _same(x_ptr, y_ptr, top_ptr, N, BLOCK: tl.constexpr):
    """Every program of a row stores the same maximum."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = -float("inf")
    for begin in range(0, N, 1024):
        at = begin + tl.arange(0, 1024)
        top = tl.maximum(top, tl.max(tl.load(x_ptr + row * N + at, at < N, other=-float("inf")), 0))
    tl.store(top_ptr + row, top)
    at = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * N + at, tl.load(x_ptr + row * N + at, at < N) - top, at < N)


def same(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = torch.empty_like(x)
    top = x.new_empty(M)
    _same[(M, triton.cdiv(N, config.block))](x, y, top, N, config.block)
    return {"y": y, "top": top}


@triton.jit
def _signed(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top = tl.max(tl.load(x_ptr + tl.program_id(0).to(tl.int64) * N + at, at < N, other=-float("inf")), 0)
    if top >= 0:
        tl.atomic_max((y_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int32)), top.to(tl.int32, bitcast=True))
    else:
        tl.atomic_min((y_ptr + tl.program_id(0)).to(tl.pointer_type(tl.uint32)), top.to(tl.uint32, bitcast=True))


def signed(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = x.new_full((M,), -float("inf"))
    _signed[(M, triton.cdiv(N, config.block))](x, y, N, config.block)
    return {"y": y}


@triton.jit
def _dot(a_ptr, y_ptr, M, K, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BM + tl.arange(0, BM)
    acc = tl.zeros((BM, BM), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(a_ptr + r.to(tl.int64)[:, None] * K + k[None, :], (r[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(a_ptr + c.to(tl.int64)[None, :] * K + k[:, None], (c[None, :] < M) & (k[:, None] < K), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(y_ptr + r.to(tl.int64)[:, None] * M + c[None, :], acc, (r[:, None] < M) & (c[None, :] < M))


def dot(precision: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, K = x.shape
    y = x.new_empty(M, M)
    n = triton.cdiv(M, 16)
    _dot[(n, n)](x, y, M, K, 16, min(64, config.block), precision)
    return {"y": y}


@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@triton.jit
def _heuristic(x_ptr, y_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        if EVEN:
            tl.store(y_ptr + row + at, tl.load(x_ptr + row + at) * 2)
        else:
            tl.store(y_ptr + row + at, tl.load(x_ptr + row + at, at < N, other=0.0) * 2, at < N)


def heuristic(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    _heuristic[lambda meta: (x.shape[0],)](x, y, x.shape[1], BLOCK=config.block)
    return {"y": y}


@triton.jit
def _padded(x_ptr, y_ptr, N, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for tile in tl.static_range(2):
        for begin in range(0, N, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(y_ptr + (row * 2 + tile) * stride + at, tl.load(x_ptr + row * N + at, at < N) * (tile + 1), at < N)


def padded(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = x.new_zeros(M, 2, N + 5)
    _padded[(M,)](x, y, N, N + 5, config.block)
    return {"y": y, "x": x}


@triton.jit
def _ring(x_ptr, y_ptr, part_ptr, count_ptr, M, N, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    part, tile = tl.program_id(0), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(part, M, PARTS):
        total += tl.load(x_ptr + row.to(tl.int64) * N + at, at < N, other=0.0)
    tl.store(part_ptr + part.to(tl.int64) * N + at, total, at < N)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") % PARTS == PARTS - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for p in range(PARTS):
            total += tl.load(part_ptr + p * N + at, at < N, other=0.0, cache_modifier=".cg")
        tl.store(y_ptr + at, total, at < N)


COUNTS: dict[object, torch.Tensor] = {}


def ring(inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    tiles = triton.cdiv(N, config.block)
    n = COUNTS.setdefault((tiles, config.parts, x.device), torch.zeros(tiles, dtype=torch.int32, device=x.device))
    y = x.new_empty(N)
    _ring[(config.parts, tiles)](x, y, x.new_empty(config.parts, N), n, M, N, config.parts, config.block)
    return {"y": y}


def drawn(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {"x": values(seed, device, case["M"], case["N"])}


def doubled(inputs: Inputs) -> Outputs:
    return {"y": inputs["x"] * 2}


def column_sums(inputs: Inputs) -> Outputs:
    return {"y": inputs["x"].double().sum(0)}


def row_tops(inputs: Inputs) -> Outputs:
    return {"y": inputs["x"].amax(1)}


def padded_rows(inputs: Inputs) -> Outputs:
    return {"y": torch.nn.functional.pad(torch.stack([inputs["x"], inputs["x"] * 2], 1), (0, 5)), "x": inputs["x"]}


def gram(inputs: Inputs) -> Outputs:
    return {"y": inputs["x"].double() @ inputs["x"].double().T}


RIGHT = {
    "block pointers": (block_ptr, rows_of, doubled),
    "descriptors": (descriptor, rows_of, doubled),
    "work counter": (dynamic, rows_of, doubled),
    "lock": (locked, drawn, column_sums),
    "chain of programs": (chained, drawn, lambda inputs: {"y": inputs["x"].double().reshape(-1).cumsum(0)}),
    "pointer table": (table, rows_of, doubled),
    "backwards": (backwards, rows_of, lambda inputs: {"y": inputs["x"].flip(1) * 2}),
    "packed": (unpack, packed, unpacked),
    "early return": (early, rows_of, doubled),
    "in place": (inplace, rows_of, doubled),
    "views of a buffer": (views, rows_of, lambda inputs: {"a": inputs["x"] * 2, "b": inputs["x"] * 3}),
    "equal stores": (
        same,
        rows_of,
        lambda inputs: {"y": inputs["x"] - inputs["x"].amax(1, keepdim=True), "top": inputs["x"].amax(1)},
    ),
    "maximum by sign": (signed, rows_of, row_tops),
    "ieee": (partial(dot, "ieee"), drawn, gram),
    "tf32x3": (partial(dot, "tf32x3"), drawn, gram),
    "heuristics": (heuristic, rows_of, doubled),
    "padded": (padded, rows_of, padded_rows),
    "kept counter": (ring, drawn, column_sums),
}


@pytest.mark.usefixtures("short_launches")
@pytest.mark.parametrize("name", RIGHT)
def test_check_finds_nothing_in_a_right_kernel_of_unusual_style(name: str) -> None:
    COUNTS.clear()
    launch, make_inputs, reference = RIGHT[name]
    assert (
        Mistaken(lambda _mistake, inputs, config: launch(inputs, config), make_inputs, reference, (), cases=SMALL).findings("")
        == []
    )


@pytest.mark.parametrize(("precision", "has_values"), [("tf32", False), ("tf32", True), ("ieee", False)])
def test_product_in_tf32_that_decides_among_integers_alone_is_named(precision: str, has_values: bool) -> None:
    def nearest(y: torch.Tensor) -> Outputs:
        return {"nearest": y.fill_diagonal_(-torch.inf).argmax(1), **({"y": y} if has_values else {})}

    variant = Variant("optimized", lambda inputs, config: nearest(dot(precision, inputs, config)["y"]), Knobs)
    op = Op(
        name="nearest", axes=("M", "N"), dtypes=("float32",), inputs=drawn, reference=lambda inputs: nearest(gram(inputs)["y"]),
        compare=lambda *_: [], traffic=lambda case: Traffic(4 * case["M"], 8 * case["M"]), variants=(variant,), module=__name__,
    )  # fmt: skip
    job = CaseJob.of([Run(Task(op, SMALL[1], variant), Knobs(1, 64))])
    assert [outcome.reason for _job, outcomes in run_jobs([job]) for outcome in outcomes] == [""]
    line = "nearest: products of fp32 that decide among integers are rounded to tf32, test_unusual_kernels.py:"
    assert [text[: len(line)] for text in coverage_lines([job])] == [line] * (precision == "tf32" and not has_values)
