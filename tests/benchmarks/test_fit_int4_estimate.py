"""The estimate of `int4_fp8_gemm`: its fit, and how good the chosen configs are at sizes of no sweep."""

import statistics
from collections.abc import Callable

import fit_int4_estimate as script
import pytest

from kerneltune import ops
from kerneltune.ops.int4_gemm.estimate import TIMES, StepTimes
from kerneltune.spec import Case, Config


def case(N: int, M: int, K: int, group: int = 128) -> Case:
    return Case("made", (("N", N), ("M", M), ("K", K)), "bfloat16", "int4", (("group", group), ("zeros", False), ("bias", False)))


def test_fit_of_simulated_times_finds_their_parameters() -> None:
    parameters = (*script.LAUNCHES, *TIMES._replace(wait=0.5, block=0.12, read=0.002))
    cases = [case(N, M, K, group) for N, group in ((12, 128), (72, 128), (150, 64)) for M, K in ((3072, 3072), (20480, 4096))]
    variant = ops.load()["int4_fp8_gemm"].variant("optimized")
    rows = [
        script.Seen(one, config, script.estimate_us(one, config, parameters), 1.0)
        for one in cases
        for config in variant.configs(one)
        if script.is_compared(one, config)
    ]
    fitted = StepTimes(*script.fit(rows, (*script.LAUNCHES, *TIMES))[2:])
    assert fitted.wait == pytest.approx(0.5, rel=0.02)
    assert fitted.block == pytest.approx(0.12, rel=0.02)
    assert fitted.read == pytest.approx(0.002, rel=0.02)


def default_of(op: str) -> Callable[[Case], Config | None]:
    return ops.load()[op].variant("optimized").default_config


@pytest.mark.parametrize(
    ("op", "gpu", "choose", "cases", "mean", "worst"),
    [
        ("int4_fp8_gemm", "nvidia_h100_80gb_hbm3", script.choice_by((*script.LAUNCHES, *TIMES)), 96, 0.974, 0.89),
        ("int4_fp8_gemm", "nvidia_h200", default_of("int4_fp8_gemm"), 90, 0.97, 0.85),
        ("int4_fp8_grouped_gemm", "nvidia_h200", default_of("int4_fp8_grouped_gemm"), 925, 0.98, 0.845),
    ],
)
def test_choice_is_close_to_the_fastest_of_whole_spaces(
    op: str, gpu: str, choose: Callable[[Case], Config | None], cases: int, mean: float, worst: float
) -> None:
    times = script.known_times(op, gpu)
    judged = script.judged_of(times)
    shares = script.shares(times, judged, choose)
    assert len(judged) >= len(shares) >= cases
    assert statistics.geometric_mean(shares.values()) > mean
    assert min(shares.values()) > worst
