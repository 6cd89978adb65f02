"""Checks in forks: results keep their order, and a kernel that ends its process fails its own check."""

import os
import signal
from dataclasses import replace

import pytest
import triton
from test_pairs import CASES, Rows, op_with

from kerneltune import ops
from kerneltune.measuring.check import Outcome
from kerneltune.measuring.jobs import Job, address_job, case_job, mutation_job, pairs_job, run_jobs
from kerneltune.search.task import Task
from kerneltune.spec import Case, Inputs, Outputs

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="jobs run in Triton's interpreter")


def task_of(mistake: str) -> Task:
    op = op_with(mistake)
    return Task(op, CASES[0], op.variants[0])


def outcomes(*jobs: Job) -> list[list[Outcome]]:
    found = dict(run_jobs(jobs))
    return [found[job] for job in jobs]


@pytest.mark.parametrize("cores", [{0}, {0, 1, 2}], ids=["one core", "three cores"])
def test_jobs_give_the_outcomes_of_every_check(cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: cores)
    op = ops.load()["swiglu_bwd"]
    small = Case("small", (("M", 3), ("N", 40)), "bfloat16")
    addresses = address_job(Task(op, small, op.variant("optimized")))
    right, wrong = pairs_job(task_of(""), CASES), pairs_job(task_of("maximum of the whole tile"), CASES)
    case = case_job([(task_of(""), Rows(1, 1)), (task_of("no row mask"), Rows(2, 1))])
    found = outcomes(addresses, right, wrong, case)
    assert found[:2] == [[], [Outcome("checked", "scaled optimized: 12 configs on 4 cases, all pairs")]]
    assert [outcome.status for outcome in found[2]] == ["failed", "failed", "failed", "checked"]
    assert [outcome.status for outcome in found[3]] == ["checked", "failed"]


def ending(task: Task, how: str, at_rows: int) -> Task:
    """Return a task whose variant ends its process at a config."""

    def run(given: Inputs, config: Rows) -> Outputs:
        if config.rows == at_rows:
            os._exit(0) if how == "exit" else os.kill(os.getpid(), signal.SIGSEGV)
        return task.variant.run(given, config)

    return replace(task, variant=replace(task.variant, run=run))


@pytest.mark.parametrize(("how", "reason"), [("exit", "crashed: exit code 0"), ("signal", "crashed: SIGSEGV")])
def test_check_that_ends_its_process_fails_alone(how: str, reason: str) -> None:
    task = task_of("")
    runs = [(task, Rows(1, 1)), (ending(task, how, 1), Rows(1, 1)), (task, Rows(2, 1))]
    pairs, mutations, addresses = (ending(task, how, rows) for rows in (2, 1, 1))
    found = outcomes(
        case_job(runs), pairs_job(pairs, CASES), mutation_job(mutations, CASES), address_job(addresses), case_job(runs[:1])
    )
    assert found[0] == [Outcome("checked"), Outcome("failed", reason), Outcome("checked")]
    (pair,) = found[1]
    assert (pair.status, pair.reason, pair.config.rows) == ("failed", reason, 2)
    assert pair.case in CASES
    assert found[2:] == [
        [Outcome("failed", f"scaled optimized: {reason}")],
        [Outcome("failed", reason, Rows(1, 4), CASES[0])],
        [Outcome("checked")],
    ]
