"""Make the candidates of a search, its first configs and their probabilities to compile, from stored trials and the cache.

Configs of the cache outlive the knobs and the limits that they were stored for: only those that a variant still supports count.
Measures nothing.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from kerneltune.search.task import Sizes, Task, knobs_of
from kerneltune.spec import Case, Config, Space, Variant, knobs_of_class

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

REFUSED = frozenset(("compile", "spills", "occupancy"))

Told = Sequence[tuple[Sizes, Mapping[str, Any], bool]]
"""Other cases: sizes, knobs of a config, and whether it was refused."""

_PER_DOUBLING = 2.0
_SIZES_COUNT = 0.2
_DOUBT = 0.02
_NEIGHBOURS = 3
_TRANSFERRED = 16
TOLD = 2000
"""Refusals of other sizes that are asked, the newest: more take longer than they are worth."""


def neighbour_dtype(task: Task) -> Task | None:
    """Return the same task in the other 16-bit type, whose ranking this one may start from."""
    other = {"bfloat16": "float16", "float16": "bfloat16"}.get(task.case.dtype, "")
    return replace(task, case=replace(task.case, dtype=other)) if other in task.op.dtypes else None


def candidates(task: Task, store: "TrialStore | None" = None) -> list[Config]:
    """Default first, then the space; only the neighbour's best where the other 16-bit type was searched before.

    store: of what was searched before; without it all of the space is a candidate.

    Raises:
        ValueError: the space has no valid config for the case, or says what makes no sense.
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
    """Return the default, what is promising, then what the cache holds for this case and the nearest: sizes, options, type."""
    nearest = [
        config for _, config in sorted(valid_cached_configs(task, root), key=lambda found: found[0].distance)[:_NEIGHBOURS]
    ]
    offered = set(pool)
    found = [config for config in (*task.variant.promising(task.case), *nearest) if config in offered]
    return list(dict.fromkeys([pool[0], *found]))


def feasibility_of(task: Task, store: "TrialStore", pool: Sequence[Config]) -> dict[Config, float] | None:
    """Return the probability that each config compiles for good, by what is stored of other sizes; None where nothing is."""
    told = [
        (trial.key.case.axes, dict(trial.knobs), trial.evaluation.status in REFUSED)
        for trial in store.of_other_sizes(task)[-TOLD:]
        if list(dict(trial.knobs)) == list(knobs_of(pool[0]))
    ]
    found = probabilities(task.case.axes, [knobs_of(config) for config in pool], told)
    return None if found is None else dict(zip(pool, map(float, found), strict=True))


def probabilities(sizes: Sizes, configs: Sequence[Mapping[str, Any]], told: Told) -> NDArray[np.float64] | None:
    """Return the probability (configs,) that each config compiles for good; None where nothing is known of other cases.

    The share of those that were, every one counted by its distance in powers of two: e^-2 for a knob of twice the value, or of
    another one where it is no number, and e^-0.4 for an axis of twice the size.
    """
    if not told:
        return None
    numbers, names = _split([knobs for _, knobs, _ in told] + list(configs))
    axes = np.log2([[max(1, size) for _, size in place] for place in (*(s for s, _, _ in told), *[sizes] * len(configs))])
    numbers = np.hstack([numbers, _SIZES_COUNT * axes])
    known = len(told)
    accepted = np.array([not refused for _, _, refused in told], dtype=float)
    found = np.empty(len(configs))
    for i in range(len(configs)):
        distance = np.abs(numbers[:known] - numbers[known + i]).sum(axis=1) + (names[:known] != names[known + i]).sum(axis=1)
        weight = np.exp(-_PER_DOUBLING * distance)
        found[i] = (weight @ accepted + _DOUBT * accepted.mean()) / (weight.sum() + _DOUBT)
    return found


def _split(configs: Sequence[Mapping[str, Any]]) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
    """Return the numeric knobs as powers of two, and the other knobs as the number of their value."""
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


Given = Sequence[tuple[str, tuple[str, ...]]]
"""Names of knobs and their values as text."""
_Values = tuple[Any, ...]


def widened(variant: Variant, knobs: Given) -> Variant:
    """Return the variant with further values to some knobs of its space; `valid` still has the last word.

    Raises:
        ValueError: a knob that the variant does not have, or a value of another type.
    """
    return _changed(variant, knobs, lambda offered, given: tuple(dict.fromkeys((*offered, *given))))


def narrowed(variant: Variant, knobs: Given) -> Variant:
    """Return the variant with only these values to some knobs of its space.

    Raises:
        ValueError: a knob that the variant does not have, or a value of another type.
    """
    return _changed(variant, knobs, _some_of)


def _some_of(offered: _Values, given: _Values) -> _Values:
    missing = [value for value in given if value not in offered]
    if missing:
        raise unknown("knob", missing[0], offered)
    return given


def _changed(variant: Variant, knobs: Given, change: Callable[[_Values, _Values], _Values]) -> Variant:
    if not knobs:
        return variant
    types = knobs_of_class(variant.config)[0] if variant.config is not None else {}
    values: dict[str, _Values] = {}
    for name, texts in knobs:
        if name not in types:
            raise unknown("knob", name, types, f" of {variant.name}")
        values[name] = tuple(_typed(name, text, types[name]) for text in texts)

    def space(case: Case) -> Space:
        offered = variant.space(case)
        return {name: change(given, values[name]) if name in values else given for name, given in offered.items()}

    return replace(variant, space=space)


def _typed(name: str, text: str, kind: Any) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"knob: {name}: {text!r}: expected {getattr(kind, '__name__', kind)}") from None


def takes(task: Task) -> bool:
    """Return whether the variant takes the case.

    Raises:
        ValueError: `unsupported` raises.
    """
    with _in_one_line(task):
        return task.variant.unsupported(task.case) is None


def checked_space(task: Task) -> list[Config]:
    """Return the valid configs of a space, each once.

    Raises:
        ValueError: no config is valid (names the most frequent reason), a knob has no value or the same one twice, knobs and
            config class disagree, or `space`, `valid`, `default` or `promising` raises.
    """
    case, variant = task.case, task.variant
    with _in_one_line(task):
        knobs = variant.space(case)
        for knob, offered in knobs.items():
            if not offered:
                raise ValueError(f"space: {knob}: no value")
            if len(set(offered)) < len(offered):
                raise ValueError(f"space: {knob}: {offered!r}: a value twice")
        found = list(variant.configs(case))
        chosen = [("default", task.default), *(("promising", config) for config in variant.promising(case))]
    if not found:
        raise ValueError(f"{task.op.name} {variant.name}: no valid config for {case.label}{_why(variant, case)}")
    with _in_one_line(task):
        for name, config in chosen:
            if type(config) is not type(found[0]):
                raise ValueError(f"{name}: {config!r}: expected a {type(found[0]).__name__}")
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
    """Return the reason that `valid` gives most often."""
    assert variant.config is not None
    space = variant.space(case)
    configs = (variant.config(**dict(zip(space, values, strict=True))) for values in itertools.product(*space.values()))
    reasons = Counter(variant.valid(case, config) for config in configs)
    return f": {reasons.most_common(1)[0][0]} ({reasons.most_common(1)[0][1]} of {reasons.total()} configs)" if reasons else ""


def valid_cached_configs(
    task: Task, root: Path | None, *, device_slug: str = "", nearest: bool = True
) -> Iterator[tuple[cache.Hit, Config]]:
    """Return the cached configs that are valid for a task, in the cache's order.

    Args:
        task: whose configs are wanted.
        root: the configs folder, None for the usual one.
        device_slug: whose configs, this GPU's if not given.
        nearest: also configs of other sizes and options than the case's own.
    """
    op, case, variant = task.op, task.case, task.variant
    free_axes, free_options = (op.free_axes, op.free_options) if nearest else ((), ())
    where = (case.axes, case.dtype, case.quant, case.options, task.policy, free_axes, root, free_options, op.bands)
    for hit in cache.candidates(op.name, variant.name, device_slug or device.current().slug, *where):
        if (config := variant.valid_config(case, hit.entry.config)) is not None:
            yield hit, config


def cached(task: Task, root: Path | None, device_slug: str = "") -> tuple[cache.CacheEntry, Config] | None:
    """Return the entry that was stored for exactly this task, and its config, if that still fits."""
    hits = valid_cached_configs(task, root, device_slug=device_slug, nearest=False)
    return next(((hit.entry, config) for hit, config in hits if hit.exact), None)


def config_for(task: Task, root: Path | None) -> Config:
    """Return what a call without `config=` runs a task with, by the same look-up; None for a variant without knobs."""
    return looked_up(task, root).config if task.variant.config is not None else None


def looked_up(task: Task, root: Path | None) -> cache.Choice:
    """Return what the look-up of a call without `config=` finds for a variant with knobs, and from where."""
    return cache.Chooser.of(task.op, task.variant, task.policy, root).find(task.op.called(task.case))


def present(variant: Variant) -> dict[str, str]:
    """Return what times of a variant depend on besides case and config, as it is now, by the names of `Entry.evidence`."""
    return {"driver": device.current().driver, "source_hash": variant.source_hash, **device.versions()}


def stamp(variant: Variant) -> dict[str, Any]:
    """Return the evidence of when, at which commit and with what a variant is measured now."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), **present(variant)}


def changed(variant: Variant, entry: cache.CacheEntry, here: bool) -> str:
    """Return what has changed since an entry was stored; empty if nothing has.

    Args:
        here: this machine has the entry's GPU. On others only the code is compared, not the driver and the packages.
    """
    now = present(variant) if here else {"source_hash": variant.source_hash}
    then = {name: entry.evidence.get(name) for name in now}
    return ", ".join(f"{name} {then[name] or 'unknown'} is now {now[name]}" for name in now if then[name] != now[name])
