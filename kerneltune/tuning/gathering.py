"""What is known of a variant's times on a GPU: configs with their evidence, observations and whole spaces. Measures nothing."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kerneltune import cache
from kerneltune.search import spaces
from kerneltune.search.observations import path_of, read
from kerneltune.search.task import knobs_of
from kerneltune.spec import Case, Op, Variant
from kerneltune.tuning.fitting import Sample
from kerneltune.tuning.transfer import config_of

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
        config = config_of(variant, case, entry.config) if entry.variant == variant.name else None
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


def shape_of(case: Case) -> tuple[Any, ...]:
    """Return what tells a case from others but for its type."""
    return case.axes, case.quant, case.options


def _put(times: _Times, variant: Variant, case: Case, knobs: Mapping[str, Any], time_us: float | None) -> None:
    """Remember the first time that is told of a config."""
    config = config_of(variant, case, knobs)
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
