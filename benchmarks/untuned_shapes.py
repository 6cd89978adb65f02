"""Judge the configs that untuned shapes get, by leaving each recorded shape out. Needs no GPU.

python benchmarks/untuned_shapes.py [OP]... [--distance D] [--worst COUNT] [--markdown]

A row shows geometric mean (`mean`) and worst of the tuned time over the time of the default, and over the time of the config
that a look-up gives without entries of the case's sizes. Without a tuned config, the least of at least four known times stands
for the tuned time. `known` counts the cases in which the config was timed, `worst case` names the case of `look-up worst`.
`--worst` lists the cases whose default comes off worst.
"""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from kept_trials import ROOT, path_of, read

from kerneltune import cache, ops
from kerneltune.nearness import ranked
from kerneltune.spec import Case, Op, Variant
from kerneltune.table import Column, Row, Table
from kerneltune.task import Knobs, knob_pairs, knobs_of

LEAST = 4
"""Known times of a case without a tuned config, at least."""
NOT_RUN = ("spills", "occupancy", "skipped", "crashed")
"""Statuses of configs that a search did not run though a call might."""
NUMBERS = (
    ("cases", 0), ("default known", 0), ("default mean", 3), ("default worst", 3),
    ("look-up known", 0), ("look-up mean", 3), ("look-up worst", 3),
)  # fmt: skip
"""Headings and digits of the columns of numbers."""


@dataclass(frozen=True)
class Known:
    """The µs of each case's configs, None for a wrong config, and the tuned configs of cases whose tuned time is known."""

    times: Mapping[Case, Mapping[Knobs, float | None]]
    tuned: Mapping[Case, Knobs]

    def best_us(self, case: Case) -> float | None:
        """Return the tuned time of a case, or the least of its known times; None with too few times."""
        if case in self.tuned:
            return self.times[case][self.tuned[case]]
        timed = [time_us for time_us in self.times[case].values() if time_us]
        return min(timed) if timed and len(self.times[case]) >= LEAST else None


def known(op: Op, variant: Variant, gpu: str, trials: Path = ROOT, configs: Path | None = None) -> Known:
    """Read the kept trials of a variant, the newest first, and then the times in the evidence of its cached configs."""
    times: dict[Case, dict[Knobs, float | None]] = {}

    def put(case: Case, knobs: Mapping[str, Any], time_us: float | None) -> Knobs | None:
        config = variant.valid_config(case, knobs)
        if config is None or op.case_of_call(case) != case:
            return None
        return knob_pairs(config) if times.setdefault(case, {}).setdefault(knob_pairs(config), time_us) else None

    for block in reversed(read(path_of(op.name, gpu, trials))):
        for case, knobs, trial in block.rows if (block.variant, block.policy) == (variant.name, "cold") else ():
            if trial.status not in NOT_RUN and dict(case.axes).keys() == set(op.axes):
                put(case, dict(knobs), trial.time_us)
    tuned, timed = {}, {(case.axes, case.options) for case in times}
    for entry in cache.load(op.name, gpu, configs):
        case = entry.case
        if (entry.variant, entry.policy) == (variant.name, "cold"):
            if (pairs := put(case, entry.config, entry.evidence.get("time_us"))) is not None:
                tuned[case] = pairs
            if (case.axes, case.options) not in timed:  # of the default of that day, perhaps another than today's
                put(case, knobs_of(variant.default_config(case)), entry.evidence.get("default_us"))
    return Known(times, tuned)


def looked_up(op: Op, variant: Variant, found: Known, case: Case, distance: float) -> Knobs:
    """Return the config of a look-up without entries of the case's sizes: a near config, or the default."""
    others = [other for other in found.tuned if other.axes != case.axes]
    stored = [((dict(other.axes), other.dtype, other.quant, dict(other.options)), found.tuned[other]) for other in others]
    place = dict(case.axes), case.dtype, case.quant, dict(case.options)
    for _, knobs in ranked(place, stored, op.free_axes, op.free_options, op.bands, distance):
        if (config := variant.valid_config(case, dict(knobs))) is not None:
            return knob_pairs(config)
    return knob_pairs(variant.default_config(case))


def default_shares(variant: Variant, found: Known) -> dict[Case, tuple[float, float, float]]:
    """Return by case the tuned time over the time of the default, and both times in µs; cases without both are left out."""
    shares = {}
    for case in found.times:
        best, time_us = found.best_us(case), found.times[case].get(knob_pairs(variant.default_config(case)))
        if best is not None and time_us:
            shares[case] = best / time_us, time_us, best
    return shares


def row(op: Op, variant: Variant, found: Known, distance: float) -> Row:
    """Return the row of an operator."""
    judged = {case: best for case in found.times if (best := found.best_us(case)) is not None}
    cells: list[Any] = [op.name, len(judged)]
    for of in ("default", "look-up"):
        if of == "default":
            shares = {case: share for case, (share, _, _) in default_shares(variant, found).items()}
        else:
            timed = {case: found.times[case].get(looked_up(op, variant, found, case, distance)) for case in judged}
            shares = {case: judged[case] / time_us for case, time_us in timed.items() if time_us}
        worst = min(shares, key=shares.__getitem__, default=None)
        cells += [len(shares), *((statistics.geometric_mean(shares.values()), shares[worst]) if worst else (None, None))]
    return Row((*cells, worst.label if worst else ""))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="*", help="operators; all that have times of two shapes if none")
    parser.add_argument("--gpu", default="nvidia_h200", help="folder of a GPU")
    parser.add_argument("--distance", type=float, help="largest log2 distance of a near config, in place of the operator's own")
    parser.add_argument("--worst", type=int, default=0, help="list so many cases instead")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    pairs: list[tuple[float, Row]] = []
    for op in (op for name, op in sorted(ops.load().items()) if not options.op or name in options.op):
        for variant in (one for one in op.variants if one.name == "optimized" and one.config is not None):
            found = known(op, variant, options.gpu)
            if len({case.axes for case in found.times}) > 1:
                distance = op.max_distance if options.distance is None else options.distance
                rows += [] if options.worst else [row(op, variant, found, distance)]
                for case, numbers in default_shares(variant, found).items():
                    pairs.append((numbers[0], Row((op.name, *numbers, case.label))))
    numbered = (Column(name, digits=digits) for name, digits in NUMBERS)
    columns: tuple[Column, ...] = Column("op"), *numbered, Column("worst case", wraps=True)
    if options.worst:
        times = Column("default µs", digits=1), Column("best µs", digits=1)
        columns = Column("op"), Column("share", digits=3), *times, Column("case", wraps=True)
        rows = [pair for _, pair in sorted(pairs, key=itemgetter(0))[: options.worst]]
    table = Table(columns, tuple(rows))
    print(table.markdown() if options.markdown else table.text(160))


if __name__ == "__main__":
    main()
