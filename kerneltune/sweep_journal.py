"""Rows that a sweep keeps case by case, so that an interrupted run goes on where it stopped.

A journal lies under `results/runs` and is deleted at the end of its stage. Measures nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kerneltune import device, records, sweep
from kerneltune.files import cut_partial_line
from kerneltune.measuring.compare import Run, config_values
from kerneltune.records import Key, Record
from kerneltune.spec import Case, Op


def journal_path(family: str, results: Path | None, name: str) -> Path:
    """Return the file of a stage's rows on the present device; results: the folder of the records, None for the usual one."""
    return sweep.results_root(results) / "runs" / device.current().slug / f"{family}.{name}.jsonl"


def key_of_case(op: Op, case: Case, policy: str) -> Key:
    """Return the key of the case's records."""
    return records.key_of(op.name, case.dtype, case.quant, dict(case.axes), dict(case.options), policy)


def resume(journal: Path) -> dict[tuple[Key, str], list[Record]]:
    """Load what an interrupted run left, by key and variant; cut off a line that was being written."""
    if journal.exists():
        with journal.open("r+b") as file:
            cut_partial_line(file)
    rows: dict[tuple[Key, str], list[Record]] = {}
    for record in journalled(journal):
        rows.setdefault((record.key, record.variant), []).append(record)
    return rows


def journalled(journal: Path) -> list[Record]:
    """Load the rows of a journal, except a line that was being written; none where there is no such file."""
    if not journal.exists():
        return []
    whole, end, _cut = journal.read_bytes().rpartition(b"\n")
    return records.parse(whole + end, str(journal))


def finished_rows(done: Mapping[tuple[Key, str], Sequence[Record]], runs: Sequence[Run]) -> list[Record] | None:
    """Return the rows of a case that an interrupted run left, if it left all of them for this environment and config.

    Failed rows are not among them: a row that failed in an interrupted run is measured again.
    """
    gpu = device.current()
    here = {"device": gpu.name, "driver": gpu.driver, "unit": gpu.unit, **device.versions()}
    found = []
    for task, config in runs:
        key = key_of_case(task.op, task.case, task.policy)
        wanted = {**here, "source_hash": task.variant.source_hash, "config": config_values(config)}
        kept = (row for row in done.get((key, task.variant.name), ()) if row.status != "failed")
        rows = [row for row in kept if {name: getattr(row, name) for name in wanted} == wanted]
        found += rows[-1:]
    return found if len(found) == len(runs) else None
