"""Count the gate's verdicts on rows whose slowdown is known: false alarms, and planted slowdowns that it misses.

    python benchmarks/planted_slowdowns.py decide benchmarks/planted_slowdowns --repeats 2000      # no GPU, 70 s
    python benchmarks/planted_slowdowns.py measure FOLDER rmsnorm --op rmsnorm_fwd --variant optimized

`measure` times every selected row in fresh processes, as it is and with delays of 2, 5 and 10 %. A delay is a kernel that spins
on the device behind the last call of a sample. `decide` draws, without replacement, the processes of a baseline, of a new run and
of its repeated measurements, and takes the gate's verdict: once with no delay, and for each delay with one row of ten delayed.
The processes run in turn on a single GPU, so the figures say nothing about another day, driver or GPU.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kerneltune import device
from kerneltune.cli.loading import load_ops
from kerneltune.gating.rows import pool
from kerneltune.gating.verdict import MIN_CHANGE_US, RERUNS, WORST_FIRST, RowVerdict, confirm, gate
from kerneltune.measuring.compare import SELF, contender, input_sets, make_record, noise_floor, time_contenders, why_not_timed
from kerneltune.measuring.rounds import POLICIES, Contender
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.records import Record, append, parse, timing
from kerneltune.spec import Config, TaskKey
from kerneltune.table import Column, Row, Table
from kerneltune.task import Outcome, Run, Task

DELAYS = (0.02, 0.05, 0.10)
DELAYED_PART = 10
"""One row of so many is delayed."""
SPINS = (50_000, 500_000)
"""Cycles of the two spins from which the device's clock is computed."""

Process = Mapping[float, Sequence[Record]]
"""Delay -> the records that one process measured with it; 0.0 for no delay."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """The gate's verdicts on the rows with a given delay.

    Attributes:
        delay: planted, a fraction; 0.0 for none.
        measured: the delay as measured in the same rounds, geometric mean over the rows.
        counts: verdict -> rows.
        short: rows that the delay makes at most 0.5 µs slower, which the gate passes by its rule.
    """

    delay: float
    measured: float
    counts: Mapping[RowVerdict, int]
    short: int

    @property
    def rows(self) -> int:
        """Return the number of decisions."""
        return sum(self.counts.values())

    @property
    def caught(self) -> float:
        """Return the share of regressions among the rows that are not short."""
        return self.counts["regression"] / max(1, self.rows - self.short)


def measure_task(family: str, task: Task, config: Config, delays: Sequence[float]) -> dict[float, Record]:
    """Return a record for each delay, 0.0 first; nothing where the variant or the case cannot be timed."""
    if task.variant.unsupported(task.case) is not None or why_not_timed(task) is not None:
        return {}
    variant, policy, inputs = task.variant, POLICIES[task.policy], input_sets(task)
    plain = contender(variant, config, inputs, policy)
    contenders: dict[str, Contender] = {"0.0": plain, SELF: contender(variant, config, inputs, policy)}
    time_us, spin = median_us(plain), spinner()
    for delay in delays:
        contenders[str(delay)] = contender(variant, config, inputs, policy, after=partial(spin, delay * time_us))
    samples = time_contenders(contenders)
    floor, traffic, run = noise_floor(samples), task.op.traffic(task.case).total, Run(task, config)
    return {
        delay: make_record(family, run, Outcome("passed"), **timing([samples[str(delay)].tolist()], traffic, None, floor))
        for delay in (0.0, *delays)
    }


def spinner() -> Callable[[float, int], None]:
    """Return a function that enqueues a spin of so many µs per call for so many calls, its own launch included."""

    def spin_us(cycles: int) -> float:
        return median_us(Contender(lambda _set: torch.cuda._sleep(cycles), 1, POLICIES["hot"]))

    short, long = map(spin_us, SPINS)
    us_per_cycle = (long - short) / (SPINS[1] - SPINS[0])
    launch_us = short - us_per_cycle * SPINS[0]
    return lambda us, calls: torch.cuda._sleep(max(1, round((us * calls - launch_us) / us_per_cycle)))


def median_us(timed: Contender) -> float:
    """Return the median of nine samples."""
    return float(np.median([timed.sample_us() for _ in range(9)]))


def load_processes(folder: Path) -> list[Process]:
    """Return what `measure` wrote: a file for each delay, in which the processes follow each other.

    Raises:
        ValueError: a file is missing, or does not hold the same rows for every process.
    """
    files = {delay: folder / f"planted_{delay}.jsonl" for delay in (0.0, *DELAYS)}
    by_delay = {
        delay: parse(path.read_bytes().splitlines(keepends=True), str(path), key=None)
        for delay, path in files.items()
        if path.exists() or not delay
    }
    keys = [record.key for record in by_delay[0.0]]
    rows = len(set(keys))
    for delay, records in by_delay.items():
        if not rows or [record.key for record in records] != keys or keys != keys[:rows] * (len(keys) // rows):
            raise ValueError(f"{files[delay]}: {len(records)} rows: expected the same rows for every process")
    return [{d: records[at : at + rows] for d, records in by_delay.items()} for at in range(0, len(keys), rows)]


def decide(processes: Sequence[Process], *, per_side: int, repeats: int, margin: float, seed: int = 0) -> list[Decisions]:
    """Count the gate's verdicts on runs of `per_side` processes that are drawn from the measured processes.

    Raises:
        ValueError: too few processes.
    """
    if len(processes) < 3 * per_side:
        raise ValueError(f"{len(processes)} processes: expected {3 * per_side} or more: baseline, new run and one repetition")
    rng = np.random.default_rng(seed)
    runs = min(2 + RERUNS, len(processes) // per_side)
    rows = [record.key for record in processes[0][0.0]]
    counts = {delay: dict.fromkeys(WORST_FIRST, 0) for delay in sorted(processes[0])}
    short = dict.fromkeys(counts, 0)
    times_us = [float(np.median([process[0.0][row].time_us or 0.0 for process in processes])) for row in range(len(rows))]
    for _repetition in range(repeats):
        order = rng.permutation(len(processes))
        old, new, *again = ([processes[i] for i in order[k * per_side : (k + 1) * per_side]] for k in range(runs))
        for delay, count in counts.items():
            chosen = rng.permutation(len(rows))[: -(-len(rows) // DELAYED_PART)]
            short[delay] += sum(0.0 < delay * times_us[i] <= MIN_CHANGE_US for i in chosen)
            for verdict in verdicts(old, new, again, delay, frozenset(rows[i] for i in chosen), margin):
                count[verdict] += 1
    return [Decisions(delay, measured_delay(processes, delay), count, short[delay]) for delay, count in counts.items()]


def verdicts(
    old: Iterable[Process],
    new: Iterable[Process],
    again: Sequence[Sequence[Process]],
    delay: float,
    delayed: frozenset[TaskKey],
    margin: float,
) -> list[RowVerdict]:
    """Return the verdicts on the delayed rows; on all rows where the delay is 0.0."""

    def run(side: Iterable[Process], only: frozenset[TaskKey] | None = None) -> list[Record]:
        return pool(
            record
            for process in side
            for plain, late in zip(process[0.0], process[delay], strict=True)
            for record in (late if late.key in delayed else plain,)
            if only is None or record.key in only
        )

    unchanged = pool(record for process in old for record in process[0.0])
    further = iter(again)
    judge = partial(gate, unchanged, margin=margin)
    verdict, _pooled = confirm(judge, run(new), lambda suspects: run(next(further), suspects), len(again))
    return [row.verdict for row in verdict.rows if not delay or row.record.key in delayed]


def measured_delay(processes: Sequence[Process], delay: float) -> float:
    """Return the geometric mean over the rows of the delay as measured."""
    logs = []
    for row in range(len(processes[0][0.0])) if delay else ():
        sides = ([np.asarray((p[d][row].samples_us or [[]])[0]) for p in processes] for d in (0.0, delay))
        plain, late = sides
        logs.append(np.mean([np.median(np.log(after / before)) for before, after in zip(plain, late, strict=True)]))
    return float(np.expm1(np.mean(logs))) if logs else 0.0


def table(decisions: Iterable[Decisions]) -> Table:
    """Return a row for each delay."""
    columns = (
        *(Column(name, digits=2, suffix=" %") for name in ("planted", "measured", "caught")),
        *(Column(name, digits=0) for name in ("rows", "short", *WORST_FIRST)),
    )
    rows = [
        Row((100 * d.delay, 100 * d.measured, 100 * d.caught, d.rows, d.short, *(d.counts[name] for name in WORST_FIRST)))
        for d in decisions
    ]
    return Table(columns, tuple(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure rows, or take the gate's verdicts on measured rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    decided = commands.add_parser("decide", help="take the gate's verdicts on measured rows; needs no GPU")
    decided.add_argument("folder", type=Path)
    decided.add_argument("--per-side", type=int, default=3, help="processes of a gate run")
    decided.add_argument("--repeats", type=int, default=20, help="decisions for each row")
    decided.add_argument("--margin", type=float, default=0.03, help="slowdown that the gate tolerates")
    measured = commands.add_parser("measure", help="measure rows in fresh processes; needs a GPU")
    measured.add_argument("folder", type=Path)
    measured.add_argument("family")
    measured.add_argument("--op", action="append", default=[])
    measured.add_argument("--variant", action="append", default=[])
    measured.add_argument("--processes", type=int, default=12)
    options = parser.parse_args(arguments)
    if options.command == "decide":
        found = decide(load_processes(options.folder), per_side=options.per_side, repeats=options.repeats, margin=options.margin)
        print(table(found).text(120), end="")
        return
    if options.processes > 1:
        again = [*(arguments or sys.argv[1:]), "--processes", "1"]
        for nth in range(options.processes):
            subprocess.run([sys.executable, __file__, *again], check=True)
            print(f"{nth + 1} of {options.processes} processes")
        return
    ops = load_ops()
    device.require_gpu("measure")
    selection = Selection(options.family, ops=tuple(options.op), variants=tuple(options.variant))
    plan = load_plan(ops, selection, Options(peers=False))
    for entry in plan.cases():
        for task in plan.tasks(entry.op, entry.case):
            for delay, record in measure_task(plan.family, task, task.config_of_call(), DELAYS).items():
                append(options.folder / f"planted_{delay}.jsonl", [record])


if __name__ == "__main__":
    main()
