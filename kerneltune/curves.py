"""Training curves: what a loss was at every step under each of several recipes, kept as CSV beside the records.

A file `results/<gpu>/curves/<name>.csv` says first what it is, in lines `# field: value`, each of these once:

    # title: A small transformer            what was trained
    # loss: nats per byte                   what the numbers are
    # command: python train.py --steps 300  what wrote the file
    # device: NVIDIA H200                   where
    # torch: 2.11.0                         with which version
    # date: 2026-11-21                      when, ISO 8601
    step,bf16,fp8
    0,5.641071,5.640997

Then come a heading and a line per step, steps ascending. The first curve is the base that the others are held against.
Does not train, draw or print. Imports the standard library, files and rounding.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean

from kerneltune.files import bad, read_text, replace_text
from kerneltune.rounding import cdiv

LAST = 50
"""Steps at the end whose mean is the final loss."""
MOST_POINTS = 1000
"""Points of a curve that are drawn at most."""
_FIELDS = ("title", "loss", "command", "device", "torch", "date")
_STEP = "step"
_LARGEST = 64 << 20


@dataclass(frozen=True, slots=True)
class Final:
    """The end of a curve: the mean of its last steps, and by which fraction that is above the base's."""

    name: str
    loss: float
    difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Losses of several trainings that differ in one thing.

    Attributes:
        title, loss, command, device, torch, date: as the file says them.
        steps: ascending.
        values: name of a curve -> its loss at every step; the first is the base.

    Raises:
        ValueError: one line naming the field, its value and what is expected.
    """

    title: str
    loss: str
    command: str
    device: str
    torch: str
    date: str
    steps: tuple[int, ...]
    values: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if not value or value != " ".join(value.split()):
                raise bad(name, value, "words on one line")
        try:
            date.fromisoformat(self.date)
        except ValueError as error:
            raise bad("date", self.date, "a day, like 2026-11-21") from error

    @property
    def finals(self) -> list[Final]:
        """Curve by curve the mean of the last steps, the base's first."""
        means = {name: fmean(losses[-LAST:]) for name, losses in self.values.items()}
        base = next(iter(means.values()))
        return [Final(name, mean, mean / base - 1) for name, mean in means.items()]

    @property
    def last(self) -> int:
        """Steps whose mean is the final loss."""
        return min(LAST, len(self.steps))

    @property
    def source(self) -> str:
        """Return where the numbers come from, in one line."""
        return f"{self.device}, torch {self.torch}, {self.date}: {self.command}"


def load(path: Path) -> Curves:
    """Return the curves of a file.

    Raises:
        ValueError: one line `file:line: field: value: expected …`, also for a truncated last line, or `cannot read file: …`.
    """
    text = read_text(path, _LARGEST)
    return _parse(text, str(path))


def save(path: Path, curves: Curves) -> None:
    """Write a file as a whole or not at all, losses with six digits behind the point.

    Raises:
        ValueError: `cannot write file: …`.
    """
    lines = [f"# {name}: {getattr(curves, name)}" for name in _FIELDS]
    lines.append(",".join([_STEP, *curves.values]))
    for step, *losses in zip(curves.steps, *curves.values.values(), strict=True):
        lines.append(",".join([str(step), *(f"{loss:.6f}" for loss in losses)]))
    replace_text(path, "\n".join(lines) + "\n")


def thinned(curves: Curves) -> tuple[Curves, int]:
    """Return the curves to draw, and how many steps a point is the mean of; a point stands at the last of its steps."""
    window = cdiv(len(curves.steps), MOST_POINTS)
    if window == 1:
        return curves, 1
    starts = range(0, len(curves.steps), window)
    steps = tuple(curves.steps[start : start + window][-1] for start in starts)
    values = {name: tuple(fmean(losses[start : start + window]) for start in starts) for name, losses in curves.values.items()}
    return replace(curves, steps=steps, values=values), window


def _parse(text: str, name: str) -> Curves:
    *lines, tail = text.split("\n")
    if tail:
        raise ValueError(f"{name}:{len(lines) + 1}: {tail!r}: truncated, the last line has no end")
    fields: dict[str, str] = {}
    heading: list[str] = []
    rows: list[tuple[int, list[float]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            if heading:
                rows.append(_row(line, heading, rows[-1][0] if rows else -1))
            elif line.startswith("#"):
                fields |= _field(line, fields)
            else:
                heading = _heading(line)
        except ValueError as error:
            raise ValueError(f"{name}:{number}: {error}") from error
    for field in _FIELDS:
        if field not in fields:
            raise ValueError(f"{name}: {field}: missing: expected a line `# {field}: …` at the top")
    if not rows:
        raise ValueError(f"{name}: {_STEP}: missing: expected a heading and a line per step")
    values = {curve: tuple(losses[i] for _, losses in rows) for i, curve in enumerate(heading[1:])}
    try:
        return Curves(**fields, steps=tuple(step for step, _ in rows), values=values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _field(line: str, before: Collection[str]) -> dict[str, str]:
    """Return the field of a line `# field: value`."""
    field, _, value = (part.strip() for part in line[1:].partition(":"))
    if field not in _FIELDS or field in before:
        raise bad(field, value, f"one line each of {', '.join(_FIELDS)}")
    return {field: value}


def _heading(line: str) -> list[str]:
    names = [cell.strip() for cell in line.split(",")]
    if len(names) < 2 or names[0] != _STEP or not all(names) or len(set(names)) != len(names):
        raise bad("heading", line, f"{_STEP} and names of curves, each once")
    return names


def _row(line: str, heading: list[str], before: int) -> tuple[int, list[float]]:
    """Return the step and the losses of a line."""
    cells = line.split(",")
    if len(cells) != len(heading):
        raise bad("line", line, f"{len(heading)} cells: {','.join(heading)}")
    if not cells[0].isdecimal() or int(cells[0]) <= before:
        raise bad(_STEP, cells[0], f"a whole number above {before}")
    return int(cells[0]), [_loss(curve, cell) for curve, cell in zip(heading[1:], cells[1:], strict=True)]


def _loss(curve: str, cell: str) -> float:
    try:
        loss = float(cell)
    except ValueError:
        loss = math.nan
    if not 0 < loss < math.inf:
        raise bad(curve, cell, "a finite number above 0")
    return loss
