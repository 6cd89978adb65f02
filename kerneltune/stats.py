"""Medians, bootstrap intervals and ratios of interleaved samples.

Pure functions of numbers. May import numpy only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]

CONFIDENCE = 0.95
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its bootstrap 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width over the median; infinite where the median is zero."""
        return (self.high - self.low) / (2 * self.median) if self.median else float("inf")

    def contains(self, value: float) -> bool:
        """Whether `value` lies inside the interval, ends included."""
        return self.low <= value <= self.high


def median_interval(samples: Samples, seed: int = 0) -> Interval:
    """The median of `samples` (rounds,) and its percentile bootstrap interval.

    Raises:
        ValueError: no samples.
    """
    if samples.size == 0:
        raise ValueError("no samples to take a median of")
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(samples, size=(_RESAMPLES, samples.size)), axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.median(samples)), float(low), float(high))


def ratio_interval(numerator: Samples, denominator: Samples, seed: int = 0) -> Interval:
    """numerator / denominator, paired by round: the median ratio and its interval.

    Both samples (rounds,) come from the same interleaved rounds, so what slows a whole round cancels.

    Raises:
        ValueError: the samples are not paired.
    """
    if numerator.shape != denominator.shape:
        raise ValueError(f"ratio of unpaired samples: {numerator.shape=} {denominator.shape=}")
    logs = median_interval_of_logs(np.log(numerator / denominator), seed)
    return logs


def median_interval_of_logs(logs: Samples, seed: int = 0) -> Interval:
    """The interval of exp(median of `logs`)."""
    interval = median_interval(logs, seed)
    return Interval(float(np.exp(interval.median)), float(np.exp(interval.low)), float(np.exp(interval.high)))


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of positive `values`.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to take a geometric mean of")
    return float(np.exp(np.mean(np.log(values))))
