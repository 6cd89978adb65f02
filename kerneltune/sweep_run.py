"""Run a sweep: check the operators, tune configs that the cache lacks, measure, write records and tables.

This module names no operator and prints nothing: a `Progress` shows its stages and notes. It may import torch.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kerneltune import device, records
from kerneltune.checking.check import check_runs
from kerneltune.checking.covering import configs_by_case, covering
from kerneltune.checking.pairs import check_cost
from kerneltune.files import replace_text
from kerneltune.journals import Journal
from kerneltune.measuring.assembly import TARGETS, Target
from kerneltune.measuring.compare import ceiling_task, make_record
from kerneltune.measuring.compiler import CompilePool, CompileResult
from kerneltune.plan import CHECK_POLICY, Plan
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.progress import Progress
from kerneltune.records import Record
from kerneltune.reporting import tables
from kerneltune.reporting.naming import failure_lines
from kerneltune.spec import Case, Config, TaskKey
from kerneltune.sweep_file import SweepCase, cases_by_op
from kerneltune.task import Outcome, Run, Task, knobs_of
from kerneltune.tune.gpu_worker import GpuWorker, compare_in_worker

_CONFIGS_PER_CASE = 3
"""Covering pairs of config and case, per check case, that are checked on a GPU. Few suffice: a search checks every config."""
_CHECK_TIMEOUT_S = 300.0
_WORTH_A_POOL = 10
"""Number of kernels from which parallel compilation pays: to compile so many in a row takes as long as to start the processes."""

FirstTable = Callable[[Sequence[Record]], None]
"""Function that shows the records of the headline cases before the sweep measures all cases."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Hold the records of a run, failed checks before the measured rows, and the files that the run wrote.

    Attributes:
        coverage: how much was checked of each variant, and what is noted; empty where cases were measured.
        passed: records, kept in no file, of the other configs that passed in a case in which a pair of config and case failed.
    """

    records: list[Record]
    files: list[Path]
    coverage: Sequence[Outcome] = ()
    passed: Sequence[Record] = ()


def run_sweep(plan: Plan, progress: Progress, first_table: FirstTable | None = None) -> SweepResult:
    """Run a sweep as far as the options ask for; without a GPU only check.

    The records are written under results/, measured records also as tables in Markdown and CSV, also if the run is interrupted.
    The next run does not repeat the cases that were checked or measured before the interruption.

    first_table: gets the records of ten headline cases, measured before all other cases, with present configs and without
    variants that compile for seconds; not called when an interrupted run continues.
    """
    for path in (plan.scratch_file("check"), plan.options.records_folder / f"{plan.family}.jsonl"):
        records.load_if_present(path)  # a file that cannot be merged with is an error before the work
    with GpuWorker(config_timeout_s=_CHECK_TIMEOUT_S) as worker:
        stages = _SweepStages(plan, progress, worker, first_table)
        if plan.options.extent == "check" or not device.current().is_gpu:
            return stages.check_alone()
        return stages.measure_headline() if plan.options.quick else stages.check_tune_and_measure()


def measure_live(
    plan: Plan, progress: Progress, command: str, keys: Collection[TaskKey] | None = None, repeat: int = 1
) -> list[Record]:
    """Measure the selected variants, interleaved, on the selected bench cases, each of them `repeat` times.

    keys: restrict the cases further, if given.
    """
    device.require_gpu(command)
    sweep_cases = [sweep_case for sweep_case in plan.cases() if keys is None or plan.case_key(sweep_case) in keys]
    with GpuWorker(config_timeout_s=_CHECK_TIMEOUT_S) as worker:
        return _SweepStages(plan, progress, worker, repeat=repeat).measure_cases(sweep_cases, Journal(None))


def measure_batches(batches: Sequence[tuple[Plan, Sequence[SweepCase]]], progress: Progress) -> list[Record]:
    """Measure cases of several families, and write the records and tables of a family after each batch of its cases.

    batches: the plan of a family and some of its cases, in the order in which they are measured.
    """
    measured: list[Record] = []
    done, total = 0, sum(len(sweep_cases) for _, sweep_cases in batches)
    with GpuWorker(config_timeout_s=_CHECK_TIMEOUT_S) as worker:
        for plan, sweep_cases in batches:
            if plan.options.search.is_time_over:
                break
            done += len(sweep_cases)
            stages = _SweepStages(plan, progress, worker)
            measured += stages.measure_and_write(sweep_cases, f"measure {plan.family}, to {done} of {total}").records
    return measured


@dataclass(slots=True)
class _SweepStages:
    """Run the stages of a sweep; checks and comparisons share a GPU worker.

    Attributes:
        first_table: of `run_sweep`.
        repeat: how often each variant of a case is measured.
        default_failures: operator and variant -> why the default config failed its check. These variants are not timed.
    """

    plan: Plan
    progress: Progress
    worker: GpuWorker
    first_table: FirstTable | None = None
    repeat: int = 1
    default_failures: dict[tuple[str, str], str] = field(default_factory=dict)

    def check_alone(self) -> SweepResult:
        """Check the check cases, with `quick` ten of them, and time nothing. A peer is checked if the selection names variants.

        Without a GPU also check derived cases, pairs of config and case, and addresses; `quick` leaves them out.
        """
        plan, is_gpu, with_peers = self.plan, device.current().is_gpu, bool(self.plan.selection.variants)
        sweep_cases = plan.headline("check") if plan.options.quick else plan.cases("check")
        if not any(plan.check_tasks(*sweep_case, with_peers=with_peers) for sweep_case in sweep_cases):
            alone = "bench cases are no checks" if is_gpu else "bench cases need a GPU"
            why = f"no check case among the {len(plan.cases())} selected: {alone}"
            if num_cases := len(plan.cases("check")):
                why = f"no installed variant to check in the {num_cases} check cases selected"
            raise ValueError(f"{plan.sweep.path}: {why}")
        if is_gpu:
            checked, coverage, passed = self.check(sweep_cases, with_peers), list[Outcome](), list[Record]()
        else:
            from kerneltune.cpu_checks import check_on_cpu

            checked, coverage, passed = check_on_cpu(plan, self.progress, sweep_cases)
        self._warn_if_all_variants_fail(checked)
        path = plan.scratch_file("check")
        sweep_keys = {plan.case_key(sweep_case, CHECK_POLICY) for sweep_case in plan.sweep.check}
        key_of = records.check_key if plan.options.quick else records.row_key  # `quick` checks no further configs
        records.merge_checks(path, checked, lambda record: record.key.of_case in sweep_keys, key_of)
        plan.scratch_file("check.journal").unlink(missing_ok=True)
        return SweepResult(checked, [path], coverage, passed)

    def measure_headline(self) -> SweepResult:
        """Measure ten headline cases with their present configs; check and tune nothing."""
        if not (sweep_cases := self.plan.headline()):
            raise ValueError(f"{self.plan.sweep.path}: no bench case selected")
        self.show_first_table(sweep_cases)
        return self.measure_and_write(sweep_cases)

    def check_tune_and_measure(self) -> SweepResult:
        """Check the check cases, tune configs that the cache lacks, and measure the bench cases.

        A variant whose default config fails has failed rows in place of times. A peer is checked when it is measured.
        """
        plan, sweep_cases = self.plan, self.plan.cases()
        self.show_first_table(sweep_cases)
        checked = self.check(plan.cases("check"))
        self._warn_if_all_variants_fail(checked)
        failed = [record for record in checked if record.status == "failed"]
        for line in failure_lines(checked):
            self.progress.note(f"failed its check: {line}")
        for record in failed:
            if (record.config or {}) == knobs_of(plan.ops[record.op].variant(record.variant).default_config(record.key.case)):
                reason = f"failed its check in case {record.case}: {record.reason}"
                self.default_failures.setdefault((record.op, record.variant), reason)
        if self.default_failures:  # the times of the first table go now, as an interrupt may end the run
            tasks = [task for sweep_case in plan.headline() for task in plan.tasks(*sweep_case)]
            _runs, failed_rows = self._with_configs(tasks)
            self.write(failed_rows)
        if plan.options.extent == "tune":
            from kerneltune.tune.run import run_tune

            self.worker.end()
            run_tune(plan.without(self.default_failures), self.progress)
        result = self.measure_and_write(sweep_cases)
        plan.scratch_file("check.journal").unlink(missing_ok=True)
        return replace(result, records=[*failed, *result.records])

    def check(self, sweep_cases: Sequence[SweepCase], with_peers: bool = False) -> list[Record]:
        """Check own variants on the GPU, with the default config and configs of covering pairs; return the records of the cases.

        The journal of checks keeps the records until the run is over.
        """
        family, journal = self.plan.family, Journal(self.plan.scratch_file("check.journal"))
        work = [(runs, journal.finished(runs)) for runs in _runs_to_check(self.plan, sweep_cases, with_peers)]
        lacking = [runs for runs, rows in work if rows is None]
        if lacking:
            self._compile([run for runs in lacking for run in runs if run.config is not None], "check")
        self.progress.stage("check", len(work), len(work) - len(lacking), sum(map(len, lacking)))
        checked = list[Record]()
        for runs, rows in work:
            if rows is None:
                self.worker.close()  # `check_runs` asks how much memory is free
                outcomes = check_runs(runs, self.worker.check)
                rows = [make_record(family, run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
                journal.add(rows)
                self.progress.advance(runs[0].task.key.of_case.label, len(runs))
            checked += rows
        return checked

    def _warn_if_all_variants_fail(self, checked: Sequence[Record]) -> None:
        """Pass a note for each operator, but captured kernels, with several variants that all failed in all cases."""
        for op, rows in records.grouped(checked, lambda row: row.op).items():
            variants = {row.variant for row in rows}
            if len(variants) > 1 and all(row.status == "failed" for row in rows) and self.plan.ops[op].kind != "captured":
                cause = "is compare" if all("compare: " in row.reason for row in rows) else "are inputs and reference"
                self.progress.note(f"{op}: all {len(variants)} variants fail in all cases: {cause} right?")

    def show_first_table(self, sweep_cases: Sequence[SweepCase]) -> None:
        """Measure the headline cases without variants that compile for seconds, and show them as the first table.

        Show none if the run continues an interrupted run, or if these cases and variants are all.
        """
        headlines = self.plan.headline()
        slow = dict.fromkeys(v.name for sweep_case in headlines for v in self.plan.variants(sweep_case.op) if v.compiles)
        resumes = any(self.plan.scratch_file(kind).exists() for kind in ("journal", "check.journal"))
        if self.first_table is None or resumes or (not slow and len(sweep_cases) <= len(headlines)):
            return
        without = f" without {', '.join(slow)}, which compile for seconds a case" if slow else ""
        self.progress.note(f"first table: {len(headlines)} cases{without}; then all of {len(sweep_cases)}")
        fast = self.plan.without({(sweep_case.op, name) for sweep_case in headlines for name in slow})
        measured = replace(self, plan=fast).measure_cases(headlines, Journal(None), "measure the first table")
        self.write(measured)
        self.first_table(measured)

    def measure_and_write(self, sweep_cases: Sequence[SweepCase], stage: str = "measure") -> SweepResult:
        """Measure all variants and write the files; a journal keeps an interrupted run's rows for the next run."""
        path = self.plan.scratch_file("journal")
        try:
            measured = self.measure_cases(sweep_cases, Journal(path), stage)
        except (KeyboardInterrupt, WorkerStoppedError):
            if Journal(path).rows:
                self.write([])
            raise
        files = self.write(measured)
        path.unlink(missing_ok=True)
        return SweepResult(measured, files)

    def measure_cases(self, sweep_cases: Sequence[SweepCase], journal: Journal, stage: str = "measure") -> list[Record]:
        """Measure every case beside its peers; a case that the journal has is not measured again.

        Where no config of a variant is valid in a case, the variant has a failed row, which is not kept in the journal.
        """
        work, failed = list[tuple[list[Run], list[Record] | None]](), list[Record]()
        for sweep_case in sweep_cases:
            runs, rows_without_config = self._with_configs(self.plan.tasks(*sweep_case))
            failed += rows_without_config * self.repeat
            if runs:
                work.append((runs * self.repeat, journal.finished(runs * self.repeat)))
        lacking = [runs for runs, rows in work if rows is None]
        to_launch = (run for runs in lacking for run in (*runs, self._ceiling(runs[0].task)))
        to_compile = [run for run in to_launch if run is not None and run.config is not None]
        if len(to_compile) >= _WORTH_A_POOL:
            self._compile(to_compile, "measure")
        self.progress.stage(stage, len(work), len(work) - len(lacking))
        measured = []
        for runs, rows in work:
            if rows is None and self.plan.options.search.is_time_over:
                break
            if rows is None:
                rows = compare_in_worker(self.worker, self.plan.family, runs, self._ceiling(runs[0].task))
                journal.add(rows)
                timed = [row for row in rows if row.time_us is not None]
                if timed:
                    best = min(timed, key=lambda row: row.time_us or 0.0)
                    self.progress.best(f"{best.variant} {best.time_us:.1f} µs, {best.gbps:.0f} GB/s")
                self.progress.advance(runs[0].task.key.of_case.label)
            measured += rows
        return [*failed, *measured]

    def _ceiling(self, task: Task) -> Run | None:
        """Return the run of the streaming operator that moves as many bytes as a task's case; None if this run is invalid."""
        ceiling = ceiling_task(self.plan.ops, task.op, task.case, task.policy)
        runs, _failed = self._with_configs([] if ceiling is None else [ceiling])
        return runs[0] if runs else None

    def _with_configs(self, tasks: Iterable[Task]) -> tuple[list[Run], list[Record]]:
        """Pair tasks with the configs of a call, None in a case that is not supported.

        Return the runs, and failed rows of tasks for which no config is valid, or whose variant failed its check.
        """
        runs, failed = list[Run](), list[Record]()
        for task in tasks:
            try:
                if reason := self.default_failures.get((task.op.name, task.variant.name)):
                    raise ValueError(reason)
                unsupported = task.variant.unsupported(task.case)
                runs.append(Run(task, None if unsupported else task.config_of_call()))
            except ValueError as error:
                failed.append(make_record(self.plan.family, Run(task, None), Outcome("failed", str(error))))
        return runs, failed

    def _compile(self, runs: Sequence[Run], purpose: str) -> None:
        """Compile runs, each with a config, on all cores, before they are checked or measured."""
        target = TARGETS.get(device.current().arch)
        if target is not None:
            self.progress.stage("compile", 1)
            compile_ahead(runs, target, self.plan.options.workers)
            self.progress.advance(f"the configs to {purpose}")

    def write(self, measured: Sequence[Record]) -> list[Path]:
        """Add the journal's rows and `measured` to the records of the family, and write the family's tables."""
        plan = self.plan
        rows, markdown, csv = (plan.options.records_folder / f"{plan.family}{suffix}" for suffix in (".jsonl", ".md", ".csv"))
        records.merge(rows, [*Journal(plan.scratch_file("journal")).rows, *measured])
        table = tables.sweep_table(records.load(rows))
        replace_text(markdown, table.markdown())
        replace_text(csv, table.csv())
        return [rows, markdown, csv]


def compile_ahead(runs: Sequence[Run], target: Target, workers: int | None) -> list[CompileResult]:
    """Compile all runs on all cores, so that launches find the kernels in Triton's disk cache; return the results in order."""
    with CompilePool(target, workers) as pool:
        return list(pool.compile(runs))


def _runs_to_check(plan: Plan, sweep_cases: Sequence[SweepCase], with_peers: bool) -> list[Sequence[Run]]:
    """Return the runs of each check case on a GPU: the default config of each variant, and covering pairs."""
    work = list[Sequence[Run]]()
    for op, cases in cases_by_op(sweep_cases).items():
        tasks_of = {case: plan.check_tasks(op, case, with_peers=with_peers) for case in cases}
        covered = {task.variant.name: _covering_configs(task, cases) for task in tasks_of[cases[0]]}
        for case, tasks in tasks_of.items():
            runs = [Run(task, config) for task in tasks for config in (task.default, *covered[task.variant.name].get(case, ()))]
            work += [runs] if runs else []
    return work


def _covering_configs(task: Task, cases: Sequence[Case]) -> dict[Case, list[Config]]:
    """Return the configs of a variant's first covering pairs by case, on average `_CONFIGS_PER_CASE` configs per case."""
    chosen = covering(configs_by_case(task.variant, cases), lambda _config, case: check_cost(task.op, case))
    by_case = records.grouped(itertools.islice(chosen, _CONFIGS_PER_CASE * len(cases)), lambda pair: pair[1])
    return {case: [config for config, _ in pairs] for case, pairs in by_case.items()}
