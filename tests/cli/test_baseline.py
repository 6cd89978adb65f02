"""Baselines out of git and out of files."""

import subprocess
from pathlib import Path

import pytest
from gate_rows import record
from literal_records import to_json

from kerneltune.cli.files import load_baseline
from kerneltune.records import append


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a checkout whose only commit, tagged v1, has results/r.jsonl with a row of 100 µs; the file now has 120 µs."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "r.jsonl"
    append(path, [record(100.0)])
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "rows"], ["tag", "v1"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    path.write_text(to_json(record(120.0)) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_load_baseline_reads_a_file_a_revision_and_a_path_in_a_revision(repository: Path) -> None:
    counterpart = Path("results/r.jsonl")
    assert load_baseline("results/r.jsonl", Path("elsewhere.jsonl")) == [record(120.0)]
    assert load_baseline("v1", counterpart) == load_baseline("HEAD", repository / counterpart) == [record(100.0)]
    assert load_baseline("v1:results/r.jsonl", Path("elsewhere.jsonl")) == [record(100.0)]


def test_load_baseline_of_neither_file_nor_revision_raises_one_line(repository: Path) -> None:
    for name, text in (
        ("v2", "baseline: 'v2': no such file, and git says: fatal: "),
        (
            "v1:r.jsonl",
            "baseline: 'v1:r.jsonl': no such file, and git says: fatal: path 'r.jsonl' does not exist in 'v1': expected a .jsonl",
        ),
        ("v1:results", "baseline: 'v1:results': no such file, and git says: fatal: "),
        ("--help", "baseline: '--help': expected a .jsonl file, or a git revision that has "),
        ("", "baseline: '': expected a .jsonl file, or a git revision that has "),
        (":r.jsonl", "baseline: ':r.jsonl': expected a .jsonl file, or a git revision that has "),
        ("none.jsonl", "cannot read none.jsonl: No such file or directory"),
    ):
        with pytest.raises(ValueError) as caught:
            load_baseline(name, Path("results/r.jsonl"))
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^baseline: 'v1': expected a .jsonl file, or a git revision that has no/r.jsonl$"):
        load_baseline("v1", Path("no/r.jsonl"))


def test_load_baseline_of_uncommitted_records_says_to_commit_them(repository: Path) -> None:
    (repository / "results" / "new.jsonl").write_text(to_json(record(120.0)) + "\n")
    with pytest.raises(ValueError) as caught:
        load_baseline("HEAD", Path("results/new.jsonl"))
    assert str(caught.value) == (
        "baseline: 'HEAD': no such file, and git says: fatal: path 'results/new.jsonl' exists on disk, but not in 'HEAD': "
        "expected a .jsonl file, or a revision in which the records are committed"
    )


def test_load_baseline_of_broken_records_names_the_revision(repository: Path) -> None:
    (repository / "results" / "r.jsonl").write_text("{}\n")
    subprocess.run(["git", "commit", "-qam", "broken"], check=True)
    with pytest.raises(ValueError, match=r"^HEAD:./r.jsonl:1: op: missing$"):
        load_baseline("HEAD", Path("results/r.jsonl"))


def test_load_baseline_without_git_raises(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"^baseline: 'v1': no such file, and cannot run git: No such file or directory: "):
        load_baseline("v1", Path("results/r.jsonl"))
