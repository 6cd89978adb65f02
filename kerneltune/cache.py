"""Keep the fastest known config of each case in a JSON file per GPU and operator, and look up the config of a call."""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kerneltune import device, files, misses
from kerneltune.nearness import CaseValues, Group, group_of, ranked
from kerneltune.spec import Case, Knob, Measure, Name, Op, Option, TaskKey, TaskRow, Variant, config_of_class, out_of_range
from kerneltune.wording import assignments

SCHEMA = 1
CONFIGS = "KERNELTUNE_CONFIGS"
"""Environment variable: the folder of the cache."""
Axes = tuple[tuple[str, int], ...]
CaseOptions = tuple[tuple[str, Option], ...]

_MOST_ELEMENTS = 1 << 48
"""Elements of an axis, at most: no memory holds more."""
_MAX_BYTES = 64 << 20


class _Evidence(msgspec.Struct):
    """Check these fields of an entry's evidence; further fields may have any value."""

    time_us: Measure | None = None
    default_us: Measure | None = None
    speedup: Measure | None = None
    ci_low: Measure | None = None
    ci_high: Measure | None = None
    over_default: tuple[Measure, Measure] | None = None
    gain: Measure | None = None
    ended_early: bool = False


class _EntryRow(TaskRow, forbid_unknown_fields=True):
    """Hold an entry in the form of a file."""

    case: Name
    config: dict[str, Knob]
    evidence: dict[str, Any]


class _ConfigFile(files.Versioned):
    """Hold the fields of a file of the cache."""

    op: str
    device: str
    entries: list[msgspec.Raw]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """Hold the config that calls run a case with, the fastest known, and the evidence of the search that chose it.

    Attributes:
        evidence: time_us, default_us, speedup, ci_low, ci_high, trials, date, commit, source_hash, driver, torch, triton;
            incumbent_us and before, time and source of the config before the search; gain and over_default, median and 95 %
            interval of the default's time over this config's, from the rounds that chose it; ended_early, whether time ran out.

    `entry_from` makes an entry of values from elsewhere.
    """

    op: str
    variant: str
    case: Case
    policy: str
    config: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> TaskKey:
        """Return the key of the entry's task, which no other entry shares."""
        return TaskKey(self.op, self.variant, self.case, self.policy)


def entry_from(op: str, values: Mapping[str, Any]) -> CacheEntry:
    """Return the entry of an operator with these fields, axes and options as mappings."""
    return _entry(op, files.checked(values, _EntryRow))


def default_root() -> Path:
    """Return the folder that configs are stored in: KERNELTUNE_CONFIGS, else `configs` of the current folder or checkout."""
    override = os.environ.get(CONFIGS)
    return Path(override) if override else files.written_root("configs")


def use_root(root: Path) -> None:
    """Store and look up configs in a folder, in this process and in the processes that it starts from now on."""
    os.environ[CONFIGS] = str(root)
    clear()


def read_roots(root: Path | None = None) -> list[Path]:
    """Return the folders that configs are read from; a file is read from the first folder that holds it.

    root: the folder of the cache; None for `default_root()`, then the packaged configs unless KERNELTUNE_CONFIGS is set.
    """
    if root is not None:
        return [root]
    has_override = bool(os.environ.get(CONFIGS))
    return [default_root()] if has_override else [default_root(), files.data_root("configs")]


def readable(file: Path, root: Path | None = None) -> Path:
    """Return where a file of the cache, such as `nvidia_h200/rmsnorm_fwd.json`, is read, or would be if it existed."""
    paths = [folder / file for folder in read_roots(root)]
    return next((path for path in paths if os.path.exists(path)), paths[-1])  # False where reading is forbidden


def path_of(op_name: str, gpu: str, root: Path | None = None) -> Path:
    """Return the path of an operator's file for a GPU, which may not exist; root: as in `read_roots`."""
    return readable(Path(gpu) / f"{op_name}.json", root)


def load(op_name: str, gpu: str, root: Path | None = None) -> list[CacheEntry]:
    """Return the readable entries of an operator, and warn once of entries that cannot be read."""
    entries, errors = _scan(path_of(op_name, gpu, root))
    _warn_of(errors)
    return entries


def _warn_of(reasons: Sequence[object]) -> None:
    """Warn of entries that are not used; name the first."""
    if reasons:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        warnings.warn(f"{reasons[0]}{more}; not used", stacklevel=3)


def load_strict(path: Path) -> list[CacheEntry]:
    """Return all entries of a file; none of a missing file. An entry that cannot be read is an error."""
    entries, errors = _scan(path)
    if errors:
        raise errors[0]
    return entries


def store(gpu: str, entries: CacheEntry | Sequence[CacheEntry], root: Path | None = None) -> Path:
    """Store all entries of an operator or none, each in place of the entry with its key; readers see the old or the new file."""
    new = {entry.key: entry for entry in ([entries] if isinstance(entries, CacheEntry) else entries)}
    ops = sorted({key.op for key in new})
    if len(ops) != 1:
        raise files.bad("entries", ops, "entries of one operator")
    (op_name,) = ops
    for entry in new.values():
        entry_from(op_name, _fields(entry))
    return _rewrite(gpu, op_name, root, lambda stored: [*(e for e in stored if e.key not in new), *new.values()])


def drop(gpu: str, entry: CacheEntry) -> Path:
    """Remove an entry, unless another entry has replaced it; calls then run with a near entry or the default."""
    return _rewrite(gpu, entry.op, None, lambda stored: [other for other in stored if other != entry])


def _rewrite(gpu: str, op_name: str, root: Path | None, changed: Callable[[list[CacheEntry]], list[CacheEntry]]) -> Path:
    """Replace the entries of an operator under a lock; changed: function of the stored entries that returns the new entries."""
    path = (root or default_root()) / gpu / f"{op_name}.json"
    with files.locked(path):
        stored = load_strict(path_of(op_name, gpu, root))  # a new file begins as the packaged file
        files.replace_text(path, _render(op_name, gpu, changed(stored)))
    clear()
    return path


def by_size(entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Sort entries by falling size, then by the text of their config, so that equally near entries have a fixed order."""
    return sorted(entries, key=lambda entry: (-_size(entry.case), json.dumps(entry.config, default=str)))


def _size(case: Case) -> int:
    numbers = (value for _, value in case.options if type(value) is int and value > 0)
    return math.prod(case.sizes.values()) * math.prod(numbers)


def _json_text(value: object) -> str:
    """Return a value as JSON, as files have it."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _scan(path: Path) -> tuple[list[CacheEntry], list[ValueError]]:
    """Return the good entries of a file, and an error for each bad entry."""
    if files.is_missing(path):
        return [], []
    try:
        data = files.read_bytes(path, _MAX_BYTES)
        if b"NaN" in data or b"Infinity" in data:  # no JSON; with null in their place they damage at most their own entry
            with suppress(ValueError, RecursionError):
                data = json.dumps(json.loads(data, parse_constant=lambda _: None)).encode()
    except ValueError as error:
        return [], [error]
    try:
        items = files.decode_versioned(data, _ConfigFile, SCHEMA, op=path.stem, device=path.parent.name).entries
    except ValueError as error:
        return [], [ValueError(f"{path}: {error}")]
    entries: dict[TaskKey, CacheEntry] = {}
    errors = []
    for index, item in enumerate(items):
        try:
            entry = _entry(path.stem, files.decode(bytes(item), _EntryRow))
            if entry.key in entries:
                raise files.bad("case", entry.case.name, "one entry of each identity")
            entries[entry.key] = entry
        except ValueError as error:
            errors.append(ValueError(f"{path}: entries[{index}]: {error}"))
    return list(entries.values()), errors


def _entry(op: str, row: _EntryRow) -> CacheEntry:
    files.checked(row.evidence, _Evidence, "evidence")
    return CacheEntry(**TaskKey.of(op, row)._asdict(), config=row.config, evidence=row.evidence)


def _fields(entry: CacheEntry) -> dict[str, Any]:
    """Return an entry as a file has it."""
    return {**entry.key.fields, "config": entry.config, "evidence": entry.evidence}


def _render(op_name: str, gpu: str, entries: Sequence[CacheEntry]) -> str:
    """Return the file's text: each entry on its line, sorted, so that a diff shows the entries that changed."""
    rows = []
    for entry in sorted(entries, key=_file_order):
        try:
            rows.append("    " + _json_text(_fields(entry)))
        except (TypeError, ValueError) as error:
            raise files.bad("config", entry.config, "values that JSON can hold, in the evidence too") from error
    head = f'{{\n  "schema": {SCHEMA},\n  "op": {_json_text(op_name)},\n  "device": {_json_text(gpu)},\n  "entries": [\n'
    return head + ",\n".join(rows) + "\n  ]\n}\n"


def _file_order(entry: CacheEntry) -> tuple[Any, ...]:
    case = entry.case
    return entry.variant, entry.policy, case.dtype, case.quant, _json_text(case.options), case.axes


class Source(Enum):
    """Name the sources of configs; the values are words for people, the names stand in evidence."""

    own = "its own config"
    near = "of a near case"  # of other sizes, options, type or GPU
    default = "the default"


class Match(NamedTuple):
    """Hold an entry that can serve a case, its config, which is valid for the case, and the log2 distance between the cases."""

    entry: CacheEntry
    config: Any
    distance: float = 0.0


class Choice(NamedTuple):
    """Hold the answer of a look-up: a config, its source, and a function that describes the config; empty for an own config."""

    config: Any
    source: Source
    describe: Callable[[], str]


@dataclass(frozen=True, eq=False, slots=True)
class Chooser:
    """Choose the config of an operator's function where the caller gives none; called at every launch.

    Attributes:
        op, variant: the operator and its variant, which has knobs.
        policy: policy of the entries; entries of `cold` serve as well.
        root: the folder of the cache; None for `read_roots()`: the folder of this checkout or user, then the package's.
    """

    op: Op
    variant: Variant
    policy: str
    root: Path | None

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(op: Op, variant: Variant, policy: str = "cold", root: Path | None = None) -> "Chooser":
        """Return the chooser of an operator's variant that has knobs; the same one for the same arguments."""
        if variant.config is None:
            raise ValueError(f"{op.name} {variant.name}: config: None: expected a dataclass, as there is something to choose")
        return Chooser(op, variant, policy, root)

    def __call__(self, axes: Axes, dtype: str, quant: str = "none", options: CaseOptions = (), gpu: str | None = None) -> Any:
        """Return the config of `find`, remembered until `clear`.

        Any source but `Source.own` is a miss, which is warned of once for all sizes of the free axes.

        gpu: the folder of a device; None for the device at hand.

        Raises:
            LookupError: a miss, and KERNELTUNE_STRICT is on.
        """
        return _chosen(self, gpu or device.current_slug(), axes, dtype, quant, options)

    def find(self, case: Case, gpu: str | None = None) -> Choice:
        """Return the first valid config of: the case's own entry, near entries as `nearness.ranked` sorts them, the default.

        A near entry has another value of a free option, or other sizes of the free axes within `max_distance`. The entry may be
        of the other 16-bit type and of the policy `cold`, also where nothing else differs. For a GPU that has no config of the
        operator, entries of the nearest known architecture are near.

        Raises:
            ValueError: not even the default is valid for the case.
        """
        gpu = gpu or device.current_slug()
        own = self.own(case, gpu)
        if own is not None:
            return Choice(own.config, Source.own, lambda: "")
        nearest = next(self.matches(case, gpu, self.op.max_distance), None)
        if nearest is not None:
            folder = _entries(self, gpu).folder
            fallback_gpu = folder if folder != gpu else ""
            if fallback_gpu:
                misses.report_fallback(gpu, fallback_gpu)
            return Choice(nearest.config, Source.near, partial(_described, case, nearest, self.policy, fallback_gpu))
        config = self.variant.default_config(case)
        reason = self.variant.invalid(case, config)
        if reason is not None:
            raise ValueError(f"{self.op.name}: {case.label}: expected sizes that some config can run: {reason}")
        return Choice(config, Source.default, lambda: Source.default.value)

    def own(self, case: Case, gpu: str) -> Match | None:
        """Return the entry of exactly this case; None without an entry, or if its config is not valid."""
        entry = _entries(self, gpu).own.get(case)
        config = self.variant.valid_config(case, entry.config) if entry else None
        return None if entry is None or config is None else Match(entry, config)

    def matches(self, case: Case, gpu: str, max_distance: float = math.inf) -> Iterator[Match]:
        """Yield each entry that can serve a case, also its own, the nearest first.

        Of two equally near entries, an entry of the chooser's policy comes before an entry of `cold`.
        """
        op, entries = self.op, _entries(self, gpu).groups.get(self.group_of(case), ())
        for nearness, entry in ranked(_case_values(case), entries, op.free_axes, op.free_options, op.bands, max_distance):
            config = self.variant.valid_config(case, entry.config)
            if config is not None:
                yield Match(entry, config, nearness.distance)

    def group_of(self, case: Case) -> Group:
        """Return the group of the entries that can serve a case."""
        return group_of(_case_values(case), self.op.free_axes, self.op.bands)

    def why_rejected(self, entry: CacheEntry) -> str | None:
        """Return why an entry is not used: a knob's name, type or range, or `invalid` for its own case; None if it is used."""
        case = entry.case
        if max(case.sizes.values(), default=0) > _MOST_ELEMENTS:
            return f"axes: a size of more than {_MOST_ELEMENTS}"
        try:
            assert self.variant.config is not None
            config = config_of_class(self.variant.config, entry.config)
            reason = out_of_range(entry.config, self.variant.space(case))
            if reason is not None and config != self.variant.default_config(case):
                return reason
            return self.variant.invalid(case, config)
        except Exception as error:  # an operator's own code may fail in any way at sizes and knobs that make no sense
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return f"{kind}{str(error)[:160]}"


def _case_values(case: Case) -> CaseValues:
    """Return a case as `ranked` takes it."""
    return case.sizes, case.dtype, case.quant, dict(case.options)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Hold the entries of a variant that can serve a GPU.

    Attributes:
        folder: the folder of the entries: the GPU's own or the fallback GPU's, see `_serving_folder`.
        own: entries of the chooser's policy and of the GPU itself, by case.
        groups: all entries by group; entries of the chooser's policy come before entries of `cold`.
    """

    folder: str
    own: Mapping[Case, CacheEntry]
    groups: Mapping[Group, Sequence[tuple[CaseValues, CacheEntry]]]


_loaded = lru_cache(maxsize=1024)(load)
"""Function `load` that reads a file once for all variants."""


@lru_cache(maxsize=1024)
def _entries(chooser: Chooser, gpu: str) -> _Entries:
    """Return the entries that serve a chooser's calls on a GPU. Warn of rejected entries."""
    folder = _serving_folder(chooser.op.name, gpu, chooser.root)
    path = path_of(chooser.op.name, folder, chooser.root)
    own: dict[Case, CacheEntry] = {}
    groups: dict[Group, list[tuple[CaseValues, CacheEntry]]] = {}
    reasons = []
    policies = [chooser.policy, "cold"]
    op_entries = _loaded(chooser.op.name, folder, chooser.root)
    usable = by_size(e for e in op_entries if e.variant == chooser.variant.name and e.policy in policies)
    for entry in sorted(usable, key=lambda entry: policies.index(entry.policy)):
        reason = chooser.why_rejected(entry)
        if reason is not None:
            reasons.append(f"{path}: {entry.variant} {entry.case.name} {entry.case.label}: {reason}")
            continue
        if entry.policy == chooser.policy and folder == gpu:
            own.setdefault(entry.case, entry)
        groups.setdefault(chooser.group_of(entry.case), []).append((_case_values(entry.case), entry))
    _warn_of(reasons)
    return _Entries(folder, own, groups)


def _serving_folder(op: str, gpu: str, root: Path | None) -> str:
    """Return the folder whose entries serve a GPU: its own, or the fallback GPU's: the nearest known architecture of its maker.

    The interpreter takes no other folder, because nothing is tuned for it.
    """
    if gpu == device.INTERPRETER or not files.is_missing(path_of(op, gpu, root)):
        return gpu
    tuned = sorted({path.parent.name for folder in read_roots(root) for path in folder.glob(f"*/{op}.json")})
    maker, number = _architecture(gpu)
    others = ((other, *_architecture(other)) for other in tuned if maker)
    distances = {other: abs(its_number - number) for other, its_maker, its_number in others if its_maker == maker}
    return min(distances, key=distances.__getitem__, default=gpu)


def _architecture(gpu: str) -> tuple[str, int]:
    """Return the letters and the number of an architecture, such as (sm, 90); ("", 0) for an unknown GPU."""
    arch = device.arch_of(gpu)
    return re.sub(r"[^a-z]", "", arch), int(re.sub(r"\D", "", arch) or 0)


@lru_cache(maxsize=65536)
def _chosen(chooser: Chooser, gpu: str, axes: Axes, dtype: str, quant: str, options: CaseOptions) -> Any:
    case = Case("", axes, dtype, quant, options)
    choice = chooser.find(case, gpu)
    if choice.source is not Source.own:
        key = TaskKey(chooser.op.name, chooser.variant.name, case, chooser.policy)
        misses.report(key, gpu, choice.describe, chooser.op.free_axes)
    return choice.config


def _described(case: Case, nearest: Match, policy: str, gpu: str) -> str:
    """Return how an entry's case differs from a case, and the entry's config; gpu: the folder of another GPU, or empty."""
    entry = nearest.entry
    sizes = assignments(entry.case.sizes)
    changed = "".join(f" {name}={value}" for name, value in entry.case.options if value != case.option(name))
    changed += f" {entry.policy}" if entry.policy != policy else ""
    changed += f" on {gpu}" if gpu else ""
    return f"that of {sizes} {entry.case.dtype}{changed}, log2 distance {nearest.distance:.2f}: {_json_text(entry.config)}"


def clear(*, forgets_misses: bool = True) -> None:
    """Forget every answer and every file read; call it after KERNELTUNE_CONFIGS or a file was changed from outside.

    forgets_misses: whether each miss is warned of again.
    """
    for remembered in (_chosen, _entries, _loaded):
        remembered.cache_clear()
    if forgets_misses:
        misses.forget()
