"""Test sweep and tune: the plan for the engine, refused arguments, progress."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import both, refused, run

from kerneltune.cli import console, progress
from kerneltune.cli.loading import load_ops
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.sweep_run import SweepResult


def test_sweep_passes_all_options_on_and_prints_the_table(engine: dict[str, Any], tmp_path: Path) -> None:
    result = run(
        "sweep", "rmsnorm", "--op", "rmsnorm_fwd", "--case", "te-*", "--case", "llama*", "--dtype", "bfloat16", "--quant", "fp8",
        "--policy", "hot", "--variant", "optimized", "--variant", "optimized",
        "--no-tune", "--no-peers", "--budget", "2.5", "--trials", "7",
        "--check-only", "--configs", tmp_path / "configs", "--results", tmp_path / "results", "--workers", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    selection, options = engine["selection"], engine["options"]
    assert (selection.family, selection.ops, selection.cases) == ("rmsnorm", ("rmsnorm_fwd",), ("te-*", "llama*"))
    assert (selection.dtypes, selection.quants, selection.variants) == (("bfloat16",), ("fp8",), ("optimized",))
    assert (options.policy, options.extent, options.peers) == ("hot", "check", False)
    assert (options.search.budget_s, options.search.trials, options.workers) == (2.5, 7, 3)
    assert (engine["configs"], options.results) == (tmp_path / "configs", tmp_path / "results")
    assert result.stdout.splitlines() == [
        "device: NVIDIA H200",
        "all rows: op rmsnorm_fwd, dtype bfloat16, quant fp8",
        "",
        "case            M    N   variant       µs GB/s % ceiling vs baseline",
        "te-8192x4096 8192 4096   baseline  100.00 1000      50.0       1.00x",
        "                       * optimized  50.00 2000      50.0       2.00x",
        "",
        "2 passed",
    ]
    assert result.stderr.splitlines()[0] == "a remark"
    assert result.stderr.splitlines()[1].startswith("check: 1 of 1 step in ")


@pytest.mark.usefixtures("engine")
def test_sweep_names_only_files_that_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sweep may write files into the same folder at the same time: these are not named."""
    files = [tmp_path / "nvidia_h200" / name for name in ("rmsnorm.jsonl", "rmsnorm.md")]
    swept = SweepResult(both(), files)
    monkeypatch.setattr("kerneltune.sweep_run.run_sweep", lambda *_: swept)
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    assert result.stderr == "".join(f"wrote {path}\n" for path in files)
    assert result.stdout.endswith("2 passed\n")


def test_tune_passes_all_options_on(engine: dict[str, Any], tmp_path: Path) -> None:
    result = run("tune", "rmsnorm", "--force", "--trials", "5", "--configs", tmp_path)
    assert result.exit_code == 0, result.output
    options = engine["options"]
    assert (options.retune, options.search.trials, engine["configs"]) == ("all", 5, tmp_path)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("command", ["sweep", "tune"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "family: 'nothing': expected one of "),
        (["no/such.yaml"], "cannot read no/such.yaml: no such file"),
        (["rmsnorm", "--op", "softmax"], "op: 'softmax': expected one of rmsnorm_fwd, rmsnorm_bwd in family rmsnorm"),
        (["rmsnorm", "--op", "swiglu_bwd"], "op: 'swiglu_bwd': expected one of rmsnorm_fwd, rmsnorm_bwd in family rmsnorm"),
        (["swiglu_bwd", "--variant", "liger"], "variant: 'liger': expected one of baseline, optimized, compile in family swi"),
        (["rmsnorm", "--variant", "fast*"], "variant: 'fast*': expected one of baseline, pr593, optimized, "),
        (["rmsnorm", "--dtype", "bf*"], "dtype: 'bf*': expected one of bfloat16, float16, float32 in family rmsnorm"),
        (["rmsnorm", "--dtype", "bf61"], "dtype: 'bf61': did you mean bf16? expected one of bfloat16, "),
        (["rmsnorm", "--dtype", "int8"], "dtype: 'int8': expected one of bfloat16, float16, float32"),
        (["rmsnorm", "--quant", "int3"], "quant: 'int3': expected one of "),
        (["rmsnorm", "--policy", "warm"], "policy: 'warm': expected one of cold, hot, eager"),
        (["rmsnorm", "--budget", "-1"], "budget: -1.0: expected more than 0"),
        (["rmsnorm", "--budget", "0"], "budget: 0.0: expected more than 0"),
        (["rmsnorm", "--budget", "nan"], "budget: nan: expected more than 0"),
        (["rmsnorm", "--trials", "0"], "trials: 0: expected 1 or more"),
        (["rmsnorm", "--workers", "0"], "workers: 0: expected 1 or more"),
    ],
)
def test_sweep_and_tune_of_unknown_names_fail_with_known_names(command: str, arguments: list[str], message: str) -> None:
    assert refused(command, *arguments).startswith("error: " + message)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--until-gain", "0", "until-gain: '0': expected a percentage above 0 and below 100, such as 1%"),
        ("--until-gain", "soon", "until-gain: 'soon': expected a percentage above 0 and below 100, such as 1%"),
    ],
)
def test_tune_with_options_without_effect_fails(option: str, value: str, message: str) -> None:
    assert refused("tune", "rmsnorm", option, value) == f"error: {message}"


def test_tune_passes_the_gain_on(engine: dict[str, Any], tmp_path: Path) -> None:
    arguments = ["--until-gain", "1%", "--configs", tmp_path]
    assert run("tune", "rmsnorm", *arguments).exit_code == 0
    options = engine["options"]
    assert options.search.until_gain == pytest.approx(0.01)


@pytest.mark.usefixtures("engine")
def test_tune_passes_gpus_on(tmp_path: Path, engine: dict[str, Any]) -> None:
    assert run("tune", "rmsnorm", "--gpus", "all", "--results", tmp_path).exit_code == 0
    assert engine["options"].gpus == "all"


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_tune_without_a_bench_case_fails(engine: dict[str, Any], tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "checks.yaml"
    path.write_text("family: checks\nops: [stream]\ncheck: [{name: one, read: 8, write: 8}]\n")
    assert refused("tune", path, *options) == f"error: {path}: no bench case selected"


def test_sweep_with_an_unwritable_folder_fails_before_it_checks(tmp_path: Path, engine: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "below", tmp_path / "file"):
        error = refused("sweep", "rmsnorm", "--results", folder)
        assert error == f"error: cannot write {folder}/runs/interpreter: Not a directory"
    assert "options" not in engine
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("sweep", "results/nvidia_h200"),
        ("sweep", "results/runs/nvidia_h200"),
        ("sweep", "results/runs/trials"),
        ("sweep", "configs/nvidia_h200"),
        ("sweep --check-only", "results/runs/nvidia_h200"),
        ("tune", "results"),
        ("tune", "configs/nvidia_h200"),
    ],
)
def test_sweep_with_an_unwritable_gpu_folder_fails_before_it_measures(
    command: str, folder: str, tmp_path: Path, engine: dict[str, Any]
) -> None:
    (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / folder).touch()
    folders = ["rmsnorm", "--results", tmp_path / "results", "--configs", tmp_path / "configs"]
    line = refused(*command.split(), *folders)
    assert line.startswith(f"error: cannot write {tmp_path / folder}")
    assert line.endswith(": Not a directory")
    assert "options" not in engine


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(("arguments", "folder"), [(["--check-only"], "results/nvidia_h200"), (["--no-tune"], "configs")])
def test_sweep_ignores_an_unwritable_folder_that_it_does_not_write(
    arguments: list[str], folder: str, tmp_path: Path, engine: dict[str, Any]
) -> None:
    (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / folder).touch()
    folders = ["rmsnorm", "--results", tmp_path / "results", "--configs", tmp_path / "configs"]
    assert run("sweep", *folders, *arguments).exit_code == 0
    assert "options" in engine


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_sweep_with_a_read_only_folder_fails_before_it_checks(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        assert (
            refused("sweep", "rmsnorm", "--results", tmp_path)
            == f"error: cannot write {tmp_path}/runs/interpreter: Permission denied"
        )
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family: [", "{path}:1: YAML: "),
        ("", "{path}:1: file: empty: expected fields with values"),
        ("family: f\nops: [softmax]\n", "{path}:2: ops: 'softmax': expected one of "),
        ("family: f\nops: [rmsnorm_fwd]\nspeed: 3\n", "{path}:3: field: 'speed': expected one of "),
        (
            "family: f\nops: [rmsnorm_fwd]\nbench:\n  - {name: a, M: 0, N: 8}\n",
            "{path}:4: M: 0: expected an integer of 1 or more",
        ),
        (
            "family: f\nops: [rmsnorm_fwd]\nbench:\n  - {name: a, M: 8, N: 8, speed: 3}\n",
            "{path}:4: field: 'speed': expected one of ",
        ),
    ],
)
def test_sweep_of_a_broken_file_names_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    arguments = [path, "--results", tmp_path / "results", "--configs", tmp_path / "configs"]
    assert refused("sweep", *arguments).startswith("error: " + message.replace("{path}", str(path)))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            WorkerStoppedError("the GPU worker was ended from outside: exit code -15"),
            143,
            "error: the GPU worker was ended from outside: exit code -15",
        ),
    ],
)
def test_interrupted_command_prints_how_to_continue(
    error: BaseException, exit_code: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr("kerneltune.sweep_run.run_sweep", interrupted)
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    assert result.exit_code == exit_code
    kept = "checks, trials and measurements so far are kept, and the same command goes on from there"
    assert result.stderr == f"{message}: {kept}\n"


def test_progress_without_a_terminal_prints_log_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    with progress.Reporter() as log:
        log.stage("tune", 4)
        now.append(102.0)
        log.advance("rows=1")
        now.append(106.0)
        log.best("3.2 µs")
        log.advance("rows=2")
        log.note("skipped: too large")
        now.append(112.0)
        log.advance("rows=4")
        log.advance("rows=8")
        now.append(130.0)
        log.stage("measure", 100, kept=90)
        now.append(140.0)
        log.advance("rows=1")
        now.append(155.0)
    assert capsys.readouterr().err.splitlines() == [
        "tune: 2 of 4: rows=2, best 3.2 µs (about 6 s left)",
        "skipped: too large",
        "tune: 3 of 4: rows=4, best 3.2 µs (about 4 s left)",
        "tune: 4 of 4 steps in 30.0 s, best 3.2 µs",
        "measure: 91 of 100: rows=1 (about 90 s left)",
        "measure: 91 of 100 steps in 25.0 s, 90 of them before",
    ]


def test_progress_estimates_time_left_by_the_work_of_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    with progress.Reporter() as log:
        log.stage("check", 14, work=4 * 10 + 10)
        for seconds, work in [(10.0, 10)] * 4 + [(6.0, 5), (1.0, 1)]:  # the longest steps come first
            now.append(now[-1] + seconds)
            log.advance("a step", work)
    assert capsys.readouterr().err.splitlines()[:5] == [
        "check: 1 of 14: a step",
        "check: 2 of 14: a step (about 30 s left)",
        "check: 3 of 14: a step (about 20 s left)",
        "check: 4 of 14: a step (about 10 s left)",
        "check: 5 of 14: a step (about 5 s left)",
    ]


def test_progress_in_a_terminal_draws_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console.messages, "_force_terminal", True)
    monkeypatch.setattr(console.messages, "width", 140)
    with progress.Reporter() as bars:
        bars.stage("check", 1)
        bars.stage("tune", 3, kept=1)
        bars.advance("rows=[1]")
        bars.best("3.2 µs")
        bars.note("skipped: [too large]")
    text = capsys.readouterr().err
    assert "skipped: [too large]" in text
    assert "tune" in text
    assert "2/3" in text
    assert "best 3.2 µs" in text


def test_sweep_mutate_lists_refused_mutations_and_needs_check_only() -> None:
    assert refused("sweep", "no_family", "--mutate") == "error: mutate: expected only with --check-only"
    assert refused("sweep", "no_family", "--strict") == "error: strict: expected only with --check-only"
    assert refused("sweep", "no_family", "--accept", "rows") == "error: accept: 'rows': expected only with --strict"
    result = run("sweep", "fp8_transpose", "--check-only", "--mutate")
    assert result.exit_code == 0, result.output
    assert "fp8_transpose_2d q: compare refuses one element, " in result.stdout
    assert "\none element  one value x becomes 2x + 1, an integer differs by 64\none row      the last row " in result.stdout
    assert result.stdout.endswith("passed: compare checks 1 output; without --mutate the kernels are checked\n")


def test_tune_dry_run_counts_configs_of_a_family_and_of_a_model(tmp_path: Path) -> None:
    from kerneltune.plan import Options, Selection, load_plan

    wanted = "--results", tmp_path, "--configs", tmp_path, "--op", "rmsnorm_fwd", "--variant", "optimized", "--dry-run"
    selection = Selection("rmsnorm", ("rmsnorm_fwd",), ("te-8192x4096",), ("bfloat16",), ("none",), ("optimized",))
    plan = load_plan(load_ops(), selection, Options())
    (entry,) = plan.cases()
    (variant,) = plan.variants("rmsnorm_fwd")
    configs = sum(1 for _ in variant.configs(entry.case))
    assert configs > 7
    one_case = "tune", "rmsnorm", "--case", "te-8192x4096", "--dtype", "bf16", "--quant", "none"
    for limit, expected in (((), configs), (("--trials", "7"), 7)):
        result = run(*one_case, *wanted, *limit)
        assert result.exit_code == 0, result.output
        assert f"rmsnorm_fwd optimized: 1 case, {expected} configs\n" in result.stdout
        assert "stream baseline: 1 case, " in result.stdout
        assert "configs (the ceiling of bandwidth in records)\n" in result.stdout
        assert re.search(r"about [1-9]\d* s for 2 cases on a GPU like H200; no GPU here: cases that have", result.stdout)
    assert re.search(r"about [12] s for 2 cases, each at most 0.5 s on a GPU", run(*one_case, *wanted, "--budget", "0.5").stdout)
    whole, few = (
        re.search(r"about (\d+) s for 2 cases ", run(*one_case, *wanted, "--until-gain", "off", "--workers", workers).stdout)
        for workers in ("1", "100")
    )
    assert whole is not None
    assert few is not None
    assert int(whole[1]) > 10 * int(few[1]) > 0
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("tune", "--model", tmp_path / "config.json", "--tokens", "512", *wanted)
    assert result.exit_code == 0, result.output
    assert "rmsnorm_fwd optimized: 1 case, " in result.stdout
    assert f"{tmp_path}/config.json: Read as width 256; 4 heads of 64, 4 of keys and values; gated layers of 512" in " ".join(
        result.stderr.split()
    )
    assert not list(tmp_path.rglob("*.log"))


def test_tune_with_options_of_a_model_but_no_model_fails() -> None:
    for option, value, shown in (("--tokens", "512", "'512'"), ("--ep", "8", "8"), ("--batch", "none", "'none'")):
        message = f"error: {option[2:]}: {shown}: expected only with --model"
        assert refused("tune", "rmsnorm", option, value, "--dry-run") == message


def test_command_with_an_operator_in_place_of_a_family_names_the_family() -> None:
    message = "error: family: 'rmsnorm_bwd': an operator of family rmsnorm: expected rmsnorm --op rmsnorm_bwd"
    assert [refused(command, "rmsnorm_bwd") for command in ("trials", "sweep")] == [message, message]
    assert "did you mean rmsnorm_add?" in refused("trials", "rmsnorm_ad")
