"""Measure several operators of a model together: each workload is an Op whose variants are built from nn.

The command line knows workloads beside the operators. A module whose name ends in `_table` declares how its
records are shown: `OPS`, the operators it is about, and `tables(records)`. May import nn and ops; the tables import neither.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from kerneltune.listing import OpSummary, listed
from kerneltune.records import Record, grouped
from kerneltune.spec import Inputs, Op
from kerneltune.table import Table

_SUFFIX = "_table"

MODULES = ("kerneltune.workloads.moe_training", "kerneltune.workloads.model_training", "kerneltune.workloads.decode")


def load() -> dict[str, Op]:
    """Return all workloads by name; imports torch and triton."""
    return {op.name: op for name in MODULES for op in operators_in(name)}


def summaries(before_import: Callable[[], None] = lambda: None) -> dict[str, OpSummary]:
    """Return the summaries of all workloads, by name; `before_import` is called before each import."""
    return listed(MODULES, operators_in, before_import)


def operators_in(name: str) -> tuple[Op, ...]:
    """Import a module and return its workloads."""
    return tuple(importlib.import_module(name).OPS)


def once(inputs: Inputs, name: str, make: Callable[[], Any]) -> Any:
    """Make an object from the inputs at a variant's first call, which is never timed, and keep it with the inputs."""
    kept = cast(dict[str, Any], inputs)
    if name not in kept:
        kept[name] = make()
    return kept[name]


OfCase = dict[str, Record]
"""The last record of each variant of a case."""


def cases_of(records: Iterable[Record], op: str) -> dict[tuple[str, str], list[OfCase]]:
    """Return the cases of an operator by policy and device."""
    places = grouped((r for r in records if r.op == op), lambda r: (r.policy, r.device))
    return {
        place: [{r.variant: r for r in case} for case in grouped(of_place, lambda r: r.key.of_case).values()]
        for place, of_place in places.items()
    }


def own_tables(records: Sequence[Record]) -> list[Table]:
    """Return the tables that workloads declare for these records; none unless these tables cover all operators of the records."""
    present = {record.op for record in records}
    tables: list[Table] = []
    covered: set[str] = set()
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name.endswith(_SUFFIX)):
        module = importlib.import_module(f"{__name__}.{name}")
        found = module.tables(records) if present & set(module.OPS) else []
        if found:
            tables += found
            covered |= set(module.OPS)
    return tables if present <= covered else []
