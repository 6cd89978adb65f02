"""Test that tables fit the terminal, and that a narrow terminal loses no value."""

import re
from pathlib import Path

import pytest
from asserting import every
from command_line import both, run
from doc_blocks import ROOT
from warm_python import python

from kerneltune.cli import console
from kerneltune.cli.trials import show_searches
from kerneltune.files import data_root
from kerneltune.records import append, load
from kerneltune.reporting.tables import sweep_table
from kerneltune.spec import Case
from kerneltune.task import Evaluation

FAMILIES = sorted(path.stem for path in (data_root("results") / "nvidia_h200").glob("*.jsonl"))
OURS = {"moe_training": "tensorwise", "model_training": "tensorwise_dense"}
"""The variant that is compared of workloads, which have none called `optimized`."""
COMPARISONS = [
    *(("compare", "baseline", OURS.get(family, "optimized"), "--family", family) for family in FAMILIES),
    *(("compare", "--family", family) for family in FAMILIES),
]
COMMANDS = [
    ("ops",),
    *(("ops", op) for op in ("rmsnorm_fwd", "fp8_grouped_gemm", "int4_gemm", "moe_step")),
    ("cache", "list"),
    ("cache", "check"),
    *(("cache", "show", op) for op in ("rmsnorm_fwd", "fp8_grouped_gemm", "int4_gemm")),
    ("cache", "explain", "fp8_grouped_gemm", "glm-4.5-gate-up", "--gpu", "nvidia_h200"),
]
NUMBER = re.compile(r"\d[\d.,]*\d|\d")


def printed(columns: int, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(console.console, "width", columns)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("number", "arguments"), list(enumerate(COMPARISONS)), ids=str)
def test_compare_lines_are_at_most_as_wide_as_the_terminal(
    number: int, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = (80, 120)[number % 2]
    assert max(map(len, printed(columns, monkeypatch, *arguments).splitlines())) <= columns


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_command_in_80_columns_prints_every_letter_of_wider_output(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {columns: printed(columns, monkeypatch, *arguments) for columns in (80, 120, 400)}
    assert [columns for columns, text in shown.items() if max(map(len, text.splitlines())) > columns] == []
    letters = [sorted(re.sub(r"\s", "", text)) for text in shown.values()]
    assert letters[0] == letters[1] == letters[2]


@pytest.mark.usefixtures("no_gpu")
def test_capture_and_remarks_on_it_fit_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console.console, "width", 80)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples" / "two_kernels"))
    code = "import two_kernels; two_kernels.step(4, 96); two_kernels.step(8, 96)"
    shown = [run("capture", "--out", "cap", "--", python(), "-c", code)]
    shown += [run("tune", "cap", "--dry-run"), run("adopt", "list", "cap")]
    assert [result.exit_code for result in shown] == [0, 0, 0]
    assert [line for result in shown for line in result.output.splitlines() if len(line) > 80] == []
    assert "on a GPU it tunes and times them" in " ".join(shown[0].stderr.split())


@pytest.mark.usefixtures("no_gpu")
def test_compare_in_80_columns_has_every_row_and_names_hidden_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(columns: int) -> str:
        return printed(columns, monkeypatch, "compare", "baseline", "optimized", "--family", "fp8_grouped_gemm")

    narrow, wide = shown(80), shown(400)
    assert narrow.count("x +") == wide.count("x +") > 40
    for speedup in re.findall(r"\d+\.\d\dx", narrow):
        assert speedup in wide
    assert "not shown in 80 columns: A GB/s, B GB/s" in " ".join(narrow.split())
    assert "not shown" not in wide


def test_show_table_breaks_only_words_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(columns: int) -> list[str]:
        monkeypatch.setattr(console.console, "width", columns)
        console.show_table(("name", "says"), [("rows_of_experts", "one tensorwise_cached two")])
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    assert shown(60) == ["name             says", "rows_of_experts  one tensorwise_cached two"]
    assert shown(35) == ["name             says", "rows_of_experts  one", " " * 17 + "tensorwise_cached", " " * 17 + "two"]
    assert shown(33)[2:4] == [" " * 16 + "tensorwise_cached", " " * 16 + "two"]
    assert max(map(len, shown(30))) <= 30
    assert sorted("".join(shown(30)).replace(" ", "")) == sorted("".join(shown(60)).replace(" ", ""))


@pytest.mark.parametrize("family", FAMILIES)
def test_sweep_table_of_any_width_has_every_number_and_heading(family: str) -> None:
    table = sweep_table(load(data_root("results") / "nvidia_h200" / f"{family}.jsonl"), brief=True)
    wide = set(NUMBER.findall(table.text(1000)))
    for columns in (80, 120):
        narrow = table.text(columns)
        assert max(map(len, narrow.splitlines())) <= columns
        assert set(NUMBER.findall(narrow.replace(f"not shown in {columns} columns", ""))) <= wide
        assert every(name in narrow for name in ("variant", "µs", "vs baseline"))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("columns", [80, 120])
def test_gate_table_of_any_width_has_every_regression(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (tmp_path / name for name in ("old.jsonl", "new.jsonl"))
    append(old, both(100.0, 50.123))
    append(new, both(100.0, 61.987))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(console.console, "width", columns)
    result = run("gate", "--allow-stale", old, new)
    assert result.exit_code == 1
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "50.12 → 61.99" in " ".join(result.stdout.split())


@pytest.mark.parametrize("columns", [80, 120])
def test_trials_table_of_any_width_has_its_summary(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("llama4-maverick-w13-and-w2-experts", (("M", 8192), ("N", 5120)), "bfloat16")
    monkeypatch.setattr(console.console, "width", columns)
    knobs = [{"rows_per_program": rows, "columns_per_program": 64, "warps": warps} for rows in (1, 2, 4, 8) for warps in (4, 8)]
    stored = {tuple(config.items()): Evaluation("passed", 100.125 + at) for at, config in enumerate(knobs)}
    show_searches("rmsnorm_fwd optimized bfloat16 none of all cases that were searched on this GPU", [(case, stored)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "1 case, 8 trials (8 passed)" in " ".join(" ".join(lines).split())
