"""Verdicts over many rows: a variant that is slower as a whole, rows below the floor, no false alarm of A against A."""

import numpy as np
import pytest
from gate_rows import by_process, record
from msgspec.structs import replace

from kerneltune.gating.report import gate_annotations, gate_junit, gate_text
from kerneltune.gating.verdict import AMBIGUOUS, PASS, REGRESSION, gate
from kerneltune.records import Record
from kerneltune.stale import stale_lines

ROWS = 40


def family(factors: np.ndarray, unit: str = "one", us: float = 100.0) -> list[Record]:
    """Return records of one process of as many rows as there are factors."""
    return [
        record(us * factor, 0.001 * us, axes={"M": row + 1, "N": 64}, family="rmsnorm", unit=unit)
        for row, factor in enumerate(factors)
    ]  # fmt: skip


def test_gate_of_all_rows_2_percent_slower_fails_the_variant() -> None:
    noise = np.random.default_rng(0).normal(0, 0.003, (2, ROWS))
    answer = gate(family(1 + noise[0]), family(1.02 * (1 + noise[1])), 0.03)
    assert answer.exit_code == REGRESSION
    (line,) = answer.failures
    assert line == (
        "rmsnorm_fwd optimized on NVIDIA H200, cold: slower by 2.1% in the geometric mean of 40 rows (at least +1.9%), "
        "tolerated 1%; one process a side"
    )
    assert f"failed: {line[:30]}" in gate_text(answer)
    assert 'name="rmsnorm_fwd optimized on NVIDIA H200, cold"' in gate_junit(answer)
    assert "::error title=kerneltune gate::rmsnorm_fwd optimized on NVIDIA H200" in gate_annotations(answer)


def test_gate_of_a_slower_variant_with_a_row_that_was_not_measured_again_says_one_process_a_side() -> None:
    noise = 1 + np.random.default_rng(0).normal(0, 0.003, ROWS)
    old, new = family(noise), family(1.02 * noise)
    (line,) = gate(old, [old[0], *new[1:]], 0.03).failures
    assert line.endswith("tolerated 1%; one process a side")


def test_gate_of_one_variant_of_four_2_percent_slower_fails_it() -> None:
    noise = np.random.default_rng(3).normal(0, 0.003, (8, ROWS))
    variants = ("baseline", "pr593", "optimized", "split")
    old = [replace(row, variant=name) for at, name in enumerate(variants) for row in family(1 + noise[at])]
    new = [
        replace(row, variant=name)
        for at, name in enumerate(variants)
        for row in family((1.02 if name == "optimized" else 1.0) * (1 + noise[4 + at]))
    ]
    (line,) = gate(old, new, 0.03).failures
    assert line.startswith("rmsnorm_fwd optimized on NVIDIA H200, cold: slower by ")


def test_gate_judges_variants_of_few_rows_together() -> None:
    shapes = [(f"variant{at}", at + 1) for at in range(12)]
    sides = [
        [record(us, 0.1, variant=name, axes={"M": size, "N": 64}, family="rmsnorm") for name, size in shapes] for us in (100, 102)
    ]
    (line,) = gate(*sides, 0.03).failures
    assert line.startswith("rmsnorm on NVIDIA H200, cold: slower by 2.0% in the geometric mean of 12 rows")


def test_gate_of_all_rows_2_percent_slower_on_another_gpu_is_a_note() -> None:
    answer = gate(family(np.ones(ROWS)), family(np.full(ROWS, 1.02), unit="other"), 0.03)
    assert answer.failures == ()
    assert any("slower by 2.0% in the geometric mean" in note for note in answer.notes)


@pytest.mark.parametrize("shift", [0.005, -0.02])
def test_gate_of_a_family_half_a_percent_slower_or_faster_passes(shift: float) -> None:
    noise = np.random.default_rng(1).normal(0, 0.003, (2, ROWS))
    assert gate(family(1 + noise[0]), family((1 + shift) * (1 + noise[1])), 0.03).failures == ()


def test_gate_of_processes_that_differ_as_a_whole_passes() -> None:
    old = [by_process(100.0, 0.0, 0.03, -0.03, axes={"M": row, "N": 64}, family="rmsnorm") for row in range(1, 21)]
    new = [by_process(101.5, 0.0, 0.03, -0.03, axes={"M": row, "N": 64}, family="rmsnorm") for row in range(1, 21)]
    assert gate(old, new, 0.03).failures == ()


def test_gate_of_20_variants_against_themselves_fails_in_at_most_1_of_100_runs() -> None:
    """20 variants of 10 rows have Gaussian noise of 2 %, and all rows of a side together 0.2 %, in 100 runs."""
    rng = np.random.default_rng(36)
    failed = 0
    for _ in range(100):
        old, new = (
            [
                replace(row, variant=f"variant{at}")
                for at in range(20)
                for row in family((1 + shift) * (1 + rng.normal(0, 0.02, 10)))
            ]
            for shift in rng.normal(0, 0.002, 2)
        )
        failed += bool(gate(old, new, 0.03).failures)
    assert failed <= 1


@pytest.mark.parametrize("processes", [1, 3])
def test_gate_of_a_family_against_itself_fails_in_at_most_1_of_100_runs(processes: int) -> None:
    """Rows have Gaussian noise of 2 % per process, in 400 runs of one process a side, and in 100 runs of three."""
    rng = np.random.default_rng(35)
    runs = 400 if processes == 1 else 100
    failed = 0
    for _ in range(runs):
        if processes == 1:
            old, new = (family(1 + rng.normal(0, 0.02, ROWS)) for _ in range(2))
        else:
            old, new = (
                [by_process(100.0, *rng.normal(0, 0.02, 3), axes={"M": row, "N": 64}, family="rmsnorm") for row in range(1, ROWS)]
                for _ in range(2)
            )
        failed += gate(old, new, 0.03).exit_code == REGRESSION
    assert failed <= runs // 100


def test_gate_of_one_slow_row_among_noisy_rows_fails_it() -> None:
    noise = 1 + np.random.default_rng(2).normal(0, 0.003, (2, ROWS))
    noise[1, 7] *= 1.08
    answer = gate(family(noise[0]), family(noise[1]), 0.03)
    assert [row.record.axes["M"] for row in answer.rows if row.verdict == "regression"] == [8]
    assert "one process a side" in next(row.reason for row in answer.rows if row.verdict == "regression")


def test_gate_of_a_5_us_row_9_percent_slower_lists_it_and_passes() -> None:
    answer = gate([record(4.9, 0.02)], [record(5.34, 0.02)], 0.03)
    (row,) = answer.rows
    assert (row.verdict, answer.exit_code) == ("slower", PASS)
    assert row.reason == "0.44 µs: below 0.5 µs nothing is judged, +10.2% of this row; one process a side"
    assert any(
        note.startswith("1 row shorter than 16.7 µs: changes below 0.5 µs are not judged, +10.2% of") for note in answer.notes
    )
    assert "slower" in gate_text(answer)


def test_gate_with_stale_lines_fails_and_names_removed_variants() -> None:
    answer = gate([record()], [record(103.5)], 0.03, stale=["rmsnorm_fwd optimized: 1 row"])
    assert answer.exit_code == REGRESSION
    assert gate([record()], [record(103.5)], 0.03).exit_code == AMBIGUOUS
    with pytest.raises(ValueError, match=r"^op: 'rmsnorm_fwd': in the records, but not loaded here: load it by --plugin, or "):
        stale_lines([record()], {})
    assert stale_lines([record(role="peer")], {}) == []
