"""Measure how compiling disturbs measuring: a config against itself, with the compile pool idle and busy.

Prints nothing and keeps nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kerneltune.measuring.compiler import CompileJob, CompilePool, PendingCompile, compile_job
from kerneltune.plan import Options
from kerneltune.search.task import Task
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.stats import Interval, Samples, deciles, median_interval, ratio_interval
from kerneltune.tuning.bench import ChildCrashedError, GpuBench, IsolatedBench
from kerneltune.tuning.stage import Machines, empty_caches

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of measurements in one state of the pool.

    Attributes:
        floor: how far from 1 the interval of the config against itself reaches, the largest of the repeats.
        spread: (p90 - p10) / median of the samples.
        time_us: the config's time and its interval.
    """

    floor: float
    spread: float
    time_us: Interval


def disturbance(op: Op, case: Case, variant: Variant, config: Config, options: Options) -> tuple[Noise, Noise]:
    """Measure the noise with the pool idle, and with every worker compiling the other configs, each once, into an empty cache.

    Raises:
        ValueError: the config has no time, or takes the measuring process along; there is not enough else to compile.
    """
    where = f"{op.name} {variant.name}: {case.label}"
    others = [other for other in variant.configs(case) if other != config]
    if not others:
        raise ValueError(f"{where}: one config: expected others, which are compiled while it is timed")
    with empty_caches(), Machines(options) as machines:
        try:
            task = Task(op, case, variant, options.policy)
            trial = machines.bench.trial(task, config, None)  # compiled before anything is timed
            if trial.time_us is None:
                raise ValueError(f"{where}: {trial.status}: {trial.detail}")
            idle = _noise([time_twice(machines.bench, task, config) for _ in range(_REPEATS)])
            compiling = _Compiling(machines.pool, [compile_job(task, other) for other in others])
            busy_samples = []
            for _ in range(_REPEATS):
                compiling.top_up()
                busy_samples.append(time_twice(machines.bench, task, config))
                if compiling.left < machines.pool.workers:
                    few = f"{len(others)} other configs keep {machines.pool.workers} workers busy for less than it takes"
                    raise ValueError(f"{where}: {few}: fewer --workers, or a case with a larger space")
            compiling.stop()
            machines.bench.close()
        except ChildCrashedError as error:
            raise ValueError(f"{where}: crashed: {error}") from error
    return idle, _noise(busy_samples)


def time_twice(bench: GpuBench | IsolatedBench, task: Task, config: Config) -> list[Samples]:
    """Time a config twice in the same rounds.

    Raises:
        ValueError: there is not the memory for it.
    """
    samples = [taken for taken in bench.samples(task, [config, config]) if taken is not None]
    if len(samples) < 2:
        raise ValueError(f"{config}: not enough memory to time it twice")
    return samples


class _Compiling:
    """Jobs of a pool, each given once."""

    def __init__(self, pool: CompilePool, jobs: Sequence[CompileJob]) -> None:
        self._pool, self._jobs = pool, iter(jobs)
        self._pending: list[PendingCompile] = []

    def top_up(self) -> None:
        """Submit jobs until twice as many wait as there are workers: enough for as long as samples take."""
        wanted = 2 * self._pool.workers - self.left
        self._pending += [self._pool.submit(job) for job in islice(self._jobs, wanted)]

    @property
    def left(self) -> int:
        """Jobs that are not done."""
        self._pending = [waiting for waiting in self._pending if not waiting.done()]
        return len(self._pending)

    def stop(self) -> None:
        """Give up what is not done."""
        for waiting in self._pending:
            waiting.cancel()


def _noise(repeats: list[list[Samples]]) -> Noise:
    floors = []
    for first, second in repeats:
        interval = ratio_interval(first, second)
        floors.append(max(abs(interval.low - 1), abs(interval.high - 1)))
    samples = np.concatenate([times for pair in repeats for times in pair])
    every = median_interval(repeats[0][0])
    p10, p90 = deciles(samples)
    return Noise(max(floors), (p90 - p10) / every.median, every)
