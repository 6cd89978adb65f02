"""Rows that an interrupted run has left in a journal."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from literal_records import from_json, to_json

from kerneltune import ops, records
from kerneltune.journals import finished_rows, load_journal
from kerneltune.measuring.compare import make_record
from kerneltune.records import Record
from kerneltune.spec import Case
from kerneltune.task import Outcome, Run, Task

OP = ops.load()["rmsnorm_bwd"]
CASE = Case("a", (("M", 8), ("N", 64)), "bfloat16", "none", (("zero_centered", False),))
RUNS = [Run(task, task.default) for task in (Task(OP, CASE, OP.variant(name)) for name in ("baseline", "optimized"))]


def row(variant: str, **changes: Any) -> Record:
    task = Task(OP, CASE, OP.variant(variant))
    return msgspec.structs.replace(make_record("", Run(task, task.default), Outcome("skipped", "x")), **changes)


def still_good(rows: list[Record], policy: str = "cold") -> list[Record] | None:
    """Return the finished rows, as the journal gives them back."""
    loaded = [from_json(json.dumps(json.loads(to_json(r)))) for r in rows]
    done = {r.key: [r] for r in loaded}
    return finished_rows(done, [Run(replace(task, policy=policy), config) for task, config in RUNS])


def test_still_good_of_a_complete_case_returns_rows_in_the_order_of_the_variants() -> None:
    rows = [row("optimized"), row("baseline")]
    assert still_good(rows) == [rows[1], rows[0]]
    assert still_good([*rows, row("pr593")]) == [rows[1], rows[0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"source_hash": "older"},
        {"driver": "older"},
        {"device": "another GPU"},
        {"unit": "another GPU of the model"},
        {"status": "failed"},
        {"triton": "older"},
        {"torch": "older"},
        {"config": {"rows": 4}},
        {"axes": {"M": 9, "N": 64}},
        {"dtype": "float16"},
        {"quant": "fp8"},
        {"options": {"zero_centered": True}},
        {"policy": "hot"},
        {"op": "rmsnorm_fwd"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_still_good_of_a_case_without_a_row_of_this_source_is_none(changes: dict[str, Any]) -> None:
    assert still_good([row("baseline"), row("optimized", **changes)]) is None
    assert still_good([row("baseline")]) is still_good([]) is None


def test_journalled_skips_a_truncated_last_row(tmp_path: Path) -> None:
    journal = tmp_path / "runs" / "rmsnorm.journal.jsonl"
    assert load_journal(journal) == []
    rows = [row("baseline"), row("optimized")]
    records.append(journal, rows)
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[:100])
    assert load_journal(journal) == rows
    assert journal.read_bytes() == whole + whole[:100]


def test_journalled_of_an_unreadable_path_raises_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^cannot read {tmp_path}: Is a directory$"):
        load_journal(tmp_path)


def test_still_good_of_rows_of_another_policy_is_none() -> None:
    rows = [row("baseline"), row("optimized")]
    assert still_good(rows, "hot") is None
    assert still_good(rows) == rows
