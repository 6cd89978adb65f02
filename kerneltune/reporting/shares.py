"""Compute the share that a record reaches of its case's bound: the streaming ceiling, or the peak of the arithmetic."""

from typing import Literal

from kerneltune.device import PEAK_TFLOPS
from kerneltune.records import Record

Bound = Literal["ceiling", "peak"]
"""`ceiling`: GB/s of a streaming kernel in the same run; `peak`: TFLOP/s of the data sheet for the type of the operands."""


def _peak_tflops(record: Record) -> float | None:
    """Return the TFLOP/s of the data sheet for the type that the operands have: fp8 where the mode is one of fp8."""
    dtype = "float8_e4m3fn" if record.quant.startswith("fp8") else record.dtype
    return PEAK_TFLOPS.get(record.device, {}).get(dtype)


def bound_of(record: Record) -> Bound:
    """Return the bound of a timed record's case: the peak where the case has more operations per byte than the GPU."""
    peak = _peak_tflops(record)
    if not (record.flops and peak and record.time_us):
        return "ceiling"
    moved = record.gbps * record.time_us * 1e3 if record.gbps else 0.0
    if moved and record.ceiling_gbps and record.flops / moved < peak * 1e3 / record.ceiling_gbps:
        return "ceiling"
    return "peak"


def share(record: Record) -> float | None:
    """Return the percent of the bound that a record reaches; None if it is not known or if the time holds work of the host."""
    if record.policy == "eager":
        return None
    if bound_of(record) == "ceiling":
        return record.pct_ceiling
    peak = _peak_tflops(record)
    assert record.flops and record.time_us and peak, "else the bound is the ceiling"
    return 100 * record.flops / record.time_us / 1e6 / peak
