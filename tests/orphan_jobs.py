"""A command that starts the processes of a search, which never end by themselves, for test_kill.py."""

import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from bench_jobs import CASE, LOG, OPS, VARIANT, FakeBench, Knobs
from pool_jobs import op_of, run_of

from kerneltune import cli
from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compiler import CompilePool
from kerneltune.processes.start import end, start
from kerneltune.task import Task
from kerneltune.tune.gpu_worker import GpuWorker

STARTED = 4
"""A line of the log for each."""


def no_inputs(_case: object, *, device: str) -> Mapping[str, Any]:
    """Return the inputs of a job that compiles nothing."""
    return {}


def compile_for_ever(_inputs: Mapping[str, Any], _config: object) -> None:
    """Hang as a compiler may."""
    hang()


OP = op_of(__name__, no_inputs, compile_for_ever)


def work_for_ever(_pipe: Connection) -> None:
    """Hang as a process of a GPU may before it is ready."""
    hang()


def hang() -> None:
    """Note the process, then hang."""
    with open(os.environ[LOG], "a") as file:
        file.write("hangs\n")
    time.sleep(3600)


def search() -> None:
    """Run the process of a GPU, two compilers and a GPU worker."""
    with (
        ExitStack() as stack,
        CompilePool(TARGETS["sm_90"], 2) as pool,
        GpuWorker(FakeBench) as bench,
    ):
        stack.callback(end, start(work_for_ever)[0])
        for _ in range(2):
            pool.submit(run_of(OP, compile_for_ever))
        ThreadPoolExecutor(1).submit(bench.measure, Task(OPS[0], CASE, VARIANT), Knobs("hang", 0), None)
        time.sleep(3600)


def main() -> None:
    """Run `kerneltune search`."""
    cli.app.command("search")(search)
    sys.argv = ["kerneltune", "search"]
    cli.main()
