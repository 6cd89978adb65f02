"""Torch operators and runs of variants, made from the signatures of functions."""

import inspect
import pickle
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from kerneltune.kernel_lib.functions import constant, run_of, torch_operator
from kerneltune.spec import Case


class Halves(NamedTuple):
    """Results, of them a caller may leave out `low`."""

    low: torch.Tensor | None
    high: torch.Tensor


def empty_pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch_operator(empty_pair)
def doubled_by_test(
    x: torch.Tensor, factor: float = 2.0, *, negate: bool = False, config: object = None, out: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x times a factor, and x again."""
    return x * (-factor if negate else factor), x.clone()


def empty_halves(x: torch.Tensor, both: bool) -> Halves:
    half = torch.empty_like(x)
    return Halves(torch.empty_like(x) if both else None, half)


@torch_operator(empty_halves, without=("scratch",))
def halves_by_test(x: torch.Tensor, *, both: bool = True, scratch: torch.Tensor | None = None) -> Halves:
    """Return both halves, or the high half alone."""
    return Halves(x / 2 if both else None, x / 2)


def no_results() -> None:
    return None


@torch_operator(no_results, name="cleared_by_test", mutates=("xs",))
def cleared(xs: Sequence[torch.Tensor]) -> None:
    """Clear tensors."""
    for x in xs:
        x.zero_()


def configured(x: torch.Tensor, *, both: bool, config: str) -> Halves:
    assert config == "a config"
    return halves_by_test(x, both=both)


X = torch.arange(4.0)


def test_operator_has_the_parameters_of_its_function_by_position() -> None:
    schema = str(torch.ops.kerneltune.doubled_by_test.default._schema)
    assert schema == "kerneltune::doubled_by_test(Tensor x, float factor=2., bool negate=False) -> (Tensor, Tensor)"
    doubled, same = torch.ops.kerneltune.doubled_by_test(X, 3.0, True)
    assert torch.equal(doubled, -3 * X)
    assert torch.equal(same, X)
    assert list(inspect.signature(doubled_by_test).parameters) == ["x", "factor", "negate", "config", "out"]


def test_operator_with_optional_results_returns_a_list() -> None:
    schema = str(torch.ops.kerneltune.halves_by_test.default._schema)
    assert schema == "kerneltune::halves_by_test(Tensor x, bool both=True) -> Tensor[]"
    assert [len(torch.ops.kerneltune.halves_by_test(X, both)) for both in (True, False)] == [2, 1]


def test_operator_without_results_writes_its_mutated_arguments() -> None:
    schema = str(torch.ops.kerneltune.cleared_by_test.default._schema)
    assert schema == "kerneltune::cleared_by_test(Tensor(a0!)[] xs) -> ()"
    x = X.clone()
    assert torch.ops.kerneltune.cleared_by_test([x]) is None
    assert not x.any()


CALLS = [("doubled_by_test", (X, 3.0)), ("halves_by_test", (X, False)), ("halves_by_test", (X,))]


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_fake_of_an_operator_has_shapes_and_dtypes_of_its_results(name: str, arguments: tuple[object, ...]) -> None:
    operator = getattr(torch.ops.kerneltune, name).default
    torch.library.opcheck(operator, arguments, test_utils=["test_schema", "test_faketensor"])


def test_run_of_names_the_results_and_omits_absent_ones() -> None:
    assert run_of(doubled_by_test, "twice", "x")({"x": X}, None).keys() == {"twice", "x"}
    assert run_of(configured)({"x": X, "both": False}, "a config").keys() == {"high"}


def test_constant_after_pickling_gives_every_case_the_same_value() -> None:
    space = pickle.loads(pickle.dumps(constant({"warps": (4, 8)})))
    assert [space(Case("c", (("M", size),), "float16")) for size in (1, 9)] == [{"warps": (4, 8)}] * 2
