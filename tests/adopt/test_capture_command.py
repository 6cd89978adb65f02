"""The command `capture`: programs without kernels, kernels that cannot be captured, exit codes."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from adopted import captured
from command_line import run
from warm_python import python

from kerneltune.adopt.folder import CLASSES, META, remove_stale
from kerneltune.adopt.operators import write_capture_sweep
from kerneltune.adopt.overview import read_capture
from kerneltune.cli import console
from kerneltune.cli.capture import NOT_FOUND


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave lines whole."""
    monkeypatch.setattr(console.console, "width", 400)


@pytest.mark.parametrize(("program", "hint"), [("no-such-program", ""), ("a.py", ": did you mean -- python a.py?")])
def test_capture_of_a_missing_program_fails_and_writes_nothing(program: str, hint: str, tmp_path: Path) -> None:
    result = run("capture", "--out", tmp_path / "cap", "--", program)
    message = f"error: program: {program!r}: not found, or not executable: expected a file or a command on PATH{hint}\n"
    assert (result.exit_code, result.stderr, (tmp_path / "cap").exists()) == (2, message, False)


def test_capture_into_a_folder_without_a_name_fails_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("capture", "--out", "", "--", sys.executable, "-c", "")
    assert (result.exit_code, result.stderr) == (2, "error: Invalid value for '--out' / '-o': '': expected a folder\n")
    assert list(tmp_path.iterdir()) == []


def test_capture_of_a_program_without_kernels_fails_and_writes_nothing(tmp_path: Path) -> None:
    result = run("capture", "--out", tmp_path / "cap", "--", sys.executable, "-c", "")
    message = "nothing was captured: the program launched no kernel of triton.autotune or kerneltune.autotune\n"
    assert (result.exit_code, result.stderr, (tmp_path / "cap").exists()) == (1, message, False)


def test_program_whose_python_does_not_find_this_package_is_told_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "tuned" / "served").mkdir(parents=True)
    program = ("--", "env", "-u", "PYTHONPATH", sys.executable, "-S", "-c", "print(1)")
    captured = run("capture", "--out", tmp_path / "cap", *program)
    served = run("serve", "--configs", tmp_path / "tuned", *program)
    assert (captured.exit_code, served.exit_code) == (1, 0)
    assert captured.stderr == f"nothing was captured: {NOT_FOUND}\n"
    assert served.stderr == f"nothing was served: {NOT_FOUND}\n"


def test_capture_removes_folders_that_killed_processes_left_an_hour_ago(tmp_path: Path) -> None:
    parts = [tmp_path / folder / f".part-{age}" for folder in ("classes", "misses/classes", "compiled") for age in (3000, 4000)]
    for part in parts:
        part.mkdir(parents=True)
        (part / "values.safetensors").write_bytes(b"x")
        os.utime(part, (changed := time.time() - int(part.name[6:]), changed))
    run("capture", "--out", tmp_path, "--", "true")
    assert [part.name for part in parts if part.exists()] == [".part-3000"] * 3


ALONE = """
import torch, triton, triton.language as tl
class Alone(triton.runtime.Autotuner):
    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs, N=8)
@triton.jit
def doubled(x_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(x_ptr + places, 2 * tl.load(x_ptr + places))
Alone(doubled, doubled.arg_names, [triton.Config({"N": 8})], [], None, None)[(1,)](torch.ones(8))
"""


def test_capture_of_autotuners_with_a_run_of_their_own_fails_with_their_class(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    result = run("capture", "--out", tmp_path / "cap", "--", python(), tmp_path / "alone.py")
    reason = "__main__.doubled: its autotuner is a __main__.Alone, whose run does not call Triton's"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, f"nothing was captured: {reason}")


FAILING = """
import torch, triton, triton.language as tl
@triton.jit
def refused(x_ptr, N: tl.constexpr):
    tl.static_assert(N < 8)
refused[(1,)](torch.ones(8), N=8)
"""


def test_capture_of_plain_kernels_that_all_fail_names_no_option_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    stderr = run("capture", "--plain", "--out", tmp_path / "cap", "--", python(), tmp_path / "failing.py").stderr
    assert "nothing was captured: __main__.refused: a launch failed: " in stderr
    assert "--plain" not in stderr
    assert "--plain: __main__.refused" in run("capture", "--out", tmp_path, "--", python(), tmp_path / "failing.py").stderr


@pytest.mark.parametrize(("variable", "count", "code"), [("WORLD_SIZE", "2", 0), ("SLURM_STEP_NUM_TASKS", "1", 1)])
def test_rank_without_kernels_does_not_end_the_job_of_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, count: str, code: int
) -> None:
    monkeypatch.setenv(variable, count)
    result = run("capture", "--out", tmp_path / "cap", "--", "true")
    assert (result.exit_code, result.stderr.startswith("nothing was captured: ")) == (code, True)
    assert run("capture", "--out", tmp_path / "cap", "--", "false").exit_code == 1


def test_capture_of_kernels_in_a_compiled_graph_names_the_option_for_them(tmp_path: Path) -> None:
    code = "import torch, triton; torch.compile(torch.sin, backend='eager')(torch.ones(3))"
    result = run("capture", "--out", tmp_path / "cap", "--", python(), "-c", code)
    message = "nothing was captured: the program launched no kernel of triton.autotune or kerneltune.autotune"
    hint = "; kernels inside torch.compile are seen under --eager, plain @triton.jit under --eager --plain"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, message + hint)
    plain = run("capture", "--plain", "--out", tmp_path / "cap", "--", python(), "-c", code)
    expected = message[: message.index(" of")] + " of Triton" + hint[: hint.index(",")]
    assert (plain.exit_code, plain.stderr.splitlines()[-1]) == (1, expected)
    shown = run("capture", "--eager", "--out", tmp_path / "cap", "--", "sh", "-c", "exit 4$TORCHDYNAMO_DISABLE")
    assert (shown.exit_code, hint in shown.stderr) == (41, False)


NOTEBOOK = """
import linecache, torch
cell = '''
import triton, triton.language as tl
@triton.autotune([triton.Config({"BLOCK": 8})], ["N"])
@triton.jit
def doubled(x_ptr, N, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x_ptr + places, 2 * tl.load(x_ptr + places, mask=places < N), mask=places < N)
'''
linecache.cache["<cell 1>"] = len(cell), None, cell.splitlines(True), "<cell 1>"
exec(compile(cell, "<cell 1>", "exec"))
del __file__  # a notebook has none
doubled[(1,)](torch.ones(8), 8)
"""


def test_capture_of_a_kernel_of_a_notebook_cell_reports_that_it_cannot_be_tuned(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    result = run("capture", "--out", tmp_path / "cap", "--", python(), tmp_path / "notebook.py")
    assert "doubled: cannot be tuned: exec or a notebook cell defined the kernel" in result.stderr
    (launch,) = read_capture(tmp_path / "cap").classes
    assert launch.problem.endswith("so that it cannot be launched again: move it to a module")
    swept = run("sweep", tmp_path / "cap", "--check-only")
    assert swept.exit_code == 2
    assert swept.stderr == f"error: {tmp_path / 'cap'}: no launch can be made again: __main__.doubled: {launch.problem}\n"


OF_LIBDEVICE = """
import torch, triton, triton.language as tl
from triton.language.extra.libdevice import tanh

@triton.autotune(configs=[triton.Config({})], key=[])
@triton.jit
def squash(x_ptr, y_ptr):
    tl.store(y_ptr + tl.arange(0, 8), tanh(tl.load(x_ptr + tl.arange(0, 8))))

x = torch.linspace(-2, 2, 8)
squash[(1,)](x, y := torch.empty(8))
torch.testing.assert_close(y, x.tanh())
"""


def test_capture_without_a_gpu_computes_functions_of_libdevice(tmp_path: Path) -> None:
    (tmp_path / "squash.py").write_text(OF_LIBDEVICE)
    assert run("capture", "--out", tmp_path / "cap", "--", python(), tmp_path / "squash.py").exit_code == 0
    assert run("sweep", tmp_path / "cap", "--check-only").exit_code == 0


def test_capture_of_a_failing_program_reports_its_exit_code(tmp_path: Path) -> None:
    result = run("capture", "--out", tmp_path / "cap", "--", "false")
    message = (
        "nothing was captured: the program ended with 1 before it launched a kernel of triton.autotune or kerneltune.autotune\n"
    )
    assert (result.exit_code, result.stderr) == (1, message)
    crashing = tmp_path / "crashing.py"
    crashing.write_text("import os\nos._exit(134)\n")
    result = run("capture", "--out", tmp_path / "cap", "--", python(), crashing)
    assert result.stderr.startswith(
        "nothing was captured: the program ended with 134 before or in its first launch of a kernel of triton"
    )


def test_capture_into_the_same_folder_replaces_kernels_whose_source_has_changed(tmp_path: Path) -> None:
    (launch,) = captured(tmp_path, pattern="row_sum").classes
    for number, change in enumerate(
        ({"source": "0" * 12}, {"source": "0" * 12, "kernel": {"module": "other", "name": "row_sum"}})
    ):
        stored = json.loads((tmp_path / CLASSES / launch.digest / META).read_text())
        other = tmp_path / CLASSES / str(number)
        shutil.copytree(tmp_path / CLASSES / launch.digest, other)
        (other / META).write_text(json.dumps(stored | change | {"digest": other.name}))
    assert [one.digest for one in remove_stale(tmp_path, [launch.digest])] == ["0"]
    assert {one.digest for one in read_capture(tmp_path).classes} == {launch.digest, "1"}


def test_capture_with_autotune_without_a_gpu_fails(tmp_path: Path) -> None:
    result = run("capture", "--autotune", "--out", tmp_path / "cap", "--", "true")
    assert (result.exit_code, result.stderr) == (2, "error: autotune: expected a GPU: in the interpreter nothing can be timed\n")


def test_capture_of_a_misnamed_knob_exits_with_2_until_it_is_corrected(tmp_path: Path) -> None:
    reason = "not captured: train.py:3: k: configs[0]: 'BLOK': expected a parameter of the kernel: x, BLOCK"
    notes = json.dumps({"launches": {}, "refused": {"train.k": reason}, "misnamed": ["train.k"]})
    script = tmp_path / "program.sh"
    script.write_text(f"mkdir -p {tmp_path}/launches\ncat > {tmp_path}/launches/1.json <<EOF\n{notes}\nEOF\n")
    result = run("capture", "--out", tmp_path, "--", "sh", script)
    assert (result.exit_code, result.stderr) == (2, f"error: train.k: {reason}\n")
    again = run("capture", "--out", tmp_path, "--", "false")
    assert again.exit_code == 1
    assert "the program ended with 1 before it launched a kernel" in again.stderr


def test_capture_of_a_corrected_kernel_drops_the_earlier_reason(tmp_path: Path) -> None:
    (launch,) = captured(tmp_path, pattern="row_sum").classes
    for kernel in (launch.kernel.text, "train.k"):
        (tmp_path / "launches" / f"{kernel}.json").write_text(
            json.dumps({"launches": {}, "refused": {kernel: "not captured: 'BLOK'"}, "misnamed": [kernel]})
        )
    assert read_capture(tmp_path).notes.refused == {"train.k": "not captured: 'BLOK'"}


def _noting(root: Path, **notes: object) -> tuple[str, str, Path]:
    """Return a program that leaves the notes of a process in the capture that it runs in."""
    script = root / "program.sh"
    text = json.dumps({"launches": {}, **notes})
    script.write_text(f"mkdir -p {root}/launches\ncat > {root}/launches/$$.json <<EOF\n{text}\nEOF\n")
    return "--", "sh", script


def test_capture_with_a_pattern_without_a_match_lists_launched_kernels_or_names_the_nearest(tmp_path: Path) -> None:
    program = _noting(tmp_path, made={"train.attn_fwd": "", "train.<locals>.norm": ""})
    result = run("capture", "--out", tmp_path, "--kernel", "atn_fwd", *program)
    message = "nothing was captured: --kernel 'atn_fwd' is the name of no kernel of the program; did you mean attn_fwd?\n"
    assert (result.exit_code, result.stderr) == (1, message)
    shown = run("capture", "--out", tmp_path, "--kernel", "softmax", *program).stderr
    assert shown.endswith("--kernel 'softmax' is the name of no kernel of the program: train.<locals>.norm, train.attn_fwd\n")
    assert "the program launched no kernel" in run("capture", "--out", tmp_path, "--kernel", "attn*", *program).stderr


def test_capture_of_launches_that_cannot_be_replayed_does_not_offer_to_check_them(tmp_path: Path) -> None:
    (launch,) = captured(tmp_path, pattern="row_sum").classes
    file = tmp_path / CLASSES / launch.digest / META
    file.write_text(json.dumps(json.loads(file.read_text()) | {"problem": "a function made the kernel"}))
    result = run("capture", "--out", tmp_path, *_noting(tmp_path, launches={launch.digest: [1, None]}))
    assert result.exit_code == 1
    assert " ".join(result.stderr.split()).endswith(
        f"none of these launches can be checked or tuned: `kerneltune adopt lint {tmp_path}` says why"
    )


def test_check_of_a_kernel_whose_source_has_changed_says_so_once(tmp_path: Path) -> None:
    for launch in captured(tmp_path, (4, 96), (4, 128), pattern="row_sum").classes:
        file = tmp_path / CLASSES / launch.digest / META
        file.write_text(json.dumps(json.loads(file.read_text()) | {"source": "0" * 12, "bytecode": "0" * 16}))
    write_capture_sweep(read_capture(tmp_path))
    result = run("sweep", tmp_path, "--check-only")
    assert result.exit_code == 1
    assert result.output.count("its source has changed since it was captured") == 1
    assert "are inputs and reference right?" not in result.output


def test_capture_with_two_patterns_exits_with_2(tmp_path: Path) -> None:
    result = run("capture", "--out", tmp_path / "cap", "--kernel", "a", "--kernel", "b", "--", "true")
    assert (result.exit_code, result.stderr) == (2, "error: kernel: 'b': expected --kernel once, like 'attn_*'\n")


def test_capture_of_nothing_into_an_earlier_capture_fails_without_a_table(tmp_path: Path) -> None:
    captured(tmp_path, pattern="row_sum")
    result = run("capture", "--out", tmp_path, "--", "false")
    ended = "the program ended with 1 before it launched a kernel of triton.autotune or kerneltune.autotune"
    kept = f"{tmp_path} keeps its earlier launches"
    assert (result.exit_code, result.stderr) == (1, f"nothing was captured: {ended}; {kept}\n")
    assert run("capture", "--out", tmp_path, "--", "true").exit_code == 1  # else a CI would go on with the earlier launches
