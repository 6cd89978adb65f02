"""Intervals: coverage, noise that cancels, differences that are detected."""

from itertools import product
from statistics import geometric_mean

import numpy as np
import pytest
from numpy.typing import NDArray

from kerneltune.stats import (
    Interval,
    Shift,
    centre_interval,
    holm,
    interval_shift,
    median_interval,
    ratio_interval,
    shifts,
)


def noise(seed: int, rounds: int = 40, spread: float = 0.02) -> NDArray[np.float64]:
    """Draw times around 100 µs whose logarithms are normal."""
    return 100.0 * np.exp(spread * np.random.default_rng(seed).standard_normal(rounds))


def test_median_interval_contains_the_sample_median() -> None:
    samples = noise(0)
    interval = median_interval(samples)
    assert interval.median == np.median(samples)
    assert samples.min() < interval.low < interval.median < interval.high < samples.max()
    assert interval == median_interval(samples)


def test_median_interval_covers_the_true_median_in_about_95_of_100_trials() -> None:
    covered = sum(median_interval(noise(seed)).contains(100.0) for seed in range(100))
    assert 88 <= covered <= 99


def test_median_interval_with_one_outlier_does_not_move() -> None:
    samples = noise(1)
    with_outlier = np.append(samples, 1e6)
    interval = median_interval(with_outlier)
    assert interval.high < 1.02 * median_interval(samples).high


def test_median_interval_of_more_samples_is_narrower() -> None:
    few, many = (median_interval(noise(2, rounds)).relative_half_width for rounds in (15, 500))
    assert many < few / 3


def test_ratio_interval_is_free_of_noise_that_slows_a_whole_round() -> None:
    common = 1.0 + np.random.default_rng(3).random(30)  # up to twice as slow
    a, b = noise(4, 30, 1e-4) * common, noise(5, 30, 1e-4) * common * 0.97
    ratio = ratio_interval(a, b)
    assert ratio.median == pytest.approx(1 / 0.97, rel=1e-4)
    assert ratio.relative_half_width < 2e-4
    unpaired = median_interval(a).relative_half_width
    assert unpaired > 100 * ratio.relative_half_width


def test_ratio_interval_of_a_variant_with_itself_contains_1_in_90_of_100_trials() -> None:
    inside = sum(ratio_interval(noise(2 * trial), noise(2 * trial + 1)).contains(1.0) for trial in range(100))
    assert 90 <= inside <= 99


def test_ratio_interval_of_variants_5_percent_apart_lies_above_1() -> None:
    for trial in range(20):
        ratio = ratio_interval(noise(2 * trial), noise(2 * trial + 1) / 1.05)
        assert 1.0 < ratio.low <= ratio.median <= ratio.high, trial
        assert ratio.median == pytest.approx(1.05, abs=0.02)


def test_ratio_interval_of_b_to_a_is_the_inverse_of_a_to_b() -> None:
    a, b = noise(6), noise(7)
    there, back = ratio_interval(a, b), ratio_interval(b, a)
    assert there.median == pytest.approx(1 / back.median)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low), rel=5e-3)


def test_interval_contains_its_ends_and_nothing_beyond() -> None:
    interval = Interval(2.0, 1.5, 3.0)
    assert interval.contains(1.5)
    assert interval.contains(3.0)
    assert not interval.contains(1.499)
    assert not interval.contains(3.001)
    assert interval.relative_half_width == 0.375
    assert Interval(0.0, 0.0, 1.0).relative_half_width == float("inf")
    assert median_interval(np.array([7.0])) == Interval(7.0, 7.0, 7.0)


def test_intervals_of_no_samples_or_unpaired_samples_raise() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval(np.array([]))
    with pytest.raises(ValueError, match="unpaired"):
        ratio_interval(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="no samples"):
        ratio_interval(np.array([]), np.array([]))


# several processes


def processes(seed: int, count: int = 3, offset: float = 0.003, slower: float = 0.0) -> list[NDArray[np.float64]]:
    """Draw times (30,) of each process, which lie `offset` apart (standard deviation)."""
    rng = np.random.default_rng(seed)
    return [100.0 * (1 + slower) * np.exp(offset * rng.standard_normal() + 0.005 * rng.standard_normal(30)) for _ in range(count)]


def test_shift_error_equals_the_bootstrap_by_process_then_round() -> None:
    rng = np.random.default_rng(0)
    runs = processes(11, offset=0.01)
    logs = [np.log(rounds) for rounds in runs]
    centres = []
    for _ in range(4000):
        chosen = [logs[i] for i in rng.integers(0, 3, 3)]
        centres.append(np.mean([np.median(rng.choice(rounds, rounds.size)) for rounds in chosen]))
    medians = np.array([np.median(rounds) for rounds in logs])
    interval = centre_interval(runs)
    error = np.log(interval.high / interval.median) / 4.302653  # Student's t of 2 degrees of freedom
    widened = np.var(centres) + medians.var(ddof=1) / 3 - medians.var() / 3  # by P - 1 instead of P
    assert error == pytest.approx(np.sqrt(widened), rel=0.03)
    assert interval.median == pytest.approx(np.exp(medians.mean()))


def shift(old: list[NDArray[np.float64]], new: list[NDArray[np.float64]]) -> Shift | None:
    return shifts([(old, new)])[0]  # type: ignore[list-item]


def test_shift_bounds_cover_the_true_shift_in_at_least_95_of_100_trials() -> None:
    covered = wide = 0
    for seed in range(300):
        estimate = shift(processes(2 * seed), processes(2 * seed + 1, slower=0.02))
        assert estimate is not None
        low, high = estimate.bounds
        covered += low <= 0.02 <= high
        wide += high - low > 0.03
    assert 285 <= covered <= 300
    assert wide <= 15


def test_p_slower_without_a_shift_is_below_5_percent_in_at_most_5_percent() -> None:
    p = np.array([estimate.p_slower for s in range(300) if (estimate := shift(processes(2 * s), processes(2 * s + 1)))])
    assert (p < 0.05).mean() <= 0.05
    assert (p < 0.01).mean() <= 0.01
    assert 0.4 < np.median(p) < 0.6


def test_shift_has_the_degrees_of_freedom_of_both_runs_and_is_none_for_one_process() -> None:
    assert shift(processes(0, 1), processes(1, 1)) is None
    for old, new, freedom in ((1, 2, 1), (1, 3, 2), (3, 3, 4), (3, 6, 7)):
        estimate = shift(processes(0, old), processes(1, new, slower=0.1))
        assert estimate is not None
        assert estimate.freedom == freedom
        assert estimate.slowdown == pytest.approx(0.1, abs=0.02)


def test_shift_bounds_and_p_values_equal_those_of_student_t_and_the_normal() -> None:
    assert Shift(0.0, 0.01, 4).bounds == pytest.approx((np.expm1(-0.0277645), np.expm1(0.0277645)), rel=1e-5)
    assert Shift(0.0277645, 0.01, 4).p_slower == pytest.approx(0.025, rel=1e-4)
    assert Shift(0.0164485, 0.01, float("inf")).p_slower == pytest.approx(0.05, rel=1e-4)
    assert (Shift(0.1, 0.0, 4).p_slower, Shift(0.0, 0.0, 4).p_slower, Shift(-0.1, 0.0, 4).p_slower) == (0.0, 1.0, 1.0)


def test_shift_least_is_exceeded_but_for_the_given_probability() -> None:
    estimate = Shift(0.1, 0.02, 4)
    assert estimate.least(0.025) == pytest.approx(estimate.bounds[0])
    assert estimate.least(0.001) < estimate.least(0.025) < estimate.least(0.5) == pytest.approx(estimate.slowdown)


def test_shift_of_intervals_has_the_error_of_both() -> None:
    estimate = interval_shift(Interval(100, 99, 101), Interval(110, 108.9, 111.1))
    assert estimate.slowdown == pytest.approx(0.1)
    assert estimate.error == pytest.approx(np.sqrt(2) * np.log(101 / 99) / (2 * 1.959964))
    assert estimate.freedom == float("inf")


def test_centre_interval_of_processes_has_the_geometric_mean_of_their_medians() -> None:
    (one,) = processes(0, 1)
    assert centre_interval([one]) == median_interval(one)
    several = processes(1)
    interval = centre_interval(several)
    assert interval.median == pytest.approx(geometric_mean([float(np.median(rounds)) for rounds in several]), rel=1e-5)
    assert interval.low < interval.median < interval.high
    assert interval.relative_half_width > 2 * median_interval(np.concatenate(several)).relative_half_width


def test_holm_of_p_values_equals_worked_examples() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.01]) == [0.01]
    assert holm([]) == []


def test_shift_of_no_process_is_none_and_of_no_rounds_raises() -> None:
    assert shift([], processes(0)) is None
    with pytest.raises(ValueError, match="no samples"):
        shift(processes(0), [np.array([])])
    with pytest.raises(ValueError, match="no samples"):
        centre_interval([])


def test_shift_error_of_three_rounds_is_the_spread_of_the_medians_of_all_resamples() -> None:
    logs = (0.0, 0.1, 0.2)
    medians = [sorted(drawn)[1] for drawn in product(logs, repeat=3)]
    rounds = np.exp(logs).tolist()
    (shift,) = shifts([([rounds] * 2, [rounds] * 2)])
    assert shift is not None
    assert shift.error == pytest.approx(np.std(medians))
