"""Test the gate on simulated runs with planted shifts: false alarms and missed slowdowns."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from simulated_records import run

from kerneltune.gating.verdict import RowVerdict, confirm, gate

ROWS = 200
MARGIN = 0.03


def verdicts(
    repeats: int, slowdown: float, every: int = 1, odd_process: float = 0.0
) -> tuple[Counter[RowVerdict], Counter[RowVerdict]]:
    """Return the verdicts on the rows that are slower by `slowdown`, one in `every`, then on the other rows."""
    slowed: Counter[RowVerdict] = Counter()
    others: Counter[RowVerdict] = Counter()
    for repetition in range(repeats):
        rng = np.random.default_rng(1000 * repetition + every)
        us = np.exp(rng.uniform(np.log(12), np.log(300), ROWS))
        factor = np.ones(ROWS)
        factor[::every] += slowdown
        old, new = run(rng, us, odd_process=odd_process), run(rng, us * factor, odd_process=odd_process)
        judge = partial(gate, old, margin=MARGIN)
        answer, _pooled = confirm(judge, new, lambda _s: run(rng, us * factor, odd_process=odd_process))  # noqa: B023
        for number, row in enumerate(answer.rows):
            (others if number % every else slowed)[row.verdict] += 1
    return slowed, others


def test_gate_without_a_change_fails_at_most_1_row_in_1000() -> None:
    """Make a whole process of a row 4 % slower in 2 of 100 cases."""
    rows, _none = verdicts(5, 0.0, odd_process=0.02)
    assert rows.total() == 5 * ROWS
    assert rows["regression"] <= 5 * ROWS // 1000
    assert rows["faster"] == 0
    assert rows["ambiguous"] <= 5 * ROWS // 100


def test_gate_without_second_measurements_fails_at_most_1_row_in_1000() -> None:
    rng = np.random.default_rng(7)
    us = np.full(ROWS, 50.0)
    rows = [row.verdict for _ in range(5) for row in gate(run(rng, us), run(rng, us), MARGIN).rows]
    assert rows.count("regression") <= 1


@pytest.mark.parametrize("every", [1, 10])
def test_gate_fails_95_of_100_rows_that_are_5_percent_slower(every: int) -> None:
    slowed, others = verdicts(1 if every == 1 else 5, 0.05, every)
    assert slowed["regression"] >= 0.95 * slowed.total() >= 95
    assert slowed["pass"] == slowed["faster"] == 0
    assert others["regression"] <= others.total() / 1000


def test_gate_fails_every_row_10_percent_slower_despite_odd_processes() -> None:
    slowed, _others = verdicts(3, 0.10, every=10, odd_process=0.02)
    assert slowed == {"regression": 60}


def test_gate_calls_no_row_2_percent_slower_faster() -> None:
    slowed, _others = verdicts(2, 0.02)
    assert slowed["faster"] == 0
    assert slowed["regression"] <= 0.01 * slowed.total()


def test_gate_passes_at_most_5_percent_of_slow_rows_with_odd_processes() -> None:
    slowed, _others = verdicts(4, 0.05, every=10, odd_process=0.02)
    assert slowed["pass"] + slowed["slower"] + slowed["faster"] <= 0.05 * slowed.total()
