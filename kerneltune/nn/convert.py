"""Existing models to fp8 training: all their expert layers in one call. May import its neighbours."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kerneltune.nn.grouped_linear import GroupedLinear
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.recipes import Recipe, recipe_of


def convert_to_fp8_training(
    model: nn.Module,
    recipe: str | Recipe = "tensorwise",
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> list[str]:
    """Let the expert layers of a model multiply in fp8 from now on, in place: forward and backward.

    A GroupedLinear takes the recipe. Any other module with expert weights of its own, which are parameters of three axes, becomes
    one of a subclass in whose forward torch's grouped products of rows with expert weights run in fp8; those of other operands
    stay as they are. Its forward breaks torch.compile's graph, and as an object it can be copied but not pickled; its state can.
    Parameters and their names stay.

    Args:
        recipe: `tensorwise`, `rowwise` or a Recipe; `delayed` where all are GroupedLinears.
        filter_fn: (module, its name in the model) -> whether to convert it; None converts all. Only asked of what could be.

    Returns:
        The names of the modules converted.

    Raises:
        ValueError: an unknown recipe, or nothing to convert.

    Source: torchao's quantize_ with a training config, for the habit.
    """
    found = {n: m for n, m in model.named_modules() if _has_experts(m) and (filter_fn is None or filter_fn(m, n))}
    if not found:
        raise ValueError(f"{type(model).__name__} has no expert weights, parameters of three axes, that were to be converted")
    others = {name: module for name, module in found.items() if not isinstance(module, GroupedLinear)}
    if recipe == "delayed" and others:
        raise ValueError(f"delayed scaling keeps state, which only GroupedLinear has, got {', '.join(others)}")
    fresh = None if recipe == "delayed" else recipe_of(recipe, "delayed")
    for module in found.values():
        if isinstance(module, GroupedLinear):
            module.set_recipe(fresh or "delayed")
        elif fresh is not None:
            module.__class__ = _in_fp8(getattr(type(module), "_before_fp8", type(module)), fresh)
    return list(found)


def _has_experts(module: nn.Module) -> bool:
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _in_fp8(base: type[nn.Module], recipe: Recipe) -> type[nn.Module]:
    """A subclass whose forward runs in fp8."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _GroupedProducts(recipe):
            return base.forward(self, *args, **kwargs)

    # torch.compile does not see a mode's view of torch._grouped_mm, and would go on in bf16
    members = {"forward": torch.compiler.disable(forward), "_before_fp8": base}
    return type(f"Fp8{base.__name__}", (base,), members)


class _GroupedProducts(TorchFunctionMode):
    """Takes the place of torch's grouped products, of which torch.nn.functional's is one."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._grouped_mm:
            return self._product(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _product(
        self,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if a.ndim == 2 and b.ndim == 3 and offs is not None and bias is None:
            return fp8_grouped_mm(a, b, offs, recipe=self.recipe, out_dtype=out_dtype)
        return torch._grouped_mm(a, b, offs, bias, out_dtype)
