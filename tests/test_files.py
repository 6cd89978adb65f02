"""Files that are replaced: whole, with their folders, or not at all."""

import os
from pathlib import Path

import pytest

from kerneltune.files import append_text, replace_text


def test_replace_and_append(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.md"
    replace_text(path, "1 µs\n")
    replace_text(path, "2 µs\n")
    append_text(path, "3\n")
    assert path.read_text(encoding="utf-8") == "2 µs\n3\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.md"
    replace_text(path, "before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match=f"^cannot write {path}: No space left on device$"):
        replace_text(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_text(tmp_path / "a.md", "after")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.md", tmp_path):
        with pytest.raises(ValueError, match=f"^cannot write {path}: "):
            replace_text(path, "x")
    with pytest.raises(ValueError, match="^cannot write "):
        append_text(tmp_path, "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pipe_is_written_and_stays_a_pipe() -> None:
    replace_text(Path("/dev/null"), "x")
    assert not Path("/dev/null").is_file()
