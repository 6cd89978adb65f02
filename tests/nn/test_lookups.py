"""The look-ups of configs by a converted DeepSeek-V3 16B on an H200: each has an entry of its own."""

import inspect
import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kerneltune.cache import Chooser
from kerneltune.checking.declarations import before_look_ups
from kerneltune.nn import convert_to_fp8_training
from kerneltune.ops import fp8, fp8_grouped_gemm, moe_routing, swiglu
from kerneltune.spec import Case

BATCH, LENGTH = 8, 4096
FUNCTIONS = {
    name: function
    for family in (fp8, fp8_grouped_gemm, moe_routing, swiglu)
    for name, function in vars(family).items()
    if name != "moe_sort" and name.startswith(("fp8_", "moe_", "swiglu_"))
}
"""Operators by name; `moe_sort` has no config."""


class LookedUpError(Exception):
    """Ends an operator at its look-up."""


class Launches(TorchDispatchMode):
    """Run each operator of kerneltune up to its look-up, on tensors without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, operands, options = func.name().removeprefix("kerneltune::"), args, kwargs or {}
        is_dense = name == "fp8_grouped_gemm" and args[4].shape == (1,)  # torch multiplies on a GPU
        if name == "fp8_expected_weights":
            name, operands, options = "fp8_tensorwise_3d", args[:1], {"layout": "both"}
        if (function := FUNCTIONS.get(name)) is not None and not is_dense:
            with suppress(LookedUpError):
                function(**dict(zip(inspect.signature(function).parameters, operands, strict=False)), **options)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def sources() -> Iterator[dict[tuple[str, Any], str]]:
    """Return operator and sizes -> the source of the config on an H200, filled by each look-up."""
    source_of: dict[tuple[str, Any], str] = {}

    def end_call(chooser: Chooser, case: Case) -> None:
        source_of[chooser.op.name, case.axes] = chooser.find(case, "nvidia_h200").source.name
        raise LookedUpError

    with before_look_ups(end_call):
        yield source_of


@pytest.mark.parametrize(("recipe", "dense"), list(itertools.product(("tensorwise", "rowwise"), (False, True))))
def test_look_ups_of_a_16b_training_step_are_all_exact(recipe: str, dense: bool, sources: dict[tuple[str, Any], str]) -> None:
    pytest.importorskip("transformers")
    from kerneltune.workloads import models

    model: Any = models.build("deepseek-v3-16b", "meta")
    convert_to_fp8_training(model, recipe, dense=dense)
    hidden = torch.empty((BATCH, LENGTH, 2048), dtype=torch.bfloat16, device="meta", requires_grad=True)
    rotary = tuple(torch.empty((BATCH, LENGTH, 64), dtype=torch.bfloat16, device="meta") for _ in range(2))
    with Launches():
        for layer in model.model.layers[:2]:  # a dense layer and a layer of experts
            y = layer(hidden, position_embeddings=rotary, attention_mask=None)
            y.backward(torch.empty_like(y))
    assert len(sources) >= 12
    assert {case for case, source in sources.items() if source != "own"} == set()
