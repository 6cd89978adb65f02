"""Read and write the trials of an operator on a GPU that are kept in git: `results/<gpu>/trials/<op>.csv.gz`.

A file is a gzipped text of blocks, the newest last. A block holds the trials of a variant from a single run: a JSON header
behind `# `, a line of column names, and a CSV row per trial. New trials follow the old trials. Because anybody may have
written a file, the size of its text is limited and its headers have a schema.
"""

import csv
import gzip
import io
import json
import keyword
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kerneltune.device import slug
from kerneltune.files import bad, decode_versioned, locked, opened, replace_bytes
from kerneltune.search.task import Evaluation, Knobs, Task, knob_pairs
from kerneltune.spec import MOST, Case, Config, Option

SCHEMA = 2
SUFFIX = ".csv.gz"
Kind = Literal["int", "float", "str", "bool"]
"""The type of a column that an operator defines."""
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
}
_FIXED = ("dtype", "quant", "status", "time_us", "resources", "spill_bytes", "shared_bytes", "case")
_LARGEST = 64 << 20
"""Bytes of the text of the largest file."""
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """The run that measured a block.

    Attributes:
        op, variant, policy: the task of every trial, except for its case.
        device: name of the GPU.
        driver, torch, triton, source_hash: versions of the software that the times depend on.
        commit, date: source and time of the run. A whole space has the date of its newest trial.
        command: command that measures a whole space again; empty for other blocks.
    """

    op: str
    variant: str
    policy: str
    device: str
    driver: str
    torch: str
    triton: str
    source_hash: str
    commit: str
    date: str
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBlock(BlockRun):
    """The trials of a variant from a single run.

    Attributes:
        rows: (case, knobs, evaluation) of every trial, in the order in which a file keeps them.
        default: default config of a case whose whole space was measured; empty for other blocks.
    """

    rows: tuple[tuple[Case, Knobs, Evaluation], ...]
    default: Knobs = ()

    @property
    def case(self) -> Case:
        """The first case, which is the only case of a whole space."""
        return self.rows[0][0]

    @property
    def trials(self) -> dict[Knobs, Evaluation]:
        """The trials by config, for a whole space."""
        return {knobs: evaluation for _, knobs, evaluation in self.rows}

    @property
    def feasible(self) -> dict[Knobs, float]:
        """The time of every config that has a time, in microseconds."""
        return {knobs: trial.time_us for knobs, trial in self.trials.items() if trial.time_us is not None}

    @property
    def name(self) -> str:
        """The name of a whole space, unique on a GPU."""
        return slug(f"{self.op} {self.variant} {self.case.name} {self.case.dtype} {self.case.quant} {self.policy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head(BlockRun):
    """The header of a block: its run, and the columns of its rows."""

    schema: int
    axes: tuple[str, ...]
    options: dict[str, Kind]
    knobs: dict[str, Kind]
    default: dict[str, Option]


_OF_RUN = tuple(field.name for field in fields(BlockRun))


def block_of(task: Task, trials: Mapping[Config, Evaluation], **about: Any) -> TrialBlock:
    """Return the trials of a task as a block; `about` has the fields of the run, and of a whole space."""
    rows = tuple((task.case, knob_pairs(config), trial) for config, trial in trials.items())
    return TrialBlock(op=task.op.name, variant=task.variant.name, policy=task.policy, rows=rows, **about)


def table_path(results: Path, gpu: str, op: str) -> Path:
    """Return the file of an operator and a GPU, whether it exists or not."""
    return results / gpu / "trials" / f"{op}{SUFFIX}"


def add(path: Path, block: TrialBlock) -> None:
    """Add the rows of a block that a file does not have yet; a whole space is added whole.

    If the last block of the file is from the same run, the rows extend that block.
    """
    with locked(path):
        blocks = read(path)
        known = {tuple(_cells(row)) for one in blocks if _software(one) == _software(block) for row in one.rows}
        rows = tuple(row for row in block.rows if tuple(_cells(row)) not in known)
        if not rows:
            return
        added = block if block.default else replace(block, rows=rows)
        if blocks and replace(blocks[-1], rows=()) == replace(added, rows=()):
            added = replace(added, rows=blocks.pop().rows + added.rows)
        write(path, [*blocks, added])


def _software(block: TrialBlock) -> TrialBlock:
    """Return a block without rows, commit and date."""
    return replace(block, rows=(), commit="", date="")


def write(path: Path, blocks: Sequence[TrialBlock]) -> None:
    """Write a file; equal blocks give equal bytes."""
    text = io.StringIO()
    for block in blocks:
        case, knobs, _ = block.rows[0]
        head: dict[str, Any] = {"schema": SCHEMA, **{name: getattr(block, name) for name in _OF_RUN}}
        head |= {"axes": [axis for axis, _ in case.axes], "options": _kinds(case.options), "knobs": _kinds(knobs)}
        text.write(f"# {json.dumps(head | {'default': dict(block.default)})}\n")
        columns = [*_FIXED, *head["axes"], *head["options"], *head["knobs"]]
        csv.writer(text, lineterminator="\n").writerows([columns, *map(_cells, block.rows)])
    replace_bytes(path, gzip.compress(text.getvalue().encode(), 9, mtime=0))


def _kinds(values: Sequence[tuple[str, Any]]) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in values}


def _cells(row: tuple[Case, Knobs, Evaluation]) -> list[Any]:
    case, knobs, trial = row
    time = "" if trial.time_us is None else f"{trial.time_us:.6g}"
    fixed = [case.dtype, case.quant, trial.status, time, trial.resources, trial.spill_bytes, trial.shared_bytes, case.name]
    return fixed + [value for pairs in (case.axes, case.options, knobs) for _, value in pairs]


def read(path: Path) -> list[TrialBlock]:
    """Return the blocks of a file; an empty list without a file."""
    if not path.exists():
        return []
    lines = _text(path).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("# {")]
    if starts[:1] != [0]:
        raise ValueError(f"{path}:1: header: {''.join(lines[:1])[:80]!r}: expected a JSON object behind `# `")
    return [_block(path, start, lines[start:end]) for start, end in pairwise([*starts, len(lines)])]


def _block(path: Path, start: int, lines: Sequence[str]) -> TrialBlock:
    """Return the block of some lines, which begin behind `start` lines of the file."""
    try:
        if len(lines[0]) > _LONGEST_LINE:
            raise ValueError(f"more than {_LONGEST_LINE} characters")
        head = decode_versioned(lines[0].removeprefix("# "), _Head, SCHEMA, op=path.name.removesuffix(SUFFIX))
        _check(head)
    except ValueError as error:
        raise ValueError(f"{path}:{start + 1}: header: {error}") from error
    expected = ",".join([*_FIXED, *head.axes, *head.options, *head.knobs])
    if lines[1:2] != [expected]:
        raise ValueError(f"{path}:{start + 2}: columns: {''.join(lines[1:2])[:80]!r}: expected {expected[:1000]}")
    rows = tuple(_rows(path, start + 2, lines[2:], head))
    if not rows:
        raise ValueError(f"{path}:{start + 2}: trials: none: expected a trial per line")
    of_block = {name: getattr(head, name) for name in _OF_RUN}
    return TrialBlock(**of_block, rows=rows, default=tuple(head.default.items()))


def _check(head: _Head) -> None:
    """Raise ValueError where a knob has an impossible name or the default has other knobs than the trials."""
    for name in head.knobs:  # a replay makes a class with fields of these names
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise bad("knobs", name, "the name of a knob")
    if head.default and head.default.keys() != head.knobs.keys():
        raise bad("default", ", ".join(head.default), f"a value of {', '.join(head.knobs)[:200]}")


def _rows(path: Path, start: int, lines: Sequence[str], head: _Head) -> Iterator[tuple[Case, Knobs, Evaluation]]:
    kinds = [*((axis, "int") for axis in head.axes), *head.options.items(), *head.knobs.items()]
    axes, options = len(head.axes), len(head.options)
    reader = csv.reader(lines)
    cells: list[str] = []
    try:
        for cells in reader:
            dtype, quant, status, time, resources, spilled, shared, name, *others = cells
            values = tuple((column, _PARSERS[kind](cell)) for (column, kind), cell in zip(kinds, others, strict=True))
            case = Case(name, values[:axes], dtype, quant, values[axes : axes + options])
            time_us = float(time) if time else None
            if (time_us is None) == (status == "ok") or not _is_sound(time_us, values):
                raise ValueError(time)
            trial = Evaluation(status, time_us, "", int(resources), int(spilled), int(shared), head.date, head.commit)
            yield case, values[axes + options :], trial
    except csv.Error as error:
        raise ValueError(f"{path}:{start + reader.line_num}: not a trial: {error}") from error
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}:{start + reader.line_num}: not a trial: {','.join(cells)[:80]!r}") from error


def _is_sound(time_us: float | None, values: Sequence[tuple[str, Any]]) -> bool:
    """Return whether a time is above 0 and finite, and every value is finite."""
    is_time = time_us is None or 0 < time_us < MOST
    return is_time and all(not isinstance(value, float) or math.isfinite(value) for _, value in values)


def _text(path: Path) -> str:
    """Return the text of a file, decompressed up to the size limit."""
    try:
        with opened(path) as file, gzip.open(file) as unpacked:
            data = unpacked.read(_LARGEST + 1)
        if len(data) <= _LARGEST:
            return data.decode()
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: not a gzipped text") from error
    raise ValueError(f"cannot read {path}: more than {_LARGEST} bytes of text")


def whole_spaces(results: Path) -> list[TrialBlock]:
    """Return the newest measurement of every whole space in a folder of results."""
    blocks = (block for path in sorted(results.glob(f"*/trials/*{SUFFIX}")) for block in read(path) if block.default)
    return list({(block.device, block.name): block for block in blocks}.values())
