"""Widths of stores of the transposed operand, by casts of aligned groups compiled for an H200."""

from typing import Any

import torch
from pool_jobs import op_of, run_of

from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compiler import CompilePool
from kerneltune.ops import fp8
from kerneltune.ops.fp8.tensorwise_2d import SegmentConfig


def operands(_case: object, *, device: str) -> dict[str, Any]:
    x = torch.empty(4096, 128, dtype=torch.bfloat16, device=device)
    return {"x": x, "offs": torch.empty(8, dtype=torch.int32, device=device)}


def cast_groups(inputs: dict[str, Any], config: SegmentConfig) -> None:
    fp8.fp8_tensorwise_2d(inputs["x"], layout="both", offs=inputs["offs"], config=config)


OP = op_of(__name__, operands, cast_groups)


def test_tensorwise_cast_of_aligned_groups_stores_16_bytes_at_a_time() -> None:
    job = run_of(OP, cast_groups, SegmentConfig(64, 128, 4, 0, 1))
    with CompilePool(TARGETS["sm_90"], 1) as pool:
        (compiled,) = pool.compile([job])
    assert compiled.error == ""
    assert {kernel.name for kernel in compiled.kernels} == {"cast_early", "cast_again"}
    for kernel in compiled.kernels:
        bits = {access.bits: access.count for access in kernel.accesses if access.kind == "store"}
        assert bits[128] == 8, (kernel.name, bits)
