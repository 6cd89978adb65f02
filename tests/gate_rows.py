"""Literal records for the tests of the gate."""

from typing import Any

from literal_records import NO_TIMES, literal

from kerneltune.records import Record

LABEL = "rmsnorm_fwd M=8192 N=4096 bfloat16 fp8 cold"


def record(us: float = 100.0, spread: float = 0.5, **changes: Any) -> Record:
    """Make a record whose interval is `us` ± `spread`."""
    return literal(us, **{"variant": "optimized", "ci_low_us": us - spread, "ci_high_us": us + spread} | changes)


def untimed(status: str, reason: str = "y: values\ndiffer", **changes: Any) -> Record:
    return record(**{**NO_TIMES, "status": status, "reason": reason, **changes})


def by_process(us: float, *offsets: float, **changes: Any) -> Record:
    """Make a record of processes that lie at `us` times 1 + offset, with a round noise of about 0.1 %; its time is near `us`."""
    rounds = [0.999, 1.0, 1.001, 1.0, 1.0005]
    samples = [[us * (1 + offset) * noise for noise in rounds] for offset in offsets]
    least, most = min(map(min, samples)), max(map(max, samples))
    return record(min(max(us, least), most), samples_us=samples, n=len(samples) * len(rounds), **changes)
