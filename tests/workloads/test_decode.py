"""A decoding step's layers as a workload: every variant agrees with fp32, and wrong results are found."""

import pytest
import torch

from kerneltune import sweep_file, workloads
from kerneltune.checking.check import Checker
from kerneltune.spec import Case

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = workloads.load()
OP = OPS["decode_step"]
CASES = [entry.case for entry in sweep_file.load(sweep_file.find("decode"), OPS).check]


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_decode_step_of_every_variant_agrees_with_fp32(case: Case) -> None:
    checker = Checker(OP, case, WHERE)
    assert {variant.name: checker.run(variant, None)[1] for variant in OP.variants} == {v.name: [] for v in OP.variants}


@pytest.mark.parametrize("is_cast", [False, True])
def test_compare_of_a_wrong_token_or_noise_fails(is_cast: bool) -> None:
    inputs = OP.inputs(CASES[1], device=WHERE)
    expected = {**OP.reference(inputs)}
    assert OP.compare(CASES[1], inputs, {**expected, "is_cast": is_cast}, expected) == []
    swapped = {name: torch.cat((t[1:2], t[1:])) for name, t in expected.items()}
    noisy = {name: t + t.std() * (0.5 if is_cast else 0.05) * torch.randn_like(t) for name, t in expected.items()}
    for wrong in (swapped, noisy):
        errors = OP.compare(CASES[1], inputs, {**wrong, "is_cast": is_cast}, expected)
        assert [error.split(":")[0] for error in errors] == ["qkv", "y"]


@pytest.mark.parametrize(("layer", "output", "factor", "is_cast"), [
    ("qkv", "qkv", 2, False), ("o", "y", 2, False), ("gate-up", "y", 2, False), ("down", "y", 2, False),
    ("qkv", "qkv", 2, True), ("o", "y", 4, True), ("down", "y", 8, True),
])  # fmt: skip
def test_compare_of_a_wrong_row_scale_fails(layer: str, output: str, factor: int, is_cast: bool) -> None:
    inputs = OP.inputs(CASES[1], device=WHERE)
    expected = OP.reference(inputs)
    inputs["layers"][0][layer]["weight"].scales[:, 0, 0, :, 0] *= factor
    errors = OP.compare(CASES[1], inputs, {**OP.reference(inputs), "is_cast": is_cast}, expected)
    assert [error.split(":")[0] for error in errors] == [output]


def test_traffic_of_int4_weights_is_about_half_of_8_bit_weights() -> None:
    case = next(e.case for e in sweep_file.load(sweep_file.find("decode"), OPS).bench if e.case.name == "llama-3-8b-n1")
    weights = 4 * 4096 * (6144 + 4096 + 28672 + 14336)  # four layers
    assert 0.5 * weights < OP.traffic(case).total < 0.55 * weights
    assert OP.flops is not None
    assert OP.flops(case) == 2 * weights
