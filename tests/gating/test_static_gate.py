"""The static gate, on small literal rows."""

import dataclasses
from typing import Any

import pytest

from kerneltune.gating.report import gate_junit, gate_text
from kerneltune.gating.static_gate import static_gate
from kerneltune.gating.verdict import Verdict
from kerneltune.inspection.static import StaticRow, Survey
from kerneltune.measuring.assembly import Access, Kernel

WIDE = (Access("load", 128, 4), Access("load", 32, 2), Access("store", 128, 2))
KERNEL = Kernel("_k", 4, 40, 0, 1024, 0, WIDE)


def row(*kernels: Kernel, **changes: Any) -> StaticRow:
    values = {"op": "rms", "variant": "optimized", "policy": "cold", "target": "sm_90", "config": {"warps": 4}}
    case = f"{changes.pop('case', 'c M=1')} bf16 none"
    return StaticRow(**{**values, "case": case, "kernels": kernels, **changes})


def judged(old: list[StaticRow], new: list[StaticRow]) -> Verdict:
    return static_gate(Survey("3.7.1", tuple(old)), Survey("3.7.1", tuple(new)))


def with_(**changes: Any) -> Kernel:
    return dataclasses.replace(KERNEL, **changes)


def test_static_gate_of_equal_kernels_passes() -> None:
    verdict = judged([row(KERNEL)], [row(KERNEL)])
    assert verdict == Verdict(
        (), 0, "no new spills, no narrower accesses, nothing over a limit; 1 compared, 0 new, 0 gone, 0 broken in both"
    )
    assert 'tests="1" failures="0" errors="0"' in gate_junit(verdict)


@pytest.mark.parametrize(
    ("kernel", "finding"),
    [
        (with_(spill_bytes=8), "_k: spills 8 bytes per thread, was 0"),
        (with_(accesses=(Access("load", 64, 8), *WIDE[2:])), "_k: loads are 64 bits wide, were 128"),
        (with_(accesses=(*WIDE[:2], Access("store", 32, 8))), "_k: stores are 32 bits wide, were 128"),
        (with_(name="_other", spill_bytes=8), "_other: spills 8 bytes per thread, was 0"),
    ],
)
def test_static_gate_of_a_worse_kernel_fails(kernel: Kernel, finding: str) -> None:
    verdict = judged([row(KERNEL)], [row(kernel)])
    assert verdict.failures == (f"rms optimized c M=1 bf16 none sm_90: {finding}",)
    assert verdict.exit_code == 1
    assert gate_text(verdict).startswith(
        f"failed: rms optimized c M=1 bf16 none sm_90: {finding}\ngate: fail: 1 found in compiled code; 1 compared"
    )
    assert f'message="rms optimized c M=1 bf16 none sm_90: {finding}"' in gate_junit(verdict)


@pytest.mark.parametrize(
    "kernel",
    [
        with_(registers=255),
        with_(accesses=(Access("load", 128, 9), Access("load", 32, 9), *WIDE[2:])),
        with_(accesses=WIDE[:2]),
        with_(name="_other", accesses=(Access("load", 8, 1),)),
    ],
)
def test_static_gate_of_kernels_that_are_no_worse_passes(kernel: Kernel) -> None:
    assert judged([row(KERNEL)], [row(kernel)]).exit_code == 0


def test_static_gate_compares_launches_of_a_kernel_in_order() -> None:
    spilling = with_(spill_bytes=16)
    assert judged([row(KERNEL, spilling)], [row(KERNEL, spilling)]).exit_code == 0
    assert judged([row(KERNEL, spilling)], [row(spilling, KERNEL)]).exit_code == 1


def test_static_gate_of_a_config_that_no_longer_compiles_fails() -> None:
    broken = row(error="OutOfResources: shared memory")
    assert judged([row(KERNEL)], [broken]).failures == ("rms optimized c M=1 bf16 none sm_90: OutOfResources: shared memory",)
    assert judged([], [broken]).exit_code == 1  # a new row that does not build
    assert judged([row(KERNEL), row(error="a", case="d")], [row(KERNEL), row(error="b", case="d")]).exit_code == 0
    assert judged([broken], [row(KERNEL)]).exit_code == 0


def test_static_gate_of_a_renamed_case_compares_it() -> None:
    verdict = judged([row(KERNEL), row(KERNEL, case="d M=2")], [row(with_(spill_bytes=8), case="e M=1")])
    assert verdict.failures == ("rms optimized e M=1 bf16 none sm_90: _k: spills 8 bytes per thread, was 0",)
    assert "1 compared, 0 new, 1 gone" in verdict.reason


def test_static_gate_names_the_knobs_that_differ_from_the_baseline() -> None:
    verdict = judged(
        [row(KERNEL), row(KERNEL, case="d M=2")], [row(with_(spill_bytes=8), config={"warps": 8}), row(KERNEL, case="d M=2")]
    )
    assert verdict.failures == (
        "rms optimized c M=1 bf16 none sm_90: _k: spills 8 bytes per thread, was 0 (warps=8, was warps=4)",
    )
    assert verdict.reason.endswith("; 2 compared, 1 of them with another config, 0 new, 0 gone, 0 broken in both")


def test_static_gate_of_nothing_compared_exits_with_2() -> None:
    assert judged([row(KERNEL)], [row(KERNEL, target="gfx942")]).exit_code == 2
    assert judged([], []).reason == "nothing compared: 0 compared, 0 new, 0 gone, 0 broken in both"
    other = static_gate(Survey("3.6.0", (row(KERNEL),)), Survey("3.7.1", (row(KERNEL),)))
    assert (other.exit_code, other.reason) == (2, "not comparable: baseline made with triton 3.6.0, here 3.7.1")
