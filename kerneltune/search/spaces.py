"""Measured spaces: every config of one variant on one case with its time, in one compact file, for replaying a search.

Measures nothing and decides nothing. Imports the standard library, device, files, spec and trials.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kerneltune.device import slug
from kerneltune.files import replace_bytes
from kerneltune.search.trials import Evaluation
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


def write(folder: Path, space: MeasuredSpace) -> Path:
    """Write a space; the same space gives the same bytes.

    Raises:
        ValueError: the folder cannot be written.
    """
    head = {f.name: getattr(space, f.name) for f in fields(MeasuredSpace) if f.name != "trials"}
    head |= {name: dict(head[name]) for name in ("axes", "options", "default")}
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
    """The space in a file.

    Raises:
        ValueError: one line naming the file, the line, and what is wrong with it.
    """
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not a gzipped text'}") from error
    head, knobs = _head(path, lines)
    trials: dict[Knobs, Evaluation] = {}
    for number, row in enumerate(csv.reader(lines[2:]), start=3):
        try:
            *config, status, time_us, resources, spill_bytes, shared_bytes = row
            typed = tuple((name, _TYPES[kind](text)) for (name, kind), text in zip(knobs.items(), config, strict=True))
            time = float(time_us) if time_us else None
            if (time is None) == (status == "ok") or not (time is None or 0 < time < float("inf")):
                raise ValueError(time_us)
            trials[typed] = Evaluation(status, time, "", int(resources), int(spill_bytes), int(shared_bytes))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a trial: {','.join(row)[:80]!r}") from error
    if not trials:
        raise ValueError(f"{path}:2: trials: none: expected one a line")
    return MeasuredSpace(**head, trials=trials)


def find(given: Sequence[str], folder: Path) -> list[Path]:
    """The files meant by `given`: paths, or parts of the names of the spaces in `folder`; all of them for nothing given.

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
    try:
        head = json.loads(lines[0].removeprefix("# "))
        schema, knobs = head.pop("schema"), head.pop("knobs")
        if schema != SCHEMA:
            raise ValueError(f"{path}:1: schema: {schema!r}: expected {SCHEMA}: written by another version of kerneltune")
        wanted = {f.name for f in fields(MeasuredSpace)} - {"trials"}
        if head.keys() != wanted:
            raise ValueError(f"{path}:1: header: {sorted(head.keys() ^ wanted)}: missing or unknown")
        if lines[1].split(",") != [*knobs, *_COLUMNS] or not set(knobs.values()) <= _TYPES.keys():
            raise ValueError(f"{path}:2: columns: {lines[1][:80]!r}: expected {','.join([*knobs, *_COLUMNS])}")
        return {**head, **{name: tuple(head[name].items()) for name in ("axes", "options", "default")}}, knobs
    except (json.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path}:1: header: not that of a measured space") from error
