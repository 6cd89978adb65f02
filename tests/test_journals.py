"""Rows that an interrupted run has left in a journal."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kerneltune import ops, records
from kerneltune.journals import Journal
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


StillGood = Callable[..., list[Record] | None]


@pytest.fixture
def still_good(tmp_path: Path) -> StillGood:
    """Give a function that returns the finished rows of a journal that has these rows."""

    def finished(rows: list[Record], policy: str = "cold") -> list[Record] | None:
        path = tmp_path / "journal.jsonl"
        path.unlink(missing_ok=True)
        Journal(path).add(rows)
        return Journal(path).finished([Run(replace(task, policy=policy), config) for task, config in RUNS])

    return finished


def test_still_good_of_a_complete_case_returns_rows_in_the_order_of_the_variants(still_good: StillGood) -> None:
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
def test_still_good_of_a_case_without_a_row_of_this_source_is_none(still_good: StillGood, changes: dict[str, Any]) -> None:
    assert still_good([row("baseline"), row("optimized", **changes)]) is None
    assert still_good([row("baseline")]) is still_good([]) is None


def test_journalled_skips_a_truncated_last_row(tmp_path: Path) -> None:
    journal = tmp_path / "runs" / "rmsnorm.journal.jsonl"
    assert Journal(journal).rows == []
    rows = [row("baseline"), row("optimized")]
    records.append(journal, rows)
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[:100])
    assert Journal(journal).rows == rows
    assert journal.read_bytes() == whole + whole[:100]


def test_journalled_of_an_unreadable_path_raises_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^cannot read {tmp_path}: Is a directory$"):
        Journal(tmp_path)


def test_still_good_of_rows_of_another_policy_is_none(still_good: StillGood) -> None:
    rows = [row("baseline"), row("optimized")]
    assert still_good(rows, "hot") is None
    assert still_good(rows) == rows
