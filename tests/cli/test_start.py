"""Start-up, help and version, wrong use, and the commands that only look: ops and doctor."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
from command_line import both, operators, record, refused, run

from kerneltune import cli, device
from kerneltune.cli import doctor
from kerneltune.files import data_root
from kerneltune.sweep_file import OR_FAMILY
from kerneltune.wording import first_of

COMMANDS = [
    "ops",
    "sweep",
    "tune",
    "compare",
    "gate",
    "cache",
    "cache list",
    "cache show",
    "cache check",
    "cache from-misses",
    "cache export",
    "cache import",
    "trials",
    "report",
    "inspect",
    "profile",
    "doctor",
]
OF_TYPER = ("typer", "rich", "pygments", "markdown_it", "mdurl", "typing_extensions", "attr")
"""Packages that typer imports to show help; rich imports attr where it is installed."""


def test_family_whose_path_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)  # fails for every user; the permissions of a folder do not stop root
    assert refused("sweep", str(path)) == f"error: cannot read {path}: File name too long"


def test_command_without_torch_and_triton_fails_and_doctor_lists_them() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; from kerneltune.cli import main; main()"
    report = _done(code, "doctor")
    rows = {line[:19].strip(): line[19:].split("  ")[0] for line in report.stdout.splitlines()}
    assert (report.returncode, rows["torch"], rows["triton"]) == (0, "not installed", "not installed"), report.stderr
    for command in (["sweep", "rmsnorm", "--check-only"], ["inspect", "rmsnorm_fwd"]):
        done = _done(code, *command, check=False)
        assert (done.returncode, done.stderr) == (2, f"error: torch: not installed: `{command[0]}` needs it\n")


def test_help_imports_no_slow_package_and_few_modules() -> None:
    code = "import sys; from kerneltune.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = _done(code, "--help")
    assert "KERNELTUNE_CONFIGS" in done.stdout
    needed = set(_done("import sys, typer, rich.console; print(*sys.modules, file=sys.stderr)").stderr.split())
    names = [name for name in done.stderr.split() if name not in needed and not name.startswith("_sysconfigdata_")]
    packages = {name.partition(".")[0] for name in names if "cython" not in name}
    assert packages - sys.stdlib_module_names <= {"kerneltune", "msgspec", "yaml", "__mp_main__", *OF_TYPER}
    own = {name.split(".")[1] for name in names if name.startswith("kerneltune.")}
    assert not own & {"ops", "nn", "kernel_lib", "tune", "gating", "sweep_run", "stale"}
    # 57 with Python 3.11; unittest imports 11 more, importlib.metadata 24, asyncio 38
    assert sum(name.partition(".")[0] in sys.stdlib_module_names for name in names) < 64


def _done(code: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=check)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_names_of_values_and_no_types(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    assert "<" not in result.stdout


def test_ops_of_sizes_without_valid_knobs_fails_with_the_reason() -> None:
    error = refused("ops", "int4_gemm", "N=4096", "M=4096", "K=7")
    assert error.startswith("error: int4_gemm baseline: no knobs for N=4096 M=4096 K=7 ")
    assert error.endswith(": k must be a multiple of the group and of 32, got k=7 group=64")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("ops",), ("--help",)])
def test_command_with_stdout_on_a_full_disk_fails_with_one_line(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kerneltune", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: cannot write the output: No space left on device\n")


def test_command_in_a_removed_folder_fails_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = data_root("results").resolve() / "nvidia_h200" / "swiglu_bwd.jsonl"
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert refused("report", str(records)) == "error: cannot find the current folder: it was removed or renamed"


def test_command_in_a_terminal_of_0_columns_prints_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    done = subprocess.run([sys.executable, "-m", "kerneltune", "ops"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("op ")


def test_output_in_ascii_writes_question_marks_for_other_characters(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = [sys.executable, "-m", "kerneltune", "compare", str(write("a.jsonl", *both())), "--format", "markdown"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "| A ?s | B ?s |" in done.stdout.decode("ascii")


@pytest.mark.skipif(not [*importlib.metadata.distributions(name="kerneltune")], reason="kerneltune is not installed")
def test_version_option_prints_the_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("kerneltune 0.")


def test_version_option_in_an_uninstalled_source_tree_prints_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, "kerneltune, a source tree that is not installed\n")


@pytest.mark.parametrize("words", ["ops --plugin", "sweep rmsnorm --captured", "compare --plugin a.py --captured"])
def test_option_for_all_commands_without_its_value_fails_with_one_line(words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "kerneltune", *words.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"error: Option '{words.split()[-1]}' requires an argument.\n")


def test_wrong_command_or_option_fails_with_one_line(tmp_path: Path) -> None:
    assert refused("nothing") == "error: No such command 'nothing'."
    assert refused("--nothing") == "error: No such option: --nothing"
    assert refused("--plugin") == "error: Option '--plugin' requires an argument."
    error = refused("sweep")
    assert error.startswith("error: Missing argument 'family': expected one of decode, fp8_")
    assert error.endswith(OR_FAMILY)
    assert refused("tune", "nowhere").endswith(OR_FAMILY)
    with chdir(tmp_path):
        Path("mine.yaml").touch()
        assert "did you mean mine.yaml? expected one of" in refused("sweep", "mine")
    (tmp_path / "empty").mkdir()
    assert refused("sweep", tmp_path / "empty").endswith("/empty: no capture: expected a folder that `kerneltune capture` wrote")
    for command in ("ops",), ("compare",), ("cache", "list"):
        no_capture = f"error: {tmp_path / 'no'}: no capture: expected a folder that `kerneltune capture` wrote"
        assert refused("--captured", tmp_path / "no", *command) == no_capture
    assert refused("sweep", "rmsnorm", "--budget", "soon").startswith("error: Invalid value for '--budget':")
    assert refused("tune", "nothere", "--dry-run").startswith("error: family: 'nothere': expected one of ")
    assert refused("gate") == "error: Missing argument 'baseline'."
    one_of_them = "error: new: missing: expected a .jsonl file or --run, one of them"
    assert refused("gate", "one.jsonl") == one_of_them
    assert refused("gate", "one.jsonl", "two.jsonl", "--run", "rmsnorm") == one_of_them.replace("missing", "'two.jsonl'")


def test_error_of_bad_input_shows_its_traceback_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("compare", "--from", "nope.jsonl").startswith("error: cannot read nope.jsonl: ")
    monkeypatch.setenv("KERNELTUNE_TRACEBACK", "1")
    assert isinstance(run("compare", "--from", "nope.jsonl").exception, ValueError)


def test_error_of_the_package_itself_shows_its_traceback(monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]) -> None:
    def broken(*_: object, **_named: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("kerneltune.gating.verdict.gate", broken)
    path = write("a.jsonl", record())
    assert isinstance(run("gate", path, path).exception, KeyError)


def test_ops_lists_operators_with_peers() -> None:
    result = run("ops")
    assert result.exit_code == 0
    for word in ("rmsnorm_fwd", "rmsnorm_bwd", "optimized", "fp8_t", "bf16"):
        assert word in result.stdout


def test_help_of_commands_names_the_options_before_the_command() -> None:
    for command in ("gate", "sweep"):
        assert "Also here: --plugin MODULE" in " ".join(run(command, "--help").stdout.split())


def test_ops_shows_knobs_for_a_case() -> None:
    result = run("ops", "rmsnorm_fwd", "M=8192", "N=4096", "--quant", "fp8", "--dtype", "float16")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("rmsnorm_fwd: M=8192 N=4096 float16 fp8")
    assert "  option fp8_format     e4m3, e5m2" in lines
    assert "baseline" in lines
    assert "optimized" in lines
    assert any(line.endswith("valid configs") for line in lines)


def test_ops_of_an_unknown_operator_fails_without_importing_torch() -> None:
    code = "import sys; from kerneltune.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "ops", "softmax"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")


def test_ops_with_dtype_or_quant_but_no_operator_fails() -> None:
    assert refused("ops", "--dtype", "float16") == "error: dtype: 'float16': expected only with OP"
    assert refused("ops", "--quant", "fp8") == "error: quant: 'fp8': expected only with OP"


def test_ops_and_inspect_of_unknown_names_fail_with_known_names() -> None:
    offered = first_of(operators(), 25)
    message = f"error: op: 'softmax': expected one of {offered}, or an operator that --plugin or --captured loads"
    assert refused("ops", "softmax") == refused("cache", "explain", "softmax", "M=1") == message
    options = "zero_centered, fp8_format, row_pad"
    assert refused("ops", "rmsnorm_fwd", "K=3") == f"error: axis: 'K': expected one of M, N, or an option: {options}"
    for command in ("ops", "inspect"):
        assert refused(command, "rmsnorm_fwd", "M=8192") == "error: N: not given: expected a size for each of M, N"
    assert refused("inspect", "rmsnorm_fwd", "M=8", "N=64", "M=9") == "error: M: '8': expected each name once"
    assert refused("ops", "rmsnorm_fwd", "M=-3") == "error: M: '-3': expected a size, like M=4096"
    assert refused("ops", "rmsnorm_fwd", "M") == "error: M: '': expected a size, like M=4096"
    assert refused("ops", "rmsnorm_bwd", "--quant", "fp8") == "error: quant: 'fp8': expected one of none"
    assert refused("ops", "rmsnorm_fwd", "--dtype", "int8") == "error: dtype: 'int8': expected one of bfloat16, float16, float32"


def test_doctor_lists_the_peers_of_all_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    operators()  # imported before find_spec is replaced
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("liger_kernel", "gemlite") else object())
    peers = {what: (state, means) for what, state, means in doctor.peer_packages()}
    assert peers["peer liger_kernel"] == (
        "not installed",
        "left out of rmsnorm_add_bwd, rmsnorm_add_fwd and 2 more",
    )
    assert peers["peer gemlite"] == ("not installed", "left out of int4_gemm")
    assert peers["peer quack"] == ("found", "")
    assert not any("TransformerEngine" in what for what in peers)


def test_doctor_with_a_broken_plug_in_lists_it_as_not_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_PLUGINS", str(tmp_path / "gone.py"))
    result = run("doctor", "--configs", tmp_path, "--results", tmp_path)
    assert result.exit_code == 0
    assert "operators not usable plug-in" in " ".join(result.stdout.split())


def test_doctor_lists_missing_packages(tmp_path: Path, no_gpu: None) -> None:
    (tmp_path / "file").touch()
    result = run("doctor", "--configs", tmp_path, "--results", tmp_path / "file" / "results")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for words in ("python 3.", "torch 2.", "triton 3.", "GPU none no times", "KERNELTUNE_RESULTS"):
        assert words in text


@pytest.mark.parametrize(
    ("unit", "line"),
    [("0a1b2c3d4e5f", "GPU serial 0a1b2c3d4e5f"), ("", "GPU serial not known records cannot say on which GPU of this model")],
)
def test_doctor_prints_the_unit_of_the_gpu(unit: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "570", unit))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (100 << 30, 140 << 30))
    monkeypatch.setattr("kerneltune.cli.doctor.nvml_lines", lambda: iter(()))
    assert line in " ".join(run("doctor", "--configs", tmp_path, "--results", tmp_path).stdout.split())


@pytest.mark.gpu
def test_doctor_prints_facts_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # long paths of a machine fold the other columns
    result = run("doctor", "--configs", tmp_path, "--results", tmp_path)
    assert result.exit_code == 0
    for words in ("driver", "SM clock", "throttled", "other processes"):
        assert set(words.split()) <= set(result.stdout.split()), words


def test_unknown_option_names_the_commands_that_have_it() -> None:
    assert refused("report", "--family", "x") == "error: No such option: --family; compare has it"
    assert refused("compare", "--recipe", "x") == "error: No such option: --recipe"
    assert refused("trials", "--family", "x") == "error: No such option: --family; family is an argument: trials FAMILY"


def test_ops_and_inspect_accept_options_beside_sizes() -> None:
    shown = run("ops", "rmsnorm_fwd", "M=8192", "N=4096", "zero_centered=True")
    assert shown.stdout.splitlines()[0].split()[:6] == [
        "rmsnorm_fwd:", "M=8192", "N=4096", "bfloat16", "none", "zero_centered=True",
    ]  # fmt: skip
    message = "error: zero_centered: '2': expected one of False, True"
    assert refused("inspect", "rmsnorm_fwd", "M=8192", "N=64", "zero_centered=2") == message


def test_plugin_that_is_no_module_fails_and_names_the_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("topq.py", "topq.yaml"):
        (tmp_path / name).write_text("")
    message = "expected a .py file, or the name of a module"
    assert refused("--plugin", ".", "ops") == f"error: plug-in .: {message}"
    assert refused("--plugin", "topq.yaml", "ops") == f"error: plug-in topq.yaml: {message}; did you mean topq.py?"


def test_warning_of_several_processes_is_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("once for all", "once for all", "another"):
        if not (child := os.fork()):
            cli.show_warning(text, UserWarning, "k.py", 1)
            os._exit(0)
        os.waitpid(child, 0)
    assert capfd.readouterr().err.splitlines() == ["warning: once for all", "warning: another"]


def test_each_of_many_warnings_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2000):
        cli.show_warning(f"number {number} of many", UserWarning, "k.py", 1)
    assert capsys.readouterr().err.count(" of many\n") == 2000


def test_warning_about_code_of_a_plug_in_names_file_and_line(tmp_path: Path) -> None:
    plugin = tmp_path / "literal.py"
    plugin.write_text("SAME = 1 is 1\n")
    command = [sys.executable, "-m", "kerneltune", "--plugin", str(plugin), "ops"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "400"})
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warning.startswith(f"warning: {plugin}:1: ")
    assert "with 'int' literal" in warning or "with a literal" in warning
