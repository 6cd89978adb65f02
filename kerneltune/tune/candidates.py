"""Choose the candidates of a search, its first configs and their feasibility, from stored trials and the cache.

A cached config may be older than the present knobs and limits of its variant, so only valid configs count.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kerneltune import cache, device
from kerneltune.errors import unknown
from kerneltune.measuring.compare import commit
from kerneltune.search.task import Sizes, Task, knobs_of, store_path
from kerneltune.spec import Case, Config, Op, Space, Variant, knobs_of_class

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

REFUSED = frozenset(("compile", "spills", "occupancy"))

OtherSizeTrials = Sequence[tuple[Sizes, Mapping[str, Any], bool]]
"""Trials of other cases: sizes, knobs of the config, and whether the compiler refused it."""

_PER_DOUBLING = 2.0
"""A trial's weight falls by e to this power for every knob of twice the value."""
_SIZES_COUNT = 0.2
"""Distance of an axis of twice the size, where a knob of twice the value has 1."""
_DOUBT = 0.02
"""Weight of the mean over all trials, beside the weights of near trials."""
_NEIGHBOURS = 3
"""Near entries of the cache whose configs a search tries first."""
_TRANSFERRED = 16
"""Fastest configs of the other 16-bit type that are searched in place of the whole space."""
MOST_OTHER_SIZES = 2000
"""Newest trials of other sizes that the feasibility is computed from. More trials take longer than they save."""


def neighbour_dtype(task: Task) -> Task | None:
    """Return the task in the other 16-bit type, whose fastest configs are good candidates; None for a type of other width."""
    other = {"bfloat16": "float16", "float16": "bfloat16"}.get(task.case.dtype, "")
    return replace(task, case=replace(task.case, dtype=other)) if other in task.op.dtypes else None


def pool_of(task: Task, store: "TrialStore | None" = None) -> list[Config]:
    """Return the default, then the configs of the space, or the fastest of the other 16-bit type if that type was searched.

    Without a store, all configs of the space are returned.
    """
    space = checked_space(task)
    neighbour = neighbour_dtype(task)
    if store is not None and neighbour is not None:
        ranked = store.ranked(neighbour)
        if len(ranked) > max(_TRANSFERRED, len(store.ranked(task))):
            offered = set(space)
            space = [config for values in ranked[:_TRANSFERRED] if (config := task.variant.config_from(values)) in offered]
    return [task.default, *(config for config in space if config != task.default)]


def starting_points(task: Task, pool: Sequence[Config], root: Path | None) -> list[Config]:
    """Return the default, the promising configs, and the cached configs of this case and of the nearest cases."""
    near = sorted(chooser_of(task, root).near(task.case, device.current().slug), key=lambda found: found[2])
    nearest = [config for _, config, _ in near[:_NEIGHBOURS]]
    offered = set(pool)
    found = [config for config in (*task.variant.promising(task.case), *nearest) if config in offered]
    return list(dict.fromkeys([pool[0], *found]))


def feasibility_of(task: Task, store: "TrialStore", pool: Sequence[Config]) -> dict[Config, float] | None:
    """Return the probability that each config is not refused, from trials of other sizes; None without trials."""
    told = [
        (trial.key.case.axes, dict(trial.knobs), trial.evaluation.status in REFUSED)
        for trial in store.of_other_sizes(task)[-MOST_OTHER_SIZES:]
        if list(dict(trial.knobs)) == list(knobs_of(pool[0]))
    ]
    found = probabilities(task.case.axes, [knobs_of(config) for config in pool], told)
    return None if found is None else dict(zip(pool, map(float, found), strict=True))


def probabilities(sizes: Sizes, configs: Sequence[Mapping[str, Any]], trials: OtherSizeTrials) -> NDArray[np.float64] | None:
    """Return the probability (configs,) that each config is not refused; None without trials of other cases.

    The probability is a weighted share of the accepted configs. A trial's weight falls with its distance: by e^-2 for a knob of
    twice the value or another word, and by e^-0.4 for an axis of twice the size.
    """
    if not trials:
        return None
    numbers, names = _split([knobs for _, knobs, _ in trials] + list(configs))
    axes = np.log2([[max(1, size) for _, size in place] for place in (*(s for s, _, _ in trials), *[sizes] * len(configs))])
    numbers = np.hstack([numbers, _SIZES_COUNT * axes])
    known = len(trials)
    accepted = np.array([not refused for _, _, refused in trials], dtype=float)
    found = np.empty(len(configs))
    for i in range(len(configs)):
        distance = np.abs(numbers[:known] - numbers[known + i]).sum(axis=1) + (names[:known] != names[known + i]).sum(axis=1)
        weight = np.exp(-_PER_DOUBLING * distance)
        found[i] = (weight @ accepted + _DOUBT * accepted.mean()) / (weight.sum() + _DOUBT)
    return found


def _split(configs: Sequence[Mapping[str, Any]]) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
    """Return the log2 of the numeric knobs, and the place of each value of the other knobs."""
    numbers, names = [], []
    for knob in configs[0]:
        values = [config[knob] for config in configs]
        if all(isinstance(value, bool | int | float) for value in values):
            numbers.append(np.log2(np.maximum(np.array(values, dtype=float), 0.0) + 0.5))
        else:
            places = {value: place for place, value in enumerate(dict.fromkeys(map(repr, values)))}
            names.append(np.array([places[repr(value)] for value in values]))
    empty = np.empty((len(configs), 0))
    return (np.column_stack(numbers) if numbers else empty), (np.column_stack(names) if names else empty.astype(int))


KnobOverrides = Sequence[tuple[str, tuple[str, ...]]]
"""Names of knobs with values as text."""


def widened(variant: Variant, knobs: KnobOverrides) -> Variant:
    """Return the variant with more values for some knobs of its space. `valid` still applies."""
    if not knobs:
        return variant
    types = knobs_of_class(variant.config)[0] if variant.config is not None else {}
    added: dict[str, tuple[Any, ...]] = {}
    for name, texts in knobs:
        if name not in types:
            raise unknown("knob", name, types, f" of {variant.name}")
        added[name] = tuple(_typed(name, text, types[name]) for text in texts)

    def space(case: Case) -> Space:
        offered = variant.space(case)
        return {name: tuple(dict.fromkeys((*values, *added.get(name, ())))) for name, values in offered.items()}

    return replace(variant, space=space)


def _typed(name: str, text: str, kind: Any) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"knob: {name}: {text!r}: expected {getattr(kind, '__name__', kind)}") from None


def is_supported(task: Task) -> bool:
    """Return whether the variant supports the case."""
    with _in_one_line(task):
        return task.variant.unsupported(task.case) is None


def checked_space(task: Task) -> list[Config]:
    """Return the valid configs of a space, each once."""
    case, variant = task.case, task.variant
    with _in_one_line(task):
        found = list(dict.fromkeys(variant.configs(case)))
        for config in variant.promising(case):
            if type(config) is not variant.config:
                raise ValueError(f"promising: {config!r}: expected a {getattr(variant.config, '__name__', None)}")
    if not found:
        raise ValueError(f"{task.op.name} {variant.name}: no valid config for {case.label}{_why(variant, case)}")
    return found


@contextmanager
def _in_one_line(task: Task) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # an operator's own code may fail in any way
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        where = f"{task.op.name} {task.variant.name}: {task.case.label}"
        raise ValueError(f"{where}: {kind}{' '.join(str(error).split())}") from error


def _why(variant: Variant, case: Case) -> str:
    """Return the knob without a value, else the most frequent reason that `valid` gives."""
    assert variant.config is not None
    space = variant.space(case)
    if empty := next((knob for knob, offered in space.items() if not offered), ""):
        return f": {empty}: no value"
    configs = (variant.config(**dict(zip(space, values, strict=True))) for values in itertools.product(*space.values()))
    reasons = Counter(variant.valid(case, config) for config in configs)
    return f": {reasons.most_common(1)[0][0]} ({reasons.most_common(1)[0][1]} of {reasons.total()} configs)" if reasons else ""


def config_for(task: Task, root: Path | None, gpu: str | None = None) -> Config:
    """Return the config of a call without `config=`, on this GPU or a named GPU; None for a variant without knobs."""
    return chooser_of(task, root).find(task.op.called(task.case), gpu).config if task.variant.config is not None else None


def chooser_of(task: Task, root: Path | None) -> cache.Chooser:
    """Return what looks up the configs of a task's variant."""
    return cache.Chooser.of(task.op, task.variant, task.policy, root)


def cached(task: Task, root: Path | None) -> tuple[cache.CacheEntry, Config] | None:
    """Return the entry of exactly this task on this GPU model and its config; None if there is no valid config."""
    return chooser_of(task, root).own(task.case, device.current().slug)


def present(variant: Variant) -> dict[str, str]:
    """Return the present driver, source and packages that times of a variant depend on, by the names of `CacheEntry.evidence`."""
    return {"driver": device.current().driver, "source_hash": variant.source_hash, **device.versions()}


def open_store(op: Op, variant: Variant, results: Path, retries_transient: bool = False) -> "TrialStore":
    """Open the store of an operator's trials on this GPU model, with the present fingerprint of a variant.

    results: folder of the records; retries_transient: as in `TrialStore`.
    """
    from kerneltune.search.trials import TrialStore  # imports Optuna, which takes 0.4 s

    path = store_path(results, device.current().slug, op.name)
    return TrialStore(path, commit(), retries_transient, **present(variant))


def stamp(variant: Variant) -> dict[str, Any]:
    """Return the date, commit, driver, source and packages of a measurement now."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), **present(variant)}


def changed(variant: Variant, entry: cache.CacheEntry, here: bool) -> str:
    """Return the changes since an entry was stored; empty if nothing changed.

    Args:
        here: this machine has the entry's GPU. On another machine only the code is compared, not the driver and the packages.
    """
    now = present(variant) if here else {"source_hash": variant.source_hash}
    then = {name: entry.evidence.get(name) for name in now}
    return ", ".join(f"{name} {then[name] or 'unknown'} is now {now[name]}" for name in now if then[name] != now[name])
