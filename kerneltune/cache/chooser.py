"""Look up the config of a case: its own entry, a near entry, or the default."""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from kerneltune import device, misses
from kerneltune.cache import entries
from kerneltune.cache.entries import Axes, CacheEntry, CaseOptions, in_order, json_text, path_of, read_roots
from kerneltune.nearness import Place, band_of, ranked
from kerneltune.spec import Case, Op, Variant, config_from, out_of_range, ranges_of

_MOST_ELEMENTS = 1 << 48
"""Elements of an axis, at most: no memory holds more."""


class Choice(NamedTuple):
    """Hold the answer of a look-up.

    Attributes:
        source: `own`, `near` for the config of other sizes, options, type or GPU, or `default`.
        describe: gives the answer in words; empty for `own`.
    """

    config: Any
    source: str
    describe: Callable[[], str]


@dataclass(frozen=True, eq=False, slots=True)
class Chooser:
    """Choose the config of an operator's function where the caller gives none; called at every launch.

    Attributes:
        op, variant: the operator and its variant, which has knobs.
        policy: policy of the entries; entries of `cold` serve as well.
        root: the folder of the cache; None for `default_root()`.
    """

    op: Op
    variant: Variant
    policy: str = "cold"
    root: Path | None = None

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(op: Op, variant: Variant, policy: str = "cold", root: Path | None = None) -> "Chooser":
        """Return the chooser of an operator's variant that has knobs; the same one for the same arguments."""
        if variant.config is None:
            raise ValueError(f"{op.name} {variant.name}: config: None: expected a dataclass, as there is something to choose")
        return Chooser(op, variant, policy, root)

    def __call__(self, axes: Axes, dtype: str, quant: str = "none", options: CaseOptions = (), gpu: str | None = None) -> Any:
        """Return the config of `find`, remembered until `clear`.

        Any source but `own` is a miss, which is warned of once for all sizes of the free axes.

        Args:
            gpu: the folder of a device; None for the device at hand.

        Raises:
            LookupError: a miss, and KERNELTUNE_STRICT is on.
        """
        return _chosen(self, gpu or device.current_slug(), axes, dtype, quant, options)

    def find(self, case: Case, gpu: str | None = None) -> Choice:
        """Return the first valid config of: the case's own entry, near entries as `nearness.ranked` sorts them, the default.

        Near entries have the case's sizes and another value of a free option, or the other 16-bit type, or other sizes of the
        free axes within `max_distance`. For a GPU that has no config of the operator, entries of the nearest known architecture
        are near.

        Raises:
            ValueError: not even the default is valid for the case.
        """
        gpu = gpu or device.current_slug()
        if (own := self.own(case, gpu)) is not None:
            return Choice(own[1], "own", str)
        folder = _folder(self.op.name, gpu, self.root)
        for entry, config, distance in self.near(case, folder, self.op.max_distance):
            if folder != gpu:
                _say_borrowed(gpu, folder)
            borrowed = folder if folder != gpu else ""
            return Choice(config, "near", partial(_described, case, entry, distance, self.policy, borrowed))
        config = self.variant.default_config(case)
        if (reason := self.variant.valid(case, config)) is not None:
            raise ValueError(f"{self.op.name}: {case.label}: expected sizes that some config can run: {reason}")
        return Choice(config, "default", lambda: "the default")

    def own(self, case: Case, gpu: str) -> tuple[CacheEntry, Any] | None:
        """Return the entry of exactly a case and its config; None if there is no valid config."""
        entry = _table(self, gpu, case.quant).own.get(case)
        config = None if entry is None else self.variant.valid_config(case, entry.config)
        return None if entry is None or config is None else (entry, config)

    def near(self, case: Case, gpu: str, max_distance: float = math.inf) -> Iterator[tuple[CacheEntry, Any, float]]:
        """Yield (entry, valid config, log2 distance) of the entries that can serve a case, its own included, the nearest first.

        Of two equally near entries, an entry of the chooser's policy comes before an entry of `cold`.
        """
        kin = _table(self, gpu, case.quant).same_bands.get(_fixed(self, case.axes), ())
        free = self.op.free_axes, self.op.free_options, self.op.bands, max_distance
        for (_, _, distance), entry in ranked(_place(case), kin, *free) if kin else ():
            if (config := self.variant.valid_config(case, entry.config)) is not None:
                yield entry, config, distance

    def defect(self, entry: CacheEntry) -> str | None:
        """Return why an entry is not used: a knob's name, type or range, or `valid` for its own case; None if it is used."""
        case = entry.case
        if any(size > _MOST_ELEMENTS for _, size in case.axes):
            return f"axes: a size of more than {_MOST_ELEMENTS}"
        try:
            assert self.variant.config is not None
            config = config_from(self.variant.config, entry.config)
            reason = out_of_range(entry.config, ranges_of(self.variant.space(case)))
            is_usual = reason is None or config == self.variant.default_config(case)
            return self.variant.valid(case, config) if is_usual else reason
        except Exception as error:  # an operator's own code may fail in any way at sizes and knobs that make no sense
            return f"{'' if isinstance(error, ValueError) else f'{type(error).__name__}: '}{str(error)[:160]}"


@dataclass(frozen=True, slots=True)
class _Table:
    """Hold the entries of a variant and mode without a defect; entries of the chooser's policy come before entries of `cold`.

    Attributes:
        own: entries of the chooser's policy, by case.
        same_bands: all entries, by sizes and by the bands of free axes.
    """

    own: Mapping[Case, CacheEntry]
    same_bands: Mapping[Axes, Sequence[tuple[Place, CacheEntry]]]


def _place(case: Case) -> Place:
    """Return a case as `ranked` takes it."""
    return dict(case.axes), case.dtype, dict(case.options)


def _fixed(chooser: Chooser, axes: Axes) -> Axes:
    """Return the sizes of axes that are not free, and the bands of free axes."""
    free, bands = chooser.op.free_axes, chooser.op.bands
    kept = [(axis, size) for axis, size in axes if axis in bands or axis not in free]
    return tuple([(axis, band_of(bands[axis], size) if axis in free else size) for axis, size in kept])


@lru_cache(maxsize=4096)
def _folder(op: str, gpu: str, root: Path | None) -> str:
    """Return the folder whose entries serve a GPU: its own, or the folder of the nearest known architecture of its maker.

    The interpreter takes no other folder, because nothing is tuned for it.
    """
    if gpu == device.INTERPRETER or path_of(op, gpu, root).exists():
        return gpu
    places = read_roots(root)
    others = sorted({path.parent.name for place in places for path in place.glob(f"*/{op}.json")})
    maker, number = _architecture(gpu)
    of_maker = [(abs(_architecture(other)[1] - number), other) for other in others if _architecture(other)[0] == maker]
    return min(of_maker)[1] if of_maker and maker else gpu


def _architecture(gpu: str) -> tuple[str, int]:
    """Return the letters and the number of an architecture, such as (sm, 90); ("", 0) for an unknown GPU."""
    arch = device.arch_of(gpu)
    return re.sub(r"[^a-z]", "", arch), int(re.sub(r"\D", "", arch) or 0)


@lru_cache(maxsize=64)
def _say_borrowed(gpu: str, other: str) -> None:
    warnings.warn(f"no configs for {gpu}: those of {other}, the nearest known architecture, serve", stacklevel=6)


@lru_cache(maxsize=1024)
def _table(chooser: Chooser, gpu: str, quant: str) -> _Table:
    path = path_of(chooser.op.name, gpu, chooser.root)
    own: dict[Case, CacheEntry] = {}
    same_bands: dict[Axes, list[tuple[Place, CacheEntry]]] = {}
    bad = []
    wanted = [e for e in entries.remembered(path) if (e.variant, e.case.quant) == (chooser.variant.name, quant)]
    in_turn = (e for policy in dict.fromkeys((chooser.policy, "cold")) for e in in_order(wanted) if e.policy == policy)
    for entry in in_turn:
        if (reason := chooser.defect(entry)) is not None:
            bad.append(f"{path}: {entry.variant} {entry.case.name} {entry.case.label}: {reason}")
            continue
        if entry.policy == chooser.policy:
            own.setdefault(entry.case, entry)
        same_bands.setdefault(_fixed(chooser, entry.case.axes), []).append((_place(entry.case), entry))
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        warnings.warn(f"{bad[0]}{more}; not used", stacklevel=2)
    return _Table(own, same_bands)


@lru_cache(maxsize=65536)
def _chosen(chooser: Chooser, gpu: str, axes: Axes, dtype: str, quant: str, options: CaseOptions) -> Any:
    case = Case("", axes, dtype, quant, options)
    choice = chooser.find(case, gpu)
    if choice.source != "own":
        miss = misses.Miss(chooser.op.name, chooser.variant.name, gpu, case, chooser.policy)
        misses.report(miss, choice.describe, chooser.op.free_axes)
    return choice.config


def _described(case: Case, entry: CacheEntry, distance: float, policy: str, gpu: str) -> str:
    """Return how an entry's case differs from a case, and the entry's config; gpu: the folder of another GPU, or empty."""
    sizes = " ".join(f"{axis}={size}" for axis, size in entry.case.axes)
    changed = "".join(f" {name}={value}" for name, value in entry.case.options if value != case.option(name))
    changed += f" {entry.policy}" if entry.policy != policy else ""
    changed += f" on {gpu}" if gpu else ""
    return f"that of {sizes} {entry.case.dtype}{changed}, log2 distance {distance:.1f}: {json_text(entry.config)}"


def clear() -> None:
    """Forget every answer and every file read; call it after KERNELTUNE_CONFIGS or a file was changed from outside."""
    for answered in (_chosen, _table, _folder, _say_borrowed, entries.remembered):
        answered.cache_clear()
    misses.forget()


entries.when_stored.append(clear)
