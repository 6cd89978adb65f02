"""A whole search on a made-up bench, in a process of its own that tests kill: `python kill_jobs.py FOLDER DOES`."""

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bench_jobs import CASE, OPS, VARIANT, FakeBench, Knobs
from fake_tuner import CompiledAtOnce

from kerneltune import cache
from kerneltune.plan import Options
from kerneltune.processes import interrupts
from kerneltune.search.loop import SearchLimits
from kerneltune.search.trials import TrialStore
from kerneltune.task import Task
from kerneltune.tune.gpu_worker import GpuWorker
from kerneltune.tune.tuner import Tuner


def main(folder: Path, does: str) -> None:
    """Search sixty configs that do the same; the store and the cache are below `folder`."""
    space, default = {"does": (does,), "n": tuple(range(60))}, Knobs(does, 0)
    variant = replace(VARIANT, space=lambda _case: space, default=lambda _case: default)
    store = TrialStore(folder / "trials.log", source_hash="abc")
    with GpuWorker(FakeBench) as bench:
        cache.use_root(folder / "configs")
        options = Options(search=SearchLimits())
        Tuner(Task(OPS[0], CASE, variant), store, bench, CompiledAtOnce(), options).tune()


def fork_instead(_python: str, command: list[str], kept: Iterable[int]) -> int:
    """multiprocessing.util.spawnv_passfds without a fresh interpreter, which would take seconds to import torch."""
    if pid := os.fork():
        return pid
    try:
        low = 3
        for fd in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, fd)
            low = fd + 1
        atexit._clear()
        sys.modules.pop("kerneltune.processes", None)
        with suppress(SystemExit):
            exec(command[-1])
        atexit._run_exitfuncs()
    finally:  # not through what the fork stands in
        os._exit(0)


if __name__ == "__main__":
    interrupts.take()  # as commands do: a package may catch an interrupt within an import
    main(Path(sys.argv[1]), sys.argv[2])
