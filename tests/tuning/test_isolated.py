"""The measuring child: operators by name."""

import pytest

from kerneltune import ops
from kerneltune.spec import Op
from kerneltune.tuning.isolated import VariantName


@pytest.mark.parametrize("op", ops.load().values(), ids=lambda op: op.name)
def test_a_child_finds_every_operator_and_variant_by_name(op: Op) -> None:
    for variant in op.variants:
        found, named = VariantName(op.module, op.name, variant.name).load()
        assert (found.name, named.name) == (op.name, variant.name)


def test_an_operator_that_is_nowhere_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^no operator nothing in OP or OPS of kerneltune.ops.stream or of a package"):
        VariantName("kerneltune.ops.stream", "nothing", "optimized").load()
