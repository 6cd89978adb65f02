"""The best known configs: one JSON file per GPU and operator, looked up exactly or at the nearest sizes and options.

Does not measure, decide which config is better, or check that a config is valid for a case.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kerneltune import device, misses, rule
from kerneltune.files import bad, checked, data_root, decode, in_checkout, locked, read_bytes, replace_text
from kerneltune.nearness import NO_BANDS, Bands, Place, ranked
from kerneltune.ranges import Range, out_of_range, ranges_of
from kerneltune.spec import MOST, Case, Op, Option, Space, Variant, config_from

SCHEMA = 1
_NO_NUMBER = re.compile(rb"(?<=[:,\[ ])-?(?:NaN|Infinity)(?=[,\]} \n])")
"""What some writers put in the place of a number, which JSON has not: one entry is bad then, not the file."""
_LARGEST = 1 << 48
"""More elements than any memory holds."""
Axes = tuple[tuple[str, int], ...]
Options = tuple[tuple[str, Option], ...]

_LARGEST_BYTES = 64 << 20
_LARGEST = (1 << 63) - 1
_Name = Annotated[str, Meta(min_length=1)]
_Size = Annotated[int, Meta(ge=0, le=_LARGEST)]
_Whole = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
_Measure = Annotated[float, Meta(ge=0, le=MOST)]
_Knob = bool | _Whole | float | str


class _Evidence(msgspec.Struct):
    """What is checked of an entry's evidence; other fields are free."""

    time_us: _Measure | None = None
    default_us: _Measure | None = None
    speedup: _Measure | None = None
    ci_low: _Measure | None = None
    ci_high: _Measure | None = None
    over_default: tuple[_Measure, _Measure] | None = None


class _EntryRow(msgspec.Struct, forbid_unknown_fields=True):
    """An entry as it stands in a file."""

    variant: _Name
    case: _Name
    axes: dict[str, _Size]
    dtype: _Name
    quant: _Name
    options: dict[str, _Knob]
    policy: _Name
    config: dict[str, _Knob]
    evidence: dict[str, Any]


class _Schema(msgspec.Struct):
    """What every file says, of any schema."""

    schema: int


class _File(_Schema):
    """A file of the cache."""

    op: str
    device: str
    entries: list[msgspec.Raw]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """The best config of one variant on one case, and the evidence for it.

    Attributes:
        case: the case's name; no part of the entry's identity.
        evidence: time_us, default_us, speedup, ci_low, ci_high, trials, date, commit, versions, source_hash; over_default, the
            95 % interval of the default's time over this config's, from the rounds that chose it.

    `entry_from` makes one of values that come from elsewhere.
    """

    variant: str
    case: str
    axes: Axes
    dtype: str
    quant: str
    options: Options
    policy: str
    config: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def as_case(self) -> Case:
        """The case that the entry is for."""
        return Case(self.case, self.axes, self.dtype, self.quant, self.options)

    @property
    def identity(self) -> tuple[str, str, str, str, Options, Axes]:
        """Return what the entry is for; a file holds one entry of each identity."""
        return self.variant, self.policy, self.dtype, self.quant, self.options, self.axes


def entry_from(values: Mapping[str, Any]) -> CacheEntry:
    """Return the entry with these fields, axes and options as mappings.

    Raises:
        ValueError: one line naming the field, its value and what is expected.
    """
    return _entry(checked(values, _EntryRow))


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry that may serve a look-up.

    Attributes:
        exact: whether it was stored for exactly this case.
        distance: log2 distance along free axes or options, one for an option that is no number, a half for another element type;
            0 when exact, and between sizes of 0 and 1.
    """

    entry: CacheEntry
    exact: bool
    distance: float


def roots() -> Path:
    """Return the folder that configs are stored in: KERNELTUNE_CONFIGS, else `configs` of the checkout or current folder."""
    override = os.environ.get("KERNELTUNE_CONFIGS")
    return Path(override) if override else data_root("configs") if in_checkout() else Path("configs")


def readable(file: Path, root: Path | None = None) -> Path:
    """Return where a file of the cache, such as `nvidia_h200/rmsnorm_fwd.json`, is read.

    Where the current folder has no such file and neither a folder is given nor KERNELTUNE_CONFIGS is set, that is the packaged
    copy.

    Args:
        root: the folder of the cache, None for that of `roots`.
    """
    path = (root or roots()) / file
    packaged = root is None and not os.environ.get("KERNELTUNE_CONFIGS") and not path.exists()
    return data_root("configs") / file if packaged else path


def path_of(op_name: str, device_slug: str, root: Path | None = None) -> Path:
    """Return the file of an operator and a GPU, there or not; root: the folder of the cache, None for that of `roots`."""
    return readable(Path(device_slug) / f"{op_name}.json", root)


def load(op_name: str, device_slug: str, root: Path | None = None) -> list[CacheEntry]:
    """Return the readable entries of an operator; whatever is broken is left out with one warning."""
    path = path_of(op_name, device_slug, root)
    if not path.exists():
        return []
    entries, errors = _scan(path)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        warnings.warn(f"{errors[0]}{more}; not used", stacklevel=2)
    return entries


def load_strict(path: Path) -> list[CacheEntry]:
    """Return all entries of a file.

    Raises:
        ValueError: one line naming the file, the line or entry, the field and the value.
    """
    entries, errors = _scan(path)
    if errors:
        raise errors[0]
    return entries


def store(op_name: str, device_slug: str, entry: CacheEntry, root: Path | None = None) -> Path:
    """Call `store_all` with one entry."""
    return store_all(op_name, device_slug, [entry], root)


def store_all(op_name: str, device_slug: str, entries: Sequence[CacheEntry], root: Path | None = None) -> Path:
    """Put entries in place of those with their identities, all or none; readers see the old file or the new one.

    Raises:
        ValueError: the folder cannot be written, or the existing file is broken; nothing is changed then.
    """
    path = (root or roots()) / device_slug / f"{op_name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            present = path if path.exists() else path_of(op_name, device_slug, root)  # a first file begins as the packaged one
            stored = {entry.identity: entry for entry in (load_strict(present) if present.exists() else [])}
            for entry in entries:
                stored.pop(entry.identity, None)
                stored[entry.identity] = entry
            replace_text(path, _render(op_name, device_slug, list(stored.values())))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    clear()
    return path


def candidates(
    op_name: str,
    variant: str,
    device_slug: str,
    axes: Axes,
    dtype: str,
    quant: str,
    options: Options,
    policy: str = "cold",
    free_axes: tuple[str, ...] = (),
    root: Path | None = None,
    free_options: tuple[str, ...] = (),
    bands: Bands = NO_BANDS,
) -> list[Hit]:
    """Return every entry that may serve this case, as `nearness.ranked` says, the nearest first.

    Of two as near, the one of the policy comes before one of `cold`, which models run with; then as `in_order`. Only entries of
    the policy are exact.
    """
    alike = _alike(path_of(op_name, device_slug, root), variant, policy, quant)
    found = ranked((dict(axes), dtype, dict(options)), alike, free_axes, free_options, bands)
    return [Hit(entry, exact=not any(near) and entry.policy == policy, distance=near[2]) for near, entry in found]


def in_order(entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Return the larger first, by sizes and options, then by the config's text: of two that are as near the first is taken."""
    return sorted(entries, key=lambda entry: (-_size(entry), _order(entry.config)))


class Choice(NamedTuple):
    """What a look-up answers with.

    Attributes:
        source: `own`, `near` for a recorded config of other sizes, options or type, `rule`, or `default`.
        told: the answer in words; empty where the case has a config of its own.
    """

    config: Any
    source: str
    told: str


@dataclass(frozen=True, eq=False, slots=True)
class Chooser:
    """Choose the config that an operator's function runs with where its caller gives none. Made once, called at every launch.

    Attributes:
        op, variant, policy, free_axes, free_options, bands: what is looked up, as in `candidates`.
        config, valid, default, space: of the variant, as in spec.Variant.
        root: the folder of the cache, None for that of `roots`.
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

        Anything but an entry of the case's own is a miss, which is warned of once for all sizes of the free axes.

        Args:
            gpu: the folder of another device than the present one.

        Raises:
            LookupError: a miss, and KERNELTUNE_STRICT is on.
        """
        return _chosen(self, gpu or device.current_slug(), axes, dtype, quant, options)

    def find(self, case: Case, gpu: str | None = None) -> Choice:
        """Return the first valid config of: the case's own entry, entries near it, the rule's proposals, the default.

        Entries of the case's own sizes with another value of a free option, or of the other 16-bit type, are near. The rule
        knows how far other sizes of the free axes may be; without a rule any distance is near.
        """
        gpu = gpu or device.current_slug()
        table = _table(self, gpu, case.quant)
        own = table.own.get((case.axes, case.dtype, case.options))
        if own is not None and (config := self.from_knobs(case, own.config)) is not None:
            return Choice(config, "own", "")
        ruling = ruling_of(self, gpu)
        limit = math.inf if ruling is None else ruling.rule.near
        kin = table.along(case.axes, self.free_axes) if limit else table.same_sizes.get(case.axes, ())
        place = dict(case.axes), case.dtype, dict(case.options)
        for (_, moved, apart), entry in ranked(place, kin, self.free_axes, self.free_options, self.bands) if kin else ():
            if not (moved and apart > limit) and (config := self.from_knobs(case, entry.config)) is not None:
                return Choice(config, "near", _told(case, Hit(entry, False, apart), self.policy))
        if ruling is not None:
            ranges = table.ranges or self.ranges(case)
            for knobs in ruling.proposals(case):
                if not knobs:
                    return Choice(self.default(case), "default", f"{ruling.told(gpu)}: the default")
                if out_of_range(knobs, ranges) is None and (config := self.from_knobs(case, knobs)) is not None:
                    return Choice(config, "rule", f"{ruling.told(gpu)}: {_text(knobs)}")
        return Choice(self.default(case), "default", "the default")

    def from_knobs(self, case: Case, knobs: Mapping[str, Any]) -> Any:
        """Return the config with these knobs; None where they are not those of the variant, or not valid for the case."""
        try:
            config = config_from(self.config, knobs)
            return config if self.valid(case, config) is None else None
        except (ValueError, ArithmeticError, TypeError, LookupError):  # of knobs that no space has, such as tiles of 0 rows
            return None

    def defect(self, entry: CacheEntry) -> str | None:
        """Return why an entry cannot be believed: a knob's name, type or range, or `valid` for its own case; None if it can."""
        case = entry.as_case
        if any(size > _LARGEST for _, size in entry.axes):
            return f"axes: a size of more than {_LARGEST}"
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
    assert variant.config is not None
    of_variant = variant.config, variant.valid, variant.default_config
    return Chooser(op, *of_variant, free_axes, variant.name, policy, root, free_options, dict(bands), variant.space)


@dataclass(frozen=True, slots=True)
class _Table:
    """The entries of one variant and mode that can be believed, those of the chooser's policy before those of `cold`.

    Attributes:
        own: by sizes, type and options; of the chooser's policy only.
        same_sizes: by sizes.
        ranges: of the knobs, over all recorded cases.
    """

    own: Mapping[Any, CacheEntry]
    same_sizes: Mapping[Axes, Sequence[tuple[Place, CacheEntry]]]
    ranges: Mapping[str, Range]
    _along: dict[Any, list[tuple[Place, CacheEntry]]] = field(default_factory=dict)

    def along(self, axes: Axes, free_axes: Collection[str]) -> Sequence[tuple[Place, CacheEntry]]:
        """Return the entries whose sizes differ along the free axes only."""
        fixed = tuple(axis for axis in axes if axis[0] not in free_axes)
        if fixed not in self._along:
            sizes = [sizes for sizes in self.same_sizes if tuple(axis for axis in sizes if axis[0] not in free_axes) == fixed]
            self._along[fixed] = [found for one in sizes for found in self.same_sizes[one]]
        return self._along[fixed]


@lru_cache(maxsize=1024)
def ruling_of(chooser: Chooser, gpu: str) -> rule.Ruling | None:
    """Return the rule that a GPU's cases without an entry run by: that of the cache, else the packaged rule; None if none."""
    file = rule.path_of(chooser.op, gpu, Path())
    root = readable(file, chooser.root).parents[len(file.parts) - 1]
    return rule.ruling(root, gpu, chooser.op, chooser.variant, chooser.policy)


@lru_cache(maxsize=1024)
def _table(chooser: Chooser, gpu: str, quant: str) -> _Table:
    path = path_of(chooser.op, gpu, chooser.root)
    own: dict[Any, CacheEntry] = {}
    same_sizes: dict[Axes, list[tuple[Place, CacheEntry]]] = {}
    ranges: dict[str, Range] = {}
    bad = []
    for place, entry in _alike(path, chooser.variant, chooser.policy, quant):
        if (reason := chooser.defect(entry)) is not None:
            bad.append(f"{path}: {entry.variant} {entry.case} {entry.as_case.label}: {reason}")
            continue
        if entry.policy == chooser.policy:
            own.setdefault((entry.axes, entry.dtype, entry.options), entry)
        same_sizes.setdefault(entry.axes, []).append((place, entry))
        for name, one in chooser.ranges(entry.as_case).items():
            ranges[name] = ranges[name].joined(one) if name in ranges else one
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        warnings.warn(f"{bad[0]}{more}; not used", stacklevel=2)
    return _Table(own, same_sizes, ranges)


@lru_cache(maxsize=65536)
def _chosen(chooser: Chooser, gpu: str, axes: Axes, dtype: str, quant: str, options: Options) -> Any:
    case = Case("", axes, dtype, quant, options)
    found = chooser.find(case, gpu)
    if found.source != "own":
        misses.report(misses.Miss(chooser.op, chooser.variant, gpu, case, chooser.policy), found.told, chooser.free_axes)
    return found.config


def _told(case: Case, hit: Hit, policy: str) -> str:
    """Return what an entry is for, as far as it is not for this case, and its config."""
    sizes = " ".join(f"{axis}={size}" for axis, size in hit.entry.axes)
    changed = "".join(f" {name}={value}" for name, value in hit.entry.options if value != case.option(name))
    changed += f" {hit.entry.policy}" if hit.entry.policy != policy else ""
    return f"that of {sizes} {hit.entry.dtype}{changed}, log2 distance {hit.distance:.1f}: {_text(hit.entry.config)}"


def clear() -> None:
    """Forget every answer and every file read; needed after KERNELTUNE_CONFIGS or a file changed from outside."""
    for remembered in (_chosen, _table, ruling_of, _alike, _loaded):
        remembered.cache_clear()
    rule.forget()
    misses.forget()


@lru_cache(maxsize=1024)
def _loaded(path: Path) -> tuple[CacheEntry, ...]:
    return tuple(load(path.stem, path.parent.name, path.parent.parent))


@lru_cache(maxsize=1024)
def _alike(path: Path, variant: str, policy: str, quant: str) -> tuple[tuple[Place, CacheEntry], ...]:
    """Return the entries of a file for any sizes, element type and options, each with these, in order; `cold` comes last."""
    alike = [e for e in _loaded(path) if (e.variant, e.quant) == (variant, quant)]
    found = [e for wanted in dict.fromkeys((policy, "cold")) for e in in_order(e for e in alike if e.policy == wanted)]
    return tuple(((dict(e.axes), e.dtype, dict(e.options)), e) for e in found)


def _size(entry: CacheEntry) -> int:
    numbers = (value for _, value in entry.options if type(value) is int and value > 0)
    return math.prod(size for _, size in entry.axes) * math.prod(numbers)


def _text(value: object) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _order(config: Mapping[str, Any]) -> str:
    """Text by which configs are ordered, also of values that no config has."""
    return json.dumps(config, default=str)


def _scan(path: Path) -> tuple[list[CacheEntry], list[ValueError]]:
    """Return the good entries of a file, and what is wrong with it."""
    try:
        items = _read(path)
    except ValueError as error:
        return [], [error]
    entries: dict[Any, CacheEntry] = {}
    errors = []
    for index, item in enumerate(items):
        try:
            entry = _entry(decode(bytes(item), _EntryRow))
            if entry.identity in entries:
                raise bad("case", entry.case, "one entry of each identity")
            entries[entry.identity] = entry
        except ValueError as error:
            errors.append(ValueError(f"{path}: entries[{index}]: {error}"))
    return list(entries.values()), errors


def _read(path: Path) -> list[msgspec.Raw]:
    """Return the raw entries of a file."""
    data = _NO_NUMBER.sub(b"null", read_bytes(path, _LARGEST_BYTES))
    try:
        if (schema := decode(data, _Schema).schema) != SCHEMA:
            raise bad("schema", schema, repr(SCHEMA))
        file = decode(data, _File)
        for name, expected in {"op": path.stem, "device": path.parent.name}.items():
            if getattr(file, name) != expected:
                raise bad(name, getattr(file, name), repr(expected))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return file.entries


def _entry(row: _EntryRow) -> CacheEntry:
    checked(row.evidence, _Evidence, "evidence")
    values = {name: getattr(row, name) for name in _EntryRow.__struct_fields__}
    return CacheEntry(**{**values, "axes": tuple(row.axes.items()), "options": tuple(row.options.items())})


def _render(op_name: str, device_slug: str, entries: Sequence[CacheEntry]) -> str:
    """Return the file's text: one entry a line, sorted, so that a diff shows the entries that changed."""
    rows = []
    for entry in sorted(entries, key=lambda e: (*e.identity[:4], _text(e.options), e.axes)):
        values = {f.name: getattr(entry, f.name) for f in fields(CacheEntry)}
        try:
            rows.append("    " + _text({**values, "axes": dict(entry.axes), "options": dict(entry.options)}))
        except (TypeError, ValueError) as error:
            raise bad("config", entry.config, "values that JSON can hold, in the evidence too") from error
    head = f'{{\n  "schema": {SCHEMA},\n  "op": {_text(op_name)},\n  "device": {_text(device_slug)},\n  "entries": [\n'
    return head + ",\n".join(rows) + "\n  ]\n}\n"
