"""A search that is interrupted or killed amid an evaluation that hangs; abuse/test_kills.py kills other commands."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from bench_jobs import LOG
from orphan_jobs import STARTED
from subprocesses import TESTS, environment, running, wait_for


@pytest.mark.parametrize("interrupts", [1, 2])
def test_interrupted_search_neither_awaits_nor_stores_the_running_measurement(interrupts: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    env = environment(OMP_NUM_THREADS="1") | {LOG: str(log)}
    command = [sys.executable, str(TESTS / "kill_jobs.py"), str(tmp_path), "hang"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: process.poll() is not None or bool(log.read_text()))
        for _ in range(interrupts):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode
    assert "KeyboardInterrupt" in errors
    assert "Error:" not in errors
    assert log.read_text() == "0\n"
    assert not (tmp_path / "trials.log").exists()


@pytest.mark.parametrize(("sent", "exit_code", "message"), [(signal.SIGKILL, -9, ""), (signal.SIGTERM, 130, "interrupted\n")])
def test_killed_search_leaves_no_hanging_process(sent: signal.Signals, exit_code: int, message: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", "import orphan_jobs; orphan_jobs.main()"]
    env = environment(OMP_NUM_THREADS="1") | {LOG: str(log)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(lambda: len(log.read_text().splitlines()) == STARTED)
        process.send_signal(sent)
        assert process.wait(timeout=240) == exit_code
        wait_for(lambda: not running(process.pid))
        assert process.stderr is not None
        assert message in process.stderr.read()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
