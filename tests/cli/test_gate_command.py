"""gate: exit codes, files and annotations, baselines that are measured."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from asserting import every
from command_line import both, record, refused, run
from literal_records import NO_TIMES, entry_record, h200_entries

from kerneltune import cache, records
from kerneltune.cli import console
from kerneltune.records import Record


@pytest.mark.parametrize(
    ("new", "code", "last"),
    [
        (both(), 0, "gate: pass: no row is slower (2 rows compared, 0 faster)"),
        (both(100, 70), 1, "gate: fail: 1 regression (2 rows compared, 0 faster)"),
        (
            [record(), record(60, variant="optimized", ci_low_us=40.0, ci_high_us=70.0)],
            3,
            "gate: ambiguous: 1 ambiguous (2 rows compared, 0 faster)",
        ),
        (
            both(device="NVIDIA H100"),
            2,
            "gate: not usable: not comparable: baseline has device NVIDIA H200, new has NVIDIA H100",
        ),
    ],
)
def test_gate_exits_with_1_on_a_regression_and_0_on_a_pass(
    new: list[Record], code: int, last: str, write: Callable[..., Path]
) -> None:
    result = run("gate", "--allow-stale", write("old.jsonl", *both()), write("new.jsonl", *new))
    lines = result.stdout.splitlines()
    answer = next(i for i, line in enumerate(lines) if line.startswith("gate: "))
    assert (result.exit_code, " ".join(line.strip() for line in lines[answer:])) == (code, last)


def test_gate_of_an_empty_file_names_it(write: Callable[..., Path], tmp_path: Path) -> None:
    full, empty = write("a.jsonl", *both()), tmp_path / "empty.jsonl"
    empty.touch()
    for names in ((empty, full), (full, empty)):
        assert refused("gate", *names) == f"error: {empty}: no records"


def test_gate_of_a_missing_new_file_names_that_file(tmp_path: Path) -> None:
    assert (
        refused("gate", "main", tmp_path / "gone.jsonl") == f"error: cannot read {tmp_path}/gone.jsonl: No such file or directory"
    )


def test_gate_accepts_a_margin_and_refuses_one_outside_0_to_1(write: Callable[..., Path], tmp_path: Path) -> None:
    old, new = write("old.jsonl", *both()), write("new.jsonl", *both(100, 70))
    assert run("gate", "--allow-stale", old, new, "--margin", "0.5").exit_code == 0
    assert (
        refused("gate", old, new, "--margin", "-1") == "error: margin: -1.0: expected a fraction from 0 to below 1, such as 0.03"
    )
    assert refused("gate", old, new, "--margin", "3") == "error: margin: 3.0: expected a fraction from 0 to below 1, such as 0.03"
    assert refused("gate", old, new, "--policy", "hot") == "error: policy: 'hot': expected only with --run"
    assert refused("gate", old, new, "--processes", "2") == "error: processes: 2: expected only with --run"


@pytest.mark.parametrize("where", [".", "sweeps"])
def test_gate_of_two_files_uses_the_margin_of_the_sweep_file(
    where: str, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = write("old.jsonl", *both(family="tsoftmax"))
    files = old, write("new.jsonl", *both(100, 54.9, family="tsoftmax"))  # 9.8 % slower
    assert run("gate", "--allow-stale", *files).exit_code == 1
    sweep = tmp_path / where / "tsoftmax.yaml"
    sweep.parent.mkdir(exist_ok=True)
    sweep.write_text("family: tsoftmax\nops: [tsoftmax]\ngate: {margin: 0.10}\n")
    assert run("gate", "--allow-stale", *files).exit_code == 0
    assert run("gate", "--allow-stale", *files, "--margin", "0.03").exit_code == 1
    unnamed = write("tsoftmax.jsonl", *both(100, 54.9, family=""))  # an older record: the file's name is the family
    assert run("gate", "--allow-stale", old, unnamed).exit_code == 0
    several = write("several.jsonl", record(family="tsoftmax"), record(54.9, variant="optimized", family="rmsnorm"))
    assert run("gate", "--allow-stale", old, several).exit_code == 1
    sweep.write_text("family: tsoftmax\ngate: {margin: 3}\n")
    assert refused("gate", "--allow-stale", *files) == (
        f"error: {sweep.relative_to(tmp_path)}:2: gate.margin: 3: expected a fraction from 0 to below 1"
    )


def test_gate_of_files_without_a_common_row_prints_only_the_reason(write: Callable[..., Path]) -> None:
    result = run(
        "gate",
        "--allow-stale",
        write("old.jsonl", *both(), record(variant="liger", role="peer")),
        write("new.jsonl", *both(quant="none")),
    )
    assert (result.exit_code, " ".join(result.stdout.split())) == (
        2, "note: rows that the baseline lacks, not judged: 1 of rmsnorm_fwd baseline, 1 of rmsnorm_fwd optimized "
        "gate: not usable: nothing compared: no row of the baseline is timed in the new records",
    )  # fmt: skip


def test_gate_of_records_of_an_operator_that_is_not_loaded_fails(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", *both(op="tsoftmax"))
    assert refused("gate", path, path) == (
        f"error: {path}: op: 'tsoftmax': in the records, but not loaded here: load it by --plugin, or pass --allow-stale"
    )


def test_gate_writes_junit_markdown_and_annotations(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, step = write("old.jsonl", *both()), write("new.jsonl", *both(100, 70)), tmp_path / "step.md"
    step.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    markdown, junit = tmp_path / "out" / "gate.md", tmp_path / "gate.xml"
    result = run("gate", "--allow-stale", old, new, "--markdown", markdown, "--junit", junit, "--annotations")
    assert (result.exit_code, result.stderr) == (1, f"wrote {junit}\nwrote {markdown}\n")
    text, *commands = result.stdout.split("gate: fail: 1 regression (2 rows compared, 0 faster)\n")
    assert "-- op rmsnorm_fwd, dtype bfloat16, quant fp8\nregression te-8192x4096" in text
    assert commands[0] == "::error title=kerneltune gate::"
    assert markdown.read_text().startswith("**gate: fail: ")
    assert step.read_text() == f"before\n{markdown.read_text()}\n"
    assert 'tests="2" failures="1" errors="0" skipped="0">' in junit.read_text()
    step.write_text("")
    assert run("gate", "--allow-stale", old, new).exit_code == 1
    assert step.read_text() == ""


@pytest.mark.parametrize(("new", "code"), [(both(100, 70), 1), (both(), 2)])
def test_gate_with_an_unwritable_junit_still_reports_and_writes_other_files(
    new: list[Record], code: int, write: Callable[..., Path], tmp_path: Path
) -> None:
    markdown = tmp_path / "gate.md"
    result = run(
        "gate",
        "--allow-stale",
        write("old.jsonl", *both()),
        write("new.jsonl", *new),
        "--junit",
        tmp_path,
        "--markdown",
        markdown,
    )
    assert result.exit_code == code
    assert markdown.exists()
    assert ("gate: fail" in result.stdout, "gate: pass" in result.stdout) == (code == 1, False)
    assert result.stderr.splitlines()[0].startswith(f"error: cannot write {tmp_path}: ")


def test_gate_lines_are_at_most_as_wide_as_the_terminal(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write("old.jsonl", *both()), write("new.jsonl", *both(100, 70))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console.console, "width", 80)
    assert run("gate", "--allow-stale", old, new).stdout == (
        "verdict    case            M    N variant        µs slowdown    95 % interval\n"
        "-- op rmsnorm_fwd, dtype bfloat16, quant fp8\n"
        "regression te-8192x4096 8192 4096 optimized 50 → 70   +40.0% [+40.0%, +40.0%]\n"
        "        at least 40.0% slower, tolerated 3.0%; one process a side\n"
        "\n"
        "gate: fail: 1 regression (2 rows compared, 0 faster)\n"
    )


def test_gate_without_run_refuses_options_of_run(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", *both())
    assert refused("gate", path, path, "--save", path) == f"error: save: '{path}': expected only with --run"
    assert refused("gate", path, path, "--update") == "error: update: expected only with --run"
    assert refused("gate", path, "--run", "rmsnorm", "--processes", "0") == "error: processes: 0: expected 1 or more"
    assert refused("gate", path, "--run", "nothing").startswith("error: family: 'nothing': expected one of ")
    assert refused("gate", "HEAD", "--run", "rmsnorm", "--update") == (
        "error: baseline: 'HEAD': expected a .jsonl file where --update is given"
    )


def test_gate_of_a_selection_judges_its_rows_only(write: Callable[..., Path]) -> None:
    files = write("old.jsonl", *both()), write("new.jsonl", *both(100, 70))
    assert run("gate", "--allow-stale", *files, "--op", "rmsnorm_fwd", "--case", "te-*").exit_code == 1
    passed = run("gate", "--allow-stale", *files, "--variant", "base*")
    assert (passed.exit_code, passed.stdout) == (0, "gate: pass: no row is slower (1 row compared, 0 faster)\n")
    assert refused("gate", *files, "--variant", "fast") == "error: variant: 'fast': expected one of baseline, optimized"
    assert refused("gate", *files, "--case", "nope").startswith("error: case: 'nope': expected one of ")


def test_gate_with_markdown_to_stdout_prints_it_in_place_of_text(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("gate", "--allow-stale", write("old.jsonl", *both()), write("new.jsonl", *both(100, 70)), "--markdown", "-")
    assert (result.exit_code, result.stderr, Path("-").exists()) == (1, "", False)
    assert result.stdout.startswith("**gate: fail: 1 regression (2 rows compared, 0 faster)**\n\n| verdict | ")


def test_gate_run_without_a_gpu_fails(write: Callable[..., Path], no_gpu: None) -> None:
    needed = "error: gate --run needs a GPU: in the interpreter nothing can be timed"
    assert refused("gate", write("a.jsonl", *both()), "--run", "rmsnorm") == needed
    assert refused("gate", "HEAD", "--run", "rmsnorm") == needed
    assert refused("gate", "none.jsonl", "--run", "rmsnorm", "--update") == needed


def test_gate_run_judges_records_of_its_processes(
    write: Callable[..., Path], tmp_path: Path, an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def measured(_load: object, plan: Any, processes: int, *_more: object) -> list[Record]:
        seen.append((plan.family, plan.selection.variants, plan.options.peers, processes))
        return both(100, 70)

    monkeypatch.setattr("kerneltune.gating.run.run_processes", measured)
    old, kept = write("old.jsonl", *both(), record(variant="liger")), tmp_path / "kept.jsonl"
    result = run("gate", old, "--run", "rmsnorm", "--processes", "2", "--variant", "baseline", "--save", kept)
    assert (result.exit_code, seen) == (0, [("rmsnorm", ("baseline",), False, 2)])
    assert records.load(kept) == both(100, 70)
    baseline = tmp_path / "baseline.jsonl"
    assert run("gate", baseline, "--run", "rmsnorm", "--update").stderr == f"wrote {baseline}\n"
    assert records.load(baseline) == both(100, 70)


@pytest.mark.parametrize("option", ["--update", "--save"])
def test_gate_run_into_a_broken_file_fails_before_it_measures(
    option: str, write: Callable[..., Path], tmp_path: Path, an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows were measured first, and lost."""
    monkeypatch.setattr("kerneltune.gating.run.run_processes", lambda *_: pytest.fail("measured"))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    old = write("old.jsonl", *both())
    asked = (broken, option) if option == "--update" else (old, option, broken)
    assert refused("gate", *asked, "--run", "rmsnorm").startswith(f"error: {broken}:1: JSON: ")
    assert broken.read_text() == "{\n"


@pytest.mark.parametrize("option", ["--junit", "--markdown"])
def test_gate_run_with_an_unwritable_report_fails_before_it_measures(
    option: str, write: Callable[..., Path], tmp_path: Path, an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kerneltune.gating.run.run_processes", lambda *_: pytest.fail("measured"))
    old = write("old.jsonl", *both())
    line = refused("gate", old, "--run", "rmsnorm", option, old / "of" / "report")
    assert line == f"error: cannot write {old / 'of'}: Not a directory"


def test_gate_and_compare_of_a_broken_file_name_line_and_field(write: Callable[..., Path], tmp_path: Path) -> None:
    good, truncated, odd = write("good.jsonl", record()), write("truncated.jsonl", *both()), tmp_path / "odd.jsonl"
    truncated.write_bytes(truncated.read_bytes()[:-10])
    odd.write_text('{"op": "rmsnorm_fwd", "speed": 3}\n')
    assert refused("gate", good, truncated) == f"error: {truncated}:2: JSON: truncated, the last line has no end"
    assert refused("compare", good, truncated) == f"error: {truncated}:2: JSON: truncated, the last line has no end"
    assert refused("gate", odd, good) == f"error: {odd}:1: speed: 3: expected no field of this name"
    assert (
        refused("gate", good, tmp_path / "none.jsonl")
        == f"error: cannot read {tmp_path / 'none.jsonl'}: No such file or directory"
    )
    assert refused("gate", good, tmp_path) == f"error: cannot read {tmp_path}: Is a directory"


def test_gate_prints_escape_sequences_of_a_reason_escaped(write: Callable[..., Path]) -> None:
    failed = record(variant="optimized", status="failed", reason="\x1b]0;owned\x07 \u202etxt", **NO_TIMES)
    result = run("gate", "--allow-stale", write("old.jsonl", *both()), write("new.jsonl", record(), failed))
    assert "\\x1b]0;owned\\x07 \\u202etxt" in result.stdout
    assert not set("\x1b\x07\u202e") & set(result.output)


def test_action_passes_existing_options_of_gate_only() -> None:
    action = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())
    step = action["runs"]["steps"][-1]["run"]
    command = [line for line in step.splitlines() if line.startswith("kerneltune gate") or "kerneltune gate" in line]
    options = set(re.findall(r"--[a-z]+", step))
    assert command
    assert options <= set(re.findall(r"--[a-z]+", run("gate", "--allow-stale", "--help").stdout))
    assert every(f"inputs.{name}" in (Path(__file__).parents[2] / "action.yml").read_text() for name in action["inputs"])


def test_gate_of_records_of_other_code_fails_unless_allow_stale(write: Callable[..., Path]) -> None:
    old, new = write("old.jsonl", *both()), write("new.jsonl", *both())
    result = run("gate", old, new, "--annotations")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert "failed: rmsnorm_fwd optimized: 1 of 1 row measured with other code: te-8192x4096 bfloat16 fp8 (" in text
    assert "): measure again, or --allow-stale" in text
    assert "gate: fail: 2 variants of other code or configs (2 rows compared" in text
    assert text.count("rmsnorm_fwd optimized: 1 of 1 row measured with other code") == 2  # in the text and in an annotation
    assert run("gate", old, new, "--allow-stale").exit_code == 0
    of_here = [entry_record(entry) for entry in h200_entries()[:2]]
    assert run("gate", write("before.jsonl", *of_here), write("here.jsonl", *of_here)).exit_code == 0


@pytest.mark.parametrize("is_asked", [True, False])
def test_gate_of_bad_input_prints_an_annotation(write: Callable[..., Path], is_asked: bool) -> None:
    result = run("gate", write("old.jsonl", *both()), "no.jsonl", *["--annotations"] * is_asked)
    assert (result.exit_code, result.stdout) == (
        2, "::error title=kerneltune gate::cannot read no.jsonl: No such file or directory\n" if is_asked else "",
    )  # fmt: skip


def test_gate_of_records_of_another_config_than_the_cached_one_fails(write: Callable[..., Path], tmp_path: Path) -> None:
    entry = h200_entries()[0]
    path = write("rows.jsonl", entry_record(entry))
    slow = dataclasses.replace(entry, config=entry.config | {"warps": 8 if entry.config["warps"] != 8 else 16})
    cache.store("nvidia_h200", slow, tmp_path / "configs")
    assert run("gate", path, path).exit_code == 0
    result = run("gate", path, path, "--configs", tmp_path / "configs")
    assert result.exit_code == 1
    assert (
        f"1 of 1 row measured with another config: {entry.case.name} {entry.case.dtype} {entry.case.quant} "
        f"(warps={entry.config['warps']}, here warps={slow.config['warps']}): measure again, or --allow-stale"
    ) in " ".join(result.stdout.split())
    assert run("gate", path, path, "--configs", tmp_path / "configs", "--allow-stale").exit_code == 0


def test_gate_of_records_alone_imports_no_torch(write: Callable[..., Path]) -> None:
    paths = [str(write(name, *both())) for name in ("old.jsonl", "new.jsonl")]
    code = "import sys\nfrom kerneltune.cli import app\ntry: app()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "gate", *paths, "--allow-stale"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False")


def test_gate_reads_files_with_crlf_line_ends(write: Callable[..., Path]) -> None:
    path = write("old.jsonl", *both())
    other = path.with_name("new.jsonl")
    other.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert run("gate", path, other, "--allow-stale").exit_code == 0


@pytest.mark.parametrize("side", ["old", "new"])
def test_gate_refuses_two_rows_of_one_case_in_a_file(side: str, write: Callable[..., Path]) -> None:
    files = {"old": write("old.jsonl", *both()), "new": write("new.jsonl", *both())}
    files[side] = write(f"{side}.jsonl", *both(), record(90.0, date="2027-01-01T00:00:00+00:00"))
    assert refused("gate", files["old"], files["new"], "--allow-stale") == (
        f"error: {files[side]}:3: te-8192x4096: {record().label} baseline on NVIDIA H200: the row of line 1 again; "
        "delete one of the two lines"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "JSON: "), ('"warps": 3000', "entries[0]: "), ('"wraps": 4', "entries[0]: ")],
)
def test_gate_refuses_configs_that_calls_do_not_use(text: str, message: str, write: Callable[..., Path], tmp_path: Path) -> None:
    entry = h200_entries()[0]
    path = cache.store("nvidia_h200", entry, tmp_path / "configs")
    stored = path.read_text()
    path.write_text(text if text == "{" else re.sub('"warps": [0-9]+', text, stored))
    rows = write("rows.jsonl", entry_record(entry))
    assert refused("gate", rows, rows, "--configs", tmp_path / "configs").startswith(f"error: {path}: {message}")


def test_gate_and_cache_with_a_missing_configs_folder_fail(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"error: configs: '{tmp_path / 'none'}': no such folder"
    rows = write("rows.jsonl", *both())
    assert refused("gate", rows, rows, "--configs", tmp_path / "none") == message
    monkeypatch.setenv("KERNELTUNE_CONFIGS", str(tmp_path / "none"))
    assert refused("gate", rows, rows) == refused("cache", "list") == refused("inspect", "rmsnorm_fwd") == message


def test_gate_with_an_unwritable_report_exits_with_2_and_prints_no_pass(write: Callable[..., Path], tmp_path: Path) -> None:
    rows = write("rows.jsonl", *both())
    (tmp_path / "file").touch()
    result = run("gate", rows, rows, "--allow-stale", "--junit", tmp_path / "file" / "gate.xml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: cannot write")


def test_gate_names_the_value_of_a_margin_and_the_field_of_a_record(write: Callable[..., Path]) -> None:
    rows = write("rows.jsonl", *both())
    assert "'--margin': 'x'" in refused("gate", rows, rows, "--margin", "x")
    rows.write_text(re.sub('"gbps": ?[0-9.]+', '"gbps": null', rows.read_text()))
    assert refused("gate", rows, rows).startswith(f"error: {rows}:1: gbps: None: expected ")


def test_gate_junit_has_times_and_a_failure_type_for_stale_code(write: Callable[..., Path], tmp_path: Path) -> None:
    rows = write("rows.jsonl", *both())
    assert run("gate", rows, rows, "--junit", tmp_path / "gate.xml").exit_code == 1
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot()[0]
    assert {test.get("time") for test in suite.iter("testcase") if test.get("classname") == "rmsnorm_fwd"} == {
        f"{row.time_us / 1e6:.9f}" for row in both() if row.time_us
    }
    assert {failure.get("type") for failure in suite.iter("failure")} == {"stale"}
