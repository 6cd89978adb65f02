"""Decide which classes of launches share a config: all classes of an author's key, unless a paired comparison shows a gain."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kerneltune.adopt.configs import stored_key
from kerneltune.adopt.folder import LaunchClass
from kerneltune.adopt.operators import stored_of_config
from kerneltune.adopt.replay import grid_of
from kerneltune.adopt.table import Group, ServingRow
from kerneltune.search.task import Task
from kerneltune.spec import Config
from kerneltune.stats import Samples, ratio_interval

LEAST_GAIN = 1.03
"""Least speedup by a class's own config for which sizes that the author's key omits become part of the table's key."""
_MOST_PORTFOLIO = 4


@dataclass(frozen=True, slots=True)
class TunedClass:
    """A class with what tuning found.

    Attributes:
        best: the config that won the final.
        author: the author's choice.
        times: microseconds of each config that is correct.
        cost_us: GPU time of all captured launches.
    """

    launch: LaunchClass
    task: Task
    best: Config
    author: Config
    times: dict[Config, float]
    evidence: dict[str, Any]
    cost_us: float

    @property
    def losses(self) -> dict[Config, float]:
        """Return the log of the slow-down by each config that is correct, against the best of them."""
        best = min(self.times.values(), default=1.0)
        return {config: math.log(time / best) for config, time in self.times.items()}


Timing = Callable[[Task, Sequence[Any]], Sequence[Samples | None] | None]


def groups_of(classes: Sequence[TunedClass], timing: Timing, most: int) -> Iterator[Group]:
    """Yield a group of one kernel's classes for each value of the author's key.

    Args:
        classes: of the kernel.
        timing: function that times configs of a class side by side; its result is None where a config crashed.
        most: configs of a row.
    """
    groups: dict[str, list[TunedClass]] = {}
    for one in classes:
        groups.setdefault(repr((one.launch.key, one.launch.dtypes)), []).append(one)
    return (_group(members, timing, most) for members in groups.values())


def _group(members: Sequence[TunedClass], timing: Timing, most: int) -> Group:
    launch = members[0].launch
    shared = shared_config(members)
    if len(members) == 1 or shared is None:
        split = differing(members) if len(members) > 1 else ()
        return Group(launch.key, launch.dtypes, split, tuple(_row(one, one.best, most) for one in members))
    gains = [own_gain(one, shared, timing) for one in members]
    if all(gain is None for gain in gains):
        heaviest = max(members, key=lambda one: one.cost_us)
        return Group(launch.key, launch.dtypes, (), (_row(heaviest, shared, most),))
    rows = [_row(one, shared if gain is None else one.best, most, gain) for one, gain in zip(members, gains, strict=True)]
    return Group(launch.key, launch.dtypes, differing(members), tuple(rows))


def shared_config(members: Sequence[TunedClass]) -> Config | None:
    """Return the config that is the best compromise between classes, by the time each costs; None where none runs in all."""
    losses = [(one.cost_us, one.losses) for one in members]
    candidates = [config for config in members[0].times if all(config in of_class for _, of_class in losses)]
    return min(candidates, key=lambda config: sum(cost * of_class[config] for cost, of_class in losses), default=None)


def own_gain(one: TunedClass, shared: Config, timing: Timing) -> float | None:
    """Return the speedup by a class's own config over the shared config; None if the shared config will do.

    It may not where the gain is 3 % or more, or where the shared config is surely slower than the author's choice.
    """
    if one.best == shared:
        return None
    screened = one.times[shared] / one.times.get(one.best, one.times[shared])
    samples = timing(one.task, [shared, one.best, one.author])
    if samples is None or samples[0] is None or samples[1] is None:
        return screened if screened >= LEAST_GAIN else None
    over = ratio_interval(samples[0], samples[1])
    if over.median >= LEAST_GAIN and over.low > 1.0:
        return over.median
    if samples[2] is not None and ratio_interval(samples[0], samples[2]).low > 1.0:
        return over.median
    return None


def differing(members: Sequence[TunedClass]) -> tuple[str, ...]:
    """Return the sizes that differ between classes; if two sizes are equal in every class, only the argument."""
    names = {name for one in members for name in one.launch.sizes}
    by_sizes: dict[tuple[int | None, ...], str] = {}
    for name in sorted(names, key=lambda one: ("." in one, one)):  # sides of tensors have a dot
        by_sizes.setdefault(tuple(one.launch.sizes.get(name) for one in members), name)
    return tuple(sorted(name for sizes, name in by_sizes.items() if len(set(sizes)) > 1))


def _row(one: TunedClass, chosen: Config, most: int, gain: float | None = None) -> ServingRow:
    """Return a row: the chosen config, the author's config, then the fastest of the rest to fall back to."""
    ranked = sorted(one.times, key=lambda config: one.times[config])
    configs = list(dict.fromkeys([chosen, one.author, *ranked]))[:most]
    evidence = {**one.evidence, "class": one.launch.digest}
    if one.launch.is_plain:
        evidence["grid"] = grid_of(one.launch, stored_of_config(chosen, one.launch))
    if gain is not None:
        evidence["own_gain"] = round(gain, 4)
    return ServingRow(one.launch.sizes, tuple(stored_of_config(config, one.launch) for config in configs), evidence)


def portfolio_of(classes: Sequence[TunedClass]) -> list[dict[str, Any]]:
    """Return the fewest configs, as JSON, with which every class is within 3 % of its best; first the best config for all."""
    tables = [
        (one.cost_us or 1.0, {stored_key(stored_of_config(c, one.launch)): loss for c, loss in one.losses.items()})
        for one in classes
    ]
    stored = {stored_key(config): config for one in classes for c in one.times for config in [stored_of_config(c, one.launch)]}
    chosen: list[str] = []
    while len(chosen) < min(_MOST_PORTFOLIO, len(stored)):
        rest = [key for key in stored if key not in chosen]
        chosen.append(min(rest, key=lambda key: sum(cost * loss for cost, loss in _losses(tables, [*chosen, key]))))
        if max(loss for _, loss in _losses(tables, chosen)) <= math.log(LEAST_GAIN):
            break
    return [stored[key] for key in chosen]


def _losses(tables: Sequence[tuple[float, dict[str, float]]], chosen: Sequence[str]) -> list[tuple[float, float]]:
    """Return the cost of each class and its least loss by a chosen config, that of a 16th of the speed where none is correct."""
    return [(cost, min((of[key] for key in chosen if key in of), default=math.log(16))) for cost, of in tables]
