"""Intervals: what they cover, what cancels, what they detect."""

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
    assert interval.contains(1.5)
    assert interval.contains(3.0)
    assert not interval.contains(1.499)
    assert not interval.contains(3.001)
    assert interval.relative_half_width == 0.375
    assert Interval(0.0, 0.0, 1.0).relative_half_width == float("inf")
    assert median_interval(np.array([7.0])) == Interval(7.0, 7.0, 7.0)


def test_no_samples_no_pairs_no_values() -> None:
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


def test_the_closed_form_is_the_bootstrap_by_process_then_round() -> None:
    rng = np.random.default_rng(0)
    runs = processes(11, offset=0.01)
    logs = [np.log(rounds) for rounds in runs]
    centres = []
    for _ in range(4000):
        chosen = [logs[i] for i in rng.integers(0, 3, 3)]
        centres.append(np.mean([np.median(rng.choice(rounds, rounds.size)) for rounds in chosen]))
    medians = np.array([np.median(rounds) for rounds in logs])
    found = centre_interval(runs)
    error = np.log(found.high / found.median) / 4.302653  # Student's t of 2 degrees of freedom
    widened = np.var(centres) + medians.var(ddof=1) / 3 - medians.var() / 3  # by P - 1 instead of P
    assert error == pytest.approx(np.sqrt(widened), rel=0.03)
    assert found.median == pytest.approx(np.exp(medians.mean()))


def shift(old: list[NDArray[np.float64]], new: list[NDArray[np.float64]]) -> Shift | None:
    return shifts([(old, new)])[0]  # type: ignore[list-item]


def test_a_shift_covers_the_true_one_at_least_as_often_as_it_says() -> None:
    covered = wide = 0
    for seed in range(300):
        found = shift(processes(2 * seed), processes(2 * seed + 1, slower=0.02))
        assert found is not None
        low, high = found.bounds
        covered += low <= 0.02 <= high
        wide += high - low > 0.03
    assert 285 <= covered <= 300
    assert wide <= 15


def test_p_values_of_no_shift_are_not_small_more_often_than_they_say() -> None:
    p = np.array([found.p_slower for s in range(300) if (found := shift(processes(2 * s), processes(2 * s + 1)))])
    assert (p < 0.05).mean() <= 0.05
    assert (p < 0.01).mean() <= 0.01
    assert 0.4 < np.median(p) < 0.6


def test_a_shift_has_the_freedom_of_both_runs_and_none_without_a_second_process() -> None:
    assert shift(processes(0, 1), processes(1, 1)) is None
    for old, new, freedom in ((1, 2, 1), (1, 3, 2), (3, 3, 4), (3, 6, 7)):
        found = shift(processes(0, old), processes(1, new, slower=0.1))
        assert found is not None
        assert found.freedom == freedom
        assert found.slowdown == pytest.approx(0.1, abs=0.02)


def test_bounds_and_p_values_are_those_of_student_and_of_the_normal() -> None:
    assert Shift(0.0, 0.01, 4).bounds == pytest.approx((np.expm1(-0.0277645), np.expm1(0.0277645)), rel=1e-5)
    assert Shift(0.0277645, 0.01, 4).p_slower == pytest.approx(0.025, rel=1e-4)
    assert Shift(0.0164485, 0.01, float("inf")).p_slower == pytest.approx(0.05, rel=1e-4)
    assert (Shift(0.1, 0.0, 4).p_slower, Shift(0.0, 0.0, 4).p_slower, Shift(-0.1, 0.0, 4).p_slower) == (0.0, 1.0, 1.0)


def test_a_shift_of_intervals_has_the_width_of_both() -> None:
    found = interval_shift(Interval(100, 99, 101), Interval(110, 108.9, 111.1))
    assert found.slowdown == pytest.approx(0.1)
    assert found.error == pytest.approx(np.sqrt(2) * np.log(101 / 99) / (2 * 1.959964))
    assert found.freedom == float("inf")


def test_the_centre_of_processes_is_their_geometric_mean() -> None:
    (one,) = processes(0, 1)
    assert centre_interval([one]) == median_interval(one)
    several = processes(1)
    found = centre_interval(several)
    assert found.median == pytest.approx(geometric_mean([float(np.median(rounds)) for rounds in several]), rel=1e-5)
    assert found.low < found.median < found.high
    assert found.relative_half_width > 2 * median_interval(np.concatenate(several)).relative_half_width


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.01]) == [0.01]
    assert holm([]) == []


def test_no_process_no_rounds() -> None:
    assert shift([], processes(0)) is None
    with pytest.raises(ValueError, match="no samples"):
        shift(processes(0), [np.array([])])
    with pytest.raises(ValueError, match="no samples"):
        centre_interval([])
