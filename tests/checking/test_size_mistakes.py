"""Find mistakes at sizes, flags and kernels of bench cases alone: a derived check case has the size, or a line names the size."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import CASES, case_of
from row_sums import BENCH, findings, summing, sums_of_rows
from test_pairs import op_with

from kerneltune.checking.derived import derived_cases
from kerneltune.checking.jobs import CaseJob, address_job, coverage_lines, run_jobs
from kerneltune.checking.pairs import check_pairs
from kerneltune.interpreter.facts import Fact
from kerneltune.interpreter.modes import unlaunched
from kerneltune.spec import Inputs, Outputs, Variant
from kerneltune.task import Run, Task

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="derived cases run in Triton's interpreter")


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
    assert findings(summing(mistake), CASES) == []
    derived, without, _ = derived_cases(summing(mistake), CASES, BENCH)
    assert findings(summing(mistake), derived) == ["y: wrong"]
    assert without == []
    assert max(case["M"] for case in derived if case["N"] == 3000) <= 13


def test_right_kernel_passes_in_derived_cases() -> None:
    derived, _, _ = derived_cases(summing(""), CASES, BENCH)
    assert {case["N"] for case in derived} >= {3000}
    assert findings(summing(""), derived) == []


@pytest.mark.parametrize("mistake", ["branch on a size", "branch of host code", "kernel of long rows", "flag"])
def test_branch_above_a_size_is_checked_at_the_least_size_where_bench_cases_cost_too_much(mistake: str) -> None:
    op = summing(mistake, elements=16)
    derived, without, _ = derived_cases(op, CASES, [case_of("huge", 4096, 1 << 20)])
    assert [case["N"] for case in derived if case["N"] > 2048] == [2050]  # a multiple of 2, as all sizes
    assert "y: wrong" in findings(op, derived)
    assert without == []


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("block below every row", "N > BLOCK in sums_of_rows"),
        ("branch on a size", "N > 2048 and MISTAKE == 'branch on a size' in sums_of_rows"),
        ("branch of a device function", "size > 2048 in _doubled_if_long"),
        ("flag", "IS_LONG=True in sums_of_rows"),
        ("kernel of long rows", "a launch of _sums_of_long_rows"),
        ("branch of host code", 'after `if N > 2048 and mistake == "branch of host code"` in sums'),
    ],
)
def test_coverage_names_a_size_too_costly_for_a_check(mistake: str, named: str) -> None:
    op = summing(mistake, elements=100_000)
    derived, _, facts = derived_cases(op, CASES[:2], BENCH)
    assert [case for case in derived if case["N"] == 3000] == []
    variant = op.variants[0]
    checks = [CaseJob.of([Run(Task(op, case, variant), None)]) for case in (*CASES[:2], case_of("long", 2, 3000))]
    addresses = address_job(Task(op, BENCH[0], variant), facts)
    dict(run_jobs([*checks, addresses]))
    line, *others = coverage_lines([*checks[:2], addresses])
    assert all("loads no last element of x_ptr in sums_of_rows" in other for other in others)
    assert bool(others) == (mistake == "block below every row")
    assert line.startswith("summed: no check has ")
    assert named in line
    assert named not in "".join(coverage_lines([*checks, addresses]))


def _limited(form: str, x: torch.Tensor, N: int) -> torch.Tensor:
    match form:
        case "min":
            return x * (min(N, 2048) // N)
        case "max":
            return x + max(N - 2048, 0)
        case "ternary":
            return x if N <= 2048 else 2 * x
        case "two conditions":
            return x if N <= 2048 or N % 32 else 2 * x
        case "comparison":
            return x * (1 + (N > 2048))
        case "slice":
            return torch.nn.functional.pad(x[:, :2048], (0, 0 if x.shape[1] <= 2048 else N - 2048))
        case "division":
            return x * (1 + N // 2050)
        case "clamp":
            places = torch.arange(N, device=x.device)
            return x[:, places.clamp(max=2047)]
        case "cast":
            places = torch.arange(N, device=x.device)
            return x + (places - places.to(torch.int16).long())
    return x


def sums_with_limit(form: str, inputs: Inputs, _config: None) -> Outputs:
    """Sum rows; a limit of host code, without an `if`, makes rows of more than 2048 columns wrong."""
    x = _limited(form, inputs["x"], inputs["x"].shape[1])
    y = x.new_empty(x.shape[0])
    sums_of_rows[(x.shape[0],)](x.contiguous(), y, x.shape[1], BLOCK=1024, IS_LONG=False, MISTAKE="")
    return {"y": y}


@pytest.mark.parametrize(
    "form", ["", "min", "max", "ternary", "two conditions", "comparison", "slice", "division", "clamp", "cast"]
)
def test_limit_of_host_code_without_an_if_is_checked_in_a_derived_case(form: str) -> None:
    op = replace(summing("", elements=16), variants=(Variant("optimized", partial(sums_with_limit, form)),))
    assert findings(op, CASES) == []
    derived, _, _ = derived_cases(op, CASES, [case_of("huge", 4096, 1 << 20)])
    assert ("y: wrong" in findings(op, derived)) == bool(form)


def _sums_by_device(inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    has_memory = x.device.type != "meta"
    if x.device.type == "meta":
        has_memory = False
    y = x.new_empty(x.shape[0])
    sums_of_rows[(x.shape[0],)](x, y, x.shape[1], BLOCK=64, IS_LONG=False, MISTAKE="" if has_memory else "none")
    return {"y": y}


def test_branch_on_tensors_without_memory_is_no_fact_of_a_bench_case() -> None:
    op = replace(summing(""), variants=(Variant("optimized", _sums_by_device),))
    _, _, facts = derived_cases(op, CASES, [case_of("long", 4096, 5000)])
    assert facts
    assert [str(fact) for fact in facts if "meta" in fact.text] == []


_workspaces: dict[str, torch.Tensor] = {}


def sums_in_workspace(grows: bool, inputs: Inputs, _config: None) -> Outputs:
    """Sum rows into memory that is kept for further calls."""
    x = inputs["x"]
    M, device = x.shape[0], str(x.device)
    if device not in _workspaces or (grows and len(_workspaces[device]) < M):
        _workspaces[device] = x.new_empty(max(M, 64))
    sums_of_rows[(M,)](x, _workspaces[device], x.shape[1], BLOCK=64, IS_LONG=False, MISTAKE="")
    return {"y": _workspaces[device].narrow(0, 0, M).clone()}


@pytest.mark.parametrize("grows", [False, True])
def test_workspace_kept_between_calls_is_checked_above_its_least_size(grows: bool) -> None:
    _workspaces.clear()
    op = replace(summing(""), variants=(Variant("optimized", partial(sums_in_workspace, grows)),))
    derived, _, _ = derived_cases(op, CASES, [case_of("long", 4096, 5000)])
    assert not _workspaces
    assert max(case["M"] for case in derived) > 64
    assert findings(op, CASES) == []
    assert any(line.startswith("store outside of y_ptr: element 64") for line in findings(op, derived)) == (not grows)


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
        x = tl.where(begin - 64 > LONG, 2 * x, x)
        x = tl.where(at < N, x, 0.0)
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
        (6000, 0.0, ["`if begin > LONG` at test", "`where begin - 64 > LONG` at test"]),
        (6000, 42.5, ["`if begin > LONG` at test", "`where begin - 64 > LONG` at test", "`if tl.max(x, 0) == VALUE` at test"]),
        (1000, 0.0, []),
    ],
)
def test_coverage_names_a_side_of_a_condition_that_no_check_takes(long: int, value: float, named: list[str]) -> None:
    variant = Variant("optimized", partial(sums_with_conditions, long, value))
    op = replace(summing(""), compare=lambda *_: [], variants=(variant,))
    checks = [CaseJob.of([Run(Task(op, case, variant), None)]) for case in (*CASES, case_of("long", 2, 3000))]
    addresses = address_job(Task(op, BENCH[0], variant), derived_cases(op, CASES, BENCH)[2])
    assert not [outcome for _job, outcomes in run_jobs([*checks, addresses]) for outcome in outcomes if outcome.reason]
    lines = " ".join(coverage_lines([*checks, addresses]))
    assert lines.count(" other than false") == len(named)
    assert all(name in lines for name in named)


@triton.jit
def _least_values(x_ptr, y_ptr, N, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    least = tl.full([BLOCK], FIRST, tl.float32)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        least = tl.minimum(least, tl.load(x_ptr + tl.program_id(0) * N + at, at < N, other=0.0))
    tl.store(y_ptr + tl.program_id(0), tl.min(least, 0))


def least_values(first: float, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    y = x.new_empty(x.shape[0])
    _least_values[(x.shape[0],)](x, y, x.shape[1], BLOCK=32, FIRST=first)
    return {"y": y}


@pytest.mark.parametrize("first", [0.0, 1e30])
def test_rows_of_whole_blocks_that_only_bench_cases_have_are_checked_in_a_derived_case(first: float) -> None:
    op = replace(
        summing(""), inputs=lambda *_args, **options: {"x": torch.ones(_args[0]["M"], _args[0]["N"], device=options["device"])},
        reference=lambda inputs: {"y": inputs["x"].amin(1).clamp(max=0)},
        compare=lambda case, inputs, outputs, expected: [] if torch.equal(outputs["y"], expected["y"]) else ["y: wrong"],
        variants=(Variant("optimized", partial(least_values, first)),),
    )  # fmt: skip
    check = [case_of("ragged", 9, 100), case_of("short", 3, 20)]
    assert findings(op, check) == []
    derived, _, _ = derived_cases(op, check, [case_of("whole", 64, 320)])
    assert [line for line in findings(op, derived) if line == "y: wrong"] == (["y: wrong"] if first else [])


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
    assert ("y: wrong" in findings(op, derived)) != is_ragged


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
    assert findings(op, CASES) == []
    derived, _, _ = derived_cases(op, CASES, [case_of("long", 4096, 1600)])
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
    derived, _, _ = derived_cases(op, CASES, [case_of("long", 200, 3000)])
    assert findings(op, derived) == []
    failed = check_pairs(op, op.variants[0], [*CASES, *derived])[:-1]
    assert {(outcome.config.rows, outcome.case["M"]) for outcome in failed} == set([(4, 200)] * is_wrong)  # type: ignore[union-attr,index]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_size_is_checked_in_a_derived_case_beside_a_variant_whose_launches_depend_on_values(is_wrong: bool) -> None:
    op = op_with("")
    right = op.variants[0].run

    def counted(inputs: Inputs, _config: None) -> Outputs:
        torch.bincount(torch.zeros(1, dtype=torch.int64, device=inputs["x"].device))  # has no result on device `meta`
        return op.reference(inputs)

    def run(inputs: Inputs, config: Any) -> Outputs:
        outputs = right(inputs, config)
        if len(inputs["x"]) > 128:
            outputs["y"] = outputs["y"] + is_wrong
        return outputs

    op = replace(op, variants=(replace(op.variants[0], run=run), Variant("baseline", counted)))
    derived, _, _ = derived_cases(op, CASES, [case_of("long", 200, 3000)])
    assert 200 in {case["M"] for case in derived}
    assert [line.partition(" wrong")[0] for line in findings(op, derived)] == ["y: 400 of 400"] * is_wrong


def test_coverage_line_names_eight_parts_and_counts_the_rest() -> None:
    op = summing("")
    job = address_job(Task(op, BENCH[0], op.variants[0]))
    job.facts.update(Fact("branch", f"size > {count}", "sums_of_rows") for count in range(10))
    (line,) = coverage_lines([job])
    assert line.count("size >") == 8
    assert line.endswith("size > 7 in sums_of_rows and 2 more")


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
    derived, _, facts = derived_cases(op, [case_of("one", 1, 1), *CASES[1:]], [case_of("tall", 1 << 20, 64)])
    assert Fact("branch", "M > ROWS", "_normalized_rows") in facts
    tall = [case.axes for case in derived if case["M"] > 260]
    assert tall == [(("M", 513), ("N", 34)), (("M", 1024), ("N", 1))]  # the second has whole blocks of rows


def test_derived_case_takes_no_size_of_1_from_a_check_case_where_another_is_affordable() -> None:
    """One row or one column hides mistakes: the softmax of one column is 1, the mean of one row is the row."""
    op = replace(summing("", elements=4), variants=(Variant("optimized", normalized_rows),))
    checks = [case_of("one", 1, 1), case_of("thin", 40, 3), case_of("wide", 4, 2048), case_of("wider", 5, 2048)]
    derived, _, _ = derived_cases(op, checks, [case_of("large", 1 << 20, 2048)])
    assert [case["N"] for case in derived if 260 < case["M"] < 1024] == [3]


@triton.jit
def _limited_sums(x_ptr, count_ptr, y_ptr, N, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    count = tl.load(count_ptr + tl.program_id(0))
    end = tl.minimum(count, 250) if MISTAKE == "minimum" else min(count, 250) if MISTAKE == "min" else count
    if MISTAKE == "minimum of a masked load":
        end = tl.minimum(tl.load(count_ptr + tl.program_id(0), mask=tl.program_id(0) >= 0, other=0), 250)
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


@pytest.mark.parametrize("mistake", ["", "minimum", "min", "minimum of a masked load"])
def test_minimum_of_a_loaded_value_whose_other_operand_no_check_takes_is_named(mistake: str) -> None:
    variant = Variant("optimized", partial(limited_sums, mistake))
    op = replace(summing(""), variants=(variant,))
    for cases, is_named in ((CASES[:2], bool(mistake)), (CASES, False)):
        checks = [CaseJob.of([Run(Task(op, case, variant), None)]) for case in cases]
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
    derived, _, _ = derived_cases(op, CASES, [case_of("large", 4096, 1 << 20)])
    assert findings(op, derived) == ["y: wrong"] * is_narrow


@triton.jit
def _largest_places(x_ptr, y_ptr, N, BLOCK: tl.constexpr, IS_NARROW: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + at, at < N, other=float("-inf"))
    place = tl.argmax(x, 0)
    tl.store(y_ptr + tl.program_id(0), place.to(tl.uint8).to(tl.int8).to(tl.int32) if IS_NARROW else place)


def largest_places(is_narrow: bool, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    y = torch.empty_like(x[:, 0], dtype=torch.int32)
    _largest_places[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), IS_NARROW=is_narrow)
    return {"y": y}


def test_derived_case_keeps_several_rows_where_a_check_case_has_one() -> None:
    """A single id may be small in a row of 256 elements."""
    op = replace(summing("", elements=4), variants=(Variant("optimized", partial(largest_places, True)),))
    checks = [case_of("one", 1, 1), case_of("odd", 17, 33), case_of("more", 24, 8)]
    derived, _, _ = derived_cases(op, checks, [case_of("large", 16384, 256)])
    rows = [case["M"] for case in derived if case["N"] == 256]
    assert rows
    assert min(rows) > 1
