"""A sweep from its YAML to records, tables and configs: check, tune what the cache lacks, measure, write.

Knows no operator and prints nothing. May import torch.
"""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kerneltune import device, records, sweep
from kerneltune.files import replace_text
from kerneltune.measuring.compare import Ceiling, ContextLostError, check_only, compare, config_values
from kerneltune.measuring.compiler import TARGETS, Compiled, CompilePool, Target
from kerneltune.plan import Options, Progress, Selection, load_plan, require_gpu, results_folder, wanted_variants
from kerneltune.records import Key, Record
from kerneltune.reporting import tables
from kerneltune.search.trials import drop_cut_line
from kerneltune.spec import Case, Config, Op, Variant, parts_of
from kerneltune.tuning.apart import check_apart, compare_apart
from kerneltune.tuning.bench import CheckBench
from kerneltune.tuning.cached import config_for
from kerneltune.tuning.isolated import IsolatedBench
from kerneltune.tuning.run import CEILING_OP, ceiling_case, tune_entries
from kerneltune.tuning.tuner import job

_CHECKED_CONFIGS = 3
_CHECK_TIMEOUT_S = 300.0
_WORTH_A_POOL = 10
"""So many kernels compiled one by one take as long as the start of the processes that compile side by side."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The records of a run, failed checks before the measured rows, and the files that it wrote."""

    records: list[Record]
    files: list[Path]


def run_sweep(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> Swept:
    """All stages of a sweep.

    Without a GPU, and with `check_only`, the sweep's check cases run and no time is taken. On a GPU the records, the table,
    Markdown and CSV are written under results/, also where the measurement is interrupted; rows measured before an interruption
    are not measured again.

    Raises:
        ValueError: bad input, or a folder that cannot be written.
    """
    plan = load_plan(ops, selection)
    checked = _check(ops, plan.family, [e for e in plan.check if selection.takes(e)], selection, options, progress)
    if options.check_only or not device.current().is_gpu:
        return Swept(checked, [_write_checked(plan.family, checked, options)])
    for record in checked:
        if record.status == "failed":
            progress.note(
                f"failed its check: {record.op} {record.variant} {record.case} {record.dtype} {record.quant}: {record.reason}"
            )
    entries = [e for e in plan.bench if selection.takes(e)]
    if options.tune:
        tune_entries(ops, entries, selection, options, progress)
    journal = _journal(plan.family, options)
    try:
        measured = _measure(ops, plan.family, entries, selection, options, progress, journal)
    except KeyboardInterrupt:
        if _journalled(journal):
            _write(ops, plan.family, [], options)
        raise
    files = _write(ops, plan.family, measured, options)
    journal.unlink(missing_ok=True)
    return Swept([*(record for record in checked if record.status == "failed"), *measured], files)


def compare_live(
    ops: Mapping[str, Op], selection: Selection, a: str, b: str, options: Options, progress: Progress
) -> list[Record]:
    """Measure two variants now, interleaved, on the selected bench cases.

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
    entries = [e for e in plan.bench if selection.takes(e) and (keys is None or _key(ops[e.op], e.case, options) in keys)]
    return _measure(ops, plan.family, entries, selection, options, progress, None)


def configured(
    ops: Mapping[str, Op], selection: Selection, options: Options
) -> tuple[str, list[tuple[Op, Case, list[tuple[Variant, Config]]]]]:
    """The family, and per selected bench case its variants with the configs they are measured with.

    Raises:
        ValueError: bad input.
    """
    plan = load_plan(ops, selection)
    chosen = [(ops[e.op], e.case) for e in plan.bench if selection.takes(e)]
    return plan.family, [(op, case, _pairs(op, case, selection, options)) for op, case in chosen]


def _check(
    ops: Mapping[str, Op],
    family: str,
    entries: Sequence[sweep.Entry],
    selection: Selection,
    options: Options,
    progress: Progress,
) -> list[Record]:
    """The check cases: every own variant's default config, and on a GPU some random valid ones."""
    on_gpu = device.current().is_gpu
    work = []
    for entry in entries:
        op, case = ops[entry.op], entry.case
        own = [variant for variant in wanted_variants(op, selection, options) if not variant.is_peer]
        count = _CHECKED_CONFIGS if on_gpu else 0
        work.append((op, case, [(variant, config) for variant in own for config in _some_configs(variant, case, count)]))
    target = TARGETS.get(device.current().arch)
    if on_gpu and target is not None:
        progress.stage("compile", 1)
        compile_ahead(work, target, options.workers)
        progress.advance("the configs to check")
    progress.stage("check", len(entries))
    found = []
    with IsolatedBench(CheckBench, trial_timeout_s=_CHECK_TIMEOUT_S) as bench:
        for op, case, pairs in work:
            found += check_only(family, op, case, pairs, partial(check_apart, bench, op, case) if on_gpu else None)
            progress.advance(f"{op.name} {case.name} {case.dtype} {case.quant}")
    return found


def compile_ahead(
    work: Sequence[tuple[Op, Case, Sequence[tuple[Variant, Config]]]], target: Target, workers: int | None
) -> list[Compiled]:
    """Compile what will be launched on all cores, so that launches find it in Triton's disk cache; the answers in order."""
    jobs = [job(op, case, config, variant) for op, case, pairs in work for variant, config in pairs]
    with CompilePool(target, workers) as pool:
        return list(pool.compile(jobs))


def _some_configs(variant: Variant, case: Case, count: int) -> list[Config]:
    """The default config and `count` random valid ones."""
    default = variant.default_config(case)
    others = [config for config in variant.configs(case) if config != default] if count else []
    return [default, *random.Random(0).sample(others, min(count, len(others)))]


def _pairs(op: Op, case: Case, selection: Selection, options: Options) -> list[tuple[Variant, Config]]:
    return [(variant, config_for(op, case, variant, options)) for variant in wanted_variants(op, selection, options)]


def _key(op: Op, case: Case, options: Options) -> Key:
    """The key of the case's records."""
    return op.name, case.dtype, case.quant, tuple(case.axes), tuple(case.options), options.policy


def _ceiling(ops: Mapping[str, Op], op: Op, case: Case, options: Options) -> Ceiling | None:
    if CEILING_OP not in ops:
        return None
    stream, stream_case = ops[CEILING_OP], ceiling_case(op, case)
    variant = stream.variants[0]
    return Ceiling(stream, variant, config_for(stream, stream_case, variant, options), stream_case)


def _measure(
    ops: Mapping[str, Op],
    family: str,
    entries: Sequence[sweep.Entry],
    selection: Selection,
    options: Options,
    progress: Progress,
    journal: Path | None,
) -> list[Record]:
    """Every case beside its peers; with a journal, those that it has are not measured again."""
    done = {(r.key, r.variant): r for r in _journalled(journal)} if journal else {}
    if journal and journal.exists():
        with journal.open("r+b") as file:
            drop_cut_line(file)
    measured = []
    work = []
    for entry in entries:
        pairs = _pairs(ops[entry.op], entry.case, selection, options)
        work.append((ops[entry.op], entry.case, pairs, _still_good(done, ops[entry.op], entry.case, pairs, options)))
    ceilings = {(op.name, case): _ceiling(ops, op, case, options) for op, case, _, rows in work if rows is None}
    _compile_measured([(op, case, pairs) for op, case, pairs, rows in work if rows is None], ceilings.values(), options, progress)
    progress.stage("measure", len(entries))
    here = True
    for op, case, pairs, fresh in work:
        if fresh is None:
            fresh, here = _compared(family, op, case, pairs, options.policy, ceilings[op.name, case], here)
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
    here: bool,
) -> tuple[list[Record], bool]:
    """The rows of a case, and whether the next may be measured here: not where a launch took this process's context along.

    That costs the variant its row, or all rows of the case where it is not known whose launch it was; the others are measured
    in a fresh process.
    """
    lost: dict[str, str] = {}
    while True:
        try:
            return (compare if here else compare_apart)(family, op, case, pairs, policy, ceiling, lost), here
        except ContextLostError as error:
            here = False
            lost |= dict.fromkeys([error.variant] if error.variant else [variant.name for variant, _ in pairs], error.reason)


def _compile_measured(
    work: Sequence[tuple[Op, Case, Sequence[tuple[Variant, Config]]]],
    ceilings: Iterable[Ceiling | None],
    options: Options,
    progress: Progress,
) -> None:
    """Compile the configs that the measurement launches on all cores, where that is enough to be worth starting them."""
    target = TARGETS.get(device.current().arch)
    own = [(op, case, [pair for pair in pairs if pair[1] is not None]) for op, case, pairs in work]
    own += [(c.op, c.case, [(c.variant, c.config)]) for c in ceilings if c is not None]
    if target is None or sum(len(pairs) for _, _, pairs in own) < _WORTH_A_POOL:
        return
    progress.stage("compile", 1)
    compile_ahead(own, target, options.workers)
    progress.advance("the configs to measure")


def _still_good(
    done: Mapping[tuple[Any, str], Record], op: Op, case: Case, pairs: Sequence[tuple[Variant, Config]], options: Options
) -> list[Record] | None:
    """The rows of a case that an interrupted run left, if it left all of them for this source, driver, versions and config."""
    key = _key(op, case, options)
    here = {"source_hash": op.source_hash, "driver": device.current().driver, **device.versions()}
    rows = [(done.get((key, variant.name)), config_values(config)) for variant, config in pairs]
    found = [
        row
        for row, config in rows
        if row is not None and {name: getattr(row, name) for name in here} == here and row.config == config
    ]
    return found if len(found) == len(pairs) else None


def _journalled(journal: Path) -> list[Record]:
    """What an interrupted run measured, without a row that was being written."""
    if not journal.exists():
        return []
    whole, end, _cut = journal.read_bytes().rpartition(b"\n")
    return records.parse(whole + end, str(journal))


def _journal(family: str, options: Options) -> Path:
    """Rows of a run that has not come to its end, where it is deleted."""
    return sweep.results_root(options.results) / "runs" / device.current().slug / f"{family}.journal.jsonl"


def _write(ops: Mapping[str, Op], family: str, measured: Sequence[Record], options: Options) -> list[Path]:
    """The journal's rows and these among the records of the family, and its tables."""
    rows, markdown, csv = (results_folder(options) / f"{family}{suffix}" for suffix in (".jsonl", ".md", ".csv"))
    records.merge(rows, [*_journalled(_journal(family, options)), *measured])
    everything, parts = records.load(rows), parts_of(ops.values())
    replace_text(markdown, tables.sweep_markdown(everything, parts))
    replace_text(csv, tables.sweep_csv(everything, parts))
    return [rows, markdown, csv]


def _write_checked(family: str, checked: Sequence[Record], options: Options) -> Path:
    path = sweep.results_root(options.results) / "runs" / device.current().slug / f"{family}.check.jsonl"
    records.merge(path, checked)
    return path
