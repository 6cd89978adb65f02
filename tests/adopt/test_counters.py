"""Counts of launches: kept whatever ends a process, each process in a file of its own."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from adopted import ROOT

from kerneltune.adopt.counters import SUFFIX, Counters, read_counts

PROGRAM = """
import os, signal, sys
from pathlib import Path
from kerneltune.adopt.counters import Counters
counters = Counters(Path(sys.argv[1]))
for name in ["a"] * 3 + ["b" * 300]:
    counters.add(counters.slot(name))
{end}
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_counts_of_a_process_that_ends_at_once_are_kept(tmp_path: Path, end: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(end=end), str(tmp_path)]
    subprocess.run(program, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert read_counts(tmp_path.glob(f"*{SUFFIX}")) == {"a": 3, "b" * 248: 1}


def test_counts_of_a_forked_process_go_to_its_own_file(tmp_path: Path) -> None:
    counters = Counters(tmp_path)
    slot = counters.slot("a")
    counters.add(slot)
    child = os.fork()
    if child == 0:
        counters.add(slot)
        counters.add(slot)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert sorted(read_counts([path])["a"] for path in tmp_path.glob(f"*{SUFFIX}")) == [1, 2]
    assert counters.by_name() == {"a": 1}


def test_counts_of_more_names_than_a_file_holds_are_kept(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "runs" / "today")
    for number in range(600):
        slot = counters.slot(f"kernel {number}")
        for _ in range(number % 3):
            counters.add(slot)
    expected = {f"kernel {number}": number % 3 for number in range(600)}
    assert counters.by_name() == expected
    assert read_counts(tmp_path.glob(f"runs/today/*{SUFFIX}")) == expected


class SlowName(str):
    """A name whose thread waits whenever a dict looks it up, so that other threads come between."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0.01)
        return super().__hash__()


def test_counts_of_names_that_threads_add_at_once_have_places_of_their_own(tmp_path: Path) -> None:
    counters = Counters(tmp_path)
    names = [SlowName(f"kernel {number}") for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        slots = list(threads.map(counters.slot, names))
    assert len(set(slots)) == 4
    for slot in slots:
        counters.add(slot)
    assert read_counts(tmp_path.glob(f"*{SUFFIX}")) == {str(name): 1 for name in names}


def test_counts_of_a_folder_that_cannot_be_made_are_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    counters = Counters(tmp_path / "file" / "folder")
    counters.add(counters.slot("a"))
    assert counters.by_name() == {"a": 1}


def test_counts_of_a_damaged_file_are_empty(tmp_path: Path) -> None:
    (tmp_path / f"1{SUFFIX}").write_bytes(b"\1\2\3")
    assert read_counts([tmp_path / f"1{SUFFIX}", tmp_path / "missing"]) == {}
