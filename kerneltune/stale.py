"""Find configs and records that other code made, and renew them with the present code.

A config or record is stale if the digest of its variant's code (`identity`) has changed. A record is also stale if the config of
its case has changed. A new driver or package makes nothing stale.
"""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from kerneltune import cache, records, sweep_file
from kerneltune.cache import CacheEntry
from kerneltune.device import arch_of, slug
from kerneltune.plan import Options, Plan, Selection, selected_cases
from kerneltune.progress import Progress
from kerneltune.records import Record, grouped
from kerneltune.spec import Case, Op, TaskKey
from kerneltune.sweep_file import SweepCase, cases_by_op
from kerneltune.sweep_run import measure_batches
from kerneltune.task import Task, is_stale, knobs_of
from kerneltune.tune.run import renew_configs
from kerneltune.tune.session import TuningResult
from kerneltune.wording import assignments, counted, differing, first_of

CONFIG_S = 0.6
"""Seconds of a paired final. H200, 2026-11-23: 96 configs took 54 s."""
_CASE_S = 8.0
"""Seconds of measuring a case of a family without records. H200: 1 to 14 s, by family."""
_EAGER_CASE_S = 150.0
"""Seconds of a case of whole training steps, timed launch by launch. H100: 84 s with four variants, 179 s with seven."""
_LONGEST_GAP_S = 400.0
"""Seconds between two records of a run, at most: the longest case, seven compiled variants of a model, took 324 s."""
_AT_ONCE = 16
"""Cases whose configs are compiled before the first of the cases is measured."""
_DIGITS = 8
"""Digits of a digest of code that a line about stale records shows."""
_NAMED = 2
"""Rows that a line about stale records names."""
_HEADLINE, _RECORDED, _UNMEASURED = range(3)
"""Ranks of stale cases: headline cases are measured first, then cases with records, then cases that nobody measured."""
_Ranks = Mapping[SweepCase, int]


@dataclass(frozen=True, slots=True)
class StaleFamily:
    """Hold the cases of a family whose records are stale.

    Attributes:
        num_cases: number of selected bench cases.
        stale: cases with a variant that has no record, or a record of other code or another config, or a failed own variant;
            with their ranks.
        seconds_a_case: seconds that a case took when the records were made.
        num_orphans: number of records whose case is not in the sweep file.
    """

    plan: Plan
    num_cases: int
    stale: Mapping[SweepCase, int]
    seconds_a_case: float
    num_orphans: int


@dataclass(frozen=True, slots=True)
class Stale:
    """Hold the stale configs and records of a GPU.

    Attributes:
        gpu: folder name of the GPU.
        num_cached: number of cached configs, by operator.
        configs: entries of stale configs, the most used first.
        families: the families with their stale cases.
        plans: the plan of each family that was examined.
    """

    gpu: str
    num_cached: Mapping[str, int]
    configs: tuple[CacheEntry, ...]
    families: tuple[StaleFamily, ...]
    plans: tuple[Plan, ...]

    @property
    def num_stale_cases(self) -> int:
        """Return the number of cases with stale records, of all families."""
        return sum(len(family.stale) for family in self.families)


class Renewal(NamedTuple):
    """Hold the results of a renewal.

    Attributes:
        configs: the stale configs that were timed, each with its result.
        records: the new records.
        remaining: the configs and cases that are still stale.
    """

    configs: Sequence[tuple[CacheEntry, TuningResult]]
    records: Sequence[Record]
    remaining: Stale


def plans_of(ops: Mapping[str, Op], selection: Selection, options: Options) -> list[Plan]:
    """Return the plan of the selected family, or of each family where none is selected."""
    names = [selection.family] if selection.family else sweep_file.families()
    loaded = [sweep_file.load(sweep_file.find(name), ops) for name in names]
    sweep_cases = [sweep_case for family in loaded for sweep_case in family.bench]
    selection.require_names([ops[name] for name in cases_by_op(sweep_cases)])
    selected_cases(selection, selection.family or "families", sweep_cases)
    return [Plan(ops, family, selection, options) for family in loaded]


def find(plans: Sequence[Plan], gpu: str) -> Stale:
    """Find the stale configs and records of a GPU, named by its folder, in the plans of families.

    Families without records are skipped, except the selected family once the GPU has any record. If a family or cases are
    selected, a config counts only if one of their cases looks it up.
    """
    first = plans[0]
    folder = first.options.results / gpu
    recorded = {path.stem for path in folder.glob("*.jsonl")}
    families = [_family(plan, folder) for plan in plans if plan.family in recorded or (recorded and first.selection.family)]
    ranks = _lookup_ranks(plans)
    cached: Counter[str] = Counter()
    stale = []
    for name, op in first.ops.items():
        for entry in cache.load_strict(cache.path_of(name, gpu)):
            is_used = SweepCase(entry.op, entry.case) in ranks or not (first.selection.family or first.selection.cases)
            if is_used and replace(first.selection, cases=()).matches(entry.key):
                cached[name] += 1
                if any(variant.name == entry.variant and is_stale(variant, entry) for variant in op.variants):
                    stale.append(entry)
    stale.sort(key=lambda entry: (entry.variant != "optimized", ranks.get(SweepCase(entry.op, entry.case), len(ranks))))
    return Stale(gpu, cached, tuple(stale), tuple(families), tuple(plans))


def _lookup_ranks(plans: Sequence[Plan]) -> _Ranks:
    """Return the rank of each case that a selected bench case looks up: headline cases first, then in the order of the files."""
    selected = [(plan, sweep_case) for plan in plans for sweep_case in plan.cases()]
    ranks: dict[SweepCase, int] = {}
    for plan, (op, case) in sorted(selected, key=lambda pair: not pair[0].sweep.is_headline(pair[1])):
        ranks.setdefault(SweepCase(op, plan.ops[op].case_of_call(case)), len(ranks))
    return ranks


def _family(plan: Plan, folder: Path) -> StaleFamily:
    policies = {plan.policy(sweep_case.op) for sweep_case in plan.sweep.bench}
    recorded = [row for row in records.load_if_present(folder / f"{plan.family}.jsonl") if row.policy in policies]
    rows = {row.key: row for row in recorded}
    measured, keys = {row.key.of_case for row in recorded}, set(map(plan.case_key, plan.sweep.bench))
    cases = sorted(plan.cases(), key=lambda sweep_case: not plan.sweep.is_headline(sweep_case))
    stale = {}
    for sweep_case in cases:
        if not _is_fresh(plan, sweep_case, rows, folder.name):
            rank = _RECORDED if plan.case_key(sweep_case) in measured else _UNMEASURED
            stale[sweep_case] = _HEADLINE if plan.sweep.is_headline(sweep_case) else rank
    orphans = sum(row.key.of_case not in keys for row in recorded)
    return StaleFamily(plan, len(cases), stale, _seconds_a_case(recorded, policies), orphans)


def _is_fresh(plan: Plan, sweep_case: SweepCase, rows: Mapping[TaskKey, Record], gpu: str) -> bool:
    """Return whether every selected variant has a record of its present code and config, and no own variant failed.

    A variant that does not support the case needs no record, because no measurement can give it a time.
    """
    for task in plan.tasks(*sweep_case):
        row = rows.get(task.key)
        if (row is None or row.status == "skipped") and task.variant.unsupported(task.case) is not None:
            continue
        if row is None or (row.status == "failed" and not task.variant.is_peer):
            return False
        if difference(row, task, gpu) is not None:
            return False
    return True


class Difference(NamedTuple):
    """Name a difference, `other code` or `another config`, and its digests or knobs: `warps=4, here warps=8`."""

    kind: str
    detail: str


def difference(row: Record, task: Task, gpu: str) -> Difference | None:
    """Return how the code or config of a record differs from its task's at hand; None if it does not, or nothing can be said.

    The config at hand is the config of a call without `config=` on the record's GPU, a folder name. Only timed rows have a config
    to compare. Nothing can be said about the config of a GPU that has no configs and whose architecture is unknown here.
    """
    source_hash = task.variant.source_hash
    if row.source_hash != source_hash:
        return Difference("other code", f"{row.source_hash[:_DIGITS]}, here {source_hash[:_DIGITS]}")
    is_known = bool(arch_of(gpu)) or cache.path_of(task.op.name, gpu).exists()
    if row.status != "passed" or task.variant.config is None or not is_known:
        return None
    try:
        now = knobs_of(task.config_of_call(gpu))
    except ValueError as error:  # no config can run the case any more
        return Difference("another config", f"{row.config_label}, here {error}")
    then = row.config or {}
    with suppress(ValueError):  # a config that this code does not know is compared as it is
        then = then and knobs_of(task.variant.config_from(then))
    values = differing(then, now)
    return Difference("another config", f"{values[0]}, here {values[1]}") if values else None


def stale_lines(rows: Iterable[Record], ops: Mapping[str, Op]) -> list[str]:
    """Return a line for each own variant that has timed rows of other code than `ops`, and a line for rows of other configs."""
    own = {(op.name, variant.name) for op in ops.values() for variant in op.variants if not variant.is_peer}
    timed = [row for row in rows if row.status == "passed" and (row.role != "peer" or (row.op, row.variant) in own)]
    lines = []
    for (name, variant), variant_rows in grouped(timed, lambda row: (row.op, row.variant)).items():
        if name not in ops:
            raise ValueError(f"op: {name!r}: in the records, but not loaded here: load it by --plugin, or pass --allow-stale")
        if variant not in {offered.name for offered in ops[name].variants}:
            lines.append(f"{name} {variant}: {counted(len(variant_rows), 'row')} of no variant here: measure again")
            continue
        compared = [(row, _difference_to_op(row, ops[name])) for row in variant_rows]
        stale = [(row, differs) for row, differs in compared if differs is not None]
        for kind, kind_rows in grouped(stale, lambda pair: pair[1].kind).items():
            named = first_of((f"{_row_label(row, ops[name])} ({differs.detail})" for row, differs in kind_rows), _NAMED)
            measured = f"{len(kind_rows)} of {counted(len(variant_rows), 'row')} measured with {kind}"
            lines.append(f"{name} {variant}: {measured}: {named}: measure again")
    return lines


def _row_label(row: Record, op: Op) -> str:
    """Return the case, the options that are not the default, the type and the mode of a record."""
    options = {name: value for name, value in row.options.items() if value not in op.options.get(name, ())[:1]}
    return " ".join(filter(None, [row.case, assignments(options), row.dtype, row.quant]))


def _difference_to_op(row: Record, op: Op) -> Difference | None:
    """Return the difference of a record whose operator is at hand; a case that the operator no longer has is another code's."""
    options = {name: row.options.get(name, values[0]) for name, values in op.options.items()}
    if set(row.axes) != set(op.axes) or not set(row.options) <= set(options):
        present = f"axes and options {', '.join([*op.axes, *options])}"
        return Difference("other code", f"{assignments({**row.axes, **row.options})}, here {present}")
    axes = tuple((name, row.axes[name]) for name in op.axes)
    case = Case(row.case, axes, row.dtype, row.quant, tuple(options.items()))
    return difference(row, Task(op, case, op.variant(row.variant), row.policy), slug(row.device))


def _seconds_a_case(recorded: Sequence[Record], policies: Set[str]) -> float:
    """Return the mean time of measuring a case, by the dates of the records; the first case of a run has no earlier date."""
    pairs = itertools.pairwise(sorted({datetime.fromisoformat(row.date) for row in recorded}))
    gaps = {after: (after - before).total_seconds() for before, after in pairs}
    gaps_in_runs = {after: gap for after, gap in gaps.items() if gap <= _LONGEST_GAP_S}
    if gaps_in_runs:
        cases = {row.key.of_case for row in recorded if datetime.fromisoformat(row.date) in gaps_in_runs}
        return sum(gaps_in_runs.values()) / len(cases)
    return _EAGER_CASE_S if "eager" in policies else _CASE_S


def renew(stale: Stale, progress: Progress) -> Renewal:
    """Time stale configs against their default and store the faster, then measure stale cases again.

    Every config is stored and every case recorded at once. A run that is interrupted, or ends after `budget_s` seconds, loses at
    most the present case, and the next run measures the rest. Cases of all families come in the order of their ranks.
    """
    first = stale.plans[0]
    ops, options = first.ops, first.options.ending(first.options.search.budget_s, time.monotonic())
    configs = renew_configs(ops, options, stale.configs, progress) if stale.configs else []
    if configs:
        stale = find(stale.plans, stale.gpu)  # a case whose config has changed is stale, too
    measured = measure_batches([(replace(plan, options=options), cases) for plan, cases in _batches(stale)], progress)
    for text in dict.fromkeys(f"{row.variant} {row.reason}" for row in measured if row.reason.startswith(records.IMPORT_FAILED)):
        progress.note(f"{text}: cases with an earlier time of it stay stale")
    return Renewal(configs, measured, find(stale.plans, stale.gpu))


def _batches(stale: Stale) -> Iterator[tuple[Plan, list[SweepCase]]]:
    """Yield stale cases by rank, then family by family, `_AT_ONCE` at a time."""
    for rank in (_HEADLINE, _RECORDED, _UNMEASURED):
        for family in stale.families:
            cases = [sweep_case for sweep_case, case_rank in family.stale.items() if case_rank == rank]
            for first in range(0, len(cases), _AT_ONCE):
                yield family.plan, cases[first : first + _AT_ONCE]
