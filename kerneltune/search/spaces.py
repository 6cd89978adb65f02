"""Read and write measured spaces: every config of one variant on one case with its time, in one compact file.

A search is replayed on them. Measures nothing and decides nothing.
"""

import keyword
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from kerneltune.device import slug
from kerneltune.files import Versioned, bad
from kerneltune.search import gzipped_table
from kerneltune.search.gzipped_table import SUFFIX as SUFFIX
from kerneltune.search.gzipped_table import TYPES, Kind, time_text
from kerneltune.search.task import Evaluation, Knobs
from kerneltune.spec import Option

SCHEMA = 1
_COLUMNS = ("status", "time_us", "resources", "spill_bytes", "shared_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpace:
    """A measured space: what its times depend on, and every trial.

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
_Head: Any = msgspec.defstruct(
    "_Head",
    [("knobs", dict[str, Kind])] + [(f.name, _IN_FILE.get(f.name, f.type)) for f in fields(MeasuredSpace) if f.name != "trials"],
    bases=(Versioned,),
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
    rows = (
        [
            *(value for _, value in config),
            trial.status,
            time_text(trial.time_us),
            *(getattr(trial, name) for name in _COLUMNS[2:]),
        ]
        for config, trial in space.trials.items()
    )
    path = folder / space.file_name
    gzipped_table.write(path, {"schema": SCHEMA, "knobs": knobs, **head}, [*knobs, *_COLUMNS], rows)
    return path


def read(path: Path) -> MeasuredSpace:
    """Load the space in a file.

    Raises:
        ValueError: one line naming the file, the line, and what is wrong with it.
    """
    head, trials = gzipped_table.read(path, "a trial", _Head, SCHEMA, _columns, _trial)
    if not trials:
        raise ValueError(f"{path}:2: trials: none: expected one a line")
    values = {name: value for name, value in msgspec.structs.asdict(head).items() if name not in ("schema", "knobs")}
    values |= {name: tuple(values[name].items()) for name in _IN_FILE}
    return MeasuredSpace(**values, trials=dict(trials))


def _columns(head: Any) -> list[str]:
    """Return the columns that a header announces.

    Raises:
        ValueError: a knob of an impossible name, or a default with other knobs.
    """
    for name in head.knobs:  # fields of a class in a replay
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise bad("knobs", name, "the name of a knob")
    if head.default.keys() != head.knobs.keys():
        raise bad("default", ", ".join(head.default), f"a value of {', '.join(head.knobs)[:200]}")
    return [*head.knobs, *_COLUMNS]


def _trial(head: Any, cells: list[str]) -> tuple[Knobs, Evaluation]:
    *config, status, time_us, resources, spill_bytes, shared_bytes = cells
    typed = tuple((name, TYPES[kind](text)) for (name, kind), text in zip(head.knobs.items(), config, strict=True))
    time = float(time_us) if time_us else None
    is_time = time is None or 0 < time < float("inf")
    if (time is None) == (status == "ok") or not is_time or not all(map(_is_finite, typed)):
        raise ValueError(time_us)
    return typed, Evaluation(status, time, "", int(resources), int(spill_bytes), int(shared_bytes))


def _is_finite(knob: tuple[str, Any]) -> bool:
    return not isinstance(knob[1], float) or math.isfinite(knob[1])


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
