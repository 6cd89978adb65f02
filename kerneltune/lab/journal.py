"""What the sides of a contest have found, on disk until the contest is over: one that was interrupted goes on from it.

Measures nothing. Imports search, spec and tuners.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kerneltune.files import append_lines
from kerneltune.lab.tuners import TunerResult
from kerneltune.search.task import knobs_of
from kerneltune.spec import Variant

SCHEMA = 1


class ContestJournal:
    """The results of one contest's sides; those that depend on anything else than it does are not its own."""

    def __init__(self, path: Path, depends_on: Mapping[str, Any]) -> None:
        """depends_on: everything that a result is of, as JSON: case, versions, GPU, limits. Writes nothing."""
        self._path, self._depends_on = path, json.loads(json.dumps(depends_on))

    def found(self, variant: Variant) -> dict[str, TunerResult]:
        """Load the results by the names of the sides; skip a line that a kill has cut.

        Raises:
            ValueError: the file cannot be read, or holds something else.
        """
        try:
            whole, _, _cut = self._path.read_bytes().rpartition(b"\n")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ValueError(f"cannot read {self._path}: {error.strerror}") from error
        rows = [self._row(number, line) for number, line in enumerate(whole.decode(errors="replace").splitlines(), start=1)]
        own = [row for row in rows if row["depends_on"] == self._depends_on]
        return {row["side"]: _result(variant, row["found"]) for row in own}

    def _row(self, number: int, line: str) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
            schema, whole = row["schema"], row.keys() >= {"side", "depends_on", "found"}
        except (json.JSONDecodeError, TypeError, KeyError):
            schema, whole = SCHEMA, False
        if schema != SCHEMA:
            raise ValueError(
                f"{self._path}:{number}: schema: {schema!r}: expected {SCHEMA}: written by another version of kerneltune; "
                "move the file away to start anew"
            )
        if not whole:
            raise ValueError(f"{self._path}:{number}: not a side's result: {line[:80]!r}; move the file away to start anew")
        return row

    def keep(self, name: str, found: TunerResult) -> None:
        """Store what a side found; it is on disk when this returns.

        Raises:
            ValueError: the file cannot be written.
        """
        result = asdict(found) | {"config": knobs_of(found.config), "best": [knobs_of(config) for config in found.best]}
        row = {"schema": SCHEMA, "side": name, "depends_on": self._depends_on, "found": result}
        append_lines(self._path, (json.dumps(row) + "\n").encode(), partial_line="cut")


def _result(variant: Variant, stored: Mapping[str, Any]) -> TunerResult:
    best = tuple(variant.config_from(knobs) for knobs in stored["best"])
    return TunerResult(variant.config_from(stored["config"]), stored["wall_s"], stored["evaluations"], best, stored["remark"])
