"""Speeds fitted to times that are made of known speeds."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from made_up import nothing, op_of

from kerneltune.estimate import Estimated, Speeds, time_us
from kerneltune.ops.dense_gemm.configs import DEFAULT, DenseConfig, space, valid
from kerneltune.rule import dumps, loads
from kerneltune.spec import Case, Variant
from kerneltune.tuning.costs import CostTable, Sample
from kerneltune.tuning.estimating import fitted_to, for_sms
from kerneltune.tuning.fitting import fitted, judgements
from kerneltune.tuning.growing import TreeShape

VARIANT = Variant("optimized", nothing, DenseConfig, space, valid, DEFAULT)
SLOWER = msgspec.structs.replace(DEFAULT.speeds, memory_tb_s=1.5, latency_us=1.2, multiply_tflops=300.0)
SIZES = [(N, M, K) for N in (1, 24, 64, 128, 700) for M, K in ((4096, 4096), (9216, 2048), (1152, 6144))]


def case_of(sizes: tuple[int, int, int]) -> Case:
    return Case("", tuple(zip("NMK", sizes, strict=True)), "float16")


def times(case: Case, speeds: Speeds) -> dict[tuple[tuple[str, object], ...], float | None]:
    """Return the times of what is compared for a case, one of no time, and one of which no estimate is made."""
    found: dict[tuple[tuple[str, object], ...], float | None] = {}
    for knobs, work in DEFAULT.offered(case):
        found[tuple(zip(DenseConfig.__dataclass_fields__, knobs, strict=True))] = time_us(work, speeds)
    other = DenseConfig(16, 64, 128, 4, 4, 1, False)
    return found | {tuple((name, getattr(other, name)) for name in DenseConfig.__dataclass_fields__): 1e6}


TIMED = [(case, times(case, SLOWER)) for case in map(case_of, SIZES)]
SAMPLES = [Sample(case, given, min(filter(None, given.values()))) for case, given in TIMED]


def test_fitted_speeds_give_the_times_they_were_made_of() -> None:
    default = fitted_to(VARIANT, TIMED).default
    assert isinstance(default, Estimated)
    errors = [
        math.log(time_us(work, default.speeds) / time_us(work, SLOWER)) for case, _ in TIMED for _, work in DEFAULT.offered(case)
    ]
    assert np.abs(errors).max() < 0.02
    assert default.speeds.memory_tb_s == pytest.approx(1.5, rel=0.05)
    assert default.speeds.sms == DEFAULT.speeds.sms


def test_few_times_and_other_defaults_change_nothing() -> None:
    assert fitted_to(VARIANT, TIMED[:2]) is VARIANT
    plain = replace(VARIANT, default=DEFAULT.__call__)
    assert fitted_to(plain, TIMED) is plain


def test_a_gpu_of_other_sms_has_other_waves() -> None:
    default = for_sms(VARIANT, 64).default
    assert isinstance(default, Estimated)
    case = case_of((1, 4096 + 64, 4096))
    config = DEFAULT(case)
    assert (default.speeds.sms, DEFAULT.speeds.sms) == (64, 132)
    assert default.told(case, config).split("programs")[1] != DEFAULT.told(case, config).split("programs")[1]
    fewer = for_sms(fitted_to(VARIANT, TIMED), 64).default
    assert isinstance(fewer, Estimated)
    assert fewer.speeds.memory_tb_s == pytest.approx(1.5, rel=0.05)
    plain = replace(VARIANT, default=DEFAULT.__call__)
    assert for_sms(plain, 64) is plain


def test_the_rule_of_an_estimated_default_has_its_speeds_and_no_tree() -> None:
    table = CostTable(replace(op_of(VARIANT), axes=("N", "M", "K")), VARIANT, SAMPLES)
    rule, found = fitted(table)
    assert (rule.forms, rule.tree) == (({},), (0,))
    assert rule.speeds is not None
    assert rule.speeds != DEFAULT.speeds
    assert {shape.asks for shape in judgements(table)} == {"nothing"}
    assert TreeShape("nothing") in judgements(table)
    assert min(found.observed) > 0.99
    assert loads(dumps("op", "gpu", [rule], {}), "op", "gpu") == (rule,)


def test_a_shape_is_left_out_of_the_speeds_that_judge_it() -> None:
    table = CostTable(replace(op_of(VARIANT), axes=("N", "M", "K")), VARIANT, SAMPLES)
    whole, without = (table.variant_without(number).default for number in (-1, 3))
    expected = fitted_to(VARIANT, [timed for place, timed in enumerate(TIMED) if place != 3]).default
    assert isinstance(whole, Estimated)
    assert isinstance(without, Estimated)
    assert isinstance(expected, Estimated)
    assert msgspec.structs.astuple(without.speeds) == pytest.approx(msgspec.structs.astuple(expected.speeds), rel=0.1)
