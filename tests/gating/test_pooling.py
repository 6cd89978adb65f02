"""Test the pooled record of several processes."""

import numpy as np
import pytest
from gate_rows import by_process, record, untimed

from kerneltune.gating.rows import pool
from kerneltune.stats import centre_interval


def test_pool_of_processes_has_their_centre_and_interval() -> None:
    rows = [by_process(us, 0.0, gbps=1000.0, ceiling_gbps=2000.0, aa_floor=floor) for us, floor in ((100, 0.002), (104, 0.001))]
    (pooled,) = pool(rows)
    expected = centre_interval([np.asarray(row.samples_us[0]) for row in rows if row.samples_us])
    assert pooled.time_us == pytest.approx(expected.median, rel=1e-5)
    assert (pooled.ci_low_us, pooled.ci_high_us) == (
        pytest.approx(expected.low, rel=1e-5),
        pytest.approx(expected.high, rel=1e-5),
    )
    assert pooled.n == 10
    assert pooled.samples_us == [pytest.approx(row.samples_us[0]) for row in rows if row.samples_us]
    assert pooled.aa_floor == 0.0015
    assert pooled.gbps == pytest.approx(1000 * 104 / expected.median, rel=1e-5)
    assert pooled.pct_ceiling == pytest.approx(100 * (pooled.gbps or 0) / 2000, rel=1e-5)
    assert (pooled.p10_us, pooled.p90_us) == (pytest.approx(99.99), pytest.approx(104.06, rel=1e-3))
    assert pool([by_process(100, 0.0)] * 2)[0].pct_ceiling is None


def test_pool_takes_the_median_noise_floor_of_processes() -> None:
    rows = [by_process(100, 0.0, aa_floor=floor) for floor in (0.002, 0.3, None, 0.004)]
    assert pool(rows)[0].aa_floor == 0.004


def test_pool_keeps_order_and_single_rows_and_pools_pooled_rows_again() -> None:
    first, other = by_process(100, 0.0), by_process(50, 0.0, quant="none")
    assert pool([first, other]) == [first, other]
    (pooled,) = pool([first, first])
    assert pool([pooled, first]) == pool([first, first, first])


def test_pool_of_a_row_that_failed_once_is_failed() -> None:
    timed, failed, skipped = by_process(100, 0.0), untimed("failed"), untimed("skipped")
    assert pool([timed, failed, timed]) == [failed]
    assert pool([skipped, timed]) == [skipped]
    assert pool([skipped, failed, timed]) == [failed]


@pytest.mark.parametrize(
    "change",
    [{"config": {"warps": 4}}, {"source_hash": "1"}, {"device": "NVIDIA H100"}, {"unit": "b"}, {"driver": "580"}],
)
def test_pool_of_rows_with_different_facts_raises(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: .* differs between the processes of rmsnorm_fwd M=8192 "):
        pool([by_process(100, 0.0), by_process(100, 0.0, **change)])


def test_pool_of_rows_without_samples_raises() -> None:
    with pytest.raises(ValueError, match=r"^samples_us: None: expected the samples of rmsnorm_fwd"):
        pool([record(), record()])
