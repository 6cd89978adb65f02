"""Read and write measured spaces: every config of one variant on one case with its time, in one compact file.

A search is replayed on them. Measures nothing and decides nothing. A file that is read is data of anybody: its text has a largest
size, however well it is compressed, and its header a schema.
"""

import csv
import gzip
import io
import json
import keyword
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from kerneltune.device import slug
from kerneltune.files import decode, opened, replace_bytes
from kerneltune.search.task import Evaluation
from kerneltune.spec import Option

SUFFIX = ".csv.gz"
SCHEMA = 1
_COLUMNS = ("status", "time_us", "resources", "spill_bytes", "shared_bytes")
_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
}

_LARGEST = 64 << 20
"""Bytes of the text of the largest file."""
_LONGEST_LINE = 1 << 20

Knobs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpace:
    """What was measured, where, and every trial.

    Attributes:
        op, variant, case, axes, dtype, quant, options, policy: as in the config cache.
        default: the variant's default config, from which a search begins.
        device, driver, torch, triton, source_hash, commit, date: what the times depend on; of the newest trial.
        command: measures the space again.
        trials: config -> trial, in the order of the space.
    """

    op: str
    variant: str
    case: str
    axes: tuple[tuple[str, int], ...]
    dtype: str
    quant: str
    options: tuple[tuple[str, Option], ...]
    policy: str
    default: Knobs
    device: str
    driver: str
    torch: str
    triton: str
    source_hash: str
    commit: str
    date: str
    command: str
    trials: Mapping[Knobs, Evaluation]

    @property
    def feasible(self) -> dict[Knobs, float]:
        """The configs that have a time, in microseconds."""
        return {knobs: trial.time_us for knobs, trial in self.trials.items() if trial.time_us is not None}

    @property
    def file_name(self) -> str:
        """Unique among the spaces of a device, as the names of bench cases are."""
        return slug(f"{self.op} {self.variant} {self.case} {self.dtype} {self.quant} {self.policy}") + SUFFIX


_IN_FILE = {"axes": dict[str, int], "options": dict[str, Option], "default": dict[str, Option]}
_Head = msgspec.defstruct(
    "_Head",
    [
        ("schema", int),
        ("knobs", dict[str, Literal["int", "float", "str", "bool"]]),
        *((f.name, _IN_FILE.get(f.name, f.type)) for f in fields(MeasuredSpace) if f.name != "trials"),
    ],
    forbid_unknown_fields=True,
)
"""The header as it stands in a file."""


def write(folder: Path, space: MeasuredSpace) -> Path:
    """Write a space; the same space gives the same bytes.

    Raises:
        ValueError: the folder cannot be written.
    """
    head = {f.name: getattr(space, f.name) for f in fields(MeasuredSpace) if f.name != "trials"}
    head |= {name: dict(head[name]) for name in _IN_FILE}
    knobs = {name: type(value).__name__ for name, value in next(iter(space.trials))}
    text = io.StringIO()
    text.write("# " + json.dumps({"schema": SCHEMA, "knobs": knobs, **head}) + "\n")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*knobs, *_COLUMNS])
    for config, trial in space.trials.items():
        time_us = "" if trial.time_us is None else f"{trial.time_us:.6g}"
        rows.writerow(
            [*(value for _, value in config), trial.status, time_us, trial.resources, trial.spill_bytes, trial.shared_bytes]
        )
    path = folder / space.file_name
    replace_bytes(path, gzip.compress(text.getvalue().encode(), 9, mtime=0))
    return path


def read(path: Path) -> MeasuredSpace:
    """Load the space in a file.

    Raises:
        ValueError: one line naming the file, the line, and what is wrong with it.
    """
    lines = _text(path).splitlines()
    head, knobs = _head(path, lines)
    trials: dict[Knobs, Evaluation] = {}
    for number, row in _rows(path, lines):
        try:
            *config, status, time_us, resources, spill_bytes, shared_bytes = row
            typed = tuple((name, _TYPES[kind](text)) for (name, kind), text in zip(knobs.items(), config, strict=True))
            time = float(time_us) if time_us else None
            if (
                (time is None) == (status == "ok")
                or not (time is None or 0 < time < float("inf"))
                or not all(map(_is_finite, typed))
            ):
                raise ValueError(time_us)
            trials[typed] = Evaluation(status, time, "", int(resources), int(spill_bytes), int(shared_bytes))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a trial: {','.join(row)[:80]!r}") from error
    if not trials:
        raise ValueError(f"{path}:2: trials: none: expected one a line")
    return MeasuredSpace(**head, trials=trials)


def _is_finite(knob: tuple[str, Any]) -> bool:
    return not isinstance(knob[1], float) or math.isfinite(knob[1])


def _rows(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    rows = csv.reader(lines[2:])
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{path}:{rows.line_num + 2}: not a trial: {error}") from error
        yield rows.line_num + 2, row


def _text(path: Path) -> str:
    """Return the text of a file, decompressed as far as the largest size goes.

    Raises:
        ValueError: one line naming the file.
    """
    try:
        with opened(path) as file, gzip.open(file) as unpacked:
            data = unpacked.read(_LARGEST + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"cannot read {path}: not a gzipped text") from error
    if len(data) > _LARGEST:
        raise ValueError(f"cannot read {path}: more than {_LARGEST} bytes of text")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: not a gzipped text") from error


def find(given: Sequence[str], folder: Path) -> list[Path]:
    """Return the files meant by `given`: paths, or parts of the names of the spaces in `folder`; all for nothing given.

    Raises:
        ValueError: nothing has such a name.
    """
    shipped = sorted(folder.glob(f"*/spaces/*{SUFFIX}"))
    if not given:
        return shipped
    found: list[Path] = []
    for name in given:
        matching = [Path(name)] if name.endswith(SUFFIX) else [path for path in shipped if name in path.name]
        if not matching:
            known = ", ".join(path.name.removesuffix(SUFFIX) for path in shipped)
            raise ValueError(f"space: {name!r}: expected a file, or a part of one of {known or '(none found)'}")
        found += [path for path in matching if path not in found]
    return found


def _head(path: Path, lines: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    first = lines[0] if lines else ""
    if not first.startswith("# {") or len(first) > _LONGEST_LINE:
        raise ValueError(f"{path}:1: header: not that of a measured space")
    try:
        head: Any = decode(first.removeprefix("# "), _Head)
    except ValueError as error:
        raise ValueError(f"{path}:1: header: {error}") from error
    if head.schema != SCHEMA:
        raise ValueError(f"{path}:1: schema: {head.schema!r}: expected {SCHEMA}: written by another version of kerneltune")
    knobs: dict[str, str] = dict(head.knobs)
    for name in knobs:  # fields of a class in a replay
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise ValueError(f"{path}:1: knobs: {name[:80]!r}: expected the name of a knob")
    if head.default.keys() != knobs.keys():
        raise ValueError(f"{path}:1: default: {', '.join(head.default)[:80]!r}: expected a value of {', '.join(knobs)[:200]}")
    expected = ",".join([*knobs, *_COLUMNS])
    if len(lines) < 2 or lines[1] != expected:
        raise ValueError(f"{path}:2: columns: {(lines[1] if len(lines) > 1 else '')[:80]!r}: expected {expected[:1000]}")
    values = msgspec.structs.asdict(head)
    values |= {name: tuple(values[name].items()) for name in _IN_FILE}
    return {name: value for name, value in values.items() if name not in ("schema", "knobs")}, knobs
