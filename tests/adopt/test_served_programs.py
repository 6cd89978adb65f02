"""Serving: programs that environment variables or their own call serve run as before."""

from pathlib import Path

import pytest
from adopted import run_python, tuned_folder

from kerneltune.adopt.overview import read_capture


def test_serving_by_environment_variable_reaches_a_process(tmp_path: Path) -> None:
    tuned_folder(tmp_path, chosen=5)
    code = (
        "from kerneltune.adopt.startup import start_from_environment; start_from_environment();"
        "import two_kernels as t; t.step(4, 96); print(t.row_sum.best_config)"
    )
    done = run_python(code, KERNELTUNE_ADOPT=str(tmp_path), KERNELTUNE_ADOPT_OPTIONS='{"miss": "default"}', TRITON_INTERPRET="1")
    assert done.stdout.startswith("BLOCK: 256, num_warps: 4"), done.stderr


def test_serving_by_environment_variable_records_misses(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    code = (
        "import kerneltune.adopt; kerneltune.adopt.start();"
        "import torch, two_kernels as t; t.row_sum[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)"
    )
    done = run_python(code, KERNELTUNE_ADOPT=str(tmp_path), KERNELTUNE_ADOPT_OPTIONS='{"miss": "default"}', TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert [one.sizes["N"] for one in read_capture(tmp_path / "misses").classes] == [64]


CHANGED_FOLDER = """
import os, subprocess, sys
{start}
os.mkdir("elsewhere"); os.chdir("elsewhere")
import torch, two_kernels as t
for columns in (96, 64):
    t.row_sum[(4,)](torch.ones(4, columns), torch.empty(4), 4, columns)
    print(t.row_sum.best_config.kwargs["BLOCK"], flush=True)
if os.environ.pop("KERNELTUNE_TEST_CHILD", ""):
    sys.exit(subprocess.call([sys.executable, "-c", sys.argv[1]]))
"""
START = "import kerneltune.adopt; kerneltune.adopt.start()"


@pytest.mark.parametrize("start", [START, "from kerneltune.adopt import install; install('tuned', miss='default')"])
def test_serving_a_program_that_changes_folder_finds_a_table_given_by_a_relative_path(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_folder(tmp_path / "tuned", chosen=5)
    monkeypatch.chdir(tmp_path)
    options = {"KERNELTUNE_ADOPT": "tuned", "KERNELTUNE_ADOPT_OPTIONS": '{"miss": "default"}', "KERNELTUNE_TEST_CHILD": "1"}
    environment = options if start == START else {}
    code = CHANGED_FOLDER.format(start=start)
    done = run_python(code, code, TRITON_INTERPRET="1", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["256", "64"] * (1 + len(environment) // 3)
    assert [one.sizes["N"] for one in read_capture(tmp_path / "tuned" / "misses").classes] == [64]
    assert [path.name for path in (tmp_path / "elsewhere").rglob("*")] == ["elsewhere"] * (len(environment) // 3)


LOGS_TO_OUTPUT = """
import contextlib, io, logging, sys
import kerneltune.adopt; kerneltune.adopt.start()
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
logging.getLogger("torch").setLevel(logging.WARNING)
import torch, two_kernels as t
with contextlib.redirect_stderr(io.StringIO()) as written:
    t.row_sum[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)
assert not written.getvalue()
logging.info("own line")
"""


def test_serving_a_program_that_logs_to_its_output_warns_on_standard_error_alone(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    done = run_python(LOGS_TO_OUTPUT, KERNELTUNE_ADOPT=str(tmp_path), TRITON_INTERPRET="1")
    assert (done.returncode, done.stdout) == (0, "INFO:root:own line\n"), done.stderr
    line = "kerneltune: two_kernels.row_sum: a launch that was not tuned: the author's autotuner chooses"
    assert done.stderr.splitlines() == [line]


@pytest.mark.parametrize("variable", ["KERNELTUNE_ADOPT", "KERNELTUNE_CAPTURE"])
def test_serving_in_a_program_without_msgspec_warns_in_one_line_and_serves_nothing(variable: str, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    (lacking / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\")\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import kerneltune.adopt; kerneltune.adopt.start();"
        "import triton; from triton.runtime.autotuner import Autotuner; print(Autotuner.run.__module__)"
    )
    done = run_python(code, str(lacking), **{variable: str(tmp_path)}, TRITON_INTERPRET="1")
    assert (done.returncode, done.stdout) == (0, "triton.runtime.autotuner\n"), done.stderr
    assert done.stderr.startswith("kerneltune: not started: No module named 'msgspec': install kerneltune")
    assert done.stderr.count("\n") == 1


def test_serving_with_wrong_options_in_the_environment_warns_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    done = run_python(
        "import kerneltune.adopt; kerneltune.adopt.start(); print(1)",
        KERNELTUNE_ADOPT=str(tmp_path),
        KERNELTUNE_ADOPT_OPTIONS="many",
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "1\n", 1)
    assert "not started: KERNELTUNE_ADOPT_OPTIONS: 'many': expected options as a JSON object" in done.stderr


def test_serving_that_is_uninstalled_before_the_program_imports_triton_serves_nothing(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    code = (
        "import sys; from kerneltune.adopt import startup; startup.install(sys.argv[1]); startup.uninstall();"
        "from triton.runtime.autotuner import Autotuner; print(Autotuner.run.__module__, startup.server())"
    )
    done = run_python(code, str(tmp_path), TRITON_INTERPRET="1")
    assert done.stdout == "triton.runtime.autotuner None\n", done.stderr
