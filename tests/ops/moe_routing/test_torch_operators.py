"""Routing functions: each is a torch operator with the function's inputs and results; ids of no expert are sorted nowhere."""

import pytest
import torch

from kerneltune import ops
from kerneltune.ops.moe_routing import moe_sort
from kerneltune.spec import Case

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILY = {name: op for name, op in ops.load().items() if ".moe_routing." in op.module}
SIZES = {"T": 6, "H": 16, "E": 3, "K": 2}


@pytest.mark.parametrize("name", FAMILY)
def test_operators_of_routing_have_fakes_and_give_results_of_their_functions(name: str) -> None:
    op = FAMILY[name]
    axes = tuple((axis, SIZES[axis]) for axis in op.axes)
    case = Case("c", axes, op.dtypes[0], op.quants[0], tuple((option, values[0]) for option, values in op.options.items()))
    inputs = dict(op.inputs(case, device=WHERE))
    operator = getattr(torch.ops.kerneltune, name).default
    torch.library.opcheck(operator, (), inputs, test_utils=("test_schema", "test_faketensor"))
    variant = op.variant("optimized")
    names = variant.run(inputs, variant.default_config(case)).keys()
    results = operator(**inputs)
    outputs = dict(zip(names, (results,) if isinstance(results, torch.Tensor) else results, strict=True))
    assert op.compare(case, inputs, outputs, op.reference(inputs)) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sort_of_64_bit_ids_outside_the_experts_assigns_no_expert(dtype: torch.dtype) -> None:
    outside = [2**32 + 1, -(2**32), 2**62 + 2, 3, -1] if dtype == torch.int64 else [3, -1, 2**31 - 1, -(2**31), 4]
    ids = torch.tensor([[identifier, 1] for identifier in outside], dtype=dtype, device=WHERE)
    routing = moe_sort(ids, 3)
    assert routing.places.tolist() == [[-1, row] for row in range(5)]
    assert routing.pairs.tolist() == [1, 3, 5, 7, 9, -1, -1, -1, -1, -1]
    assert routing.offs.tolist() == [0, 5, 5]
