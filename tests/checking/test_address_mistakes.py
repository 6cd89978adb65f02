"""Find mistakes of addresses in the largest case, of which a check without a GPU computes no values."""

import importlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import CASES, LARGE, Knobs, Mistaken, case_of, rows_of, values
from row_sums import BENCH, summing, sums_of_rows

from kerneltune.checking.addresses import address_errors, largest_cases
from kerneltune.checking.jobs import CaseJob, address_job, coverage_lines, run_jobs
from kerneltune.interpreter import undefined
from kerneltune.interpreter.facts import noting
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant
from kerneltune.task import CaseError, Run, Task

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="addresses are checked in Triton's interpreter")


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("grid cut short", "stores no last element of y_ptr in sums_of_rows, as all checks do: a grid"),
        ("loop cut short", "loads no last element of x_ptr in sums_of_rows, as all checks do: a grid or loop"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("bench", BENCH)
def test_address_check_names_a_grid_or_loop_cut_short_in_the_largest_case(bench: Case, mistake: str, text: str) -> None:
    op = summing(mistake)
    jobs = [
        address_job(Task(op, bench, op.variants[0])),
        *(CaseJob.of([Run(Task(op, it, op.variants[0]), None)]) for it in CASES),
    ]
    assert not any(outcome.reason for _job, outcomes in run_jobs(jobs) for outcome in outcomes)
    lines = [line for line in coverage_lines(jobs) if "last element" in line]
    is_short = mistake and bench is BENCH["grid" in mistake]
    assert lines == [f"summed: the largest case {text} cut short?"] * bool(is_short)


@triton.jit
def _sums_of_chosen_rows(x_ptr, chosen_ptr, y_ptr, M, N, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    if row < M:
        chosen = tl.load(chosen_ptr + row).to(tl.int64)
        total = tl.sum(tl.load(x_ptr + chosen * N + at, at < N, other=0.0), 0)
        tl.store(y_ptr + (chosen if ADDED else row), total)


def sums_of_chosen_rows(num_programs: int, to_chosen: bool, given: Inputs, _config: None) -> Outputs:
    """Sum rows in programs of which the last store nothing; where results go may depend on loaded numbers."""
    x = given["x"]
    M, N = x.shape
    y, chosen = x.new_empty(M), torch.arange(M, device=x.device)
    _sums_of_chosen_rows[(num_programs or M,)](x, chosen, y, M, N, BLOCK=triton.next_power_of_2(N), ADDED=to_chosen)
    return {"y": y}


@pytest.mark.parametrize(("num_programs", "to_chosen", "is_named"), [(64, False, True), (0, False, False), (64, True, False)])
def test_address_check_names_a_grid_of_fixed_size_where_a_kernel_loads_whole_numbers(
    num_programs: int, to_chosen: bool, is_named: bool
) -> None:
    op = summing("")
    op = replace(op, variants=(replace(op.variants[0], run=partial(sums_of_chosen_rows, num_programs, to_chosen)),))
    jobs = [
        address_job(Task(op, BENCH[1], op.variants[0])),
        *(CaseJob.of([Run(Task(op, it, op.variants[0]), None)]) for it in CASES),
    ]
    assert not any(outcome.reason for _job, outcomes in run_jobs(jobs) for outcome in outcomes)
    assert any("no last element of y_ptr" in line for line in coverage_lines(jobs)) == is_named


@triton.jit
def _blocks_of_sums(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    begin = row.to(tl.int64) * N if WIDE else row * N
    tl.store(y_ptr + row, tl.sum(tl.load(x_ptr + begin + at, (row < M) & (at < N), other=0.0), 1, keep_dims=True), row < M)


@pytest.mark.parametrize("narrow", [0, 1, 4])
def test_address_check_finds_an_overflow_that_one_config_alone_has(narrow: int) -> None:
    def run(given: Inputs, config: Knobs) -> Outputs:
        x = given["x"]
        M, N = x.shape
        y, wide = x.new_empty(M), config.parts != narrow
        _blocks_of_sums[(triton.cdiv(M, config.parts),)](x, y, M, N, config.parts, wide, BLOCK=triton.next_power_of_2(N))
        return {"y": y}

    space = {"parts": (1, 2, 4), "block": (64,)}
    variant = Variant("optimized", run, Knobs, lambda _case: space, default=lambda _case: Knobs(1, 64))
    op = replace(summing(""), variants=(variant,))
    ((_, outcomes),) = run_jobs([address_job(Task(op, LARGE, variant))])
    found = [(outcome.config, outcome.case, outcome.reason.partition(" for")[0]) for outcome in outcomes]
    assert found == [(Knobs(narrow, 64), LARGE, "int32 overflow detected")] * bool(narrow)


@pytest.mark.parametrize("short", [0, 2])
def test_grid_that_one_config_alone_cuts_short_in_the_largest_case_is_named(short: int) -> None:
    def run(given: Inputs, config: Knobs) -> Outputs:
        x = given["x"]
        M, N = x.shape
        y, grid = x.new_empty(M), triton.cdiv(M, config.parts)
        grid = grid % 65536 or 1 if config.parts == short else grid
        _blocks_of_sums[(grid,)](x, y, M, N, config.parts, True, BLOCK=triton.next_power_of_2(N))
        return {"y": y}

    variant = Variant(
        "optimized", run, Knobs, lambda _case: {"parts": (1, 2), "block": (64,)}, default=lambda _case: Knobs(1, 64)
    )
    task = Task(replace(summing(""), variants=(variant,)), case_of("large", 1 << 17, 64), variant)
    ((_, outcomes),) = run_jobs([address_job(task, (), CASES)])
    line = (
        "summed optimized: with parts=2 block=64 the largest case stores no last element of y_ptr in _blocks_of_sums, "
        "and with the default config it does: a grid cut short?"
    )
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("noted", line)] * bool(short)


@triton.jit
def _sums_in_turns(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        tl.store(y_ptr + row, tl.sum(tl.load(x_ptr + row.to(tl.int64) * N + at, at < N, other=0.0), 0))


def sums_in_turns(_mistake: str, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    M, N = x.shape
    y = x.new_empty(M)
    _sums_in_turns[(min(M, 132),)](x, y, M, N, BLOCK=triton.next_power_of_2(N))
    return {"y": y}


def sums_in_a_slice(_mistake: str, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    M, N = x.shape
    y = x.new_empty(M if M < 4096 else 2 * M)[:M]  # as of a workspace that an earlier call has made longer
    sums_of_rows[(M,)](x, y, N, BLOCK=triton.next_power_of_2(N), IS_LONG=False, MISTAKE="")
    return {"y": y}


@triton.jit
def _sums_in_steps(x_ptr, ends_ptr, steps_ptr, M, N, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tl.store(steps_ptr + row, 0.0)
    for step in range(1, tl.load(ends_ptr + row)):
        tl.store(steps_ptr + step % 2 * M + row, tl.sum(tl.load(x_ptr + row * N + at, at < N, other=0.0), 0))


def sums_in_steps(_mistake: str, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    M, N = x.shape
    steps, ends = x.new_empty(2, M), torch.full((M,), 2, device=x.device)
    _sums_in_steps[(M,)](x, ends, steps, M, N, BLOCK=triton.next_power_of_2(N))
    return {"y": steps[1]}


def sums_in_halves(mistake: str, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    M, N = x.shape
    y, half = x.new_empty(M), M // 2 if M > 4096 else M
    block = triton.next_power_of_2(N)
    sums_of_rows[(half,)](x, y, N, BLOCK=block, IS_LONG=False, MISTAKE="")
    if half < M:
        undefined.LAUNCH_SECONDS = 0.0 if mistake == "slow" else 60.0  # in the fork that checks addresses
        sums_of_rows[(M - half,)](x[half:], y[half:], N, BLOCK=block, IS_LONG=False, MISTAKE="")
    return {"y": y}


@pytest.mark.parametrize(
    ("run", "mistake"),
    [(sums_in_turns, ""), (sums_in_a_slice, ""), (sums_in_steps, ""), (sums_in_halves, "slow"), (sums_in_halves, "")],
    ids=["rows in turns", "a slice", "steps", "no time for the last rows", "two launches"],
)
def test_grid_that_reaches_the_last_element_is_not_named_as_cut_short(run: Callable[..., Outputs], mistake: str) -> None:
    op = summing("")
    op = replace(op, variants=(replace(op.variants[0], run=partial(run, mistake)),))
    jobs = [
        address_job(Task(op, BENCH[1], op.variants[0])),
        *(CaseJob.of([Run(Task(op, it, op.variants[0]), None)]) for it in CASES),
    ]
    assert not any(outcome.reason for _job, outcomes in run_jobs(jobs) for outcome in outcomes)
    assert jobs[0].facts
    assert [line for line in coverage_lines(jobs) if "last element" in line] == []


@triton.jit
def _whole_rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr, ROW_AXIS: tl.constexpr):
    row, at = tl.program_id(ROW_AXIS).to(tl.int64), tl.arange(0, BLOCK)
    tl.store(y_ptr + row, tl.sum(tl.load(x_ptr + row * N + at, at < N, other=0.0), 0))


def whole_rows(axis: int, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    y = x.new_empty(x.shape[0])
    _whole_rows[(1,) * axis + (x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), ROW_AXIS=axis)
    return {"y": y}


@pytest.mark.parametrize(
    ("axis", "largest", "fault"),
    [
        (0, case_of("tall", 70_000, 64), ""),
        (1, case_of("tall", 70_000, 64), "grid of _whole_rows: 70000 programs along axis 1: a GPU takes at most 65535"),
        (0, case_of("wide", 2, 3_000_000), "_whole_rows: a block of this size does not compile: numel (4194304) exceeds"),
    ],
)
def test_address_check_finds_a_largest_case_that_a_gpu_refuses(axis: int, largest: Case, fault: str) -> None:
    variant = Variant("optimized", partial(whole_rows, axis))
    lines = address_errors(replace(summing(""), variants=(variant,)), largest, variant, None)
    assert [line[: len(fault)] for line in lines] == [fault] * bool(fault)


@triton.jit
def _gathered(x_ptr, index_ptr, count_ptr, y_ptr, N, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr):
    if tl.program_id(0) >= tl.load(count_ptr):
        return
    at, index = tl.arange(0, BLOCK), tl.load(index_ptr + tl.program_id(0))
    row = index.to(tl.int64) if IS_WIDE else index
    x = tl.load(x_ptr + row * N + at, at < N, other=0.0)
    tl.store(y_ptr + tl.program_id(0).to(tl.int64) * N + at, x, at < N)


def gathered(is_wide: bool, inputs: Inputs, _config: None) -> Outputs:
    x, index = inputs["x"], inputs["index"].flip(0).clone()
    y, count = x.new_empty(index.shape[0], x.shape[1]), torch.full((1,), index.shape[0], device=x.device)
    _gathered[(index.shape[0],)](x, index, count, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), IS_WIDE=is_wide)
    return {"y": y}


def rows_with_index(case: Case, *, device: str, seed: int = 0) -> Inputs:
    count, index = 7, torch.empty(7, dtype=torch.int32, device=device)
    if device != "meta":
        index = torch.arange(count, dtype=torch.int32) * (case["M"] - 1) // (count - 1)
    return rows_of(case, device=device, seed=seed) | {"index": index if case["M"] > 1 else None}


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("checks", [[*CASES, case_of("no inputs", -1, 1), case_of("no index", 1, 5)], CASES[:1]])
def test_address_check_finds_a_loaded_index_that_overflows(is_wide: bool, checks: list[Case]) -> None:
    variant, large = Variant("optimized", partial(gathered, is_wide)), case_of("large", 200_000, 20_000)
    op = replace(summing(""), inputs=rows_with_index, variants=(variant,))
    errors = address_errors(op, large, variant, None, checks)
    assert [line.startswith("int32 overflow detected") for line in errors] == [True] * (not is_wide and len(checks) > 1)
    assert all(line.endswith(", with index_ptr up to 199999") for line in errors)


@triton.jit
def _pages(x_ptr, table_ptr, lens_ptr, y_ptr, width, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr):
    b, at = tl.program_id(0), tl.arange(0, BLOCK)
    page = tl.load(table_ptr + b * width + width - 1, width <= tl.load(lens_ptr + b), other=0)
    page = page.to(tl.int64) if IS_WIDE else page
    tl.store(y_ptr + b.to(tl.int64) * BLOCK + at, tl.load(x_ptr + page * BLOCK + at))


@pytest.mark.parametrize("is_wide", [True, False])
def test_address_check_takes_a_mask_by_lengths_that_few_sequences_have(is_wide: bool) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        M, N = case["M"], case["N"]
        given = {"x": torch.empty(M * N, 256, device=device), "table": torch.empty(M, N, dtype=torch.int32, device=device)}
        given["lens"] = torch.full((M,), N, dtype=torch.int32, device=device)
        return given if device == "meta" else given | {"table": torch.arange(M * N, dtype=torch.int32).view(M, N)}

    def run(given: Inputs, _config: None) -> Outputs:
        table = given["table"]
        y = given["x"].new_empty(len(table), 256)
        _pages[(len(table),)](given["x"], table, given["lens"], y, table.shape[1], BLOCK=256, IS_WIDE=is_wide)
        return {"y": y}

    op = replace(summing(""), inputs=inputs, variants=(Variant("optimized", run),))
    checks = [case_of("one", 1, 1), case_of("odd", 5, 77), case_of("even", 3, 128)]
    errors = address_errors(op, case_of("large", 4096, 4096), op.variants[0], None, checks)
    assert [line.partition(",")[0] for line in errors] == ["int32 overflow detected for operation mul"] * (not is_wide)


@triton.jit
def _long_rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, total = tl.program_id(0), 0.0
    for begin in range(0, N, BLOCK):
        total += tl.sum(tl.load(x_ptr + row * N + begin + tl.arange(0, BLOCK)))
    tl.store(y_ptr + row, total)


def long_rows(inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    y = x.new_empty(x.shape[0])
    _long_rows[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
    return {"y": y}


@pytest.mark.usefixtures("short_launches")
def test_address_check_judges_the_last_program_after_a_long_first_one() -> None:
    variant = Variant("optimized", long_rows)
    errors = address_errors(replace(summing(""), variants=(variant,)), case_of("large", 65_536, 1 << 20), variant, None)
    assert [line.partition(",")[0] for line in errors] == ["int32 overflow detected for operation mul"]


@triton.jit
def _sums_of_columns(x_ptr, y_ptr, M, N, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), M, 4):
        start = tl.cast(row, tl.int64) * N if WIDE else row * N
        total += tl.load(x_ptr + start + at, at < N, other=0.0)
    tl.store(y_ptr + tl.program_id(0) * N + at, total, at < N)


@pytest.mark.parametrize("is_wide", [True, False])
def test_address_check_finds_an_offset_that_overflows_late_in_a_loop(is_wide: bool) -> None:
    def run(inputs: Inputs, _config: None) -> Outputs:
        y = inputs["x"].new_empty(4, inputs["x"].shape[1])
        _sums_of_columns[(4,)](inputs["x"], y, *inputs["x"].shape, WIDE=is_wide, BLOCK=512)
        return {"y": y}

    op = replace(summing(""), variants=(Variant("optimized", run),))
    lines = address_errors(op, case_of("tall", 8_000_000, 300), op.variants[0], None)
    assert [line.partition(",")[0] for line in lines] == ["int32 overflow detected for operation mul"] * (not is_wide)


@triton.jit
def _tiles_in_turns(x_ptr, y_ptr, M, N, IS_LONG: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        for begin in range(0, N, BLOCK):
            x = tl.load(x_ptr + row.to(tl.int64) * N + begin + at, begin + at < N)
            if begin + 2 * BLOCK > N and IS_LONG:
                x = tl.load(x_ptr + row * N + begin + at, begin + at < N)
            tl.store(y_ptr + row.to(tl.int64) * N + begin + at, x, begin + at < N)


@pytest.mark.parametrize("is_long", [True, False])
@pytest.mark.usefixtures("short_launches")
def test_address_check_judges_loops_within_a_long_loop(is_long: bool) -> None:
    def run(inputs: Inputs, _config: None) -> Outputs:
        y = torch.empty_like(inputs["x"])
        _tiles_in_turns[(4,)](inputs["x"], y, *inputs["x"].shape, IS_LONG=is_long, BLOCK=16)
        return {"y": y}

    op = replace(summing(""), variants=(Variant("optimized", run),))
    with noting() as facts:
        lines = address_errors(op, case_of("large", 8_000_000, 4000), op.variants[0], None)
    assert [line.partition(",")[0] for line in lines] == ["int32 overflow detected for operation mul"] * is_long
    assert not [fact for fact in facts if fact.kind == "not judged"]


MADE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "without device": lambda _x, M: torch.empty(M),
    "without device, as a list": lambda _x, M: torch.tensor([0.0] * 8).repeat(M // 8),
    "on the CPU by choice": lambda _x, M: torch.empty(M, device="cuda" if torch.cuda.is_available() else "cpu"),
    "moved": lambda x, M: torch.empty(M).to(x.device),
    "moved without waiting": lambda x, M: torch.tensor([0.0] * 8).to(x.device, non_blocking=True).repeat(M // 8),
    "empty": lambda _x, _M: torch.empty(0),
    "read by the host": lambda x, M: torch.empty(M, device=x.device) + int(torch.arange(M).max()),
    "right": lambda x, M: torch.empty(M, device=x.device),
    "pinned where a GPU is": lambda _x, M: torch.empty(M, pin_memory=torch.cuda.is_available()),
    "pinned afterwards": lambda _x, M: torch.empty(M).pin_memory() if torch.cuda.is_available() else torch.empty(M),
    "pinned and moved": lambda x, M: torch.empty(M, pin_memory=torch.cuda.is_available()).to(x.device, non_blocking=True),
    "copied from memory of the host": lambda x, M: x.new_empty(M).copy_(torch.empty(M)),
    "of the GPU's inputs": lambda x, M: torch.empty(M, device=x.device) if x.is_cuda else torch.empty(M),
    "under a device": lambda x, M: within(x.device, M),
}


def within(device: torch.device, M: int) -> torch.Tensor:
    with torch.device(device):
        return torch.empty(M)


def summed_into(make: Callable[[torch.Tensor, int], torch.Tensor]) -> Op:
    """Return an operator that stores sums of rows in a tensor that `make` makes for an input and a number of rows."""

    def run(inputs: Inputs, _config: None) -> Outputs:
        x = inputs["x"]
        y = make(x, x.shape[0])
        sums_of_rows[(y.numel(),)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), IS_LONG=False, MISTAKE="")
        return {"y": y}

    return replace(summing(""), variants=(Variant("optimized", run),))


@pytest.mark.parametrize("made", MADE)
def test_address_check_finds_an_argument_that_lacks_device(made: str) -> None:
    op = summed_into(MADE[made])
    fault = "y_ptr of sums_of_rows lies on the CPU, its other tensors on the GPU: is it made without `device=`?"
    assert address_errors(op, case_of("tall", 70_000, 64), op.variants[0], None) == [fault] * made.startswith("without device")


SCALED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "without device": lambda x: x * torch.arange(x.shape[1]),
    "without device, by an index": lambda x: torch.zeros(x.shape).index_add_(0, torch.arange(len(x), device=x.device), x),
    "a number": lambda x: x * torch.tensor(2.0),
    "right": lambda x: x * torch.arange(x.shape[1], device=x.device),
    "of the GPU's inputs": lambda x: x * torch.arange(x.shape[1], device=x.device if x.is_cuda else "cpu"),
    "an index from the host": lambda x: x[torch.arange(len(x))],
    "on the CPU by choice": lambda x: x * torch.arange(x.shape[1], device="cpu"),
}


@pytest.mark.parametrize("scaled", SCALED)
def test_address_check_finds_a_tensor_that_lacks_device_in_an_operation_of_torch(scaled: str) -> None:
    scale = SCALED[scaled]
    variant = Variant("baseline", lambda inputs, _config: {"y": scale(inputs["x"])})
    place = f"{Path(__file__).name}:{scale.__code__.co_firstlineno}"
    fault = f"{place}: torch needs its tensors on one device: is one made without `device=`?"
    found = address_errors(replace(summing(""), variants=(variant,)), case_of("tall", 70_000, 64), variant, None)
    assert found == [fault] * scaled.startswith("without device")


def test_address_check_accepts_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.numel() == 70_000)  # as on a GPU
    op = summed_into(MADE["without device"])
    assert address_errors(op, case_of("tall", 70_000, 64), op.variants[0], None) == []


@pytest.mark.parametrize("verb", ["set", "get"])
@pytest.mark.parametrize("default", ["device", "tensor_type"])
def test_address_check_judges_no_device_of_code_that_sets_a_default(
    verb: str, default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"host_that_{verb}s_{default}.py"
    file.write_text(f"import torch\n\nif torch.cuda.is_available():\n    torch.{verb}_default_{default}('cuda')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(file.stem)
    op = replace(summed_into(MADE["without device"]), module=file.stem)
    assert len(address_errors(op, case_of("tall", 70_000, 64), op.variants[0], None)) == (verb == "get")


def pages_with_index(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Return a page for each two elements of a case, and all pages in reverse."""
    pages = case["M"] * case["N"] // 2
    index = torch.empty(pages, dtype=torch.int32, device=device)
    x = torch.empty(pages, 64, device=device) if device == "meta" else torch.randn(pages, 64)
    return {"x": x, "index": index if device == "meta" else torch.arange(pages, dtype=torch.int32).flip(0)}


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize(
    "checks", [[case_of("few", 4, 9), case_of("more", 4, 10)], [case_of("few", 4, 9), case_of("same", 9, 4)]]
)
def test_address_check_takes_the_pages_of_an_input_for_the_limit_of_their_index(is_wide: bool, checks: list[Case]) -> None:
    variant, large = Variant("optimized", partial(gathered, is_wide)), case_of("large", 20_000, 20_000)
    op = replace(summing(""), inputs=pages_with_index, variants=(variant,))
    errors = address_errors(op, large, variant, None, checks)
    is_limited = checks[1]["N"] == 10  # in cases of equal sizes the number of pages may be a constant
    assert [", with index_ptr up to 199999999" in line for line in errors] == [True] * (not is_wide and is_limited)


@pytest.mark.parametrize("rows_of_table", [1, 1_000])
def test_largest_cases_have_the_longest_axis_of_an_input_above_2_gb_of_which_little_is_read(rows_of_table: int) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {"tables": [torch.empty(rows_of_table * case["M"], 64, device=device)]}

    op, most, long = replace(summing(""), inputs=inputs), case_of("most", 100, 1000), case_of("long", 10_000, 8)
    assert largest_cases(op, [most, long, case_of("few", 4, 9)]) == ([most, long] if rows_of_table > 1 else [most])


@pytest.mark.parametrize("least_rows", [0, 1_000])  # those of a check case, and of the largest case alone
def test_inputs_that_cannot_be_made_without_memory_fail_the_check_that_needs_them(least_rows: int) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        if device == "meta" and case["M"] >= least_rows:
            raise TypeError("no generator for meta")
        return {"x": values(seed, device, case["M"], case["N"])}

    operator = Mistaken(lambda _mistake, given, _knobs: {"y": 2 * given["x"]}, inputs, lambda given: {"y": 2 * given["x"]}, ())
    reason = r"test_address_mistakes.py:\d+: inputs: TypeError: no generator for meta, on device meta, which"
    with nullcontext() if least_rows else pytest.raises(CaseError, match=reason):
        (line,) = operator.findings("")
        assert re.match(reason, line)
