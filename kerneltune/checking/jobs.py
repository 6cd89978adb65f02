"""Run checks in forks of this process, on all cores: a kernel that ends its process fails its own check alone."""

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Self

from kerneltune.checking.addresses import address_errors
from kerneltune.checking.blind_spots import blind_spots
from kerneltune.checking.check import check_runs
from kerneltune.checking.declarations import wrong_flops
from kerneltune.checking.memory import host_free_bytes, needed_bytes, why_too_large
from kerneltune.checking.mutations import accepted_mutations, mutate
from kerneltune.checking.pairs import around_default, check_pairs, with_configs_of_autotuners
from kerneltune.checking.reruns import (
    repeated_draws,
    with_cause,
    wrong_after_other_size,
    wrong_by_unwritten,
    wrong_for_new_values,
    wrong_in_reverse,
)
from kerneltune.checking.shifts import wrong_by_values
from kerneltune.errors import place_of
from kerneltune.interpreter.facts import Fact, cut_short, note_facts, noting, unreached
from kerneltune.processes.forked import Fork, ForkCrashedError
from kerneltune.processes.start import tell
from kerneltune.records import grouped
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.task import Outcome, Run, Task, knobs_of
from kerneltune.wording import assignments, first_of

_NAMED = ("same draw", "no barrier", "promise", "tf32 of indices", "waits", "fake", "no allocator")
"""Kinds of facts that a line names wherever a check has them."""
_MOST_NAMES = 8
"""Largest number of names in a coverage line."""
_ADDRESSES_S = 3.0
"""Processor seconds after which no further config's addresses are checked. 16 of 24 variants of six families need less for all of
their configs (timed by a script, 2026-11-27)."""
_Fork = Fork[tuple[list[Outcome], set[Fact]]]


@dataclass(eq=False, slots=True)
class Job:
    """Describe checks that run in one process.

    Attributes:
        label: name of the checks on one line.
        task: the variant, and the case of the outcomes that name no case.
        work: function that runs the checks. Before each check it passes `tell` the outcome that the check has if it ends the
            process; the cause is appended to the reason.
        is_largest: whether the job checks addresses of a largest case, whose facts the other jobs should have.
        cost: cost of the job, in checks of a case.
        needed: bytes of memory of the largest case.
        facts: facts of the job's launches, after `run_jobs`.
    """

    label: str
    task: Task
    work: Callable[[], list[Outcome]]
    is_largest: bool = False
    cost: int = 1
    needed: int = 0
    facts: set[Fact] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class CaseJob(Job):
    """Describe the check of the runs of a case, with an outcome for each run. A run that ends the process costs no other run."""

    runs: Sequence[Run] = ()

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Self:
        """Return the job that checks runs."""
        task = runs[0].task
        needed = needed_bytes(task.op, task.case)
        return cls(task.key.of_case.label, task, partial(check_runs, runs), cost=len(runs), needed=needed, runs=runs)


def pairs_job(task: Task, cases: Sequence[Case]) -> Job:
    """Return the job that checks pairs of config and case, see `check_pairs`; a variant of a user's operator by all `_JUDGES`."""
    op, variant = task.op, task.variant

    def work() -> list[Outcome]:
        fitting, outcomes = [case for case in cases if why_too_large(op, case) is None], list[Outcome]()
        for judge in _JUDGES if op.kind == "foreign" else (_check_pairs,):
            with noting(passes_on=judge is _check_pairs):
                outcomes += judge(op, variant, fitting)
        return outcomes

    cost = len(cases) * (2 if variant.config is None else 4)  # a run of each case again, and pairs of its other configs
    needed = max((needed_bytes(op, case) for case in cases), default=0)
    return Job(f"{op.name} {variant.name}, configs on cases", task, work, cost=cost, needed=needed)


def _check_pairs(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Outcome]:
    """Check pairs in a fork, where host code may keep values, and find the calls whose values make pairs fail."""
    fork = Fork(partial(_noted, partial(check_pairs, op, variant, cases)))
    try:
        outcomes, facts = fork.result()
    except ForkCrashedError:
        tell(fork.last_note)
        raise
    note_facts(*facts)
    return [with_cause(op, variant, outcome) if outcome.status == "failed" else outcome for outcome in outcomes]


_JUDGES = (wrong_after_other_size, _check_pairs, wrong_by_unwritten, wrong_in_reverse, wrong_for_new_values, repeated_draws)
"""Checks of a variant of a user's operator, in this order: the first two need host code that has kept nothing yet."""


def address_job(task: Task, facts: Collection[Fact] = (), check_cases: Sequence[Case] = ()) -> Job:
    """Return the job that checks the addresses of a task: of the default config, then of configs with another value of a knob.

    No further config begins after `_ADDRESSES_S`. Only facts of the default config are noted.

    Args:
        facts: further facts of bench cases, which are noted, too.
        check_cases: cases by which the largest integers of inputs are estimated.
    """

    def work() -> list[Outcome]:
        note_facts(*facts)
        begun_s, default_facts, notes = time.thread_time(), set[Fact](), list[Outcome]()
        tell(Outcome("failed", "", task.default, task.case))
        variant = with_configs_of_autotuners(task.op, task.variant, task.case)
        for number, config in enumerate(around_default(variant, task.case)):
            if number and time.thread_time() - begun_s > _ADDRESSES_S:
                break
            failed = Outcome("failed", "", config, task.case)
            tell(failed)
            with noting(passes_on=number == 0) as config_facts:
                lines = address_errors(task.op, task.case, variant, config, check_cases)
            if lines:
                return [replace(failed, reason=line) for line in lines]
            default_facts = config_facts if number == 0 else default_facts
            short = [] if notes else cut_short(default_facts, config_facts)
            if short and _reaches_last(replace(task, variant=variant), config, check_cases, config_facts):
                text = f"{task.op.name} {task.variant.name}: with {assignments(knobs_of(config))} the largest case {short[0]}"
                notes = [Outcome("noted", f"{text}, and with the default config it does: a grid cut short?", config, task.case)]
        return notes

    return Job(f"{task.op.name} {task.variant.name} {task.case.name}, addresses", task, work, is_largest=True)


def _reaches_last(task: Task, config: Config, check_cases: Sequence[Case], largest: Set[Fact]) -> bool:
    """Return whether a config reaches, in a check case, a last element that it leaves out in the largest case.

    If the config reaches no such element, its last program may not write the last element, as in a swizzled order.
    """
    for case in check_cases:
        if task.variant.unsupported(case) is None and config in task.variant.configs(case):
            with noting(passes_on=False) as check_facts, suppress(Exception):
                address_errors(task.op, case, task.variant, config)
            if cut_short(check_facts, largest):
                return True
    return False


def mutation_job(task: Task, cases: Sequence[Case]) -> Job:
    """Return the job that perturbs outputs; see `mutate`."""

    def work() -> list[Outcome]:
        tell(Outcome("failed", f"{task.op.name} {task.variant.name}: "))
        return mutate(task.op, task.variant, cases)

    return Job(f"{task.op.name}, mutations", task, work)


def compare_job(task: Task, cases: Sequence[Case], quick: bool = False) -> Job:
    """Return the job that fails if `compare` accepts any values of an output, and, but for `quick`, names further blindness."""

    def work() -> list[Outcome]:
        with noting(passes_on=False):
            of_values = [] if quick else wrong_by_values(task.op, cases)  # first: host code has kept nothing yet
        ignored, wrong = accepted_mutations(task.op, task.variant, cases)
        reason = f"{place_of(task.op.compare)}compare: accepts any values of {', '.join(ignored)}"
        if quick:
            return [Outcome("failed", reason, task.default)] if ignored else []
        lines = [f"compare accepts wrong values of {', '.join(wrong)}: see --mutate"] if wrong else []
        lines += [*blind_spots(task.op, task.variant, cases), *of_values]
        lines += wrong_flops(task.op, max(cases, key=lambda case: task.op.traffic(case).total))
        named = [Outcome("noted", f"{task.op.name}: {line}") for line in lines]
        return [Outcome("failed", reason, task.default), *named] if ignored else named

    return Job(f"{task.op.name}, compare", task, work)


def run_jobs(jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Outcome]]]:
    """Run a job on each core at a time, and yield each finished job with its outcomes.

    A job that needs more than a core's share of the free memory comes last, and runs alone.
    """
    num_processes, running = len(os.sched_getaffinity(0)), dict[_Fork, Job]()
    share = host_free_bytes() // num_processes
    waiting = deque(sorted(jobs, key=lambda job: job.needed > share))
    try:
        while waiting or running:
            while waiting and len(running) < (num_processes if waiting[0].needed <= share else 1):
                job = waiting.popleft()
                running[Fork(partial(_noted, job.work))] = job
            told = wait([fork.pipe for fork in running])
            for fork in [fork for fork in running if fork.pipe in told]:
                if fork.receive():
                    job = running.pop(fork)
                    yield job, _outcomes(fork, job)
    finally:
        for fork in running:
            fork.end()


def _noted(work: Callable[[], list[Outcome]]) -> tuple[list[Outcome], set[Fact]]:
    with noting() as facts:
        return work(), facts


def _outcomes(fork: _Fork, job: Job) -> list[Outcome]:
    """Return the outcomes of a job; if a check ended the fork, only the outcome of this check, or of each run by itself."""
    try:
        outcomes, facts = fork.result()
    except ForkCrashedError as error:
        if not isinstance(job, CaseJob) or len(job.runs) == 1:
            crashed = fork.last_note or Outcome("failed")
            return [replace(crashed, reason=f"{crashed.reason}{error}")]
        alone = [CaseJob.of([run]) for run in job.runs]
        outcomes = [outcome for part in alone for outcome in _outcomes(Fork(partial(_noted, part.work)), part)]
        facts = _facts(alone)
    job.facts.update(facts)
    return outcomes


def _facts(jobs: Iterable[Job]) -> set[Fact]:
    return set[Fact]().union(*(job.facts for job in jobs))


def _unchecked_configs(checked: Set[Fact]) -> Iterator[Fact]:
    """Yield a fact for each kernel with configs that its autotuner may choose in a check, and that no check took."""
    kept = {fact for fact in checked if fact.kind == "kept config"}
    unchecked = {fact for fact in kept if fact._replace(kind="taken config") not in checked}
    for (kernel, count), facts in grouped(unchecked, lambda fact: (fact.text, fact.where)).items():
        yield Fact("not judged", f"{len(facts)} of {count} configs of the autotuner of {kernel}")


def coverage_lines(jobs: Sequence[Job], failed: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each operator with loops, axes of grids or facts of bench cases that no check reached.

    failed: operators with a failed check. Their further checks may not have run, so that no unreached fact of them is named.
    """
    for op, op_jobs in grouped(jobs, lambda job: job.task.op.name).items():
        checked, largest = (_facts(job for job in op_jobs if job.is_largest is wanted) for wanted in (False, True))
        if names := [] if op in failed else unreached(checked, largest):
            yield f"{op}: no check has {first_of(names, _MOST_NAMES)}"
        if given_up := sorted(str(fact) for fact in {*largest, *_unchecked_configs(checked)} if fact.kind == "not judged"):
            yield f"{op}: not judged: {'; '.join(given_up[:_MOST_NAMES])}"
        yield from (f"{op}: {fact}" for fact in sorted(checked | largest) if fact.kind in _NAMED)
        for fact in cut_short(_facts(job for job in op_jobs if isinstance(job, CaseJob)), largest):
            what = "grid or loop" if "loaded" in fact.kind else "grid"
            yield f"{op}: the largest case {fact}, as all checks do: a {what} cut short?"
