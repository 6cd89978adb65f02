"""Read and write the files of the config cache: a JSON file per GPU and operator has the fastest known config of each case.

Measures nothing, compares no configs and does not check that a config is valid for a case.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from kerneltune.spec import MOST, Case, Option

when_stored: list[Callable[[], None]] = []
"""Functions that are called after entries are stored."""
SCHEMA = 1
_NO_NUMBER = re.compile(rb"(?<=[:,\[ ])-?(?:NaN|Infinity)(?=[,\]} \n])")
"""NaN and infinity, which some writers write and JSON lacks: they are read as null, so that only their entry is bad."""
Axes = tuple[tuple[str, int], ...]
CaseOptions = tuple[tuple[str, Option], ...]

_LARGEST_BYTES = 64 << 20
_LARGEST = (1 << 63) - 1
_Name = Annotated[str, Meta(min_length=1)]
_Size = Annotated[int, Meta(ge=0, le=_LARGEST)]
_Whole = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
_Measure = Annotated[float, Meta(ge=0, le=MOST)]
_Knob = bool | _Whole | float | str


class _Evidence(msgspec.Struct):
    """Check these fields of an entry's evidence; further fields may have any value."""

    time_us: _Measure | None = None
    default_us: _Measure | None = None
    speedup: _Measure | None = None
    ci_low: _Measure | None = None
    ci_high: _Measure | None = None
    over_default: tuple[_Measure, _Measure] | None = None


class _EntryRow(msgspec.Struct, forbid_unknown_fields=True):
    """Hold an entry in the form of a file."""

    variant: _Name
    case: _Name
    axes: dict[str, _Size]
    dtype: _Name
    quant: _Name
    options: dict[str, _Knob]
    policy: _Name
    config: dict[str, _Knob]
    evidence: dict[str, Any]


class _ConfigFile(Versioned):
    """Hold the fields of a file of the cache."""

    op: str
    device: str
    entries: list[msgspec.Raw]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """Hold the fastest known config of a variant on a case, and the evidence.

    Attributes:
        evidence: time_us, default_us, speedup, ci_low, ci_high, trials, date, commit, versions, source_hash; over_default, the
            95 % interval of the default's time over this config's, from the rounds that chose it.

    `entry_from` makes an entry of values from elsewhere.
    """

    variant: str
    case: Case
    policy: str
    config: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name the entry on one line."""
        return f"{self.variant} {self.case.name} {self.case.dtype} {self.case.quant}"

    @property
    def identity(self) -> tuple[str, str, Case]:
        """Return variant, policy and case, which no other entry of a file shares; the name of the case may differ."""
        return self.variant, self.policy, self.case

    @property
    def key_fields(self) -> dict[str, Any]:
        """Return variant, case and policy in the form of a file."""
        return {"variant": self.variant, **case_fields(self.case), "policy": self.policy}


def case_fields(case: Case) -> dict[str, Any]:
    """Return a case in the form of a file."""
    sizes, options = dict(case.axes), dict(case.options)
    return {"case": case.name, "axes": sizes, "dtype": case.dtype, "quant": case.quant, "options": options}


def entry_from(values: Mapping[str, Any]) -> CacheEntry:
    """Return the entry with these fields, axes and options as mappings.

    Raises:
        ValueError: a line with the field, its value and the expected values.
    """
    return _entry(checked(values, _EntryRow))


def default_root() -> Path:
    """Return the folder that configs are stored in: KERNELTUNE_CONFIGS, else `configs` of the checkout or current folder."""
    override = os.environ.get("KERNELTUNE_CONFIGS")
    return Path(override) if override else data_root("configs") if in_checkout() else Path("configs")


def read_roots(root: Path | None = None) -> list[Path]:
    """Return the folders that configs are read from, of which the first that holds a file counts for this file.

    Args:
        root: the folder of the cache; None for `default_root()`, and without KERNELTUNE_CONFIGS the packaged folder behind it.
    """
    if root is not None:
        return [root]
    return [default_root(), *([] if os.environ.get("KERNELTUNE_CONFIGS") else [data_root("configs")])]


def readable(file: Path, root: Path | None = None) -> Path:
    """Return where a file of the cache, such as `nvidia_h200/rmsnorm_fwd.json`, is read, or would be if it existed."""
    paths = [folder / file for folder in read_roots(root)]
    return next((path for path in paths if path.exists()), paths[-1])


def path_of(op_name: str, device_slug: str, root: Path | None = None) -> Path:
    """Return the path of an operator's file for a GPU, which may not exist; root: as in `read_roots`."""
    return readable(Path(device_slug) / f"{op_name}.json", root)


def load(op_name: str, device_slug: str, root: Path | None = None) -> list[CacheEntry]:
    """Return the readable entries of an operator, and warn once of entries that cannot be read."""
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
        ValueError: a line with the file, the line or entry, the field and the value.
    """
    entries, errors = _scan(path)
    if errors:
        raise errors[0]
    return entries


def store(op_name: str, device_slug: str, entry: CacheEntry, root: Path | None = None) -> Path:
    """Call `store_all` with a single entry."""
    return store_all(op_name, device_slug, [entry], root)


def store_all(op_name: str, device_slug: str, entries: Sequence[CacheEntry], root: Path | None = None) -> Path:
    """Store all entries or none, each in place of the entry with its identity; readers see the old file or the new file.

    Raises:
        ValueError: the folder cannot be written, or the existing file is broken; nothing is changed then.
    """
    path = (root or default_root()) / device_slug / f"{op_name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            present = path if path.exists() else path_of(op_name, device_slug, root)  # a new file begins as the packaged file
            stored = {entry.identity: entry for entry in (load_strict(present) if present.exists() else [])}
            for entry in entries:
                stored.pop(entry.identity, None)
                stored[entry.identity] = entry
            replace_text(path, _render(op_name, device_slug, list(stored.values())))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    for forget_answers in when_stored:
        forget_answers()
    return path


def in_order(entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Sort entries by falling size, then by the text of their config, so that equally near entries have a fixed order."""
    return sorted(entries, key=lambda entry: (-_size(entry.case), _order(entry.config)))


@lru_cache(maxsize=1024)
def remembered(path: Path) -> tuple[CacheEntry, ...]:
    """Return the readable entries of a file, which are read once."""
    return tuple(load(path.stem, path.parent.name, path.parent.parent))


def _size(case: Case) -> int:
    numbers = (value for _, value in case.options if type(value) is int and value > 0)
    return math.prod(size for _, size in case.axes) * math.prod(numbers)


def json_text(value: object) -> str:
    """Return a value as JSON, as files have it."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _order(config: Mapping[str, Any]) -> str:
    """Return the text by which configs are sorted, also of values that JSON lacks."""
    return json.dumps(config, default=str)


def _scan(path: Path) -> tuple[list[CacheEntry], list[ValueError]]:
    """Return the good entries of a file, and an error for each bad entry."""
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
                raise bad("case", entry.case.name, "one entry of each identity")
            entries[entry.identity] = entry
        except ValueError as error:
            errors.append(ValueError(f"{path}: entries[{index}]: {error}"))
    return list(entries.values()), errors


def _read(path: Path) -> list[msgspec.Raw]:
    """Return the raw entries of a file."""
    data = _NO_NUMBER.sub(b"null", read_bytes(path, _LARGEST_BYTES))
    try:
        return decode_versioned(data, _ConfigFile, SCHEMA, op=path.stem, device=path.parent.name).entries
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _entry(row: _EntryRow) -> CacheEntry:
    checked(row.evidence, _Evidence, "evidence")
    case = Case(row.case, tuple(row.axes.items()), row.dtype, row.quant, tuple(row.options.items()))
    return CacheEntry(variant=row.variant, case=case, policy=row.policy, config=row.config, evidence=row.evidence)


def _place_in_file(entry: CacheEntry) -> tuple[Any, ...]:
    case = entry.case
    return entry.variant, entry.policy, case.dtype, case.quant, json_text(case.options), case.axes


def _render(op_name: str, device_slug: str, entries: Sequence[CacheEntry]) -> str:
    """Return the file's text: each entry on its line, sorted, so that a diff shows the entries that changed."""
    rows = []
    for entry in sorted(entries, key=_place_in_file):
        try:
            rows.append("    " + json_text({**entry.key_fields, "config": entry.config, "evidence": entry.evidence}))
        except (TypeError, ValueError) as error:
            raise bad("config", entry.config, "values that JSON can hold, in the evidence too") from error
    head = f'{{\n  "schema": {SCHEMA},\n  "op": {json_text(op_name)},\n  "device": {json_text(device_slug)},\n  "entries": [\n'
    return head + ",\n".join(rows) + "\n  ]\n}\n"
