"""Plan the work of a command: the operators, the selected part of a sweep, and the options of the run."""

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from kerneltune import cache, device, sweep_file
from kerneltune.errors import meant, unknown
from kerneltune.listing import check_case
from kerneltune.search.loop import SearchLimits
from kerneltune.spec import Case, Op, TaskKey, Variant
from kerneltune.sweep_file import Section, Sweep, SweepCase, cases_by_op
from kerneltune.task import Run, Task, runs_folder

RunFile = Literal["check", "check.journal", "journal"]
"""Kind of a file of a run, the part of its name behind the family."""
CHECK_POLICY = "cold"
"""Policy in the records of checks."""
_HEADLINES = 10
_TO_A_PERCENT = SearchLimits(until_gain=0.01)


@dataclass(frozen=True, slots=True)
class Selection:
    """Select a part of a family: operator names, patterns of case names, dtypes, quant modes, patterns of variant names.

    An empty tuple selects everything. The family is empty where records or configs of any family are selected.
    """

    family: str = ""
    ops: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    quants: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    def matches_case(self, op: str, case: Case) -> bool:
        """Return whether a case of an operator belongs to the selection."""
        exact = ((op, self.ops), (case.dtype, self.dtypes), (case.quant, self.quants))
        is_named = not self.cases or any(fnmatch.fnmatch(case.name, pattern) for pattern in self.cases)
        return is_named and all(not names or value in names for value, names in exact)

    def cases_of(self, sweep_cases: Iterable[SweepCase]) -> list[SweepCase]:
        """Return the cases that belong to the selection."""
        return [sweep_case for sweep_case in sweep_cases if self.matches_case(*sweep_case)]

    def matches(self, key: TaskKey) -> bool:
        """Return whether a task belongs to the selection."""
        return self.matches_case(key.op, key.case) and self.matches_variant(key.variant)

    def matches_variant(self, variant: str, if_none_named: bool = True) -> bool:
        """Return whether a variant belongs to the selection; if the selection names none, the answer is `if_none_named`."""
        return any(fnmatch.fnmatch(variant, pattern) for pattern in self.variants) if self.variants else if_none_named

    def require_match(self, field: str, present: Iterable[str], place: str = "") -> None:
        """Raise ValueError for a name or pattern of a field that matches no present value; a message ends with the place."""
        names = getattr(self, f"{field}s")
        values = list(dict.fromkeys(present)) if names else []
        for name in names:
            if name not in values and not (field in ("case", "variant") and fnmatch.filter(values, name)):
                raise unknown(field, name, values, place)

    def require_names(self, ops: Collection[Op], place: str = "") -> None:
        """Raise ValueError for a name, or a pattern of variants, that no operator has; see `require_match`."""
        self.require_match("op", (op.name for op in ops), place)
        selected = [op for op in ops if not self.ops or op.name in self.ops]
        self.require_match("dtype", (dtype for op in selected for dtype in op.dtypes), place)
        self.require_match("quant", (quant for op in selected for quant in op.quants), place)
        self.require_match("variant", (variant.name for op in selected for variant in op.variants), place)


@dataclass(frozen=True, slots=True)
class Options:
    """Hold the settings of a run.

    Attributes:
        policy: timing policy, `cold`, `hot` or `eager`; None for the policy of each operator.
        extent: how far a sweep goes: `check` times nothing, `measure` takes present configs, `tune` searches missing configs
            before it measures.
        peers: measure other packages' variants as well.
        quick: take ten headline cases alone: checked without derived cases, or measured without checks and tuning.
        search: limits of each search; of `sweep --stale`, `budget_s` is the limit of all that is timed.
        results: folder of the records.
        workers: number of compile processes; None for the number of cores.
        retune: which cached configs are searched again: none if empty; `stale` and outdated configs, see `tune.run`; or `all`,
            which also evaluates configs with transient failures again.
        gpus: GPUs of this host: `all` or a number; empty for the GPU of this process.
    """

    policy: str | None = None
    extent: Literal["check", "measure", "tune"] = "tune"
    peers: bool = True
    quick: bool = False
    search: SearchLimits = _TO_A_PERCENT
    results: Path = field(default_factory=lambda: sweep_file.results_root(None))
    workers: int | None = None
    retune: Literal["", "stale", "all"] = ""
    gpus: str = ""

    def ending(self, seconds: float | None, began: float) -> "Options":
        """Return the options of a run that ends some seconds after it began, by the monotonic clock; None for no end."""
        return self if seconds is None else replace(self, search=replace(self.search, until=began + seconds))

    @property
    def records_folder(self) -> Path:
        """Return the folder of this device's records; the interpreter's are not kept in git."""
        gpu = device.current()
        return self.results / gpu.slug if gpu.is_gpu else runs_folder(self.results, gpu.slug)


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the work of a command: the selected part of a family's sweep, and the options of the run.

    Attributes:
        ops: operators by name.
        sweep: all cases of the family.
        selection: operators, cases and variants.
        options: settings of the run.
    """

    ops: Mapping[str, Op]
    sweep: Sweep
    selection: Selection
    options: Options

    @property
    def family(self) -> str:
        """Return the name of the family in records and files."""
        return self.sweep.family

    def cases(self, section: Section = "bench") -> list[SweepCase]:
        """Return the selected cases of a section."""
        return self.selection.cases_of(self.sweep.bench if section == "bench" else self.sweep.check)

    def headline(self, section: Section = "bench") -> list[SweepCase]:
        """Return at most ten selected headline cases; if the family has none, at most ten selected cases across the file."""
        chosen = self.cases(section)
        sweep_cases = list(filter(self.sweep.is_headline, chosen)) or chosen
        count = min(_HEADLINES, len(sweep_cases))
        return [sweep_cases[at * len(sweep_cases) // count] for at in range(count)]

    def variants(self, op: str, *, installed: bool = True) -> list[Variant]:
        """Return the selected variants of an operator whose packages are installed; without `installed`, the other variants."""
        matches, peers = self.selection.matches_variant, self.options.peers
        selected = [variant for variant in self.ops[op].variants if matches(variant.name, peers or not variant.is_peer)]
        return [variant for variant in selected if installed is not bool(variant.missing())]

    def without(self, variants: Collection[tuple[str, str]]) -> "Plan":
        """Return the plan without some variants, named by operator and variant."""
        ops = {}
        for name, op in self.ops.items():
            kept = tuple(variant for variant in op.variants if (name, variant.name) not in variants)
            ops[name] = replace(op, variants=kept)
        return replace(self, ops=ops)

    def policy(self, op: str) -> str:
        """Return the timing policy of an operator: the policy of the options, else the operator's own."""
        return self.options.policy or self.ops[op].policy

    def tasks(self, op: str, case: Case, policy: str = "") -> list[Task]:
        """Return a task for each selected variant of a case; an empty policy stands for `self.policy`."""
        return [Task(self.ops[op], case, variant, policy or self.policy(op)) for variant in self.variants(op)]

    def check_tasks(self, op: str, case: Case, *, with_peers: bool = False) -> list[Task]:
        """Return a task for each selected own variant of a case that is checked, and for each peer if wanted."""
        return [task for task in self.tasks(op, case, CHECK_POLICY) if with_peers or not task.variant.is_peer]

    def case_key(self, sweep_case: SweepCase, policy: str = "") -> TaskKey:
        """Return the key that the records of a case share; an empty policy stands for `self.policy`."""
        return TaskKey(sweep_case.op, "", sweep_case.case, policy or self.policy(sweep_case.op))

    def scratch_file(self, kind: RunFile) -> Path:
        """Return the file of checks on this device, or the journal of a stage, which the stage removes when it ends."""
        return runs_folder(self.options.results, device.current().slug) / f"{self.family}.{kind}.jsonl"


def load_plan(ops: Mapping[str, Op], selection: Selection, options: Options) -> Plan:
    """Load the sweep of a selection's family, and check that the selection has a case."""
    loaded = sweep_file.load(sweep_file.find(selection.family), ops)
    sweep_cases = (*loaded.check, *loaded.bench)
    selection.require_names([ops[name] for name in cases_by_op(sweep_cases)], f" in family {loaded.family}")
    for sweep_case in selected_cases(selection, loaded.path, sweep_cases):
        check_case(ops[sweep_case.op], sweep_case.case)
    return Plan(ops, loaded, selection, options)


def selected_cases(selection: Selection, file: object, sweep_cases: Sequence[SweepCase]) -> list[SweepCase]:
    """Return the selected cases, one or more; a message names the `file`."""
    selected = selection.cases_of(sweep_cases)
    if not selected:
        fields = {"op": selection.ops, "case": selection.cases, "dtype": selection.dtypes, "quant": selection.quants}
        named = " ".join(f"{field}={','.join(values)}" for field, values in fields.items() if values)
        cases = {sweep_case.case.name for sweep_case in sweep_cases}
        hint = next(filter(None, (meant(pattern, cases) for pattern in selection.cases)), "")
        raise ValueError(f"{file}: {f'no case with {named}' if named else 'no bench case'}{hint}")
    return selected


def cached_runs(ops: Iterable[Op], gpu: str) -> list[Run]:
    """Return every cached config of these operators for a GPU model, in the cache's order."""
    runs = []
    for op in ops:
        for entry in cache.load(op.name, gpu):
            case = entry.case
            try:
                variant = op.variant(entry.variant)
                runs.append(Run(Task(op, case, variant, entry.policy), variant.config_from(entry.config)))
            except ValueError as error:
                raise ValueError(f"{cache.path_of(op.name, gpu)}: {case.name}: {error}") from error
    return runs


def default_runs(op: Op, cases: Iterable[Case], selection: Selection) -> list[Run]:
    """Return the default configs of an operator for the cases that a variant supports; a peer has configs if it is selected."""
    with_knobs = [variant for variant in op.variants if variant.config is not None]
    selected = [variant for variant in with_knobs if selection.matches_variant(variant.name, not variant.is_peer)]
    tasks = [Task(op, case, variant) for case in cases for variant in selected if variant.unsupported(case) is None]
    return [Run(task, task.default) for task in tasks]
