"""The files of the config cache: one JSON file per GPU and operator, with the best known config of each case.

Does not measure, decide which config is better, or check that a config is valid for a case.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kerneltune.files import (
    Versioned,
    bad,
    checked,
    data_root,
    decode,
    decode_versioned,
    in_checkout,
    locked,
    read_bytes,
    replace_text,
)
from kerneltune.nearness import NO_BANDS, Bands, Place, ranked
from kerneltune.spec import MOST, Case, Option

_when_stored: list[Callable[[], None]] = []
SCHEMA = 1
_NO_NUMBER = re.compile(rb"(?<=[:,\[ ])-?(?:NaN|Infinity)(?=[,\]} \n])")
"""What some writers put in the place of a number, which JSON has not: one entry is bad then, not the file."""
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


class _File(Versioned):
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
    for forget_answers in _when_stored:
        forget_answers()
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
    known = alike(path_of(op_name, device_slug, root), variant, policy, quant)
    found = ranked((dict(axes), dtype, dict(options)), known, free_axes, free_options, bands)
    return [Hit(entry, exact=not any(near) and entry.policy == policy, distance=near[2]) for near, entry in found]


def in_order(entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Return the larger first, by sizes and options, then by the config's text: of two that are as near the first is taken."""
    return sorted(entries, key=lambda entry: (-_size(entry), _order(entry.config)))


def forget() -> None:
    """Forget every file read."""
    for remembered in (alike, _loaded):
        remembered.cache_clear()


def when_stored(forget_answers: Callable[[], None]) -> None:
    """Call a function whenever entries were stored."""
    _when_stored.append(forget_answers)


@lru_cache(maxsize=1024)
def _loaded(path: Path) -> tuple[CacheEntry, ...]:
    return tuple(load(path.stem, path.parent.name, path.parent.parent))


@lru_cache(maxsize=1024)
def alike(path: Path, variant: str, policy: str, quant: str) -> tuple[tuple[Place, CacheEntry], ...]:
    """Return the entries of a file for any sizes, element type and options, each with these, in order; `cold` comes last."""
    of_variant = [e for e in _loaded(path) if (e.variant, e.quant) == (variant, quant)]
    found = [e for wanted in dict.fromkeys((policy, "cold")) for e in in_order(e for e in of_variant if e.policy == wanted)]
    return tuple(((dict(e.axes), e.dtype, dict(e.options)), e) for e in found)


def _size(entry: CacheEntry) -> int:
    numbers = (value for _, value in entry.options if type(value) is int and value > 0)
    return math.prod(size for _, size in entry.axes) * math.prod(numbers)


def json_text(value: object) -> str:
    """Return a value as JSON, as it stands in a file."""
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
        return decode_versioned(data, _File, SCHEMA, op=path.stem, device=path.parent.name).entries
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _entry(row: _EntryRow) -> CacheEntry:
    checked(row.evidence, _Evidence, "evidence")
    values = {name: getattr(row, name) for name in _EntryRow.__struct_fields__}
    return CacheEntry(**{**values, "axes": tuple(row.axes.items()), "options": tuple(row.options.items())})


def _render(op_name: str, device_slug: str, entries: Sequence[CacheEntry]) -> str:
    """Return the file's text: one entry a line, sorted, so that a diff shows the entries that changed."""
    rows = []
    for entry in sorted(entries, key=lambda e: (*e.identity[:4], json_text(e.options), e.axes)):
        values = {f.name: getattr(entry, f.name) for f in fields(CacheEntry)}
        try:
            rows.append("    " + json_text({**values, "axes": dict(entry.axes), "options": dict(entry.options)}))
        except (TypeError, ValueError) as error:
            raise bad("config", entry.config, "values that JSON can hold, in the evidence too") from error
    head = f'{{\n  "schema": {SCHEMA},\n  "op": {json_text(op_name)},\n  "device": {json_text(device_slug)},\n  "entries": [\n'
    return head + ",\n".join(rows) + "\n  ]\n}\n"
