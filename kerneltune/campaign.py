"""A sweep from its YAML to records, tables and configs: check, tune what the cache lacks, measure, write.

Knows no operator and prints nothing. May import torch.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kerneltune import cells, device, records, sweep
from kerneltune.files import replace_text
from kerneltune.interrupts import hear_interrupts
from kerneltune.measuring.check import CaseError, Checker, address_errors
from kerneltune.measuring.compare import (
    CEILING_OP,
    BrokenContextError,
    Ceiling,
    ceiling_case,
    check_only,
    compare,
    make_record,
)
from kerneltune.measuring.compiler import TARGETS, CompilePool, CompileResult, Target, compile_job
from kerneltune.plan import Options, Progress, Selection, headline, load_plan, require_gpu, results_folder, wanted_variants
from kerneltune.records import Key, Record
from kerneltune.reporting import tables
from kerneltune.reporting.tables import rank_flips
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.sweep_journal import finished_rows, journal_path, journalled, key_of_case, resume
from kerneltune.tuning.bench import CheckBench
from kerneltune.tuning.cached import config_for
from kerneltune.tuning.isolated import IsolatedBench, check_in_child, compare_in_child

_CHECKED_CONFIGS = 3
_CHECK_TIMEOUT_S = 300.0
_ADDRESSES_COST = 1.5
"""Cost of checking addresses, in units of `_check_cost`: 2 to 13 s for rmsnorm and fp8_weights, whose checks take 2 s per MB."""
_CHECK_POLICY = "cold"
"""What records of checks are kept under."""
_WORTH_A_POOL = 10
"""So many kernels compiled one by one take as long as the start of the processes that compile side by side."""


Configured = tuple[Op, Case, list[tuple[Variant, Config]]]
"""A case, and its variants with the configs that they are to run with."""
FirstTable = Callable[[Sequence[Record]], None]
"""Shows the records of the headline cases while the rest is still to come."""


@dataclass(slots=True)
class _Process:
    """Tells whether this process can still measure: a launch that loses the GPU's context ends that."""

    can_measure: bool = True


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The records of a run, failed checks before the measured rows, and the files that it wrote.

    `remark` is what those files say of several policies, a line; mostly empty.
    """

    records: list[Record]
    files: list[Path]
    remark: str = ""


def run_sweep(
    ops: Mapping[str, Op],
    selection: Selection,
    options: Options,
    progress: Progress,
    first_table: FirstTable | None = None,
) -> SweepResult:
    """Run all stages of a sweep.

    Without a GPU, and with `check_only`, the sweep's check cases run and no time is taken. On a GPU the records, the table,
    Markdown and CSV are written under results/, also where the measurement is interrupted; cases checked or measured before an
    interruption are not checked or measured again.

    Args:
        first_table: gets the records of ten headline cases, measured before all else with the configs at hand and without
            variants that compile for seconds; not called where an interrupted run goes on.

    Raises:
        ValueError: bad input, nothing to check where only checks run, or a folder that cannot be written.
    """
    plan = load_plan(ops, selection)
    only_checks = options.check_only or not device.current().is_gpu
    work = _to_check(ops, plan, selection, options, only_checks)
    if only_checks and not any(pairs for *_, pairs in work):
        raise ValueError(f"{plan.path}: {_unchecked(plan, selection)}")
    entries = [e for e in plan.bench if selection.takes(e)]
    process = _Process()
    resumes = any(journal_path(plan.family, options.results, name).exists() for name in ("journal", "check.journal"))
    if first_table is not None and not only_checks and not resumes:
        _measure_first(ops, plan, entries, selection, options, progress, process, first_table)
    further = [] if device.current().is_gpu else _further_checks(ops, plan, selection)
    checked = _check(plan.family, work, options, progress, [check.cost for check in further])
    for check in further:
        checked += _check_further(plan.family, check, selection, options)
        progress.advance(f"{check.op.name} {check.case.name}, {'addresses' if check.addresses else 'further configs'}")
    if only_checks:
        return SweepResult(checked, [_write_checked(plan.family, checked, options)])
    for record in checked:
        if record.status == "failed":
            what = f"{record.op} {record.variant} {record.case} {record.dtype} {record.quant}"
            config = f" with {cells.pairs(record.config)}" if record.config else ""
            progress.note(f"failed its check: {what}{config}: {record.reason}")
    if options.tune:
        from kerneltune.tuning.stage import tune_entries

        tune_entries(ops, entries, selection, options, progress)
    measured, files = _measure_all(ops, plan.family, entries, selection, options, progress, process)
    remark = rank_flips(records.load(files[0]))
    return SweepResult([*(record for record in checked if record.status == "failed"), *measured], files, remark)


def run_quick(
    ops: Mapping[str, Op],
    selection: Selection,
    options: Options,
    progress: Progress,
    first_table: FirstTable,
) -> SweepResult:
    """Measure the ten headline cases with the configs at hand: what starts at once first, then all variants interleaved.

    Without a GPU, and with `check_only`, the default configs of ten check cases are checked.

    Args:
        first_table: gets the records of the first measurement, without variants that compile for seconds on their first call;
            not called where there are no such variants, or where only checks run.

    Raises:
        ValueError: bad input, nothing to do, or a folder that cannot be written.
    """
    plan = load_plan(ops, selection)
    if options.check_only or not device.current().is_gpu:
        few = replace(plan, check=tuple(headline(plan, selection, "check")))
        work = _to_check(ops, few, selection, options, True)
        if not any(pairs for *_, pairs in work):
            raise ValueError(f"{plan.path}: {_unchecked(plan, selection)}")
        checked = _check(plan.family, work, options, progress)
        return SweepResult(checked, [_write_checked(plan.family, checked, options)])
    entries = headline(plan, selection)
    if not entries:
        raise ValueError(f"{plan.path}: no bench case selected")
    process = _Process()
    if not journal_path(plan.family, options.results, "journal").exists():
        _measure_first(ops, plan, entries, selection, options, progress, process, first_table)
    return SweepResult(*_measure_all(ops, plan.family, entries, selection, options, progress, process))


def _measure_all(
    ops: Mapping[str, Op],
    family: str,
    entries: Sequence[sweep.SweepCase],
    selection: Selection,
    options: Options,
    progress: Progress,
    process: _Process,
) -> tuple[list[Record], list[Path]]:
    """Measure all variants and write the files; what an interrupted run has measured is kept, and the next run goes on there."""
    journal = journal_path(family, options.results, "journal")
    try:
        measured = _measure(ops, family, entries, selection, options, progress, journal, process=process)
    except KeyboardInterrupt:
        if journalled(journal):
            _write(ops, family, [], options)
        raise
    files = _write(ops, family, measured, options)
    journal.unlink(missing_ok=True)
    return measured, files


def _measure_first(
    ops: Mapping[str, Op],
    plan: sweep.Sweep,
    entries: Sequence[sweep.SweepCase],
    selection: Selection,
    options: Options,
    progress: Progress,
    process: _Process,
    first_table: FirstTable,
) -> None:
    """Measure and show the headline cases without variants that compile for seconds, unless that is all there is to measure."""
    headlines = headline(plan, selection)
    slow = dict.fromkeys(v.name for e in headlines for v in wanted_variants(ops[e.op], selection, options) if v.compiles)
    if not slow and len(entries) <= len(headlines):
        return
    without = f" without {', '.join(slow)}, which compile for seconds a case" if slow else ""
    progress.note(f"first table: {len(headlines)} cases{without}; then all of {len(entries)}")
    fast = replace(options, fast=True)
    measured = _measure(ops, plan.family, headlines, selection, fast, progress, None, "measure the first table", process)
    _write(ops, plan.family, measured, options)
    first_table(measured)


def compare_live(
    ops: Mapping[str, Op], selection: Selection, a: str, b: str, options: Options, progress: Progress
) -> list[Record]:
    """Measure two variants now, interleaved, on the selected bench cases; or one against itself, A and B by turns.

    Raises:
        ValueError: no GPU, or bad input.
    """
    return measure_live(ops, replace(selection, variants=(a, b)), options, progress, "compare --run")


def measure_live(
    ops: Mapping[str, Op],
    selection: Selection,
    options: Options,
    progress: Progress,
    command: str,
    keys: Collection[Key] | None = None,
) -> list[Record]:
    """Measure the selected variants now, interleaved, on the selected bench cases, or on those of them with such keys.

    Raises:
        ValueError: no GPU for `command`, or bad input.
    """
    require_gpu(command)
    plan = load_plan(ops, selection)
    entries = [
        e for e in plan.bench if selection.takes(e) and (keys is None or key_of_case(ops[e.op], e.case, options.policy) in keys)
    ]
    return _measure(ops, plan.family, entries, selection, options, progress, None)


def configured(ops: Mapping[str, Op], selection: Selection, options: Options) -> tuple[str, list[Configured]]:
    """Return the family and, per selected bench case, its variants with the configs they are measured with.

    Raises:
        ValueError: bad input.
    """
    plan = load_plan(ops, selection)
    chosen = [(ops[e.op], e.case) for e in plan.bench if selection.takes(e)]
    return plan.family, [(op, case, _pairs(op, case, selection, options)) for op, case in chosen]


def _to_check(
    ops: Mapping[str, Op], plan: sweep.Sweep, selection: Selection, options: Options, only_checks: bool
) -> list[Configured]:
    """Return the check cases: every own variant's default config, and on a GPU some random valid ones.

    Peers are checked where they are measured; where only checks run, those that the selection names.
    """
    count = _CHECKED_CONFIGS if device.current().is_gpu else 0
    work = []
    for op, case in ((ops[e.op], e.case) for e in plan.check if selection.takes(e)):
        wanted = [v for v in wanted_variants(op, selection, options) if not v.is_peer or (only_checks and selection.variants)]
        work.append((op, case, [(variant, config) for variant in wanted for config in _some_configs(variant, case, count)]))
    return work


def _unchecked(plan: sweep.Sweep, selection: Selection) -> str:
    """Return why a selection has nothing to check."""
    check, bench = (sum(selection.takes(entry) for entry in section) for section in (plan.check, plan.bench))
    if check:
        return f"no installed variant to check in the {check} check cases selected"
    alone = "bench cases are no checks" if device.current().is_gpu else "bench cases need a GPU"
    return f"no check case among the {bench} selected: {alone}"


def _check(
    family: str, work: Sequence[Configured], options: Options, progress: Progress, further: Sequence[float] = ()
) -> list[Record]:
    """Check every case; the records are kept case by case until the last is done.

    Args:
        further: costs of the checks that follow in the same stage.
    """
    on_gpu = device.current().is_gpu
    journal = journal_path(family, options.results, "check.journal")
    done = resume(journal)
    known = [finished_rows(done, op, case, pairs, _CHECK_POLICY) for op, case, pairs in work]
    ahead = _ours(of_case for of_case, rows in zip(work, known, strict=True) if rows is None)
    target = TARGETS.get(device.current().arch)
    if ahead and on_gpu and target is not None:
        progress.stage("compile", 1)
        compile_ahead(ahead, target, options.workers)
        progress.advance("the configs to check")
    costs = [*(_check_cost(op, case) for (op, case, _), rows in zip(work, known, strict=True) if rows is None), *further]
    progress.stage("check", len(work) + len(further), len(work) - known.count(None), () if on_gpu else costs)
    found = []
    with IsolatedBench(CheckBench, trial_timeout_s=_CHECK_TIMEOUT_S) as bench:
        for (op, case, pairs), rows in zip(work, known, strict=True):
            if rows is None:
                rows = check_only(family, op, case, pairs, partial(check_in_child, bench, op, case) if on_gpu else None)
                records.append(journal, rows)
                progress.advance(f"{op.name} {case.name} {case.dtype} {case.quant}")
            found += rows
    journal.unlink(missing_ok=True)
    return found


@dataclass(frozen=True, slots=True)
class _FurtherCheck:
    """A check in the interpreter beyond the default configs: `addresses` of a case, else a case with some random configs."""

    op: Op
    case: Case
    addresses: bool

    @property
    def cost(self) -> float:
        """The check's cost, as of `_check_cost`."""
        return _ADDRESSES_COST if self.addresses else _CHECKED_CONFIGS * _check_cost(self.op, self.case)


def _further_checks(ops: Mapping[str, Op], plan: sweep.Sweep, selection: Selection) -> list[_FurtherCheck]:
    """Return the first check case of each operator and mode, and each operator's largest bench case, for its addresses."""
    first: dict[tuple[str, str], Case] = {}
    for entry in filter(selection.takes, plan.check):
        first.setdefault((entry.op, entry.case.quant), entry.case)
    largest: dict[str, Case] = {}
    for entry in filter(selection.takes, plan.bench):
        largest[entry.op] = max(largest.get(entry.op, entry.case), entry.case, key=lambda case: ops[entry.op].traffic(case).total)
    configs = [_FurtherCheck(ops[name], case, False) for (name, _), case in first.items()]
    return configs + [_FurtherCheck(ops[name], case, True) for name, case in largest.items()]


def _check_further(family: str, check: _FurtherCheck, selection: Selection, options: Options) -> list[Record]:
    """Return a failed record for every config and variant that has errors."""
    if check.addresses:
        errors_of = partial(address_errors, check.op, check.case)
        return _failures(family, check.op, check.case, errors_of, selection, options, 0)
    try:
        errors_of = partial(_config_errors, Checker(check.op, check.case, "cpu"))
    except CaseError:  # the case's own records say so
        return []
    return _failures(family, check.op, check.case, errors_of, selection, options, _CHECKED_CONFIGS)


def _check_cost(op: Op, case: Case) -> float:
    """Return about how long a check takes in the interpreter, in MB of traffic: what is launched, and a part per element."""
    return 0.2 + op.traffic(case).total / 1e6


def _config_errors(checker: Checker, variant: Variant, config: Config) -> list[str]:
    return [] if config == variant.default_config(checker.case) else checker.errors(variant, config, runs=2)


def _failures(
    family: str,
    op: Op,
    case: Case,
    errors_of: Callable[[Variant, Config], list[str]],
    selection: Selection,
    options: Options,
    count: int,
) -> list[Record]:
    """Return a failed record for every own variant and config that has errors."""
    own = [v for v in wanted_variants(op, selection, options) if not v.is_peer and v.unsupported(case) is None]
    tried = ((v, config, errors_of(v, config)) for v in own for config in _some_configs(v, case, count))
    return [make_record(family, op, case, v, config, _CHECK_POLICY, "failed", "; ".join(e)) for v, config, e in tried if e]


def compile_ahead(work: Sequence[Configured], target: Target, workers: int | None) -> list[CompileResult]:
    """Compile what will be launched on all cores, so that launches find it in Triton's disk cache; the answers in order."""
    jobs = [compile_job(op, case, config, variant) for op, case, pairs in work for variant, config in pairs]
    with CompilePool(target, workers) as pool:
        return list(pool.compile(jobs))


def _ours(work: Iterable[Configured]) -> list[Configured]:
    """Keep the variants that have a config, so that nothing is left that only compiles under ours."""
    return [(op, case, [pair for pair in pairs if pair[1] is not None]) for op, case, pairs in work]


def _some_configs(variant: Variant, case: Case, count: int) -> list[Config]:
    """Return the default config and `count` random valid configs."""
    default = variant.default_config(case)
    others = [config for config in variant.configs(case) if config != default] if count else []
    return [default, *random.Random(0).sample(others, min(count, len(others)))]


def _pairs(op: Op, case: Case, selection: Selection, options: Options) -> list[tuple[Variant, Config]]:
    """Pair the variants with their configs; a variant that the selection names twice is there twice."""
    return [
        (variant, config_for(op, case, variant, options))
        for variant in wanted_variants(op, selection, options)
        for _ in range(max(1, selection.variants.count(variant.name)))
    ]


def _ceiling(ops: Mapping[str, Op], op: Op, case: Case, options: Options) -> Ceiling | None:
    if CEILING_OP not in ops:
        return None
    stream, stream_case = ops[CEILING_OP], ceiling_case(op, case)
    variant = stream.variants[0]
    return Ceiling(stream, variant, config_for(stream, stream_case, variant, options), stream_case)


def _measure(
    ops: Mapping[str, Op],
    family: str,
    entries: Sequence[sweep.SweepCase],
    selection: Selection,
    options: Options,
    progress: Progress,
    journal: Path | None,
    stage: str = "measure",
    process: _Process | None = None,
) -> list[Record]:
    """Measure every case beside its peers; with a journal, cases that it has are not measured again."""
    process = process or _Process()
    done = resume(journal) if journal else {}
    measured = []
    work = []
    for entry in entries:
        pairs = _pairs(ops[entry.op], entry.case, selection, options)
        work.append((ops[entry.op], entry.case, pairs, finished_rows(done, ops[entry.op], entry.case, pairs, options.policy)))
    ceilings = {(op.name, case): _ceiling(ops, op, case, options) for op, case, _, rows in work if rows is None}
    _compile_measured([(op, case, pairs) for op, case, pairs, rows in work if rows is None], ceilings.values(), options, progress)
    progress.stage(stage, len(work), sum(rows is not None for *_, rows in work))
    for op, case, pairs, kept in work:
        if kept is not None:
            measured += kept
            continue
        hear_interrupts()
        fresh = _compared(family, op, case, pairs, options.policy, ceilings[op.name, case], process)
        if journal:
            records.append(journal, fresh)
        measured += fresh
        timed = [r for r in fresh if r.time_us is not None]
        if timed:
            best = min(timed, key=lambda r: r.time_us or 0.0)
            progress.best(f"{best.variant} {best.time_us:.1f} µs, {best.gbps:.0f} GB/s")
        progress.advance(f"{op.name} {case.name} {case.dtype} {case.quant}")
    return measured


def _compared(
    family: str,
    op: Op,
    case: Case,
    pairs: Sequence[tuple[Variant, Config]],
    policy: str,
    ceiling: Ceiling | None,
    process: _Process,
) -> list[Record]:
    """Measure the rows of a case, in a fresh process where this one has lost its context.

    A lost context costs the variant its row, or all rows of the case where it is not known whose launch it was; the others are
    measured in a fresh process.
    """
    lost: dict[str, str] = {}
    while True:
        try:
            return (compare if process.can_measure else compare_in_child)(family, op, case, pairs, policy, ceiling, lost)
        except BrokenContextError as error:
            process.can_measure = False
            lost |= dict.fromkeys([error.variant] if error.variant else [variant.name for variant, _ in pairs], error.reason)


def _compile_measured(
    work: Sequence[Configured],
    ceilings: Iterable[Ceiling | None],
    options: Options,
    progress: Progress,
) -> None:
    """Compile the configs that the measurement launches on all cores, where that is enough to be worth starting them."""
    target = TARGETS.get(device.current().arch)
    own = _ours(work)
    own += [(c.op, c.case, [(c.variant, c.config)]) for c in ceilings if c is not None]
    if target is None or sum(len(pairs) for _, _, pairs in own) < _WORTH_A_POOL:
        return
    progress.stage("compile", 1)
    compile_ahead(own, target, options.workers)
    progress.advance("the configs to measure")


def _write(ops: Mapping[str, Op], family: str, measured: Sequence[Record], options: Options) -> list[Path]:
    """Store the journal's rows and `records` among the records of the family, and write its tables."""
    rows, markdown, csv = (results_folder(options) / f"{family}{suffix}" for suffix in (".jsonl", ".md", ".csv"))
    records.merge(rows, [*journalled(journal_path(family, options.results, "journal")), *measured])
    table = tables.sweep_table(records.load(rows), flips=True)
    replace_text(markdown, table.markdown())
    replace_text(csv, table.csv())
    return [rows, markdown, csv]


def _write_checked(family: str, checked: Sequence[Record], options: Options) -> Path:
    path = journal_path(family, options.results, "check")
    records.merge(path, checked)
    return path
