"""Measured times of configs on cases, one compact file per operator and GPU: what a rule is fitted to.

Measures nothing and decides nothing.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerneltune.files import opened, replace_bytes
from kerneltune.spec import Case, Op, Option

SUFFIX = ".csv.gz"
SCHEMA = 1
_MOST_BYTES = 256 << 20
_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
}
_FIXED = ("run", "variant", "dtype", "quant", "policy", "status", "time_us")

Knobs = tuple[tuple[str, Any], ...]


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
    text = io.StringIO()
    text.write("# " + json.dumps(head | {"runs": [dict(run) for run in observed.runs]}) + "\n")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*_FIXED, *op.axes, *options, *knobs])
    for row in observed.rows:
        time_us = "" if row.time_us is None else f"{row.time_us:.6g}"
        fixed = [row.run, row.variant, row.dtype, row.quant, row.policy, row.status, time_us]
        given = dict(row.knobs)
        values = [dict(row.options)[name] for name in options]
        rows.writerow([*fixed, *(size for _, size in row.axes), *values, *(given.get(name, "") for name in knobs)])
    replace_bytes(path, gzip.compress(text.getvalue().encode(), 9, mtime=0))


def _kinds(values: Iterable[Sequence[tuple[str, Any]]]) -> dict[str, str]:
    return {name: type(value).__name__ for pairs in values for name, value in pairs}


def read(path: Path, op: Op) -> Observed:
    """Return what a file holds; nothing where there is no file.

    Raises:
        ValueError: one line naming the file, the line, and what is wrong with it.
    """
    if not path.exists():
        return Observed()
    lines = _unpacked(path).splitlines()
    try:
        head = json.loads(lines[0].removeprefix("# "))
        if (head["schema"], head["op"], tuple(head["axes"])) != (SCHEMA, op.name, op.axes):
            raise ValueError(f"{path}:1: header: expected schema {SCHEMA} of {op.name} with the axes {', '.join(op.axes)}")
        if not set(head["options"].values()) | set(head["knobs"].values()) <= _TYPES.keys():
            raise ValueError(f"{path}:1: header: expected options and knobs of {', '.join(_TYPES)}")
        columns = ",".join([*_FIXED, *op.axes, *head["options"], *head["knobs"]])
        if lines[1] != columns:
            raise ValueError(f"{path}:2: columns: {lines[1][:80]!r}: expected {columns[:80]}")
        runs = tuple({str(name): str(text) for name, text in run.items()} for run in head["runs"])
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError, ValueError) as error:
        told = str(error)  # of an integer of more digits than Python reads it is a mere ValueError, too
        raise ValueError(told if told.startswith(f"{path}:") else f"{path}:1: header: not that of observations") from error
    rows = []
    for number, row in enumerate(csv.reader(lines[2:]), start=3):
        try:
            rows.append(_observation(row, op, head, len(runs)))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not an observation: {','.join(row)[:80]!r}") from error
    return Observed(runs, tuple(rows))


def _unpacked(path: Path) -> str:
    try:
        with opened(path) as packed, gzip.open(packed) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"{path}: file: more than {_MOST_BYTES >> 20} MiB unpacked")
        return content.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not a gzipped text'}") from error


def _observation(row: Sequence[str], op: Op, head: Mapping[str, Any], runs: int) -> Observation:
    """Read a row by the places of its cells: a knob may be called as a column is."""
    if len(row) != len(_FIXED) + len(op.axes) + len(head["options"]) + len(head["knobs"]):
        raise ValueError(f"{len(row)} cells")
    cells = iter(row)
    number, variant, dtype, quant, policy, status, time = (next(cells) for _ in _FIXED)
    axes = tuple((axis, int(next(cells))) for axis in op.axes)
    options = tuple((name, _TYPES[kind](next(cells))) for name, kind in head["options"].items())
    knobs = tuple((name, _TYPES[kind](cell)) for (name, kind), cell in zip(head["knobs"].items(), cells, strict=True) if cell)
    time_us, run = float(time) if time else None, int(number)
    if (time_us is None) == (status == "ok") or not (time_us is None or 0 < time_us < 1e15) or not 0 <= run < runs:
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
