"""Every evaluation of a config, append-only: what a search has paid for is never paid for twice.

Knows no GPU and decides nothing. Imports the standard library and spec.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from kerneltune.spec import MOST, Case, Config, Op, Variant

SCHEMA = 1
PASSING = frozenset(("memory", "lost"))
"""What a config may not have been at fault for: another process held the memory, or the machine was busy."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluation.

    Attributes:
        status: `ok`, or why there is no time: `compile`, `spills`, `occupancy` where too few programs fit, `wrong`, `failed`,
            `memory` where it ran out of it, `lost` where it took its process along or the compiler's.
        resources: registers of all threads of its largest program.
        spill_bytes: per thread.
        shared_bytes: of its largest program.
    """

    status: str
    time_us: float | None = None
    detail: str = ""
    resources: int = field(default=0, compare=False)
    spill_bytes: int = field(default=0, compare=False)
    shared_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial with what it belongs to; date and commit are empty in rows of an older version."""

    config: dict[str, Any]
    trial: Trial
    date: str
    commit: str


Sizes = tuple[tuple[str, int], ...]
Searches = list[tuple[Case, list[StoredTrial]]]
"""Cases, each with the stored trials of it."""

_RESOURCES = ("resources", "spill_bytes", "shared_bytes")


def _is_text(found: object) -> bool:
    return isinstance(found, str)


def _is_whole(found: object) -> bool:
    return type(found) is int


def _is_time(found: object) -> bool:
    return found is None or (isinstance(found, int | float) and type(found) is not bool and 0 < found < MOST)


def _maps_to(*types: type) -> Callable[[object], bool]:
    return lambda found: isinstance(found, dict) and all(type(value) in types for value in found.values())


_FIELDS = {
    **dict.fromkeys(("op", "variant", "dtype", "quant", "policy", "status", "detail"), ("a text", _is_text)),
    **dict.fromkeys(("options", "config"), ("values by name", _maps_to(bool, int, float, str))),
    "axes": ("sizes by name", _maps_to(int)),
    "fingerprint": ("texts by name", _maps_to(str)),
    "time_us": ("microseconds above 0, or null", _is_time),
}
_LATER_FIELDS = {
    **dict.fromkeys(("date", "commit"), ("a text", _is_text)),
    **dict.fromkeys(_RESOURCES, ("a whole number", _is_whole)),
}
"""Which rows of an older version lack."""


class TrialStore:
    """Trials of one operator on one GPU, in one JSONL file; a truncated last line, as a kill leaves it, is not read.

    Opening a store writes nothing. Threads may share it. on_put is told every line that `put` has written.
    """

    def __init__(self, path: Path, commit: str = "", **fingerprint: str) -> None:
        """commit: kept beside every new trial; fingerprint: what else a time depends on: source hash, triton, driver."""
        self._path, self._commit = path, commit
        self.on_put: Callable[[str], None] = lambda _line: None
        self._fingerprint = tuple(sorted(fingerprint.items()))
        self._trials: dict[tuple[Any, ...], Trial] = {}
        self._origins: dict[tuple[Any, ...], tuple[str, str]] = {}
        self._lock = Lock()
        self._load()

    def get(self, op: Op, case: Case, variant: Variant, policy: str, config: Config) -> Trial | None:
        """The stored evaluation, if there is one under the same fingerprint."""
        return self._trials.get(self._key(op.name, case, variant.name, policy, tuple(knobs_of(config).items())))

    def put(self, op: Op, case: Case, variant: Variant, policy: str, config: Config, trial: Trial) -> None:
        """Store an evaluation; it is on disk when this returns.

        Raises:
            ValueError: the file cannot be written.
        """
        identity = {
            "op": op.name,
            "variant": variant.name,
            "axes": dict(case.axes),
            "dtype": case.dtype,
            "quant": case.quant,
            "options": dict(case.options),
            "policy": policy,
            "config": knobs_of(config),
        }
        origin = (datetime.now(UTC).isoformat(timespec="seconds"), self._commit)
        more = {"fingerprint": dict(self._fingerprint), "date": origin[0], "commit": origin[1], "schema": SCHEMA}
        line = json.dumps(identity | asdict(trial) | more) + "\n"
        append(self._path, line)
        self.on_put(line)
        key = self._key(op.name, case, variant.name, policy, tuple(knobs_of(config).items()))
        with self._lock:
            self._trials[key], self._origins[key] = trial, origin

    def forget_passing(self) -> None:
        """Have what failed as it may for a while only tried again; the file keeps it."""
        with self._lock:
            self._trials = {key: trial for key, trial in self._trials.items() if trial.status not in PASSING}

    def _snapshot(self) -> list[tuple[tuple[Any, ...], Trial]]:
        """All of it; another thread may be in `put`."""
        with self._lock:
            return list(self._trials.items())

    def of_case(self, op: Op, case: Case, variant: Variant, policy: str) -> list[StoredTrial]:
        """Everything stored of a case, in the order of the first evaluation."""
        wanted = self._key(op.name, case, variant.name, policy, ())[:-1]
        return [StoredTrial(dict(key[-1]), trial, *self._origins[key]) for key, trial in self._snapshot() if key[:-1] == wanted]

    def of_other_sizes(self, op: Op, case: Case, variant: Variant) -> list[tuple[Sizes, dict[str, Any], Trial]]:
        """Sizes, knobs and trial of everything stored of cases that differ in their sizes only."""
        wanted = (op.name, variant.name, case.dtype, case.quant, case.options)
        return [
            (key[2], dict(key[-1]), trial)
            for key, trial in self._snapshot()
            if (*key[:2], *key[3:6]) == wanted and key[2] != case.axes
        ]

    def ranked(self, op: Op, case: Case, variant: Variant, policy: str) -> list[dict[str, Any]]:
        """The configs of a case that have a time, as knob values, fastest first."""
        timed = [(s.trial.time_us, tuple(s.config.items())) for s in self.of_case(op, case, variant, policy) if s.trial.time_us]
        return [dict(values) for _, values in sorted(timed)]

    def __len__(self) -> int:
        return len(self._trials)

    def _key(self, op: str, case: Case, variant: str, policy: str, values: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
        return (op, variant, case.axes, case.dtype, case.quant, case.options, policy, values)

    def _load(self) -> None:
        if not self._path.exists():
            return
        for row in history(self._path):
            if tuple(sorted(row.pop("fingerprint").items())) != self._fingerprint:
                continue
            case = Case("", tuple(row["axes"].items()), row["dtype"], row["quant"], tuple(row["options"].items()))
            key = self._key(row["op"], case, row["variant"], row["policy"], tuple(row["config"].items()))
            self._trials[key] = Trial(
                row["status"], row["time_us"], row["detail"], **{name: row.get(name, 0) for name in _RESOURCES}
            )
            self._origins[key] = row.get("date", ""), row.get("commit", "")


def append(path: Path, lines: str) -> None:
    """Add whole lines to a store, behind its last whole line; they are on disk when this returns.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            drop_cut_line(file)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def lines_of(path: Path, case: Case, variant: str, others: int) -> str:
    """The lines of a store that the search of a case looks at; empty where there is no store.

    Those about its sizes, whatever else they are, and the newest `others` that differ from the case in their sizes only.

    Raises:
        ValueError: the file cannot be read, or holds something that is no trial.
    """
    rows = history(path) if path.exists() else []
    kind = {"variant": variant, "dtype": case.dtype, "quant": case.quant, "options": dict(case.options)}
    here = [row["axes"] == dict(case.axes) for row in rows]
    told = [i for i, row in enumerate(rows) if not here[i] and all(row[name] == value for name, value in kind.items())]
    newest = set(told[max(0, len(told) - others) :])
    return "".join(json.dumps(row) + "\n" for i, row in enumerate(rows) if here[i] or i in newest)


def latest_fingerprint(path: Path) -> dict[str, str]:
    """What the newest trial of a file depends on; empty where there is no trial.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    latest: dict[str, str] = {}
    if path.exists():
        for row in history(path):
            latest = row["fingerprint"]
    return latest


def searches_below(
    folder: Path, cases: Iterable[tuple[Op, Case]], takes: Callable[[str], bool], policy: str
) -> dict[str, Searches]:
    """What the stores of a folder hold of cases under their newest fingerprint, by operator, variant and quantisation mode.

    takes: whether a variant of such a name is wanted.

    Raises:
        ValueError: a store cannot be read, or holds something that is no trial.
    """
    found: dict[str, Searches] = {}
    stores: dict[str, TrialStore] = {}
    for op, case in cases:
        if op.name not in stores:
            path = folder / f"{op.name}.jsonl"
            stores[op.name] = TrialStore(path, **latest_fingerprint(path))
        for variant in op.variants:
            if variant.config is None or not takes(variant.name):
                continue
            stored = stores[op.name].of_case(op, case, variant, policy)
            if any(s.trial.time_us is not None for s in stored):
                found.setdefault(f"{op.name} {variant.name} {case.quant}", []).append((case, stored))
    return found


def history(path: Path) -> list[dict[str, Any]]:
    """Every evaluation of a store, oldest first, under whatever fingerprint, without a line that is being written.

    Raises:
        ValueError: the file cannot be read, or holds something that is no trial.
    """
    try:
        whole, _, _cut = path.read_bytes().rpartition(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    return list(_parsed(path, whole.decode(errors="replace").splitlines()))


def _parsed(path: Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            whole = row.keys() >= _FIELDS.keys()
        except (json.JSONDecodeError, AttributeError):
            whole = False
        if not whole:
            raise ValueError(f"{path}:{number}: not a trial: {line[:80]!r}; move the file away to start anew")
        if row.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(
                f"{path}:{number}: schema: {row['schema']!r}: expected {SCHEMA}: written by another version of kerneltune; "
                "move the file away to start anew"
            )
        for name, (expected, fits) in (_FIELDS | _LATER_FIELDS).items():
            if name in row and not fits(row[name]):
                found = f"{name}: {repr(row[name])[:80]}: expected {expected}"
                raise ValueError(f"{path}:{number}: {found}; move the file away to start anew")
        yield row


def drop_cut_line(file: BinaryIO) -> None:
    """Cut off what stands behind the last newline: a line that a killed process did not finish.

    Waits for a line that another process is writing, and keeps others from it until the file is closed.
    """
    fcntl.flock(file, fcntl.LOCK_EX)
    end = file.seek(0, os.SEEK_END)
    if not end:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def knobs_of(config: Config) -> dict[str, Any]:
    """The knobs of a config and their values."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
