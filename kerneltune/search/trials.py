"""Store every trial, so that no config is measured twice.

A store holds the trials of an operator on a GPU model. It is an Optuna journal, which optuna-dashboard and optuna.load_study
open. The journal has a study for each variant, case, policy, fingerprint and space, whose user attributes name the first four: a
space with other knob values opens another study. A finished trial is a line that is on disk when `put` returns,
so a kill loses at most the running trial.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from kerneltune import device
from kerneltune.errors import first_line
from kerneltune.files import append_lines, writing
from kerneltune.processes.programs import commit
from kerneltune.records import TrialStatus
from kerneltune.spec import LARGEST_MEASURE, Config, Knob, Op, TaskKey, TaskRow, Variant, knob_order
from kerneltune.task import Evaluation, Knobs, Task, Trial, fingerprint, knob_pairs, knobs_of, trials_file
from kerneltune.wording import assignments

TRANSIENT: frozenset[TrialStatus] = frozenset(("skipped", "crashed"))
"""Statuses whose cause may be another process that held the memory or kept the machine busy, instead of the config."""
STATUS_NOW: dict[str, TrialStatus] = {"ok": "passed", "wrong": "failed", "memory": "skipped", "lost": "crashed"}
"""Status in journals of 2026-11-26 and before -> status now."""
_MOVE = "move the file away to start anew"
_RESULT = {name: name for name in ("status", "spill_bytes", "shared_bytes", "commit", "date")}
_RESULT |= {"detail": "reason", "resources": "program_registers"}
"""Name of a user attribute of a trial -> name of the field of `Evaluation`."""


class _Study(TaskRow, kw_only=True):
    """Hold the user attributes of a study; `case` does not tell studies apart."""

    op: str
    fingerprint: dict[str, str]


_IDENTITY = tuple(name for name in _Study.__struct_fields__ if name != "case")


class TrialStore:
    """Hold the trials of an operator on a GPU model.

    Opening a store writes nothing. Threads may share a store, and processes the file.
    """

    def __init__(self, path: Path, commit: str = "", retries_transient: bool = False, **fingerprint: str) -> None:
        """Open a store.

        Args:
            path: the journal.
            commit: commit that is kept with every new evaluation.
            retries_transient: trials of a transient status are not found, so that their configs are tried again.
            fingerprint: source hash, driver and packages. Trials with another fingerprint are not found.
        """
        self._path, self._commit, self._fingerprint = path, commit, fingerprint
        self._hidden = TRANSIENT if retries_transient else frozenset()
        self._evaluations: dict[TaskKey, dict[Knobs, Evaluation]] = {}
        self._choices: dict[TaskKey, dict[str, dict[Any, None]]] = {}
        self._studies: dict[str, optuna.Study] = {}
        self._lock = Lock()
        self._storage: JournalStorage | None = None
        self._read: dict[int, int] = {}
        self.refresh()

    def get(self, task: Task, config: Config) -> Evaluation | None:
        """Return the stored evaluation of a config with the store's fingerprint, or None."""
        return self._evaluations.get(task.key, {}).get(knob_pairs(config))

    def put(self, task: Task, config: Config, evaluation: Evaluation) -> None:
        """Store an evaluation; the evaluation is on disk when `put` returns."""
        date = evaluation.date or datetime.now(UTC).isoformat(timespec="seconds")
        stored = replace(evaluation, date=date, commit=evaluation.commit or self._commit)
        with self._lock:
            offered = self._offered(task, config)
            trial = optuna.trial.create_trial(
                state=TrialState.FAIL if stored.time_us is None else TrialState.COMPLETE,
                value=stored.time_us,
                params=knobs_of(config),
                distributions={name: CategoricalDistribution(tuple(offered[name])) for name, _ in knob_pairs(config)},
                user_attrs={name: getattr(stored, field) for name, field in _RESULT.items()},
            )
            trial.datetime_start = trial.datetime_complete = datetime.fromisoformat(date).astimezone().replace(tzinfo=None)
            with writing(self._path):
                self._study(task, offered).add_trial(trial)
            self._evaluations.setdefault(task.key, {})[knob_pairs(config)] = stored

    def _study(self, task: Task, offered: Mapping[str, Sequence[Any]]) -> optuna.Study:
        """Return the study of a task whose knobs offer these values; create a missing study."""
        attributes = {"op": task.op.name, **task.key.fields, "fingerprint": self._fingerprint}
        name = _study_name({name: attributes[name] for name in _IDENTITY}, offered)
        if name not in self._studies:
            if self._storage is None:
                self._storage = _opened(self._path)
            names = {study.study_name for study in self._storage.get_all_studies()}
            find = optuna.load_study if name in names else partial(optuna.create_study, load_if_exists=True)
            study = find(storage=self._storage, study_name=name)
            for attribute in (*_IDENTITY, "case"):
                if attribute not in study.user_attrs:
                    study.set_user_attr(attribute, attributes[attribute])
            self._studies[name] = study
        return self._studies[name]

    def _offered(self, task: Task, config: Config) -> dict[str, list[Any]]:
        """Return the values of every knob in the space of a task and in configs beside the space."""
        choices, earlier = self._choices.get(task.key), dict[Knobs, Evaluation]()
        if choices is None:
            space = task.variant.space(task.case)
            choices = self._choices[task.key] = {name: dict.fromkeys(values) for name, values in space.items()}
            earlier = self._evaluations.get(task.key, {})
        for name, value in itertools.chain(knob_pairs(config), *earlier):
            choices.setdefault(name, {})[value] = None
        return {name: sorted(values, key=knob_order) for name, values in choices.items()}

    def refresh(self) -> None:
        """Read the trials that other processes have added to the file by now."""
        self._storage = self._storage or _existing(self._path)
        read = [trial for trial in _trials(self._storage, self._path, self._read) if trial.fingerprint == self._fingerprint]
        with self._lock:
            for trial in read:
                evaluations = self._evaluations.setdefault(trial.key, {})
                if trial.evaluation.status in self._hidden:
                    evaluations.pop(trial.knobs, None)
                else:
                    evaluations[trial.knobs] = trial.evaluation

    def evaluations(self, task: Task) -> dict[Knobs, Evaluation]:
        """Return the evaluations of a task, in the order of the first evaluation."""
        with self._lock:
            return dict(self._evaluations.get(task.key, {}))

    def ranked(self, task: Task) -> list[dict[str, Any]]:
        """Return the knobs of a task's configs that have a time, fastest first."""
        timed = [(evaluation.time_us, knobs) for knobs, evaluation in self.evaluations(task).items() if evaluation.time_us]
        return [dict(knobs) for _, knobs in sorted(timed)]


def open_store(op: Op, variant: Variant, results: Path, retries_transient: bool = False) -> TrialStore:
    """Open the store of an operator's trials on this GPU model, with the present fingerprint of a variant.

    results: folder of the records; retries_transient: as in `TrialStore`.
    """
    path = trials_file(results, device.current().slug, op.name)
    return TrialStore(path, commit(), retries_transient, **fingerprint(variant))


def newest_trials(path: Path) -> dict[TaskKey, dict[Knobs, Evaluation]]:
    """Return the trials of a store by task, the oldest first; all trials of a variant have the fingerprint of its newest."""
    trials = history(path)
    newest = {trial.key.variant: trial.fingerprint for trial in trials}
    evaluations: dict[TaskKey, dict[Knobs, Evaluation]] = {}
    for trial in trials:
        if trial.fingerprint == newest[trial.key.variant]:
            evaluations.setdefault(trial.key, {})[trial.knobs] = trial.evaluation
    return evaluations


def history(path: Path) -> list[Trial]:
    """Return every trial of a store under any fingerprint; an empty list without a store."""
    return list(_trials(_existing(path), path, {}))


def _study_name(identity: Mapping[str, Any], offered: Mapping[str, Sequence[Any]]) -> str:
    """Return a readable name that only studies of the same identity and space share."""
    space = {name: list(map(repr, values)) for name, values in offered.items()}
    digest = sha256(json.dumps([identity, space], sort_keys=True).encode()).hexdigest()
    kind = [identity[name] for name in ("dtype", "quant", "policy")]
    return " ".join([identity["op"], identity["variant"], assignments(identity["axes"]), *kind, digest[:8]])


def _trials(storage: JournalStorage | None, path: Path, read: dict[int, int]) -> Iterator[Trial]:
    """Yield the finished trials of a journal in the order of the file, which a clock that jumps leaves as it is.

    read: study -> number of its trials that were yielded before, which are left out; the numbers are brought up to date.
    """
    if storage is None:
        return
    unread: list[tuple[int, Mapping[str, Any], FrozenTrial]] = []
    for study in storage.get_all_studies():
        if not study.user_attrs.keys() >= set(_IDENTITY):
            continue  # another program's study, or a study that was interrupted before its first trial
        number = storage.get_study_id_from_name(study.study_name)
        trials = storage.get_all_trials(number, deepcopy=False)
        begin, read[number] = read.get(number, 0), len(trials)
        for trial in trials[begin:]:
            order = storage.get_trial_id_from_study_id_trial_number(number, trial.number)
            unread.append((order, study.user_attrs, trial))
    for _order, attributes, trial in sorted(unread, key=itemgetter(0)):
        if trial.state.is_finished() and "status" in trial.user_attrs:
            yield _trial(attributes, trial, path)


def _trial(attributes: Mapping[str, Any], stored: FrozenTrial, path: Path) -> Trial:
    """Return a stored trial of a study with these user attributes."""
    evaluation = {field: stored.user_attrs[name] for name, field in _RESULT.items() if name in stored.user_attrs}
    evaluation["time_us"] = time_us = stored.value if stored.state is TrialState.COMPLETE else None
    ended = stored.datetime_complete
    if "date" not in evaluation and ended is not None:  # of an earlier version: local time of its machine
        evaluation["date"] = ended.astimezone(UTC).isoformat(timespec="seconds")
    try:
        evaluation["status"] = STATUS_NOW.get(evaluation["status"], evaluation["status"])
        study = msgspec.convert(attributes, _Study)
        knobs = tuple(msgspec.convert(stored.params, dict[str, Knob]).items())
        trial = Trial(TaskKey.of(study.op, study), knobs, msgspec.convert(evaluation, Evaluation), study.fingerprint)
    except (msgspec.ValidationError, TypeError) as error:  # a list or a mapping in the place of a status
        text = str(error)
        for name, field in _RESULT.items():
            text = text.replace(f"`$.{field}`", f"`$.{name}`")
        raise ValueError(f"{path}: not a trial: {text}; {_MOVE}") from error
    if time_us is not None and not 0 < time_us < LARGEST_MEASURE:
        raise ValueError(f"{path}: not a trial: time_us: {time_us!r}: expected microseconds above 0, or null; {_MOVE}")
    return trial


class _JournalFile(JournalFileBackend):
    """Append to a journal file that ends with a whole line, under a lock that ends with the process that holds it."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write logs in a single write."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        append_lines(self._path, lines.encode())


def _existing(path: Path) -> JournalStorage | None:
    """Return the storage of a journal; None without a file."""
    return _opened(path) if path.exists() else None


def _opened(path: Path) -> JournalStorage:
    """Return the storage of a journal; create a missing file."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
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
