"""Records over git revisions: trends, change points and their causes."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gate_rows import record
from typer.testing import CliRunner

from kerneltune.cli import app
from kerneltune.records import Record, to_json
from kerneltune.reporting.history import causes, revisions, trends
from kerneltune.reporting.trends import spark, trend_page, trend_table


@pytest.fixture
def commit(tmp_path: Path) -> Callable[..., Path]:
    """Commit records as the file's next revision and return the file."""
    path = tmp_path / "results" / "rows.jsonl"
    path.parent.mkdir()

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    git("init", "-q")

    def commit(*rows: Record, text: str | None = None) -> Path:
        path.write_text("".join(f"{to_json(row)}\n" for row in rows) if text is None else text)
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", "rows: change")
        return path

    return commit


def at(day: int, us: float, **changes: Any) -> Record:
    return record(us, date=f"2026-11-{day:02}T06:00:00Z", **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("noise",)),
        ({"source_hash": "1"}, ("code",)),
        ({"config": {"block": 8}}, ("config",)),
        ({"triton": "3.7"}, ("compiler",)),
        ({"driver": "580"}, ("compiler",)),
        ({"unit": "b"}, ("GPU serial",)),
        ({"source_hash": "1", "unit": "b"}, ("code", "GPU serial")),
    ],
)
def test_causes_are_what_differs(changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert causes(record(unit="a"), record(**{"unit": "a", **changes})) == expected
    assert causes(record(), record(unit="b")) == ("noise",)  # the first does not say which GPU


def test_trends_of_revisions_have_change_points_and_causes(commit: Callable[..., Path]) -> None:
    other = record(quant="none")
    commit(at(1, 100.0), other)
    commit(at(2, 101.0), other)
    commit(text='{"broken": 1}\n')
    path = commit(at(3, 80.0, source_hash="1"), other)
    found, broken = revisions(path, 100)
    assert len(found) == 3
    assert len(broken) == 1
    assert "broken: 1: expected no field of this name" in broken[0]
    changed, same = trends(found)
    assert [point.record.time_us for point in changed.points] == [100.0, 101.0, 80.0]
    (change,) = changed.changes
    assert (round(change.ratio, 3), change.causes, change.after.revision.commit) == (-0.208, ("code",), found[-1].commit)
    assert (len(same.points), same.changes, round(changed.total, 6)) == (1, (), -0.2)
    assert spark(changed) == "██▁"
    assert spark(same) == "▁"
    table = trend_table([changed, same])
    assert len(table.rows) == 1
    assert len(trend_table([changed, same], every=True).rows) == 2
    assert table.head == (
        "2 rows, 1 measured more than once, 1 changed by more than 3 % and their noise",
        "change points by cause: code 1",
    )
    assert max(map(len, table.text(80).splitlines())) <= 80
    headings = [line.split() for columns in range(50, 120) for line in table.text(columns).splitlines() if line.startswith("row")]
    assert {"commit" in words for words in headings} == {True, False}
    assert all("commit" in words for words in headings if "first" in words or "at" in words)
    page = trend_page([changed, same], "<rows>")
    assert "&lt;rows&gt;" in page
    assert page.count("<svg") == 2
    assert "-20.8%: code" in page
    assert "<script" not in page


def test_a_change_within_the_noise_is_none(commit: Callable[..., Path]) -> None:
    commit(at(1, 100.0))
    commit(at(2, 102.0))
    commit(at(3, 110.0, aa_floor=0.2))
    path = commit(at(4, 120.0, spread=20.0))
    assert trends(revisions(path, 100)[0])[0].changes == ()


def test_a_file_without_revisions_is_one_line(tmp_path: Path, commit: Callable[..., Path]) -> None:
    path = commit(record())
    with pytest.raises(ValueError, match=r"none\.jsonl: no revision has records of it$"):
        revisions(path.with_name("none.jsonl"), 3)
    with pytest.raises(ValueError, match=r"^cannot read "):
        revisions(tmp_path / "no folder" / "a.jsonl", 3)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--op", "nothing"), "op: 'nothing': expected one of rmsnorm_fwd"),
        (("--variant", "old*"), "variant: 'old*': expected one of optimized"),
        (("--case", "nope"), "case: 'nope': no record of such a case"),
    ],
)
def test_history_of_a_name_that_no_row_has_names_the_option(
    commit: Callable[..., Path], option: tuple[str, str], said: str
) -> None:
    path = commit(record(op="rmsnorm_fwd", variant="optimized"))
    result = CliRunner().invoke(app, ["history", str(path), *option])
    assert (result.exit_code, result.stderr) == (2, f"error: {said}\n")
