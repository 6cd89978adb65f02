"""The commands of adopt: printed tables, and a line of error for bad input."""

import dataclasses
import itertools
import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from adopted import author_configs, captured, example, kernel_of, of_kernel, run_python, write_table
from command_line import run
from msgspec import structs
from warm_python import python

from kerneltune.adopt import startup
from kerneltune.adopt.folder import CLASSES, LAUNCHES, META
from kerneltune.adopt.operators import TUNED, case_of, operators, operators_of, write_capture_sweep
from kerneltune.adopt.overview import read_capture
from kerneltune.cache import CacheEntry, store
from kerneltune.cli import console
from kerneltune.cli.captures import time_cells
from kerneltune.records import Record, append
from kerneltune.search.trials import TrialStore
from kerneltune.sweep_file import load
from kerneltune.task import Evaluation, Task, trials_file


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave lines whole."""
    monkeypatch.setattr(console.console, "width", 400)


def test_list_prints_kernels_and_sizes_that_their_keys_omit(tmp_path: Path) -> None:
    captured(tmp_path, (4, 96), (8, 96))
    lines = run("adopt", "list", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["kernel", "classes", "launches", "bytes", "%", "configs", "key", "key", "leaves", "out"]
    sums = next(line.split() for line in lines if line.startswith("row_sum"))
    assert [*sums[:3], *sums[4:7]] == ["row_sum", "2", "2", "6", "N", "M*"]


def test_list_of_timed_launches_shows_shares_of_the_time(tmp_path: Path) -> None:
    captured(tmp_path, (4, 96))
    for notes in (tmp_path / "launches").glob("*.json"):
        stored = json.loads(notes.read_text())
        stored["launches"] = {digest: [count[0], 10.0] for digest, count in stored["launches"].items()}
        notes.write_text(json.dumps(stored))
    head, *rows = (re.split("  +", line.strip()) for line in run("adopt", "list", tmp_path).stdout.splitlines())
    assert [row[head.index("time %")] for row in rows] == ["50.0", "50.0"]


def test_list_names_the_modules_of_kernels_that_share_a_name(tmp_path: Path) -> None:
    (launch,) = captured(tmp_path, pattern="row_sum").classes
    other = tmp_path / CLASSES / "0123456789abcdef"
    shutil.copytree(tmp_path / CLASSES / launch.digest, other)
    stored = json.loads((other / META).read_text())
    (other / META).write_text(json.dumps(stored | {"digest": other.name, "kernel": {"module": "__main__", "name": "row_sum"}}))
    lines = run("adopt", "list", tmp_path).stdout.splitlines()
    assert {line.split()[0] for line in lines if "row_sum" in line} == {"two_kernels.row_sum", "__main__.row_sum"}


def test_export_of_a_captured_kernel_has_configs_that_autotune_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_RESULTS", str(tmp_path / "results"))  # else `--captured` sets it for later tests, too
    monkeypatch.setenv("KERNELTUNE_CONFIGS", str(tmp_path / "configs"))
    (launch,) = captured(tmp_path, pattern="row_sum").classes
    (op,) = operators(str(tmp_path))
    config = op.variant(TUNED).default(case_of(launch, op.axes))
    entry = CacheEntry(op=op.name, variant=TUNED, case=case_of(launch, op.axes), policy="cold", config=dataclasses.asdict(config))
    store("nvidia_h200", entry, tmp_path / "configs")
    export = ["--captured", tmp_path, "cache", "export", op.name, tmp_path / "out"]
    done = run(*export, "--format", "triton")
    (path,) = (tmp_path / "out").iterdir()
    assert (done.exit_code, done.stderr) == (0, f"wrote {path}\n"), done.output
    (exported,) = runpy.run_path(str(path))["configs"]()
    first = example().row_sum.configs[0]
    assert (exported.all_kwargs(), exported.maxnreg) == (first.all_kwargs(), first.maxnreg)
    refused = run(*export)
    assert (refused.exit_code, refused.stderr) == (
        2, f"error: format: 'python': {op.name} is of a capture: ship the capture's folder served instead\n"
    )  # fmt: skip


def test_process_loads_the_capture_it_is_given_and_not_that_of_its_environment(tmp_path: Path) -> None:
    names = {op.name for op in operators_of(captured(tmp_path))}
    code = "import sys; from kerneltune.cli.loading import load_ops; print(*(load_ops(sys.argv[1]).keys() - load_ops().keys()))"
    named = run_python(code, str(tmp_path), TRITON_INTERPRET="1")
    assert set(named.stdout.split()) == names, named.stderr
    unnamed = run_python(code, "", TRITON_INTERPRET="1", KERNELTUNE_CAPTURED=str(tmp_path))
    assert (unnamed.stdout, unnamed.returncode) == ("\n", 0), unnamed.stderr


def test_list_of_a_folder_that_is_no_capture_fails_with_one_line(tmp_path: Path) -> None:
    result = run("adopt", "list", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path}: no capture: expected a folder that `kerneltune capture` wrote\n"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 9}, "format: 9: expected 1"),
        ({"arguments": 3}, "arguments: 3: expected array"),
        ({"candidates": [{"config": {}, "grid": None, "is_author": True}]}, "candidates[0].config.kwargs: missing"),
        ({"candidates": [], "is_plain": True}, "candidates: []: expected"),
        ({"digest": "x"}, "digest: 'x': expected"),
    ],
)
def test_list_skips_a_damaged_class_with_one_line(tmp_path: Path, change: dict[str, object], text: str) -> None:
    captured(tmp_path, (4, 96), (4, 128), pattern="row_sum")
    path = sorted((tmp_path / CLASSES).glob(f"*/{META}"))[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    result = run("adopt", "list", tmp_path)
    assert result.exit_code == 0
    assert f"skipped: {path}: {text}" in result.stderr.replace("\n", " ")


def test_sweep_of_a_capture_names_a_damaged_class(tmp_path: Path) -> None:
    """The command named the digest that the sweep file has, not the file that cannot be read."""
    captured(tmp_path, (4, 96), (4, 128), pattern="row_sum")
    write_capture_sweep(read_capture(tmp_path))
    path = sorted((tmp_path / CLASSES).glob(f"*/{META}"))[0]
    path.write_text(path.read_text()[:100])
    operators.cache_clear()
    result = run("sweep", tmp_path, "--check-only")
    assert (result.exit_code, result.stdout) == (2, "")
    skipped, error = result.stderr.splitlines()
    assert skipped == f"skipped: {path}: JSON: input data was truncated"
    assert f"launch: '{path.parent.name}': expected one of " in error


def test_list_skips_damaged_counts_with_one_line(tmp_path: Path) -> None:
    captured(tmp_path, pattern="row_sum")
    (path,) = (tmp_path / LAUNCHES).glob("*.json")
    (path.parent / "9-0.json").write_text('{"launches": {"0123": [1, "slow"]}}')
    result = run("adopt", "list", tmp_path)
    assert result.stdout.splitlines()[1].split()[:3] == ["row_sum", "1", "1"]
    assert f"skipped: {path.parent}/9-0.json: launches[1]: expected `float | null`" in result.stderr.replace("\n", " ")


def test_lint_reports_keys_and_configs_that_never_win(tmp_path: Path) -> None:
    launches = of_kernel(captured(tmp_path, (4, 96), (8, 96)), "row_sum")
    write_table(tmp_path, kernel_of(launches, author_configs(launches[0])))
    result = run("adopt", "lint", tmp_path)
    assert result.exit_code == 1
    assert "two_kernels.row_sum: key omits sizes that differ between captured launches: M, x_ptr.0, y_ptr.0" in result.stdout
    assert "two_kernels.row_sum: 5 of 6 configs never win in 2 classes: BLOCK=64; BLOCK=128 num_warps=2" in result.stdout
    result = run("adopt", "lint", tmp_path, "--accept", "key omits sizes")
    assert (result.exit_code, "accepted: two_kernels.row_sum: key omits sizes" in result.stdout) == (1, True)
    result = run("adopt", "lint", tmp_path, "--accept", "key omits sizes", "--accept", "never win")
    assert (result.exit_code, "\nnothing else to report; no check yet: " in result.stdout) == (0, True)


def test_lint_reports_lists_that_the_program_assigns_for_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = example().row_sum
    whole = kernel.configs
    monkeypatch.setattr(kernel, "configs", whole)
    startup.capture(tmp_path)
    for block in (64, 256):
        kernel.configs = [config for config in whole if config.kwargs["BLOCK"] == block]
        kernel[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    startup.uninstall()
    report = run("adopt", "lint", tmp_path).stdout
    assert report.count("two_kernels.row_sum: 2 lists of configs for one key: triton.autotune runs later launches with") == 1


def test_lint_reports_results_that_change_with_the_config(tmp_path: Path) -> None:
    launch = captured(tmp_path, pattern="row_sum").classes[0]
    (op,) = operators(str(tmp_path))
    case, variant = case_of(launch, op.axes), op.variant(TUNED)
    store = TrialStore(trials_file(tmp_path / "results", "gpu", op.name), "")
    store.put(Task(op, case, variant), variant.default_config(case), Evaluation("failed", reason="y_ptr: differs by 1e-2"))
    report = run("adopt", "lint", tmp_path).stdout
    assert "two_kernels.row_sum: results change with the config: 1 configs disagree with the author's first: " in report
    assert "y_ptr: differs by 1e-2" in report


def test_lint_reports_checks_that_failed_the_last_time(tmp_path: Path) -> None:
    launches = captured(tmp_path, (4, 96), (8, 96), pattern="row_sum").classes
    fields = {"op": "row_sum", "dtype": "float32", "quant": "none", "policy": "cold"}
    fields |= {
        "device": "interpreter",
        "driver": "",
        "torch": "2",
        "triton": "3",
        "source_hash": "",
        "commit": "",
        "date": "2026-11-25T00:00:00+00:00",
    }
    first = [("baseline", "failed", "out of bounds"), ("optimized", "failed", "y_ptr: {} of 8 differ, 1.5e-02")]
    for folder, rows in (("interpreter", first), ("nvidia_h200", [("baseline", "checked", "")])):
        path = tmp_path / "results" / "runs" / folder / "captured.check.jsonl"
        for number, launch in enumerate(launches):
            of = {**fields, "axes": {"M": 4 + number}, "case": f"row_sum-{number}", "options": {"launch": launch.digest}}
            append(
                path, [Record(**of, variant=each, status=status, reason=reason.format(number)) for each, status, reason in rows]
            )
    report = " ".join(run("adopt", "lint", tmp_path).stdout.split())
    assert report.count("the check of optimized failed") == 1  # checks of two classes, whose reasons differ in numbers alone
    assert "two_kernels.row_sum: the check of optimized failed: row_sum-0 and 1 more: y_ptr: 0 of 8 differ, 1.5e-02" in report
    assert "out of bounds" not in report


def test_capture_sweep_file_omits_launches_that_cannot_be_replayed(tmp_path: Path) -> None:
    first, second = captured(tmp_path, (4, 96), (8, 96), pattern="row_sum").classes
    classes = [first, structs.replace(second, problem="a function made the kernel")]
    text = write_capture_sweep(dataclasses.replace(read_capture(tmp_path), classes=classes)).read_text()
    assert (text.count(first.digest), text.count(second.digest)) == (2, 0)


def test_capture_sweep_file_of_a_launch_of_size_0_loads(tmp_path: Path) -> None:
    startup.capture(tmp_path)
    example().row_sum[(0,)](torch.empty(2, 8), torch.empty(2), 0, 8)
    startup.uninstall()
    cases = load(write_capture_sweep(read_capture(tmp_path)), {op.name: op for op in operators(str(tmp_path))}).bench
    assert dict(cases[0].case.axes) == {"N": 8}


def test_tune_of_a_capture_without_a_gpu_fails_with_one_line(tmp_path: Path) -> None:
    captured(tmp_path)
    result = run("tune", tmp_path)
    assert (result.exit_code, result.stderr) == (2, "error: tune needs a GPU: in the interpreter nothing can be timed\n")


def test_tune_of_a_capture_with_dry_run_counts_configs(tmp_path: Path) -> None:
    captured(tmp_path, (4, 96), (4, 128), pattern="row_sum")
    result = run("tune", tmp_path, "--dry-run", "--workers", "2")
    seconds = 2 * (1.6 + 1.2)
    expected = f"2 classes, up to 12 configs: about {seconds / 60:.1f} minutes on an idle GPU, if none is tuned yet\n"
    assert (result.exit_code, result.stdout) == (0, expected)
    result = run("tune", tmp_path, "--dry-run", "--workers", "2", "--budget", "3")
    assert result.stdout == f"{expected[:-1]}; --budget ends it after 3 s\n"
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--trials", "5"), "trials: 5"),
        (("--case", "a"), "case: 'a'"),
        (("--policy", "hot"), "policy: 'hot'"),
        (("--stale",), "stale"),
    ],
)
def test_tune_of_a_capture_with_options_that_it_ignores_fails(tmp_path: Path, option: tuple[str, ...], message: str) -> None:
    result = run("tune", tmp_path, *option)
    assert (result.exit_code, result.stderr) == (2, f"error: {message}: expected without the folder of a capture\n")


def test_serve_of_a_folder_that_is_not_tuned_fails_with_one_line(tmp_path: Path) -> None:
    result = run("serve", "--configs", tmp_path, "--", "true")
    assert result.exit_code == 2
    assert f"{tmp_path}: no tuned configs: run `kerneltune tune {tmp_path}` first" in result.stderr


def test_serve_passes_its_options_to_the_program_and_returns_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "manifest.json").write_text('{"tables": {"other.json": "ab12cd"}}')
    shown = 'echo "$KERNELTUNE_ADOPT $KERNELTUNE_ADOPT_OPTIONS"; exit 3'
    options = ("--miss", "nearest", "--manifest", "ab12")
    result = run("serve", "--configs", tmp_path, *options, "--", "sh", "-c", shown)
    folder, _, passed = capfd.readouterr().out.partition(" ")
    assert (result.exit_code, folder) == (3, str(tmp_path))
    assert json.loads(passed).items() >= {"miss": "nearest", "manifest": "ab12"}.items()


def test_serve_with_a_manifest_of_no_table_does_not_start_the_program(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "manifest.json").write_text('{"tables": {"other.json": "ab12cd"}}')
    result = run("serve", "--configs", tmp_path, "--manifest", "dead", "--", "touch", tmp_path / "started")
    assert (result.exit_code, result.stderr) == (2, f"error: manifest: dead: {tmp_path} has tables of SHA-256 ab12cd\n")
    assert not (tmp_path / "started").exists()


def test_serve_prints_counts_of_served_launches_at_the_end(tmp_path: Path) -> None:
    (launch, *_) = of_kernel(captured(tmp_path), "row_sum")
    write_table(tmp_path, kernel_of([launch], author_configs(launch)))
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch, two_kernels as t\n"
        "run = t.row_sum.fn.run\n"
        "for columns in (96, 64, 96, 96):\n    t.row_sum[(4,)](torch.ones(4, columns), torch.empty(4), 4, columns)\n"
        "    t.row_sum.fn.run = lambda *args, BLOCK, **named: run(*args, BLOCK=BLOCK, **named) if BLOCK > 64 else 1 / 0\n"
        "os._exit(5)\n"
    )
    code = "from kerneltune.cli import main; main()"
    arguments = ("serve", "--configs", str(tmp_path), "--miss", "default", "--", python(), str(program))
    done = run_python(code, *arguments, TRITON_INTERPRET="1")
    lines = [line.split() for line in done.stderr.splitlines()]
    assert done.returncode == 5, done.stderr
    assert ["two_kernels.row_sum", "1", "1", "2"] in lines
    assert "1 launch served, 1 not tuned, 2 fell back" in done.stderr
    assert f"kerneltune tune {tmp_path}" in " ".join(done.stderr.split())
    assert [one.sizes["N"] for one in read_capture(tmp_path / "misses").classes] == [64]


SIZES_OF_A_FACTORY = """
import torch, triton, triton.language as tl
def made():
    @triton.autotune([triton.Config({"BLOCK": 16})], ["N"])
    @triton.jit
    def doubled(x_ptr, N, BLOCK: tl.constexpr):
        places = tl.arange(0, BLOCK)
        tl.store(x_ptr + places, 2 * tl.load(x_ptr + places, mask=places < N), mask=places < N)
    return doubled
kernel = made()
for size in (3, 4, 5):
    kernel[(1,)](torch.ones(size), size)
"""


def test_dry_run_says_once_why_launches_of_a_kernel_are_not_tuned(tmp_path: Path) -> None:
    (tmp_path / "factory.py").write_text(SIZES_OF_A_FACTORY)
    run("capture", "--out", tmp_path / "cap", "--", python(), tmp_path / "factory.py")
    skipped, error = run("tune", tmp_path / "cap", "--dry-run").stderr.splitlines()
    reason = "a function made the kernel, so that it cannot be imported by name"
    assert re.fullmatch(rf"skipped: made.<locals>.doubled \d float32 N=\d and 2 more: {reason}", skipped)
    assert error == f"error: {tmp_path / 'cap'}: no class can be tuned"


def test_trials_of_the_folder_of_a_capture_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_RESULTS", str(tmp_path / "others"))  # `tune` of a capture does not read it
    monkeypatch.setenv("KERNELTUNE_CONFIGS", str(tmp_path / "configs"))
    launch = captured(tmp_path, pattern="row_sum").classes[0]
    file = write_capture_sweep(read_capture(tmp_path))
    (op,) = operators(str(tmp_path))
    for family in (tmp_path, file):
        missing = run("trials", family).stdout
        assert f"no trials of {tmp_path} in" in missing
        assert f"`kerneltune tune {tmp_path}` makes them" in missing
    case, variant = case_of(launch, op.axes), op.variant(TUNED)
    store = TrialStore(trials_file(tmp_path / "results", "interpreter", op.name), "")
    store.put(Task(op, case, variant), variant.default_config(case), Evaluation("passed", 5.0))
    assert run("trials", tmp_path).stdout.startswith(f"{op.name} {TUNED} none: 1 case, 1 trial (1 passed)\n")
    assert f"no trials of {tmp_path} in" in run("trials", tmp_path, "--results", tmp_path / "others").stdout


def test_captured_kernels_are_operators_of_other_commands(tmp_path: Path) -> None:
    captured(tmp_path, (4, 96), (8, 96), pattern="row_sum")
    large = next(one for one in read_capture(tmp_path).classes if one.sizes["M"] == 8)
    written = write_capture_sweep(read_capture(tmp_path)).read_text().splitlines(keepends=True)
    written.remove(next(line for line in written if large.digest in line))  # the first section is that of the checks
    (tmp_path / "sweep.yaml").write_text("".join(written))
    result = run("sweep", tmp_path)
    assert result.exit_code == 0, result.output
    unchecked = f"row_sum-{large.digest[:8]} (M=8 N=96)"
    assert f"values not checked: 1 of 2 launches, too large for the interpreter: {unchecked}\n" in result.stdout
    assert f"`kerneltune sweep {tmp_path}`" in " ".join(result.stdout.split())
    assert (tmp_path / "results" / "runs" / "interpreter" / "captured.check.jsonl").is_file()
    lines = [line.split() for line in result.stdout.splitlines()]
    first, second = next((line, after) for line, after in itertools.pairwise(lines) if "baseline" in line)
    assert first[0].startswith("two_kernels.row_sum-")
    assert first[1:5] == ["baseline", "1", "0", "0"]
    assert second[:4] == ["optimized", "1", "0", "0"]


def test_commands_of_a_capture_use_its_folders_and_name_its_operators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("KERNELTUNE_CONFIGS", "KERNELTUNE_RESULTS"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    captured(tmp_path, (4, 96), pattern="row_sum")
    file = write_capture_sweep(read_capture(tmp_path))
    (name,) = [op.name for op in operators(str(tmp_path))]
    assert (
        run("sweep", file, "--variant", "nope").stderr
        == "error: variant: 'nope': expected one of baseline, optimized in family captured\n"
    )
    assert run("sweep", file, "--op", "").stderr == f"error: op: '': expected one of {name} in family captured\n"
    assert f"{tmp_path}/results/*/captured.jsonl" in run("--captured", tmp_path, "compare", "--family", file).stderr
    assert run("--captured", tmp_path, "cache", "list").stdout == f"no entries in {tmp_path}/configs\n"
    message = f"error: nothing to compile: {name} has no variant with knobs of such a name: baseline\n"
    assert run("--captured", tmp_path, "inspect", name, "--variant", "baseline").stderr == message


def test_serve_of_a_missing_folder_fails_with_one_line(tmp_path: Path) -> None:
    result = run("serve", "--configs", tmp_path / "nowhere", "--", "true")
    message = f"error: configs: {tmp_path / 'nowhere'}: no such folder: expected a folder of `tune`\n"
    assert (result.exit_code, result.stderr) == (2, message)
    (tmp_path / "nowhere").touch()
    result = run("serve", "--configs", tmp_path / "nowhere", "--", "true")
    assert (result.exit_code, result.stderr) == (2, message.replace("no such folder", "a file"))


def test_time_cells_show_the_paired_gain_that_the_interval_is_of() -> None:
    evidence = {"default_us": 532.7, "time_us": 527.6, "gain": 1.0016, "over_default": [1.0005, 1.0037]}
    assert time_cells(evidence) == ("532.7", "527.6", "1.002x", "1.000-1.004")
    assert time_cells({"default_us": 20.0, "time_us": 16.0})[2] == "1.250x"  # an entry of before has no gain
