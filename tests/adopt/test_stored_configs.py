"""Config objects for stored configs: with the author's pre_hook where the author's list tells which one."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import triton

from kerneltune.adopt.configs import StoredConfig, configs_digest, to_triton_configs

Hook = Callable[[Mapping[str, Any]], None]
NOTED = list[Any]()
OTHER = StoredConfig({"BLOCK": 512}, num_warps=4, num_stages=3, num_ctas=1, pre_hook=True)
"""A config of `space=`, that is, beside the list."""


def enclosing(value: Any) -> Hook:
    return lambda _named: NOTED.append(value)


def with_default(value: Any) -> Hook:
    def hook(_named: Mapping[str, Any], held: Any = value) -> None:
        NOTED.append(held)

    return hook


def with_keyword(value: Any) -> Hook:
    def hook(_named: Mapping[str, Any], *, held: Any = value) -> None:
        NOTED.append(held)

    return hook


class Noting:
    """Note the arguments of a launch for its own object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def note(self, _named: Mapping[str, Any]) -> None:
        NOTED.append(self.value)


def listed(*hooks: Any) -> list[Any]:
    """Return a list of configs with these pre_hooks."""
    return [triton.Config({"BLOCK": 16 << place}, pre_hook=hook) for place, hook in enumerate(hooks)]


SAME = {
    "a hook for each config": lambda: (enclosing("y_ptr"), enclosing("y_ptr")),
    "equal lists": lambda: (enclosing(["x", "y"]), enclosing(["x", "y"])),
    "one enclosed object": lambda: tuple(map(enclosing, [object()] * 2)),
    "equal defaults": lambda: (with_default(1), with_default(1)),
    "a method of one object": lambda: (lambda one: (one.note, one.note))(Noting(1)),
}
DIFFERENT = {
    "enclosed values": lambda: (enclosing("x_ptr"), enclosing("y_ptr")),
    "long arrays": lambda: (enclosing(np.arange(5000)), enclosing(np.arange(5000) * (np.arange(5000) != 2500))),
    "enclosed objects": lambda: (enclosing(object()), enclosing(object())),
    "1 and True": lambda: (enclosing(1), enclosing(True)),
    "defaults": lambda: (with_default("x_ptr"), with_default("y_ptr")),
    "keyword defaults": lambda: (with_keyword("x_ptr"), with_keyword("y_ptr")),
    "methods of two objects": lambda: (Noting(1).note, Noting(2).note),
    "partials": lambda: (partial(print, 1), partial(print, 2)),
}


@triton.jit
def relu(x):
    return triton.language.maximum(x, 0.0)


def test_digest_of_configs_with_a_function_holds_no_address() -> None:
    """The text of a function in Triton's interpreter has an address, which is another in each process."""
    first, second = ([triton.Config({"BLOCK": 16, "ACT": function})] for function in (relu, triton.jit(relu.fn)))
    assert configs_digest(first) == configs_digest(second) != configs_digest(listed(None))


@pytest.mark.parametrize("hooks", SAME.values(), ids=SAME)
def test_config_beside_a_list_with_one_pre_hook_gets_this_pre_hook(hooks: Callable[[], tuple[Hook, ...]]) -> None:
    configs = listed(*hooks())
    made = to_triton_configs(configs, [OTHER])[OTHER]
    assert made.kwargs == {"BLOCK": 512}
    assert made.pre_hook in [config.pre_hook for config in configs]


@pytest.mark.parametrize("hooks", DIFFERENT.values(), ids=DIFFERENT)
def test_config_beside_a_list_with_several_pre_hooks_is_left_out(hooks: Callable[[], tuple[Hook, ...]]) -> None:
    configs = listed(*hooks())
    made = to_triton_configs(configs, [OTHER, *map(StoredConfig.of, configs)])
    assert list(made.values()) == configs


def test_labels_of_configs_with_one_warp_and_with_the_usual_four_differ() -> None:
    usual, one_warp, one_stage = (StoredConfig({"BK": 64}, **options) for options in ({}, {"num_warps": 1}, {"num_stages": 1}))
    assert [config.label for config in (usual, one_warp, one_stage)] == ["BK=64", "BK=64 num_warps=1", "BK=64 num_stages=1"]
