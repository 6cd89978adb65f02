"""What is known of a variant's times on a GPU: configs with their evidence, observations and whole spaces. Measures nothing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneltune import cache
from kerneltune.search import spaces
from kerneltune.search.observations import path_of, read
from kerneltune.search.task import knobs_of
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tuning.costs import CostTable, Sample
from kerneltune.tuning.fitting import untimed
from kerneltune.tuning.transfer import Donor, rivals

_LEAST = 2
"""Configs whose times must be known of a case without a recorded config for a rule to be fitted to it."""
_NOT_RUN = ("spills", "occupancy", "memory", "lost")
"""Statuses of what a search does not run though a call would, or could not run at that time."""
_Knobs = tuple[tuple[str, Any], ...]
_Times = dict[Case, dict[_Knobs, float | None]]


def samples_of(op: Op, variant: Variant, gpu: str, configs: Path | None, results: Path) -> list[Sample]:
    """Return the cases of a variant of which several times are known, as calls describe them.

    An observed time counts before that of a config's evidence, which is another day's.

    Raises:
        ValueError: a file that cannot be read.
    """
    times: _Times = {}
    for row in read(path_of(op.name, gpu, results), op).rows:
        if row.status in _NOT_RUN:
            continue
        if (row.variant, row.policy) == (variant.name, "cold") and op.called(row.case) == row.case:
            _put(times, variant, row.case, dict(row.knobs), row.time_us)
    for case, knobs, time_us in _of_spaces(op, variant, results / gpu / "spaces"):
        _put(times, variant, case, knobs, time_us)
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
    return [sample for case in times if (sample := _sample(case, times[case], recorded.get(case))) is not None]


def timed(op: Op, variant: Variant, gpu: str, results: Path) -> set[tuple[Case, _Knobs]]:
    """Return what was observed of the variant's present code: cases with knobs.

    Raises:
        ValueError: a file that cannot be read.
    """
    observed = read(path_of(op.name, gpu, results), op)
    present = {place for place, run in enumerate(observed.runs) if run.get("source_hash") == variant.source_hash}
    ours = [row for row in observed.rows if row.run in present and row.variant == variant.name]
    return {(row.case, row.knobs) for row in ours if row.status not in _NOT_RUN}


def to_observe(
    op: Op,
    variant: Variant,
    samples: Sequence[Sample],
    donors: Sequence[Donor],
    wanted: Sequence[Case],
    most: int,
) -> Iterator[tuple[Case, list[Config]]]:
    """Yield each wanted case with what rules may choose for it, recorded cases first, then those of which least is known.

    most: configs per case beside what rules choose.
    """
    choices = untimed(CostTable(op, variant, samples)) if len(samples) > 1 else {}
    times = {sample.case: len(sample.times) for sample in samples}
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
    """Return what tells a case from others but for its type."""
    return case.axes, case.quant, case.options


def _put(times: _Times, variant: Variant, case: Case, knobs: Mapping[str, Any], time_us: float | None) -> None:
    """Remember the first time that is told of a config."""
    config = variant.valid_config(case, knobs)
    if config is not None:
        times.setdefault(case, {}).setdefault(tuple(knobs_of(config).items()), time_us)


def _sample(case: Case, times: Mapping[_Knobs, float | None], recorded: Mapping[str, Any] | None) -> Sample | None:
    timed = [time_us for time_us in times.values() if time_us]
    own = times.get(tuple(recorded.items())) if recorded is not None else None
    if not timed or (len(times) < _LEAST and not own):
        return None
    return Sample(case, times, own or min(timed), recorded if own else None)


def _of_spaces(op: Op, variant: Variant, folder: Path) -> Iterator[tuple[Case, dict[str, Any], float | None]]:
    for path in sorted(folder.glob(f"{op.name}_{variant.name}_*{spaces.SUFFIX}")):
        space = spaces.read(path)
        case = Case(space.case, space.axes, space.dtype, space.quant, space.options)
        if (space.op, space.variant, space.policy) == (op.name, variant.name, "cold") and op.called(case) == case:
            for knobs, trial in space.trials.items():
                yield case, dict(knobs), trial.time_us
