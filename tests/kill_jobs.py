"""A whole search on a made-up bench, in a process of its own that test_kill.py kills: `python kill_jobs.py FOLDER DOES`.

`python kill_jobs.py FOLDER` does the same once for every line that it reads, in a fork that need not import anything again.
"""

import os
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing import util
from pathlib import Path

from bench_jobs import CASE, OPS, VARIANT, FakeBench, Knobs

from kerneltune.measuring.compiler import Compiled
from kerneltune.processes import start_server
from kerneltune.search.loop import Search
from kerneltune.search.trials import TrialStore
from kerneltune.tuning.isolated import IsolatedBench
from kerneltune.tuning.one_case import tune
from kerneltune.tuning.tuner import Tuner


def compiled(_config: object) -> "Future[Compiled]":
    """Nothing to compile."""
    future: Future[Compiled] = Future()
    future.set_result(Compiled((), 0.0))
    return future


def main(folder: Path, does: str) -> None:
    """Search sixty configs that do the same; the store and the cache are below `folder`."""
    space, default = {"does": (does,), "n": tuple(range(60))}, Knobs(does, 0)
    variant = replace(VARIANT, space=lambda _case: space, default=lambda _case: default)
    store = TrialStore(folder / "trials.log", source_hash="abc")
    with IsolatedBench(FakeBench) as bench:
        tune(Tuner(OPS[0], CASE, variant, "cold", store, bench), Search(), compiled, folder / "configs")


def fork_instead(_python: str, command: list[str], kept: Iterable[int]) -> int:
    """multiprocessing.util.spawnv_passfds without a fresh interpreter, which would take seconds to import torch."""
    if pid := os.fork():
        return pid
    try:
        low = 3
        for fd in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, fd)
            low = fd + 1
        exec(command[-1])
    finally:  # not through what the fork stands in
        os._exit(0)


def serve(folder: Path) -> None:
    """A search for every line of stdin; prints its process's id when it begins and its exit code when it has ended."""
    for _ in sys.stdin:
        if pid := os.fork():
            print(pid, flush=True)  # noqa: T201
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # noqa: T201
        else:
            setattr(util, "spawnv_passfds", fork_instead)  # noqa: B010
            start_server()  # as long as there is one thread
            main(folder, "run")
            sys.exit()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
