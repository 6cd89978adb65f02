"""Routing functions as torch operators: every operator of the family is one, with the function's inputs and results."""

import pytest
import torch

from kerneltune import ops
from kerneltune.spec import Case

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILY = {name: op for name, op in ops.load().items() if ".moe_routing." in op.module}
SIZES = {"T": 6, "H": 16, "E": 3, "K": 2}


@pytest.mark.parametrize("name", FAMILY)
def test_operator_of_every_function_has_a_fake_and_gives_its_results(name: str) -> None:
    op = FAMILY[name]
    axes = tuple((axis, SIZES[axis]) for axis in op.axes)
    case = Case("c", axes, op.dtypes[0], op.quants[0], tuple((option, values[0]) for option, values in op.options.items()))
    inputs = dict(op.inputs(case, device=WHERE))
    operator = getattr(torch.ops.kerneltune, name).default
    torch.library.opcheck(operator, (), inputs, test_utils=("test_schema", "test_faketensor"))
    variant = op.variant("optimized")
    names = variant.run(inputs, variant.default_config(case)).keys()
    found = operator(**inputs)
    outputs = dict(zip(names, (found,) if isinstance(found, torch.Tensor) else found, strict=True))
    assert op.compare(case, inputs, outputs, op.reference(inputs)) == []
