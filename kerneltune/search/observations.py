"""Measured times of configs on cases, one compact file per operator and GPU: what a rule is fitted to.

Measures nothing and decides nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kerneltune.files import Versioned, bad
from kerneltune.search import gzipped_table
from kerneltune.search.gzipped_table import SUFFIX, TYPES, Kind, time_text
from kerneltune.search.task import Knobs
from kerneltune.spec import MOST, Case, Op, Option

SCHEMA = 1
_FIXED = ("run", "variant", "dtype", "quant", "policy", "status", "time_us")


@dataclass(frozen=True, slots=True)
class Observation:
    """One config on one case.

    Attributes:
        run: place in the file's list of runs.
        status: `ok`, or why there is no time, as in trials.
        time_us: None where there is no time.
    """

    run: int
    variant: str
    axes: tuple[tuple[str, int], ...]
    dtype: str
    quant: str
    options: tuple[tuple[str, Option], ...]
    policy: str
    knobs: Knobs
    status: str
    time_us: float | None

    @property
    def case(self) -> Case:
        """The case, without a name."""
        return Case("", self.axes, self.dtype, self.quant, self.options)


@dataclass(frozen=True, slots=True)
class Observed:
    """The content of a file.

    Attributes:
        runs: of each run: date, commit, driver, torch, triton, source_hash.
    """

    runs: tuple[Mapping[str, str], ...] = ()
    rows: tuple[Observation, ...] = ()


class _Head(Versioned):
    """The header as it stands in a file."""

    op: str
    axes: tuple[str, ...]
    options: dict[str, Kind]
    knobs: dict[str, Kind]
    runs: tuple[dict[str, str], ...]


def path_of(op_name: str, device_slug: str, results: Path) -> Path:
    """Return the file of an operator and a GPU, there or not."""
    return results / device_slug / "observations" / f"{op_name}{SUFFIX}"


def write(path: Path, op: Op, observed: Observed) -> None:
    """Write a file; the same content gives the same bytes.

    Raises:
        ValueError: the folder cannot be written.
    """
    knobs = _kinds(row.knobs for row in observed.rows)
    options = _kinds(row.options for row in observed.rows)
    head = {"schema": SCHEMA, "op": op.name, "axes": op.axes, "options": options, "knobs": knobs}
    rows = (
        [
            row.run,
            row.variant,
            row.dtype,
            row.quant,
            row.policy,
            row.status,
            time_text(row.time_us),
            *(size for _, size in row.axes),
        ]
        + [dict(row.options)[name] for name in options]
        + [dict(row.knobs).get(name, "") for name in knobs]
        for row in observed.rows
    )
    columns = [*_FIXED, *op.axes, *options, *knobs]
    gzipped_table.write(path, head | {"runs": [dict(run) for run in observed.runs]}, columns, rows)


def _kinds(values: Iterable[Sequence[tuple[str, Any]]]) -> dict[str, str]:
    return {name: type(value).__name__ for pairs in values for name, value in pairs}


def read(path: Path, op: Op) -> Observed:
    """Return what a file holds; nothing where there is no file.

    Raises:
        ValueError: one line naming the file, the line, and what is wrong with it.
    """
    if not path.exists():
        return Observed()
    head, rows = gzipped_table.read(path, "an observation", _Head, SCHEMA, partial(_columns, op), partial(_observation, op))
    return Observed(head.runs, tuple(rows))


def _columns(op: Op, head: _Head) -> list[str]:
    """Return the columns that a header announces.

    Raises:
        ValueError: the header is of another operator, or of other axes.
    """
    for name, given, expected in (("op", head.op, op.name), ("axes", head.axes, op.axes)):
        if given != expected:
            raise bad(name, given, repr(expected))
    return [*_FIXED, *head.axes, *head.options, *head.knobs]


def _observation(op: Op, head: _Head, row: list[str]) -> Observation:
    """Read a row by the places of its cells: a knob may be called as a column is."""
    if len(row) != len(_columns(op, head)):
        raise ValueError(f"{len(row)} cells")
    cells = iter(row)
    number, variant, dtype, quant, policy, status, time = (next(cells) for _ in _FIXED)
    axes = tuple((axis, int(next(cells))) for axis in op.axes)
    options = tuple((name, TYPES[kind](next(cells))) for name, kind in head.options.items())
    knobs = tuple((name, TYPES[kind](cell)) for (name, kind), cell in zip(head.knobs.items(), cells, strict=True) if cell)
    time_us, run = float(time) if time else None, int(number)
    if (time_us is None) == (status == "ok") or not (time_us is None or 0 < time_us < MOST) or not 0 <= run < len(head.runs):
        raise ValueError(time)
    return Observation(run, variant, axes, dtype, quant, options, policy, knobs, status, time_us)


def merged(old: Observed, new: Observed) -> Observed:
    """Return both, the new runs behind the old; of a config on a case the newest time stays, of equal runs one."""
    runs = list(old.runs)
    runs += [run for run in new.runs if run not in runs]
    shifted = [replace(row, run=runs.index(new.runs[row.run])) for row in new.rows]
    rows: dict[Any, Observation] = {}
    for row in (*old.rows, *shifted):
        rows[row.variant, row.case, row.policy, row.knobs] = row
    used = sorted({row.run for row in rows.values()})
    places = {run: place for place, run in enumerate(used)}
    kept = sorted((replace(row, run=places[row.run]) for row in rows.values()), key=_order)
    return Observed(tuple(runs[run] for run in used), tuple(kept))


def _order(row: Observation) -> tuple[Any, ...]:
    return row.variant, row.policy, row.dtype, row.quant, str(row.options), row.axes, row.time_us or float("inf"), str(row.knobs)
