"""Intervals: what they cover, what cancels, what they detect."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kerneltune.stats import Interval, geometric_mean, median_interval, ratio_interval


def noise(seed: int, rounds: int = 40, spread: float = 0.02) -> NDArray[np.float64]:
    """Times around 100 µs whose logarithms are normal."""
    return 100.0 * np.exp(spread * np.random.default_rng(seed).standard_normal(rounds))


def test_the_median_interval_lies_around_the_sample_median() -> None:
    samples = noise(0)
    interval = median_interval(samples)
    assert interval.median == np.median(samples)
    assert samples.min() < interval.low < interval.median < interval.high < samples.max()
    assert interval == median_interval(samples) != median_interval(samples, seed=1)


def test_the_median_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    covered = sum(median_interval(noise(seed)).contains(100.0) for seed in range(100))
    assert 88 <= covered <= 99


def test_one_outlier_does_not_move_the_interval() -> None:
    samples = noise(1)
    with_outlier = np.append(samples, 1e6)
    interval = median_interval(with_outlier)
    assert interval.high < 1.02 * median_interval(samples).high


def test_more_samples_narrow_the_interval() -> None:
    few, many = (median_interval(noise(2, rounds)).relative_half_width for rounds in (15, 500))
    assert many < few / 3


def test_what_slows_a_whole_round_cancels() -> None:
    common = 1.0 + np.random.default_rng(3).random(30)  # up to twice as slow
    a, b = noise(4, 30, 1e-4) * common, noise(5, 30, 1e-4) * common * 0.97
    ratio = ratio_interval(a, b)
    assert ratio.contains(1 / 0.97) or ratio.median == pytest.approx(1 / 0.97, rel=1e-4)
    assert ratio.relative_half_width < 2e-4
    unpaired = median_interval(a).relative_half_width
    assert unpaired > 100 * ratio.relative_half_width


def test_a_variant_against_itself_is_one_in_nine_of_ten_trials_or_more() -> None:
    inside = sum(ratio_interval(noise(2 * trial), noise(2 * trial + 1)).contains(1.0) for trial in range(100))
    assert 90 <= inside <= 99


def test_five_percent_are_detected() -> None:
    for trial in range(20):
        ratio = ratio_interval(noise(2 * trial), noise(2 * trial + 1) / 1.05)
        assert 1.0 < ratio.low <= ratio.median <= ratio.high, trial
        assert ratio.median == pytest.approx(1.05, abs=0.02)


def test_the_ratio_turned_around_is_its_inverse() -> None:
    a, b = noise(6), noise(7)
    there, back = ratio_interval(a, b), ratio_interval(b, a)
    assert there.median == pytest.approx(1 / back.median)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low), rel=5e-3)


def test_intervals_end_where_they_say() -> None:
    interval = Interval(2.0, 1.5, 3.0)
    assert interval.contains(1.5) and interval.contains(3.0)
    assert not interval.contains(1.499) and not interval.contains(3.001)
    assert interval.relative_half_width == 0.375
    assert Interval(0.0, 0.0, 1.0).relative_half_width == float("inf")
    assert median_interval(np.array([7.0])) == Interval(7.0, 7.0, 7.0)


def test_the_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([1.25, 1 / 1.25]) == pytest.approx(1.0)
    assert geometric_mean([3.0]) == pytest.approx(3.0)


def test_no_samples_no_pairs_no_values() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval(np.array([]))
    with pytest.raises(ValueError, match="unpaired"):
        ratio_interval(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="no samples"):
        ratio_interval(np.array([]), np.array([]))
    with pytest.raises(ValueError, match="no values"):
        geometric_mean([])
