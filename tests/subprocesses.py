"""Processes that tests start, and repositories for them."""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kerneltune.processes.worker import Worker

TESTS = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, where the package and the tests' modules come before what PYTHONPATH names."""
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


def commit_all(folder: Path) -> None:
    """Make a git repository of a folder, with a commit of all that the folder holds."""
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until it has happened, four minutes at most: on a busy machine, processes take a minute to import torch."""
    deadline = time.monotonic() + 240.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(session: int) -> list[str]:
    """Return the processes of a session; an ended process may stay listed until somebody asks what became of it."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            state, _, _, its, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            pids += [folder.name] if state != "Z" and int(its) == session else []
    return pids


def interrupted_stops(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Interrupt the first `Worker.stop` when the worker has ended, and return the list that takes each stopped worker."""
    stop, stopped = Worker.stop, list[Worker]()

    def interrupted(worker: Worker) -> None:
        stop(worker)
        stopped.append(worker)
        if len(stopped) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "stop", interrupted)
    return stopped
