"""A task: the unit of work that is searched, checked, timed and stored; found by name in other processes. Its evaluation."""

import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from kerneltune.spec import Case, Config, Op, Variant


class Place(NamedTuple):
    """A task by name. The name of its case is no part of it."""

    op: str
    variant: str
    case: Case
    policy: str

    def differs_in_sizes(self, other: "Place") -> bool:
        """Return whether another place differs in its sizes, and in nothing but sizes and policy."""
        same_sizes = replace(other.case, axes=self.case.axes)
        return self[:2] == other[:2] and self.case == same_sizes and self.case != other.case


@dataclass(frozen=True, slots=True)
class Task:
    """An operator's variant on a case under a policy: what is searched, checked, timed and stored.

    Pickled by name: another process imports the operator, and does not see the space that the variant was given here.
    """

    op: Op
    case: Case
    variant: Variant
    policy: str = "cold"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process finds the task again."""
        return _named_task, (self.op.module, self.op.name, self.variant.name, self.case, self.policy)

    @property
    def place(self) -> Place:
        """Return the task by name, as a key."""
        return Place(self.op.name, self.variant.name, self.case, self.policy)

    @property
    def label(self) -> str:
        """Name the task on one line."""
        return f"{self.op.name} {self.variant.name} {self.case.name} {self.case.dtype} {self.case.quant}"

    @property
    def identity(self) -> dict[str, Any]:
        """Return the task as JSON."""
        op, case = self.op, self.case
        names = {"op": op.name, "variant": self.variant.name, "case": case.name, "axes": dict(case.axes)}
        return {**names, "dtype": case.dtype, "quant": case.quant, "options": dict(case.options), "policy": self.policy}

    @property
    def default(self) -> Config:
        """Return the default config of the variant for the case."""
        return self.variant.default_config(self.case)


def _named_task(module: str, op_name: str, variant: str, case: Case, policy: str) -> Task:
    """Find a task by name: the operator in `OP` or `OPS` of its module or of a package that holds the module.

    Raises:
        ValueError: neither `OP` nor `OPS` of the module, or of a package that holds it, is or has the operator.
    """
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        found = importlib.import_module(".".join(parts[:length]))
        for op in (*getattr(found, "OPS", ()), getattr(found, "OP", None)):
            if op is not None and op.name == op_name:
                return Task(op, case, op.variant(variant), policy)
    raise ValueError(f"no operator {op_name} in OP or OPS of {module} or of a package that holds it")


Run = tuple[Task, Config]
"""A variant on a case, and the config that it runs with."""


def knobs_of(config: Config) -> dict[str, Any]:
    """Return the knobs of a config and their values."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def knob_pairs(config: Config) -> "Knobs":
    """Return the knobs of a config and their values as pairs, which can be a key."""
    return tuple(knobs_of(config).items())


def config_values(config: Config) -> dict[str, Any] | None:
    """Return a config as JSON; None for none."""
    return None if config is None else knobs_of(config)


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


STORES = ".log"
"""Ending of the files in which evaluations are kept."""


def store_path(folder: Path, op: str) -> Path:
    """Return the store of an operator in the folder of a GPU model."""
    return folder / f"{op}{STORES}"
