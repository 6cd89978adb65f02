"""A search that is killed or interrupted: nothing is lost but the running evaluation, nothing measured twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from bench_jobs import LOG
from orphan_jobs import STARTED
from started import TESTS, environment, running, wait_for

from kerneltune import cache
from kerneltune.search.trials import history

KILLS = 20


@pytest.mark.timeout(280)
def test_twenty_kills_lose_nothing_but_the_running_evaluation(tmp_path: Path) -> None:
    log, trials = tmp_path / "log", tmp_path / "trials.log"
    env = environment(OMP_NUM_THREADS="1") | {LOG: str(log)}
    command = [sys.executable, str(TESTS / "kill_jobs.py"), str(tmp_path)]
    rng = random.Random(0)
    log.touch()
    exit_codes = []
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as searches:
        assert searches.stdin and searches.stdout

        def begin() -> int:
            """The id of a process that searches."""
            print(file=searches.stdin, flush=True)
            return int(searches.stdout.readline())

        for _ in range(KILLS):
            before = len(log.read_text().splitlines())
            process = begin()
            deadline = time.monotonic() + 60.0
            while len(log.read_text().splitlines()) <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.04))
            os.kill(process, signal.SIGKILL)
            exit_codes.append(int(searches.stdout.readline()))
            time.sleep(0.1)  # the measuring child sees that nobody asks any more
            for path in (tmp_path / "configs").rglob("*.json"):
                cache.load_strict(path)
        begin()
        exit_codes.append(int(searches.stdout.readline()))
        searches.stdin.close()
    assert exit_codes == [-signal.SIGKILL] * KILLS + [0]
    stored = Counter(row["config"]["n"] for row in history(trials))
    measured = Counter(map(int, log.read_text().split()))
    assert stored == Counter(range(60))  # every config once
    assert measured.keys() == stored.keys()
    assert measured.total() - 60 <= KILLS  # what was running when the process died is measured again, nothing else
    (path,) = (tmp_path / "configs").rglob("*.json")
    (entry,) = cache.load_strict(path)
    assert entry.config == {"does": "run", "n": 0}


@pytest.mark.parametrize("interrupts", [1, 2])
def test_what_is_measured_when_a_search_is_interrupted_is_not_waited_for_and_not_stored(interrupts: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    env = environment(OMP_NUM_THREADS="1") | {LOG: str(log)}
    command = [sys.executable, str(TESTS / "kill_jobs.py"), str(tmp_path), "hang"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60.0
        while process.poll() is None and not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(interrupts):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode and "KeyboardInterrupt" in said and "Error:" not in said
    assert log.read_text() == "0\n" and not (tmp_path / "trials.log").exists()


@pytest.mark.parametrize(("sent", "exit_code", "said"), [(signal.SIGKILL, -9, ""), (signal.SIGTERM, 130, "interrupted\n")])
def test_nothing_that_hangs_outlives_a_search_that_is_killed(
    sent: signal.Signals, exit_code: int, said: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", "import orphan_jobs; orphan_jobs.main()"]
    env = environment(OMP_NUM_THREADS="1") | {LOG: str(log)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(lambda: len(log.read_text().splitlines()) == STARTED)
        process.send_signal(sent)
        assert process.wait(timeout=30) == exit_code
        wait_for(lambda: not running(process.pid))
        assert process.stderr is not None and said in process.stderr.read()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
