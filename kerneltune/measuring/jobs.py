"""Run checks in forks of this process, on all cores: a kernel that ends its process fails its own check alone."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait

from kerneltune.forked import Fork, ForkCrashedError
from kerneltune.measuring.check import Outcome, address_errors
from kerneltune.measuring.compare import check_only, memory_obstacle
from kerneltune.measuring.mutations import mutate
from kerneltune.measuring.pairs import check_pairs
from kerneltune.search.task import Run, Task
from kerneltune.spec import Case, Op

Begin = Callable[[Outcome], None]
"""Function that gets the outcome that the next check has if it ends the process; the cause is appended to its reason."""


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """Describe checks that run in one process.

    Attributes:
        label: name of the checks on one line.
        task: the variant, and the case of the outcomes that name no case.
        work: function that runs the checks.
        parts: a job for each check alone; the parts run if an unknown check of the job ends the process.
        runs: the runs of a case that the job checks, with an outcome for each; empty for other checks.
    """

    label: str
    task: Task
    work: Callable[[Begin], list[Outcome]]
    parts: "tuple[Job, ...]" = ()
    runs: Sequence[Run] = ()


def case_job(runs: Sequence[Run]) -> Job:
    """Return the job that checks the runs of a case, with an outcome for each."""
    parts = tuple(case_job([run]) for run in runs) if len(runs) > 1 else ()
    return Job(case_label(runs), runs[0][0], lambda _begin: check_only(runs), parts, runs)


def case_label(runs: Sequence[Run]) -> str:
    """Name the case of some runs on one line."""
    op, case = runs[0][0].op, runs[0][0].case
    return f"{op.name} {case.name} {case.dtype} {case.quant}"


def pairs_job(task: Task, cases: Sequence[Case]) -> Job:
    """Return the job that checks pairs of config and case; see `check_pairs`."""
    op, variant = task.op, task.variant

    def work(begin: Begin) -> list[Outcome]:
        fitting = [case for case in cases if memory_obstacle(op, case) is None]
        return check_pairs(op, variant, fitting, partial(check_cost, op), begin)

    return Job(f"{op.name} {variant.name}, configs on cases", task, work)


def address_job(task: Task) -> Job:
    """Return the job that checks the addresses of a task's default config; its outcome names config and case."""

    def work(begin: Begin) -> list[Outcome]:
        failed = Outcome("failed", "", task.default, task.case)
        begin(failed)
        return [replace(failed, reason=line) for line in address_errors(task.op, task.case, task.variant, task.default)]

    return Job(f"{task.op.name} {task.variant.name} {task.case.name}, addresses", task, work)


def mutation_job(task: Task, cases: Sequence[Case]) -> Job:
    """Return the job that perturbs outputs; see `mutate`."""

    def work(begin: Begin) -> list[Outcome]:
        begin(Outcome("failed", f"{task.op.name} {task.variant.name}: "))
        return mutate(task.op, task.variant, cases)

    return Job(f"{task.op.name}, mutations", task, work)


def check_cost(op: Op, case: Case) -> float:
    """Estimate the time of a check in the interpreter, in MB of traffic: a constant for the launch, plus the traffic."""
    return 0.2 + op.traffic(case).total / 1e6


def run_jobs(jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Outcome]]]:
    """Run a job on each core at a time, and yield each finished job with its outcomes."""
    waiting, running = deque(jobs), dict[Fork[list[Outcome]], Job]()
    num_processes = len(os.sched_getaffinity(0))
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                job = waiting.popleft()
                running[Fork(job.work)] = job
            told = wait([fork.pipe for fork in running])
            for fork in [fork for fork in running if fork.pipe in told]:
                if fork.is_done():
                    job = running.pop(fork)
                    yield job, _outcomes(fork, job)
    finally:
        for fork in running:
            fork.end()


def _outcomes(fork: Fork[list[Outcome]], job: Job) -> list[Outcome]:
    """Return the outcomes of a job; if a check ended the fork, only the outcome of this check or of the job's parts."""
    try:
        return fork.result()
    except ForkCrashedError as error:
        if not job.parts:
            crashed = fork.told or Outcome("failed")
            return [replace(crashed, reason=f"{crashed.reason}{error}")]
    return [outcome for part in job.parts for outcome in _outcomes(Fork(part.work), part)]
