"""Keys of launches: made from the arguments that decide, whatever the order in which a program names them."""

from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from adopted import run_python

from kerneltune.adopt.arguments import encode_value
from kerneltune.adopt.kernels import Launch, LaunchMap, all_but_floats, get_or_make, key_function


def launch(*args: Any, **kwargs: Any) -> Launch:
    """Return a launch of a kernel with these arguments."""
    return Launch(SimpleNamespace(arg_names=["x", "N", "BLOCK"]), args, kwargs)


def test_key_holds_deciding_arguments_and_the_types_of_all_arguments() -> None:
    x = torch.ones(2)
    key = key_function(launch(x, 3, 0.5, grid=(1,)), {"N"})
    first = key((x, 3, 0.5), {"grid": (1,)})
    assert first == key((torch.ones(9), 3, 2.0), {"grid": (7,)}) == (1, torch.float32, int, 3, float, tuple)
    assert key((x, 4, 0.5), {"grid": (1,)}) != first != key((x.half(), 3, 0.5), {"grid": (1,)})


def test_key_of_keyword_arguments_is_the_same_in_any_order() -> None:
    key = key_function(launch(torch.ones(2), N=3, BLOCK=64), {"N", "BLOCK"})
    assert key((torch.ones(2),), {"BLOCK": 64, "N": 3}) == (2, torch.float32, int, 3, int, 64)
    with pytest.raises(KeyError, match="BLOCK"):
        key((torch.ones(2),), {"N": 3, "WIDTH": 64})


class Mode(IntEnum):
    """Choices of a kernel."""

    MUL = 3


class Kind(str, Enum):  # noqa: UP042
    """Choices of a kernel, by text."""

    A = "a"


def test_key_of_an_enumeration_member_has_its_plain_value() -> None:
    values = (Mode.MUL, Kind.A, np.float64(0.5))
    assert [repr(encode_value(value)) for value in values] == ["3", "'a'", "0.5"]
    call = launch(torch.ones(2), Mode.MUL, BLOCK=True)
    assert (call.sizes(), call.size("N"), call.size("BLOCK")) == ({"x.0": 2, "N": 3}, 3, None)
    assert all_but_floats(launch(np.float64(0.5), Mode.MUL)) == {"N"}


@pytest.mark.parametrize("other", [torch.ones(4, 4).T, torch.ones(17)[1:].view(4, 4)], ids=["strides", "alignment"])
def test_key_with_layout_depends_on_strides_and_alignment(other: torch.Tensor) -> None:
    call = launch(torch.ones(4, 4))
    assert key_function(call, {"x"})(call.args, {}) == key_function(call, {"x"})((other,), {})
    key = key_function(call, {"x"}, has_layout=True)
    assert key(call.args, {}) == key((torch.zeros(4, 4),), {}) != key((other,), {})


def test_key_with_layout_depends_on_which_tensors_begin_at_the_same_byte() -> None:
    x, y, z = (torch.ones(4) for _ in range(3))
    key = key_function(launch(x, y, z), {"x"}, has_layout=True)
    keys = [key(tensors, {}) for tensors in ((x, y, z), (x, x, y), (x, y, x), (x, y, y), (x, x, x))]
    assert len(set(keys)) == 5
    assert keys == [key(tensors, {}) for tensors in ((z, y, x), (y, y, z), (z, x, z), (z, x, x), (y, y, y))]


def test_keys_of_equal_values_of_other_types_differ() -> None:
    """A constexpr of 1, True and 1.0 compiles to other code."""
    keys = LaunchMap[str]()
    for value in (1, True, 1.0):
        assert keys.find((value,), {}) is None
        keys.remember(launch(value), {"x"}, repr(value))
    assert [keys.find((value,), {}) for value in (1, True, 1.0)] == ["1", "True", "1.0"]


@pytest.mark.parametrize(("value", "other"), [((torch.ones(2), 1), (torch.ones(3), 1)), ((1, 2), (1, 3)), (object(), object())])
def test_key_depends_on_values_of_other_types(value: Any, other: Any) -> None:
    key = key_function(launch(value), {"x"})
    assert key((value,), {}) == key((value,), {}) != key((other,), {})


def test_key_of_a_pointer_without_a_shape_has_its_type() -> None:
    """Triton takes any object that has `data_ptr` and `dtype` for a pointer."""
    pointer = SimpleNamespace(data_ptr=lambda: 0, dtype=torch.float32)
    call = launch(pointer, 3)
    assert key_function(call, {"x", "N"})(call.args, {}) == (0, torch.float32, int, 3)
    assert call.sizes() == {"N": 3}


def test_key_does_not_depend_on_floats_or_the_grid() -> None:
    assert all_but_floats(launch(torch.ones(1), 3, scale=0.5, grid=(1,), warmup=False)) == {"x", "N"}


def test_keys_of_launches_with_other_names_or_types_differ() -> None:
    x, keys = torch.ones(2), LaunchMap[str]()
    launches = {
        "tensor": launch(x, 3, BLOCK=64),
        "none": launch(None, 3, BLOCK=64),
        "named": launch(x, N=3, BLOCK=64),
        "short": launch(x, 3),
        "float": launch(x, 3, BLOCK=0.5),
    }
    for name, call in launches.items():
        assert keys.find(call.args, call.kwargs) is None
        assert keys.remember(call, {"x", "N"}, name) == name
    assert [keys.find(call.args, call.kwargs) for call in launches.values()] == list(launches)
    assert keys.find((torch.ones(2), 3), {"BLOCK": 128}) == "tensor"
    assert keys.find((torch.ones(3), 3), {"BLOCK": 64}) is None
    assert keys.find((x, [3]), {"BLOCK": 64}) is None


def test_find_after_launches_with_other_keys_or_orders_of_names_returns_the_value_of_the_own_key() -> None:
    keys = LaunchMap[dict[str, int]]()
    launches = [{"N": 1, "BLOCK": 2}, {"BLOCK": 1, "N": 2}, {"N": 3, "BLOCK": 1}, {"BLOCK": 3, "N": 1}]
    for named in launches:
        keys.remember(launch(**named), {"N", "BLOCK"}, named)
    for before in launches:
        for named in launches:
            assert (keys.find((), before), keys.find((), named)) == (before, named)
    assert keys.find((), {"N": 2, "BLOCK": 2}) is None
    keys.remember(launch(**launches[0]), {"N", "BLOCK"}, {})
    assert keys.find((), launches[0]) == {}


@pytest.mark.parametrize("value", [None, 3, "relu"])
def test_find_compares_no_tensor_with_the_value_of_another_launch(value: Any) -> None:
    """The comparison launches a kernel, and takes 20 µs."""
    keys, compared = LaunchMap[str](), list[Any]()
    keys.remember(launch(value), {"x"}, "plain")
    tensor = type("Compared", (torch.Tensor,), {"__eq__": compared.append, "__ne__": compared.append, "__hash__": id})()
    assert keys.find((tensor,), {}) is None
    assert compared == []


def test_keys_beyond_their_limit_are_forgotten() -> None:
    keys = LaunchMap[int]()
    for n in range(5000):
        assert keys.remember(launch(n), {"x"}, n) == n
    assert keys.num_keys < 4097
    for n in range(100):
        keys.remember(launch(0, **{f"n{n}": 1}), {"x"}, n)
    assert keys.find((0,), {"n99": 1}) == 99
    assert keys.num_keys < 33


def test_get_or_make_finds_lists_of_configs_by_identity_and_by_value() -> None:
    lists: dict[Any, object] = {}
    configs = [triton.Config({"BLOCK": size}) for size in (32, 64)]
    first = get_or_make(lists, configs, object)
    assert get_or_make(lists, list(configs), object) is first
    assert get_or_make(lists, [triton.Config({"BLOCK": size}) for size in (32, 64)], object) is first
    assert get_or_make(lists, configs[:1], object) is not first
    for size in range(3000):
        get_or_make(lists, [triton.Config({"BLOCK": size})], object)
    assert len(lists) <= 2048


DIGEST = """
import triton, triton.language as tl
from kerneltune.adopt.bytecode import bytecode_digest
def factor(act):
    return 2 if act in {"relu", "gelu", "silu", "tanh"} else 1
@triton.jit
def kernel(x_ptr, ACT: tl.constexpr):
    tl.store(x_ptr, [factor(act) for act in (ACT, 1)][0])
print(bytecode_digest(kernel.fn))
"""


def test_bytecode_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    """The text of inner code has an address, and a set of strings has another order in each process."""
    (tmp_path / "digest.py").write_text(DIGEST)
    code = "import runpy, sys; runpy.run_path(sys.argv[1])"
    done = [run_python(code, str(tmp_path / "digest.py"), PYTHONHASHSEED=seed) for seed in "123"]
    assert len({one.stdout for one in done}) == 1
    assert len(done[0].stdout.strip()) == 16, done[0].stderr
