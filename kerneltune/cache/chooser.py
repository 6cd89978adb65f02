"""Look up the config of a case: its own entry, a near entry, a proposal of the GPU's rule, or the default."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kerneltune import device, misses, rule_file
from kerneltune.cache import entries
from kerneltune.cache.entries import Axes, CacheEntry, Options, alike, json_text, path_of, readable
from kerneltune.nearness import NO_BANDS, Bands, Place, band_of, ranked
from kerneltune.spec import Case, Op, Range, Space, Variant, config_from, out_of_range, ranges_of, valid_config

_MOST_ELEMENTS = 1 << 48
"""Elements of an axis, at most: no memory holds more."""


class Choice(NamedTuple):
    """Hold the answer of a look-up.

    Attributes:
        source: `own`, `near` for a recorded config of other sizes, options or type, `rule`, or `default`.
        told: the answer in words; empty for `own`.
    """

    config: Any
    source: str
    told: str


@dataclass(frozen=True, eq=False, slots=True)
class Chooser:
    """Choose the config of an operator's function where the caller gives none; called at every launch.

    Attributes:
        op, variant: names.
        policy: policy of the entries; entries of `cold` serve as well.
        free_axes, free_options, bands: as in spec.Op.
        config, valid, default, space: as in spec.Variant.
        root: the folder of the cache; None for `roots()`.
    """

    op: str
    config: type[Any]
    valid: Callable[[Case, Any], str | None]
    default: Callable[[Case], Any]
    free_axes: tuple[str, ...]
    variant: str = "optimized"
    policy: str = "cold"
    root: Path | None = None
    free_options: tuple[str, ...] = ()
    bands: Bands = field(default_factory=lambda: NO_BANDS)
    space: Callable[[Case], Space] | None = None

    @staticmethod
    def of(op: Op, variant: Variant, policy: str = "cold", root: Path | None = None) -> "Chooser":
        """Return the chooser of an operator's variant that has knobs; the same one for the same arguments."""
        return _chooser(op.name, variant, policy, root, op.free_axes, op.free_options, tuple(op.bands.items()))

    def __call__(self, axes: Axes, dtype: str, quant: str = "none", options: Options = (), gpu: str | None = None) -> Any:
        """Return the config of `find`, remembered until `clear`.

        Any source but `own` is a miss, which is warned of once for all sizes of the free axes.

        Args:
            gpu: the folder of a device; None for the device at hand.

        Raises:
            LookupError: a miss, and KERNELTUNE_STRICT is on.
        """
        return _chosen(self, gpu or device.current_slug(), axes, dtype, quant, options)

    def find(self, case: Case, gpu: str | None = None) -> Choice:
        """Return the first valid config of: the case's own entry, entries near it, the rule's proposals, the default.

        Near entries have the case's sizes and another value of a free option, or the other 16-bit type, or other sizes of the
        free axes. The rule says how far other sizes may be; without a rule any distance is near.

        Raises:
            ValueError: not even the default is valid for the case.
        """
        gpu = gpu or device.current_slug()
        table = _table(self, gpu, case.quant)
        if (own := self.own(case, gpu)) is not None:
            return Choice(own[1], "own", "")
        ruling = ruling_of(self, gpu)
        for entry, config, distance in self.near(case, gpu, math.inf if ruling is None else ruling.rule.near):
            return Choice(config, "near", _told(case, entry, distance, self.policy))
        return self._ruled(case, table, ruling, gpu) or self._default(case)

    def own(self, case: Case, gpu: str) -> tuple[CacheEntry, Any] | None:
        """Return the entry of exactly a case and its config; None if there is no valid config."""
        entry = _table(self, gpu, case.quant).own.get((case.axes, case.dtype, case.options))
        config = None if entry is None else self.from_knobs(case, entry.config)
        return None if entry is None or config is None else (entry, config)

    def near(self, case: Case, gpu: str, limit: float = math.inf) -> Iterator[tuple[CacheEntry, Any, float]]:
        """Yield the entries that can serve a case, with its own, the nearest first: entry, valid config, log2 distance.

        Other sizes are at most `limit` away. Of two entries as near, an entry of the policy comes before an entry of `cold`.
        """
        table = _table(self, gpu, case.quant)
        kin = table.same_bands.get(_fixed(self, case.axes), ()) if limit else table.same_sizes.get(case.axes, ())
        place = dict(case.axes), case.dtype, dict(case.options)
        for (_, moved, apart), entry in ranked(place, kin, self.free_axes, self.free_options, self.bands) if kin else ():
            if not (moved and apart > limit) and (config := self.from_knobs(case, entry.config)) is not None:
                yield entry, config, apart

    def _ruled(self, case: Case, table: "_Table", ruling: rule_file.ServingRule | None, gpu: str) -> Choice | None:
        """Return the first valid config that a rule proposes; None if there is none."""
        if ruling is None:
            return None
        for knobs in ruling.proposals(case):
            if not knobs:
                return self._default(case, ruling.told(gpu))
            fits = out_of_range(knobs, table.ranges or self.ranges(case)) is None
            if fits and (config := self.from_knobs(case, knobs)) is not None:
                return Choice(config, "rule", f"{ruling.told(gpu)}: {json_text(knobs)}")
        return None

    def _default(self, case: Case, told: str = "") -> Choice:
        """Return the default.

        Raises:
            ValueError: the default is not valid for the case.
        """
        config = self.default(case)
        if (reason := self.valid(case, config)) is not None:
            raise ValueError(f"{self.op}: {case.label}: expected sizes that some config can run: {reason}")
        return Choice(config, "default", f"{told}: the default" if told else "the default")

    def from_knobs(self, case: Case, knobs: Mapping[str, Any]) -> Any:
        """Return the config with these knobs; None for knobs of another variant, or not valid for the case."""
        return valid_config(self.config, self.valid, case, knobs)

    def defect(self, entry: CacheEntry) -> str | None:
        """Return why an entry is not used: a knob's name, type or range, or `valid` for its own case; None if it is used."""
        case = entry.as_case
        if any(size > _MOST_ELEMENTS for _, size in entry.axes):
            return f"axes: a size of more than {_MOST_ELEMENTS}"
        try:
            config = config_from(self.config, entry.config)
            reason = out_of_range(entry.config, self.ranges(case))
            return self.valid(case, config) if reason is None or config == self.default(case) else reason
        except Exception as error:  # an operator's own code may fail in any way at sizes and knobs that make no sense
            return f"{'' if isinstance(error, ValueError) else f'{type(error).__name__}: '}{str(error)[:160]}"

    def ranges(self, case: Case) -> dict[str, Range]:
        """Return the range of every knob for a case."""
        return {} if self.space is None else ranges_of(self.space(case))


@lru_cache(maxsize=4096)
def _chooser(
    op: str,
    variant: Variant,
    policy: str,
    root: Path | None,
    free_axes: tuple[str, ...],
    free_options: tuple[str, ...],
    bands: tuple[tuple[str, tuple[int, ...]], ...],
) -> Chooser:
    if variant.config is None:
        raise ValueError(f"{op} {variant.name}: config: None: expected a dataclass, as there is something to choose")
    of_variant = variant.config, variant.valid, variant.default or variant.default_config
    return Chooser(op, *of_variant, free_axes, variant.name, policy, root, free_options, dict(bands), variant.space)


@dataclass(frozen=True, slots=True)
class _Table:
    """Hold the entries of a variant and mode without a defect; entries of the chooser's policy come before entries of `cold`.

    Attributes:
        own: entries of the chooser's policy, by sizes, type and options.
        same_sizes: all entries, by sizes.
        same_bands: all entries, by sizes and by the bands of free axes.
        ranges: the range of each knob over all recorded cases.
    """

    own: Mapping[Any, CacheEntry]
    same_sizes: Mapping[Axes, Sequence[tuple[Place, CacheEntry]]]
    same_bands: Mapping[Axes, Sequence[tuple[Place, CacheEntry]]]
    ranges: Mapping[str, Range]


def _fixed(chooser: Chooser, axes: Axes) -> Axes:
    """Return the sizes of axes that are not free, and the bands of free axes."""
    free, bands = chooser.free_axes, chooser.bands
    kept = [(axis, size) for axis, size in axes if axis in bands or axis not in free]
    return tuple([(axis, band_of(bands[axis], size) if axis in free else size) for axis, size in kept])


@lru_cache(maxsize=1024)
def ruling_of(chooser: Chooser, gpu: str) -> rule_file.ServingRule | None:
    """Return the rule for a GPU's cases without an entry: the cache's rule, else the packaged rule; None if none."""
    file = rule_file.path_of(chooser.op, gpu, Path())
    root = readable(file, chooser.root).parents[len(file.parts) - 1]
    return rule_file.serving_rule(root, gpu, chooser.op, chooser.variant, chooser.policy)


@lru_cache(maxsize=1024)
def _table(chooser: Chooser, gpu: str, quant: str) -> _Table:
    path = path_of(chooser.op, gpu, chooser.root)
    own: dict[Any, CacheEntry] = {}
    same_sizes: dict[Axes, list[tuple[Place, CacheEntry]]] = {}
    same_bands: dict[Axes, list[tuple[Place, CacheEntry]]] = {}
    ranges: dict[str, Range] = {}
    bad = []
    for place, entry in alike(path, chooser.variant, chooser.policy, quant):
        if (reason := chooser.defect(entry)) is not None:
            bad.append(f"{path}: {entry.variant} {entry.case} {entry.as_case.label}: {reason}")
            continue
        if entry.policy == chooser.policy:
            own.setdefault((entry.axes, entry.dtype, entry.options), entry)
        same_sizes.setdefault(entry.axes, []).append((place, entry))
        for name, one in chooser.ranges(entry.as_case).items():
            ranges[name] = ranges[name].joined(one) if name in ranges else one
    for axes, found in same_sizes.items():
        same_bands.setdefault(_fixed(chooser, axes), []).extend(found)
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        warnings.warn(f"{bad[0]}{more}; not used", stacklevel=2)
    return _Table(own, same_sizes, same_bands, ranges)


@lru_cache(maxsize=65536)
def _chosen(chooser: Chooser, gpu: str, axes: Axes, dtype: str, quant: str, options: Options) -> Any:
    case = Case("", axes, dtype, quant, options)
    found = chooser.find(case, gpu)
    if found.source != "own":
        misses.report(misses.Miss(chooser.op, chooser.variant, gpu, case, chooser.policy), found.told, chooser.free_axes)
    return found.config


def _told(case: Case, entry: CacheEntry, distance: float, policy: str) -> str:
    """Return how an entry's case differs from a case, and the entry's config."""
    sizes = " ".join(f"{axis}={size}" for axis, size in entry.axes)
    changed = "".join(f" {name}={value}" for name, value in entry.options if value != case.option(name))
    changed += f" {entry.policy}" if entry.policy != policy else ""
    return f"that of {sizes} {entry.dtype}{changed}, log2 distance {distance:.1f}: {json_text(entry.config)}"


def clear() -> None:
    """Forget every answer and every file read; call it after KERNELTUNE_CONFIGS or a file was changed from outside."""
    for remembered in (_chosen, _table, ruling_of):
        remembered.cache_clear()
    entries.forget()
    rule_file.forget()
    misses.forget()


entries.when_stored(clear)
