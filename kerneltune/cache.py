"""The best known configs: one JSON file per GPU and operator, looked up exactly or at the nearest sizes and options.

Does not measure, decide which config is better, or check that a config is valid for a case.
Imports the standard library, filelock, device, files, misses, nearness and spec.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from kerneltune import device, misses
from kerneltune.files import data_root, replace_text
from kerneltune.nearness import NO_BANDS, Bands, Place, ranked
from kerneltune.spec import MOST, Case, Option, config_from

SCHEMA = 1
Axes = tuple[tuple[str, int], ...]
Options = tuple[tuple[str, Option], ...]

_NAMES = ("variant", "case", "dtype", "quant", "policy")
_MEASURES = ("time_us", "default_us", "speedup", "ci_low", "ci_high")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The best config of one variant on one case, and the evidence for it.

    Attributes:
        case: the case's name; no part of the entry's identity.
        evidence: time_us, default_us, speedup, ci_low, ci_high, trials, date, commit, versions, source_hash; over_default, the
            95 % interval of the default's time over this config's, from the rounds that chose it.

    Raises:
        ValueError: one line naming the field, its value and what is expected.
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

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise _bad(name, value, "a name")
        if any(type(size) is not int or size < 0 for _, size in self.axes):
            raise _bad("axes", dict(self.axes), "axis names with sizes of 0 or more")
        if any(not isinstance(value, bool | int | float | str) for _, value in self.options):
            raise _bad("options", dict(self.options), "option names with plain values")
        for name in ("config", "evidence"):
            if not isinstance(getattr(self, name), dict):
                raise _bad(name, getattr(self, name), "an object")
        for name in _MEASURES:
            if self.evidence.get(name) is not None and not _is_measure(self.evidence[name]):
                raise _bad(f"evidence.{name}", self.evidence[name], "a number of 0 or more, or null")
        over = self.evidence.get("over_default")
        if over is not None and not (isinstance(over, list | tuple) and len(over) == 2 and all(map(_is_measure, over))):
            raise _bad("evidence.over_default", over, "the two ends of an interval, or null")

    @property
    def identity(self) -> tuple[str, str, str, str, Options, Axes]:
        """What the entry is for; a file holds one entry of each identity."""
        return self.variant, self.policy, self.dtype, self.quant, self.options, self.axes


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry that may serve a look-up.

    Attributes:
        exact: whether it was stored for exactly this case.
        distance: octaves along free axes or options, one for an option that is no number, a half for another element type; 0
            when exact, and between sizes of 0 and 1.
    """

    entry: Entry
    exact: bool
    distance: float


def roots() -> Path:
    """The folder of the cache: KERNELTUNE_CONFIGS, else `configs` of the checkout, else the packaged copy."""
    override = os.environ.get("KERNELTUNE_CONFIGS")
    return Path(override) if override else data_root("configs")


def path_of(op_name: str, device_slug: str, root: Path | None = None) -> Path:
    """The file of an operator and a GPU, there or not; root: the folder of the cache, None for that of `roots`."""
    return (root or roots()) / device_slug / f"{op_name}.json"


def load(op_name: str, device_slug: str, root: Path | None = None) -> list[Entry]:
    """The readable entries of an operator; whatever is broken is left out with one warning."""
    path = path_of(op_name, device_slug, root)
    if not path.exists():
        return []
    entries, errors = _scan(path)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        warnings.warn(f"{errors[0]}{more}; not used", stacklevel=2)
    return entries


def load_strict(path: Path) -> list[Entry]:
    """All entries of a file.

    Raises:
        ValueError: one line naming the file, the line or entry, the field and the value.
    """
    entries, errors = _scan(path)
    if errors:
        raise errors[0]
    return entries


def store(op_name: str, device_slug: str, entry: Entry, root: Path | None = None) -> Path:
    """Put `entry` in place of the one with its identity; readers see the old file or the new one.

    Raises:
        ValueError: the folder cannot be written, or the existing file is broken; nothing is changed then.
    """
    path = path_of(op_name, device_slug, root)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            kept = [e for e in load_strict(path) if e.identity != entry.identity] if path.exists() else []
            replace_text(path, _render(op_name, device_slug, [*kept, entry]))
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
    """Every entry that may serve this case, as `nearness.ranked` says, the nearest first; of two as near that of the policy
    before one of `cold`, which models run with; then as `in_order`. Only entries of the policy are exact."""
    alike = _alike(path_of(op_name, device_slug, root), variant, policy, quant)
    found = ranked((dict(axes), dtype, dict(options)), alike, free_axes, free_options, bands)
    return [Hit(entry, exact=not any(near) and entry.policy == policy, distance=near[2]) for near, entry in found]


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """The larger first, by sizes and options, then by the config's text: of two that are as near the first is taken."""
    return sorted(entries, key=lambda entry: (-_size(entry), _text(entry.config)))


@dataclass(frozen=True, eq=False, slots=True)
class Chooser:
    """Comes to the config that an operator's function runs with where its caller gives none. Made once, called at every launch.

    Attributes:
        op, variant, policy, free_axes, free_options, bands: what is looked up, as in `candidates`.
        config, valid, default: of the variant, as in spec.Variant.
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

    def __call__(self, axes: Axes, dtype: str, quant: str = "none", options: Options = (), gpu: str | None = None) -> Any:
        """The config of the nearest candidate that is valid for these sizes, else the default; remembered until `clear`.

        Anything but an entry of the case's own is a miss, which is warned of once for all sizes of the free axes.

        Args:
            gpu: the folder of another device than the present one.

        Raises:
            LookupError: a miss, and KERNELTUNE_STRICT is on.
        """
        return _chosen(self, gpu or device.current_slug(), axes, dtype, quant, options)

    def from_knobs(self, case: Case, knobs: dict[str, Any]) -> Any:
        """The config with these knobs; None where they are not those of the variant, or not valid for the case."""
        try:
            config = config_from(self.config, knobs)
            return config if self.valid(case, config) is None else None
        except (ValueError, ArithmeticError):  # of knobs that no space has, such as tiles of 0 rows
            return None


@lru_cache(maxsize=65536)
def _chosen(chooser: Chooser, gpu: str, axes: Axes, dtype: str, quant: str, options: Options) -> Any:
    case = Case("", axes, dtype, quant, options)
    miss = misses.Miss(chooser.op, chooser.variant, gpu, case, chooser.policy)
    where = (chooser.op, chooser.variant, gpu, axes, dtype, quant, options, chooser.policy, chooser.free_axes, chooser.root)
    for hit in candidates(*where, chooser.free_options, chooser.bands):
        config = chooser.from_knobs(case, hit.entry.config)
        if config is not None:
            if not hit.exact:
                misses.report(miss, _told(case, hit, chooser.policy), chooser.free_axes)
            return config
    misses.report(miss, "the default", chooser.free_axes)
    return chooser.default(case)


def _told(case: Case, hit: Hit, policy: str) -> str:
    """What an entry is for, as far as it is not for this case, and its config."""
    sizes = " ".join(f"{axis}={size}" for axis, size in hit.entry.axes)
    changed = "".join(f" {name}={value}" for name, value in hit.entry.options if value != case.option(name))
    changed += f" {hit.entry.policy}" if hit.entry.policy != policy else ""
    return f"that of {sizes} {hit.entry.dtype}{changed}, {hit.distance:.1f} octaves away: {_text(hit.entry.config)}"


def clear() -> None:
    """Forget every answer and every file read; needed after KERNELTUNE_CONFIGS or a file changed from outside."""
    for remembered in (_chosen, _alike, _loaded):
        remembered.cache_clear()
    misses.forget()


@lru_cache(maxsize=1024)
def _loaded(path: Path) -> tuple[Entry, ...]:
    return tuple(load(path.stem, path.parent.name, path.parent.parent))


@lru_cache(maxsize=1024)
def _alike(path: Path, variant: str, policy: str, quant: str) -> tuple[tuple[Place, Entry], ...]:
    """The entries of a file for any sizes, element type and options, each with these, in order; `cold` comes last."""
    alike = [e for e in _loaded(path) if (e.variant, e.quant) == (variant, quant)]
    found = [e for wanted in dict.fromkeys((policy, "cold")) for e in in_order(e for e in alike if e.policy == wanted)]
    return tuple(((dict(e.axes), e.dtype, dict(e.options)), e) for e in found)


def _size(entry: Entry) -> int:
    numbers = (value for _, value in entry.options if type(value) is int and value > 0)
    return math.prod(size for _, size in entry.axes) * math.prod(numbers)


def _text(value: object) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _is_measure(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= MOST  # type: ignore[operator]


def _bad(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name}: {value!r}: expected {expected}")


def _scan(path: Path) -> tuple[list[Entry], list[ValueError]]:
    """The good entries of a file, and what is wrong with it."""
    try:
        items = _read(path)
    except ValueError as error:
        return [], [error]
    entries: dict[Any, Entry] = {}
    errors = []
    for index, item in enumerate(items):
        try:
            entry = _entry(item)
            if entry.identity in entries:
                raise _bad("case", entry.case, "one entry of each identity")
            entries[entry.identity] = entry
        except ValueError as error:
            errors.append(ValueError(f"{path}: entries[{index}]: {error}"))
    return list(entries.values()), errors


def _read(path: Path) -> list[Any]:
    """The raw entries of a file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: JSON: {error.msg} at column {error.colno}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: JSON: not readable as UTF-8 JSON") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: JSON: expected an object, got {type(data).__name__}")
    for name, expected in {"schema": SCHEMA, "op": path.stem, "device": path.parent.name}.items():
        if data.get(name) != expected:
            raise ValueError(f"{path}: {name}: {data.get(name)!r}: expected {expected!r}")
    if not isinstance(data.get("entries"), list):
        raise ValueError(f"{path}: entries: {data.get('entries')!r}: expected a list")
    return list(data["entries"])


def _entry(values: Any) -> Entry:
    if not isinstance(values, dict):
        raise _bad("entry", values, "an object")
    names = [f.name for f in fields(Entry)]
    for name, value in values.items():
        if name not in names:
            raise _bad(name, value, "no field of this name")
    for name in names:
        if name not in values:
            raise ValueError(f"{name}: missing")
    for name in ("axes", "options"):
        if not isinstance(values[name], dict):
            raise _bad(name, values[name], "an object")
    return Entry(**{**values, "axes": tuple(values["axes"].items()), "options": tuple(values["options"].items())})


def _render(op_name: str, device_slug: str, entries: Sequence[Entry]) -> str:
    """The file's text: one entry a line, sorted, so that a diff shows the entries that changed."""
    rows = []
    for entry in sorted(entries, key=lambda e: (*e.identity[:4], _text(e.options), e.axes)):
        values = {f.name: getattr(entry, f.name) for f in fields(Entry)}
        try:
            rows.append("    " + _text({**values, "axes": dict(entry.axes), "options": dict(entry.options)}))
        except (TypeError, ValueError) as error:
            raise _bad("config", entry.config, "values that JSON can hold, in the evidence too") from error
    head = f'{{\n  "schema": {SCHEMA},\n  "op": {_text(op_name)},\n  "device": {_text(device_slug)},\n  "entries": [\n'
    return head + ",\n".join(rows) + "\n  ]\n}\n"
