"""The training step as a workload: every variant and part agrees with fp32."""

import pytest
import torch

from kerneltune import sweep_file, workloads
from kerneltune.checking.check import Checker
from kerneltune.spec import Case
from kerneltune.workloads.training_table import RECIPES

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = workloads.load()
OP = OPS["moe_step"]
SWEEP = sweep_file.load(sweep_file.find("moe_training"), OPS)
CASES = [entry.case for entry in SWEEP.check]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_and_their_parts_agree_with_fp32(case: Case) -> None:
    """Check every step on all cases, and its parts, which call the same functions, on the first."""
    checker = Checker(OP, case, WHERE)
    is_first = case is CASES[0]
    for variant in OP.variants:
        if not variant.missing() and variant.unsupported(case) is None and (is_first or not variant.part):
            keeps = is_first and variant.name.endswith(("_cached", "_refresh", "_gemms"))
            for _ in range(2 if keeps else 1):  # the second run reuses kept casts of the first
                assert checker.run(variant, None)[1] == [], variant.name


def test_every_recipe_is_measured_in_parts() -> None:
    parts = {variant.name for variant in OP.variants if variant.part}
    assert parts >= {f"{recipe}_{part}" for recipe in RECIPES for part in ("casts", "cached", "refresh")}
    assert {variant.name for variant in OP.variants} - parts >= {*RECIPES, "tensorwise_compiled", "rowwise_compiled"}


def test_compare_of_outputs_with_noise_fails() -> None:
    case = CASES[0]
    inputs = OP.inputs(case, device=WHERE)
    expected = OP.reference(inputs)
    noisy = {name: t + t.std() * 0.3 * torch.randn_like(t) for name, t in expected.items()}
    errors = OP.compare(case, inputs, noisy, expected)
    assert [error.split(":")[0] for error in errors] == ["y", "da", "dw"]
    assert "dB of signal to noise" in errors[0]
    half = {"a": (inputs["a"], torch.tensor(0.5, device=WHERE))}
    assert OP.compare(case, inputs, half, expected)[0].startswith("a: 6.0 dB")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_traffic_of_a_step_equals_the_bytes_of_its_tensors(case: Case) -> None:
    inputs = OP.inputs(case, device=WHERE)
    outputs = OP.variant("baseline").run(inputs, None)
    read, written = (sum(t.nbytes for t in tensors.values()) for tensors in (inputs, outputs))
    assert (OP.traffic(case).read, OP.traffic(case).write) == (read, written)


def test_bench_cases_have_no_empty_groups() -> None:
    reasons = {entry.case.label: OP.variant("baseline").unsupported(entry.case) for entry in SWEEP.bench}
    assert set(reasons.values()) == {None}, reasons
