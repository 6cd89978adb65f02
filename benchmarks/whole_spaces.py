"""Time every config of the cases of a sweep file that have no kept trials on this GPU, and keep the trials. Needs a GPU.

python benchmarks/whole_spaces.py benchmarks/untuned_int4.yaml --op int4_fp8_gemm [--seconds 200] [--trials benchmarks/trials]

A config has up to three samples, so that four minutes of a GPU time 10,000 configs. Cases come in random order, and the times of
a case are kept when all are known.
"""

import argparse
import math
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from kept_trials import ROOT, Row, TrialBlock, path_of, read, write

from kerneltune import device, ops, sweep_file
from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compiler import CompilePool, CompileResult
from kerneltune.processes.start import start_server
from kerneltune.spec import Config
from kerneltune.task import Evaluation, Run, Task, knob_pairs, provenance
from kerneltune.tune.candidates import checked_space
from kerneltune.tune.gpu_worker import GpuBench
from kerneltune.tune.tuner import SMALL_SPILL

SAMPLES = 3
MORE_SAMPLES = 5
NEAR = 1.05
"""Factor over the fastest time within which a config is timed again."""


def tasks_of(path: Path, names: list[str], trials: Path, gpu: str) -> list[Task]:
    """Return the tasks of a sweep file's cases that have no kept trials, in random order."""
    known = ops.load()
    kept = {(name, row[0]) for name in known for block in read(path_of(name, gpu, trials)) for row in block.rows}
    cases = [(case.op, case.case) for case in sweep_file.load(path, known).bench if not names or case.op in names]
    tasks = [Task(known[op], case, known[op].variant("optimized")) for op, case in cases if (op, case) not in kept]
    random.Random(0).shuffle(tasks)
    return tasks


def begun(tasks: list[Task], pool: CompilePool) -> Iterator[tuple[Task, dict[Config, Future[CompileResult]]]]:
    """Yield every task with its compilations in random order, which began a task earlier."""
    ahead = None
    for task in tasks:
        configs = checked_space(task)
        random.Random(0).shuffle(configs)
        before, ahead = ahead, (task, {config: pool.submit(Run(task, config)) for config in configs})
        if before is not None:
            yield before
    if ahead is not None:
        yield ahead


def timed(
    bench: GpuBench, task: Task, config: Config, pending: Future[CompileResult], best_us: float | None, samples: int
) -> Evaluation:
    """Return the evaluation of a config."""
    compiled = pending.result()
    if compiled.error or (compiled.spill_bytes > SMALL_SPILL and config != task.default):
        evaluation = Evaluation("failed" if compiled.error else "spills", reason=compiled.error)
    else:
        evaluation = bench.measure(task, config, best_us, samples)
    shared = max((kernel.shared_bytes for kernel in compiled.kernels), default=0)
    return replace(
        evaluation, program_registers=compiled.program_registers, spill_bytes=compiled.spill_bytes, shared_bytes=shared
    )


class Keeper:
    """Keep the trials of a run in a block for each operator. Use as a context manager, which writes the files at its end."""

    def __init__(self, trials: Path) -> None:
        """Take the folder of the kept trials."""
        self._trials, self._rows = trials, dict[tuple[str, str, str], list[Row]]()

    def add(self, task: Task, rows: list[Row]) -> None:
        """Add the rows of a case."""
        known = self._rows.setdefault((task.op.name, task.variant.name, task.policy), [])
        known += rows
        timed_us = [row[2].time_us for row in rows if row[2].time_us]
        print(f"{task.key.label}: {len(rows)} configs, {min(timed_us, default=0):.2f} us", flush=True)

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, *_: object) -> None:
        for (op, variant, policy), rows in self._rows.items():
            path = path_of(op, device.current_slug(), self._trials)
            names: dict[str, Any] = {"op": op, "variant": variant, "policy": policy, "device": device.current().name}
            stamped = provenance(ops.load()[op].variant(variant))
            write(path, [*read(path), TrialBlock(**names, **stamped, rows=tuple(rows))])


def measure(bench: GpuBench, task: Task, compiled: Mapping[Config, Future[CompileResult]]) -> list[Row]:
    """Time the configs of a case; time the configs that are nearly the fastest again, so that luck chooses none."""
    found: dict[Config, Evaluation] = {}
    best_us: float | None = None
    for config, pending in compiled.items():
        found[config] = evaluation = timed(bench, task, config, pending, best_us, SAMPLES)
        best_us = min(best_us or math.inf, evaluation.time_us or math.inf)
    for config, evaluation in found.items():
        if evaluation.time_us is not None and best_us is not None and evaluation.time_us <= NEAR * best_us:
            found[config] = timed(bench, task, config, compiled[config], None, MORE_SAMPLES)
    return [(task.case, knob_pairs(config), evaluation) for config, evaluation in found.items()]


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--op", action="append", default=[], help="only this operator; may be repeated")
    parser.add_argument("--seconds", type=float, default=200.0, help="no case begins later")
    parser.add_argument("--trials", type=Path, default=ROOT, help="folder of the kept trials")
    parser.add_argument("--workers", type=int, help="processes that compile")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    start_server()
    tasks = tasks_of(options.sweep, options.op, options.trials, device.current_slug())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    bench = GpuBench()
    with CompilePool(TARGETS[device.current().arch], options.workers) as pool, Keeper(options.trials) as keeper:
        for task, compiled in begun(tasks, pool):
            if time.monotonic() > end:
                break
            keeper.add(task, measure(bench, task, compiled))


if __name__ == "__main__":
    main()
