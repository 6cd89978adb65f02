"""Temporary folders: removed with their process or by the next one, and never those that are used or somebody else's."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from started import environment

from kerneltune import temporary

HOLD = """
import os, sys
from pathlib import Path
from kerneltune import temporary

folder = temporary.process_folder()
(folder / "below").mkdir()
(folder / "below" / "file").touch()
print(folder, flush=True)
sys.stdin.read()
"""


def test_folder_of_a_killed_process_is_removed_by_the_next_and_no_other(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    strange, empty = short_path / "ktune-strange", short_path / "ktune-empty"
    strange.mkdir()
    (strange / "file").touch()
    empty.mkdir()
    (short_path / "ktune-link").symlink_to(strange)
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(
        command, env=environment(TMPDIR=str(short_path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        theirs = Path(process.stdout.readline().strip())
        assert not temporary.is_abandoned(theirs)
        with temporary.held_folder() as ours:
            assert sorted(path.name for path in short_path.iterdir()) == sorted(
                [theirs.name, ours.name, "ktune-strange", "ktune-link"]
            )
        process.send_signal(signal.SIGKILL)
    assert temporary.is_abandoned(theirs)
    temporary.remove_abandoned()
    assert sorted(os.listdir(short_path)) == ["ktune-link", "ktune-strange"]
    assert (strange / "file").exists()


def test_folder_for_sockets_is_below_tmp_where_the_path_of_tmpdir_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", ends.append)
    (tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    folder = temporary.process_folder()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "listener-12345678"))
    finally:
        ends.pop()()
    assert not folder.exists()
