"""Keep the rows that a run has checked or measured, so that the run after an interrupt continues behind them."""

from collections.abc import Sequence
from pathlib import Path

from kerneltune import device, records
from kerneltune.files import read_bytes
from kerneltune.records import Record
from kerneltune.task import Run, fingerprint, knobs_of


class Journal:
    """Hold the rows that earlier runs have left in a file, and append rows of this run; without a path, keep none.

    Attributes:
        rows: the rows that the file had when the journal was made, except a line that was being written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows = _load(path) if path and path.exists() else []
        self._by_key = records.grouped(self.rows, lambda record: record.key)

    def add(self, rows: Sequence[Record]) -> None:
        """Append rows to the file."""
        if self._path:
            records.append(self._path, rows)

    def finished(self, runs: Sequence[Run]) -> list[Record] | None:
        """Return a row of the file for each run of a case; None if the file lacks a row of any of these runs.

        A row counts if it has the config of the run and was made in this environment. Failed rows do not count: a row that failed
        in an interrupted run is measured again.
        """
        gpu = device.current()
        finished = []
        for task, config in runs:
            fields = {"device": gpu.name, "unit": gpu.unit, "config": knobs_of(config) or None, **fingerprint(task.variant)}
            rows = [row for row in self._by_key.get(task.key, ()) if row.status != "failed"]
            finished += [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())][-1:]
        return finished if len(finished) == len(runs) else None


def _load(path: Path) -> list[Record]:
    whole, end, _cut = read_bytes(path).rpartition(b"\n")
    return records.parse((whole + end).splitlines(keepends=True), str(path), None)
