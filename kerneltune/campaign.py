"""Run a sweep: check the operators, tune configs that the cache lacks, measure, write records and tables.

This module names no operator and prints nothing: a `Progress` shows its stages and notes. It may import torch.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kerneltune import device, records
from kerneltune.files import read_bytes, replace_text
from kerneltune.interpreter.facts import Fact
from kerneltune.measuring.check import LAUNCH_FAILURE, Outcome, check_only
from kerneltune.measuring.compare import ceiling_task, checked_record
from kerneltune.measuring.compiler import TARGETS, CompilePool, CompileResult, Target, compile_job, refusals
from kerneltune.measuring.jobs import (
    Job,
    address_job,
    case_job,
    case_label,
    check_cost,
    coverage_lines,
    derived_cases,
    mutation_job,
    pairs_job,
    run_jobs,
)
from kerneltune.measuring.pairs import configs_by_case, covering
from kerneltune.plan import Plan
from kerneltune.progress import Progress
from kerneltune.records import Record
from kerneltune.reporting import tables
from kerneltune.search.task import Run, Task, config_values, present
from kerneltune.spec import Case, Config, Op, TaskKey, Variant
from kerneltune.sweep import SweepCase
from kerneltune.tune.gpu_worker import GpuWorker, compare_in_worker
from kerneltune.wording import counted, pairs

_CONFIGS_PER_CASE = 3
"""Covering pairs of config and case, per check case, that are checked on a GPU. Few suffice: a search checks every config."""
_CHECK_TIMEOUT_S = 300.0
_MOST_OFFSET = 2**31 - 1
_CHECK_POLICY = "cold"
"""Policy in the records of checks."""
_CHECKS = "check.journal"
"""Name of the journal of checks."""
_NOT_COMPARED = ("inputs: ", "reference: ", "compare: ", "outputs: ", LAUNCH_FAILURE, "outside of ", "program (")
"""Texts in the reason of a check that failed before it compared outputs, or by an access."""
_WORTH_A_POOL = 10
"""Number of kernels from which parallel compilation pays: to compile so many in a row takes as long as to start the processes."""

Runs = Sequence[Run]
"""The variants of a case, each with its config."""
FirstTable = Callable[[Sequence[Record]], None]
"""Function that shows the records of the headline cases before the sweep measures all cases."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Hold the records of a run, failed checks before the measured rows, and the files that the run wrote.

    Attributes:
        coverage: a line for each variant whose configs were checked on several cases; empty where cases were measured.
    """

    records: list[Record]
    files: list[Path]
    coverage: Sequence[str] = ()


def run_sweep(plan: Plan, progress: Progress, first_table: FirstTable | None = None) -> SweepResult:
    """Run the mode of a sweep that the options ask for; without a GPU only check.

    The records are written under results/, on a GPU also the table as Markdown and CSV, also if the run is interrupted. The next
    run does not repeat the cases that were checked or measured before the interruption.

    Args:
        first_table: gets the records of ten headline cases, measured before all other cases, with present configs and without
            variants that compile for seconds; not called when an interrupted run continues.
    """
    with GpuWorker(config_timeout_s=_CHECK_TIMEOUT_S) as worker:
        campaign = _Campaign(plan, progress, worker)
        if plan.options.check_only or not device.current().is_gpu:
            return campaign.check_alone()
        return campaign.measure_headline(first_table) if plan.options.quick else campaign.check_tune_and_measure(first_table)


def mutate_outputs(plan: Plan) -> list[Outcome]:
    """Perturb the outputs of each operator's first own variant on its check cases, and let its `compare` judge them."""
    by_op = _by_op(plan.cases("check"))
    if not by_op:
        raise ValueError(f"{plan.sweep.path}: no check case selected")
    jobs = []
    for name, cases in by_op.items():
        op = plan.ops[name]
        own = next((variant for variant in op.variants if not variant.is_peer and not variant.part), None)
        if own is None:
            raise ValueError(f"{name}: only variants of other packages: expected one of this package to perturb")
        jobs.append(mutation_job(Task(op, cases[0], own), cases))
    outcomes = dict(run_jobs(jobs))
    return [outcome for job in jobs for outcome in outcomes[job]]


def measure_live(plan: Plan, progress: Progress, command: str, keys: Collection[TaskKey] | None = None) -> list[Record]:
    """Measure the selected variants, interleaved, on the selected bench cases; `keys`, if given, restricts the cases further."""
    device.require_gpu(command)
    entries = [entry for entry in plan.cases() if keys is None or plan.key(entry) in keys]
    with GpuWorker(config_timeout_s=_CHECK_TIMEOUT_S) as worker:
        return _Campaign(plan, progress, worker).measure(entries, None)


def measure_batches(batches: Sequence[tuple[Plan, Sequence[SweepCase]]], progress: Progress, until: float) -> list[Record]:
    """Measure cases of several families, and write the records and tables of a family after each batch of its cases.

    Args:
        batches: the plan of a family and some of its cases, in the order in which they are measured.
        until: time of the monotonic clock in s; after it, no further case begins.
    """
    measured: list[Record] = []
    done, total = 0, sum(len(entries) for _, entries in batches)
    with GpuWorker(config_timeout_s=_CHECK_TIMEOUT_S) as worker:
        for plan, entries in batches:
            if time.monotonic() >= until:
                break
            done += len(entries)
            campaign = _Campaign(plan, progress, worker, until=until)
            measured += campaign.measure_and_write(entries, f"measure {plan.family}, to {done} of {total}")[0]
    return measured


def _by_op(entries: Sequence[SweepCase]) -> dict[str, list[Case]]:
    """Return the cases of each operator."""
    return {op: [entry.case for entry in of_op] for op, of_op in records.grouped(entries, lambda entry: entry.op).items()}


def _runs_to_check(plan: Plan, entries: Sequence[SweepCase], with_peers: bool = False) -> list[Runs]:
    """Return the runs of each check case: every own variant's default config, and on a GPU covering pairs as well."""
    is_gpu, work = device.current().is_gpu, list[Runs]()
    for op, cases in _by_op(entries).items():
        wanted = [variant for variant in plan.variants(op) if not variant.is_peer or with_peers]
        further = {v.name: _covering_configs(plan.ops[op], v, cases) if is_gpu else {} for v in wanted}
        for case in cases:
            tasks = [Task(plan.ops[op], case, variant, _CHECK_POLICY) for variant in wanted]
            runs = [Run(task, config) for task in tasks for config in (task.default, *further[task.variant.name].get(case, ()))]
            work += [runs] if runs else []
    return work


def _derived_checks(plan: Plan) -> tuple[list[SweepCase], list[str], dict[str, set[Fact]]]:
    """Return derived check cases, a line for each operator with values that stay unchecked, and the facts of each operator."""
    derived, lines, bench, facts = [], [], _by_op(plan.cases()), {}
    for op, cases in _by_op(plan.cases("check")).items():
        made, without, facts[op] = derived_cases(plan.ops[op], cases, bench.get(op, []))
        derived += [SweepCase(op, case, "check") for case in made]
        lines += [f"{op}: only bench cases have {', '.join(without)}: never checked here"] if without else []
    known = {entry.op for entry in plan.sweep.check}
    return derived, [*lines, *(f"{op}: no check case: never checked here" for op in bench if op not in known)], facts


def _further_jobs(plan: Plan, entries: Sequence[SweepCase], facts: Mapping[str, Collection[Fact]]) -> list[Job]:
    """Return each own variant's check of pairs and of second runs, and its check of addresses in the largest bench cases."""
    jobs, checks = [], _by_op(entries)
    for op, cases in checks.items():
        own = [task for task in plan.tasks(op, cases[0], _CHECK_POLICY) if not task.variant.is_peer]
        jobs += [pairs_job(task, cases) for task in own]
    for op, cases in _by_op(plan.cases()).items():
        for case in _largest(plan.ops[op], cases):
            own = [task for task in plan.tasks(op, case, _CHECK_POLICY) if not task.variant.is_peer]
            jobs += [
                address_job(task, facts.get(op, ()), checks.get(op, ())) for task in own if not task.variant.unsupported(case)
            ]
    return jobs


def _largest(op: Op, cases: Sequence[Case]) -> list[Case]:
    """Return the case with the most bytes, and the case with the longest of each axis if its offsets may exceed 32 bits."""
    by_bytes = sorted(cases, key=lambda case: op.traffic(case).total)
    longest = [max(by_bytes, key=lambda case: (case[axis], op.traffic(case).total)) for axis, _size in by_bytes[-1].axes]
    return list(dict.fromkeys([by_bytes[-1], *(case for case in longest if op.traffic(case).total > _MOST_OFFSET)]))


def _failure_key(record: Record) -> object:
    """Return the row, the config and the reason of a check: a default config that fails in its first run fails in two jobs."""
    return records.row_of(record), record.config, record.reason


@dataclass(frozen=True, slots=True)
class _Campaign:
    """Run the stages of a sweep; checks and comparisons share a GPU worker.

    Attributes:
        until: time of the monotonic clock in s; after it, no further case is measured.
    """

    plan: Plan
    progress: Progress
    worker: GpuWorker
    until: float = math.inf

    def check_alone(self) -> SweepResult:
        """Check the check cases, with `quick` ten of them, and time nothing. A peer is checked if the selection names variants.

        Without a GPU also check pairs of config and case, and addresses; both take long, so `quick` leaves them out.
        """
        plan, is_gpu, is_quick = self.plan, device.current().is_gpu, self.plan.options.quick
        derived, lines, facts = ([], [], {}) if is_gpu or is_quick else _derived_checks(plan)
        entries = [*(plan.headline("check") if is_quick else plan.cases("check")), *derived]
        work = _runs_to_check(plan, entries, bool(plan.selection.variants))
        if not work:
            check, bench = len(plan.cases("check")), len(plan.cases())
            alone = "bench cases are no checks" if is_gpu else "bench cases need a GPU"
            why = f"no check case among the {bench} selected: {alone}"
            raise ValueError(
                f"{plan.sweep.path}: {f'no installed variant to check in the {check} check cases selected' if check else why}"
            )
        checked, coverage = self.check(work, [] if is_gpu or is_quick else _further_jobs(plan, entries, facts))
        checked += [] if is_gpu else self.check_compiled(work)
        path = plan.journal("check")
        wanted = {TaskKey(entry.op, "", entry.case, _CHECK_POLICY) for entry in plan.sweep.check}
        records.merge(path, checked, lambda record: record.key.of_case in wanted)
        self.end_checks()
        return SweepResult(checked, [path], [*coverage, *lines])

    def measure_headline(self, first_table: FirstTable | None) -> SweepResult:
        """Measure ten headline cases with their present configs; check and tune nothing."""
        if not (entries := self.plan.headline()):
            raise ValueError(f"{self.plan.sweep.path}: no bench case selected")
        self.measure_first(entries, first_table)
        return SweepResult(*self.measure_and_write(entries))

    def check_tune_and_measure(self, first_table: FirstTable | None) -> SweepResult:
        """Check the check cases, tune configs that the cache lacks, and measure the bench cases.

        A peer is checked when it is measured.
        """
        plan, entries = self.plan, self.plan.cases()
        self.measure_first(entries, first_table)
        checked, _ = self.check(_runs_to_check(plan, plan.cases("check")))
        failed = [record for record in checked if record.status == "failed"]
        for record in failed:
            what = f"{record.op} {record.variant} {record.case} {record.dtype} {record.quant}"
            config = f" with {pairs(record.config)}" if record.config else ""
            self.progress.note(f"failed its check: {what}{config}: {record.reason}")
        if plan.options.tune:
            from kerneltune.tune.run import run_tune

            self.worker.end()
            run_tune(plan, self.progress)
        measured, files = self.measure_and_write(entries)
        self.end_checks()
        return SweepResult([*failed, *measured], files)

    def check(self, work: Sequence[Runs], further: Sequence[Job] = ()) -> tuple[list[Record], list[str]]:
        """Check every case, and run the `further` jobs. On a GPU `further` is empty.

        A journal keeps the records until `end_checks`. Return the records, and a line for each variant whose configs were
        checked on several cases.
        """
        is_gpu, family, journal = device.current().is_gpu, self.plan.family, self.plan.journal(_CHECKS)
        known = _known_rows(work, journal)
        cases = [(case_job(runs), rows) for runs, rows in known]
        lacking = [job for job, rows in cases if rows is None]
        if lacking and is_gpu:
            self._compile([job.runs for job in lacking], "check")
        checks = sum(job.checks for job in (*further, *lacking))
        self.progress.stage("check", len(work) + len(further), len(work) - len(lacking), checks)
        on_gpu = ((job, check_only(job.runs, self.worker.check)) for job in lacking)
        done: dict[Job, list[Outcome]] = {}
        made: dict[Job, list[Record]] = {}
        for job, outcomes in on_gpu if is_gpu else run_jobs([*further, *lacking]):
            if job.runs:
                made[job] = [checked_record(family, run, one) for run, one in zip(job.runs, outcomes, strict=True)]
                records.append(journal, made[job])
            else:
                done[job] = outcomes
            self.progress.advance(job.label, job.checks)
        checked = [row for job, rows in cases for row in (made[job] if rows is None else rows)]
        coverage, failures = [], [_failure_key(row) for row in checked]
        for job, outcome in [(one, outcome) for one in further for outcome in done[one]]:
            if outcome.status == "failed":
                run = Run(replace(job.task, case=outcome.case or job.task.case), outcome.config)
                row = checked_record(family, run, outcome)
                checked += [] if _failure_key(row) in failures else [row]
            else:
                coverage.append(outcome.reason)
        self._doubt_references(checked)
        if further and len(lacking) == len(work):
            coverage += coverage_lines([*further, *lacking])
        return checked, coverage

    def end_checks(self) -> None:
        """Remove the journal of the checks, as the run is over."""
        self.plan.journal(_CHECKS).unlink(missing_ok=True)

    def check_compiled(self, work: Sequence[Runs]) -> list[Record]:
        """Compile default configs of other projects' operators, each on the largest check case of each mode.

        Return a record of each refusal: the interpreter accepts Python that Triton's compiler refuses. This project's
        operators are left out, as its tests compile all of their configs.
        """
        largest: dict[tuple[str, str, str], Run] = {}
        for run in sorted((run for runs in work for run in runs), key=lambda run: run.task.op.traffic(run.task.case).total):
            task = run.task
            is_shipped = task.op.module.startswith("kerneltune.") and not task.op.origin
            if not is_shipped and not task.variant.unsupported(task.case):
                largest[task.op.name, task.variant.name, task.case.quant] = run
        if not (runs := list(largest.values())):
            return []
        self.progress.stage("compile", 1)
        refused = refusals([compile_job(*run) for run in runs], self.plan.options.workers)
        self.progress.advance(counted(len(runs), "config"))
        family = self.plan.family
        return [checked_record(family, runs[number], Outcome("failed", reason)) for number, reason in refused.items()]

    def _doubt_references(self, checked: Sequence[Record]) -> None:
        """Pass a note to the progress for each operator with several variants whose outputs all disagree with the reference."""
        for op, rows in records.grouped(checked, lambda row: row.op).items():
            variants = {row.variant for row in rows}
            disagree = all(row.status == "failed" and not any(text in row.reason for text in _NOT_COMPARED) for row in rows)
            if len(variants) > 1 and disagree:
                self.progress.note(f"{op}: all {len(variants)} variants disagree with the reference: is the reference right?")

    def measure_first(self, entries: Sequence[SweepCase], first_table: FirstTable | None) -> None:
        """Measure and show the headline cases without variants that compile for seconds, unless that is the whole run."""
        headlines = self.plan.headline()
        slow = dict.fromkeys(v.name for entry in headlines for v in self.plan.variants(entry.op) if v.compiles)
        resumes = any(self.plan.journal(name).exists() for name in ("journal", _CHECKS))
        if first_table is None or resumes or (not slow and len(entries) <= len(headlines)):
            return
        without = f" without {', '.join(slow)}, which compile for seconds a case" if slow else ""
        self.progress.note(f"first table: {len(headlines)} cases{without}; then all of {len(entries)}")
        measured = self.measure(headlines, None, "measure the first table", slow)
        self.write(measured)
        first_table(measured)

    def measure_and_write(self, entries: Sequence[SweepCase], stage: str = "measure") -> tuple[list[Record], list[Path]]:
        """Measure all variants and write the files; a journal keeps an interrupted run's rows for the next run."""
        journal = self.plan.journal("journal")
        try:
            measured = self.measure(entries, journal, stage)
        except KeyboardInterrupt:
            if journalled(journal):
                self.write([])
            raise
        files = self.write(measured)
        journal.unlink(missing_ok=True)
        return measured, files

    def measure(
        self, entries: Sequence[SweepCase], journal: Path | None, stage: str = "measure", without: Collection[str] = ()
    ) -> list[Record]:
        """Measure every case beside its peers, `without` some variants; a case that the journal has is not measured again."""
        runs_of = [[run for run in self._runs(entry) if run.task.variant.name not in without] for entry in entries]
        known = _known_rows(list(filter(None, runs_of)), journal)
        lacking = [runs for runs, rows in known if rows is None]
        tasks = [ceiling_task(self.plan.ops, task.op, task.case, task.policy) for task in (runs[0].task for runs in lacking)]
        configs = self.plan.options.configs
        ceilings = [None if task is None else Run(task, task.config_of_call(configs)) for task in tasks]
        to_compile = [*lacking, *([run] for run in ceilings if run is not None)]
        if sum(config is not None for runs in to_compile for _, config in runs) >= _WORTH_A_POOL:
            self._compile(to_compile, "measure")
        self.progress.stage(stage, len(known), len(known) - len(lacking))
        measured, beside = [], iter(ceilings)
        for runs, rows in known:
            if rows is None and time.monotonic() >= self.until:
                break
            if rows is None:
                rows = compare_in_worker(self.worker, self.plan.family, runs, next(beside))
                if journal:
                    records.append(journal, rows)
                timed = [row for row in rows if row.time_us is not None]
                if timed:
                    best = min(timed, key=lambda row: row.time_us or 0.0)
                    self.progress.best(f"{best.variant} {best.time_us:.1f} µs, {best.gbps:.0f} GB/s")
                self.progress.advance(case_label(runs))
            measured += rows
        return measured

    def _runs(self, entry: SweepCase) -> Runs:
        """Pair the variants of a case with their configs; a variant that the selection names twice is paired twice."""
        named = self.plan.selection.variants
        runs = [Run(task, task.config_of_call(self.plan.options.configs)) for task in self.plan.tasks(entry.op, entry.case)]
        return [run for run in runs for _ in range(max(1, named.count(run.task.variant.name)))]

    def _compile(self, work: Sequence[Runs], purpose: str) -> None:
        """Compile the runs that have a config on all cores, before they are checked or measured."""
        target = TARGETS.get(device.current().arch)
        if target is not None:
            self.progress.stage("compile", 1)
            ours = [[run for run in runs if run.config is not None] for runs in work]
            compile_ahead(ours, target, self.plan.options.workers)
            self.progress.advance(f"the configs to {purpose}")

    def write(self, measured: Sequence[Record]) -> list[Path]:
        """Add the journal's rows and `measured` to the records of the family, and write the family's tables."""
        plan = self.plan
        rows, markdown, csv = (plan.options.records_folder / f"{plan.family}{suffix}" for suffix in (".jsonl", ".md", ".csv"))
        records.merge(rows, [*journalled(plan.journal("journal")), *measured])
        table = tables.sweep_table(records.load(rows))
        replace_text(markdown, table.markdown())
        replace_text(csv, table.csv())
        return [rows, markdown, csv]


def _known_rows(work: Sequence[Runs], journal: Path | None) -> list[tuple[Runs, list[Record] | None]]:
    """Pair the runs of each case with their rows of an interrupted run; None for a case to be done."""
    done = records.grouped(journalled(journal) if journal else (), lambda record: record.key)
    return [(runs, finished_rows(done, runs)) for runs in work]


def journalled(journal: Path) -> list[Record]:
    """Load the rows of a journal, except a line that was being written; an empty list without a file."""
    if not journal.exists():
        return []
    whole, end, _cut = read_bytes(journal).rpartition(b"\n")
    return records.parse((whole + end).splitlines(keepends=True), str(journal), is_journal=True)


def finished_rows(done: Mapping[TaskKey, Sequence[Record]], runs: Runs) -> list[Record] | None:
    """Return the rows of a case from an interrupted run, if it has all rows for this environment and these configs; else None.

    Failed rows do not count: a row that failed in an interrupted run is measured again.
    """
    gpu = device.current()
    finished = []
    for task, config in runs:
        wanted = {"device": gpu.name, "unit": gpu.unit, "config": config_values(config), **present(task.variant)}
        kept = (row for row in done.get(task.key, ()) if row.status != "failed")
        rows = [row for row in kept if {name: getattr(row, name) for name in wanted} == wanted]
        finished += rows[-1:]
    return finished if len(finished) == len(runs) else None


def compile_ahead(work: Sequence[Runs], target: Target, workers: int | None) -> list[CompileResult]:
    """Compile all runs on all cores, so that launches find the kernels in Triton's disk cache; return the results in order."""
    with CompilePool(target, workers) as pool:
        return list(pool.compile([compile_job(task, config) for runs in work for task, config in runs]))


def _covering_configs(op: Op, variant: Variant, cases: Sequence[Case]) -> dict[Case, list[Config]]:
    """Return the configs of the first covering pairs by case, on average `_CONFIGS_PER_CASE` configs per case."""
    chosen = covering(configs_by_case(variant, cases), lambda _config, case: check_cost(op, case))
    by_case = records.grouped(itertools.islice(chosen, _CONFIGS_PER_CASE * len(cases)), lambda pair: pair[1])
    return {case: [config for config, _ in of_case] for case, of_case in by_case.items()}
