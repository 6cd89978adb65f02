"""Check a sweep without a GPU: its cases and cases derived from them, pairs of config and case, addresses, compilation.

Checks run in forks of this process, see `checking/jobs.py`. A process with a GPU imports this module only to perturb outputs.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kerneltune import records
from kerneltune.checking.addresses import largest_cases
from kerneltune.checking.check import host_folder, meta_inputs
from kerneltune.checking.covering import settings
from kerneltune.checking.derived import Derived, derived_cases
from kerneltune.checking.jobs import CaseJob, Job, address_job, compare_job, coverage_lines, mutation_job, pairs_job, run_jobs
from kerneltune.checking.pairs import facts_by_config
from kerneltune.interpreter.facts import Fact
from kerneltune.interpreter.modes import read_sources
from kerneltune.journals import Journal
from kerneltune.measuring.compare import make_record
from kerneltune.measuring.compiler import refusals
from kerneltune.plan import Plan
from kerneltune.processes.forked import Fork, ForkCrashedError
from kerneltune.progress import Progress
from kerneltune.records import Record
from kerneltune.sweep_file import SweepCase, cases_by_op
from kerneltune.task import CaseError, Outcome, Run, Task
from kerneltune.wording import counted

_MOST_WITH_ONES = 3
"""Most further cases of a variant that are compiled because other arguments are 1: each takes 1 s."""


def check_on_cpu(
    plan: Plan, progress: Progress, sweep_cases: Sequence[SweepCase]
) -> tuple[list[Record], list[Outcome], list[Record]]:
    """Check cases, then cases derived from bench cases, pairs of config and case, and addresses.

    With `quick`, check only the cases, and `compare` of other projects' operators. The journal of checks keeps the records of
    each case that is checked. Return all records; the outcomes that are no records, coverage and notes; and records of configs
    that passed in a case in which a pair failed.
    """
    runner, unchecked = _JobRunner(plan, progress), list[str]()
    for sweep_case in sweep_cases:  # here, as torch._dynamo, which torch imports for device `meta`, takes every fork 1.5 s
        with suppress(CaseError):  # its own check says why
            meta_inputs(plan.ops[sweep_case.op], sweep_case.case)
    ops = {sweep_case.op: plan.ops[sweep_case.op] for sweep_case in sweep_cases}
    for folder in {host_folder(op) for op in ops.values() if op.kind != "foreign"}:
        read_sources(folder)
    if plan.options.quick:
        runner.run("check", [*runner.case_jobs(sweep_cases), *_compare_jobs(plan, sweep_cases, quick=True)])
    else:
        deriving = Fork(partial(_derived_checks, plan))
        try:
            runner.run("check", runner.case_jobs(sweep_cases))
            by_op, unchecked = deriving.result()
        finally:
            deriving.end()
        derived = [SweepCase(op, case) for op, of_op in by_op.items() for case in of_op.cases]
        further = _further_jobs(plan, [*sweep_cases, *derived], {op: of_op.facts for op, of_op in by_op.items()})
        runner.run("check further configs and sizes", [*runner.case_jobs(derived), *further])
    found = [*runner.case_records(), *runner.failures(), *runner.compile_refusals()]
    notes = [*runner.coverage(), *runner.without_reference(), *map(partial(Outcome, "noted"), unchecked)]
    return found, notes, runner.passed()


@dataclass(slots=True)
class _JobRunner:
    """Run jobs, and hold what they found.

    Attributes:
        records: the records of each case in the order of the checks; of a case that the journal has, the journal's.
        outcomes: the outcomes of each other job, in the order of the jobs: failures, coverage and notes.
        has_kept: whether the journal has a case.
    """

    plan: Plan
    progress: Progress
    records: dict[CaseJob, list[Record]] = field(default_factory=dict)
    outcomes: dict[Job, list[Outcome]] = field(default_factory=dict)
    has_kept: bool = False

    def case_jobs(self, sweep_cases: Sequence[SweepCase]) -> list[CaseJob]:
        """Return a job for each case, with default configs of own variants; a peer is checked if the selection names variants."""
        jobs = []
        for sweep_case in sweep_cases:
            tasks = self.plan.check_tasks(*sweep_case, with_peers=bool(self.plan.selection.variants))
            jobs += [CaseJob.of([Run(task, task.default) for task in tasks])] if tasks else []
        return jobs

    def run(self, stage: str, jobs: Sequence[Job]) -> None:
        """Run jobs whose cases the journal lacks, and keep the records of each case in the journal."""
        journal = Journal(self.plan.scratch_file("check.journal"))
        kept = {job: journal.finished(job.runs) for job in jobs if isinstance(job, CaseJob)}
        self.records |= {job: rows or [] for job, rows in kept.items()}
        self.outcomes |= {job: [] for job in jobs if not isinstance(job, CaseJob)}
        lacking = [job for job in jobs if not isinstance(job, CaseJob) or kept[job] is None]
        self.has_kept |= len(lacking) < len(jobs)
        self.progress.stage(stage, len(jobs), len(jobs) - len(lacking), sum(job.cost for job in lacking))
        for job, outcomes in run_jobs(lacking):
            if isinstance(job, CaseJob):
                self.records[job] = [make_record(self.plan.family, *pair) for pair in zip(job.runs, outcomes, strict=True)]
                journal.add(self.records[job])
            else:
                self.outcomes[job] = outcomes
            self.progress.advance(job.label, job.cost)

    def case_records(self) -> list[Record]:
        """Return the records of all cases."""
        return [row for rows in self.records.values() for row in rows]

    def failures(self) -> list[Record]:
        """Return the failures of jobs that no record of a case has: a default config that fails at first fails in two jobs."""
        known, rows = [_failure_key(row) for row in self.case_records()], list[Record]()
        for job, outcomes in self.outcomes.items():
            for failed in (outcome for outcome in outcomes if outcome.status == "failed"):
                run = Run(replace(job.task, case=failed.case or job.task.case), failed.config)
                rows.append(make_record(self.plan.family, run, failed))
        return [row for row in rows if _failure_key(row) not in known]

    def passed(self) -> list[Record]:
        """Return a record of each config that passed in a case in which a pair failed."""
        of_jobs = ((job.task, failed) for job, outcomes in self.outcomes.items() for failed in outcomes)
        pairs = ((task, *pair) for task, failed in of_jobs for pair in failed.passed if pair[1] == failed.case)
        runs = [Run(replace(task, case=case), config) for task, config, case in pairs]
        return [make_record(self.plan.family, run, Outcome("checked")) for run in runs]

    def coverage(self) -> list[Outcome]:
        """Return the coverage and the notes of jobs and, if all jobs ran now, notes about facts that no job reached.

        After a failure of an operator, its other cases may not have run.
        """
        others = [outcome for outcomes in self.outcomes.values() for outcome in outcomes if outcome.status != "failed"]
        if self.has_kept or self.plan.options.quick:
            return others
        failed = {row.op for row in [*self.case_records(), *self.failures()] if row.status == "failed"}
        return [*others, *map(partial(Outcome, "noted"), coverage_lines([*self.records, *self.outcomes], failed))]

    def without_reference(self) -> list[Outcome]:
        """Return an outcome that names the captured kernels whose author gives no reference."""
        names = sorted({fact.text for job in self.records for fact in job.facts if fact.kind == "no reference"})
        text = f"no reference: {', '.join(names)}: configs are compared with the first config, and the first with nothing"
        return [Outcome("checked", text)] if names else []

    def compile_refusals(self) -> list[Record]:
        """Compile default configs of other projects' operators, each on the largest check case of each mode.

        Users' operators are also compiled where other arguments are 1.

        Return a record of each refusal: the interpreter accepts Python that Triton's compiler refuses. This project's
        operators are left out, as its tests compile all of their configs.
        """
        runs = [run for job in self.records for run in job.runs]
        runs_of: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in sorted(runs, key=lambda run: run.task.op.traffic(run.task.case).total):
            task = run.task
            if task.op.kind != "shipped" and not task.variant.unsupported(task.case):
                runs_of[task.op.name, task.variant.name].append(run)
        runs = [run for by_size in runs_of.values() for run in _runs_to_compile(by_size)]
        if not runs:
            return []
        self.progress.stage("compile", 1)
        refused = refusals(runs, self.plan.options.workers)
        self.progress.advance(counted(len(runs), "config"))
        return [make_record(self.plan.family, runs[index], Outcome("failed", reason)) for index, reason in refused.items()]


def _runs_to_compile(by_size: Sequence[Run]) -> list[Run]:
    """Return the run of the largest case of each mode and, of a user's variant, a few runs with other arguments that are 1.

    Triton makes an argument that is 1 a constant, which has no `.to`.
    """
    chosen = list({run.task.case.quant: run for run in by_size}.values())
    op, variant = by_size[0].task.op, by_size[0].task.variant

    def ones_of_runs() -> list[frozenset[tuple[str, str]]]:
        facts = [facts_by_config(op, variant, run.task.case, [run.config]).get(run.config) for run in by_size]
        return [each.ones if each else frozenset() for each in facts]

    with suppress(ForkCrashedError):
        ones = Fork(ones_of_runs).result() if op.kind == "foreign" else []
        known = frozenset[tuple[str, str]]().union(*(ones[by_size.index(run)] for run in chosen if ones))
        for _ in range(_MOST_WITH_ONES if ones else 0):
            most = max(range(len(ones)), key=lambda number: len(ones[number] - known))
            chosen += [by_size[most]] if ones[most] - known else []
            known |= ones[most]
    return chosen


def mutate_outputs(plan: Plan) -> list[Outcome]:
    """Perturb the outputs of each operator's first own variant on its check cases, and let its `compare` judge them."""
    check_cases = cases_by_op(plan.cases("check"))
    if not check_cases:
        raise ValueError(f"{plan.sweep.path}: no check case selected")
    jobs = []
    for name, cases in check_cases.items():
        op = plan.ops[name]
        own = next((variant for variant in op.variants if not variant.is_peer and not variant.part), None)
        if own is None:
            raise ValueError(f"{name}: only variants of other packages: expected one of this package to perturb")
        jobs.append(mutation_job(Task(op, cases[0], own), cases))
    outcomes = dict(run_jobs(jobs))
    return [outcome for job in jobs for outcome in outcomes[job]]


def _derived_checks(plan: Plan) -> tuple[dict[str, Derived], list[str]]:
    """Return what is derived for each operator with check cases, and a line for each operator with values that stay unchecked."""
    by_op, lines, bench = {}, [], cases_by_op(plan.cases())
    for op, cases in cases_by_op(plan.cases("check")).items():
        by_op[op] = derived_cases(plan.ops[op], cases, bench.get(op, []))
        if unchecked := by_op[op].unchecked:
            lines.append(f"{op}: only bench cases have {', '.join(unchecked)}: never checked here")
        never = {(name, value) for name, values in plan.ops[op].options.items() for value in values}
        never -= {value for each in (*plan.sweep.check, *plan.sweep.bench) if each.op == op for value in settings(each.case)}
        if never and plan.ops[op].kind == "foreign":
            listed = ", ".join(sorted(f"{name}={value}" for name, value in never))
            lines.append(f"{op}: no case has {listed}: never checked here")
    checked = {sweep_case.op for sweep_case in plan.sweep.check}
    lines += [f"{op}: no check case: never checked here" for op in bench if op not in checked]
    return by_op, lines


def _further_jobs(plan: Plan, sweep_cases: Sequence[SweepCase], facts: Mapping[str, Collection[Fact]]) -> list[Job]:
    """Return each own variant's check of pairs and of second runs, and its check of addresses in the largest bench cases."""
    jobs, check_cases = _compare_jobs(plan, sweep_cases), cases_by_op(sweep_cases)
    for op, cases in check_cases.items():
        jobs += [pairs_job(task, cases) for task in plan.check_tasks(op, cases[0])]
    for op, cases in cases_by_op(plan.cases()).items():
        for case in largest_cases(plan.ops[op], cases):
            supporting = [task for task in plan.check_tasks(op, case) if not task.variant.unsupported(case)]
            jobs += [address_job(task, facts.get(op, ()), check_cases.get(op, ())) for task in supporting]
    return jobs


def _compare_jobs(plan: Plan, sweep_cases: Sequence[SweepCase], quick: bool = False) -> list[Job]:
    """Return the check of `compare` of each other project's operator, on the outputs of its first own variant."""
    jobs = []
    for op, cases in cases_by_op(sweep_cases).items():
        tasks = plan.check_tasks(op, cases[0]) if plan.ops[op].kind == "foreign" else []
        jobs += [compare_job(task, cases, quick) for task in tasks if not task.variant.part][:1]
    return jobs


def _failure_key(record: Record) -> object:
    return records.row_key(record), record.config, record.reason
