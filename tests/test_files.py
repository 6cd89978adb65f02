"""Files that are replaced: whole, with their folders, or not at all."""

import errno
import fcntl
import os
import time
import warnings
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from kerneltune import files
from kerneltune.files import UnwritableError, append_lines, decode, locked, read_bytes, replace_text


def test_append_after_replace_keeps_both_texts_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.md"
    replace_text(path, "1 µs\n")
    replace_text(path, "2 µs\n")
    append_lines(path, b"3\n")
    assert path.read_text(encoding="utf-8") == "2 µs\n3\n"
    assert list(path.parent.iterdir()) == [path]


def test_append_lines_behind_a_partial_line_cuts_or_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2")
    append_lines(path, b"3\n", keep_partial=True)
    assert path.read_bytes() == b"1\n2\n3\n"
    path.write_bytes(b"1\n2")
    append_lines(path, b"3\n")
    assert path.read_bytes() == b"1\n3\n"
    path.write_bytes(b"1")
    append_lines(path, b"3\n")
    assert path.read_bytes() == b"3\n"


@pytest.mark.parametrize("keep_partial", [False, True])
@pytest.mark.parametrize("before", [b"", b"1\n2\n"])
def test_append_lines_behind_a_whole_line_adds_only_the_lines(before: bytes, keep_partial: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(before)
    append_lines(path, b"3\n", keep_partial=keep_partial)
    assert path.read_bytes() == before + b"3\n"


def test_replace_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.md"
    replace_text(path, "before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match=f"^cannot write {path}: No space left on device$"):
        replace_text(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_replace_that_is_interrupted_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_text(tmp_path / "a.md", "after")
    assert list(tmp_path.iterdir()) == []


def test_replace_removes_temporary_files_of_killed_writers_only(tmp_path: Path) -> None:
    abandoned, held, other = (tmp_path / name for name in (f".{'0' * 16}.tmp", f".{'1' * 16}.tmp", ".a.tmp"))
    for path in (abandoned, held, other):
        path.write_text("")
    with held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        replace_text(tmp_path / "a.md", "after")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.md", held, other])


def test_replace_of_an_unwritable_path_raises_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.md", tmp_path):
        with pytest.raises(ValueError, match=f"^cannot write {path}: "):
            replace_text(path, "x")
    with pytest.raises(ValueError, match=r"^cannot write "):
        append_lines(tmp_path, b"x\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_replace_of_a_pipe_writes_into_it(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_text(path, "x")
        assert path.is_fifo()
        assert os.read(reader, 10) == b"x"
    finally:
        os.close(reader)


def test_replace_of_a_linked_file_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "a.json", tmp_path / "a.json"
    target.write_text("before")
    link.symlink_to(target)
    replace_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert list((tmp_path / "real").iterdir()) == [target]


def test_replace_never_follows_a_name_that_was_linked_beforehand(tmp_path: Path) -> None:
    path, victim = tmp_path / "a.json", tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".a.json.{os.getpid()}.tmp").symlink_to(victim)
    replace_text(path, "after")
    assert (path.read_text(), victim.read_text()) == ("after", "mine")


def test_read_of_a_pipe_a_folder_or_a_too_large_file_raises(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(ValueError, match=r"^cannot read .*pipe: not a regular file$"):
        read_bytes(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"^cannot read .*large: 11 bytes: expected at most 10$"):
        read_bytes(tmp_path / "large", 10)
    with pytest.raises(ValueError, match=r"^cannot read .*: Is a directory$"):
        read_bytes(tmp_path)


def test_lock_on_a_file_system_without_locks_raises_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    text = rf"^cannot write {tmp_path}/a.json: Function not implemented$"
    with pytest.raises(UnwritableError, match=text), locked(tmp_path / "a.json"):
        raise AssertionError("held without a lock")


def test_lock_that_is_held_raises_with_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WAIT_S", 0.05)
    path, done, warn = tmp_path / "a.json", Event(), warnings.warn

    def hold() -> None:
        with locked(path):
            done.wait(60)

    def warned(*given: Any, **options: Any) -> None:
        warn(*given, **options)
        done.set()

    holder = Thread(target=hold)
    holder.start()
    while not (tmp_path / ".a.json.lock").exists() or not (tmp_path / ".a.json.lock").read_text():
        time.sleep(0.01)
    monkeypatch.setattr(warnings, "warn", warned)
    with pytest.warns(UserWarning, match=rf"a\.json: locked by process {os.getpid()} \(.*\): waiting$"), locked(path):
        pass
    holder.join()


def test_decode_of_a_wrong_value_before_a_broken_tail_raises_one_line() -> None:
    with pytest.raises(ValueError) as error:
        decode('{"a": "x"} trailing', dict[str, int])
    assert "\n" not in str(error.value)


def test_decode_of_a_wrong_value_before_a_deeply_nested_tail_raises_one_line() -> None:
    with pytest.raises(ValueError) as error:
        decode('{"a": ' + "[" * 100_000, dict[str, int])
    assert str(error.value).startswith(("a: ", "JSON: "))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    replace_text(path, "1")
    path.chmod(0o664)
    replace_text(path, "2")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("2", 0o664)
