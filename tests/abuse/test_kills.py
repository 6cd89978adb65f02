"""Commands killed at random moments: nothing is lost, no verdict is wrong, and neither a process nor a file is left over."""

import json
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_sweeps import STREAM
from subprocesses import TESTS, commit_all, environment

from kerneltune import cache
from kerneltune.search.trials import history

REPO = TESTS.parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SAME = ("op", "variant", "case", "dtype", "quant", "axes", "options", "policy", "status", "reason", "family", "role")
"""Fields of a record that an uninterrupted run has as well."""
FAKE_COMMAND = """
import sys, time
from pathlib import Path

def main():
    time.sleep(0.02)
    Path(sys.argv[sys.argv.index("--save") + 1]).write_text('{"schema": 1, "triton": "3.7.1", "rows": []}')
"""


class Commands:
    """Commands in forks of one process."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server
        self.outlived_s: dict[tuple[signal.Signals | None, int], float] = {}

    def begin(self, folder: Path, arguments: Sequence[str]) -> int:
        """Start a command; return its process's id."""
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps([str(folder), arguments]), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the command that was started last; return whether it came in time."""
        return bool(select.select([self._server.stdout], [], [], seconds)[0])

    def end(self, sent: signal.Signals | None = None) -> int:
        """Return the exit code of the command that was started last.

        By signal and exit code, `outlived_s` has the least seconds by which something outlived a command: load delays some ends.
        """
        assert self._server.stdout
        code, outlived_s, killed = json.loads(self._server.stdout.readline())
        assert not killed, killed
        self.outlived_s[sent, code] = min(outlived_s, self.outlived_s.get((sent, code), math.inf))
        return int(code)

    def leave_nothing(self) -> bool:
        """Return whether nothing outlives a command by a second."""
        return max(self.outlived_s.values()) < 1.0

    def warm_up(self, folder: Path, arguments: Sequence[str]) -> None:
        """Run a command in the process that forks the other commands."""
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps([str(folder), arguments, True]), file=self._server.stdin, flush=True)
        assert self._server.stdout.readline() == "0\n"

    def run(self, folder: Path, arguments: Sequence[str]) -> float:
        """Run a command to its good end; return how long that took, in seconds."""
        begun = time.monotonic()
        self.begin(folder, arguments)
        assert self.end() == 0
        return time.monotonic() - begun


@contextmanager
def commands(**more: str) -> Iterator[Commands]:
    env = environment(OMP_NUM_THREADS="1", TRITON_INTERPRET="1", **more)
    command = [sys.executable, str(TESTS / "abuse" / "kill_server.py")]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield Commands(server)
        assert server.stdin
        server.stdin.close()


def some_records(folder: Path) -> None:
    lines = (REPO / "results" / "nvidia_h200" / "fp8_groups.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "records.jsonl").write_bytes(b"".join(lines[:60]))


def a_sweep(folder: Path) -> None:
    (folder / "tiny.yaml").write_text(STREAM)


def a_repository(folder: Path) -> None:
    """Make records in git, and a kerneltune that inspects nothing."""
    some_records(folder)
    package = folder / "kerneltune" / "cli"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(FAKE_COMMAND)
    commit_all(folder)


def nothing(_folder: Path) -> None:
    """Run a command that needs no file."""


def content(folder: Path) -> dict[str, object]:
    """Return the content of a folder's files without dates, times, locks and git's files."""
    content_of: dict[str, object] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"):
        name = str(path.relative_to(folder))
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            content_of[name] = sorted(({field: row.get(field) for field in SAME} for row in rows), key=str)
        elif not name.startswith(".git/"):
            content_of[name] = re.sub(rb' timestamp="[^"]*"', b"", path.read_bytes())
    return content_of


def searched(folder: Path) -> dict[str, object]:
    """Return the evaluations and the chosen config of a search."""
    (path,) = (folder / "configs").rglob("*.json")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
    stored = Counter(dict(trial.knobs)["n"] for trial in history(folder / "trials.log"))
    return {"stored": stored, "config": [entry.config for entry in cache.load_strict(path)], "names": names}


@dataclass(frozen=True)
class Kind:
    """A command, the files that it needs, and what of its files is the same in every run."""

    arguments: str
    prepare: Callable[[Path], None]
    kills: int
    content: Callable[[Path], dict[str, object]] = content


KINDS = {
    "sweep": Kind("sweep tiny.yaml --check-only --results results", a_sweep, 6),
    "search": Kind("search", nothing, 6, searched),
    "compare": Kind("compare --from records.jsonl --format csv -o table.csv", some_records, 3),
    "report": Kind("report records.jsonl -o page.html", some_records, 3),
    "gate": Kind("gate --allow-stale HEAD records.jsonl --junit junit.xml --markdown gate.md", a_repository, 3),
    "revision": Kind("revision", a_repository, 3),
}
"""Commands, and how often each is killed in every run, by each signal in turn."""


def kill(started: Commands, folder: Path, arguments: Sequence[str], sent: signal.Signals, after_s: float) -> tuple[int, float]:
    """Run a command that gets a signal after some time, unless it has ended; return its exit code, and how long it took."""
    begun = time.monotonic()
    pid = started.begin(folder, arguments)
    if not started.ends_within(after_s):
        with suppress(ProcessLookupError):  # it ends now
            os.kill(pid, sent)
    code = started.end(sent)
    good = (0, -sent) if sent == signal.SIGKILL else (0, 130, -sent, -signal.SIGINT)  # Python's own KeyboardInterrupt
    assert code in good, (arguments, sent, code)
    return code, time.monotonic() - begun


def kill_many(started: Commands, kind: Kind, kills: int, folder: Path) -> None:
    """Kill a command many times, end it once, and compare its files with the files of a run without kills."""
    killed, whole = folder / "killed", folder / "whole"
    for path in (killed, whole):
        path.mkdir(parents=True)
        kind.prepare(path)
    rng = random.Random(27)
    arguments = kind.arguments.split()
    if arguments[0] not in ("search", "revision"):
        started.warm_up(whole, arguments)
    started.outlived_s.clear()
    longest_s = started.run(whole, arguments)
    expected = kind.content(whole)
    in_time = sent = 0
    # a run that took longer than later ones makes kills late
    while sent < kills or (not (in_time and started.leave_nothing()) and sent < 4 * kills):
        code, took_s = kill(started, killed, arguments, SIGNALS[sent % len(SIGNALS)], rng.uniform(0.0, longest_s))
        sent += 1
        in_time += code != 0
        longest_s = longest_s if code else min(longest_s, took_s)  # later commands find more done and end sooner
    assert in_time, "none of the kills came in time"
    started.run(killed, arguments)
    assert kind.content(killed) == expected
    assert started.leave_nothing(), started.outlived_s
    if (killed / "log").exists():  # of a search: only what ran when it was killed is measured again
        assert len((killed / "log").read_text().splitlines()) - len((whole / "log").read_text().splitlines()) <= sent
    if (killed / ".git").exists():
        listed = subprocess.run(["git", "-C", str(killed), "worktree", "list"], check=True, capture_output=True, text=True)
        assert len(listed.stdout.splitlines()) == 1


def test_killed_commands_lose_nothing_and_leave_nothing(tmp_path: Path, short_path: Path) -> None:
    with commands(TMPDIR=str(short_path)) as started:
        for name, kind in KINDS.items():
            kill_many(started, kind, kind.kills, tmp_path / name)
            assert not list(short_path.rglob("*")), name


@pytest.mark.abuse
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_killed_commands_lose_nothing_and_leave_nothing(name: str, tmp_path: Path, short_path: Path) -> None:
    with commands(TMPDIR=str(short_path)) as started:
        kill_many(started, KINDS[name], 500, tmp_path / name)
    assert not list(short_path.rglob("*"))
