"""The default of products with dense weights: valid for any sizes, and near the fastest known of observed times."""

import math
from functools import cache

import numpy as np
import pytest

from kerneltune.estimate import Estimated
from kerneltune.files import data_root
from kerneltune.ops.dense_gemm import fp8, fp16
from kerneltune.ops.dense_gemm.configs import DEFAULT, DenseConfig, space, valid, work
from kerneltune.spec import Case, Op
from kerneltune.tuning.costs import Sample
from kerneltune.tuning.estimating import fitted_to
from kerneltune.tuning.gathering import samples_of

OPS = {"fp16_gemm": fp16.OP, "fp8_gemm": fp8.OP}
FEWEST = 3
"""Times from which the least tells what the fastest is about."""


def case_of(N: int, M: int, K: int, quant: str = "none") -> Case:
    return Case("", (("N", N), ("M", M), ("K", K)), "float16", quant)


@pytest.mark.parametrize("quant", ["none", "fp8"])
def test_default_is_valid_and_in_the_space_for_any_sizes(quant: str) -> None:
    for N in (1, 15, 16, 17, 33, 64, 65, 100, 128, 129, 1000, 5000):
        for M, K in ((1, 1), (64, 100), (576, 7168), (151936, 2048), (4096, 18432)):
            case = case_of(N, M, K, quant)
            config = DEFAULT(case)
            assert valid(case, config) is None
            offered = space(case)
            assert all(getattr(config, name) in values for name, values in offered.items()), (case.label, config)


def test_work_counts_what_a_launch_does() -> None:
    found = work(case_of(100, 1000, 4096), DenseConfig(64, 128, 128, 8, 4, 2, False))
    assert found is not None
    assert (found.programs, found.steps, found.ahead, found.resident) == (2 * 8 * 2, 16, 3, 1)
    assert (found.step_bytes, found.step_flops) == (256 * 192, 2 * 64 * 128 * 128)
    assert found.memory_bytes == 2 * (1100 * 4096 + 100_000)
    assert found.cache_bytes == 2 * 4096 * (2 * 1000 + 8 * 100)
    assert found.part_bytes == 2 * 2 * 4 * 100 * 1000
    assert work(case_of(16, 1000, 4096), DenseConfig(16, 64, 128, 4, 4, 1, False)) is None


@cache
def samples(name: str) -> list[Sample]:
    op = OPS[name]
    return samples_of(op, op.variant("optimized"), "nvidia_h200", data_root("configs"), data_root("results"))


def shares(op: Op, default: Estimated, judged: list[Sample]) -> list[float]:
    """Return of every case the least known time over that of the first config that was timed, by estimate."""
    found = []
    for sample in judged:
        known = {tuple(knobs): us for knobs, us in sample.times.items() if us}
        if len(known) >= FEWEST:
            ranked = [
                tuple((name, getattr(one, name)) for name in DenseConfig.__dataclass_fields__)
                for one in default.ranked(sample.case)
            ]
            found.append(min(known.values()) / known[next(knobs for knobs in ranked if knobs in known)])
    return found


@pytest.mark.parametrize(("name", "left_out"), [("fp16_gemm", 80), ("fp16_gemm", 150), ("fp8_gemm", 80)])
def test_speeds_fitted_without_the_larger_tokens_choose_well_for_them(name: str, left_out: int) -> None:
    op = OPS[name]
    known = [sample for sample in samples(name) if sample.case["N"] <= left_out]
    others = [sample for sample in samples(name) if sample.case["N"] > left_out]
    default = fitted_to(op.variant("optimized"), [(sample.case, sample.times) for sample in known]).default
    assert isinstance(default, Estimated)
    assert default.speeds != DEFAULT.speeds
    found = shares(op, default, others)
    assert len(found) >= 5
    assert math.exp(np.mean(np.log(found))) > 0.95
    assert min(found) > 0.85
