"""Whether compiling disturbs measuring: a config against itself in the measuring child, with the compile pool idle and busy.

Prints nothing and keeps nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from kerneltune.measuring.compiler import Pending
from kerneltune.plan import Options
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.stats import Interval, Samples, median_interval, ratio_interval
from kerneltune.tuning.machines import Machines
from kerneltune.tuning.tuner import job

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Noise:
    """Of one state of the pool.

    Attributes:
        floor: how far from 1 the interval of the config against itself reaches, the largest of the repeats.
        spread: (p90 - p10) / median of the samples.
        time_us: the config's time and its interval.
    """

    floor: float
    spread: float
    time_us: Interval


def disturbance(op: Op, case: Case, variant: Variant, config: Config, options: Options) -> tuple[Noise, Noise]:
    """The noise with the pool idle, and with every worker of it compiling.

    Raises:
        ChildLostError: the config takes the measuring process along.
    """
    with Machines(options) as machines:
        machines.bench.open(op, case, variant, options.policy)
        machines.bench.trial(config, None)  # compiled before anything is timed
        idle = _noise([machines.bench.samples([config, config]) for _ in range(_REPEATS)])
        others = cycle(other for other in variant.configs(case) if other != config)
        busy_samples = []
        pending: list[Pending] = []
        for _ in range(_REPEATS):
            pending += [machines.pool.submit(job(op, case, other, variant)) for other in _twice(others, machines.pool.workers)]
            busy_samples.append(machines.bench.samples([config, config]))
        for waiting in pending:
            waiting.cancel()
        machines.bench.close()
    return idle, _noise(busy_samples)


def _twice(others: Iterator[Config], workers: int) -> Iterator[Config]:
    """Enough for every worker to be busy as long as the samples take."""
    return islice(others, 2 * workers)


def _noise(repeats: list[list[Samples]]) -> Noise:
    floors = []
    for first, second in repeats:
        interval = ratio_interval(first, second)
        floors.append(max(abs(interval.low - 1), abs(interval.high - 1)))
    samples = sorted(float(time) for first, second in repeats for time in (*first, *second))
    every = median_interval(repeats[0][0])
    p10, p90 = samples[int(0.1 * (len(samples) - 1))], samples[int(0.9 * (len(samples) - 1))]
    return Noise(max(floors), (p90 - p10) / every.median, every)
