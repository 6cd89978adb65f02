"""Keys of launches: made from the arguments that decide, whatever the order in which a program names them."""

from typing import Any

import pytest
import torch

from kerneltune.adopt.kernels import all_but_floats, plan_key


def test_key_holds_deciding_arguments_and_element_types_alone() -> None:
    names, x = ("x", "N", "scale", "grid"), torch.ones(2)
    plan = plan_key(names, (x, 3, 0.5, (1,)), {"N"})
    assert plan.key(x, 3, 0.5, (1,)) == plan.key(torch.ones(9), 3, 2.0, (7,)) == (torch.float32, 3)
    assert plan.key(x, 4, 0.5, (1,)) != plan.key(x, 3, 0.5, (1,)) != plan.key(x.half(), 3, 0.5, (1,))


def test_key_of_arguments_by_name_takes_any_order_and_refuses_other_names() -> None:
    plan = plan_key(("x", "N", "BLOCK"), (torch.ones(2), 3, 64), {"N", "BLOCK"}, keywords=2)
    assert plan.key(torch.ones(2), BLOCK=64, N=3) == (torch.float32, 3, 64)
    with pytest.raises(TypeError, match="WIDTH"):
        plan.key(torch.ones(2), N=3, WIDTH=64)


@pytest.mark.parametrize("other", [torch.ones(4, 4).T, torch.ones(17)[1:].view(4, 4)], ids=["strides", "alignment"])
def test_key_with_layout_tells_strides_and_alignment_apart(other: torch.Tensor) -> None:
    values = (torch.ones(4, 4),)
    assert plan_key(("x",), values, {"x"}).key(*values) == plan_key(("x",), values, {"x"}).key(other)
    plan = plan_key(("x",), values, {"x"}, has_layout=True)
    assert plan.key(*values) == plan.key(torch.zeros(4, 4)) != plan.key(other)


@pytest.mark.parametrize(("value", "other"), [((torch.ones(2), 1), (torch.ones(3), 1)), ((1, 2), (1, 3)), (object(), object())])
def test_key_tells_values_of_no_plain_type_apart(value: Any, other: Any) -> None:
    plan = plan_key(("x",), (value,), {"x"})
    assert plan.key(value) == plan.key(value) != plan.key(other)


def test_floats_and_the_grid_tell_no_launches_apart() -> None:
    assert all_but_floats(("x", "scale", "N", "grid", "warmup"), (torch.ones(1), 0.5, 3, (1,), False)) == {"x", "N"}


def test_a_plan_forgets_its_keys_when_it_holds_very_many() -> None:
    plan = plan_key(("N",), (0,), {"N"})
    for n in range(5000):
        assert plan.remember(plan.key(n), n) == n
    assert len(plan.found) < 4097
    assert plan.found[plan.key(4999)] == 4999
