"""Compute medians, bootstrap intervals and ratios of interleaved samples, and shifts between runs of several processes.

Within one process, rounds are resampled (`median_interval`, `ratio_interval`). An interval of one process lacks the differences
between processes: addresses, the order of allocations, the state of the clocks. So a shift between two runs is resampled by
process, then by round within the process. Each process gives a median of logarithms, and the centre of a run is the mean of these
medians. The variance of this bootstrap has a closed form, which is used instead of random numbers:

    variance = (spread between the process medians + mean bootstrap variance of the median within a process) / processes

The second term is exact (a bootstrap median is an order statistic whose rank has a beta distribution, Maritz and Jarrett 1978).
The first term is uncertain with 2 or 3 processes. A plain bootstrap of so few processes is too narrow for two reasons: it
divides by P instead of P - 1, and it takes normal quantiles. Here the spread is divided by the degrees of freedom, pooled over
both runs (the same harness on the same GPU), and Student's t widens intervals and p-values. Because process medians contain the
noise of their rounds, the second term counts this noise twice. So intervals are too wide rather than too narrow, and three
medians that agree by chance do not give a narrow interval.
Assumptions: processes are exchangeable, and their medians are about normal on the log scale; an outlier widens the interval.

scipy.special is imported inside functions, because a search does not need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]

CONFIDENCE = 0.95
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """Hold a median and its bootstrap 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Return half the interval's width over the median; infinite where the median is zero."""
        return (self.high - self.low) / (2 * self.median) if self.median else float("inf")

    def contains(self, value: float) -> bool:
        """Return whether `value` lies inside the interval, ends included."""
        return self.low <= value <= self.high


def median_interval(samples: Samples) -> Interval:
    """Return the median of `samples` (rounds,) and its percentile bootstrap interval."""
    if samples.size == 0:
        raise ValueError("no samples to take a median of")
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(samples, size=(_RESAMPLES, samples.size)), axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.median(samples)), float(low), float(high))


def ratio_interval(numerator: Samples, denominator: Samples) -> Interval:
    """Return the median of numerator / denominator, paired by round, with its interval.

    Both samples (rounds,) come from the same interleaved rounds, so what slows a whole round cancels.
    """
    if numerator.shape != denominator.shape:
        raise ValueError(f"ratio of unpaired samples: {numerator.shape=} {denominator.shape=}")
    interval = median_interval(np.log(numerator / denominator))
    return Interval(float(np.exp(interval.median)), float(np.exp(interval.low)), float(np.exp(interval.high)))


@dataclass(frozen=True, slots=True)
class Shift:
    """Describe the slowdown of a run relative to another run, on the log scale.

    Attributes:
        log: log(new / old).
        error: standard error of `log`.
        freedom: degrees of freedom of the error; infinite where the error is assumed to be known.
    """

    log: float
    error: float
    freedom: float

    @property
    def slowdown(self) -> float:
        """Return new / old - 1."""
        return float(np.expm1(self.log))

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the 95 % interval of the slowdown."""
        return self.least((1 - CONFIDENCE) / 2), self.least((1 + CONFIDENCE) / 2)

    def least(self, p: float) -> float:
        """Return the slowdown that the new side exceeds, but for a probability of `p`."""
        from scipy.special import stdtrit

        return float(np.expm1(self.log - self.error * float(stdtrit(self.freedom, 1 - p))))

    @property
    def p_slower(self) -> float:
        """Return the one-sided p-value of the hypothesis that the new side is as fast as the old side, or faster."""
        from scipy.special import stdtr

        if self.error == 0:
            return 0.0 if self.log > 0 else 1.0
        return float(stdtr(self.freedom, -self.log / self.error))


def shifts(sides: Sequence[Sequence[Sequence[Sequence[float]]]]) -> list[Shift | None]:
    """Return the shift of each row; a row is (samples of the old run, samples of the new run), each a sequence per process.

    The shift of a row is None if neither run has two processes, or if a run has none.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for row, (old, new) in enumerate(sides):
        if not all(map(len, (*old, *new))):
            raise ValueError("no samples to take a median of")
        if old and new:
            groups.setdefault((tuple(map(len, old)), tuple(map(len, new))), []).append(row)
    result: list[Shift | None] = [None] * len(sides)
    for lengths, members in groups.items():
        freedom = len(lengths[0]) + len(lengths[1]) - 2
        if freedom < 1:
            continue
        centres, within = [], []
        for side in (0, 1):
            logs_of = [np.log([sides[row][side][process] for row in members]) for process in range(len(lengths[side]))]
            levels = list(map(_level, logs_of))
            centres.append(np.array([centre for centre, _variance in levels]))  # (processes, rows)
            within.append(np.array([variance for _centre, variance in levels]))
        between = np.sum([((part - part.mean(axis=0)) ** 2).sum(axis=0) for part in centres], axis=0) / freedom
        variance = np.sum([(between + part.mean(axis=0)) / len(part) for part in within], axis=0)
        logs = centres[1].mean(axis=0) - centres[0].mean(axis=0)
        for row, log, error in zip(members, logs.tolist(), np.sqrt(variance).tolist(), strict=True):
            result[row] = Shift(log, error, freedom)
    return result


def interval_shift(old: Interval, new: Interval) -> Shift:
    """Return the shift between two single processes by their intervals; its error lacks the differences between processes."""
    from scipy.special import ndtri

    widths = [np.log(interval.high / interval.low) / (2 * ndtri((1 + CONFIDENCE) / 2)) for interval in (old, new)]
    return Shift(float(np.log(new.median / old.median)), float(np.hypot(*widths)), float("inf"))


def centre_interval(processes: Sequence[Samples]) -> Interval:
    """Return the geometric mean of the process medians and its interval, resampled by process, then by round.

    For a single process, return the median and the interval of its rounds.
    """
    if len(processes) == 1:
        return median_interval(processes[0])
    if not processes or any(len(rounds) == 0 for rounds in processes):
        raise ValueError("no samples to take a median of")
    levels = [_level(np.log(np.asarray(rounds)[None])) for rounds in processes]
    centres, within = (np.concatenate(parts) for parts in zip(*levels, strict=True))
    spread = Shift(0.0, float(np.sqrt((centres.var(ddof=1) + within.mean()) / len(centres))), len(centres) - 1)
    centre = float(np.exp(centres.mean()))
    low, high = spread.bounds
    return Interval(centre, centre * (1 + low), centre * (1 + high))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: rejecting all values up to alpha makes any error with probability alpha at most."""
    order = np.argsort(p_values)
    steps = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return [float(p) for p in adjusted]


def _level(logs: Samples) -> tuple[Samples, Samples]:
    """Return for each row of logarithms (rows, rounds) the median and the variance of its bootstrap, both (rows,)."""
    rounds = logs.shape[1]
    logs = np.sort(logs, axis=1)
    weights = _rank_weights(rounds)
    means = logs @ weights
    squares = ((logs - means[:, None]) ** 2) @ weights
    return (logs[:, (rounds - 1) // 2] + logs[:, rounds // 2]) / 2, squares


@cache
def _rank_weights(rounds: int) -> Samples:
    """Return how often each of the sorted samples (rounds,) is the median of a resample."""
    from scipy.special import betainc

    half = (rounds + 1) / 2
    return np.diff(betainc(half, half, np.linspace(0.0, 1.0, rounds + 1)))
