"""Whole training steps of models of `transformers`: bf16, torchao and ours, with eager or compiled layers.

The variants of a case share their weights: each variant is a copy of the model's modules with the same parameters.
"""

import copy
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant
from kerneltune.workloads import models, once

_LEAST_COSINE, _LOSS_TOLERANCE = 0.9, 0.02
_WATCHED = ("lm_head.weight", "input_layernorm.weight", "o_proj.weight")
"""Ends of names of parameters whose gradients are compared; the first of each in a model."""


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Return ids (batch, length) int64, the name of the model, and whether its layers are compiled."""
    name = str(case.option("model"))
    found: dict[str, Any] = {"model": name, "compiled": bool(case.option("compiled")), "seed": seed}
    if device == "meta":
        return found | {"ids": torch.empty((1, case["T"]), dtype=torch.int64, device=device)}
    return found | {"ids": models.tokens(name, device, seed=seed, count=case["T"])}


def reference(inputs: Inputs) -> Outputs:
    """Run a step in bf16 as the library does, eagerly; nothing without `transformers`."""
    return {} if _without_transformers(None) else _step(_base(inputs), inputs)


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare losses, and the directions of gradients."""
    errors = []
    loss, want = float(outputs["loss"]), float(expected["loss"])
    if not abs(loss - want) <= _LOSS_TOLERANCE * abs(want):
        errors.append(f"loss: {loss:.4f}, expected {want:.4f} within {_LOSS_TOLERANCE:.0%}")
    for name, gradient in expected["gradients"].items():
        cosine = float(nn.functional.cosine_similarity(outputs["gradients"][name].flatten(), gradient.flatten(), 0))
        if not cosine >= _LEAST_COSINE:
            errors.append(f"gradient of {name}: cosine {cosine:.3f}, expected {_LEAST_COSINE} or more")
    return errors


def traffic(case: Case) -> Traffic:
    """Return the bytes of the weights, read, and of their gradients, written."""
    nbytes = 2 * models.num_parameters(str(case.option("model")))
    return Traffic(nbytes, nbytes)


def run(convert: Callable[[nn.Module], None], name: str, inputs: Inputs, _config: None) -> Outputs:
    """Run a step of the model that a variant converts."""

    def make() -> nn.Module:
        base = _base(inputs)
        model = copy.deepcopy(base, {id(p): p for p in base.parameters()})
        convert(model)
        if inputs["compiled"]:
            models.compile_layers(model)
        return model

    return _step(once(inputs, name, make), inputs)


def _base(inputs: Inputs) -> nn.Module:
    model: nn.Module = once(inputs, "base", lambda: models.build(inputs["model"], str(inputs["ids"].device), seed=inputs["seed"]))
    return model


def _step(model: nn.Module, inputs: Inputs) -> Outputs:
    loss = models.step(model, inputs["ids"])
    gradients: dict[str, Tensor] = {}
    for end in _WATCHED:
        found = next(((n, p) for n, p in model.named_parameters() if n.endswith(end)), None)
        if found is not None and found[1].grad is not None:
            gradients[found[0]] = found[1].grad.float()
    model.zero_grad(set_to_none=True)
    return {"loss": loss, "gradients": gradients}


def _without_transformers(_case: Case | None) -> str | None:
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


def _variant(name: str, convert: Callable[[nn.Module], None], requires: tuple[str, ...] = ()) -> Variant:
    return Variant(name, partial(run, convert, name), unsupported=_without_transformers, requires=requires)


OPS = (
    Op(
        name="model_step",
        axes=("T",),
        dtypes=("bfloat16",),
        quants=("fp8",),
        options={"model": tuple(models.SHAPES), "compiled": (False, True)},
        inputs=inputs,
        reference=reference,
        compare=compare,
        traffic=traffic,
        module=__name__,
        variants=(
            _variant("baseline", models.as_it_is, ("transformers",)),
            _variant("tensorwise", models.converted("tensorwise")),
            _variant("rowwise", models.converted("rowwise")),
            _variant("tensorwise_dense", models.converted("tensorwise", dense=True)),
            _variant("rowwise_dense", models.converted("rowwise", dense=True)),
            _variant("torchao", models.torchao_converted(False), ("torchao",)),
            _variant("torchao_dense", models.torchao_converted(True), ("torchao",)),
        ),
    ),
)
