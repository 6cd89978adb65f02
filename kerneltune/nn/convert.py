"""Convert existing models to fp8 training in one call, and back.

This module chooses the modules and gives each module that stays a reason. `converted.py` changes the chosen modules.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from kerneltune.compat import is_compiled
from kerneltune.nn.converted import (
    convert_module,
    expert_weights,
    has_matrix,
    is_converted,
    revert,
    why_not_experts,
    why_not_reverted,
)
from kerneltune.nn.fp8_linear import GroupedLinear, why_not_fp8
from kerneltune.nn.kept_weights import kept_weights_of
from kerneltune.nn.recipes import Recipe, recipe_of
from kerneltune.wording import counted

Filter = Callable[[nn.Module, str], bool]

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def _folded(names: Iterable[str]) -> str:
    """Return the names in a line; numbers become `*`, as in `layers.*.mlp (61)`, with a count."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub(".*", name), []).append(name or "the model itself")
    return ", ".join(f"{kind} ({len(same)})" if len(same) > 1 else same[0] for kind, same in kinds.items())


def _folded_reasons(skipped: dict[str, str]) -> list[str]:
    """Return a line `names: reason` for each reason of the skipped modules."""
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(name)
    return [f"{_folded(names)}: {reason}" for reason, names in reasons.items()]


class Conversion(list[str]):
    """Names of the converted modules.

    Attributes:
        skipped: module name to the reason why the module stays as it was.
        notes: a line for each surprise, which is also a UserWarning: modules that were in fp8 or compiled before.
    """

    def __init__(self, converted: list[str], skipped: dict[str, str], notes: list[str]) -> None:
        super().__init__(converted)
        self.skipped, self.notes = skipped, notes

    def __str__(self) -> str:
        """Return a line with the converted modules, the notes, and a line for each reason of skipped modules."""
        skipped = (f"skipped {line}" for line in _folded_reasons(self.skipped))
        return "\n".join([f"converted {counted(len(self), 'module')} to fp8: {_folded(self)}", *self.notes, *skipped])


def convert_to_fp8_training(
    model: nn.Module,
    recipe: str | Recipe = "tensorwise",
    *,
    experts: bool = True,
    dense: bool = False,
    filter_fn: Filter | None = None,
) -> Conversion:
    """Let the expert layers of a model, and its dense layers, multiply in fp8 from now on, in place: forward and backward.

    - GroupedLinear, experts of `transformers` with any `experts_implementation`, and torchtitan's grouped experts multiply
      by the recipe.
    - Any other module with expert weights of its own, which are parameters of three axes, runs its own forward pass. Grouped
      and batched products with the weights (`torch._grouped_mm`, `torch.bmm`, `torch.matmul`) run in fp8. Conversion
      skips a module whose forward pass names none of these products. A forward pass that makes none with one of the weights
      raises a ValueError: nothing stays in bf16 unnoticed.
    - With `dense`, each `nn.Linear` that is large enough for fp8 to pay becomes an `Fp8Linear`. Output layers and routers
      stay.

    Parameters, their names and all hooks stay. The forward passes compile without a graph break, but for `delayed` and
    modules of other kinds that call `torch._grouped_mm`. Converted modules can be copied and pickled.
    `revert_from_fp8_training` undoes it.

    Args:
        model: model to convert; the model itself may be converted, too.
        recipe: `tensorwise`, `rowwise`, `delayed` or a Recipe. `delayed` needs `update_scales` once per optimizer step.
        experts: whether to convert expert layers.
        dense: whether to convert linear layers.
        filter_fn: (module, its name in the model) -> whether to convert the module, called for candidates; None converts
            all.

    Returns:
        The names of the converted modules, and the reasons for skipped modules.

    Raises:
        ValueError: no module, a parameter without a shape, an unknown recipe, or nothing to convert; the model stays as it
            is.
    """
    _check_model(model)
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"{name} has no shape before the model's first forward pass: convert after that")
    for option, value in (("dense", dense), ("experts", experts)):
        if not isinstance(value, bool):
            raise ValueError(f"{option}: {value!r}: expected True or False")
    if filter_fn is not None and not callable(filter_fn):
        raise ValueError(f"filter_fn: {filter_fn!r}: expected a function of a module and its name, or None")
    fresh: Recipe | str = "delayed" if recipe == "delayed" else recipe_of(recipe, "delayed")
    chosen, skipped = _chosen(model, experts, dense, filter_fn)
    if not chosen:
        raise ValueError(_nothing_to_convert(model, experts, dense, skipped))
    notes = _notes(model, chosen, fresh)
    with torch.inference_mode(False):  # because training changes the buffers that modules get here
        for name, module in chosen.items():
            convert_module(module, name, fresh)
    kept_weights_of(model)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Conversion(list(chosen), skipped, notes)


def _notes(model: nn.Module, chosen: dict[str, nn.Module], recipe: Recipe | str) -> list[str]:
    """Return a line for the chosen modules that are in fp8 already, and a line for the compiled modules of the model."""
    again = [n for n, m in chosen.items() if is_converted(m) and not (isinstance(m, GroupedLinear) and m.recipe == recipe)]
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    notes = [f"in fp8 already, with the recipe {recipe} from now on: {_folded(again)}"] if again else []
    why = "compiled before the conversion, compiles again at the next call"
    return notes + ([f"{why}: {_folded(compiled)}"] if compiled else [])


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")


def _chosen(
    model: nn.Module, experts: bool, dense: bool, filter_fn: Filter | None
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the modules to convert by name, and the reasons of all others that have expert weights or matrices."""
    chosen, skipped = {}, {}
    for name, module, reason in _candidates(model, experts, dense):
        if reason is not None:
            skipped[name] = reason
        elif filter_fn is not None and not filter_fn(module, name):
            skipped[name] = "left out by filter_fn"
        else:
            chosen[name] = module
    return chosen, skipped


def _candidates(model: nn.Module, experts: bool, dense: bool) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield name, module and reason to stay, or None.

    Experts are modules with expert weights, and modules whose class name says expert but whose weights have other axes. Dense
    layers are all linear layers and other modules with matrices, but for embeddings.
    """
    reasons = dict.fromkeys(_output_layers(model), "the model's output layer") | _routers(model) if dense else {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if experts and expert_weights(module):
            yield name, module, why_not_experts(module)
        elif experts and "expert" in kind.lower() and any(p.ndim > 1 for p in module.parameters(recurse=False)):
            yield name, module, f"a {kind} without weights of three axes (E, N, K)"
        elif dense and isinstance(module, nn.Linear):
            yield name, module, reasons.get(module) or why_not_fp8(module)
        elif dense and has_matrix(module) and not isinstance(module, nn.Embedding | nn.EmbeddingBag | ParametrizationList):
            yield name, module, reasons.get(module, f"a {kind}: of dense layers, nn.Linear alone runs in fp8")


def _nothing_to_convert(model: nn.Module, experts: bool, dense: bool, skipped: dict[str, str]) -> str:
    kinds = ["expert weights (parameters of three axes)"] * experts + ["linear layers for which fp8 pays"] * dense
    named = {name or type(model).__name__: reason for name, reason in skipped.items()}
    hints = [f"skipped: {'; '.join(_folded_reasons(named))}"] * bool(named) + ["dense=True converts linear layers"] * (not dense)
    return "; ".join([f"{type(model).__name__} has no {' and no '.join(kinds) or 'chosen layers'} to convert", *hints])


def revert_from_fp8_training(model: nn.Module) -> list[str]:
    """Let every converted module of a model multiply as it did before, in place.

    A GroupedLinear that was converted multiplies in the type of its input from now on.

    Returns:
        The names of the reverted modules; empty where none is converted.

    Raises:
        ValueError: no module; or a converted module became another class's since, as `fully_shard` makes it, or has a
            forward set on the object. The model stays as it is.
    """
    _check_model(model)
    converted = {n: m for n, m in model.named_modules() if is_converted(m)}
    for name, module in converted.items():
        if (why := why_not_reverted(module)) is not None:
            raise ValueError(f"{name or 'the model'} {why} since it was converted: revert before that")
    for module in converted.values():
        revert(module)
    return list(converted)


def _output_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the output layers that a model or its parts name, and layers in no list of the shape of the largest embedding."""
    for module in model.modules():
        try:
            output = cast(Any, module).get_output_embeddings()
        except Exception:  # of a module without output embeddings, whose own code may raise anything
            continue
        if isinstance(output, nn.Module):
            yield output
    largest = max((module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)), default=None)
    repeated = {part for module in model.modules() if isinstance(module, nn.ModuleList) for part in module.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in repeated and module.weight.shape == largest:
            yield module


def _routers(model: nn.Module) -> dict[nn.Module, str]:
    """Return module -> reason to stay, for the modules beside experts whose weight (E, K) has a row for each expert.

    A module beside experts that also reads E values, such as a shared expert of this width, has no router inside.
    """
    routers: dict[nn.Module, str] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            count = _num_experts(name, child)
            reason = f"a router, which chooses among {count} experts"
            for other in parent.children() if count > 1 else ():
                weights = ((m, getattr(m, "weight", None)) for m in other.modules())
                shapes = {m: tuple(w.shape) for m, w in weights if isinstance(w, torch.Tensor) and w.ndim == 2}
                found = [m for m, shape in shapes.items() if shape[0] == count]
                if other is not child and not any(shape[1] == count for m, shape in shapes.items() if m not in found):
                    routers |= dict.fromkeys(found, reason)
    return routers


def _num_experts(name: str, module: nn.Module) -> int:
    """Return how many experts a module holds; 0 for another module."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(module) if "expert" in name else 0
    weights = [] if isinstance(module, GroupedLinear) else list(expert_weights(module).values())
    return weights[0].shape[0] if weights else 0
