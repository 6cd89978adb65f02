"""A sweep from its YAML to records, tables and configs: check, tune what the cache lacks, measure, write.

Knows no operator and prints nothing. May import torch.
"""

import fnmatch
import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kerneltune import cache, device, records, report, sweep
from kerneltune.compare import Ceiling, check_only, compare, config_values, memory_shortage
from kerneltune.compiler import TARGETS, CompilePool
from kerneltune.records import Key, Record
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.trials import TrialStore, drop_cut_line
from kerneltune.tune import NothingPassedError, Search, Tuner, compile_with, tune

CEILING_OP = "stream"
_CHECKED_CONFIGS = 3


class Progress(Protocol):
    """Where long work says how far it is."""

    def stage(self, name: str, total: int) -> None:
        """A new stage of `total` steps."""

    def advance(self, text: str) -> None:
        """One step done; `text` says which comes next or was done."""

    def best(self, text: str) -> None:
        """The best so far."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


class Quiet:
    """A Progress that says nothing."""

    def stage(self, name: str, total: int) -> None:
        """Nothing."""

    def advance(self, text: str) -> None:
        """Nothing."""

    def best(self, text: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a family: operator names, patterns of case names, dtypes, quant modes, variant names; empty means all."""

    family: str
    ops: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    quants: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    def takes(self, entry: sweep.Entry) -> bool:
        """Whether an entry of the sweep belongs to the selection."""
        case = entry.case
        return (
            (not self.ops or entry.op in self.ops)
            and (not self.cases or any(fnmatch.fnmatch(case.name, pattern) for pattern in self.cases))
            and (not self.dtypes or case.dtype in self.dtypes)
            and (not self.quants or case.quant in self.quants)
        )


@dataclass(frozen=True, slots=True)
class Options:
    """How to run. budget_s: seconds of search per case; trials: most configs per case; force: search again what the cache
    has; workers: compile processes; configs, results: folders, None for the usual ones."""

    policy: str = "cold"
    tune: bool = True
    peers: bool = True
    budget_s: float | None = None
    trials: int | None = None
    check_only: bool = False
    configs: Path | None = None
    results: Path | None = None
    workers: int | None = None
    force: bool = False
    sampler: str = "tpe"


def run_sweep(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> list[Record]:
    """All stages of a sweep; returns the records of this run, failed checks before the measured rows.

    Without a GPU, and with `check_only`, the sweep's check cases run and no time is taken. On a GPU the records, the table,
    Markdown and CSV are written under results/; rows measured before an interruption are not measured again.

    Raises:
        ValueError: bad input, or a folder that cannot be written.
    """
    plan = _plan(ops, selection)
    checked = _check(ops, plan.family, [e for e in plan.check if selection.takes(e)], selection, options, progress)
    if options.check_only or not device.current().is_gpu:
        _write_checked(plan.family, checked, options)
        return checked
    for record in checked:
        if record.status == "failed":
            progress.note(
                f"failed its check: {record.op} {record.variant} {record.case} {record.dtype} {record.quant}: {record.reason}"
            )
    entries = [e for e in plan.bench if selection.takes(e)]
    if options.tune:
        _tune(ops, entries, selection, options, progress)
    measured = _measure(ops, plan.family, entries, selection, options, progress, _journal(plan.family, options))
    _write(plan.family, measured, options)
    return [*(record for record in checked if record.status == "failed"), *measured]


def run_tune(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> list[cache.Entry]:
    """Search the selected bench cases; returns the entries that were stored.

    Raises:
        ValueError: no GPU, bad input, or a folder that cannot be written.
    """
    plan = _plan(ops, selection)
    require_gpu("tune")
    return _tune(ops, [e for e in plan.bench if selection.takes(e)], selection, options, progress)


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
    plan = _plan(ops, selection)
    entries = [e for e in plan.bench if selection.takes(e) and (keys is None or _key(ops[e.op], e.case, options) in keys)]
    return _measure(ops, plan.family, entries, selection, options, progress, None)


def require_gpu(command: str) -> None:
    """Raises ValueError where `command` has no GPU to run on."""
    if not device.current().is_gpu:
        raise ValueError(f"{command} needs a GPU: in the interpreter nothing can be timed")


def configured(
    ops: Mapping[str, Op], selection: Selection, options: Options
) -> tuple[str, list[tuple[Op, Case, list[tuple[Variant, Config]]]]]:
    """The family, and per selected bench case its variants with the configs they are measured with.

    Raises:
        ValueError: bad input.
    """
    plan = _plan(ops, selection)
    chosen = [(ops[e.op], e.case) for e in plan.bench if selection.takes(e)]
    return plan.family, [(op, case, _pairs(op, case, selection, options)) for op, case in chosen]


def results_folder(options: Options) -> Path:
    """results/<device> for GPUs; results/runs/interpreter, which git ignores, where nothing is timed."""
    root = options.results or _results_root()
    here = device.current()
    return root / here.slug if here.is_gpu else root / "runs" / here.slug


def _results_root() -> Path:
    return Path(os.environ["KERNELTUNE_RESULTS"]) if "KERNELTUNE_RESULTS" in os.environ else cache.data_root("results")


def _plan(ops: Mapping[str, Op], selection: Selection) -> sweep.Sweep:
    for name in selection.ops:
        if name not in ops:
            raise ValueError(f"unknown op {name!r}; there are {', '.join(ops)}")
    plan = sweep.load(sweep.find(selection.family), ops)
    for name in selection.variants:
        if not any(v.name == name for op in {e.op for e in (*plan.check, *plan.bench)} for v in ops[op].variants):
            raise ValueError(f"unknown variant {name!r} in family {plan.family}")
    return plan


def _variants(op: Op, selection: Selection, options: Options) -> list[Variant]:
    """The selected variants that can be imported here."""
    return [
        variant
        for variant in op.variants
        if (not selection.variants or variant.name in selection.variants)
        and not (variant.is_peer and not options.peers and variant.name not in selection.variants)
        and not variant.missing()
    ]


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
    progress.stage("check", len(entries))
    found = []
    for entry in entries:
        op, case = ops[entry.op], entry.case
        pairs = []
        for variant in _variants(op, selection, options):
            if not variant.is_peer:
                pairs += [(variant, config) for config in _some_configs(variant, case, _CHECKED_CONFIGS if on_gpu else 0)]
        found += check_only(family, op, case, pairs, "cuda" if on_gpu else "cpu")
        progress.advance(f"{op.name} {case.name} {case.dtype} {case.quant}")
    return found


def _some_configs(variant: Variant, case: Case, count: int) -> list[Config]:
    """The default config and `count` random valid ones."""
    default = variant.default_config(case)
    others = [config for config in variant.configs(case) if config != default] if count else []
    return [default, *random.Random(0).sample(others, min(count, len(others)))]


def _tune(
    ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options, progress: Progress
) -> list[cache.Entry]:
    search = Search(options.budget_s, options.trials, options.sampler)
    wanted = list(_lacking(ops, entries, selection, options))
    if not wanted:
        return []
    here = device.current()
    target = TARGETS.get(here.arch)
    if target is None:
        raise ValueError(f"cannot compile ahead of time for {here.arch}; known targets: {', '.join(TARGETS)}")
    folder = (options.results or _results_root()) / "runs" / "trials" / here.slug
    stored = []
    progress.stage("tune", len(wanted))
    with CompilePool(target, options.workers) as pool:
        for op, case, variant in wanted:
            shortage = memory_shortage(op, case)
            if shortage is not None:
                progress.note(f"not tuned: {op.name} {case.name}: {shortage}")
                progress.advance(f"{op.name} {variant.name} {case.name} {case.dtype} {case.quant}")
                continue
            store = TrialStore(folder / f"{op.name}.jsonl", source_hash=op.source_hash, driver=here.driver, **device.versions())
            try:
                tuner = Tuner(op, case, variant, options.policy, store)
                entry = tune(tuner, search, compile_with(pool, op, case, variant), options.configs)
                stored.append(entry)
                gain = entry.evidence.get("speedup")
                progress.best(f"{entry.config}" + (f" {gain:.2f}x the incumbent" if gain else ""))
            except NothingPassedError as error:
                progress.note(str(error))
            progress.advance(f"{op.name} {variant.name} {case.name} {case.dtype} {case.quant}")
    cache.clear()
    return stored


def _lacking(
    ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options
) -> Iterator[tuple[Op, Case, Variant]]:
    """What the cache has no entry for: the ceiling of every case first, then the cases, bf16 before the other types."""
    work: dict[tuple[str, str, Case], tuple[Op, Case, Variant]] = {}
    ceiling = ops.get(CEILING_OP)
    for entry in sorted(entries, key=lambda e: e.case.dtype != "bfloat16"):
        op, case = ops[entry.op], entry.case
        for variant in _variants(op, selection, options):
            if variant.config is not None and variant.unsupported(case) is None:
                work[op.name, variant.name, case] = (op, case, variant)
        if ceiling is not None:
            stream_case = _ceiling_case(op, case)
            work[ceiling.name, ceiling.variants[0].name, stream_case] = (ceiling, stream_case, ceiling.variants[0])
    for op, case, variant in work.values():
        if options.force or not _cached(op, case, variant, options, exact=True):
            yield op, case, variant


def _cached(op: Op, case: Case, variant: Variant, options: Options, exact: bool) -> Config | None:
    """The cached config of a case: exactly its own, or the nearest that is valid."""
    hits = cache.candidates(
        op.name, variant.name, device.current().slug, case.axes, case.dtype, case.quant, case.options, options.policy,
        () if exact else op.free_axes, options.configs,
    )  # fmt: skip
    for hit in hits:
        if exact and not hit.exact:
            continue
        try:
            config = variant.config_from(hit.entry.config)
        except ValueError:
            continue
        if variant.valid(case, config) is None:
            return config
    return None


def _config(op: Op, case: Case, variant: Variant, options: Options) -> Config:
    if variant.config is None:
        return None
    return _cached(op, case, variant, options, exact=False) or variant.default_config(case)


def _pairs(op: Op, case: Case, selection: Selection, options: Options) -> list[tuple[Variant, Config]]:
    return [(variant, _config(op, case, variant, options)) for variant in _variants(op, selection, options)]


def _key(op: Op, case: Case, options: Options) -> Key:
    """The key of the case's records."""
    return op.name, case.dtype, case.quant, tuple(case.axes), tuple(case.options), options.policy


def _ceiling_case(op: Op, case: Case) -> Case:
    traffic = op.traffic(case)
    return Case(f"{traffic.read}+{traffic.write}", (("read", traffic.read), ("write", traffic.write)), "int32")


def _ceiling(ops: Mapping[str, Op], op: Op, case: Case, options: Options) -> Ceiling | None:
    if CEILING_OP not in ops:
        return None
    stream, stream_case = ops[CEILING_OP], _ceiling_case(op, case)
    variant = stream.variants[0]
    return Ceiling(stream, variant, _config(stream, stream_case, variant, options), stream_case)


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
    measured = []
    progress.stage("measure", len(entries))
    for entry in entries:
        op, case = ops[entry.op], entry.case
        pairs = _pairs(op, case, selection, options)
        fresh = _still_good(done, op, case, pairs, options)
        if fresh is None:
            fresh = compare(family, op, case, pairs, options.policy, _ceiling(ops, op, case, options))
            if journal:
                records.append(journal, fresh)
        measured += fresh
        timed = [r for r in fresh if r.time_us is not None]
        if timed:
            best = min(timed, key=lambda r: r.time_us or 0.0)
            progress.best(f"{best.variant} {best.time_us:.1f} µs, {best.gbps:.0f} GB/s")
        progress.advance(f"{op.name} {case.name} {case.dtype} {case.quant}")
    return measured


def _still_good(
    done: Mapping[tuple[Any, str], Record], op: Op, case: Case, pairs: Sequence[tuple[Variant, Config]], options: Options
) -> list[Record] | None:
    """The rows of a case that an interrupted run left, if it left all of them for this source, driver, triton and config."""
    key = _key(op, case, options)
    here = (op.source_hash, device.current().driver, device.versions()["triton"])
    rows = [(done.get((key, variant.name)), config_values(config)) for variant, config in pairs]
    found = [
        row
        for row, config in rows
        if row is not None and (row.source_hash, row.driver, row.triton) == here and row.config == config
    ]
    return found if len(found) == len(pairs) else None


def _journalled(journal: Path) -> list[Record]:
    """What an interrupted run measured; a row that was being written is gone."""
    if not journal.exists():
        return []
    with journal.open("r+b") as file:
        drop_cut_line(file)
    return records.load(journal)


def _journal(family: str, options: Options) -> Path:
    """Rows of a run that has not ended; it goes when the run's results are written."""
    return (options.results or _results_root()) / "runs" / device.current().slug / f"{family}.journal.jsonl"


def _write(family: str, measured: Sequence[Record], options: Options) -> None:
    folder = results_folder(options)
    records.merge(folder / f"{family}.jsonl", [*_journalled(_journal(family, options)), *measured])
    everything = records.load(folder / f"{family}.jsonl")
    _write_text(folder / f"{family}.md", report.sweep_markdown(everything))
    _write_text(folder / f"{family}.csv", report.sweep_csv(everything))
    _journal(family, options).unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def _write_checked(family: str, checked: Sequence[Record], options: Options) -> None:
    folder = (options.results or _results_root()) / "runs" / device.current().slug
    records.merge(folder / f"{family}.check.jsonl", checked)
