"""Convert existing models to fp8 training in one call, and back."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.nn.alignment import ALIGNED
from kerneltune.nn.converted_products import ConvertedProducts, ExpertOperand
from kerneltune.nn.feeding_norm import READERS, feeding_norm_forward, why_not_fed
from kerneltune.nn.fp8_linear import Fp8Linear, why_not_fp8
from kerneltune.nn.fused_experts import fused_experts_forward, is_fused_experts, weight_names
from kerneltune.nn.grouped_experts import WEIGHT_NAMES, grouped_experts_forward, is_grouped_experts
from kerneltune.nn.grouped_linear import GroupedLinear
from kerneltune.nn.recipes import Recipe, recipe_of
from kerneltune.nn.swiglu import has_default_gate
from kerneltune.nn.uncompiled import uncompiled

Filter = Callable[[nn.Module, str], bool]


_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def _counted(names: Iterable[str]) -> list[str]:
    """Return the names, those that differ in numbers of layers as one: `layers.*.mlp (61)`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub(".*", name), []).append(name)
    return [f"{kind} ({len(found)})" if len(found) > 1 else found[0] for kind, found in kinds.items()]


class Conversion(list[str]):
    """Names of the converted modules.

    Attributes:
        skipped: module name to the reason why the module stays as it was.
    """

    def __init__(self, converted: list[str], skipped: dict[str, str]) -> None:
        super().__init__(converted)
        self.skipped = skipped

    def __str__(self) -> str:
        """Return a line for what was converted and one per kind of what was skipped; layers of one name are counted."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for name, why in self.skipped.items():
            kinds.setdefault((_NUMBER.sub(".*", name), why), []).append(name or "the model itself")
        lines = [f"converted {len(self)} modules to fp8: {', '.join(_counted(self))}"]
        return "\n".join([*lines, *(f"skipped {', '.join(_counted(names))}: {why}" for (_, why), names in kinds.items())])


def convert_to_fp8_training(
    model: nn.Module,
    recipe: str | Recipe = "tensorwise",
    *,
    experts: bool = True,
    dense: bool = False,
    norms: bool = False,
    filter_fn: Filter | None = None,
) -> Conversion:
    """Let the expert layers of a model, and its dense layers, multiply in fp8 from now on, in place: forward and backward.

    - A GroupedLinear takes the recipe.
    - An expert module of `transformers` runs in fp8 whatever its `experts_implementation` is, and so do torchtitan's grouped
      experts with w1, w2 and w3.
    - Any other module with expert weights of its own, which are parameters of three axes, also in a ParameterList, sees them as
      tensors whose grouped and batched products (`torch._grouped_mm`, `torch.bmm`, `torch.matmul`) run in fp8. A forward pass
      that makes no such product raises a ValueError: nothing stays in bf16 unnoticed.
    - With `dense`, an `nn.Linear` becomes an `Fp8Linear`, where that pays: see `skipped` of the result.
    - With `norms`, RMS normalizations of known decoder layers write the fp8 operands of the linear layers that alone read them;
      their own result is NaN. Such a layer is compiled as a whole or not at all.

    Groups may have any size. Parameters, their names and all hooks stay. The forward passes compile without a graph break, but
    for `delayed` and modules of other kinds that call `torch._grouped_mm`. Activation checkpoints may be anywhere. Converted
    modules can be copied and pickled. `revert_from_fp8_training` undoes it.

    Args:
        model: to convert, itself included.
        recipe: `tensorwise`, `rowwise`, `delayed` or a Recipe. `delayed` needs `update_scales` once per optimizer step.
        experts: whether to convert expert layers.
        dense: whether to convert linear layers; the model's output layer stays.
        norms: whether normalizations feed linear layers, which takes `dense` and tensorwise scaling.
        filter_fn: (module, its name in the model) -> whether to convert it; None converts all. Only asked about candidates.

    Returns:
        The names of the converted modules, and what was skipped and why.

    Raises:
        ValueError: an unknown recipe, nothing to convert, or an expert weight that no product can take; the model stays as it is.
    """
    fresh: Recipe | str = "delayed" if recipe == "delayed" else recipe_of(recipe, "delayed")
    if norms and not dense:
        raise ValueError("norms=True takes dense=True: normalizations feed linear layers that multiply in fp8")
    found = {n: m for n, m in model.named_modules() if experts and _is_candidate(m)}
    skipped = {n: "left out by filter_fn" for n, m in found.items() if filter_fn is not None and not filter_fn(m, n)}
    chosen = {n: m for n, m in found.items() if n not in skipped}
    linears = _linears(model, filter_fn, skipped) if dense else {}
    if not chosen and not linears:
        raise ValueError(
            f"{type(model).__name__} has no {_wanted(experts, dense)} that were to be converted; "
            f"skipped: {'; '.join(f'{n}: {why}' for n, why in skipped.items()) or 'nothing'}"
        )
    for name, module in chosen.items():
        _check(module, name)
    for name, module in chosen.items():
        _convert(module, name, fresh)
    for linear in linears.values():
        Fp8Linear.from_linear(linear, fresh)
    feeding = _feeding_norms(model, filter_fn, skipped) if norms else {}
    for norm in feeding.values():
        if not isinstance(norm, _Converted):
            norm.__class__ = _subclass(cast(Any, type(norm)), "norm")
    return Conversion([*chosen, *linears, *feeding], skipped)


def _feeding_norms(model: nn.Module, filter_fn: Filter | None, skipped: dict[str, str]) -> dict[str, nn.Module]:
    """Return the normalizations that feed linear layers, and add the reasons for the others of known layers to `skipped`."""
    chosen = {}
    for layer_name, layer in model.named_modules():
        for norm_name, readers in READERS.get(type(layer).__name__, {}).items():
            name, norm = f"{layer_name}.{norm_name}".removeprefix("."), layer.get_submodule(norm_name)
            why = why_not_fed(layer, readers)
            if why is None and filter_fn is not None and not filter_fn(norm, name):
                why = "left out by filter_fn"
            if why is None:
                chosen[name] = norm
            else:
                skipped[name] = why
    return chosen


def _wanted(experts: bool, dense: bool) -> str:
    parts = ["expert weights, parameters of three axes,"] * experts + ["linear layers for which fp8 pays"] * dense
    return " or ".join(parts) or "kind of layers"


def _linears(model: nn.Module, filter_fn: Filter | None, skipped: dict[str, str]) -> dict[str, nn.Linear]:
    """Return the linear layers to convert, and add the reasons for the others to `skipped`."""
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    chosen = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        why = "the model's output layer" if module is outputs else why_not_fp8(module)
        if why is None and filter_fn is not None and not filter_fn(module, name):
            why = "left out by filter_fn"
        if why is None:
            chosen[name] = module
        else:
            skipped[name] = why
    return chosen


def revert_from_fp8_training(model: nn.Module) -> list[str]:
    """Let every converted module of a model multiply as it did before, in place.

    A GroupedLinear that was converted multiplies in the type of its input from now on.

    Returns:
        The names of the reverted modules; empty where none is converted.

    Raises:
        ValueError: a converted module became another class's since, as `fully_shard` makes it; the model stays as it is.
    """
    found = {n: m for n, m in model.named_modules() if is_converted(m)}
    for name, module in found.items():
        if not isinstance(module, GroupedLinear) and type(module) is not Fp8Linear and not _is_own_class(type(module)):
            raise ValueError(f"{name or 'the model'} is a {type(module).__name__} since it was converted: revert before that")
    for module in found.values():
        if isinstance(module, GroupedLinear):
            module.set_recipe(None)
            continue
        if isinstance(module, Fp8Linear):
            module.to_linear()
            continue
        for _, part in list(_named_parts(module)):
            if _is_own_class(type(part)):
                part.__class__ = type(part).__mro__[2]
                vars(part).pop("_fp8_owner", None)
        module._modules.pop("fp8", None)
    return list(found)


def is_converted(module: nn.Module) -> bool:
    """Return whether a module multiplies in fp8 because it was converted."""
    if isinstance(module, GroupedLinear):
        return module.recipe is not None
    return isinstance(module, Fp8Linear) or (isinstance(module, _Converted) and "_fp8_owner" not in vars(module))


class _Family(NamedTuple):
    """A family of expert modules that fp8 has a forward of its own for."""

    is_member: Callable[[nn.Module], bool]
    weight_names: Callable[[nn.Module], Sequence[str]]
    forward: Callable[..., Any]


_FAMILIES = {
    "fused": _Family(is_fused_experts, weight_names, fused_experts_forward),
    "norm": _Family(lambda _: False, lambda _: (), feeding_norm_forward),
    "grouped": _Family(is_grouped_experts, lambda _: WEIGHT_NAMES, grouped_experts_forward),
}


def _family(module: nn.Module) -> str | None:
    kind = getattr(type(module), "fp8_kind", None)
    if kind is not None:
        return kind if isinstance(kind, str) else None
    return next((name for name, family in _FAMILIES.items() if family.is_member(module)), None)


class _Converted:
    """Mark classes that conversion made, and pickle their modules by what they were made of."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = type(self)
        if not _is_own_class(made):
            return super().__reduce_ex__(protocol)
        return _empty, (made.__mro__[2], made.fp8_kind), self.__getstate__()


def _empty(base: type[nn.Module], kind: str | tuple[tuple[str, str], ...]) -> nn.Module:
    """Return a converted module without state, for unpickling and copies."""
    cls = _subclass(cast(Any, base), kind)
    return cls.__new__(cls)


@cache
def _subclass(base: type[nn.Module], kind: str | tuple[tuple[str, str], ...]) -> type[nn.Module]:
    """Return the subclass whose forward multiplies in fp8: the same for all modules of a kind, so that they share compiled code.

    Args:
        base: the module's class.
        kind: the name of a family, or names of parameters and of their state in `ConvertedProducts`.
    """
    members: dict[str, Any] = {"fp8_kind": kind, "fp8_default_gate": has_default_gate(base)}
    if isinstance(kind, str):
        replacement = _FAMILIES[kind].forward

        @wraps(base.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement(self, *args, **kwargs)

        members["forward"] = forward
    else:
        members |= {attribute: _operand(attribute, name) for attribute, name in kind}
        if _has_class_forward(base):
            members["forward"] = _checked(base.forward)
    return type(f"Fp8{base.__name__}", (_Converted, base), members)


def _operand(attribute: str, name: str) -> property:
    def get(self: Any) -> Tensor:
        owner, parameter = self.__dict__.get("_fp8_owner", self), self._parameters[attribute]
        in_forward = owner.fp8.is_active or _in_backward()
        return ExpertOperand.of(parameter, owner.fp8, name) if in_forward else parameter

    return property(get)


def _in_backward() -> bool:
    """Return whether a backward pass is under way, which may recompute a part of a forward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        products = self.fp8
        products.has_multiplied, products.is_active = False, True
        try:
            out = forward(self, *args, **kwargs)
        finally:
            products.is_active = False
        if not products.has_multiplied:
            raise ValueError(
                f"{products.module} was converted, but its forward pass makes no grouped or batched product with its expert "
                "weights: leave it out by filter_fn"
            )
        return out

    # torch.compile does not ask a tensor subclass about torch._grouped_mm, and would go on in bf16
    return checked if _is_batched(forward) else uncompiled(checked)


def _is_batched(forward: Callable[..., Any]) -> bool:
    """Return whether a forward multiplies by `torch.bmm`, about which torch.compile does ask a tensor subclass."""
    return "bmm" in forward.__code__.co_names and "_grouped_mm" not in forward.__code__.co_names


def _is_own_class(cls: type) -> bool:
    return "fp8_kind" in vars(cls)


def _named_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its containers without a forward of their own, such as a ParameterList, with prefixes for names."""
    yield prefix, module
    for name, child in module.named_children():
        if not _has_forward(child) and not isinstance(child, ConvertedProducts):
            yield from _named_parts(child, f"{prefix}{name}_")


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own expert weights, by name."""
    family = _family(module)
    if family is not None:
        return {name: module._parameters[name] for name in _FAMILIES[family].weight_names(module)}  # type: ignore[misc]
    return {prefix + name: p for prefix, part in _named_parts(module) for name, p in _expert_parameters(part)}


def _expert_parameters(part: nn.Module) -> list[tuple[str, Tensor]]:
    own = ((name, p) for name, p in part._parameters.items() if p is not None and p.ndim == 3)
    return [(name, p) for name, p in own if p.shape[0] > 1 and min(p.shape[1:]) >= ALIGNED]


def _is_candidate(module: nn.Module) -> bool:
    if isinstance(module, GroupedLinear):
        return True
    return _has_forward(module) and not isinstance(module, nn.modules.conv._ConvNd) and bool(_weights(module))


def _has_forward(module: nn.Module) -> bool:
    return _has_class_forward(type(module))


def _has_class_forward(cls: type[nn.Module]) -> bool:
    return cls.forward is not nn.Module.forward


def _check(module: nn.Module, name: str) -> None:
    """Raise a ValueError that names a module with a weight that fp8 products cannot take."""
    where = name or type(module).__name__
    devices = set()
    for weight_name, weight in _weights(module).items():
        E, N, K = weight.shape
        if not E or N % ALIGNED or K % ALIGNED or not N or not K:
            raise ValueError(f"{where}.{weight_name} must be (E, N, K), N and K multiples of {ALIGNED}, got {(E, N, K)}")
        if weight.dtype not in DTYPE_NAMES:
            raise ValueError(f"{where}.{weight_name} must be one of {', '.join(DTYPE_NAMES.values())}, got {weight.dtype}")
        devices.add(weight.device)
    if len(devices) > 1:
        raise ValueError(f"{where} must have its weights on one device, got {', '.join(sorted(map(str, devices)))}")
    if not isinstance(module, GroupedLinear | _Converted) and hasattr(module, "fp8"):
        raise ValueError(f"{where} already has an attribute `fp8`, which conversion takes: rename it")


def _convert(module: Any, name: str, recipe: Recipe | str) -> None:
    if isinstance(module, GroupedLinear):
        module.set_recipe(recipe)
        return
    converted, weights = isinstance(module, _Converted), _weights(module)
    module.fp8 = ConvertedProducts(recipe, weights, name or type(module).__name__)
    if converted:
        return
    family = _family(module)
    if family is not None:
        module.__class__ = _subclass(cast(Any, type(module)), family)
        return
    for prefix, part in list(_named_parts(module)):
        own = tuple((attribute, prefix + attribute) for attribute, _ in _expert_parameters(part))
        if part is not module and own:
            vars(part)["_fp8_owner"] = module
        if part is module or own:
            part.__class__ = _subclass(cast(Any, type(part)), own)
