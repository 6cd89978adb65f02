"""Coverage lines about checks that host code or the time ends."""

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from asserting import every
from mistaken_ops import CASES, Knobs, case_of
from row_sums import BENCH, summing
from test_pairs import op_with
from triton.tools.tensor_descriptor import TensorDescriptor

from kerneltune.checking.addresses import address_errors
from kerneltune.checking.derived import derived_cases
from kerneltune.checking.jobs import CaseJob, address_job, coverage_lines, pairs_job, run_jobs
from kerneltune.checking.pairs import check_pairs
from kerneltune.interpreter.facts import Fact, noting
from kerneltune.records import RIGHT_ALONE
from kerneltune.spec import Inputs, Outputs, Variant
from kerneltune.task import Run, Task, knobs_of

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="derived cases run in Triton's interpreter")


def test_coverage_says_that_host_code_which_reads_values_ends_the_check_of_addresses_and_sizes() -> None:
    op = summing("")

    def scaled(given: Inputs, config: Any) -> Outputs:
        assert float(given["x"].sum()) < 1e30
        return op.variants[0].run(given, config)

    op = replace(op, variants=(replace(op.variants[0], run=scaled),))
    _, _, facts = derived_cases(op, CASES, BENCH)
    addresses = address_job(Task(op, BENCH[0], op.variants[0]), facts)
    dict(run_jobs([addresses]))
    line, _waits = coverage_lines([addresses])
    start = f"summed: not judged: addresses of optimized in {BENCH[0].name}: host code fails without memory: test_not_judged"
    assert line.startswith(start), line
    sizes = f"; sizes of bench cases alone of optimized, in check case {CASES[0].name}: host code fails without memory"
    place, error = line.removeprefix(start).split(sizes)[0].split(": ", 1)
    assert line.endswith(f"{sizes}: test_not_judged{place}: {error}"), line


def test_host_code_that_reads_values_in_one_check_case_leaves_the_search_for_sizes_to_the_others() -> None:
    op = summing("")

    def scaled(given: Inputs, config: Any) -> Outputs:
        assert len(given["x"]) != CASES[1]["M"] or float(given["x"].sum()) < 1e30
        return op.variants[0].run(given, config)

    derived, _, facts = derived_cases(replace(op, variants=(replace(op.variants[0], run=scaled),)), CASES, BENCH)
    assert any(case.name.startswith("long,M=") for case in derived)
    assert [fact.text.partition(": ")[0] for fact in facts if fact.kind == "not judged"] == [
        f"sizes of bench cases alone of optimized, in check case {CASES[1].name}"
    ]


def test_sizes_are_searched_for_a_variant_that_supports_no_check_case() -> None:
    op = summing("")
    variant = replace(op.variants[0], unsupported=lambda case: None if case["N"] == BENCH[1]["N"] else "another N")
    derived, _, _ = derived_cases(replace(op, variants=(variant,)), CASES, BENCH)
    assert [case["N"] for case in derived] == [BENCH[1]["N"]]


def test_coverage_has_no_line_for_a_variant_that_only_calls_torch() -> None:
    op = summing("")

    def in_torch(given: Inputs, _config: Any) -> Outputs:
        assert float(given["x"].sum()) < 1e30
        return op.reference(given)

    op = replace(op, variants=(Variant("baseline", in_torch), op.variants[0]))
    _, _, facts = derived_cases(op, CASES, BENCH)
    addresses = address_job(Task(op, BENCH[0], op.variants[0]), facts, CASES)
    dict(run_jobs([addresses]))
    assert every("not judged" not in line for line in coverage_lines([addresses]))


@pytest.mark.parametrize("policy", ["cold", "eager"])
@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x[x > 2],
        lambda x: x.sum().item(),
        lambda x: x.masked_select(x > 2),
        lambda x: x.unique(),
        lambda x: torch.arange(int(x[0, 0] > 2)),
        lambda x: x.cpu(),
        lambda x: x.repeat_interleave((x[:, 0] > 2).long(), 0),
    ],
)
def test_coverage_names_a_call_that_waits_for_the_gpu_unless_launches_are_timed(policy: str, waits: Any) -> None:
    op = summing("")

    def waiting(given: Inputs, _config: Any) -> Outputs:
        waits(given["x"])
        return op.reference(given)

    baseline = Variant("baseline", waiting)
    op = replace(op, variants=(baseline, op.variants[0]), policy=policy)
    addresses = address_job(Task(op, BENCH[0], baseline), (), CASES)
    dict(run_jobs([addresses]))
    lines = list(coverage_lines([addresses]))
    place = f"test_not_judged.py:{waits.__code__.co_firstlineno}"
    named = f"summed: baseline waits for the GPU at {place}, so that no CUDA graph holds it: times need `policy='eager'`"
    assert lines == ([named] if policy == "cold" else []), lines


@pytest.mark.parametrize(
    ("copies", "is_named"),
    [
        (lambda x: x * torch.tensor([2.0], device=x.device), True),
        (lambda x: x * torch.full((1,), 2.0).to(x.device), True),
        (lambda x: x * torch.full((1,), 2.0).cuda(), True),
        (lambda x: x * torch.full((1,), 2.0).pin_memory().to("cuda", non_blocking=True), False),
        (lambda x: x * torch.full((1,), 2.0, device=x.device).to(x.dtype), False),
    ],
)
def test_coverage_names_a_copy_of_values_of_the_host_unless_they_are_pinned(copies: Any, is_named: bool) -> None:
    variant = Variant("optimized", lambda given, _config: {"y": copies(given["x"])})
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(variant,))
    addresses = address_job(Task(op, BENCH[0], variant), (), CASES)
    dict(run_jobs([addresses]))
    assert [
        line for line in coverage_lines([addresses]) if "waits for the GPU at test_not_judged.py" in line
    ] != [] or not is_named
    assert (list(coverage_lines([addresses])) == []) == (not is_named)


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 256})], key=["N"])
@triton.jit
def _tuned(x_ptr, y_ptr, N, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < N, other=0.0)
        tl.store(y_ptr + row + at, x * (factor if BLOCK > 16 else 2), at < N)


def _run_tuned(factor: float, given: Inputs, _config: Any) -> Outputs:
    y = torch.empty_like(given["x"])
    _tuned[(len(y),)](given["x"], y, y.shape[1], factor)
    return {"y": y}


def test_coverage_names_configs_of_an_autotuner_that_no_check_took() -> None:
    variant = Variant("optimized", partial(_run_tuned, 2.0))
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(variant,))
    jobs = [*(CaseJob.of([Run(Task(op, case, variant), None)]) for case in CASES), address_job(Task(op, BENCH[0], variant))]
    assert [outcome.reason for _job, outcomes in run_jobs(jobs) for outcome in outcomes] == [""] * len(CASES)
    line = "scaled: not judged: 1 of 2 configs of the autotuner of _tuned"
    assert [it for it in coverage_lines(jobs) if "not judged" in it] == [line]
    pairs = pairs_job(Task(op, CASES[0], variant), CASES)
    dict(run_jobs([pairs]))
    assert not [it for it in coverage_lines([*jobs, pairs]) if "not judged" in it]


@pytest.mark.parametrize("knobs", [None, Knobs])
def test_pairs_check_every_config_of_an_autotuner(knobs: Any) -> None:
    own = {} if knobs is None else {"space": lambda _case: {"parts": (1, 2), "block": (8,)}, "default": lambda _case: Knobs(1, 8)}
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]})
    right, wrong = (Variant("optimized", partial(_run_tuned, factor), knobs, **own) for factor in (2.0, 3.0))
    passed = check_pairs(op, right, CASES)
    assert [outcome.status for outcome in passed if outcome.status != "noted"] == ["checked"], passed
    ((_job, outcomes),) = run_jobs([pairs_job(Task(op, CASES[0], wrong), CASES)])
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    assert failed
    assert {knobs_of(outcome.config)["autotuner_config"] for outcome in failed} == {1}
    assert every("alone" not in outcome.reason for outcome in failed), failed


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_pairs_check_every_config_of_an_autotuner_behind_a_value_that_host_code_reads(factor: float) -> None:
    def run(given: Inputs, config: Any) -> Outputs:
        assert given["x"].abs().max().item() < 1e30
        return _run_tuned(factor, given, config)

    variant = Variant("optimized", run)
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(variant,))
    job = pairs_job(Task(op, CASES[0], variant), CASES)
    ((_job, outcomes),) = run_jobs([job])
    assert {knobs_of(outcome.config)["autotuner_config"] for outcome in outcomes if outcome.status == "failed"} == (
        {1} if factor > 2 else set()
    )
    assert not [line for line in coverage_lines([job]) if "of the autotuner of" in line]


@triton.jit
def _doubled_in_place(x_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, tl.arange(0, BLOCK) < N, other=0.0)
    tl.store(x_ptr + at, 2 * x, tl.arange(0, BLOCK) < N)


@pytest.mark.parametrize("restored", [["x_ptr"], None])
def test_kernel_that_works_in_place_fails_unless_its_autotuner_restores_the_values(restored: list[str] | None) -> None:
    configs = [triton.Config({"BLOCK": 512}), triton.Config({"BLOCK": 1024})]
    kernel = triton.autotune(configs, key=["N"], restore_value=restored)(_doubled_in_place)

    def run(given: Inputs, _config: Any) -> Outputs:
        kernel[(len(given["x"]),)](given["x"], given["x"].shape[1])
        return {"y": given["x"]}

    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(Variant("optimized", run),))
    reasons = [outcome.reason for outcome in check_pairs(op, op.variants[0], CASES) if outcome.status == "failed"]
    assert bool(reasons) == (restored is None)
    cause = "right if _doubled_in_place is launched once: an autotuner launches it often: restore_value=[...]?"
    assert all(cause in reason for reason in reasons), reasons


_KEPT: dict[str, int] = {}


def _run_with_a_kept_length(given: Inputs, _config: Any) -> Outputs:
    length = given["x"].shape[1]
    return _run_tuned(2.0 * _KEPT.setdefault("length", length) / max(1, length), given, None)


def test_config_of_an_autotuner_that_is_wrong_after_another_case_alone_names_the_case() -> None:
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]})
    variant = Variant("optimized", _run_with_a_kept_length)
    ((_job, outcomes),) = run_jobs([pairs_job(Task(op, CASES[0], variant), CASES)])
    failed = [outcome for outcome in outcomes if "autotuner_config" in knobs_of(outcome.config) and outcome.status == "failed"]
    assert failed
    assert every(RIGHT_ALONE in outcome.reason for outcome in failed), failed


def _run_pruned(most_small: int, factor: float, given: Inputs, _config: Any) -> Outputs:
    """Run `_tuned`, whose config 0 is kept up to a length of rows, and config 1 for longer rows."""
    prune = {"early_config_prune": lambda configs, named, **_: [configs[named["N"] > most_small]]}
    kernel = triton.autotune(_tuned.configs, key=["N"], prune_configs_by=prune)(_tuned.fn)
    y = torch.empty_like(given["x"])
    kernel[(len(y),)](given["x"], y, y.shape[1], factor)
    return {"y": y}


def test_config_counts_as_checked_in_cases_alone_whose_pruning_keeps_it() -> None:
    lengths = sorted(case["N"] for case in CASES)
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]})
    right, wrong = (Variant("optimized", partial(_run_pruned, lengths[0], factor)) for factor in (2.0, 3.0))
    (coverage,) = [outcome for outcome in check_pairs(op, right, CASES) if outcome.status == "checked"]
    assert f"2 configs on {len(CASES)} cases, all pairs" in coverage.reason
    failed = [outcome for outcome in check_pairs(op, wrong, CASES) if outcome.status == "failed"]
    assert failed
    kept = {(outcome.case["N"] > lengths[0], knobs_of(outcome.config)["autotuner_config"]) for outcome in failed if outcome.case}
    assert kept == {(True, 1)}


def test_coverage_names_configs_that_pruning_keeps_in_bench_cases_alone() -> None:
    variant = Variant("optimized", partial(_run_pruned, max(case["N"] for case in CASES), 3.0))
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(variant,))
    jobs = [pairs_job(Task(op, CASES[0], variant), CASES), address_job(Task(op, BENCH[0], variant))]
    dict(run_jobs(jobs))
    (line,) = [line for line in coverage_lines(jobs) if "autotuner" in line]
    assert line.startswith("scaled: no check has config 1 of the autotuner of _tuned, "), line


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64})], key=["N"])
@triton.jit
def _with_32_bits_in_a_config(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0) * N if BLOCK > 16 else tl.program_id(0).to(tl.int64) * N
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + row + at, 2 * tl.load(x_ptr + row + at, at < N, other=0.0), at < N)


def test_addresses_of_the_largest_case_are_judged_with_each_config_of_an_autotuner() -> None:
    def run(given: Inputs, _config: Any) -> Outputs:
        x, y = given["x"], torch.empty_like(given["x"])
        _with_32_bits_in_a_config[lambda meta: (len(x), triton.cdiv(x.shape[1], meta["BLOCK"]))](x, y, x.shape[1])
        return {"y": y}

    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(Variant("optimized", run),))
    ((_job, (failed,)),) = run_jobs([address_job(Task(op, case_of("tall", 70_000, 40_000), op.variants[0]))])
    assert "int32 overflow" in failed.reason
    assert knobs_of(failed.config) == {"autotuner_config": 1}


ALONE = """
import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 256})], key=["N"])
@triton.heuristics({"EVEN": lambda given: given["N"] % given["BLOCK"] == 0})
@triton.jit
def doubled(x_ptr, y_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * N
    if EVEN:
        tl.store(y_ptr + row + at, 2 * tl.load(x_ptr + row + at))
    else:
        tl.store(y_ptr + row + at, 2 * tl.load(x_ptr + row + at, at < N, other=0.0), at < N)


def run(given, _config):
    x = given["x"]
    y = torch.empty_like(x)
    doubled[lambda meta: (len(x), triton.cdiv(x.shape[1], meta["BLOCK"]))](x, y, x.shape[1])
    return {"y": y}
"""


def test_kernel_that_a_module_holds_in_an_autotuner_alone_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("held_first", "held_alone"):  # the first check imports modules, after which nothing is forgotten
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.py").write_text(ALONE)
        monkeypatch.syspath_prepend(folder)
        variant = Variant("optimized", importlib.import_module(name).run)
        op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(variant,), module=name)
        with noting() as facts:
            assert address_errors(op, BENCH[0], variant, None, CASES) == []
        assert not [fact for fact in facts if fact.kind == "not judged"]


def _doubled_rows(x: torch.Tensor) -> torch.Tensor:
    return _run_tuned(2.0, {"x": x}, None)["y"]


doubled_by_custom_op = torch.library.custom_op("kerneltune_tests::doubled", mutates_args=())(_doubled_rows)
doubled_by_custom_op.register_fake(torch.empty_like)
doubled_with_wrong_fake = torch.library.custom_op("kerneltune_tests::doubled_half", mutates_args=())(_doubled_rows)
doubled_with_wrong_fake.register_fake(lambda x: torch.empty_like(x, dtype=torch.float16))
doubled_on_a_gpu = torch.library.custom_op("kerneltune_tests::doubled_gpu", mutates_args=(), device_types="cuda")(_doubled_rows)
_LIBRARY = torch.library.Library("kerneltune_tests_by_library", "FRAGMENT")
_LIBRARY.define("doubled(Tensor x) -> Tensor")
_LIBRARY.impl("doubled", _doubled_rows, "CPU")
torch.library.register_fake("kerneltune_tests_by_library::doubled", torch.empty_like, lib=_LIBRARY)
for _name in ("faked", "wrongly_faked", "unfaked"):
    _LIBRARY.define(f"{_name}.of(Tensor x, *, float factor=2.0) -> Tensor")
    _LIBRARY.impl(f"{_name}.of", lambda x, factor=2.0: _run_tuned(factor, {"x": x}, None)["y"], "CUDA")
torch.library.register_fake("kerneltune_tests_by_library::faked.of", lambda x, factor=2.0: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_fake("kerneltune_tests_by_library::wrongly_faked.of", lambda x, factor=2.0: x.new_empty(0), lib=_LIBRARY)


@pytest.mark.parametrize(
    ("double", "line"),
    [
        (doubled_by_custom_op, ""),
        (doubled_on_a_gpu, ""),
        (lambda x: 2 * x, ""),
        (
            doubled_with_wrong_fake,
            "dtype of output 0 of kerneltune_tests::doubled_half differs between the operator and its register_fake: wrong under"
            " torch.compile",
        ),
        (
            lambda x: torch.ops.kerneltune_tests_by_library.doubled(x),
            "not judged: 1 of 2 configs of the autotuner of _tuned; "
            f"addresses of optimized in {BENCH[0].name}: no kernel is launched without memory: is a fake registered?",
        ),
        (lambda x: torch.ops.kerneltune_tests_by_library.faked(x), ""),
        (
            lambda x: torch.ops.kerneltune_tests_by_library.wrongly_faked(x, factor=2.0),
            "shape of output 0 of kerneltune_tests_by_library::wrongly_faked.of differs between the operator and its "
            "register_fake: wrong under torch.compile",
        ),
        (lambda x: torch.ops.kerneltune_tests_by_library.unfaked.of(x), ""),
    ],
    ids=[
        "custom_op",
        "for a GPU alone",
        "no operator",
        "wrong fake",
        "Library",
        "Library for a GPU",
        "Library for a GPU, wrong fake",
        "Library for a GPU, no fake",
    ],
)
def test_registered_operator_is_judged_by_its_own_function(double: Any, line: str) -> None:
    variant = Variant("optimized", lambda given, _config: {"y": double(given["x"])})
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(variant,))
    task = Task(op, CASES[1], variant)
    jobs = [pairs_job(task, CASES), address_job(replace(task, case=BENCH[0]), (), CASES)]
    assert [it.reason for _job, outcomes in run_jobs(jobs) for it in outcomes if it.status == "failed"] == []
    assert list(coverage_lines(jobs)) == [f"scaled: {line}"] * bool(line)


def _no_backend(_graph: Any, _inputs: Any) -> Any:
    raise AssertionError("compiled")


def test_checks_without_a_gpu_run_compiled_functions_as_they_are_written() -> None:
    compiled = torch.compile(lambda x: 2 * x, backend=_no_backend)
    variant = Variant("baseline", lambda given, _config: {"y": compiled(given["x"])}, compiles=True)
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(variant,))
    task = Task(op, CASES[1], variant)
    jobs = [CaseJob.of([Run(task, None)]), pairs_job(task, CASES), address_job(replace(task, case=BENCH[0]), (), CASES)]
    assert [it.reason for _job, outcomes in run_jobs(jobs) for it in outcomes if it.status == "failed"] == []
    assert list(coverage_lines(jobs)) == []


@triton.jit
def _doubled(x, y, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    for begin in range(0, N, COLS):
        y.store([tl.program_id(0) * ROWS, begin], 2 * x.load([tl.program_id(0) * ROWS, begin]))


@pytest.mark.parametrize("cut", [0, 1])
def test_largest_case_of_tensor_descriptors_is_judged(cut: int) -> None:
    def doubled(given: Inputs, _config: None) -> Outputs:
        x = given["x"]
        y = torch.empty_like(x)
        programs = -(-len(x) // 16) - (cut if len(x) > 24 else 0)
        _doubled[(programs,)](*(TensorDescriptor.from_tensor(t, [16, 16]) for t in (x, y)), x.shape[1], 16, 16)
        return {"y": y}

    variant = Variant("optimized", doubled)
    op = replace(op_with(""), reference=lambda given: {"y": 2 * given["x"]}, variants=(variant,))
    even, large = case_of("even", 24, 72), case_of("large", 4096, 3000)
    jobs = [CaseJob.of([Run(Task(op, even, variant), None)]), address_job(Task(op, large, variant))]
    assert [outcome.reason for _job, outcomes in run_jobs(jobs) for outcome in outcomes] == [""]
    short = "scaled: the largest case stores no last element of y in _doubled, as all checks do: a grid cut short?"
    assert [line for line in coverage_lines(jobs) if "no check has" not in line] == [short] * cut


@triton.jit
def _halve(x_ptr, flag_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < N, other=0.0)
    tl.store(x_ptr + at, x * 0.5, at < N)
    tl.store(flag_ptr, (tl.max(x, 0) < 1e-3).to(tl.int32))


def test_coverage_says_that_host_code_waits_for_a_kernel_and_does_not_wait_itself() -> None:
    op = summing("")

    def halved(given: Inputs, _config: Any) -> Outputs:
        x = given["x"][:, 0].contiguous().abs()
        flag = torch.zeros(1, dtype=torch.int32, device=x.device)
        while x.numel() and not flag.item():
            _halve[(1,)](x, flag, x.numel(), 1024)
        return op.reference(given)

    op = replace(op, variants=(replace(op.variants[0], run=halved),))
    addresses = address_job(Task(op, BENCH[0], op.variants[0]), (), [case_of("none", 0, 2), *CASES])
    dict(run_jobs([addresses]))
    given_up, waits = coverage_lines([addresses])
    assert given_up.startswith("summed: not judged: addresses of optimized"), given_up
    assert waits.startswith("summed: optimized waits for the GPU at test_not_judged.py:"), waits


def test_coverage_says_that_the_time_for_sizes_of_bench_cases_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerneltune.checking.derived._LAUNCHES_S", -1.0)
    op = summing("")
    _, _, facts = derived_cases(op, CASES, BENCH)
    assert Fact("not judged", "further sizes of bench cases alone: -1 s are over") in facts
