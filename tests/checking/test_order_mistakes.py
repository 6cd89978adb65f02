"""Mistakes in the order of programs and in addresses: fix-ups, locks, persistent tiles, block pointers, scatters, dropout."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import CASES, Knobs, Mistaken, mistakes_of, rows_of, values
from row_sums import summing

from kerneltune.checking.jobs import CaseJob, coverage_lines, run_jobs
from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Outputs, Variant
from kerneltune.task import Run, Task

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="mistakes that Triton's interpreter finds")


@triton.jit
def _fix_up(x_ptr, y_ptr, partial_ptr, flag_ptr, N, PARTS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, part, size, total = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.cdiv(N, PARTS), 0.0
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = (at < size) & (part * size + at < N)
        total += tl.sum(tl.load(x_ptr + row * N + part * size + at, mask, other=0.0), 0)
    slot = row * PARTS + part
    if part < PARTS - 1:
        if MISTAKE == "flag before the sum":
            tl.atomic_xchg(flag_ptr + slot, 1, sem="release")
        tl.store(partial_ptr + slot, total)
        if MISTAKE == "relaxed flag":
            tl.atomic_xchg(flag_ptr + slot, 1, sem="relaxed")
        elif MISTAKE != "flag before the sum":
            tl.atomic_xchg(flag_ptr + slot, 1, sem="release")
    else:
        for other in range(0, PARTS - 1):
            awaited = row * PARTS + (0 if MISTAKE == "waits for the first alone" else other)
            while tl.atomic_cas(flag_ptr + awaited, 1, 1, sem="acquire") != 1:
                pass
            total += tl.load(partial_ptr + row * PARTS + other)
        tl.store(y_ptr + row, total)


def fix_up(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    partial, flag = x.new_empty(M, config.parts), x.new_zeros((M, config.parts), dtype=torch.int32)
    y = x.new_empty(M)
    _fix_up[(M, config.parts)](x, y, partial, flag, N, config.parts, config.block, mistake)
    return {"y": y}


@triton.jit
def _locked(x_ptr, dw_ptr, lock_ptr, N, GROUPS, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    group = row % GROUPS
    x = tl.load(x_ptr + row * N + at, at < N, other=0.0)
    if MISTAKE != "no lock":
        while tl.atomic_cas(lock_ptr + group, 0, 1) == 1:
            pass
    if tl.load(lock_ptr + GROUPS + group) == 0:
        if MISTAKE != "first for ever":
            tl.atomic_xchg(lock_ptr + GROUPS + group, 1)
    else:
        x += tl.load(dw_ptr + group * N + at, at < N, other=0.0)
    if MISTAKE == "released before the store":
        tl.atomic_xchg(lock_ptr + group, 0)
    tl.store(dw_ptr + group * N + at, x, at < N)
    if MISTAKE != "no lock" and MISTAKE != "released before the store":
        tl.atomic_xchg(lock_ptr + group, 0)


def locked(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    x, groups = inputs["x"], config.parts
    M, N = x.shape
    dw, lock = x.new_empty(groups, N), x.new_zeros(2 * groups, dtype=torch.int32)
    _locked[(M,)](x, dw, lock, N, groups, triton.next_power_of_2(N), mistake)
    return {"dw": dw[: min(M, groups)].sum(0)}


@triton.jit
def _counted(x_ptr, y_ptr, sum_ptr, count_ptr, N, PARTS: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    rows, part, size = tl.program_id(0).to(tl.int64) * 64 + tl.arange(0, 64), tl.program_id(1), tl.cdiv(N, PARTS)
    total = tl.zeros((64,), tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = (at < size) & (part * size + at < N)
        total += tl.sum(tl.load(x_ptr + rows[:, None] * N + part * size + at, mask[None, :], other=0.0), 1)
    tl.atomic_add(sum_ptr + rows, total)
    if MISTAKE == "relaxed counter":
        before = tl.atomic_add(count_ptr + tl.program_id(0), 1, sem="relaxed")
    else:
        before = tl.atomic_add(count_ptr + tl.program_id(0), 1)
    if (part if MISTAKE == "last by its id" else before) == PARTS - 1:
        tl.store(y_ptr + rows, tl.load(sum_ptr + rows))


def counted(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    M, N = inputs["x"].shape
    x = torch.nn.functional.pad(inputs["x"], (0, 0, 0, -M % 64))
    y, count = x.new_empty(len(x)), x.new_zeros(len(x) // 64, dtype=torch.int32)
    _counted[(len(count), config.parts)](x, y, x.new_zeros(len(x)), count, N, config.parts, config.block, mistake)
    return {"y": y[:M]}


@triton.jit
def _product(a_ptr, b_ptr, y_ptr, M, N, PROGRAMS, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    across = tl.cdiv(N, BLOCK)
    total = tl.zeros((16, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, 16) * across, PROGRAMS):
        row, col = tile // across * 16, tile % across * BLOCK
        a = tl.make_block_ptr(a_ptr, (M, 32), (32, 1), (row, 0), (16, 16), (1, 0))
        b = tl.make_block_ptr(b_ptr, (32, M if MISTAKE == "rows for columns" else N), (1, 32), (0, col), (16, BLOCK), (0, 1))
        if MISTAKE != "sum of the tile before":
            total = tl.zeros((16, BLOCK), tl.float32)
        for _ in range(0, 2):
            a_tile = tl.load(a, boundary_check=(0,), padding_option="zero")
            right = tl.load(b, boundary_check=(1,), padding_option="zero")
            total = tl.dot(a_tile, right, total, input_precision="ieee")
            a = tl.advance(a, (0, 16))
            b = tl.advance(b, (0, 16) if MISTAKE == "advance along the columns" else (16, 0))
        y = tl.make_block_ptr(y_ptr, (M, N), (N, 1), (row, col), (16, BLOCK), (1, 0))
        tl.store(y, total, boundary_check=(0,) if MISTAKE == "columns unchecked" else (0, 1))


def product(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    M, N = inputs["a"].shape[0], inputs["b"].shape[0]
    y = inputs["a"].new_empty(M, N)
    _product[(config.parts,)](inputs["a"], inputs["b"], y, M, N, config.parts, config.block, mistake)
    return {"y": y}


def factors(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {name: values(seed + number, device, case[axis], 32) for number, (name, axis) in enumerate((("a", "M"), ("b", "N")))}


@triton.jit
def _scatter(x_ptr, place_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target, mask = tl.load(place_ptr + row), at < N
    if MISTAKE != "nowhere is a row":
        mask &= target >= 0
    x = tl.load(x_ptr + row * N + at, mask, other=0.0)
    tl.atomic_add(y_ptr + target * N + at, x, mask)


def scatter(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    M, N = inputs["x"].shape
    y = inputs["x"].new_zeros(M // 2 + 1, N)
    _scatter[(M, triton.cdiv(N, config.block))](inputs["x"], inputs["place"], y, N, config.block, mistake)
    return {"y": y}


def rows_with_places(case: Case, *, device: str, seed: int = 0) -> Inputs:
    inputs = rows_of(case, device=device, seed=seed)
    if device == "meta":
        return inputs | {"place": torch.empty(case["M"], dtype=torch.int64, device=device)}
    random = torch.Generator().manual_seed(seed)
    return inputs | {"place": torch.randint(-1, case["M"] // 2 + 1, (case["M"],), generator=random)}


def scattered(inputs: Inputs) -> Outputs:
    x, is_placed = inputs["x"], inputs["place"] >= 0
    return {"y": x.new_zeros(len(x) // 2 + 1, x.shape[1]).index_add(0, inputs["place"][is_placed], x[is_placed])}


@triton.jit
def _dropout(x_ptr, y_ptr, count, first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.rand(7, at + first) > 0.25
    x = tl.load(x_ptr + at, at < count, other=0.0)
    tl.store(y_ptr + at, tl.where(kept, x / 0.75, 0.0), at < count)


def dropout(mistake: str, inputs: Inputs, config: Knobs) -> Outputs:
    outputs = {name: torch.empty_like(x) for name, x in inputs.items()}
    for number, (name, x) in enumerate(inputs.items()):
        first = number if mistake == "other numbers backward" else 0
        _dropout[(triton.cdiv(x.numel(), config.block),)](x, outputs[name], x.numel(), first, config.block)
    return outputs


def forward_and_backward(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {name: values(seed + number, device, case["M"], case["N"]) for number, name in enumerate(("x", "dy"))}


def compare_dropout(_case: Case, inputs: Inputs, outputs: Outputs, _expected: Outputs) -> list[str]:
    kept = outputs["x"] != 0
    return [
        line for name, x in inputs.items() for line in close(name, outputs[name], torch.where(kept, x / 0.75, 0.0), 1e-5, 0.0)
    ]


OPERATORS = {
    "fix_up": Mistaken(
        fix_up, rows_of, lambda inputs: {"y": inputs["x"].sum(1)},
        ("flag before the sum", "relaxed flag", "waits for the first alone"),
    ),
    "locked": Mistaken(
        locked, rows_of, lambda inputs: {"dw": inputs["x"].sum(0)},
        ("no lock", "released before the store", "first for ever"),
        lambda _case, _given, outputs, expected: close("dw", outputs["dw"], expected["dw"], 1e-3, 1e-3),
    ),
    "counted": Mistaken(
        counted, rows_of, lambda inputs: {"y": inputs["x"].sum(1)}, ("last by its id", "relaxed counter")
    ),
    "product": Mistaken(
        product, factors, lambda inputs: {"y": inputs["a"] @ inputs["b"].t()},
        ("sum of the tile before", "rows for columns", "advance along the columns", "columns unchecked"),
    ),
    "scatter": Mistaken(scatter, rows_with_places, scattered, ("nowhere is a row",)),
    "dropout": Mistaken(
        dropout, forward_and_backward, lambda inputs: dict(inputs), ("other numbers backward",), compare_dropout
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), mistakes_of(OPERATORS))
def test_check_finds_a_mistake_in_order_or_addresses(name: str, mistake: str) -> None:
    assert OPERATORS[name].findings(mistake)


@pytest.mark.usefixtures("short_launches")
@pytest.mark.parametrize("name", OPERATORS)
def test_check_finds_nothing_in_right_order_and_addresses(name: str) -> None:
    assert OPERATORS[name].findings("") == []


@triton.jit
def _noisy(x_ptr, y_ptr, count, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    noise = tl.rand(7, tl.program_id(0) * STEP + tl.arange(0, BLOCK))
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < count, other=0.0) + noise, at < count)


def noisy(step: int, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    _noisy[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), STEP=step, BLOCK=32)
    return {"y": y}


@pytest.mark.parametrize("step", [0, 32])
def test_programs_that_draw_the_same_random_numbers_are_named(step: int) -> None:
    variant = Variant("optimized", partial(noisy, step))
    op = replace(summing(""), compare=lambda *_: [], variants=(variant,))
    job = CaseJob.of([Run(Task(op, CASES[1], variant), None)])
    assert [outcome.reason for _job, outcomes in run_jobs([job]) for outcome in outcomes] == [""]
    text = "summed: two programs draw the same random numbers, test_order_mistakes.py:"
    assert any(line.startswith(text) for line in coverage_lines([job])) == (step == 0)
