"""Records as a GPU would give them, simulated: noise per round, offset per process, drift, outliers, odd processes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kerneltune.gating.rows import pool
from kerneltune.records import Record

PROCESS_OFFSET = 0.003


def rounds_us(rng: np.random.Generator, us: float, rounds: int = 25, odd_process: float = 0.0) -> NDArray[np.float64]:
    """Draw times of one process (rounds,).

    Lognormal noise of 0.3 to 1 %, an offset of the process, a drift, one in fifty up to twice as long; with probability
    `odd_process` the whole process is 4 % slower.
    """
    noise = rng.uniform(0.003, 0.01) * rng.standard_normal(rounds)
    drift = np.linspace(0.0, 0.004 * rng.standard_normal(), rounds)
    outliers = np.where(rng.random(rounds) < 0.02, rng.uniform(0.0, 0.7, rounds), 0.0)
    odd = 0.04 * (rng.random() < odd_process)
    return us * np.exp(noise + drift + outliers + odd + PROCESS_OFFSET * rng.standard_normal())


def one_process(samples: NDArray[np.float64], row: int, **changes: Any) -> Record:
    """Make the record of one process of row number `row`."""
    middle = float(np.sort(samples)[len(samples) // 2])
    values: dict[str, Any] = {
        "op": "op", "variant": "optimized", "case": f"case-{row}", "dtype": "bfloat16", "quant": "none", "policy": "cold",
        "status": "passed", "time_us": middle, "gbps": 1e5 / middle, "ci_low_us": 0.999 * middle,
        "ci_high_us": 1.001 * middle, "n": len(samples), "aa_floor": 0.002, "device": "NVIDIA H200", "driver": "580",
        "torch": "2.11", "triton": "3.6", "source_hash": "0", "commit": "0", "date": "2026-11-21T06:00:00Z",
        "axes": {"M": row}, "samples_us": [[float(us) for us in samples]],
    }  # fmt: skip
    return Record(**{**values, **changes})


def run(rng: np.random.Generator, times_us: Sequence[float], processes: int = 3, odd_process: float = 0.0) -> list[Record]:
    """Make a gate run: a record per row, pooled over processes."""
    rows = [
        one_process(rounds_us(rng, us, odd_process=odd_process), row) for _ in range(processes) for row, us in enumerate(times_us)
    ]
    return pool(rows)
