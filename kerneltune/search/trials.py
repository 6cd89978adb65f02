"""Every evaluation of a config, kept for good: what a search has paid for is never paid for twice.

The evaluations of an operator on a GPU model are an Optuna journal, as optuna-dashboard and optuna.load_study open it. It has a
study for each variant, case, policy and fingerprint; its user attributes say which. A finished trial is one line, written in one
piece and on disk when `put` returns, so a kill loses at most the trial that is running. Measures nothing and decides nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from kerneltune.errors import first_line
from kerneltune.files import append_lines
from kerneltune.search.study import choice_order, finished_trial, quiet
from kerneltune.search.task import Evaluation, Knobs, KnownTrial, Place, Task, knob_pairs, knobs_of, store_path
from kerneltune.spec import MOST, Case, Config, Op

TRANSIENT = frozenset(("memory", "lost"))
"""Statuses that a config may not be at fault for: another process held the memory, or the machine was busy."""
_MOVE = "move the file away to start anew"
_OLD_SUFFIX = ".jsonl"
_ABOUT = ("op", "variant", "axes", "dtype", "quant", "options", "policy", "fingerprint")
_RESULT = ("status", "detail", "resources", "spill_bytes", "shared_bytes", "commit")

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
    """The evaluations of one operator on one GPU model.

    Opening a store writes nothing. Threads may share a store.

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
        self._path, self._commit, self._fingerprint = path, commit, fingerprint
        self.on_put: Callable[[Config, Evaluation], None] = lambda _config, _evaluation: None
        self._found: dict[Place, dict[Knobs, Evaluation]] = {}
        self._choices: dict[Place, dict[str, dict[Any, None]]] = {}
        self._studies: dict[str, optuna.Study] = {}
        self._lock = Lock()
        self._storage = _existing(path)
        for row in _rows(self._storage, path):
            if row.fingerprint == fingerprint:
                self._found.setdefault(row.place, {})[tuple(row.config.items())] = row.evaluation

    def get(self, task: Task, config: Config) -> Evaluation | None:
        """Return the stored evaluation of a config, if there is one under the same fingerprint."""
        return self._found.get(task.place, {}).get(knob_pairs(config))

    def put(self, task: Task, config: Config, evaluation: Evaluation) -> None:
        """Store an evaluation; it is on disk when this returns.

        Raises:
            ValueError: the file cannot be written.
        """
        date = evaluation.date or datetime.now(UTC).isoformat(timespec="seconds")
        stored = replace(evaluation, date=date, commit=evaluation.commit or self._commit)
        result = {name: getattr(stored, name) for name in _RESULT}
        when = datetime.fromisoformat(date).astimezone().replace(tzinfo=None)
        with self._lock:
            offered = self._offered(task, config)
            space = {name: CategoricalDistribution(tuple(offered[name])) for name, _ in knob_pairs(config)}
            with self._writing():
                study = self._study(task, offered)
                study.add_trial(finished_trial(knobs_of(config), space, stored.time_us, result, when))
            self._found.setdefault(task.place, {})[knob_pairs(config)] = stored
        self.on_put(config, stored)

    def begin(self, task: Task) -> None:
        """Create the study of a task, so that its first evaluation is stored as fast as the others.

        Raises:
            ValueError: the file cannot be written.
        """
        with self._lock, self._writing():
            self._study(task, self._offered(task, task.default))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(f"cannot write {self._path}: {error.strerror}") from error

    def _study(self, task: Task, offered: Mapping[str, Sequence[Any]]) -> optuna.Study:
        """Return the study of a task whose knobs offer some values; a new one where there is none."""
        about = {**task.identity, "fingerprint": self._fingerprint}
        name = _study_name({field: about[field] for field in _ABOUT}, offered)
        if name not in self._studies:
            if self._storage is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._storage = _opened(self._path)
            known = {study.study_name for study in self._storage.get_all_studies()}
            find = optuna.load_study if name in known else partial(optuna.create_study, load_if_exists=True)
            study = find(storage=self._storage, study_name=name)
            for attribute in (*_ABOUT, "case"):
                if attribute not in study.user_attrs:
                    study.set_user_attr(attribute, about[attribute])
            self._studies[name] = study
        return self._studies[name]

    def _offered(self, task: Task, config: Config) -> dict[str, list[Any]]:
        """Return the values of every knob that the study of a task offers: those of the space and of configs beside it."""
        choices = self._choices.get(task.place)
        if choices is None:
            space = [(name, value) for name, values in task.variant.space(task.case).items() for value in values]
            beside = [pair for knobs in self._found.get(task.place, ()) for pair in knobs]
            choices = self._choices[task.place] = {}
            for name, value in (*space, *beside):
                choices.setdefault(name, {})[value] = None
        for name, value in knob_pairs(config):
            choices.setdefault(name, {})[value] = None
        return {name: sorted(values, key=choice_order) for name, values in choices.items()}

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


def history(path: Path) -> list[dict[str, Any]]:
    """Return every evaluation of a store as a row of its fields, under whatever fingerprint; none where there is no store.

    Raises:
        ValueError: the file cannot be read, or holds something that is no evaluation.
    """
    return [msgspec.to_builtins(row) for row in _rows(_existing(path), path)]


def _study_name(about: Mapping[str, Any], offered: Mapping[str, Sequence[Any]]) -> str:
    """Return a study's name: readable, and of one identity only."""
    sizes = " ".join(f"{axis}={size}" for axis, size in about["axes"].items())
    digest = sha256(json.dumps([about, {name: list(map(repr, c)) for name, c in offered.items()}], sort_keys=True).encode())
    parts = (about["op"], about["variant"], sizes, about["dtype"], about["quant"], about["policy"], digest.hexdigest()[:8])
    return " ".join(parts)


def _rows(storage: JournalStorage | None, path: Path) -> Iterator[_TrialRow]:
    """Return every finished trial of a journal, study by study, each in the order of its evaluation.

    Raises:
        ValueError: a study or trial that this package did not write.
    """
    if storage is None:
        return
    for study in storage.get_all_studies():
        if not study.user_attrs.keys() >= set(_ABOUT):
            continue  # of somebody else, or interrupted before its first trial
        about = {name: study.user_attrs[name] for name in (*_ABOUT, "case") if name in study.user_attrs}
        number = storage.get_study_id_from_name(study.study_name)
        for trial in storage.get_all_trials(number, deepcopy=False):
            if not trial.state.is_finished() or "status" not in trial.user_attrs:
                continue
            ended = trial.datetime_complete
            yield _row(
                {
                    **about,
                    **{name: trial.user_attrs[name] for name in _RESULT if name in trial.user_attrs},
                    "config": dict(trial.params),
                    "time_us": trial.value if trial.state is TrialState.COMPLETE else None,
                    "date": ended.astimezone(UTC).isoformat(timespec="seconds") if ended else "",
                },
                path,
            )


def _row(row: Mapping[str, Any], path: Path) -> _TrialRow:
    try:
        checked = msgspec.convert(row, _TrialRow)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: not a trial: {error}; {_MOVE}") from error
    if checked.time_us is not None and not 0 < checked.time_us < MOST:
        raise ValueError(f"{path}: not a trial: time_us: {checked.time_us!r}: expected microseconds above 0, or null; {_MOVE}")
    return checked


class _JournalFile(JournalFileBackend):
    """A journal file whose lock the kernel lets go of when a process dies, and that ends with a whole line."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write logs in one piece."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        append_lines(self._path, lines.encode())


def _existing(path: Path) -> JournalStorage | None:
    """Return the storage of a journal; None where there is none.

    Raises:
        ValueError: the file cannot be read, is no journal, or is one of a version before 0.1.0.
    """
    if path.exists():
        return _opened(path)
    if (old := path.with_suffix(_OLD_SUFFIX)).is_file():
        raise ValueError(f"{old}: trials of a version before 0.1.0: expected {path.name}, an Optuna journal; {_MOVE}")
    return None


def _opened(path: Path) -> JournalStorage:
    """Return the storage of a journal, which is made where there is none.

    Raises:
        ValueError: the file cannot be read, or is no journal; names the line.
    """
    quiet()
    try:
        return JournalStorage(_JournalFile(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged line may break Optuna's replay in any way
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            if not _is_log(line):
                shown = line.decode(errors="replace")[:80]
                raise ValueError(f"{path}:{number}: not a trial: {shown!r}; {_MOVE}") from error
        raise ValueError(f"{path}: not an Optuna journal: {first_line(error)}; {_MOVE}") from error


def _is_log(line: bytes) -> bool:
    try:
        log = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(log, dict) and isinstance(log.get("op_code"), int)
