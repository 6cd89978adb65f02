"""Plan the work of a command: a part of a sweep with options; find the rows that an interrupted run has kept.

A journal under `results/runs` keeps the rows of a stage. The end of the stage deletes the journal.
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
from kerneltune.records import Key, Record, key_of_case
from kerneltune.search.loop import Search
from kerneltune.search.task import Run, Task, config_values
from kerneltune.spec import Case, Op, Variant
from kerneltune.sweep import MAX_CASES, Section, Sweep, SweepCase

_HEADLINES = 10
_TO_A_PERCENT = Search(until_gain=0.01)


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
    max_cases: int = field(default=MAX_CASES, kw_only=True)

    def takes(self, entry: SweepCase) -> bool:
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
        policy: timing policy: `hot`, `eager`, or `cold` for the policy of each operator.
        tune: search missing configs before a sweep measures.
        peers: measure other packages' variants as well.
        quick: measure ten headline cases of a sweep with their present configs; check and tune nothing else.
        search: limits of each search; `budget_s` is also the limit of timing stale configs.
        check_only: check and time nothing.
        configs: folder of the config cache; None for the usual folder.
        results: folder of the records.
        workers: number of compile processes; None for the number of cores.
        force: search cached configs again, and try configs with transient failures again.
        stale: search stale and outdated configs again, see `tune_run`.
        exhaustive: measure every config of a space, and choose none.
        knobs: knob values, as text, to try in addition to a space.
        gpus: GPUs of this host: `all` or a number; empty for the GPU of this process.
    """

    policy: str = "cold"
    tune: bool = True
    peers: bool = True
    quick: bool = False
    search: Search = _TO_A_PERCENT
    check_only: bool = False
    configs: Path | None = None
    results: Path = field(default_factory=lambda: sweep.results_root(None))
    workers: int | None = None
    force: bool = False
    stale: bool = False
    exhaustive: bool = False
    knobs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    gpus: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a command: the selected part of a family's sweep, and the options of the run.

    Attributes:
        ops: operators by name.
        sweep: all cases of the family.
        selection: operators, cases and variants.
        options: settings of the run.
    """

    ops: Mapping[str, Op]
    sweep: Sweep
    selection: Selection
    options: Options = field(default_factory=Options)

    @property
    def family(self) -> str:
        """Return the name of the family in records and files."""
        return self.sweep.family

    def cases(self, section: Section = "bench") -> list[SweepCase]:
        """Return the selected cases of a section."""
        return list(filter(self.selection.takes, self.sweep.bench if section == "bench" else self.sweep.check))

    def headline(self, section: Section = "bench") -> list[SweepCase]:
        """Return at most ten selected headline cases; if the family has none, at most ten selected cases across the file."""
        chosen = self.cases(section)
        entries = list(filter(self.sweep.headlines, chosen)) or chosen
        count = min(_HEADLINES, len(entries))
        return [entries[at * len(entries) // count] for at in range(count)]

    def variants(self, op: str) -> list[Variant]:
        """Return the selected variants of an operator whose packages are installed."""
        selection, options = self.selection, self.options
        return [
            variant
            for variant in self.ops[op].variants
            if selection.takes_variant(variant.name)
            and not (variant.is_peer and not options.peers and not selection.names(variant.name))
            and not variant.missing()
        ]

    def policy(self, op: str) -> str:
        """Return the timing policy of an operator: the policy of the options, or the operator's policy in place of `cold`."""
        return self.ops[op].policy if self.options.policy == "cold" else self.options.policy

    def tasks(self, op: str, case: Case, policy: str = "") -> list[Task]:
        """Return a task for each selected variant of a case; an empty policy stands for `self.policy`."""
        return [Task(self.ops[op], case, variant, policy or self.policy(op)) for variant in self.variants(op)]

    def key(self, entry: SweepCase) -> Key:
        """Return the key of a case's records."""
        return key_of_case(entry.op, entry.case, self.policy(entry.op))

    def journal(self, name: str) -> Path:
        """Return the journal of a stage on this device."""
        return self.options.results / "runs" / device.current().slug / f"{self.family}.{name}.jsonl"


def load_plan(ops: Mapping[str, Op], selection: Selection, options: Options | None = None) -> Plan:
    """Load the sweep of a selection's family, and check that the selection has a case."""
    for name in selection.ops:
        if name not in ops:
            raise unknown("op", name, ops)
    loaded = sweep.load(sweep.find(selection.family), ops, selection.max_cases)
    entries = (*loaded.check, *loaded.bench)
    for name in selection.variants:
        offered = dict.fromkeys(v.name for e in entries for v in ops[e.op].variants)
        if not fnmatch.filter(offered, name):
            raise unknown("variant", name, offered, f" in family {loaded.family}")
    chosen = list(filter(selection.takes, entries))
    if not chosen:
        fields = {"op": selection.ops, "case": selection.cases, "dtype": selection.dtypes, "quant": selection.quants}
        wanted = " ".join(f"{field}={','.join(values)}" for field, values in fields.items() if values)
        cases = {entry.case.name for entry in entries}
        near = next(filter(None, (meant(pattern, cases) for pattern in selection.cases)), "")
        raise ValueError(f"{loaded.path}: no case with {wanted}{near}")
    for entry in chosen:
        check_case(ops[entry.op], entry.case)
    return Plan(ops, loaded, selection, options or Options())


def results_folder(options: Options) -> Path:
    """Return results/<device> for a GPU; results/runs/interpreter, which git ignores, for the interpreter."""
    here = device.current()
    return options.results / (here.slug if here.is_gpu else f"runs/{here.slug}")


def require_gpu(command: str) -> None:
    """Raise ValueError where `command` has no GPU to run on."""
    if not device.current().is_gpu:
        raise ValueError(f"{command} needs a GPU: in the interpreter nothing can be timed")


def journalled(journal: Path) -> list[Record]:
    """Load the rows of a journal, except a line that was being written; an empty list without a file."""
    if not journal.exists():
        return []
    whole, end, _cut = read_bytes(journal).rpartition(b"\n")
    return records.parse((whole + end).splitlines(keepends=True), str(journal), is_journal=True)


def finished_rows(done: Mapping[tuple[Key, str], Sequence[Record]], runs: Sequence[Run]) -> list[Record] | None:
    """Return the rows of a case from an interrupted run, if it has all rows for this environment and these configs; else None.

    Failed rows do not count: a row that failed in an interrupted run is measured again.
    """
    gpu = device.current()
    here = {"device": gpu.name, "driver": gpu.driver, "unit": gpu.unit, **device.versions()}
    finished = []
    for task, config in runs:
        key = key_of_case(task.op.name, task.case, task.policy)
        wanted = {**here, "source_hash": task.variant.source_hash, "config": config_values(config)}
        kept = (row for row in done.get((key, task.variant.name), ()) if row.status != "failed")
        rows = [row for row in kept if {name: getattr(row, name) for name in wanted} == wanted]
        finished += rows[-1:]
    return finished if len(finished) == len(runs) else None
