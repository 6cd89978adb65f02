"""Define a task, the unit of work that is searched, checked, timed and stored, and a trial, the result of a config on a task."""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from kerneltune import device
from kerneltune.cache import CacheEntry, Chooser, Match
from kerneltune.processes.programs import commit
from kerneltune.records import Status, TrialStatus
from kerneltune.spec import Case, Config, Op, TaskKey, Variant


@dataclass(frozen=True, slots=True)
class Task:
    """Describe an operator's variant on a case under a policy: the unit that is searched, checked, timed and stored.

    A task is pickled by name: another process imports the operator.
    """

    op: Op
    case: Case
    variant: Variant
    policy: str = "cold"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the function and the names by which another process finds the task."""
        names = (self.op.name, self.variant.name, self.case, self.policy)
        return _named_task, (self.op.module, self.op.origin, *names)

    @property
    def key(self) -> TaskKey:
        """Return the names of the task's parts."""
        return TaskKey(self.op.name, self.variant.name, self.case, self.policy)

    @property
    def default(self) -> Config:
        """Return the default config of the variant for the case."""
        return self.variant.default_config(self.case)

    @property
    def chooser(self) -> Chooser:
        """Return the chooser of the task's configs."""
        return Chooser.of(self.op, self.variant, self.policy)

    def config_of_call(self, gpu: str | None = None) -> Config:
        """Return the config of a call without `config=`, on this GPU or a named GPU; None for a variant without knobs."""
        if self.variant.config is None:
            return None
        return self.chooser.find(self.op.case_of_call(self.case), gpu).config

    def own_entry(self) -> Match | None:
        """Return the entry of exactly this task on this GPU model, see `Chooser.own`."""
        return self.chooser.own(self.case, device.current().slug)


def _named_task(module: str, origin: tuple[Any, ...] | None, op_name: str, variant: str, case: Case, policy: str) -> Task:
    """Find a task by name, the operator in `OP` or `OPS` of its module or of a package that holds the module.

    An operator with an origin is made anew by `operators` of its module.
    """
    for op in _operators_of(module) if origin is None else importlib.import_module(module).operators(*origin):
        if op.name == op_name:
            return Task(op, case, op.variant(variant), policy)
    raise ValueError(f"no operator {op_name} in OP or OPS of {module} or of a package that holds it")


def _operators_of(module: str) -> Iterator[Op]:
    """Yield the operators in `OP` or `OPS` of a module, then of the packages that hold the module, the innermost first."""
    while module:
        holder = importlib.import_module(module)
        yield from getattr(holder, "OPS", ())
        if hasattr(holder, "OP"):
            yield holder.OP
        module = module.rpartition(".")[0]


class Run(NamedTuple):
    """Hold a task and the config to run it with; None for a variant without knobs."""

    task: Task
    config: Config


def knobs_of(config: Config) -> dict[str, Any]:
    """Return the knobs of a config and their values; none of a variant without knobs, whose config is None."""
    return {} if config is None else {name: getattr(config, name) for name in config.__dataclass_fields__}


Knobs = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=1 << 16)
def knob_pairs(config: Config) -> Knobs:
    """Return the knobs of a config and their values as hashable pairs; empty for a variant without knobs."""
    return tuple(knobs_of(config).items())


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the result of a check: whether outputs are right, without a time.

    Attributes:
        status: `checked`, `failed` or `skipped`; `passed` for a run that was timed; `noted` for a line to read, of no record.
        reason: one line: the reason of the failure or the skip, or the number of pairs checked; may be empty if `checked`.
        config, case: the config and the case that failed, if the check has several.
        passed: the other pairs of config and case that passed, if a check of pairs failed.
    """

    status: Literal[Status, "noted"]
    reason: str = ""
    config: Config = None
    case: Case | None = None
    passed: Sequence[tuple[Config, Case]] = field(default=(), compare=False)


class CaseError(ValueError):
    """Report that a variant of a case cannot be run, because inputs or the reference are missing, for example.

    Attributes:
        status: status of the outcome.
    """

    status: ClassVar[Status] = "failed"

    @classmethod
    def of_contract(cls, place: str, field: str, text: str) -> Self:
        """Make the error of an operator's `inputs` or `reference` at a place; `is_of_contract` recognizes its text."""
        return cls(f"{place}{field}: {text}")

    @property
    def outcome(self) -> Outcome:
        """Return the outcome of the variant."""
        return Outcome(self.status, str(self))


_OF_CONTRACT = re.compile(r"(run 2: )?([^:]+:\d+: (inputs|reference)|reference): ")
"""Beginning of the text of `CaseError.of_contract`, also of a second run. `inputs: ` without a place begins other reasons."""


def is_of_contract(reason: str) -> bool:
    """Return whether the reason of a failure is an operator's `inputs` or `reference`, so that no variant is wrong."""
    return _OF_CONTRACT.match(reason) is not None


class SkippedError(CaseError):
    """Report that nothing is wrong with a case, but the memory is too small, or no call would find the L2 cold."""

    status = "skipped"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Hold the result of a config that a search tried: of its check and, if it passed, its time.

    Attributes:
        status: `passed`, with a time, or why the config has no time; never `checked`.
        time_us: median time of a call; None unless `passed`.
        reason: the error, in one line; its key in files is `detail`.
        program_registers: registers of all threads of the largest program.
        spill_bytes: spilled bytes per thread.
        shared_bytes: shared memory of the largest program.
        date: UTC time of the measurement; empty before the evaluation is stored.
        commit: commit of the source that was measured; empty before the evaluation is stored.
    """

    status: TrialStatus
    time_us: float | None = None
    reason: str = ""
    program_registers: int = field(default=0, compare=False)
    spill_bytes: int = field(default=0, compare=False)
    shared_bytes: int = field(default=0, compare=False)
    date: str = field(default="", compare=False)
    commit: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Trial:
    """Hold an evaluation with its task, config and fingerprint: the row of a trial store.

    Attributes:
        key: names of the task.
        knobs: names and values of the config.
        evaluation: status and time.
        fingerprint: driver, packages and source that the time depends on.
    """

    key: TaskKey
    knobs: Knobs
    evaluation: Evaluation
    fingerprint: Mapping[str, str] = field(default_factory=dict)


def fingerprint(variant: Variant) -> dict[str, str]:
    """Return the driver, source and packages that times of a variant depend on now, by the names of `CacheEntry.evidence`."""
    return {"driver": device.current().driver, "source_hash": variant.source_hash, **device.versions()}


def provenance(variant: Variant) -> dict[str, Any]:
    """Return the date, the commit and the fingerprint of a measurement now."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), **fingerprint(variant)}


def is_stale(variant: Variant, entry: CacheEntry) -> bool:
    """Return whether an entry was chosen with other code."""
    return bool(entry.evidence.get("source_hash") != variant.source_hash)


def is_outdated(variant: Variant, entry: CacheEntry) -> bool:
    """Return whether an entry was chosen with another driver, torch or triton than here; call it on the entry's GPU."""
    return any(entry.evidence.get(name) != value for name, value in fingerprint(variant).items() if name != "source_hash")


def runs_folder(results: Path, part: str = "") -> Path:
    """Return the folder of what runs keep beside the records, not in git; part: a device's slug, `trials` or `models`."""
    return results / "runs" / part


def trials_folder(results: Path, gpu: str) -> Path:
    """Return the folder of a GPU model's trials; `search/trials.py` imports Optuna, which a look for files does without."""
    return runs_folder(results, "trials") / gpu


def trials_file(results: Path, gpu: str, op: str) -> Path:
    """Return the file of an operator's trials on a GPU model, as in `trials_folder`."""
    return trials_folder(results, gpu) / f"{op}.log"


def gpus_with_trials(results: Path, op: str) -> set[str]:
    """Return the folder names of the GPU models that have trials of an operator."""
    pattern = trials_file(Path(), "*", op)
    return {path.relative_to(results).parts[pattern.parts.index("*")] for path in results.glob(str(pattern))}
