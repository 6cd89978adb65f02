"""Inspections of a revision that are killed: no process outlives them, no folder stays. abuse/test_kills.py interrupts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from subprocesses import commit_all, environment, wait_for

INSPECT = """
import sys
from pathlib import Path
from kerneltune.inspection import revision
from kerneltune.processes import interrupts

interrupts.take()
revision.data_root = lambda folder: Path(sys.argv[1]) / folder
try:
    with revision.unpacked("HEAD") as tree:
        assert (tree / "pyproject.toml").is_file()
        if sys.argv[2] == "inspect":
            revision.inspected("HEAD", tree, [])
except KeyboardInterrupt:
    sys.exit(130)
"""


def checkout(folder: Path, started: Path) -> None:
    """Make a repository whose command writes its process's id and then hangs."""
    package = folder / "kerneltune" / "cli"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "kerneltune" / "__init__.py").touch()
    lines = [
        "import os, time",
        "from pathlib import Path",
        "def main():",
        f"    Path({str(started) + '.new'!r}).write_text(str(os.getpid()))",
    ]
    lines += [f"    os.rename({str(started) + '.new'!r}, {str(started)!r})", "    time.sleep(3600)"]
    (package / "__init__.py").write_text("\n".join(lines))
    commit_all(folder)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_inspection_of_a_revision_that_is_killed_leaves_no_folder(sent: signal.Signals, tmp_path: Path) -> None:
    started, repository, temporary = tmp_path / "started", tmp_path / "repository", tmp_path / "temporary"
    checkout(repository, started)
    temporary.mkdir()
    env = environment(TMPDIR=str(temporary))
    command = [sys.executable, "-c", INSPECT, str(repository)]
    with subprocess.Popen([*command, "inspect"], env=env) as process:
        wait_for(started.is_file)
        child = int(started.read_text())
        process.send_signal(sent)
        assert process.wait(timeout=240) == (130 if sent != signal.SIGKILL else -sent)
    wait_for(lambda: not alive(child))
    if sent == signal.SIGKILL:
        assert os.listdir(temporary)
        subprocess.run([*command, "only"], env=env, check=True, timeout=800)
    assert not os.listdir(temporary)
    assert not os.path.exists(repository / ".git" / "worktrees")
