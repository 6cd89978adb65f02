"""Peers that are torch alone are held to the reference wherever torch runs: what we are compared with must do the same work."""

import pytest
import torch

from kerneltune import ops, sweep_file
from kerneltune.checking.check import Checker
from kerneltune.spec import Case, Variant

OPS = ops.load()
PLAIN = ("eager", "dequantised", "scaled_mm", "torch")
FAMILIES = ("rmsnorm", "rmsnorm_add", "weight_only", "multi_cast")  # ops/fp8/test_contract.py tests the peers of casts
CASES = [
    pytest.param(entry.op, variant, entry.case, id=f"{entry.op},{variant.name},{entry.case.label.replace(' ', ',')}")
    for family in FAMILIES
    for entry in sweep_file.load(sweep_file.find(family), OPS).check
    for variant in OPS[entry.op].variants
    if variant.name in PLAIN and variant.unsupported(entry.case) is None
]


@pytest.mark.parametrize(("name", "variant", "case"), CASES)
def test_plain_torch_agrees_with_the_reference(name: str, variant: Variant, case: Case) -> None:
    assert Checker(OPS[name], case, "cuda" if torch.cuda.is_available() else "cpu").run(variant, None)[1] == []
