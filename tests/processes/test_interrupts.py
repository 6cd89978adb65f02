"""Ctrl-C and SIGTERM wait for the end of an import or a lock, and end the command whatever a package makes of them."""

import signal
import subprocess
import sys
from pathlib import Path

from subprocesses import environment

IMPORTS = """
import sys, time
from kerneltune.processes import interrupts

interrupts.take()
sys.path.insert(0, sys.argv[1])
try:
    import slow_module
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", sys.modules["slow_module"].whole)
"""
LOCKS = """
import signal, sys, threading
from concurrent.futures import Future
from kerneltune.processes import interrupts

def is_free(lock):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(lock.acquire(blocking=False) and not lock.release()))
    thread.start()
    thread.join()
    return answers[0]

interrupts.take()
signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGINT))
num_free = 0
for i in range(20):
    future = Future()
    try:
        signal.setitimer(signal.ITIMER_REAL, 2e-5 + i * 1e-5)
        while True:
            future.done()
    except KeyboardInterrupt:
        num_free += is_free(future._condition)
print(num_free)
"""
AT_THE_END = """
import atexit, os, signal, sys
from kerneltune.processes import interrupts

interrupts.take()
interrupts.end()
for _ in range(int(sys.argv[1])):
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.exit(130)
"""
SLOW_MODULE = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    whole = True
except BaseException:
    whole = False
"""


def test_interrupt_within_an_import_waits_for_the_end_of_the_import(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    done = subprocess.run([sys.executable, "-c", IMPORTS, str(tmp_path)], capture_output=True, text=True, timeout=800)
    assert (done.returncode, done.stdout) == (0, "interrupted True\n"), done.stderr


def test_interrupt_within_a_call_of_a_future_leaves_no_lock_taken() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKS], capture_output=True, text=True, timeout=800)
    assert (done.stdout, done.stderr) == ("20\n", "")


def test_interrupt_at_the_end_of_a_command_is_silent_and_the_next_kills() -> None:
    for count, code in (("1", 130), ("2", -signal.SIGINT)):
        done = subprocess.run([sys.executable, "-c", AT_THE_END, count], capture_output=True, text=True, timeout=800)
        assert (done.returncode, done.stderr) == (code, "")


def test_interrupt_that_a_package_swallows_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        "from fake_operator import OPS\n"
    )
    command = [sys.executable, "-m", "kerneltune", "--plugin", str(tmp_path / "swallows.py"), "ops"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment())
    assert done.returncode == 130
    assert done.stderr in ("interrupted\n", "")
