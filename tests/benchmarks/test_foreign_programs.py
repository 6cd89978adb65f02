"""Foreign programs: the sweep of untuned shapes, the choice of items, and how an item ends."""

import sys
from pathlib import Path

import foreign_programs
import pytest

from kerneltune import ops, sweep_file


def test_each_operator_has_untuned_shapes() -> None:
    plan = sweep_file.load(foreign_programs.PROGRAMS / "untuned.yaml", ops.load())
    assert {entry.op for entry in plan.bench} == set(foreign_programs.UNTUNED)


def test_shares_contain_each_item_once() -> None:
    parts = [foreign_programs.arguments(["--share", f"{part}/3"]).names for part in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(foreign_programs.ITEMS)
    assert foreign_programs.arguments(["--only", "fla-kda,plain"]).names == ["plain", "fla-kda"]


@pytest.mark.parametrize("words", [["--share", "4/3"], ["--share", "0/3"], ["--only", "nosuch"]])
def test_unknown_item_or_share_exits_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        foreign_programs.arguments(words)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("code", "limit_s", "verdict"),
    [
        ("print('done')", 60.0, "passed"),
        ("import time; time.sleep(60)", 1.5, "time limit"),
        ("raise SystemExit(3)", 60.0, "failed"),
    ],
)
def test_item_ends_with_the_verdict_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, limit_s: float, verdict: str
) -> None:
    def run(item: foreign_programs.Item) -> None:
        exit_code, output = item.command("only", sys.executable, "-c", code)
        if exit_code:
            raise foreign_programs.EndedError(foreign_programs.FAILED, f"ended with {exit_code}")
        item.figures["output"] = output.splitlines()[-1]

    monkeypatch.setitem(foreign_programs.ITEMS, "made-up", run)
    row = foreign_programs.run_item("made-up", tmp_path, limit_s)
    assert row["verdict"] == verdict
    assert row.get("output") == ("done" if verdict == "passed" else None)
    assert (tmp_path / "made-up" / "only.txt").is_file()
