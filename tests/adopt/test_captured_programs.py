"""Capture: programs run as before, and what they launch is kept however they end."""

from pathlib import Path

import pytest
from adopted import of_kernel, run_python
from asserting import every
from warm_python import python

from kerneltune.adopt.overview import read_capture

PROGRAM = """
import multiprocessing, os, sys
import two_kernels
def work(columns):
    two_kernels.step(4, columns)
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=work, args=(64,))
    process.start(); process.join()
    work(96)
    print("out"); print("err", file=sys.stderr)
    sys.exit(7)
"""


def test_capture_command_reaches_child_processes_and_keeps_output_and_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    code = "from kerneltune.cli import main; main()"
    done = run_python(code, "capture", "--out", str(tmp_path / "cap"), "--", python(), str(script))
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert done.stderr.startswith("err\n")
    sums = of_kernel(read_capture(tmp_path / "cap"), "row_sum")
    assert sorted(one.sizes["N"] for one in sums) == [64, 96]
    assert "row_sum" in done.stderr


ENDED = """
import multiprocessing, os, signal, sys
def work(columns):
    import two_kernels
    for _ in range(3):
        two_kernels.step(4, columns)
    if columns == 128:
        os._exit(0)
    if columns == 160:
        os.kill(os.getpid(), signal.SIGTERM)
if __name__ == "__main__":
    for columns in (64, 128, 160):
        process = multiprocessing.get_context("forkserver").Process(target=work, args=(columns,))
        process.start(); process.join()
"""


def test_capture_counts_launches_of_workers_however_they_end(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ENDED)
    code = "from kerneltune.cli import main; main()"
    done = run_python(code, "capture", "--out", str(tmp_path / "cap"), "--", python(), str(script))
    assert done.returncode == 0, done.stderr
    capture = read_capture(tmp_path / "cap")
    counts = {one.sizes["N"]: capture.count(one).launches for one in of_kernel(capture, "row_sum")}
    assert counts == {64: 3, 128: 3, 160: 3}


def test_capture_of_a_pytest_run_adds_no_warning_to_its_output(tmp_path: Path) -> None:
    (tmp_path / "test_of_user.py").write_text("import two_kernels\ndef test_step():\n    two_kernels.step(4, 96)\n")
    command = [python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    code = "from kerneltune.cli import main; main()"
    done = run_python(code, "capture", "--out", str(tmp_path / "cap"), "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed in" in done.stdout
    assert len(read_capture(tmp_path / "cap").classes) == 2


KILLED = """
import os, signal
from pathlib import Path
from kerneltune.adopt import startup
import two_kernels
startup.capture(Path({folder!r}))
two_kernels.step(4, 96)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_capture_of_a_killed_program_keeps_its_classes(tmp_path: Path) -> None:
    done = run_python(KILLED.format(folder=str(tmp_path)), TRITON_INTERPRET="1")
    assert done.returncode == -9
    capture = read_capture(tmp_path)
    assert sorted(one.kernel.name for one in capture.classes) == ["row_sum", "scale_chosen"]
    assert capture.problems == []


LEAVING = """
import os, sys, tempfile
from pathlib import Path
from kerneltune.adopt import startup
startup.capture(Path("cap"))
sys.path.insert(0, "lib")
import torch, kernel_of_lib
folder = tempfile.mkdtemp()
for leave in (lambda: None, lambda: os.chdir(folder), lambda: os.rmdir(folder)):
    leave()
    x = torch.ones(2, len(sys.path))
    kernel_of_lib.row_sum[(2,)](x, torch.empty(2), 2, x.shape[1])
    sys.path.append(f"other{len(sys.path)}")
print("ended")
"""


def test_capture_of_a_program_that_leaves_and_removes_its_folder_keeps_each_class_and_where_its_imports_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "kernel_of_lib.py").write_text("from two_kernels import *\n")
    monkeypatch.chdir(tmp_path)
    done = run_python(LEAVING, TRITON_INTERPRET="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
    classes = read_capture(tmp_path / "cap").classes
    assert len(classes) == 3
    assert every(str(tmp_path / "lib") in one.path for one in classes)
