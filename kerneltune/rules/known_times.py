"""Collect the known times of a variant on a GPU from kept trials and from the evidence of cached configs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneltune import cache
from kerneltune.rules.costs import CostTable, TimedCase
from kerneltune.rules.fit import untimed
from kerneltune.rules.transfer import Donor, rivals
from kerneltune.search.task import Knobs, knobs_of
from kerneltune.search.trial_table import read, table_path
from kerneltune.spec import Case, Config, Op, Variant

_LEAST = 2
"""Fewest configs with a known result for a case without a cached config to count."""
_NOT_RUN = ("spills", "occupancy", "memory", "crashed")
"""Statuses of configs that a search did not run though a call might."""
_Times = dict[Case, dict[Knobs, float | None]]


def timed_cases(op: Op, variant: Variant, gpu: str, configs: Path | None, results: Path) -> list[TimedCase]:
    """Return the cases of a variant that have several known times, as calls describe the cases.

    A kept trial counts before the evidence of a cached config, which was measured on another day.
    """
    times: _Times = {}
    for case, knobs, time_us in _kept(op, variant, results, gpu):
        _put(times, variant, case, dict(knobs), time_us)
    recorded: dict[Case, Mapping[str, Any]] = {}
    observed = {shape_of(case) for case in times}
    for entry in cache.load(op.name, gpu, configs):
        case = entry.as_case
        config = variant.valid_config(case, entry.config) if entry.variant == variant.name else None
        if config is None or entry.policy != "cold" or op.called(case) != case:
            continue
        recorded[case] = knobs_of(config)
        _put(times, variant, case, entry.config, entry.evidence.get("time_us"))
        if shape_of(case) not in observed:  # the default of that day may have been another
            _put(times, variant, case, knobs_of(variant.default_config(case)), entry.evidence.get("default_us"))
    return [found for case in times if (found := _timed_case(case, times[case], recorded.get(case))) is not None]


def timed(op: Op, variant: Variant, gpu: str, results: Path) -> set[tuple[Case, Knobs]]:
    """Return the cases and knobs that were timed with the present code of a variant."""
    blocks = read(table_path(results, gpu, op.name))
    ours = [b for b in blocks if (b.variant, b.policy, b.source_hash) == (variant.name, "cold", variant.source_hash)]
    return {(case, knobs) for block in ours for case, knobs, trial in block.rows if trial.status not in _NOT_RUN}


def to_observe(
    op: Op,
    variant: Variant,
    cases: Sequence[TimedCase],
    donors: Sequence[Donor],
    wanted: Sequence[Case],
    most: int,
) -> Iterator[tuple[Case, list[Config]]]:
    """Yield each wanted case with the configs that rules may choose, recorded cases first, then cases with few known times.

    `most` limits the configs per case beside the choices of rules.
    """
    choices = untimed(CostTable(op, variant, cases)) if len(cases) > 1 else {}
    times = {known.case: len(known.times) for known in cases}
    recorded = {op.called(case) for case, _ in donors}
    for case in sorted(wanted, key=lambda one: (one not in recorded, times.get(one, 0))):
        chosen = [variant.valid_config(case, knobs) for knobs in choices.get(case, [])]
        yield case, list(dict.fromkeys(one for one in [*chosen, *rivals(op, variant, case, donors, most)] if one))


def targets(op: Op, variant: Variant, donors: Sequence[Donor], bench: Iterable[Case]) -> list[Case]:
    """Return the recorded cases and the supported bench cases as calls describe them, each once, recorded sizes first.

    Of several types of the same sizes bf16 stays, or else the first.
    """
    cases = [op.called(case) for case in (*(case for case, _ in donors), *bench) if variant.unsupported(case) is None]
    chosen: dict[object, Case] = {}
    for case in sorted(dict.fromkeys(cases), key=lambda case: case.dtype != "bfloat16"):
        chosen.setdefault((case.axes, case.quant, case.options), case)
    return [case for case in dict.fromkeys(cases) if case in chosen.values()]


def shape_of(case: Case) -> tuple[Any, ...]:
    """Return the sizes, the mode and the options of a case."""
    return case.axes, case.quant, case.options


def _put(times: _Times, variant: Variant, case: Case, knobs: Mapping[str, Any], time_us: float | None) -> None:
    """Remember the first time that is told of a config."""
    config = variant.valid_config(case, knobs)
    if config is not None:
        times.setdefault(case, {}).setdefault(tuple(knobs_of(config).items()), time_us)


def _timed_case(case: Case, times: Mapping[Knobs, float | None], recorded: Mapping[str, Any] | None) -> TimedCase | None:
    timed = [time_us for time_us in times.values() if time_us]
    own = times.get(tuple(recorded.items())) if recorded is not None else None
    if not timed or (len(times) < _LEAST and not own):
        return None
    return TimedCase(case, times, own or min(timed), recorded if own else None)


def _kept(op: Op, variant: Variant, results: Path, gpu: str) -> Iterator[tuple[Case, Knobs, float | None]]:
    """Yield the kept trials of a variant that its present contract can call, case by case, the newest trial first."""
    blocks = [b for b in read(table_path(results, gpu, op.name)) if (b.variant, b.policy) == (variant.name, "cold")]
    rows = [row for block in reversed(blocks) for row in block.rows if row[2].status not in _NOT_RUN]
    rows = [row for row in rows if dict(row[0].axes).keys() == set(op.axes) and op.called(row[0]) == row[0]]
    for case, knobs, trial in sorted(rows, key=lambda row: (row[0].dtype, row[0].quant, str(row[0].options), row[0].axes)):
        yield case, knobs, trial.time_us
