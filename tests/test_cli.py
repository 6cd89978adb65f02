"""The command line: exit codes, exact one-line errors, and what is printed where."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kerneltune import device, records
from kerneltune.cli import app, console, progress
from kerneltune.records import Record

COMMANDS = [
    "ops",
    "sweep",
    "tune",
    "compare",
    "gate",
    "study",
    "cache",
    "cache list",
    "cache show",
    "cache check",
    "cache verify",
    "cache misses",
    "cache export",
    "cache import",
    "insight",
    "noise",
    "replay",
    "inspect",
    "profile",
    "doctor",
]
HEAVY = ("torch", "triton", "optuna", "pandas", "numpy")
NO_TIMES = dict.fromkeys(["time_us", "gbps", "pct_ceiling", "ci_low_us", "ci_high_us", "n", "aa_floor"])


@pytest.fixture(autouse=True)
def hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(console.console, "width", 100)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: str | Path) -> str:
    """The one line that a command says before it exits with 2, having printed nothing else."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr.removesuffix("\n")


def record(us: float = 100.0, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "op": "rmsnorm_fwd",
        "variant": "baseline",
        "case": "te-8192x4096",
        "dtype": "bfloat16",
        "quant": "fp8",
        "policy": "cold",
        "status": "passed",
        "time_us": us,
        "gbps": 100_000 / us,
        "pct_ceiling": 50.0,
        "ci_low_us": us,
        "ci_high_us": us,
        "n": 10,
        "aa_floor": 0.01,
        "device": "NVIDIA H200",
        "driver": "570",
        "torch": "2.13",
        "triton": "3.7",
        "source_hash": "0",
        "commit": "0",
        "date": "2026-11-21T06:00:00Z",
        "axes": {"M": 8192, "N": 4096},
        "family": "rmsnorm",
    }
    return Record(**{**values, **changes})


def both(baseline_us: float = 100.0, optimized_us: float = 50.0, **changes: Any) -> list[Record]:
    return [record(baseline_us, **changes), record(optimized_us, variant="optimized", **changes)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a record file and returns its path."""

    def write(name: str, *rows: Record) -> Path:
        records.append(tmp_path / name, rows)
        return tmp_path / name

    return write


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.NO_GPU)


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, 232448, "570"))


# --- start-up and help


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; from kerneltune.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    times = []
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - started)
    assert not set(HEAVY) & set(done.stderr.split())
    assert "KERNELTUNE_CONFIGS" in done.stdout
    assert min(times) < 0.3


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("kerneltune 0.")


def test_a_wrong_use_is_one_line() -> None:
    assert refused("nothing") == "error: No such command 'nothing'."
    assert refused("sweep") == "error: Missing argument 'family'."
    assert refused("sweep", "rmsnorm", "--budget", "soon").startswith("error: Invalid value for '--budget':")
    assert refused("gate") == "error: Missing argument 'baseline'."
    one_of_them = "error: new: None: expected a .jsonl file or --run, one of them"
    assert refused("gate", "one.jsonl") == one_of_them
    assert refused("gate", "one.jsonl", "two.jsonl", "--run", "rmsnorm") == one_of_them.replace("None", "'two.jsonl'")


def test_a_failure_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("kerneltune.gating.verdict.gate", broken)
    path = write("a.jsonl", record())
    assert isinstance(run("gate", path, path).exception, KeyError)


# --- ops


def test_ops_lists_operators_with_peers() -> None:
    result = run("ops")
    assert result.exit_code == 0
    for word in ("rmsnorm_fwd", "rmsnorm_bwd", "optimized", "fp8_t", "bfloat16"):
        assert word in result.stdout


def test_ops_shows_knobs_for_a_case() -> None:
    result = run("ops", "rmsnorm_fwd", "M=8192", "--quant", "fp8", "--dtype", "float16")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("rmsnorm_fwd: M=8192 N=4096 float16 fp8")
    assert "  option fp8_format     e4m3, e5m2" in lines
    assert "baseline" in lines and "optimized" in lines
    assert any(line.endswith("valid configs") for line in lines)


def test_ops_refuses_what_is_unknown() -> None:
    known = ", ".join(_operators())
    assert refused("ops", "softmax") == f"error: op: 'softmax': expected one of {known}"
    assert refused("ops", "rmsnorm_fwd", "K=3") == "error: axis: 'K': expected one of M, N"
    assert refused("ops", "rmsnorm_fwd", "M=-3") == "error: M: '-3': expected a size, like M=4096"
    assert refused("ops", "rmsnorm_fwd", "M") == "error: M: '': expected a size, like M=4096"
    assert refused("ops", "rmsnorm_bwd", "--quant", "fp8") == "error: quant: 'fp8': expected one of none"
    assert refused("ops", "rmsnorm_fwd", "--dtype", "int8") == "error: dtype: 'int8': expected one of bfloat16, float16, float32"


def _operators() -> list[str]:
    from kerneltune import ops

    return list(ops.load())


# --- sweep and tune


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What sweep and tune hand to the engine, which answers with one measured and one failed row."""
    seen: dict[str, Any] = {"answer": both()}

    def fake(_ops: object, selection: object, options: object, reporter: Any) -> list[Record]:
        seen.update(selection=selection, options=options)
        reporter.stage("check", 1)
        reporter.advance("one")
        reporter.note("a remark")
        return list(seen["answer"])

    monkeypatch.setattr("kerneltune.campaign.run_sweep", fake)
    monkeypatch.setattr("kerneltune.tuning.run.run_tune", fake)
    return seen


def test_sweep_passes_everything_on_and_prints_the_table(campaign: dict[str, Any], tmp_path: Path) -> None:
    result = run(
        "sweep", "rmsnorm", "--op", "rmsnorm_fwd", "--case", "te-*", "--case", "llama*", "--dtype", "bfloat16", "--quant", "fp8",
        "--policy", "hot", "--variant", "optimized", "--no-tune", "--no-peers", "--budget", "2.5", "--trials", "7",
        "--check-only", "--configs", tmp_path / "configs", "--results", tmp_path / "results", "--workers", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    selection, options = campaign["selection"], campaign["options"]
    assert (selection.family, selection.ops, selection.cases) == ("rmsnorm", ("rmsnorm_fwd",), ("te-*", "llama*"))
    assert (selection.dtypes, selection.quants, selection.variants) == (("bfloat16",), ("fp8",), ("optimized",))
    assert (options.policy, options.tune, options.peers, options.check_only) == ("hot", False, False, True)
    assert (options.budget_s, options.trials, options.workers) == (2.5, 7, 3)
    assert (options.configs, options.results) == (tmp_path / "configs", tmp_path / "results")
    assert result.stdout.splitlines() == [
        "device: NVIDIA H200",
        "op          case         dtype    quant   variant   time µs   GB/s % ceiling vs baseline",
        "rmsnorm_fwd te-8192x4096 bfloat16 fp8     baseline   100.00 1000.0      50.0       1.00x",
        "                                        * optimized   50.00 2000.0      50.0       2.00x",
        "",
        "2 passed",
    ]
    assert result.stderr.splitlines()[0] == "a remark"
    assert result.stderr.splitlines()[1].startswith("check: 1 of 1 in ")


@pytest.mark.usefixtures("campaign")
def test_sweep_names_the_files_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia_h200"

    def writes(*_: object) -> list[Record]:
        records.append(folder / "rmsnorm.jsonl", both())
        return both()

    folder.mkdir()
    (folder / "old.jsonl").touch()
    os.utime(folder / "old.jsonl", (0, 0))
    monkeypatch.setattr("kerneltune.campaign.run_sweep", writes)
    monkeypatch.setattr("kerneltune.plan.results_folder", lambda _: folder)
    assert run("sweep", "rmsnorm", "--results", tmp_path).stderr == f"wrote {folder}/rmsnorm.jsonl\n"


def test_sweep_fails_when_a_variant_of_ours_fails(campaign: dict[str, Any], tmp_path: Path) -> None:
    failed: dict[str, Any] = {"status": "failed", "reason": "y: 3 of 4 wrong", **NO_TIMES}
    campaign["answer"] = [record(), record(variant="optimized", **failed)]
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    label = "rmsnorm_fwd M=8192 N=4096 bfloat16 fp8 cold"
    assert result.stderr.splitlines()[-1] == f"failed: optimized te-8192x4096 {label}: y: 3 of 4 wrong"
    assert result.exit_code == 1
    campaign["answer"] = [record(), record(variant="eager", **failed)]
    assert run("sweep", "rmsnorm", "--results", tmp_path).exit_code == 0


def test_tune_passes_everything_on(campaign: dict[str, Any], tmp_path: Path) -> None:
    result = run("tune", "rmsnorm", "--force", "--sampler", "gp", "--trials", "5", "--configs", tmp_path)
    assert result.exit_code == 0, result.output
    options = campaign["options"]
    assert (options.force, options.sampler, options.trials, options.configs) == (True, "gp", 5, tmp_path)


@pytest.mark.usefixtures("campaign")
@pytest.mark.parametrize("command", ["sweep", "tune"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "family: 'nothing': expected one of "),
        (["no/such.yaml"], "cannot read no/such.yaml: no such file"),
        (["rmsnorm", "--op", "softmax"], "op: 'softmax': expected one of {ops}"),
        (["rmsnorm", "--variant", "fast"], "variant: 'fast': expected one of "),
        (["rmsnorm", "--dtype", "int8"], "dtype: 'int8': expected one of bfloat16, float16, float32"),
        (["rmsnorm", "--quant", "int4"], "quant: 'int4': expected one of "),
        (["rmsnorm", "--policy", "warm"], "policy: 'warm': expected one of cold, hot, eager"),
        (["rmsnorm", "--budget", "-1"], "budget: -1.0: expected 0 or more"),
        (["rmsnorm", "--budget", "0"], "budget: 0.0: expected more than 0 seconds"),
        (["rmsnorm", "--budget", "nan"], "budget: nan: expected 0 or more"),
        (["rmsnorm", "--trials", "0"], "trials: 0: expected 1 or more"),
        (["rmsnorm", "--workers", "0"], "workers: 0: expected 1 or more"),
    ],
)
def test_sweep_and_tune_refuse_what_is_unknown(command: str, arguments: list[str], message: str) -> None:
    assert refused(command, *arguments).startswith("error: " + message.replace("{ops}", ", ".join(_operators())))


@pytest.mark.usefixtures("campaign")
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--until-gain", "0", "until-gain: '0': expected a percentage above 0, such as 1%"),
        ("--until-gain", "soon", "until-gain: 'soon': expected a percentage above 0, such as 1%"),
        ("--knob", "warps", "knob: 'warps': expected NAME=V1,V2"),
        ("--knob", "warps=1,,2", "knob: 'warps=1,,2': expected NAME=V1,V2"),
    ],
)
def test_tune_refuses_what_has_no_meaning(option: str, value: str, message: str) -> None:
    assert refused("tune", "rmsnorm", option, value) == f"error: {message}"


def test_tune_passes_whole_spaces_and_the_gain_on(campaign: dict[str, Any], tmp_path: Path) -> None:
    arguments = ["--exhaustive", "--knob", "warps=1,2", "--knob", "split=true", "--until-gain", "1%", "--configs", tmp_path]
    assert run("tune", "rmsnorm", *arguments).exit_code == 0
    options = campaign["options"]
    assert (options.exhaustive, options.knobs) == (True, (("warps", ("1", "2")), ("split", ("true",))))
    assert options.until_gain == pytest.approx(0.01)


@pytest.mark.usefixtures("campaign")
def test_tune_refuses_an_unknown_sampler() -> None:
    assert refused("tune", "rmsnorm", "--sampler", "cma") == "error: sampler: 'cma': expected one of gp, tpe, random, qmc"


@pytest.mark.parametrize("option", ["--results", "--configs"])
def test_an_unwritable_folder_is_found_before_the_work(option: str, tmp_path: Path, campaign: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    command = "sweep" if option == "--results" else "tune"
    for folder in (tmp_path / "file" / "below", tmp_path / "file"):
        assert refused(command, "rmsnorm", option, folder) == f"error: cannot write {folder}: Not a directory"
    assert "options" not in campaign
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_found_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        assert refused("sweep", "rmsnorm", "--results", tmp_path) == f"error: cannot write {tmp_path}: Permission denied"
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family: [", "{path}:1: YAML: "),
        ("", "{path}:1: file: empty: expected family, ops and cases"),
        ("family: f\nops: [softmax]\n", "{path}:2: ops: 'softmax': expected one of "),
        ("family: f\nops: [rmsnorm_fwd]\nspeed: 3\n", "{path}:3: speed: '3': expected one of "),
        (
            "family: f\nops: [rmsnorm_fwd]\nbench:\n  - {name: a, M: 0, N: 8}\n",
            "{path}:4: M: 0: expected an integer of 1 or more",
        ),
        (
            "family: f\nops: [rmsnorm_fwd]\nbench:\n  - {name: a, M: 8, N: 8, speed: 3}\n",
            "{path}:4: speed: '3': expected a field among",
        ),
    ],
)
def test_a_broken_sweep_file_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    arguments = [path, "--results", tmp_path / "results", "--configs", tmp_path / "configs"]
    assert refused("sweep", *arguments).startswith("error: " + message.replace("{path}", str(path)))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("campaign")
def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kerneltune.campaign.run_sweep", interrupted)
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    assert result.exit_code == 130
    assert result.stderr == "interrupted: what is done so far is kept, and the same command resumes from there\n"


def test_log_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 100.0, 102.0, 106.0, 112.0, 120.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.LogProgress() as log:
        log.stage("tune", 4)
        log.advance("rows=1")
        log.best("3.2 µs")
        log.advance("rows=2")
        log.note("skipped: too large")
        log.advance("rows=4")
        log.advance("rows=8")
    assert capsys.readouterr().err.splitlines() == [
        "tune: 2 of 4: rows=2, best 3.2 µs (about 6 s left)",
        "skipped: too large",
        "tune: 3 of 4: rows=4, best 3.2 µs (about 4 s left)",
        "tune: 4 of 4 in 30.0 s, best 3.2 µs",
    ]


def test_bars_where_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console.messages, "_force_terminal", True)
    monkeypatch.setattr(console.messages, "width", 140)
    with progress.reporter() as bars:
        assert isinstance(bars, progress.RichProgress)
        bars.stage("check", 1)
        bars.stage("tune", 2)
        bars.advance("rows=[1]")
        bars.best("3.2 µs")
        bars.note("skipped: [too large]")
    text = capsys.readouterr().err
    assert "skipped: [too large]" in text
    assert "tune" in text and "1/2" in text and "best 3.2 µs" in text


# --- compare

TABLE = """\
kind dtype    quant       M      N       A ms       B ms    A GB/s    B GB/s   speedup
--------------------------------------------------------------------------------------
fwd  bfloat16 fp8      8192   4096     0.1000     0.0500    1000.0    2000.0      2.00x  +

1 row: geometric mean 2.00x, range 2.00x to 2.00x
wins 1, ties 0, losses 0
  fwd fp8: 1 row, geometric mean 2.00x
B reaches 50.0 % of the ceiling in the median
A/A floor at most 1.0%
"""


def test_compare_reads_files(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", *both())
    result = run("compare", "baseline", "optimized", "--from", path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, TABLE, "")


@pytest.mark.usefixtures("no_gpu")
def test_compare_shows_recorded_results_without_a_gpu(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write("nvidia_h200/rmsnorm.jsonl", *both())
    write("interpreter/rmsnorm.jsonl", *both(device="interpreter", status="checked", **NO_TIMES))
    result = run("compare", "baseline", "optimized", "--results", tmp_path)
    assert (result.exit_code, result.stdout) == (0, TABLE)
    assert result.stderr == f"no GPU here: recorded results from {path}\n"


@pytest.mark.usefixtures("an_h200")
def test_compare_takes_the_newest_records_of_this_gpu(write: Callable[..., Path], tmp_path: Path) -> None:
    write("nvidia_h200/rmsnorm.jsonl", *both(10, 20), *both())
    write("nvidia_h100/rmsnorm.jsonl", *both(10, 20, device="NVIDIA H100"))
    result = run("compare", "baseline", "optimized", "--results", tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, TABLE, "")


@pytest.mark.usefixtures("an_h200")
def test_compare_without_records_says_where_it_looked(tmp_path: Path) -> None:
    line = refused("compare", "baseline", "optimized", "--results", tmp_path, "--family", "rmsnorm")
    place = tmp_path / "nvidia_h200" / "rmsnorm.jsonl"
    assert line == f"error: no records of NVIDIA H200 in {place}; measure with --run, or name a file with --from"


def test_compare_two_files_variant_by_variant(write: Callable[..., Path]) -> None:
    old, new = write("old.jsonl", *both(100, 60)), write("new.jsonl", *both(100, 50))
    lines = run("compare", old, new).stdout.splitlines()
    assert [lines[0], lines[4]] == [
        "baseline",
        "fwd  bfloat16 fp8      8192   4096     0.1000     0.1000    1000.0    1000.0      1.00x",
    ]
    assert lines[lines.index("optimized") + 4].endswith("1.20x  +")
    assert run("compare", old, new, "--format", "csv").stdout.count("\n") == 3
    assert run("compare", old, new, "--format", "markdown").stdout.startswith("### baseline\n\n| kind |")


def test_compare_a_file_with_a_variant(write: Callable[..., Path]) -> None:
    old, new = write("old.jsonl", record()), write("new.jsonl", *both(100, 50))
    assert run("compare", old, "optimized", "--from", new).stdout == TABLE


def test_compare_keeps_to_operators_and_policy(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", *both(), *both(10, 20, op="rmsnorm_bwd"), *both(10, 20, policy="hot"))
    assert run("compare", "baseline", "optimized", "--from", path, "--op", "rmsnorm_fwd").stdout == TABLE
    expected = "error: op: 'softmax': expected one of rmsnorm_fwd, rmsnorm_bwd"
    assert refused("compare", "baseline", "optimized", "--from", path, "--op", "softmax") == expected


def test_compare_writes_a_file(write: Callable[..., Path], tmp_path: Path) -> None:
    path, output = write("a.jsonl", *both()), tmp_path / "table.txt"
    result = run("compare", "baseline", "optimized", "--from", path, "--output", output)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {output}\n")
    assert output.read_text() == TABLE
    line = refused("compare", "baseline", "optimized", "--from", path, "--output", tmp_path)
    assert line == f"error: cannot write {tmp_path}: Is a directory"


def test_compare_refuses_what_is_unknown(write: Callable[..., Path], tmp_path: Path) -> None:
    path, other = write("a.jsonl", *both()), write("b.jsonl", record(variant="optimized", axes={"M": 1, "N": 1}), record())
    known = "baseline, optimized, a .jsonl file"
    assert refused("compare", "fast", "optimized", "--from", path) == f"error: variant: 'fast': expected one of {known}"
    assert refused("compare", "baseline", tmp_path / "no.jsonl", "--from", path).startswith("error: cannot read ")
    assert refused("compare", "baseline", "optimized", "--from", path, "--format", "html").startswith("error: format: 'html': ")
    assert refused("compare", "baseline", "optimized", "--from", path, "--policy", "warm").startswith("error: policy: 'warm': ")
    line = refused("compare", "optimized", "baseline", "--from", other)
    assert line == "error: nothing to compare: no case, device and policy that both optimized and baseline have records of"
    assert refused("compare", "a", "b", "--run") == "error: family: missing: expected --family where --run is given"


def test_compare_live_asks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def live(_ops: object, selection: Any, a: str, b: str, options: Any, _progress: object) -> list[Record]:
        seen.update(family=selection.family, ops=selection.ops, pair=(a, b), policy=options.policy)
        return both()

    monkeypatch.setattr("kerneltune.campaign.compare_live", live)
    result = run("compare", "baseline", "optimized", "--run", "--family", "rmsnorm", "--op", "rmsnorm_fwd")
    assert result.stdout == TABLE
    assert seen == {"family": "rmsnorm", "ops": ("rmsnorm_fwd",), "pair": ("baseline", "optimized"), "policy": "cold"}


# --- gate


@pytest.mark.parametrize(
    ("new", "code", "last"),
    [
        (both(), 0, "gate: pass: no row is slower (2 rows compared, 0 faster)"),
        (both(100, 70), 1, "gate: regression: 1 regression (2 rows compared, 0 faster)"),
        (
            [record(), record(60, variant="optimized", ci_low_us=40.0, ci_high_us=70.0)],
            3,
            "gate: ambiguous: 1 ambiguous (2 rows compared, 0 faster)",
        ),
        (
            both(device="NVIDIA H100"),
            2,
            "gate: not usable: not comparable: baseline has device NVIDIA H200, new has NVIDIA H100 (0 rows compared, 0 faster)",
        ),
    ],
)
def test_the_gate_s_exit_code_is_its_answer(new: list[Record], code: int, last: str, write: Callable[..., Path]) -> None:
    result = run("gate", write("old.jsonl", *both()), write("new.jsonl", *new))
    lines = result.stdout.splitlines()
    answer = next(i for i, line in enumerate(lines) if line.startswith("gate: "))
    assert (result.exit_code, " ".join(line.strip() for line in lines[answer:])) == (code, last)


def test_the_gate_s_margin_and_formats(write: Callable[..., Path], tmp_path: Path) -> None:
    old, new = write("old.jsonl", *both()), write("new.jsonl", *both(100, 70))
    assert run("gate", old, new, "--margin", "0.5").exit_code == 0
    assert refused("gate", old, new, "--margin", "-1") == "error: margin: -1.0: expected a finite fraction of 0 or more"


def test_the_gate_s_files_and_annotations(write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, step = write("old.jsonl", *both()), write("new.jsonl", *both(100, 70)), tmp_path / "step.md"
    step.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    markdown, junit = tmp_path / "out" / "gate.md", tmp_path / "gate.xml"
    result = run("gate", old, new, "--markdown", markdown, "--junit", junit, "--annotations")
    assert (result.exit_code, result.stderr) == (1, f"wrote {junit}\nwrote {markdown}\n")
    text, *commands = result.stdout.split("gate: regression: 1 regression (2 rows compared, 0 faster)\n")
    assert text.startswith("regression  rmsnorm_fwd")
    assert commands[0] == "::error title=kerneltune gate::"
    assert markdown.read_text().startswith("**gate: regression: ")
    assert step.read_text() == f"before\n{markdown.read_text()}\n"
    assert '<testsuite name="kerneltune gate" tests="2" failures="1" errors="0" skipped="0">' in junit.read_text()
    step.write_text("")
    assert run("gate", old, new).exit_code == 1 and step.read_text() == ""
    line = refused_after_text("gate", old, new, "--junit", tmp_path)
    assert line.startswith(f"error: cannot write {tmp_path}: ")


def refused_after_text(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    return result.stderr.removesuffix("\n")


def test_the_gate_breaks_its_lines_where_the_screen_ends(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write("old.jsonl", *both()), write("new.jsonl", *both(100, 70))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console.console, "width", 80)
    assert run("gate", old, new).stdout == (
        "regression  rmsnorm_fwd M=8192 N=4096 bfloat16 fp8 cold  optimized\n"
        "            +40.0% [+40.0%, +40.0%]  (at least +40.0%, tolerated 3.0%)\n"
        "gate: regression: 1 regression (2 rows compared, 0 faster)\n"
    )


def test_what_only_a_run_takes(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", *both())
    assert refused("gate", path, path, "--op", "rmsnorm_fwd") == "error: op: \"['rmsnorm_fwd']\": expected only with --run"
    assert refused("gate", path, path, "--update") == "error: update: True: expected only with --run"
    assert refused("gate", path, "--run", "rmsnorm", "--processes", "0") == "error: processes: 0: expected 1 or more"
    assert refused("gate", path, "--run", "nothing").startswith("error: family: 'nothing': expected one of ")
    assert refused("gate", "HEAD", "--run", "rmsnorm", "--update") == (
        "error: baseline: 'HEAD': expected a .jsonl file where --update is given"
    )


def test_a_run_needs_a_gpu(write: Callable[..., Path], no_gpu: None) -> None:
    needed = "error: gate --run needs a GPU: in the interpreter nothing can be timed"
    assert refused("gate", write("a.jsonl", *both()), "--run", "rmsnorm") == needed
    assert refused("gate", "HEAD", "--run", "rmsnorm") == needed
    assert refused("gate", "none.jsonl", "--run", "rmsnorm", "--update") == needed
    assert refused("study", "rmsnorm") == "error: study needs a GPU: in the interpreter nothing can be timed"


def test_a_run_judges_what_its_processes_measure(
    write: Callable[..., Path], tmp_path: Path, an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def measured(_load: object, selection: Any, options: Any, processes: int, *_more: object) -> list[Record]:
        seen.append((selection.family, selection.variants, options.peers, processes))
        return both(100, 70)

    monkeypatch.setattr("kerneltune.gating.run.run_processes", measured)
    monkeypatch.setattr("kerneltune.gating.run.pool", lambda rows: list(rows))
    old, kept = write("old.jsonl", *both(), record(variant="liger")), tmp_path / "kept.jsonl"
    result = run("gate", old, "--run", "rmsnorm", "--processes", "2", "--variant", "baseline", "--save", kept)
    assert (result.exit_code, seen) == (0, [("rmsnorm", ("baseline",), False, 2)])
    assert records.load(kept) == both(100, 70)
    baseline = tmp_path / "baseline.jsonl"
    assert run("gate", baseline, "--run", "rmsnorm", "--update").stderr == f"wrote {baseline}\n"
    assert records.load(baseline) == both(100, 70)


def test_broken_record_files(write: Callable[..., Path], tmp_path: Path) -> None:
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


# --- cache


@pytest.fixture
def stored(configs_dir: Path) -> Path:
    """A cache of one good entry, of the baseline's first config."""
    from kerneltune import cache, ops
    from kerneltune.spec import Case

    case = Case("te", (("M", 8192), ("N", 4096)), "bfloat16", "none", (("zero_centered", False),))
    config = ops.load()["rmsnorm_bwd"].variant("baseline").default_config(case)
    entry = cache.Entry(
        variant="baseline", case="te", axes=case.axes, dtype=case.dtype, quant=case.quant, options=case.options, policy="cold",
        config={field: getattr(config, field) for field in config.__dataclass_fields__},
        evidence={"speedup": 1.25, "date": "2026-11-21T06:00:00Z"},
    )  # fmt: skip
    return cache.store("rmsnorm_bwd", "nvidia_h200", entry)


def change(path: Path, **fields: Any) -> None:
    """Change fields of the only entry of a cache file."""
    data = json.loads(path.read_text())
    data["entries"][0].update(fields)
    path.write_text(json.dumps(data))


def test_cache_shows_what_is_stored(stored: Path) -> None:
    listed = run("cache", "list").stdout.splitlines()
    assert [line.split() for line in listed] == [
        ["gpu", "op", "entries", "variants", "latest"],
        ["nvidia_h200", "rmsnorm_bwd", "1", "baseline", "2026-11-21T06:00:00Z"],
    ]
    shown = run("cache", "show", "rmsnorm_bwd")
    assert shown.exit_code == 0
    assert "1.25x" in shown.stdout and "baseline" in shown.stdout
    assert run("cache", "check").stdout == f"1 entries in 1 files of {stored.parent.parent} are good\n"


def test_an_empty_cache(configs_dir: Path) -> None:
    assert run("cache", "list").stdout == f"no entries in {configs_dir}\n"
    assert run("cache", "check").stdout == f"0 entries in 0 files of {configs_dir} are good\n"
    assert refused("cache", "show", "rmsnorm_fwd") == "error: op: 'rmsnorm_fwd': expected one of (none found)"


def test_cache_show_refuses_what_is_unknown(stored: Path) -> None:
    assert stored.is_file()
    assert refused("cache", "show", "softmax") == "error: op: 'softmax': expected one of rmsnorm_bwd"
    assert refused("cache", "show", "rmsnorm_bwd", "--gpu", "b200") == "error: gpu: 'b200': expected one of nvidia_h200"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": {"M": -1, "N": 8}}, "axes: {'M': -1, 'N': 8}: expected axis names with sizes of 0 or more"),
        ({"variant": 3}, "variant: 3: expected a name"),
        ({"speed": 3}, "speed: 3: expected no field of this name"),
        ({"variant": "fast"}, "rmsnorm_bwd has no variant 'fast'; it has baseline, "),
        ({"config": {"speed": 3}}, "config of baseline has the knobs ["),
    ],
)
def test_cache_check_finds_a_broken_entry(fields: dict[str, Any], message: str, stored: Path) -> None:
    change(stored, **fields)
    assert refused("cache", "check").startswith(f"error: {stored}: entries[0]: {message}")


def test_cache_check_finds_a_broken_file(stored: Path, configs_dir: Path) -> None:
    stranger = configs_dir / "nvidia_h200" / "softmax.json"
    stranger.write_text(stored.read_text().replace("rmsnorm_bwd", "softmax"))
    known = ", ".join(_operators())
    assert refused("cache", "check") == f"error: {stranger}: op: 'softmax': expected one of {known}"
    stored.write_text(stored.read_text()[:-20])
    assert refused("cache", "check").startswith(f"error: {stored}:")


def test_a_broken_file_is_a_warning_to_those_who_only_look(stored: Path) -> None:
    stored.write_text("{")
    with pytest.warns(UserWarning, match="JSON"):
        assert run("cache", "list").exit_code == 0


# --- doctor


def test_doctor_says_what_is_missing(tmp_path: Path, no_gpu: None) -> None:
    (tmp_path / "file").touch()
    result = run("doctor", "--configs", tmp_path, "--results", tmp_path / "file" / "results")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for words in ("python 3.", "torch 2.", "triton 3.", "GPU none no times", "KERNELTUNE_RESULTS"):
        assert words in text


@pytest.mark.gpu
def test_doctor_knows_the_gpu(tmp_path: Path) -> None:
    result = run("doctor", "--configs", tmp_path, "--results", tmp_path)
    assert result.exit_code == 0
    for words in ("driver", "SM clock", "throttled", "other processes"):
        assert words in result.stdout
