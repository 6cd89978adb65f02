"""Searches as Optuna studies: samplers for a finite list of configs, and the journal file that keeps the trials.

The only module that imports Optuna when it is imported. Knows no operator and measures nothing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from kerneltune.errors import first_line
from kerneltune.files import append_lines, replace_bytes

if TYPE_CHECKING:
    from kerneltune.search.surrogate import Surrogate

Knobs = Mapping[str, Any]
Row = dict[str, Any]
"""A stored evaluation: what it is of, the knobs under `config`, its status, time, resources, fingerprint, date and commit."""

_MOVE = "move the file away to start anew"
_SCORED = 2048
_ABOUT = ("op", "variant", "axes", "dtype", "quant", "options", "policy", "fingerprint")
_RESULT = ("status", "detail", "resources", "spill_bytes", "shared_bytes", "commit")


@dataclass(frozen=True, slots=True)
class Untried:
    """A study that asks for the next config of a list.

    Attributes:
        study: the study.
        trial: the trial that is asked for.
        left: places in the list that were never tried, in order; never empty.
        seen: the time of each tried config by its place, None where it failed.
        pending: places of configs that are being tried.
    """

    study: optuna.Study
    trial: FrozenTrial
    left: Sequence[int]
    seen: Mapping[int, float | None]
    pending: Sequence[int]


class ListSampler(BaseSampler):
    """Try every config of a finite list once, in the order of the list.

    The knobs are categorical; `space` holds their distributions. A study must suggest the same choices, most simply by
    `study.ask(sampler.space)`. When all configs were tried, the last one is suggested again.
    """

    def __init__(self, configs: Sequence[Knobs]) -> None:
        """Take the configs in the order in which to try them.

        Args:
            configs: knob values by name, the same names in every config, no config twice.

        Raises:
            ValueError: no config, or configs with different knobs.
        """
        names = tuple(configs[0]) if configs else ()
        if not names or any(tuple(config) != names for config in configs):
            raise ValueError("configs: expected one or more configs with the same knobs")
        self.configs = [dict(config) for config in configs]
        self.space = choices_of(self.configs)
        self._index = {tuple(config.values()): i for i, config in enumerate(self.configs)}
        self._study: optuna.Study | None = None
        self._seen: dict[int, float | None] = {}
        self._heard = 0  # trials of the study, from the first on, that are finished and known

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the distributions of all knobs."""
        return dict(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the knobs of the next config."""
        seen, pending = self._told(study)
        left = [i for i in range(len(self.configs)) if i not in seen and i not in pending]
        return dict(self.configs[self.choose(Untried(study, trial, left, seen, pending)) if left else -1])

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refuse a knob that the list lacks.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{param_name}: {param_distribution}: expected a knob of the list: {', '.join(self.space)}")

    def choose(self, asked: Untried) -> int:
        """Return the next config's place in the list."""
        return asked.left[0]

    def _told(self, study: optuna.Study) -> tuple[dict[int, float | None], list[int]]:
        """Return times of finished trials and places of running trials; for a study that maximizes, times are reciprocals."""
        if self._study is not study:
            self._study, self._seen, self._heard = study, {}, 0
        inverse = study.direction is optuna.study.StudyDirection.MAXIMIZE
        pending = []
        for trial in study.get_trials(deepcopy=False)[self._heard :]:
            index = self._index.get(tuple(trial.params.get(name) for name in self.space))
            if not trial.state.is_finished():
                pending += [] if index is None else [index]
                continue
            if not pending and self._heard == trial.number:
                self._heard += 1
            if index is not None and trial.state is TrialState.COMPLETE and trial.value is not None:
                self._seen[index] = 1.0 / trial.value if inverse else trial.value
            elif index is not None:
                self._seen.setdefault(index, None)
        return self._seen, pending


class FiniteGPSampler(ListSampler):
    """Search a finite list of configs by the expected improvement of a Gaussian process over all untried configs.

    Made for spaces of up to some thousand configs that are restricted by validity rules, as those of GPU kernels: never suggests
    a config outside the list, never suggests a config twice, knows which trials are running, and learns from failed trials which
    configs are likely to fail. The objective must be positive, such as a time; it is modelled on a logarithmic scale.

    Example:
        ::

            import optuna
            from kerneltune.search import FiniteGPSampler

            configs = [{"block": b, "warps": w} for b in (64, 128, 256) for w in (2, 4, 8) if b >= 32 * w]
            sampler = FiniteGPSampler(configs, n_startup_trials=3, seed=0)
            study = optuna.create_study(sampler=sampler)
            for _ in configs:
                trial = study.ask(sampler.space)
                study.tell(trial, measure(**trial.params))
    """

    def __init__(
        self,
        configs: Sequence[Knobs],
        n_startup_trials: int = 10,
        seed: int = 0,
        feasibility: Sequence[float] | None = None,
    ) -> None:
        """Take the configs in the order in which to begin with them.

        Args:
            configs: knob values by name. Good guesses first, the rest in random order.
            n_startup_trials: so many of the first configs are tried before the model decides.
            seed: of what the model draws.
            feasibility: of each config the probability, in [0, 1], that it does not fail; None where nothing is known.
        """
        super().__init__(configs)
        self._startup, self._seed = n_startup_trials, seed
        self._feasibility = feasibility
        self._surrogate: Surrogate | None = None
        self._fitted: dict[int, float | None] = {}

    def prepare(self) -> None:
        """Import and set up the model now, instead of at its first use."""
        self._model()

    def _model(self) -> "Surrogate":
        if self._surrogate is None:
            from kerneltune.search.surrogate import Surrogate

            self._surrogate = Surrogate(self.configs, self._seed, self._feasibility)
        return self._surrogate

    def choose(self, asked: Untried) -> int:
        """Return the untried config with the largest expected improvement; at the start the next in order."""
        left, seen = asked.left, asked.seen
        if left[0] < self._startup or all(time is None for time in seen.values()):
            return left[0]
        model = self._model()
        if seen != self._fitted:
            model.fit(list(seen), list(seen.values()))
            self._fitted = dict(seen)
        scored = left[:_SCORED]
        return scored[int(model.improvement(scored, list(asked.pending)).argmax())]


class UntriedSampler(ListSampler):
    """Let another sampler choose from a finite list, each knob a category; its repeats and invalid configs are drawn again."""

    def __init__(self, configs: Sequence[Knobs], inner: BaseSampler, n_startup_trials: int = 10, attempts: int = 32) -> None:
        """Take the configs in the order in which to begin with them.

        Args:
            configs: as in FiniteGPSampler.
            inner: draws configs from the product of all knobs' values, such as optuna.samplers.TPESampler.
            n_startup_trials: so many of the first configs are tried before `inner` decides.
            attempts: draws before the next config in order is taken instead.
        """
        super().__init__(configs)
        self._inner, self._startup, self._attempts = inner, n_startup_trials, attempts
        self._varied = {name: offered for name, offered in self.space.items() if not offered.single()}

    def reseed_rng(self) -> None:
        """Reseed the other sampler."""
        self._inner.reseed_rng()

    def choose(self, asked: Untried) -> int:
        """Return what the other sampler draws, or the next config in order where it draws nothing new."""
        first = asked.left[0]
        if first < self._startup or not self._varied:
            return first
        untried, given = set(asked.left), self.configs[first]
        for _ in range(self._attempts):
            drawn = given | self._inner.sample_relative(asked.study, asked.trial, dict(self._varied))
            index = self._index.get(tuple(drawn[name] for name in self.space))
            if index in untried and index is not None:
                return index
        return first


def choices_of(configs: Sequence[Knobs]) -> dict[str, CategoricalDistribution]:
    """Return the values of every knob in some configs as a distribution."""
    return {name: CategoricalDistribution(sorted({c[name] for c in configs}, key=_order)) for name in configs[0]}


def _order(value: Any) -> tuple[bool, Any]:
    return (isinstance(value, str), value)


def quiet() -> None:
    """Have Optuna say warnings only."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def finished_trial(
    knobs: Knobs,
    space: Mapping[str, CategoricalDistribution],
    time_us: float | None,
    about: Mapping[str, Any] | None = None,
    date: datetime | None = None,
) -> FrozenTrial:
    """Return a finished trial for `study.add_trial`; a config without a time failed."""
    return FrozenTrial(
        number=0,
        trial_id=0,
        state=TrialState.FAIL if time_us is None else TrialState.COMPLETE,
        value=time_us,
        datetime_start=date or datetime.now(),
        datetime_complete=date or datetime.now(),
        params=dict(knobs),
        distributions=dict(space),
        user_attrs=dict(about or {}),
        system_attrs={},
        intermediate_values={},
    )


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
