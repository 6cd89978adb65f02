"""What the sides of a contest have found, on disk until the contest is over: one that was interrupted goes on from it.

Measures nothing. Imports msgspec, files, search, spec and tuners.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kerneltune.files import append_lines, decode, read_bytes
from kerneltune.lab.tuners import TunerResult
from kerneltune.search.task import knobs_of
from kerneltune.spec import Variant

Knobs = dict[str, Any]


class _Found(msgspec.Struct):
    """A TunerResult, its configs as knobs."""

    config: Knobs
    wall_s: float
    evaluations: int
    best: list[Knobs]
    remark: str


class _Line(msgspec.Struct):
    """Hold the result of one side; `schema` is another number in files of other versions."""

    schema: Literal[1]
    side: str
    depends_on: Knobs
    found: _Found


class ContestJournal:
    """The results of one contest's sides; those that depend on anything else than it does are not its own."""

    def __init__(self, path: Path, depends_on: Mapping[str, Any]) -> None:
        """depends_on: everything that a result is of, as JSON: case, versions, GPU, limits. Writes nothing."""
        self._path, self._depends_on = path, msgspec.json.decode(msgspec.json.encode(depends_on))

    def found(self, variant: Variant) -> dict[str, TunerResult]:
        """Load the results by the names of the sides; skip a line that a kill has cut.

        Raises:
            ValueError: the file cannot be read, or holds something else.
        """
        if not self._path.exists():
            return {}
        whole, _, _cut = read_bytes(self._path).rpartition(b"\n")
        results: dict[str, TunerResult] = {}
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                line = decode(text, _Line)
            except ValueError as error:
                raise ValueError(f"{self._path}:{number}: {error}; move the file away to start anew") from error
            if line.depends_on == self._depends_on:
                one = line.found
                best = tuple(map(variant.config_from, one.best))
                results[line.side] = TunerResult(variant.config_from(one.config), one.wall_s, one.evaluations, best, one.remark)
        return results

    def keep(self, name: str, found: TunerResult) -> None:
        """Store what a side found; it is on disk when this returns.

        Raises:
            ValueError: the file cannot be written.
        """
        best = [dict(knobs_of(config)) for config in found.best]
        result = _Found(dict(knobs_of(found.config)), found.wall_s, found.evaluations, best, found.remark)
        line = _Line(1, name, self._depends_on, result)
        append_lines(self._path, msgspec.json.encode(line) + b"\n", partial_line="cut")
