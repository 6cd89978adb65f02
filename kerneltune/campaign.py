"""Run a sweep: check the operators, tune configs that the cache lacks, measure, write records and tables.

This module names no operator and prints nothing: a `Progress` shows its stages and notes. It may import torch.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kerneltune import device, records, sweep, table
from kerneltune.files import replace_text
from kerneltune.measuring.check import LAUNCH_FAILURE
from kerneltune.measuring.compare import ceiling_task, check_only, make_record
from kerneltune.measuring.compiler import TARGETS, CompilePool, CompileResult, Target, compile_job
from kerneltune.measuring.further import FurtherCheck, FurtherChecks, check_cost
from kerneltune.measuring.mutations import MutationReport, mutate
from kerneltune.measuring.pairs import configs_by_case, covering
from kerneltune.records import Key, Record
from kerneltune.reporting import tables
from kerneltune.run_options import (
    Options,
    Progress,
    Selection,
    finished_rows,
    headline,
    journal_path,
    journalled,
    key_of_case,
    load_plan,
    require_gpu,
    results_folder,
    resume,
    wanted_variants,
)
from kerneltune.search.task import Run, Task
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tune.candidates import config_for
from kerneltune.tune.gpu_worker import GpuWorker, check_in_child, compare_in_child

_CONFIGS_PER_CASE = 3
"""Covering pairs of config and case, per check case, that are checked on a GPU. Few suffice: a search checks every config."""
_CHECK_TIMEOUT_S = 300.0
_CHECK_POLICY = "cold"
"""Policy in the records of checks."""
_NOT_COMPARED = ("inputs: ", "reference: ", "compare: ", "outputs: ", LAUNCH_FAILURE)
"""Texts in the reason of a check that failed before it compared outputs."""
_WORTH_A_POOL = 10
"""Number of kernels from which parallel compilation pays: to compile so many in a row takes as long as to start the processes."""

Runs = list[Run]
"""The variants of a case, each with its config."""
FirstTable = Callable[[Sequence[Record]], None]
"""Function that shows the records of the headline cases before the sweep measures all cases."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Hold the records of a run, failed checks before the measured rows, and the files that the run wrote.

    After checks, `remark` has a line for each variant whose configs were checked on several cases. Otherwise it is empty.
    """

    records: list[Record]
    files: list[Path]
    remark: str = ""


def run_sweep(
    ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress, first_table: FirstTable | None = None
) -> SweepResult:
    """Run all stages of a sweep, or with `options.quick` measure ten headline cases with their present configs.

    Without a GPU, and with `check_only`, check cases run and nothing is timed. On a GPU the records, the table, Markdown and CSV
    are written under results/, also if the measurement is interrupted. The next run does not repeat the cases that were checked
    or measured before the interruption.

    Args:
        first_table: gets the records of ten headline cases, measured before all other cases, with present configs and without
            variants that compile for seconds; not called when an interrupted run continues.
    """
    with _campaign(ops, selection, options, progress) as campaign:
        plan = campaign.plan
        chosen = headline(plan, selection) if options.quick else list(filter(selection.takes, plan.bench))
        if options.quick and not chosen and not campaign.only_checks:
            raise ValueError(f"{plan.path}: no bench case selected")
        is_checked = campaign.only_checks or not options.quick
        to_check = headline(plan, selection, "check") if options.quick else plan.check
        work = campaign.to_check(to_check) if is_checked else []
        resumes = any(campaign.journal(name).exists() for name in ("journal", "check.journal"))
        if first_table is not None and not campaign.only_checks and not resumes:
            campaign.measure_first(chosen, first_table)
        has_further = not device.current().is_gpu and not options.quick
        checked = campaign.check(work, campaign.further_checks() if has_further else []) if is_checked else []
        if campaign.only_checks:
            return campaign.keep_checked(checked)
        failed = [record for record in checked if record.status == "failed"]
        for record in failed:
            what = f"{record.op} {record.variant} {record.case} {record.dtype} {record.quant}"
            config = f" with {table.pairs(record.config)}" if record.config else ""
            progress.note(f"failed its check: {what}{config}: {record.reason}")
        if options.tune and not options.quick:
            from kerneltune.tune.tune_run import TunePlan, tune_here

            campaign.bench.end()
            tune_here(TunePlan(ops, chosen, selection, options), progress)
        measured, files = campaign.measure_and_write(chosen)
        return SweepResult([*failed, *measured], files)


def mutate_outputs(ops: Mapping[str, Op], selection: Selection) -> list[MutationReport]:
    """Perturb the outputs of each operator's first own variant on its check cases, and let its `compare` judge them."""
    plan = load_plan(ops, selection)
    cases: dict[str, list[Case]] = {}
    for entry in filter(selection.takes, plan.check):
        cases.setdefault(entry.op, []).append(entry.case)
    if not cases:
        raise ValueError(f"{plan.path}: no check case selected")
    found = []
    for name, of_op in cases.items():
        own = next((variant for variant in ops[name].variants if not variant.is_peer and not variant.part), None)
        if own is None:
            raise ValueError(f"{name}: only variants of other packages: expected one of this package to perturb")
        found += mutate(ops[name], own, of_op)
    return found


def measure_live(
    ops: Mapping[str, Op],
    selection: Selection,
    options: Options,
    progress: Progress,
    command: str,
    keys: Collection[Key] | None = None,
) -> list[Record]:
    """Measure the selected variants, interleaved, on the selected bench cases; `keys`, if given, restricts the cases further."""
    require_gpu(command)
    with _campaign(ops, selection, options, progress) as campaign:
        entries = [entry for entry in campaign.plan.bench if selection.takes(entry)]
        if keys is not None:
            entries = [entry for entry in entries if key_of_case(ops[entry.op], entry.case, options.policy) in keys]
        return campaign.measure(entries, None)


def measure_again(
    ops: Mapping[str, Op],
    batches: Sequence[tuple[sweep.Sweep, Sequence[sweep.SweepCase]]],
    selection: Selection,
    options: Options,
    progress: Progress,
    until: float,
) -> list[Record]:
    """Measure cases of several families, and write the records and tables of a family after each batch of its cases.

    Args:
        batches: a family and some of its cases, in the order in which they are measured.
        until: time of the monotonic clock in s; after it, no further case begins.
    """
    found: list[Record] = []
    done, total = 0, sum(len(entries) for _, entries in batches)
    with GpuWorker(trial_timeout_s=_CHECK_TIMEOUT_S) as bench:
        for plan, entries in batches:
            if time.monotonic() >= until:
                break
            campaign = _Campaign(ops, plan, replace(selection, family=plan.family), options, progress, bench, until=until)
            done += len(entries)
            found += campaign.measure_and_write(entries, f"measure {plan.family}, to {done} of {total}")[0]
    return found


@dataclass(frozen=True, slots=True)
class _Campaign:
    """Run the stages of a sweep; checks and comparisons share a measuring subprocess."""

    ops: Mapping[str, Op]
    plan: sweep.Sweep
    selection: Selection
    options: Options
    progress: Progress
    bench: GpuWorker
    coverage: list[str] = field(default_factory=list)
    """A line for each variant whose configs were checked on several cases."""
    until: float = math.inf
    """Time of the monotonic clock in s; after it, no further case is measured."""

    @property
    def only_checks(self) -> bool:
        """Return whether the run checks and times nothing."""
        return self.options.check_only or not device.current().is_gpu

    def journal(self, name: str) -> Path:
        """Return the file of a stage's rows."""
        return journal_path(self.plan.family, self.options.results, name)

    def to_check(self, entries: Sequence[sweep.SweepCase]) -> list[Runs]:
        """Return the selected check cases: every own variant's default config, and on a GPU covering pairs as well.

        A peer is checked when it is measured. If only checks run, the peers that the selection names are included here.
        """
        with_peers = self.only_checks and self.selection.variants
        cases: dict[str, list[Case]] = {}
        for entry in filter(self.selection.takes, entries):
            cases.setdefault(entry.op, []).append(entry.case)
        work = []
        for op, of_op in ((self.ops[name], found) for name, found in cases.items()):
            wanted = [v for v in wanted_variants(op, self.selection, self.options) if not v.is_peer or with_peers]
            further = {v.name: _covering_configs(op, v, of_op) if device.current().is_gpu else {} for v in wanted}
            for case in of_op:
                tasks = [Task(op, case, variant, _CHECK_POLICY) for variant in wanted]
                chosen = [
                    (task, [task.variant.default_config(case), *further[task.variant.name].get(case, ())]) for task in tasks
                ]
                work.append([(task, config) for task, configs in chosen for config in configs])
        if self.only_checks and not any(work):
            raise ValueError(f"{self.plan.path}: {self._unchecked()}")
        return list(filter(None, work))

    def _unchecked(self) -> str:
        """Return the reason why the selection has nothing to check."""
        check, bench = (sum(map(self.selection.takes, section)) for section in (self.plan.check, self.plan.bench))
        if check:
            return f"no installed variant to check in the {check} check cases selected"
        alone = "bench cases are no checks" if device.current().is_gpu else "bench cases need a GPU"
        return f"no check case among the {bench} selected: {alone}"

    def further_checks(self) -> list[FurtherCheck]:
        """Return each own variant's check of pairs, and its check of addresses in the largest bench case."""
        cases: dict[str, list[Case]] = {}
        for entry in filter(self.selection.takes, self.plan.check):
            cases.setdefault(entry.op, []).append(entry.case)
        largest: dict[str, Case] = {}
        for entry in filter(self.selection.takes, self.plan.bench):
            traffic = self.ops[entry.op].traffic
            largest[entry.op] = max(largest.get(entry.op, entry.case), entry.case, key=lambda case: traffic(case).total)
        found = []
        for of_op, is_of_addresses in ((cases, False), ({name: [case] for name, case in largest.items()}, True)):
            for op, chosen in ((self.ops[name], tuple(chosen)) for name, chosen in of_op.items()):
                tasks = [Task(op, chosen[0], v, _CHECK_POLICY) for v in wanted_variants(op, self.selection, self.options)]
                for task in (task for task in tasks if not task.variant.is_peer):
                    if not task.variant.unsupported(chosen[0]) if is_of_addresses else task.variant.config is not None:
                        found.append(FurtherCheck(task, chosen, is_of_addresses))
        return found

    def check(self, work: Sequence[Runs], further: Sequence[FurtherCheck] = ()) -> list[Record]:
        """Check every case, then run the `further` checks; a journal keeps the cases' records until the last case is done."""
        on_gpu, journal = device.current().is_gpu, self.journal("check.journal")
        done = resume(journal)
        known = [finished_rows(done, runs) for runs in work]
        lacking = [runs for runs, rows in zip(work, known, strict=True) if rows is None]
        target = TARGETS.get(device.current().arch)
        if lacking and on_gpu and target is not None:
            self.progress.stage("compile", 1)
            compile_ahead(_ours(lacking), target, self.options.workers)
            self.progress.advance("the configs to check")
        self.progress.stage("check", len(work) + len(further), len(work) - len(lacking))
        found, beside = [], FurtherChecks(further)
        with beside.begun():
            for runs, rows in zip(work, known, strict=True):
                if rows is None:
                    rows = check_only(self.plan.family, runs, partial(check_in_child, self.bench) if on_gpu else None)
                    records.append(journal, rows)
                    self.progress.advance(_label(runs))
                found += rows
            journal.unlink(missing_ok=True)
            for checked in beside.finish(self.progress.advance):
                found += [
                    make_record(self.plan.family, task, config, "failed", reason) for task, config, reason in checked.failures
                ]
                self.coverage.extend(filter(None, [checked.line]))
        self._doubt_references(found)
        return found

    def _doubt_references(self, checked: Sequence[Record]) -> None:
        """Pass a note to the progress for each operator with several variants whose outputs all disagree with the reference."""
        for op, rows in records.grouped(checked, lambda row: row.op).items():
            variants = {row.variant for row in rows}
            disagree = all(row.status == "failed" and not any(text in row.reason for text in _NOT_COMPARED) for row in rows)
            if len(variants) > 1 and disagree:
                self.progress.note(f"{op}: all {len(variants)} variants disagree with the reference: is the reference right?")

    def keep_checked(self, checked: list[Record]) -> SweepResult:
        """Write the records of checks."""
        path = self.journal("check")
        records.merge(path, checked)
        return SweepResult(checked, [path], "\n".join(self.coverage))

    def measure_first(self, entries: Sequence[sweep.SweepCase], first_table: FirstTable) -> None:
        """Measure and show the headline cases without variants that compile for seconds, unless the run has nothing else."""
        headlines = headline(self.plan, self.selection)
        variants = [v for e in headlines for v in wanted_variants(self.ops[e.op], self.selection, self.options)]
        slow = dict.fromkeys(variant.name for variant in variants if variant.compiles)
        if not slow and len(entries) <= len(headlines):
            return
        without = f" without {', '.join(slow)}, which compile for seconds a case" if slow else ""
        self.progress.note(f"first table: {len(headlines)} cases{without}; then all of {len(entries)}")
        fast = replace(self, options=replace(self.options, fast=True))
        measured = fast.measure(headlines, None, "measure the first table")
        self.write(measured)
        first_table(measured)

    def measure_and_write(self, entries: Sequence[sweep.SweepCase], stage: str = "measure") -> tuple[list[Record], list[Path]]:
        """Measure all variants and write the files; a journal keeps an interrupted run's rows for the next run."""
        journal = self.journal("journal")
        try:
            measured = self.measure(entries, journal, stage)
        except KeyboardInterrupt:
            if journalled(journal):
                self.write([])
            raise
        files = self.write(measured)
        journal.unlink(missing_ok=True)
        return measured, files

    def measure(self, entries: Sequence[sweep.SweepCase], journal: Path | None, stage: str = "measure") -> list[Record]:
        """Measure every case beside its peers; a case that the journal has is not measured again."""
        done = resume(journal) if journal else {}
        work = [runs for e in entries if (runs := _runs(self.ops[e.op], e.case, self.selection, self.options))]
        known = [finished_rows(done, runs) for runs in work]
        lacking = [runs for runs, rows in zip(work, known, strict=True) if rows is None]
        ceilings = [self._ceiling(runs[0][0]) for runs in lacking]
        self._compile([*_ours(lacking), *([run] for run in ceilings if run is not None)])
        self.progress.stage(stage, len(work), len(work) - len(lacking))
        measured, beside = [], iter(ceilings)
        for runs, rows in zip(work, known, strict=True):
            if rows is None and time.monotonic() >= self.until:
                break
            if rows is None:
                rows = compare_in_child(self.bench, self.plan.family, runs, next(beside))
                if journal:
                    records.append(journal, rows)
                self._tell(_label(runs), rows)
            measured += rows
        return measured

    def _ceiling(self, task: Task) -> Run | None:
        """Return the streaming operator that is the upper bound of a task's bandwidth, and its config."""
        ceiling = ceiling_task(self.ops, task.op, task.case, task.policy)
        return None if ceiling is None else (ceiling, config_for(ceiling, self.options.configs))

    def _compile(self, work: Sequence[Runs]) -> None:
        """Compile configs on all cores before they are measured, if there are enough configs (_WORTH_A_POOL)."""
        target = TARGETS.get(device.current().arch)
        if target is not None and sum(map(len, work)) >= _WORTH_A_POOL:
            self.progress.stage("compile", 1)
            compile_ahead(work, target, self.options.workers)
            self.progress.advance("the configs to measure")

    def _tell(self, label: str, rows: Sequence[Record]) -> None:
        timed = [(row.time_us, row) for row in rows if row.time_us is not None]
        if timed:
            time_us, best = min(timed, key=lambda pair: pair[0])
            self.progress.best(f"{best.variant} {time_us:.1f} µs, {best.gbps:.0f} GB/s")
        self.progress.advance(label)

    def write(self, measured: Sequence[Record]) -> list[Path]:
        """Add the journal's rows and `measured` to the records of the family, and write the family's tables."""
        folder = results_folder(self.options)
        rows, markdown, csv = (folder / f"{self.plan.family}{suffix}" for suffix in (".jsonl", ".md", ".csv"))
        records.merge(rows, [*journalled(self.journal("journal")), *measured])
        table = tables.sweep_table(records.load(rows))
        replace_text(markdown, table.markdown())
        replace_text(csv, table.csv())
        return [rows, markdown, csv]


@contextmanager
def _campaign(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> Iterator[_Campaign]:
    plan = load_plan(ops, selection)
    with GpuWorker(trial_timeout_s=_CHECK_TIMEOUT_S) as bench:
        yield _Campaign(ops, plan, selection, options, progress, bench)


def _label(runs: Runs) -> str:
    task = runs[0][0]
    return f"{task.op.name} {task.case.name} {task.case.dtype} {task.case.quant}"


def compile_ahead(work: Sequence[Runs], target: Target, workers: int | None) -> list[CompileResult]:
    """Compile all runs on all cores, so that launches find the kernels in Triton's disk cache; return the results in order."""
    with CompilePool(target, workers) as pool:
        return list(pool.compile([compile_job(task, config) for runs in work for task, config in runs]))


def _ours(work: Sequence[Runs]) -> list[Runs]:
    """Keep the variants with a config; variants without a config are not compiled ahead."""
    return [[(task, config) for task, config in runs if config is not None] for runs in work]


def _covering_configs(op: Op, variant: Variant, cases: Sequence[Case]) -> dict[Case, list[Config]]:
    """Return the configs of the first covering pairs by case, on average `_CONFIGS_PER_CASE` configs per case."""
    found: dict[Case, list[Config]] = {}
    pairs = covering(configs_by_case(variant, cases), partial(check_cost, op))
    for config, case in itertools.islice(pairs, _CONFIGS_PER_CASE * len(cases)):
        found.setdefault(case, []).append(config)
    return found


def _runs(op: Op, case: Case, selection: Selection, options: Options) -> Runs:
    """Pair the variants of a case with their configs; a variant that the selection names twice is paired twice."""
    tasks = [Task(op, case, variant, options.policy) for variant in wanted_variants(op, selection, options)]
    found = [(task, config_for(task, options.configs)) for task in tasks]
    return [run for run in found for _ in range(max(1, selection.variants.count(run[0].variant.name)))]
