"""Select a part of a sweep, hold the options of a run, and keep the rows of an interrupted run.

The rows of an interrupted run are in files under `results/runs`. The end of a stage deletes its file.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kerneltune import device, records, sweep
from kerneltune.errors import meant, unknown
from kerneltune.files import read_bytes
from kerneltune.listing import check_case
from kerneltune.records import Key, Record
from kerneltune.search.loop import Search
from kerneltune.search.task import Run, config_values
from kerneltune.spec import Case, Op, Variant

_HEADLINES = 10


class Progress(Protocol):
    """Observe long work: the work calls a method at every step."""

    def stage(self, name: str, total: int, kept: int = 0) -> None:
        """Begin a stage of `total` steps, of which an earlier run has done `kept`."""
        return

    def advance(self, text: str) -> None:
        """Count a step as done; `text` names the finished step or the next step."""
        return

    def best(self, text: str) -> None:
        """Show the best result so far."""
        return

    def note(self, text: str) -> None:
        """Print a separate line."""
        return


class Quiet(Progress):
    """Ignore all progress."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Select a part of a family: operator names, patterns of case names, dtypes, quant modes, patterns of variant names.

    An empty tuple selects everything.

    Attributes:
        max_cases: most rows of the family's sweep file, before the selection.
    """

    family: str
    ops: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    quants: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    max_cases: int = field(default=sweep.MAX_CASES, kw_only=True)

    def takes(self, entry: sweep.SweepCase) -> bool:
        """Return whether an entry of the sweep belongs to the selection."""
        return self.covers(entry.op, entry.case.name, entry.case.dtype, entry.case.quant)

    def covers(self, op: str, case: str, dtype: str, quant: str) -> bool:
        """Return whether the selection has this operator, case name, element type and quant mode."""
        return (
            (not self.ops or op in self.ops)
            and (not self.cases or any(fnmatch.fnmatch(case, pattern) for pattern in self.cases))
            and (not self.dtypes or dtype in self.dtypes)
            and (not self.quants or quant in self.quants)
        )

    def takes_record(self, record: Record) -> bool:
        """Return whether a record belongs to the selection."""
        return self.covers(record.op, record.case, record.dtype, record.quant) and self.takes_variant(record.variant)

    def names(self, variant: str) -> bool:
        """Return whether the selection names a variant."""
        return any(fnmatch.fnmatch(variant, pattern) for pattern in self.variants)

    def takes_variant(self, variant: str) -> bool:
        """Return whether a variant belongs to the selection."""
        return not self.variants or self.names(variant)


@dataclass(frozen=True, slots=True)
class Options:
    """Hold the settings of a run.

    Attributes:
        policy: timing policy: `cold`, `hot` or `eager`.
        tune: search missing configs before a sweep measures.
        peers: measure other packages' variants as well.
        fast: leave out the variants that compile for seconds on their first call.
        quick: measure ten headline cases of a sweep with their present configs; check and tune nothing else.
        budget_s: most seconds of search per case.
        trials: most configs that a search measures per case.
        check_only: check and time nothing.
        configs, results: folders; None for the usual folders.
        workers: number of compile processes; None for the number of cores.
        force: search cached configs again, and try configs with transient failures again.
        stale: search configs again that were chosen with another source, driver or packages.
        sampler: a name in search.loop.SAMPLERS.
        until_gain: stop a search when its remaining configs are expected to gain less than this fraction; 0 for never.
        exhaustive: measure every config of a space, and choose none.
        knobs: knob values, as text, to try in addition to a space.
        gpus: GPUs of this host: `all` or a number; empty for the GPU of this process.
    """

    policy: str = "cold"
    tune: bool = True
    peers: bool = True
    fast: bool = False
    quick: bool = False
    budget_s: float | None = None
    trials: int | None = None
    check_only: bool = False
    configs: Path | None = None
    results: Path | None = None
    workers: int | None = None
    force: bool = False
    stale: bool = False
    sampler: str = "ours"
    until_gain: float | None = 0.01
    exhaustive: bool = False
    knobs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    gpus: str = ""

    @property
    def search(self) -> Search:
        """Return the limits of each search."""
        return Search(self.budget_s, self.trials, self.sampler, until_gain=self.until_gain or None)


def results_folder(options: Options) -> Path:
    """Return results/<device> for a GPU; results/runs/interpreter, which git ignores, for the interpreter."""
    root = sweep.results_root(options.results)
    here = device.current()
    return root / here.slug if here.is_gpu else root / "runs" / here.slug


def load_plan(ops: Mapping[str, Op], selection: Selection) -> sweep.Sweep:
    """Load the sweep of a selection's family."""
    for name in selection.ops:
        if name not in ops:
            raise unknown("op", name, ops)
    plan = sweep.load(sweep.find(selection.family), ops, selection.max_cases)
    for name in selection.variants:
        offered = dict.fromkeys(v.name for e in (*plan.check, *plan.bench) for v in ops[e.op].variants)
        if not fnmatch.filter(offered, name):
            raise unknown("variant", name, offered, f" in family {plan.family}")
    if not any(selection.takes(entry) for entry in (*plan.check, *plan.bench)):
        fields = {"op": selection.ops, "case": selection.cases, "dtype": selection.dtypes, "quant": selection.quants}
        wanted = " ".join(f"{field}={','.join(values)}" for field, values in fields.items() if values)
        cases = {entry.case.name for entry in (*plan.check, *plan.bench)}
        near = next(filter(None, (meant(pattern, cases) for pattern in selection.cases)), "")
        raise ValueError(f"{plan.path}: no case with {wanted}{near}")
    for entry in filter(selection.takes, (*plan.check, *plan.bench)):
        check_case(ops[entry.op], entry.case)
    return plan


def headline(plan: sweep.Sweep, selection: Selection, section: sweep.Section = "bench") -> list[sweep.SweepCase]:
    """Return at most ten selected headline cases of a family; if it has none, at most ten selected cases across the file."""
    chosen = [entry for entry in (plan.bench if section == "bench" else plan.check) if selection.takes(entry)]
    named = [entry for entry in chosen if plan.headlines(entry)]
    found = named or chosen
    return [found[at * len(found) // _HEADLINES] for at in range(_HEADLINES)] if len(found) > _HEADLINES else found


def require_gpu(command: str) -> None:
    """Raise ValueError where `command` has no GPU to run on."""
    if not device.current().is_gpu:
        raise ValueError(f"{command} needs a GPU: in the interpreter nothing can be timed")


def wanted_variants(op: Op, selection: Selection, options: Options) -> list[Variant]:
    """Return the selected variants whose packages are installed."""
    return [
        variant
        for variant in op.variants
        if selection.takes_variant(variant.name)
        and not (variant.is_peer and not options.peers and not selection.names(variant.name))
        and not (options.fast and variant.compiles)
        and not variant.missing()
    ]


def journal_path(family: str, results: Path | None, name: str) -> Path:
    """Return the file of a stage's rows for the present device, in `results` or the default folder."""
    return sweep.results_root(results) / "runs" / device.current().slug / f"{family}.{name}.jsonl"


def key_of_case(op: Op, case: Case, policy: str) -> Key:
    """Return the key of the case's records."""
    return records.key_of(op.name, case.dtype, case.quant, dict(case.axes), dict(case.options), policy)


def resume(journal: Path) -> dict[tuple[Key, str], list[Record]]:
    """Load the rows of an interrupted run by key and variant; see `journalled`."""
    return records.grouped(journalled(journal), lambda record: (record.key, record.variant))


def journalled(journal: Path) -> list[Record]:
    """Load the rows of a journal, except a line that was being written; an empty list without a file."""
    if not journal.exists():
        return []
    whole, end, _cut = read_bytes(journal).rpartition(b"\n")
    return records.parse(whole + end, str(journal))


def finished_rows(done: Mapping[tuple[Key, str], Sequence[Record]], runs: Sequence[Run]) -> list[Record] | None:
    """Return the rows of a case from an interrupted run, if it has all rows for this environment and these configs; else None.

    Failed rows do not count: a row that failed in an interrupted run is measured again.
    """
    gpu = device.current()
    here = {"device": gpu.name, "driver": gpu.driver, "unit": gpu.unit, **device.versions()}
    found = []
    for task, config in runs:
        key = key_of_case(task.op, task.case, task.policy)
        wanted = {**here, "source_hash": task.variant.source_hash, "config": config_values(config)}
        kept = (row for row in done.get((key, task.variant.name), ()) if row.status != "failed")
        rows = [row for row in kept if {name: getattr(row, name) for name in wanted} == wanted]
        found += rows[-1:]
    return found if len(found) == len(runs) else None
