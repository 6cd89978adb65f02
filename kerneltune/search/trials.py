"""Every evaluation of a config, kept for good: what a search has paid for is never paid for twice.

Measures nothing and decides nothing. Optuna, whose journal holds the evaluations, is imported when a store is opened.
"""

import fcntl
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from kerneltune.errors import first_line
from kerneltune.search.task import Place, Task, knobs_of
from kerneltune.spec import MOST, Case, Config, Op

SUFFIX = ".log"
TRANSIENT = frozenset(("memory", "lost"))
"""Statuses that a config may not be at fault for: another process held the memory, or the machine was busy."""
_OLD_SUFFIX, _OLD_SCHEMA, _MIGRATED = ".jsonl", 1, ".migrated"
_MOVE = "move the file away to start anew"

Sizes = tuple[tuple[str, int], ...]
Knobs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one config on one case, from the bench to the store.

    Attributes:
        status: `ok`, or why there is no time: `compile`, `spills`, `occupancy` where too few programs fit, `wrong`, `failed`,
            `memory` where the GPU was out of memory, `lost` where the measuring or compiling process crashed.
        time_us: median time of a call; None without a time.
        detail: what went wrong, one line.
        resources: registers of all threads of the largest program.
        spill_bytes: per thread.
        shared_bytes: of the largest program.
        date: when it was measured, UTC; empty before it is stored.
        commit: of the source that measured it; empty before it is stored.
    """

    status: str
    time_us: float | None = None
    detail: str = ""
    resources: int = field(default=0, compare=False)
    spill_bytes: int = field(default=0, compare=False)
    shared_bytes: int = field(default=0, compare=False)
    date: str = field(default="", compare=False)
    commit: str = field(default="", compare=False)


KnownTrial = tuple[Place, Knobs, Evaluation]
"""An evaluation and what it is of."""


Searches = list[tuple[Case, dict[Knobs, Evaluation]]]
"""Cases, each with its stored evaluations."""


class _TrialRow(msgspec.Struct):
    """The schema of a stored evaluation; the last five are missing in rows of older versions."""

    op: str
    variant: str
    axes: dict[str, int]
    dtype: str
    quant: str
    options: dict[str, bool | int | float | str]
    policy: str
    config: dict[str, bool | int | float | str]
    fingerprint: dict[str, str]
    status: str
    detail: str
    time_us: float | None
    resources: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    date: str = ""
    commit: str = ""
    case: str = ""

    @property
    def place(self) -> Place:
        case = Case(self.case, tuple(self.axes.items()), self.dtype, self.quant, tuple(self.options.items()))
        return Place(self.op, self.variant, case, self.policy)

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation(
            self.status, self.time_us, self.detail, self.resources, self.spill_bytes, self.shared_bytes, self.date, self.commit
        )


class TrialStore:
    """The evaluations of one operator on one GPU model, in an Optuna journal.

    Opening a store writes nothing, except that the file of an older version is migrated. Threads may share a store.

    Attributes:
        on_put: told every evaluation that `put` has stored.
    """

    def __init__(self, path: Path, commit: str = "", **fingerprint: str) -> None:
        """Open a store.

        Args:
            path: the journal.
            commit: kept with every new evaluation.
            fingerprint: what else a time depends on: source hash, triton, driver. Other evaluations are not found.

        Raises:
            ValueError: the file cannot be read, or holds something that is no evaluation; one line.
        """
        self._commit, self._fingerprint = commit, fingerprint
        self.on_put: Callable[[Config, Evaluation], None] = lambda _config, _evaluation: None
        self._found: dict[Place, dict[Knobs, Evaluation]] = {}
        self._choices: dict[Place, dict[str, dict[Any, None]]] = {}
        self._lock = Lock()
        migrate(path)
        self._journal = _journal(path)
        for row in (_row(found, str(path)) for found in self._journal.rows()):
            if row.fingerprint == fingerprint:
                self._found.setdefault(row.place, {})[tuple(row.config.items())] = row.evaluation

    def get(self, task: Task, config: Config) -> Evaluation | None:
        """Return the stored evaluation of a config, if there is one under the same fingerprint."""
        return self._found.get(task.place, {}).get(_items(config))

    def put(self, task: Task, config: Config, evaluation: Evaluation) -> None:
        """Store an evaluation; it is on disk when this returns.

        Raises:
            ValueError: the file cannot be written.
        """
        date = evaluation.date or datetime.now(UTC).isoformat(timespec="seconds")
        stored = replace(evaluation, date=date, commit=evaluation.commit or self._commit)
        row = {**self._about(task), "config": dict(_items(config)), **asdict(stored)}
        with self._lock:
            self._journal.add(row, self._offered(task, config))
            self._found.setdefault(task.place, {})[_items(config)] = stored
        self.on_put(config, stored)

    def begin(self, task: Task) -> None:
        """Create the study of a task, so that its first evaluation is stored as fast as the others.

        Raises:
            ValueError: the file cannot be written.
        """
        with self._lock:
            self._journal.begin(self._about(task), self._offered(task, task.default))

    def _about(self, task: Task) -> dict[str, Any]:
        return {**task.identity, "fingerprint": self._fingerprint}

    def _offered(self, task: Task, config: Config) -> dict[str, list[Any]]:
        """Return the values of every knob that the study of a task offers: those of the space and of configs beside it."""
        choices = self._choices.get(task.place)
        if choices is None:
            space = [(name, value) for name, values in task.variant.space(task.case).items() for value in values]
            beside = [pair for knobs in self._found.get(task.place, ()) for pair in knobs]
            choices = self._choices[task.place] = {}
            for name, value in (*space, *beside):
                choices.setdefault(name, {})[value] = None
        for name, value in _items(config):
            choices.setdefault(name, {})[value] = None
        return {name: sorted(values, key=_order) for name, values in choices.items()}

    def know(self, known: Iterable[KnownTrial]) -> None:
        """Have evaluations found that another store holds; the file stays as it is."""
        with self._lock:
            for place, knobs, evaluation in known:
                self._found.setdefault(place, {})[knobs] = evaluation

    def forget_transient(self) -> None:
        """Have what failed as it may for a while only tried again; the file keeps it."""
        with self._lock:
            for place, found in self._found.items():
                self._found[place] = {knobs: one for knobs, one in found.items() if one.status not in TRANSIENT}

    def of_task(self, task: Task) -> dict[Knobs, Evaluation]:
        """Return everything stored of a task, in the order of the first evaluation."""
        with self._lock:
            return dict(self._found.get(task.place, {}))

    def of_other_sizes(self, task: Task) -> list[KnownTrial]:
        """Return everything stored of tasks that differ in their sizes, and perhaps in their policy, oldest first."""
        return [known for known in self._all() if task.place.differs_in_sizes(known[0])]

    def told(self, task: Task, others: int) -> list[KnownTrial]:
        """Return what a search looks at: all of the task's sizes, and the newest `others` that differ in their sizes only."""
        elsewhere = self.of_other_sizes(task)
        here = [known for known in self._all() if known[0].case.axes == task.case.axes]
        return here + elsewhere[max(0, len(elsewhere) - others) :]

    def _all(self) -> list[KnownTrial]:
        with self._lock:
            found = [(place, knobs, one) for place, of_place in self._found.items() for knobs, one in of_place.items()]
        return sorted(found, key=lambda known: known[2].date)

    def ranked(self, task: Task) -> list[dict[str, Any]]:
        """Return the configs of a task that have a time, as knob values, fastest first."""
        timed = [(one.time_us, knobs) for knobs, one in self.of_task(task).items() if one.time_us]
        return [dict(knobs) for _, knobs in sorted(timed)]

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))


def _items(config: Config) -> Knobs:
    return tuple(knobs_of(config).items())


def _order(value: Any) -> tuple[bool, Any]:
    return (isinstance(value, str), value)


def _journal(path: Path) -> Any:
    from kerneltune.search.journal import Journal

    return Journal(path)


def latest_fingerprint(path: Path, variant: str) -> dict[str, str]:
    """Return what the newest evaluation of a variant depends on; empty where there is none.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    rows = (row for row in history(path) if row["variant"] == variant)
    newest = max(rows, key=lambda row: str(row["date"]), default=None)
    return newest["fingerprint"] if newest is not None else {}


def searches_below(
    folder: Path, cases: Iterable[tuple[Op, Case]], takes: Callable[[str], bool], policy: str
) -> dict[str, Searches]:
    """Return what the stores of a folder hold of cases under their newest fingerprint, by operator, variant and quant mode.

    takes: whether a variant of such a name is wanted.

    Raises:
        ValueError: a store cannot be read, or holds something that is no evaluation.
    """
    found: dict[str, Searches] = {}
    stores: dict[tuple[str, str], TrialStore] = {}
    for op, case in cases:
        for variant in op.variants:
            if variant.config is None or not takes(variant.name):
                continue
            key, path = (op.name, variant.name), store_path(folder, op.name)
            if key not in stores:
                stores[key] = TrialStore(path, **latest_fingerprint(path, variant.name))
            stored = stores[key].of_task(Task(op, case, variant, policy))
            if any(one.time_us is not None for one in stored.values()):
                found.setdefault(f"{op.name} {variant.name} {case.quant}", []).append((case, stored))
    return found


def store_path(folder: Path, op: str) -> Path:
    """Return the store of an operator in the folder of a GPU model."""
    return folder / f"{op}{SUFFIX}"


def has_store(path: Path) -> bool:
    """Return whether a store exists, perhaps of an older version."""
    return path.is_file() or path.with_suffix(_OLD_SUFFIX).is_file()


def history(path: Path) -> list[dict[str, Any]]:
    """Return every evaluation of a store as a row of its fields, under whatever fingerprint; none where there is no store.

    Raises:
        ValueError: the file cannot be read, or holds something that is no evaluation.
    """
    migrate(path)
    return [msgspec.to_builtins(_row(row, str(path))) for row in _journal(path).rows()]


def _row(row: Any, where: str) -> _TrialRow:
    try:
        checked = msgspec.convert(row, _TrialRow)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: not a trial: {error}; {_MOVE}") from error
    if checked.time_us is not None and not 0 < checked.time_us < MOST:
        raise ValueError(f"{where}: not a trial: time_us: {checked.time_us!r}: expected microseconds above 0, or null; {_MOVE}")
    return checked


def migrate(path: Path) -> None:
    """Turn the JSON lines of an older version into the journal `path`, once and as a whole; they are kept as NAME.jsonl.migrated.

    Raises:
        ValueError: the older file cannot be read, holds something that is no trial, or the journal cannot be written.
    """
    old = path.with_suffix(_OLD_SUFFIX)
    if not old.is_file() or path.exists():
        return
    from kerneltune.search.journal import write_journal

    try:
        with old.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists():  # another process was faster
                return
            whole, _, _cut = file.read().rpartition(b"\n")
            rows = [msgspec.to_builtins(row) for row in _old_rows(old, whole.splitlines())]
            write_journal(path, rows)
            old.rename(old.with_name(old.name + _MIGRATED))
    except OSError as error:
        raise ValueError(f"cannot read {old}: {error.strerror}") from error


def _old_rows(path: Path, lines: Sequence[bytes]) -> Iterator[_TrialRow]:
    for number, line in enumerate(lines, start=1):
        try:
            row = msgspec.json.decode(line)
            schema = row.get("schema", _OLD_SCHEMA)
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, RecursionError) as error:
            shown = line.decode(errors="replace")[:80]
            raise ValueError(f"{path}:{number}: not a trial: {shown!r}: {first_line(error)}; {_MOVE}") from error
        if schema != _OLD_SCHEMA:
            raise ValueError(
                f"{path}:{number}: schema: {schema!r}: expected {_OLD_SCHEMA}: written by another version of kerneltune; {_MOVE}"
            )
        yield _row(row, f"{path}:{number}")
