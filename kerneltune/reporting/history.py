"""Follow the records of a file over the revisions of a repository: a trend per row, change points, and their causes.

Runs git; judges no revision and measures nothing.
"""

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kerneltune.records import Record, newest, parse, row_of

NOISE = "noise"
_LEAST_CHANGE = 0.03
"""A change of less is no change point, as in the gate's margin."""


@dataclass(frozen=True, slots=True)
class Revision:
    """The records of a file in one revision: hash and day of the commit."""

    commit: str
    day: str
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of a row, and the first revision that holds it."""

    revision: Revision
    record: Record


@dataclass(frozen=True, slots=True)
class Change:
    """A change point.

    Attributes:
        before, after: the measurements on both sides.
        ratio: new time over old time, minus 1.
        causes: what differs between them: code, config, compiler, GPU serial; `noise` where nothing does.
    """

    before: Point
    after: Point
    ratio: float
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trend:
    """The measurements of a row, oldest first, and where its time changed."""

    label: str
    variant: str
    points: tuple[Point, ...]
    changes: tuple[Change, ...]

    @property
    def total(self) -> float:
        """The last time over the first, minus 1."""
        return _us(self.points[-1].record) / _us(self.points[0].record) - 1


def revisions(path: Path, most: int) -> tuple[list[Revision], list[str]]:
    """Return the last `most` revisions of a file, oldest first, and a line for each whose records cannot be read.

    Raises:
        ValueError: no git, no repository, or no revision has the file.
    """
    folder, name = path.absolute().parent, path.name
    try:
        log = git(folder, "log", f"--max-count={most}", "--format=%H%x09%cs", "--", f"./{name}").decode().splitlines()
    except ValueError as error:
        raise ValueError(f"cannot read {folder}: {error}") from error
    found: list[Revision] = []
    broken: list[str] = []
    for commit, day in (line.split("\t") for line in reversed(log)):
        try:
            rows = parse(git(folder, "cat-file", "blob", f"{commit}:./{name}"), f"{commit[:9]}:{name}")
        except ValueError as error:
            broken.append(str(error))
            continue
        found.append(Revision(commit[:9], day, tuple(rows)))
    if not found:
        raise ValueError(f"{path}: no revision has records of it{f': {broken[0]}' if broken else ''}")
    return found, broken


def trends(found: Iterable[Revision]) -> list[Trend]:
    """Return a trend per row that is timed in some revision, in the order of their first."""
    points: dict[object, list[Point]] = {}
    for revision in found:
        for record in newest(revision.records):
            if record.status != "passed":
                continue
            row = points.setdefault(row_of(record), [])
            if not row or _measurement(row[-1].record) != _measurement(record):
                row.append(Point(revision, record))
    return [_trend(row) for row in points.values()]


def causes(before: Record, after: Record) -> tuple[str, ...]:
    """Return the classes of what differs between two measurements of a row; `noise` where nothing does."""
    differing = {
        "code": before.source_hash != after.source_hash,
        "config": before.config != after.config,
        "compiler": (before.torch, before.triton, before.driver) != (after.torch, after.triton, after.driver),
        "GPU serial": before.unit != after.unit and bool(before.unit and after.unit),
    }
    return tuple(name for name, differs in differing.items() if differs) or (NOISE,)


def _trend(points: Sequence[Point]) -> Trend:
    last = points[-1].record
    changes = [change for before, after in pairwise(points) if (change := _change(before, after)) is not None]
    return Trend(last.label, last.variant, tuple(points), tuple(changes))


def _change(before: Point, after: Point) -> Change | None:
    """Return the change between two measurements: beyond 3 % and either noise floor, intervals apart."""
    old, new = before.record, after.record
    ratio = _us(new) / _us(old) - 1
    apart = (new.ci_low_us or 0.0) > (old.ci_high_us or 0.0) or (new.ci_high_us or 0.0) < (old.ci_low_us or 0.0)
    if not apart or abs(ratio) <= max(_LEAST_CHANGE, old.aa_floor or 0.0, new.aa_floor or 0.0):
        return None
    return Change(before, after, ratio, causes(old, new))


def _measurement(record: Record) -> tuple[object, ...]:
    return record.date, record.time_us, record.commit, record.unit


def _us(record: Record) -> float:
    assert record.time_us is not None
    return record.time_us


def git(folder: Path, *arguments: str) -> bytes:
    """Return what git prints in a folder.

    Raises:
        ValueError: git is not installed, or what git says is wrong.
    """
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout
    except OSError as error:
        raise ValueError(f"git cannot be run: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"git says: {said[0] if said else 'nothing'}") from error
