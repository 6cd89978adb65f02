"""Run a command for every line of stdin, each in a fork of this process, which has imported and run everything before.

A line is JSON: a folder and the arguments of kerneltune, or `search` or `revision` for what has no command line without a GPU.
With a third value the command runs in this process, whose forks then need not import anything again; answers its exit code. Else
answers the id of the fork when it begins; when it has ended its exit code, how long processes that it started outlived it, in
seconds, and the command lines of those that had to be killed.
"""

import atexit
import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

import kill_jobs
import torch
from bench_jobs import LOG

from kerneltune import cli
from kerneltune.inspection import revision
from kerneltune.processes import interrupts
from kerneltune.processes.start import start_server

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: a process whose parent ends becomes this process's child."""
LONGEST_S = 10.0


def run(folder: str, arguments: Sequence[str]) -> None:
    """Run a command in a folder; exits as the command line does."""
    os.chdir(folder)
    if arguments[0] not in ("search", "revision"):
        sys.argv = ["kerneltune", *arguments]
        cli.main()
    interrupts.take()
    try:
        search() if arguments[0] == "search" else check_out()
    except (KeyboardInterrupt, OSError):  # an interrupt within shutil.rmtree ends it with an OSError
        if not interrupts.heard:
            raise
        sys.exit(130)


def search() -> None:
    """Search the sixty configs that have no trial yet, in this folder."""
    os.environ[LOG] = "log"
    setattr(util, "spawnv_passfds", kill_jobs.fork_instead)  # noqa: B010
    start_server()  # as long as there is one thread
    kill_jobs.main(Path(), "run")


def check_out() -> None:
    """Inspect the revision HEAD of the repository in this folder."""
    setattr(revision, "data_root", Path)  # noqa: B010
    with revision.unpacked("HEAD") as tree:
        revision.inspected("HEAD", tree, [])


def begin(folder: str, arguments: Sequence[str]) -> int:
    """Return the id of a fork that runs a command."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    code = exit_code(folder, arguments)
    atexit._run_exitfuncs()  # as at the end of Python, whose tearing down of modules takes ten times as long as a command
    os._exit(code)


def exit_code(folder: str, arguments: Sequence[str]) -> int:
    """Run a command; return its exit code."""
    try:
        run(folder, arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # before a command hears them, and behind it, they end its process
            signal.signal(number, signal.SIG_DFL)
    return 0


def reap() -> tuple[float, list[str]]:
    """Wait for all that is left of a command; return how long that took, and what had to be killed."""
    begun = time.monotonic()
    killed: list[str] = []
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return time.monotonic() - begun, killed
        if ended:
            continue
        if time.monotonic() - begun > LONGEST_S:
            for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
                with suppress(OSError):
                    killed.append(Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "))
                    os.kill(int(child), signal.SIGKILL)
        time.sleep(0.005)


def main() -> None:
    """Answer the lines of stdin."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    tempfile.gettempdir()  # tries the folder by a file of its own, which stays where Python is killed between two lines of it
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    for line in sys.stdin:
        folder, arguments, *here = json.loads(line)
        if here:
            answers.write(f"{exit_code(folder, arguments)}\n")
            gc.collect()
            gc.freeze()
            continue
        pid = begin(folder, arguments)
        answers.write(f"{pid}\n")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.write(json.dumps([code, *reap()]) + "\n")


if __name__ == "__main__":
    main()
