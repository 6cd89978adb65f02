"""Read the rows that an interrupted run has checked or measured, so that the next run continues behind them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kerneltune import device, records
from kerneltune.files import read_bytes
from kerneltune.records import Record
from kerneltune.spec import TaskKey
from kerneltune.task import Run, fingerprint, knobs_of


def finished_in(journal: Path | None) -> Callable[[Sequence[Run]], list[Record] | None]:
    """Return the function that finds the rows of a case's runs in a journal; see `finished_rows`."""
    return partial(finished_rows, records.grouped(load_journal(journal) if journal else (), lambda record: record.key))


def load_journal(journal: Path) -> list[Record]:
    """Load the rows of a journal, except a line that was being written; an empty list without a file."""
    if not journal.exists():
        return []
    whole, end, _cut = read_bytes(journal).rpartition(b"\n")
    return records.parse((whole + end).splitlines(keepends=True), str(journal), None)


def finished_rows(of_key: Mapping[TaskKey, Sequence[Record]], runs: Sequence[Run]) -> list[Record] | None:
    """Return the rows of a case from an interrupted run, if it has all rows for this environment and these configs; else None.

    Failed rows do not count: a row that failed in an interrupted run is measured again.
    """
    gpu = device.current()
    finished = []
    for task, config in runs:
        wanted = {"device": gpu.name, "unit": gpu.unit, "config": knobs_of(config) or None, **fingerprint(task.variant)}
        kept = (row for row in of_key.get(task.key, ()) if row.status != "failed")
        rows = [row for row in kept if {name: getattr(row, name) for name in wanted} == wanted]
        finished += rows[-1:]
    return finished if len(finished) == len(runs) else None
