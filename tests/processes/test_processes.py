"""Work in fresh processes: a new process per call, errors in a line, and temporary folders that end with processes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gate_rows import record
from subprocesses import environment

from kerneltune import files, records
from kerneltune.cli.loading import load_ops
from kerneltune.gating.run import _measure
from kerneltune.plan import Options, Selection
from kerneltune.processes.start import held_folder, in_fresh_processes, process_folder


def test_in_fresh_processes_starts_one_process_per_call_and_raises_their_errors(tmp_path: Path) -> None:
    pids = list(in_fresh_processes(2, os.getpid))
    assert len({*pids, os.getpid()}) == 3
    with pytest.raises(ValueError, match=r"^process 1 of 1 took longer than 0.5 s$"):
        list(in_fresh_processes(1, time.sleep, 60, timeout_s=0.5))
    with pytest.raises(ValueError, match=r"^process 1 of 2 crashed: exit code 7$"):
        list(in_fresh_processes(2, os._exit, 7))
    with pytest.raises(FileNotFoundError):
        list(in_fresh_processes(1, os.rmdir, str(tmp_path / "none")))


SERVED = """
from multiprocessing import get_context
from kerneltune.processes.start import start_server

start_server()
with get_context("forkserver").Pool(1) as pool:
    print(pool.apply(eval, ("[name in __import__('sys').modules for name in ('torch', 'triton')]",)))
"""


def test_fork_server_without_a_folder_leaves_interrupts_as_they_were() -> None:
    """A block of SIGINT would stay in this thread."""
    code = """
import os, signal, tempfile
from kerneltune.processes.start import start_server
tempfile.tempdir = "/nowhere"
try:
    start_server()
except FileNotFoundError:
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "KERNELTUNE_FORK_SERVER" in os.environ)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=800)
    assert done.stdout == "False False\n", done.stderr


@pytest.mark.parametrize("interpreted", [False, True])
def test_fork_server_imports_triton_unless_kernels_are_interpreted(interpreted: bool) -> None:
    env = {name: value for name, value in environment().items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    done = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, env=env, timeout=800)
    assert done.stdout == f"[True, {not interpreted}]\n", done.stderr[-2000:]


def test_in_fresh_processes_returns_records(tmp_path: Path) -> None:
    records.append(tmp_path / "r.jsonl", [record()])
    assert list(in_fresh_processes(1, records.load, tmp_path / "r.jsonl")) == [[record()]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_measuring_process_without_a_gpu_raises() -> None:
    with pytest.raises(ValueError, match=r"^gate --run needs a GPU: in the interpreter nothing can be timed$"):
        list(in_fresh_processes(1, _measure, load_ops, Selection("rmsnorm"), Options(), None))


@pytest.mark.parametrize("ends", ["nothing", "the server", "the command"])
def test_error_of_a_process_is_printed_unless_the_server_or_its_command_ends(ends: str) -> None:
    """A server that stalls does not notice that its command has ended."""
    code = f"""if True:
        import functools, os, sys
        from kerneltune.processes import start
        start._POLL_S = 0.05 if {ends == "nothing"} else 10.0
        command = os.getpid()
        if os.fork() == 0:
            sys.excepthook = functools.partial(start._show_error, os.getpid(), command)
            if os.fork() == 0:
                raise FileNotFoundError
            os._exit(0) if {ends == "the server"} else os.wait()
        os._exit(0) if {ends == "the command"} else os.wait()
    """
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0
    assert ("FileNotFoundError" in done.stderr) == (ends == "nothing")


def test_process_that_starts_while_its_command_ends_prints_no_traceback() -> None:
    code = """if True:
        import os
        from _multiprocessing import sem_unlink
        from multiprocessing import get_context
        from kerneltune.processes.start import start_server
        start_server()
        context = get_context("forkserver")
        lock = context.Lock()
        sem_unlink(lock._semlock.name)
        context.Process(target=print, args=(lock,)).start()
        os._exit(3)
    """
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=800)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


HOLD = """
import os, sys
from pathlib import Path
from kerneltune.processes.start import process_folder

folder = process_folder()
(folder / "below").mkdir()
(folder / "below" / "file").touch()
print(folder, flush=True)
sys.stdin.read()
"""


def test_folder_of_a_killed_process_is_removed_by_the_next_and_no_other(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    strange, empty = short_path / "ktune-strange", short_path / "ktune-held-empty"
    strange.mkdir()
    (strange / "file").touch()
    empty.mkdir()
    (short_path / "ktune-held-link").symlink_to(strange)
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(
        command, env=environment(TMPDIR=str(short_path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        theirs = Path(process.stdout.readline().strip())
        with held_folder() as ours:
            assert sorted(path.name for path in short_path.iterdir()) == sorted(
                [theirs.name, ours.name, "ktune-strange", "ktune-held-link"]
            )
        process.send_signal(signal.SIGKILL)
    assert theirs.exists()
    files.remove_abandoned(short_path.glob("ktune-held-*"))
    assert sorted(os.listdir(short_path)) == ["ktune-held-link", "ktune-strange"]
    assert (strange / "file").exists()


def test_folder_for_sockets_is_below_tmp_where_the_path_of_tmpdir_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", ends.append)
    (tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    folder = process_folder()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "listener-12345678"))
    finally:
        ends.pop()()
    assert not folder.exists()


STARTS = """
import os
from kerneltune.processes.start import in_fresh_processes
def work():
    for pid in in_fresh_processes(1, os.getpid):
        print("ended")
{guard}
"""


@pytest.mark.parametrize(
    ("guard", "code"),
    [
        ("work()", 1),
        ("if os.environ:\n    work()", 1),
        ("if __name__ == '__main__':\n    work()", 0),
        ("from multiprocessing import current_process\nif current_process().name == 'MainProcess':\n    work()", 0),
    ],
    ids=["none", "other condition", "name", "process"],
)
def test_program_without_a_guard_that_starts_processes_ends_with_the_line_that_lacks_it(
    tmp_path: Path, guard: str, code: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(STARTS.format(guard=guard))
    ended = subprocess.run([sys.executable, program], env=environment(), capture_output=True, text=True, timeout=800, check=False)
    assert (ended.returncode, ended.stdout) == (code, "" if code else "ended\n"), ended.stderr
    line = 7 + guard.count("\n")
    message = f"\nValueError: {program}:{line}: starts processes, each of which executes this file: expected below `if __name__"
    assert (ended.stderr.count(message), ended.stderr.count("\nValueError: ")) == (code, code)
