"""The look-ups of configs by a converted DeepSeek-V3 16B on an H200: how many have an entry, a rule, or the default alone."""

import inspect
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kerneltune import ops
from kerneltune.cache import Chooser
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
UNSEEN = {
    ("fp8_tensorwise_2d", "M=32768 K=512"),
    ("fp8_tensorwise_2d", "M=32768 K=576"),
    ("fp8_tensorwise_3d", "E=1 K=2048 N=576"),
}
"""Latents of attention, narrower than half of the narrowest matrix that a rule was fitted to: nobody timed their casts."""
ONE_GROUP = {("fp8_group_both", f"M=32768 K={size} G=1") for size in (512, 576, 2048, 2816, 3072, 4096, 10944)}
"""Row-wise casts of dense layers, as a single group; the rule was fitted to 8 groups and more."""
UNSEEN_ROWWISE = ONE_GROUP | {
    ("fp8_rowwise_3d_both", "E=1 K=2048 N=576"),
    ("fp8_rowwise_3d_both", "E=1 K=512 N=4096"),
    ("swiglu_bwd", "M=196608 N=1408"),
}


class LookedUpError(Exception):
    """Ends an operator at its look-up."""


class Launches(TorchDispatchMode):
    """Run each operator of kerneltune up to its look-up, on tensors without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given, options = func.name().removeprefix("kerneltune::"), args, kwargs or {}
        is_dense = name == "fp8_grouped_gemm" and args[4].shape == (1,)  # torch multiplies on a GPU
        if name == "fp8_expected_weights":
            name, given, options = "fp8_tensorwise_3d", args[:1], {"layout": "both"}
        if (function := FUNCTIONS.get(name)) is not None and not is_dense:
            with suppress(LookedUpError):
                function(**dict(zip(inspect.signature(function).parameters, given, strict=False)), **options)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], str]:
    """Return operator and sizes -> the source of the config on an H200, filled by each look-up."""
    found: dict[tuple[str, str], str] = {}

    def look_up(self: Chooser, axes: Any, dtype: str, quant: str = "none", options: Any = (), gpu: str | None = None) -> None:
        choice = self.find(Case("", axes, dtype, quant, options), "nvidia_h200")
        is_ruled = choice.source == "default" and "rule" in choice.told
        found[self.op, " ".join(f"{axis}={size}" for axis, size in axes)] = "rule" if is_ruled else choice.source
        raise LookedUpError

    monkeypatch.setattr(Chooser, "__call__", look_up)
    return found


@pytest.mark.parametrize(
    ("recipe", "dense", "unseen"),
    [
        ("tensorwise", False, set()),
        ("tensorwise", True, UNSEEN),
        ("rowwise", False, {("swiglu_bwd", "M=196608 N=1408")}),
        ("rowwise", True, UNSEEN_ROWWISE),
    ],
)
def test_look_ups_of_a_16b_step_have_a_config_or_a_rule_but_for_the_named(
    recipe: str, dense: bool, unseen: set[tuple[str, str]], sources: dict[tuple[str, str], str]
) -> None:
    pytest.importorskip("transformers")
    from kerneltune.workloads import models

    ops.load()
    model: Any = models.build("deepseek-v3-16b", "meta")
    convert_to_fp8_training(model, recipe, dense=dense)
    hidden = torch.empty((BATCH, LENGTH, 2048), dtype=torch.bfloat16, device="meta", requires_grad=True)
    rotary = tuple(torch.empty((BATCH, LENGTH, 64), dtype=torch.bfloat16, device="meta") for _ in range(2))
    with Launches():
        for layer in model.model.layers[:2]:  # a dense layer and a layer of experts
            y = layer(hidden, position_embeddings=rotary, attention_mask=None)
            y.backward(torch.empty_like(y))
    assert len(sources) >= 12
    assert {case for case, source in sources.items() if source == "default"} <= unseen
