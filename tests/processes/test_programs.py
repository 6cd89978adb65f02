"""Test the commit of the source that runs."""

import subprocess
from pathlib import Path

from subprocesses import commit_all

from kerneltune.processes.programs import commit


def repository(folder: Path) -> str:
    """Make a git repository of a folder and return its commit."""
    (folder / "kerneltune").mkdir(parents=True)
    (folder / "kerneltune" / "a.py").touch()
    commit_all(folder)
    return subprocess.run(["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def test_commit_of_a_checkout_says_whether_the_package_was_changed(tmp_path: Path) -> None:
    clean, changed = tmp_path / "clean", tmp_path / "changed"
    head = repository(clean)
    assert commit(clean) == head
    head = repository(changed)
    (changed / "notes.txt").touch()
    (changed / "kerneltune" / "a.py").write_text("b = 1\n")
    assert commit(changed) == f"{head}+"


def test_commit_of_a_package_installed_below_another_repository_is_unknown(tmp_path: Path) -> None:
    repository(tmp_path)
    installed = tmp_path / ".venv" / "site-packages"
    (installed / "kerneltune").mkdir(parents=True)
    assert commit(installed) == "unknown"
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    (unpacked / ".git_archival.txt").write_text("abc1234\n")
    assert commit(unpacked) == "abc1234"
