"""Find mistakes at sizes, flags and kernels of bench cases alone: a derived check case has the size, or a line names the size."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import case_of, rows_of
from test_pairs import op_with

from kerneltune.interpreter import bounds
from kerneltune.interpreter.facts import Fact
from kerneltune.interpreter.modes import unlaunched
from kerneltune.measuring.check import Checker, address_errors
from kerneltune.measuring.jobs import address_job, case_job, coverage_lines, derived_cases, run_jobs
from kerneltune.measuring.pairs import check_cost, check_pairs
from kerneltune.search.task import Run, Task
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="derived cases run in Triton's interpreter")

CHECK = [case_of("one", 1, 2), case_of("odd", 13, 34), case_of("wide", 8, 260)]
BENCH = [case_of("long", 4096, 3000), case_of("short", 8192, 64)]


@triton.jit
def _doubled_if_long(total, size):
    if size > 2048:
        total *= 2
    return total


@triton.jit
def _sums(x_ptr, y_ptr, N, BLOCK: tl.constexpr, IS_LONG: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    at = tl.arange(0, BLOCK)
    total = tl.load(x_ptr + row + at, at < N, other=0.0)
    if MISTAKE != "block below every row":
        for begin in range(BLOCK, N, BLOCK):
            total += tl.load(x_ptr + row + begin + at, begin + at < N, other=0.0)
    tiles = tl.cdiv(N, BLOCK)
    if tiles > 2 and MISTAKE == "branch on a count of tiles":
        total *= 2
    if N > 2048 and MISTAKE == "branch on a size":
        total *= 2
    if MISTAKE == "branch of a device function":
        total = _doubled_if_long(total, N)
    if IS_LONG and MISTAKE == "flag":
        total *= 2
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _sums_of_long_rows(x_ptr, y_ptr, N):
    total = 0.0
    for begin in range(0, N - 64, 64):
        total += tl.sum(tl.load(x_ptr + tl.program_id(0).to(tl.int64) * N + begin + tl.arange(0, 64)), 0)
    tl.store(y_ptr + tl.program_id(0), total)


@triton.jit
def _swizzled_copy(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr, GROUP: tl.constexpr, IS_RAGGED: tl.constexpr):
    num_tiles = tl.cdiv(M, BLOCK)
    tiles_n = tl.cdiv(N, BLOCK)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    size = tl.minimum(num_tiles - first, GROUP) if IS_RAGGED else GROUP
    rows = (first + pid % size) * BLOCK + tl.arange(0, BLOCK)
    columns = (pid % (GROUP * tiles_n)) // size * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask, other=0.0), mask)


def copied(is_ragged: bool, inputs: Inputs, _config: None) -> Outputs:
    y = torch.empty_like(inputs["x"])
    M, N = y.shape
    _swizzled_copy[(triton.cdiv(M, 16) * triton.cdiv(N, 16),)](inputs["x"], y, M, N, BLOCK=16, GROUP=2, IS_RAGGED=is_ragged)
    return {"y": y}


def sums(mistake: str, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = x.new_empty(M)
    if N > 2048 and mistake == "kernel of long rows":
        _sums_of_long_rows[(M,)](x, y, N)
    else:
        block = min(triton.next_power_of_2(N), 1024)
        if N > 2048 and mistake == "branch of host code":
            x = 2 * x
        rows = M - (M > 4096 and mistake == "grid cut short")
        _sums[(rows,)](x, y, N, BLOCK=block, IS_LONG=N > 2048 and mistake == "flag", MISTAKE=mistake)
    return {"y": y}


def summing(mistake: str, elements: int = 1) -> Op:
    """Return an operator with a mistake; `elements` is its traffic of an element, in bytes."""
    base = op_with("")
    variant = Variant("optimized", partial(sums, mistake))
    traffic = lambda case: Traffic(elements * case["M"] * case["N"], 0)  # noqa: E731
    compare = lambda case, inputs, outputs, expected: (  # noqa: E731
        [] if torch.allclose(outputs["y"], expected["y"], 1e-3, 1e-1) else ["y: wrong"]
    )
    return Op(
        name="summed", axes=base.axes, dtypes=base.dtypes, inputs=rows_of, reference=lambda inputs: {"y": inputs["x"].sum(1)},
        compare=compare, traffic=traffic, variants=(variant,), module=__name__,
    )  # fmt: skip


def findings(op: Op, cases: list[Case]) -> list[str]:
    variant = op.variants[0]
    return [line for case in cases for line in Checker(op, case, "cpu").errors(variant, variant.default_config(case))]


@pytest.mark.parametrize(
    "mistake",
    [
        "block below every row",
        "branch on a size",
        "branch on a count of tiles",
        "branch of a device function",
        "flag",
        "kernel of long rows",
        "branch of host code",
    ],
)
def test_size_that_only_bench_cases_have_is_checked_in_a_derived_case(mistake: str) -> None:
    assert findings(summing(mistake), CHECK) == []
    derived, without, _ = derived_cases(summing(mistake), CHECK, BENCH)
    assert findings(summing(mistake), derived) == ["y: wrong"]
    assert without == []
    assert max(case["M"] for case in derived if case["N"] == 3000) <= 13


def test_right_kernel_passes_in_derived_cases() -> None:
    derived, _, _ = derived_cases(summing(""), CHECK, BENCH)
    assert {case["N"] for case in derived} >= {3000}
    assert findings(summing(""), derived) == []


@pytest.mark.parametrize("mistake", ["branch on a size", "branch of host code", "kernel of long rows", "flag"])
def test_branch_above_a_size_is_checked_at_the_least_size_where_bench_cases_cost_too_much(mistake: str) -> None:
    op = summing(mistake, elements=16)
    derived, without, _ = derived_cases(op, CHECK, [case_of("huge", 4096, 1 << 20)])
    assert [case["N"] for case in derived if case["N"] > 2048] == [2050]  # a multiple of 2, as all sizes
    assert "y: wrong" in findings(op, derived)
    assert without == []


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("block below every row", "N > BLOCK in _sums"),
        ("branch on a size", "N > 2048 and MISTAKE == 'branch on a size' in _sums"),
        ("branch of a device function", "size > 2048 in _doubled_if_long"),
        ("flag", "IS_LONG=True in _sums"),
        ("kernel of long rows", "a launch of _sums_of_long_rows"),
        ("branch of host code", 'after `if N > 2048 and mistake == "branch of host code"` in sums'),
    ],
)
def test_coverage_names_a_size_too_costly_for_a_check(mistake: str, named: str) -> None:
    op = summing(mistake, elements=100_000)
    derived, _, facts = derived_cases(op, CHECK[:2], BENCH)
    assert [case for case in derived if case["N"] == 3000] == []
    variant = op.variants[0]
    checks = [case_job([Run(Task(op, case, variant), None)]) for case in (*CHECK[:2], case_of("long", 2, 3000))]
    addresses = address_job(Task(op, BENCH[0], variant), facts)
    dict(run_jobs([*checks, addresses]))
    (line,) = coverage_lines([*checks[:2], addresses])
    assert line.startswith("summed: no check has ")
    assert named in line
    assert named not in "".join(coverage_lines([*checks, addresses]))


@triton.jit
def _sums_with_conditions(x_ptr, y_ptr, N, LONG: tl.constexpr, VALUE: tl.constexpr):
    total = 0.0
    for begin in range(0, N, 64):
        at = begin + tl.arange(0, 64)
        x = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * N + at, at < N, other=0.0)
        if begin > LONG:
            x *= 2
        if tl.max(x, 0) == VALUE:
            x *= 2
        total += tl.sum(x, 0)
    tl.store(y_ptr + tl.program_id(0), total)


def sums_with_conditions(long: int, value: float, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    y = x.new_empty(len(x))
    _sums_with_conditions[(len(x),)](x, y, x.shape[1], LONG=long, VALUE=value)
    return {"y": y}


@pytest.mark.parametrize(
    ("long", "value", "named"),
    [
        (6000, 0.0, ["`if begin > LONG` at test_size_mistakes.py:"]),
        (6000, 42.5, ["`if begin > LONG` at test_size_mistakes.py:", "`if tl.max(x, 0) == VALUE` at test_size_mistakes.py:"]),
        (1000, 0.0, []),
    ],
)
def test_coverage_names_a_side_of_a_condition_that_no_check_takes(long: int, value: float, named: list[str]) -> None:
    variant = Variant("optimized", partial(sums_with_conditions, long, value))
    op = replace(summing(""), compare=lambda *_: [], variants=(variant,))
    checks = [case_job([Run(Task(op, case, variant), None)]) for case in (*CHECK, case_of("long", 2, 3000))]
    addresses = address_job(Task(op, BENCH[0], variant), derived_cases(op, CHECK, BENCH)[2])
    assert not [outcome for _job, outcomes in run_jobs([*checks, addresses]) for outcome in outcomes if outcome.reason]
    lines = " ".join(coverage_lines([*checks, addresses]))
    assert lines.count(" other than false") == len(named)
    assert all(name in lines for name in named)


@pytest.mark.parametrize("is_ragged", [True, False])
def test_tiles_that_a_group_does_not_divide_are_checked_in_a_derived_case(is_ragged: bool) -> None:
    equal = lambda case, inputs, outputs, expected: [] if torch.equal(outputs["y"], expected["y"]) else ["y: wrong"]  # noqa: E731
    op = replace(
        summing(""), reference=lambda inputs: {"y": inputs["x"].clone()}, compare=equal,
        variants=(Variant("optimized", partial(copied, is_ragged)),),
    )  # fmt: skip
    check = [case_of("even", 32, 40), case_of("odd", 20, 20), case_of("one", 1, 1)]
    assert findings(op, check) == []
    derived, _, _ = derived_cases(op, check, [case_of("ragged", 48, 6000)])
    assert [line for line in findings(op, derived) if line == "y: wrong"] == ([] if is_ragged else ["y: wrong"])


@triton.jit
def _is_in_window(at, count, window, IS_OFF: tl.constexpr):
    return (at < count) & (at >= count - window + IS_OFF)


@triton.jit
def _window_sums(x_ptr, y_ptr, N, window, BLOCK: tl.constexpr, IS_OFF: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, min(N, 64 * BLOCK), BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + tl.program_id(0) * N + at, _is_in_window(at, N, window, IS_OFF), other=0.0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


def window_sums(is_off: bool, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    y = x.new_empty(x.shape[0])
    _window_sums[(x.shape[0],)](x, y, x.shape[1], 1500, BLOCK=32, IS_OFF=is_off)
    return {"y": y}


@pytest.mark.parametrize("is_off", [False, True])
def test_window_that_only_rows_of_bench_cases_exceed_is_checked_in_a_derived_case(is_off: bool) -> None:
    variant = Variant("optimized", partial(window_sums, is_off))
    op = replace(summing(""), reference=lambda inputs: {"y": inputs["x"][:, -1500:].sum(1)}, variants=(variant,))
    assert findings(op, CHECK) == []
    derived, _, _ = derived_cases(op, CHECK, [case_of("long", 4096, 1600)])
    assert set(findings(op, derived)) == set(["y: wrong"] * is_off)
    assert 1600 in {case["N"] for case in derived}


def test_facts_tell_which_operand_is_the_minimum_and_which_of_two_sizes_is_larger() -> None:
    facts = []
    for columns in (1600, 3000):
        with unlaunched() as launches:
            window_sums(False, {"x": torch.empty(1, columns, device="meta")}, None)
        facts.append(launches.facts)
    assert facts[1] - facts[0] == {Fact("branch", "min(N, 64 * BLOCK) = 64 * BLOCK", "_window_sums")}
    assert set(map(str, facts[0])) >= {"count > window in _is_in_window", "min(N, 64 * BLOCK) = N in _window_sums"}


@pytest.mark.parametrize("is_wrong", [False, True])
def test_host_branch_of_another_config_above_a_size_runs_in_a_derived_case(is_wrong: bool) -> None:
    op = op_with("")
    right = op.variants[0].run

    def run(inputs: Inputs, config: Any) -> Outputs:
        outputs = right(inputs, config)
        if config.rows == 4 and len(inputs["x"]) > 128:
            outputs["y"] = outputs["y"] + is_wrong
        return outputs

    op = replace(op, variants=(replace(op.variants[0], run=run),))
    derived, _, _ = derived_cases(op, CHECK, [case_of("long", 200, 3000)])
    assert findings(op, derived) == []
    failed = check_pairs(op, op.variants[0], [*CHECK, *derived], partial(check_cost, op))[:-1]
    assert {(outcome.config.rows, outcome.case["M"]) for outcome in failed} == set([(4, 200)] * is_wrong)  # type: ignore[union-attr,index]


@pytest.mark.parametrize("mistake", ["grid cut short", ""])
def test_address_check_names_a_grid_cut_short_in_the_largest_case(mistake: str) -> None:
    op = summing(mistake)
    jobs = [
        address_job(Task(op, BENCH[1], op.variants[0])),
        *(case_job([Run(Task(op, it, op.variants[0]), None)]) for it in CHECK),
    ]
    assert not any(outcome.reason for _job, outcomes in run_jobs(jobs) for outcome in outcomes)
    lines = [line for line in coverage_lines(jobs) if "last element" in line]
    line = "summed: the largest case stores no last element of y_ptr in _sums, as all checks do: a grid cut short?"
    assert lines == [line] * bool(mistake)


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


def sums_in_halves(mistake: str, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    M, N = x.shape
    y, half = x.new_empty(M), M // 2 if M > 4096 else M
    block = triton.next_power_of_2(N)
    _sums[(half,)](x, y, N, BLOCK=block, IS_LONG=False, MISTAKE="")
    if half < M:
        bounds.LAUNCH_SECONDS = 0.0 if mistake == "slow" else 60.0  # in the fork that checks addresses
        _sums[(M - half,)](x[half:], y[half:], N, BLOCK=block, IS_LONG=False, MISTAKE="")
    return {"y": y}


@pytest.mark.parametrize(
    ("run", "mistake"),
    [(sums_in_turns, ""), (sums_in_halves, "slow"), (sums_in_halves, "")],
    ids=["rows in turns", "no time for the last rows", "two launches"],
)
def test_grid_that_reaches_the_last_element_is_not_named_as_cut_short(run: Callable[..., Outputs], mistake: str) -> None:
    op = summing("")
    op = replace(op, variants=(replace(op.variants[0], run=partial(run, mistake)),))
    jobs = [
        address_job(Task(op, BENCH[1], op.variants[0])),
        *(case_job([Run(Task(op, it, op.variants[0]), None)]) for it in CHECK),
    ]
    assert not any(outcome.reason for _job, outcomes in run_jobs(jobs) for outcome in outcomes)
    assert jobs[0].reached
    assert [line for line in coverage_lines(jobs) if "last element" in line] == []


def test_coverage_line_names_eight_parts_and_counts_the_rest() -> None:
    op = summing("")
    job = address_job(Task(op, BENCH[0], op.variants[0]))
    job.reached.update({Fact("branch", f"size > {count}", "_sums"): 1 for count in range(10)})
    (line,) = coverage_lines([job])
    assert line.count("size >") == 8
    assert line.endswith("size > 7 in _sums, and 2 more")


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
def _gathered(x_ptr, index_ptr, y_ptr, N, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr):
    at, index = tl.arange(0, BLOCK), tl.load(index_ptr + tl.program_id(0))
    row = index.to(tl.int64) if IS_WIDE else index
    x = tl.load(x_ptr + row * N + at, at < N, other=0.0)
    tl.store(y_ptr + tl.program_id(0).to(tl.int64) * N + at, x, at < N)


def gathered(is_wide: bool, inputs: Inputs, _config: None) -> Outputs:
    x, index = inputs["x"], inputs["index"]
    y = x.new_empty(index.shape[0], x.shape[1])
    _gathered[(index.shape[0],)](x, index, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), IS_WIDE=is_wide)
    return {"y": y}


def rows_with_index(case: Case, *, device: str, seed: int = 0) -> Inputs:
    count, index = 7, torch.empty(7, dtype=torch.int32, device=device)
    if device != "meta":
        index = torch.arange(count, dtype=torch.int32) * (case["M"] - 1) // (count - 1)
    return rows_of(case, device=device, seed=seed) | {"index": index}


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("checks", [[*CHECK, case_of("no inputs", -1, 1)], CHECK[:1]])
def test_address_check_finds_a_loaded_index_that_overflows(is_wide: bool, checks: list[Case]) -> None:
    variant, large = Variant("optimized", partial(gathered, is_wide)), case_of("large", 200_000, 20_000)
    op = replace(summing(""), inputs=rows_with_index, variants=(variant,))
    errors = address_errors(op, large, variant, None, checks)
    assert [line.startswith("int32 overflow detected") for line in errors] == [True] * (not is_wide and len(checks) > 1)
    assert all(line.endswith(", with index_ptr up to 199999") for line in errors)


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
def _normalized_rows(x_ptr, y_ptr, M, N, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[None, :]
    for begin in range(tl.program_id(0) * ROWS, M, PROGRAMS * ROWS):
        rows = begin + tl.arange(0, ROWS)[:, None]
        mask = (rows < M) & (at < N)
        x = tl.load(x_ptr + rows.to(tl.int64) * N + at, mask, other=0.0)
        centered = tl.where(mask, x - tl.sum(x, 1, keep_dims=True) / N, 0.0)
        variance = tl.sum(centered * centered, 1, keep_dims=True) / N
        tl.store(y_ptr + rows.to(tl.int64) * N + at, centered * tl.rsqrt(variance + 1e-5), mask)


def normalized_rows(inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = torch.empty_like(x)
    _normalized_rows[(8,)](x, y, M, N, PROGRAMS=8, ROWS=512, BLOCK=triton.next_power_of_2(N))
    return {"y": y}


def test_million_rows_of_a_bench_case_give_a_derived_case_of_few_rows() -> None:
    op = replace(
        summing("", elements=4), reference=lambda inputs: {"y": torch.layer_norm(inputs["x"], inputs["x"].shape[1:])},
        variants=(Variant("optimized", normalized_rows),),
    )  # fmt: skip
    derived, _, facts = derived_cases(op, [case_of("one", 1, 1), *CHECK[1:]], [case_of("tall", 1 << 20, 64)])
    assert Fact("branch", "M > ROWS", "_normalized_rows") in facts
    assert [case.axes for case in derived if case["M"] > 260] == [(("M", 513), ("N", 34))]


@triton.jit
def _limited_sums(x_ptr, count_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    count = tl.load(count_ptr + tl.program_id(0))
    end = tl.minimum(count, 250) if MISTAKE == "minimum" else min(count, 250) if MISTAKE == "min" else count
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + tl.program_id(0) * N + at, at < end, other=0.0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


def limited_sums(mistake: str, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    counts, y = torch.full_like(x[:, 0], x.shape[1], dtype=torch.int32), x.new_empty(x.shape[0])
    _limited_sums[(x.shape[0],)](x, counts, y, x.shape[1], BLOCK=32, MISTAKE=mistake)
    return {"y": y}


@pytest.mark.parametrize("mistake", ["", "minimum", "min"])
def test_minimum_of_a_loaded_value_whose_other_operand_no_check_takes_is_named(mistake: str) -> None:
    variant = Variant("optimized", partial(limited_sums, mistake))
    op = replace(summing(""), variants=(variant,))
    for cases, is_named in ((CHECK[:2], bool(mistake)), (CHECK, False)):
        checks = [case_job([Run(Task(op, case, variant), None)]) for case in cases]
        addresses = address_job(Task(op, BENCH[0], variant), derived_cases(op, cases, BENCH)[2])
        dict(run_jobs([*checks, addresses]))
        named = "250)` at test_size_mistakes.py:"
        lines = " ".join(coverage_lines([*checks, addresses]))
        assert (named in lines) == is_named, lines
        assert (" equal to its second operand" in lines) == is_named, lines


@triton.jit
def _last_places(x_ptr, place_ptr, N, BLOCK: tl.constexpr, IS_NARROW: tl.constexpr):
    best = tl.full([BLOCK], -1, tl.int32)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + tl.program_id(0) * N + at, at < N, other=0.0)
        best = tl.where(x > 0, at, best)
    place = tl.max(best, 0)
    tl.store(place_ptr + tl.program_id(0), place.to(tl.int16) if IS_NARROW else place)


def last_places(is_narrow: bool, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    y = torch.empty_like(x[:, 0], dtype=torch.int32)
    _last_places[(x.shape[0],)](x, y, x.shape[1], BLOCK=1024, IS_NARROW=is_narrow)
    return {"y": y}


@pytest.mark.parametrize("is_narrow", [False, True])
def test_place_in_16_bits_is_found_in_a_derived_case_that_needs_more(is_narrow: bool) -> None:
    def places(given: Inputs) -> Outputs:
        columns = torch.arange(given["x"].shape[1], dtype=torch.int32)
        return {"y": torch.where(given["x"] > 0, columns, -1).amax(1)}

    op = replace(summing(""), reference=places, variants=(Variant("optimized", partial(last_places, is_narrow)),))
    derived, _, _ = derived_cases(op, CHECK, [case_of("large", 4096, 1 << 20)])
    assert findings(op, derived) == ["y: wrong"] * is_narrow


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
    assert [line.endswith(", with index_ptr up to 199999999") for line in errors] == [True] * (not is_wide and is_limited)
