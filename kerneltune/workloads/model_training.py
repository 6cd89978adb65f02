"""Whole training steps of models of `transformers`: bf16, torchao and ours, with eager or compiled layers.

The variants of a case share their weights: each variant is a copy of the model's modules with the same parameters.
"""

import copy
import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from kerneltune.compat import fails_on_recompile_limit
from kerneltune.nn import convert_to_fp8_training
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant
from kerneltune.workloads import models

_LEAST_COSINE, _LOSS_TOLERANCE = 0.9, 0.02
_WATCHED = ("lm_head.weight", "input_layernorm.weight", "o_proj.weight")
"""Ends of names of parameters whose gradients are compared; the first of each in a model."""
MOST_GRAPHS = 32
"""Largest number of graphs that torch.compile keeps of a class of layers: 7 variants have 14, of dense layers and of
experts."""

_MEMORY_FACTOR = 3
"""Memory per byte of weights and gradients: on an H200 a step of DeepSeek-V3 671B sizes peaks at 26.6 GB, 1.9 times
these."""

_models_of: dict[tuple[str, bool, str], dict[str, nn.Module]] = {}
"""(model, whether compiled, device) of the last case -> `base` and the models of its variants, which all its inputs
share."""


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Return ids (batch, length) int64, the name of the model, and whether its layers are compiled."""
    name, is_compiled = str(case.option("model")), bool(case.option("compiled"))
    if device == "meta":
        ids = torch.empty((1, case["T"]), dtype=torch.int64, device=device)
    else:
        ids = models.tokens(name, device, seed=seed, count=case["T"])
    return {"model": name, "compiled": is_compiled, "ids": ids}


def reference(inputs: Inputs) -> Outputs:
    """Run a step in bf16 as the library does, eagerly; nothing without `transformers`."""
    return {} if _without_transformers(None) else _step(_models(inputs)["base"], inputs)


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare losses, and the directions of gradients."""
    errors = []
    loss, want = float(outputs["loss"]), float(expected["loss"])
    if not abs(loss - want) <= _LOSS_TOLERANCE * abs(want):
        errors.append(f"loss: {loss:.4f}, expected {want:.4f} within {_LOSS_TOLERANCE:.0%}")
    for name, gradient in expected["gradients"].items():
        got = outputs["gradients"][name].float().flatten()
        cosine = float(nn.functional.cosine_similarity(got, gradient.float().flatten(), 0))
        if not cosine >= _LEAST_COSINE:
            errors.append(f"gradient of {name}: cosine {cosine:.3f}, expected {_LEAST_COSINE} or more")
    return errors


def traffic(case: Case) -> Traffic:
    """Return the bytes of the weights, read, and of their gradients, written."""
    nbytes = 2 * models.num_parameters(str(case.option("model")))
    return Traffic(nbytes, nbytes)


def run(convert: Callable[[nn.Module], object], name: str, inputs: Inputs, _config: None) -> Outputs:
    """Run a step of the model that a variant converts; raise an error where torch.compile would run a layer eagerly.

    A CUDA graph is an error, too: it keeps the memory of a whole step, 45 GB, and while it is captured transformers masks
    attention, which then takes another kernel than in a training loop.
    """
    if inputs["ids"].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a training step is timed launch by launch: --policy eager")
    by_variant = _models(inputs)
    if name not in by_variant:
        model = copy.deepcopy(by_variant["base"], {id(p): p for p in by_variant["base"].parameters()})
        convert(model)
        if inputs["compiled"]:
            models.compile_layers(model)
        by_variant[name] = model
    with _compiling_as_timed() if inputs["compiled"] else nullcontext():
        return _step(by_variant[name], inputs)


@contextmanager
def _compiling_as_timed() -> Iterator[None]:
    """Let a check compile the code that is timed: poisoned memory asks torch for other, deterministic code."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        with fails_on_recompile_limit(MOST_GRAPHS):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _models(inputs: Inputs) -> dict[str, nn.Module]:
    """Return the models of a case by variant; drop the models and the compiled code of the case before."""
    case = str(inputs["model"]), bool(inputs["compiled"]), str(inputs["ids"].device)
    if case not in _models_of:
        _models_of.clear()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        _models_of[case] = {"base": models.build(inputs["model"], case[2])}
    return _models_of[case]


def _step(model: nn.Module, inputs: Inputs) -> Outputs:
    loss = models.step(model, inputs["ids"])
    gradients: dict[str, Tensor] = {}
    for end in _WATCHED:
        watched = next(((n, p) for n, p in model.named_parameters() if n.endswith(end)), None)
        if watched is not None and watched[1].grad is not None:
            gradients[watched[0]] = watched[1].grad
    model.zero_grad(set_to_none=True)
    return {"loss": loss, "gradients": gradients}


def _without_transformers(_case: Case | None) -> str | None:
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


def _without_experts(case: Case) -> str | None:
    has_experts = "moe_intermediate_size" in models.SHAPES[str(case.option("model"))].sizes
    return _without_transformers(case) or (None if has_experts else f"{case.option('model')} has no experts")


def _variant(name: str, convert: Callable[[nn.Module], object], requires: tuple[str, ...] = ()) -> Variant:
    converts_all = name == "baseline" or name.endswith("_dense")
    unsupported = _without_transformers if converts_all else _without_experts
    return Variant(name, partial(run, convert, name), unsupported=unsupported, requires=requires)


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
        policy="eager",
        memory_factor=_MEMORY_FACTOR,
        variants=(
            _variant("baseline", lambda _model: None, ("transformers",)),
            *(
                _variant(recipe + suffix, partial(convert_to_fp8_training, recipe=recipe, dense=dense))
                for suffix, dense in (("", False), ("_dense", True))
                for recipe in ("tensorwise", "rowwise")
            ),
            _variant("torchao", partial(models.convert_by_torchao, dense=False), ("torchao",)),
            _variant("torchao_dense", partial(models.convert_by_torchao, dense=True), ("torchao",)),
        ),
    ),
)
