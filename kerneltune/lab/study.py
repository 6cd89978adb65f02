"""Measure how often the gate cries wolf and how often it sleeps: its decisions on runs whose slowdown is known.

Every process of a pool times the selected rows as they are and with planted delays. A repetition draws from the pool, without
replacement, the processes of a baseline, of a new run and of its further measurements of suspects, and takes the gate's decision:
once with nothing planted, and for every delay once with it planted in one row of ten. No process is on both sides, but
repetitions share processes, and all processes run one after another on one GPU: other days, drivers and GPUs are not in it.

Judges by gate.confirm alone; the decision part is a pure function.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kerneltune.campaign import configured
from kerneltune.files import replace_text
from kerneltune.gating.pooling import pool
from kerneltune.gating.run import LoadOps
from kerneltune.gating.verdict import MIN_CHANGE_US, RERUNS, WORST_FIRST, Outcome, RowKey, confirm
from kerneltune.lab.planted import measure_planted
from kerneltune.plan import Options, Progress, Selection, require_gpu
from kerneltune.processes import in_fresh_processes
from kerneltune.records import Record, load, to_json
from kerneltune.rounding import cdiv
from kerneltune.stats import paired_shift
from kerneltune.table import Column, Table
from kerneltune.table import Row as Line

DELAYS = (0.02, 0.05, 0.10)
_SHOWN: tuple[Outcome, ...] = ("regression", "ambiguous", "slower", "pass", "faster")
_PLANTED_PART = 10
_PREFIX = "planted_"
_FILE = _PREFIX + "{}.jsonl"

Process = Mapping[float, Sequence[Record]]
"""What one process measured: records by planted delay, 0.0 for none."""


@dataclass(frozen=True, slots=True)
class StudyRow:
    """The gate's verdicts on the rows that had one delay.

    Attributes:
        planted: the delay, a fraction; 0.0 for none.
        measured: what it was, process by process in the same rounds: geometric mean over the rows.
        counts: verdict -> rows.
        short: rows among them that the delay makes no more than 0.5 µs slower, which the gate calls no regression by its rule.
    """

    planted: float
    measured: float
    counts: Mapping[Outcome, int]
    short: int = 0

    @property
    def rows(self) -> int:
        """Decisions taken."""
        return sum(self.counts.values())

    def part(self, *verdicts: Outcome) -> float:
        """Return the fraction of the rows with one of these verdicts."""
        return sum(self.counts[verdict] for verdict in verdicts) / self.rows

    @property
    def caught(self) -> float:
        """The part called a regression of the rows that may be."""
        return self.counts["regression"] / max(1, self.rows - self.short)


def measure(
    load_ops: LoadOps, selection: Selection, options: Options, processes: int, delays: Sequence[float], progress: Progress
) -> list[Process]:
    """Measure the selected rows with every delay, in fresh processes.

    Raises:
        ValueError: no GPU, bad input, or a process that crashed.
    """
    load_ops()
    require_gpu("lab study")
    progress.stage("measure", processes)
    found: list[Process] = []
    for process in in_fresh_processes(processes, _measure, load_ops, selection, options, tuple(delays)):
        found.append(process)
        progress.advance(f"{len(process[0.0])} rows in a fresh process")
    return found


def decide(pool_of: Sequence[Process], *, per_side: int, repeats: int, margin: float, seed: int = 0) -> list[StudyRow]:
    """Count the gate's decisions on runs of `per_side` processes drawn from the measured ones; no delay first.

    Suspects are measured again as often as the gate does it, or as often as the processes suffice for.

    Raises:
        ValueError: too few processes, or nothing measured.
    """
    if per_side < 1 or len(pool_of) < 3 * per_side:
        raise ValueError(f"processes: {len(pool_of)}: expected {3 * per_side} or more: a baseline, a new run and a second one")
    if not pool_of[0].get(0.0):
        raise ValueError("nothing measured: no selected row can be timed here")
    rng = np.random.default_rng(seed)
    runs = min(2 + RERUNS, len(pool_of) // per_side)
    rows = list(dict.fromkeys((record.key, record.variant) for record in pool_of[0][0.0]))
    counts = {delay: dict.fromkeys(WORST_FIRST, 0) for delay in sorted(pool_of[0])}
    short = dict.fromkeys(counts, 0)
    times_us = [float(np.median([process[0.0][row].time_us or 0.0 for process in pool_of])) for row in range(len(rows))]
    for _repetition in range(repeats):
        order = rng.permutation(len(pool_of))
        old, new, *again = ([pool_of[i] for i in order[k * per_side : (k + 1) * per_side]] for k in range(runs))
        for delay, count in counts.items():
            chosen = rng.permutation(len(rows))[: cdiv(len(rows), _PLANTED_PART)]
            short[delay] += sum(0.0 < delay * times_us[i] <= MIN_CHANGE_US for i in chosen)
            for verdict in _verdicts(old, new, again, delay, frozenset(rows[i] for i in chosen), margin):
                count[verdict] += 1
    return [StudyRow(delay, _measured(pool_of, delay), count, short[delay]) for delay, count in counts.items()]


def save(folder: Path, pool_of: Sequence[Process]) -> None:
    """Keep what was measured: a file of records per delay, process after process.

    Raises:
        ValueError: a file cannot be written.
    """
    for delay in pool_of[0]:
        lines = (f"{to_json(record)}\n" for process in pool_of for record in process[delay])
        replace_text(folder / _FILE.format(delay), "".join(lines))


def saved(folder: Path) -> list[Process]:
    """Load what `save` kept.

    Raises:
        ValueError: no such files, broken ones, or ones that do not hold the same rows in every process.
    """
    files = {float(path.stem.removeprefix(_PREFIX)): path for path in sorted(folder.glob(_FILE.format("*")))}
    if 0.0 not in files:
        raise ValueError(f"cannot read {folder / _FILE.format(0.0)}: no such file")
    by_delay = {delay: load(path) for delay, path in files.items()}
    rows = len({(record.key, record.variant) for record in by_delay[0.0]})
    keys = [(record.key, record.variant) for record in by_delay[0.0]]
    for delay, records in by_delay.items():
        if not rows or [(record.key, record.variant) for record in records] != keys or keys != keys[:rows] * (len(keys) // rows):
            raise ValueError(f"{files[delay]}: rows: {len(records)}: expected the same ones of every process")
    starts = range(0, len(keys), rows)
    return [{delay: records[i : i + rows] for delay, records in by_delay.items()} for i in starts]


def study_table(rows: Iterable[StudyRow]) -> Table:
    """Return a row per delay: what was planted and measured, decisions, the part caught, and decisions by verdict."""
    columns = (
        Column("planted", digits=0, suffix=" %", key="planted_pct"),
        Column("measured", digits=2, suffix=" %", key="measured_pct"),
        *(Column(name, digits=0) for name in ("rows", "short")),
        Column("caught", digits=2, suffix=" %", key="caught_pct"),
        *(Column(name, digits=0) for name in _SHOWN),
        *(Column(name, digits=0, only=("csv",)) for name in WORST_FIRST if name not in _SHOWN),
    )
    verdicts = [*_SHOWN, *(name for name in WORST_FIRST if name not in _SHOWN)]
    lines = [
        Line((100 * r.planted, 100 * r.measured, r.rows, r.short, 100 * r.caught, *(r.counts[name] for name in verdicts)))
        for r in rows
    ]
    return Table(columns, tuple(lines))


def _measure(load_ops: LoadOps, selection: Selection, options: Options, delays: Sequence[float]) -> Process:
    """Measure in the subprocess."""
    family, cases = configured(load_ops(), selection, options)
    found: dict[float, list[Record]] = {delay: [] for delay in (0.0, *delays)}
    for runs in cases:
        for task, config in runs:
            for delay, record in measure_planted(family, task, config, delays).items():
                found[delay].append(record)
    return found


def _verdicts(
    old: Iterable[Process],
    new: Iterable[Process],
    again: Sequence[Sequence[Process]],
    delay: float,
    slowed: frozenset[RowKey],
    margin: float,
) -> list[Outcome]:
    """Return the outcomes of the slowed rows; of all rows where nothing is planted."""

    def run(processes: Iterable[Process], only: frozenset[RowKey] | None = None) -> list[Record]:
        return pool(
            record
            for process in processes
            for plain, late in zip(process[0.0], process[delay], strict=True)
            for record in (late if (late.key, late.variant) in slowed else plain,)
            if only is None or (record.key, record.variant) in only
        )

    unchanged = pool(record for process in old for record in process[0.0])
    further = iter(again)
    verdict, _pooled = confirm(unchanged, run(new), margin, lambda suspects: run(next(further), suspects), len(again))
    return [row.verdict for row in verdict.rows if not delay or (row.key, row.variant) in slowed]


def _measured(pool_of: Sequence[Process], delay: float) -> float:
    if not delay:
        return 0.0
    logs = []
    for row in range(len(pool_of[0][0.0])):
        sides = ([np.asarray((p[d][row].samples_us or [[]])[0]) for p in pool_of] for d in (0.0, delay))
        found = paired_shift(*sides)
        if found is not None:
            logs.append(found.log)
    return float(np.expm1(np.mean(logs))) if logs else 0.0
