"""The journal file that keeps the trials of searches, as Optuna's own tools open it. Knows no operator and measures nothing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from kerneltune.errors import first_line
from kerneltune.files import append_lines, replace_bytes
from kerneltune.search.study import finished_trial, quiet

Row = dict[str, Any]
"""A stored evaluation: what it is of, the knobs under `config`, its status, time, resources, fingerprint, date and commit."""

_MOVE = "move the file away to start anew"
_ABOUT = ("op", "variant", "axes", "dtype", "quant", "options", "policy", "fingerprint")
_RESULT = ("status", "detail", "resources", "spill_bytes", "shared_bytes", "commit")


class Journal:
    """The trials of an operator in an Optuna journal file, as optuna-dashboard and optuna.load_study open it.

    One study for each variant, case, policy and fingerprint; its user attributes say which. A finished trial is one line, written
    in one piece and on disk when `add` returns, so a kill loses at most the trial that is running.
    """

    def __init__(self, path: Path, backend: BaseJournalBackend | None = None) -> None:
        """Open a journal; writes nothing where there is none. backend: keeps the logs in place of the file.

        Raises:
            ValueError: the file cannot be read, or holds something else; one line.
        """
        quiet()
        self._path, self._backend = path, backend
        self._studies: dict[str, optuna.Study] = {}
        self._storage: JournalStorage | None = self._opened() if backend is not None or path.exists() else None

    def _opened(self) -> JournalStorage:
        return _opened(self._path, self._backend or _LockedFile(self._path))

    def rows(self) -> Iterator[Row]:
        """Return every finished trial, study by study, each in the order of its evaluation.

        Raises:
            ValueError: a study or trial that this package did not write.
        """
        if self._storage is None:
            return
        for study in self._storage.get_all_studies():
            about = study.user_attrs
            if not about.keys() >= set(_ABOUT):
                continue  # of somebody else, or interrupted before its first trial
            number = self._storage.get_study_id_from_name(study.study_name)
            for trial in self._storage.get_all_trials(number, deepcopy=False):
                if trial.state.is_finished() and "status" in trial.user_attrs:
                    yield _row(about, trial)

    def begin(self, row: Row, choices: Mapping[str, Sequence[Any]]) -> None:
        """Create the study of a row before there is a trial, unless it exists.

        Raises:
            ValueError: the file cannot be written.
        """
        with self._writing():
            self._study({name: row[name] for name in _ABOUT}, row.get("case", ""), choices)

    def add(self, row: Row, choices: Mapping[str, Sequence[Any]]) -> None:
        """Store a row. choices: the values of every knob that the study offers.

        Raises:
            ValueError: the file cannot be written.
        """
        space = {name: CategoricalDistribution(tuple(choices[name])) for name in row["config"]}
        about = {name: row[name] for name in _RESULT}
        date = datetime.fromisoformat(row["date"]).astimezone().replace(tzinfo=None) if row["date"] else None
        with self._writing():
            study = self._study({name: row[name] for name in _ABOUT}, row.get("case", ""), choices)
            study.add_trial(finished_trial(row["config"], space, row["time_us"], about, date))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(f"cannot write {self._path}: {error.strerror}") from error

    def _study(self, about: Mapping[str, Any], case: str, choices: Mapping[str, Sequence[Any]]) -> optuna.Study:
        name = _name(about, choices)
        if name not in self._studies:
            if self._storage is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._storage = self._opened()
            known = {study.study_name for study in self._storage.get_all_studies()}
            find = optuna.load_study if name in known else partial(optuna.create_study, load_if_exists=True)
            study = find(storage=self._storage, study_name=name)
            for attribute, value in {**about, "case": case}.items():
                if attribute not in study.user_attrs:
                    study.set_user_attr(attribute, value)
            self._studies[name] = study
        return self._studies[name]


def _name(about: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]) -> str:
    """Return a study's name: readable, and of one identity only."""
    sizes = " ".join(f"{axis}={size}" for axis, size in about["axes"].items())
    digest = sha256(json.dumps([about, {name: list(map(repr, c)) for name, c in choices.items()}], sort_keys=True).encode())
    parts = (about["op"], about["variant"], sizes, about["dtype"], about["quant"], about["policy"], digest.hexdigest()[:8])
    return " ".join(parts)


def _row(about: Mapping[str, Any], trial: FrozenTrial) -> Row:
    date = trial.datetime_complete.astimezone(UTC).isoformat(timespec="seconds") if trial.datetime_complete else ""
    result = {name: trial.user_attrs[name] for name in _RESULT if name in trial.user_attrs}
    return {
        **{name: about[name] for name in (*_ABOUT, "case") if name in about},
        **result,
        "config": dict(trial.params),
        "time_us": trial.value if trial.state is TrialState.COMPLETE else None,
        "date": date,
    }


def _opened(path: Path, backend: BaseJournalBackend) -> JournalStorage:
    """Return the storage of a journal.

    Raises:
        ValueError: the file cannot be read, or is no journal; names the line.
    """
    try:
        return JournalStorage(backend)
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


class _LockedFile(JournalFileBackend):
    """A journal file whose lock the kernel lets go of when a process dies, and that ends with a whole line."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write logs in one piece."""
        append_lines(self._path, _encoded(logs), partial_line="cut")


class _Memory(BaseJournalBackend):
    """A journal that is in no file yet."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Return the logs from a number on."""
        yield from self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Keep logs as a file would."""
        self.logs += [json.loads(json.dumps(log)) for log in logs]


def _encoded(logs: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()


def write_journal(path: Path, rows: Sequence[Row]) -> None:
    """Write a new journal with some rows, as a whole.

    Raises:
        ValueError: the file cannot be written.
    """
    quiet()
    memory = _Memory()
    journal = Journal(path, memory)
    studies: dict[str, list[Row]] = {}
    for row in rows:
        studies.setdefault(json.dumps([row[name] for name in _ABOUT], sort_keys=True), []).append(row)
    for of_study in studies.values():
        knobs = dict.fromkeys(knob for row in of_study for knob in row["config"])
        values = [[row["config"][knob] for row in of_study if knob in row["config"]] for knob in knobs]
        choices = {knob: list(dict.fromkeys(given)) for knob, given in zip(knobs, values, strict=True)}
        for row in of_study:
            journal.add(row, choices)
    replace_bytes(path, _encoded(memory.logs))
