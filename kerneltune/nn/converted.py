"""Change the class of a module so that it multiplies in fp8, and change it back."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from kerneltune.compat import has_default_gate, in_backward, is_gated_experts, own_parameter, untraced
from kerneltune.nn.alignment import ALIGNED
from kerneltune.nn.converted_products import ConvertedProducts, ExpertOperand
from kerneltune.nn.feeding_norm import feeding_norm_forward
from kerneltune.nn.fp8_linear import Fp8Linear
from kerneltune.nn.fused_experts import fused_experts_forward, weight_names
from kerneltune.nn.grouped_experts import WEIGHT_NAMES, grouped_experts_forward, is_grouped_experts
from kerneltune.nn.grouped_linear import GroupedLinear
from kerneltune.nn.recipes import Recipe


class _Family(NamedTuple):
    """A family of modules that fp8 has a forward of its own for."""

    is_member: Callable[[nn.Module], bool]
    weight_names: Callable[[nn.Module], Sequence[str]]
    forward: Callable[..., Any]


_FAMILIES = {
    "fused": _Family(is_gated_experts, weight_names, fused_experts_forward),
    "norm": _Family(lambda _: False, lambda _: (), feeding_norm_forward),
    "grouped": _Family(is_grouped_experts, lambda _: WEIGHT_NAMES, grouped_experts_forward),
}


def family_of(module: nn.Module) -> str | None:
    """Return the name of a module's family, or None for a module whose own forward pass runs on `ExpertOperand` weights."""
    kind = getattr(type(module), "fp8_kind", None)
    if kind is not None:
        return kind if isinstance(kind, str) else None
    return next((name for name, family in _FAMILIES.items() if family.is_member(module)), None)


def expert_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own expert weights by name: parameters (E, N, K), also in containers such as a ParameterList."""
    if isinstance(module, GroupedLinear):
        return {"weight": module.weight}
    family = family_of(module)
    if family is not None:
        return {name: getattr(module, name) for name in _FAMILIES[family].weight_names(module)}
    if not has_forward(module) or isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
        return {}
    return {prefix + name: p for prefix, part in _named_parts(module) for name, p in _expert_parameters(part)}


def _expert_parameters(part: nn.Module) -> list[tuple[str, Tensor]]:
    own = part.named_parameters(recurse=False, remove_duplicate=False)
    return [(name, p) for name, p in own if p.ndim == 3 and p.shape[0] > 1 and min(p.shape[1:]) >= ALIGNED]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward pass, as containers have none."""
    return type(module).forward is not nn.Module.forward


def _named_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its containers without a forward of their own, such as a ParameterList, with prefixes for names."""
    yield prefix, module
    for name, child in module.named_children():
        if not has_forward(child) and not isinstance(child, ConvertedProducts):
            yield from _named_parts(child, f"{prefix}{name}_")


class Converted:
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
        if base.forward is not nn.Module.forward:
            members["forward"] = _checked(base.forward)
    return type(f"Fp8{base.__name__}", (Converted, base), members)


def _operand(attribute: str, name: str) -> property:
    def get(self: Any) -> Tensor:
        owner, parameter = self.__dict__.get("_fp8_owner", self), own_parameter(self, attribute)
        in_forward = owner.fp8.multiplied is not None or in_backward()
        return ExpertOperand.of(parameter, owner.fp8, name) if in_forward else parameter

    return property(get)


def _checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.fp8.watched():
            return forward(self, *args, **kwargs)

    # torch.compile does not ask a tensor subclass about torch._grouped_mm, and would go on in bf16
    names = forward.__code__.co_names
    return checked if "bmm" in names and "_grouped_mm" not in names else untraced(checked)


def _is_own_class(cls: type) -> bool:
    return "fp8_kind" in vars(cls)


def is_converted(module: nn.Module) -> bool:
    """Return whether a module multiplies in fp8 because it was converted."""
    if isinstance(module, GroupedLinear):
        return module.recipe is not None
    return isinstance(module, Fp8Linear) or (isinstance(module, Converted) and "_fp8_owner" not in vars(module))


def convert_experts(module: Any, name: str, recipe: Recipe | str) -> None:
    """Let a module with expert weights multiply in fp8.

    Args:
        module: to change in place.
        name: of the module in the model, for messages.
        recipe: a Recipe, or `delayed`.
    """
    if isinstance(module, GroupedLinear):
        module.set_recipe(recipe)
        return
    module.fp8 = ConvertedProducts(recipe, expert_weights(module), name or type(module).__name__)
    if isinstance(module, Converted):
        return
    family = family_of(module)
    if family is not None:
        change_class(module, family)
        return
    for prefix, part in list(_named_parts(module)):
        own = tuple((attribute, prefix + attribute) for attribute, _ in _expert_parameters(part))
        if part is not module and own:
            vars(part)["_fp8_owner"] = module
        if part is module or own:
            change_class(part, own)


def change_class(module: nn.Module, kind: str | tuple[tuple[str, str], ...]) -> None:
    """Give a module the subclass of a kind, unless it has it."""
    if not isinstance(module, Converted):
        module.__class__ = _subclass(cast(Any, type(module)), kind)


def why_not_reverted(module: nn.Module) -> str | None:
    """Return why a converted module cannot be changed back, or None."""
    if "forward" in vars(module):
        return "has a forward set on the object"
    if isinstance(module, GroupedLinear) or type(module) is Fp8Linear or _is_own_class(type(module)):
        return None
    return f"is a {type(module).__name__}"


def revert(module: nn.Module) -> None:
    """Let a converted module multiply as it did before."""
    if isinstance(module, GroupedLinear):
        module.set_recipe(None)
        return
    if isinstance(module, Fp8Linear):
        module.to_linear()
        return
    for _, part in list(_named_parts(module)):
        if _is_own_class(type(part)):
            part.__class__ = type(part).__mro__[2]
            vars(part).pop("_fp8_owner", None)
    if hasattr(module, "fp8"):
        del module.fp8
