"""Checks in forks: results keep their order, and a kernel that ends its process fails its own check."""

import itertools
import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import case_of
from subprocesses import wait_for
from test_pairs import CASES, Rows, op_with

from kerneltune import ops
from kerneltune.checking import jobs
from kerneltune.checking.derived import derived_cases
from kerneltune.checking.jobs import (
    CaseJob,
    Job,
    address_job,
    compare_job,
    coverage_lines,
    mutation_job,
    pairs_job,
    run_jobs,
)
from kerneltune.interpreter.facts import Fact
from kerneltune.kernel_lib.agreement import close
from kerneltune.processes.forked import Fork
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant
from kerneltune.task import Outcome, Run, Task

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="jobs run in Triton's interpreter")


def task_of(mistake: str) -> Task:
    op = op_with(mistake)
    return Task(op, CASES[0], op.variants[0])


def outcomes(*jobs: Job) -> list[list[Outcome]]:
    outcomes_of = dict(run_jobs(jobs))
    return [outcomes_of[job] for job in jobs]


def test_job_that_needs_more_than_its_share_of_the_memory_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(jobs, "host_free_bytes", lambda: 300)
    (job,) = [CaseJob.of([Run(task_of(""), Rows(1, 1))])]
    log = tmp_path / "log"

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")

    def noted(name: str) -> list[Outcome]:
        note(f"{name} begins")
        if name in ("a", "b"):  # fit side by side
            wait_for(lambda: {"a begins", "b begins"} <= {*log.read_text().splitlines()})
        time.sleep(0.3)  # whoever should wait and does not would begin now
        note(f"{name} ends")
        return []

    needs = {"large": 101, "larger": 300, "a": 100, "b": 0}
    works = [replace(job, label=name, work=lambda name=name: noted(name), needed=needs[name], runs=()) for name in needs]
    assert {job.label for job, _ in run_jobs(works)} == set(needs)
    lines = log.read_text().splitlines()
    assert ({*lines[:2]}, {*lines[2:4]}) == ({"a begins", "b begins"}, {"a ends", "b ends"})
    assert lines[4:] == ["large begins", "large ends", "larger begins", "larger ends"]


@pytest.mark.parametrize("cores", [{0}, {0, 1, 2}], ids=["one core", "three cores"])
def test_jobs_give_the_outcomes_of_every_check(cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: cores)
    op = ops.load()["swiglu_bwd"]
    small = Case("small", (("M", 3), ("N", 40)), "bfloat16")
    addresses = address_job(Task(op, small, op.variant("optimized")))
    right, wrong = pairs_job(task_of(""), CASES), pairs_job(task_of("maximum of the whole tile"), CASES)
    case = CaseJob.of([Run(task_of(""), Rows(1, 1)), Run(task_of("no row mask"), Rows(2, 1))])
    results = outcomes(addresses, right, wrong, case)
    assert results[:2] == [[], [Outcome("checked", "scaled optimized: 12 configs on 4 cases, 19 of 48 pairs")]]
    assert [outcome.status for outcome in results[2]] == ["failed", "failed", "failed", "checked"]
    assert [outcome.status for outcome in results[3]] == ["checked", "failed"]


def ending(task: Task, how: str, at_rows: int) -> Task:
    """Return a task whose variant ends its process at a config."""

    def run(inputs: Inputs, config: Rows) -> Outputs:
        if config.rows == at_rows:
            os._exit(0) if how == "exit" else os.kill(os.getpid(), signal.SIGSEGV)
        return task.variant.run(inputs, config)

    return replace(task, variant=replace(task.variant, run=run))


@pytest.mark.parametrize(("how", "reason"), [("exit", "crashed: exit code 0"), ("signal", "crashed: SIGSEGV")])
def test_check_that_ends_its_process_fails_alone(how: str, reason: str) -> None:
    task = task_of("")
    runs = [Run(task, Rows(1, 1)), Run(ending(task, how, 1), Rows(1, 1)), Run(task, Rows(2, 1))]
    pairs, mutations, addresses = (ending(task, how, rows) for rows in (2, 1, 1))
    results = outcomes(
        CaseJob.of(runs), pairs_job(pairs, CASES), mutation_job(mutations, CASES), address_job(addresses), CaseJob.of(runs[:1])
    )
    assert results[0] == [Outcome("checked"), Outcome("failed", reason), Outcome("checked")]
    (pair,) = results[1]
    assert (pair.status, pair.reason, pair.config.rows) == ("failed", reason, 2)
    assert pair.case in CASES
    assert results[2:] == [
        [Outcome("failed", f"scaled optimized: {reason}")],
        [Outcome("failed", reason, Rows(1, 4), CASES[0])],
        [Outcome("checked")],
    ]


@triton.jit
def _sums(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    total = 0.0
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row + at, at < N, other=0.0), 0)
    tl.store(y_ptr + tl.program_id(0), total)


def summing(shift: float = 0.0) -> Op:
    """Return an operator with an option `shift`, whose check cases may be shorter than its block."""

    def run(inputs: Inputs, _config: None) -> Outputs:
        y = inputs["x"].new_empty(inputs["x"].shape[0])
        _sums[(y.shape[0],)](inputs["x"], y, inputs["x"].shape[1], BLOCK=64)
        return {"y": y + inputs["shift"] + (shift if inputs["shift"] else 0.0)}

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        if case.option("shift") == 9:
            raise ValueError("no inputs for 9")
        return {"x": torch.ones(case["M"], case["N"], device=device), "shift": case.option("shift")}

    return replace(
        op_with(""), name="summed", inputs=inputs, options={"shift": (0, 5, 9)}, variants=(Variant("optimized", run),),
        reference=lambda inputs: {"y": inputs["x"].sum(1) + inputs["shift"]},
    )  # fmt: skip


def in_tens() -> Op:
    """Return the operator with host code that refuses N that is no multiple of 10."""
    op = summing()

    def run(inputs: Inputs, config: None) -> Outputs:
        if inputs["x"].shape[1] % 10:
            raise ValueError(f"N must be a multiple of 10, got {inputs['x'].shape[1]}")
        return op.variants[0].run(inputs, config)

    return replace(op, variants=(replace(op.variants[0], run=run),))


def shifted(name: str, M: int, N: int, shift: int = 0) -> Case:
    return replace(case_of(name, M, N), options=(("shift", shift),))


@pytest.mark.parametrize(
    ("checked", "largest", "missing"),
    [
        (shifted("one", 1, 64), shifted("large", 100, 4096), {"iterations of the loop", "programs of _sums along axis 0"}),
        (shifted("long", 1, 65), shifted("large", 100, 4096), {"programs of _sums along axis 0"}),
        (shifted("rows", 2, 64), shifted("large", 100, 4096), {"iterations of the loop"}),
        (shifted("one", 1, 64), shifted("small", 1, 64), set()),
    ],
    ids=["both", "axis", "loop", "neither"],
)
def test_coverage_names_loops_and_axes_that_no_check_has_twice(checked: Case, largest: Case, missing: set[str]) -> None:
    op = summing()
    tasks = [Task(op, case, op.variants[0]) for case in (checked, largest)]
    work = [CaseJob.of([Run(tasks[0], None)]), address_job(tasks[1])]
    assert outcomes(*work) == [[Outcome("checked")], []]
    named = "; ".join(coverage_lines(work))
    assert named.startswith("summed: no check has ") == bool(missing)
    assert list(coverage_lines(work, failed=["summed"])) == []
    assert {name for name in ("iterations of the loop", "programs of _sums along axis 0") if name in named} == missing
    assert ("test_jobs.py:" in named) == ("iterations of the loop" in missing)


def test_coverage_names_nothing_that_parts_of_a_crashed_job_reached() -> None:
    op = summing()
    checked, large = shifted("rows", 2, 65), shifted("large", 100, 4096)
    crashing = replace(op.variants[0], run=lambda _inputs, _config: os._exit(1))
    case = CaseJob.of([Run(Task(op, checked, variant), None) for variant in (op.variants[0], crashing)])
    work = [case, address_job(Task(op, large, op.variants[0]))]
    assert [outcome.status for outcome in outcomes(*work)[0]] == ["checked", "failed"]
    assert list(coverage_lines(work)) == []


def test_value_that_only_bench_cases_have_is_checked_or_named() -> None:
    check = [shifted("one", 1, 1), shifted("odd", 3, 70), shifted("wide", 4, 300)]
    bench = [shifted("a", 100, 4095, 5), shifted("b", 100, 4095, 9), shifted("c", 100, 4095)]
    derived, without, _ = derived_cases(summing(), check, bench)
    assert [(case.name, case.axes, case.option("shift")) for case in derived] == [("odd,shift=5", check[1].axes, 5)]
    tall, _, _ = derived_cases(summing(), check, [shifted("tall", 8192, 64)])
    assert [(case.name, case.axes) for case in tall] == [("odd,M=70,N=3", (("M", 70), ("N", 3)))]
    assert derived_cases(summing(), [*check, tall[0]], [shifted("tall", 8192, 64)])[:2] == ([], [])
    (text,) = without
    assert text.startswith("shift=9 (test_jobs.py:")
    assert "inputs: ValueError: no inputs for 9, for summed" in text
    costly = replace(summing(), traffic=lambda case: Traffic(20_000_000 if case.option("shift") else 4, 0))
    assert derived_cases(costly, check, bench)[:2] == ([], ["shift=5 (too costly)", "shift=9 (too costly)"])
    task = Task(summing(shift=1.0), derived[0], summing(shift=1.0).variants[0])
    ((outcome,),) = outcomes(CaseJob.of([Run(task, None)]))
    assert outcome.status == "failed"


def test_values_of_two_options_that_meet_in_no_check_case_meet_in_a_derived_case() -> None:
    def case(name: str, shift: int, factor: int) -> Case:
        return replace(case_of(name, 3, 70), options=(("shift", shift), ("factor", factor)))

    op = replace(summing(), options={"shift": (0, 5, 9), "factor": (1, 2)})
    check = [case("plain", 0, 1), case("shifted", 5, 1), case("doubled", 0, 2), replace(case("one", 0, 1), axes=CASES[0].axes)]
    derived, without, _ = derived_cases(op, check, [case("bench", 0, 1)])
    assert [(its.name, its.options) for its in derived] == [("shifted,shift=5,factor=2", (("shift", 5), ("factor", 2)))]
    assert without == []
    _, without, _ = derived_cases(op, [*check, derived[0], case("nine", 9, 1)], [case("bench", 9, 2)])
    (text,) = without
    assert text.startswith("shift=9 with factor=2 (test_jobs.py:")


def test_values_of_options_meet_in_a_case_without_axes() -> None:
    def inputs(_case: Case, *, device: str, seed: int = 0) -> Inputs:
        made: Inputs = summing().inputs(shifted("odd", 3, 70), device=device, seed=seed)
        return made

    def case(name: str, shift: int, factor: int) -> Case:
        return Case(name, (), "float32", "none", (("shift", shift), ("factor", factor)))

    options = {"shift": (0, 5), "factor": (1, 2)}
    op = replace(summing(), axes=(), inputs=inputs, options=options, traffic=lambda _case: Traffic(840, 12))
    derived, _, _ = derived_cases(op, [case("plain", 0, 1), case("shifted", 5, 1), case("doubled", 0, 2)], [])
    assert [its.options for its in derived] == [(("shift", 5), ("factor", 2))]


@pytest.mark.parametrize(("are_refused", "num_derived", "num_cases_tried"), [(True, 0, 16 * 8), (False, 8, 8)])
def test_pairs_of_values_are_tried_a_few_times_and_the_others_named(
    tmp_path: Path, are_refused: bool, num_derived: int, num_cases_tried: int
) -> None:
    log, values = tmp_path / "cases", range(12)

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        with log.open("a") as file:
            file.write(f"{case.name} on {device}\n")
        if are_refused and case.option("shift") != case.option("factor"):
            raise ValueError("shift and factor must be equal")
        made: Inputs = summing().inputs(shifted("odd", 3, 70), device=device, seed=seed)
        return made

    def case(shift: int, factor: int) -> Case:
        return replace(case_of(f"{shift}-{factor}", 3, 70), options=(("shift", shift), ("factor", factor)))

    op = replace(summing(), inputs=inputs, options={"shift": tuple(values), "factor": tuple(values)})
    bench = [case(1, value) for value in values] + [case(2, value) for value in values]
    derived, without, _ = derived_cases(op, [case(value, value) for value in values], bench)
    assert len(derived) == num_derived
    tried = {line for line in log.read_text().splitlines() if "," in line and line.endswith("on cpu")}
    assert len(tried) == num_cases_tried
    assert len(without) == 22 - num_derived
    assert without[-1] == "shift=2 with factor=11 (not tried, after many other pairs)"


def test_sizes_that_host_code_refuses_make_no_derived_case() -> None:
    check, bench = [shifted("odd", 3, 70), shifted("wide", 4, 300)], [shifted("tall", 8192, 64)]
    assert derived_cases(in_tens(), check, bench)[0] == []
    (tall,) = derived_cases(in_tens(), [*check, shifted("tens", 30, 90)], bench)[0]
    assert tall.axes == (("M", 90), ("N", 30))


def test_process_that_inputs_of_bench_cases_end_costs_derived_cases_and_fails_the_check_of_addresses() -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        if device == "meta":
            os._exit(3)
        return summing().inputs(case, device=device, seed=seed)

    op, large = replace(summing(), inputs=inputs), shifted("large", 100, 4096)
    assert derived_cases(op, [shifted("odd", 3, 70), shifted("wide", 4, 300)], [large]) == ([], [], set())
    assert outcomes(address_job(Task(op, large, op.variants[0]))) == [[Outcome("failed", "crashed: exit code 3", None, large)]]


def test_process_of_host_code_that_loops_for_too_long_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        while device == "meta":
            pass
        return summing().inputs(case, device=device, seed=seed)

    monkeypatch.setattr("kerneltune.checking.derived._SMALLER_SIZES_S", 1)
    derived = derived_cases(replace(summing(), inputs=inputs), [shifted("odd", 3, 70)], [shifted("large", 100, 4096)])
    assert derived == ([], [], {Fact("not judged", "sizes of bench cases alone: host code takes more than 1 s")})


def test_cases_are_derived_under_a_lower_limit_of_processor_time() -> None:
    check, bench = [shifted("odd", 3, 70), shifted("tens", 30, 90)], [shifted("tall", 8192, 64)]

    def under_limit() -> list[Case]:
        resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
        return derived_cases(in_tens(), check, bench)[0]

    assert Fork(under_limit).result() == derived_cases(in_tens(), check, bench)[0] != []


def test_launches_of_check_cases_end_with_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, op, clock = tmp_path / "cases", op_with(""), itertools.count(0, 6)

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        with log.open("a") as file:
            file.write(f"{case.name} on {device}\n")
        made: Inputs = op.inputs(case, device=device, seed=seed)
        return made

    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    derived_cases(replace(op, inputs=inputs), [case_of(f"odd-{N}", 7, N) for N in range(33, 53)], [])
    assert log.read_text().splitlines() == ["odd-33 on meta"] * 3


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("accepts_all", [True, False])
def test_compare_job_fails_a_comparison_that_accepts_any_values_of_an_output(accepts_all: bool, quick: bool) -> None:
    task = task_of("")
    task = replace(task, op=replace(task.op, compare=lambda *_: [])) if accepts_all else task
    (found,) = outcomes(compare_job(task, CASES, quick))
    assert [outcome.reason.partition(": ")[2] for outcome in found] == ["compare: accepts any values of y"] * accepts_all


@pytest.mark.parametrize(("rtol", "atol", "named"), [(0.0, 1.0, "zeroed tail"), (0.5, 0.0, "(scale x 1.1)"), (0.02, 0.0, "")])
def test_compare_job_names_an_output_of_which_the_comparison_accepts_wrong_values(rtol: float, atol: float, named: str) -> None:
    task = task_of("")
    lenient = lambda _case, _given, outputs, expected: close("y", outputs["y"], expected["y"], rtol, atol)  # noqa: E731
    (found,) = outcomes(compare_job(replace(task, op=replace(task.op, compare=lenient)), CASES[1:]))
    assert [it.status for it in found] == ["noted"] * bool(named)
    assert [it.reason[:43] for it in found] == ["scaled: compare accepts wrong values of y ("] * bool(named)
    assert all(named in it.reason for it in found)
