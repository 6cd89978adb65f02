"""Existing models to fp8 training: all their expert layers in one call. May import its neighbours."""

import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from kerneltune.nn.alignment import ALIGNED
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

    A GroupedLinear takes the recipe. Any other module with expert weights of its own, which are parameters of three axes, the
    last two multiples of 16, also in a ParameterList, becomes one of a subclass in whose forward `torch._grouped_mm` of rows with
    these weights runs in fp8: with the parameters, views of them, and what is made of them first, such as a copy of another type;
    in either order, column-major or row-major. All other products stay as they are, those in modules inside it included. What
    `fp8_grouped_mm` asks of offs holds for them: groups of multiples of 16 rows unless the recipe pads, and the last ends at the
    last row.

    Its forward breaks torch.compile's graph, and as an object it can be copied but not pickled; its state can. Activation
    checkpoints may be around its forward, not inside. Parameters and their names stay.

    Args:
        recipe: `tensorwise`, `rowwise` or a Recipe; `delayed` where all are GroupedLinears.
        filter_fn: (module, its name in the model) -> whether to convert it; None converts all. Only asked of what could be.

    Returns:
        The names of the modules converted.

    Raises:
        ValueError: an unknown recipe, or nothing to convert.
        RuntimeError: in a forward, of a product inside an activation checkpoint that began there.

    Source: torchao's quantize_ with a training config, for the habit.
    """
    found = {n: m for n, m in model.named_modules() if _experts(m) and (filter_fn is None or filter_fn(m, n))}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no expert weights, parameters of three axes, the last two multiples of {ALIGNED}, "
            "that were to be converted"
        )
    others = {name: module for name, module in found.items() if not isinstance(module, GroupedLinear)}
    if recipe == "delayed" and others:
        raise ValueError(f"delayed scaling keeps state, which only GroupedLinear has, got {', '.join(others)}")
    fresh = None if recipe == "delayed" else recipe_of(recipe, "delayed")
    for module in found.values():
        if isinstance(module, GroupedLinear):
            module.set_recipe(fresh or "delayed")
        elif fresh is not None:
            if "_fp8_recipe" not in vars(module):
                module.__class__ = _in_fp8(type(module))  # type: ignore[arg-type]  # classes are hashable
            vars(module).update(_fp8_recipe=fresh, _fp8_amaxes=[])
    return list(found)


def _experts(module: nn.Module) -> list[Tensor]:
    """The expert weights that a module with a forward has itself, or in a ParameterList or the like."""
    if not _has_forward(module):
        return []
    own = [module]
    for part in own:
        own += [child for child in part.children() if not _has_forward(child)]
    parameters = (p for part in own for p in part.parameters(recurse=False))
    return [p for p in parameters if p.ndim == 3 and p.shape[1] % ALIGNED == p.shape[2] % ALIGNED == 0]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


@cache
def _in_fp8(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward runs in fp8; one for all, so that torch.compile knows layers of a kind to be alike."""

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _GroupedProducts(_experts(self), self._fp8_recipe, self._fp8_amaxes):
            return base.forward(self, *args, **kwargs)

    # torch.compile does not see a mode's view of torch._grouped_mm, and would go on in bf16
    return type(f"Fp8{base.__name__}", (base,), {"forward": torch.compiler.disable(forward)})


class _GroupedProducts(TorchFunctionMode):
    """Takes the place of torch's grouped products, of which torch.nn.functional's is one, with these weights.

    amaxes: of each product in turn what `fp8_grouped_mm` takes as its amax, made here where it does not fit.
    """

    def __init__(self, weights: list[Tensor], recipe: Recipe, amaxes: list[Tensor]) -> None:
        super().__init__()
        self.recipe, self.amaxes, self.products = recipe, amaxes, 0
        self.storages = {_storage(getattr(w, "_local_tensor", w)) for w in weights}  # of a DTensor the rows meet the local part

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._grouped_mm:
            return self._product(*args, **kwargs or {})
        out = func(*args, **kwargs or {})
        if args and isinstance(out, Tensor) and out.ndim >= 3 and self._of_weights(args[0]):
            self.storages.add(_storage(out))
        return out

    def _of_weights(self, made_of: Any) -> bool:
        first = made_of[0] if isinstance(made_of, list | tuple) and made_of else made_of
        return isinstance(first, Tensor) and (storage := _storage(first)) is not None and storage in self.storages

    def _product(
        self,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if a.ndim != 2 or b.ndim != 3 or offs is None or bias is not None or not self._of_weights(b):
            return torch._grouped_mm(a, b, offs, bias, out_dtype)
        if _inside_checkpoint():
            raise RuntimeError(
                "an activation checkpoint inside a converted module's forward would be recomputed without fp8: "
                "checkpoint the module as a whole, or what it is part of"
            )
        rows = a if a.stride(1) == 1 and a.stride(0) >= a.shape[1] else a.contiguous()
        weights = b if b.is_contiguous() or b.mT.is_contiguous() else b.contiguous()
        return fp8_grouped_mm(rows, weights, offs, recipe=self.recipe, out_dtype=out_dtype, amax=self._amax(weights))

    def _amax(self, weights: Tensor) -> Tensor:
        at, self.products = self.products, self.products + 1
        if at == len(self.amaxes):
            self.amaxes.append(weights.new_empty(0))
        if self.amaxes[at].shape != weights.shape[:1] or self.amaxes[at].device != weights.device:
            self.amaxes[at] = torch.zeros(weights.shape[0], dtype=torch.float32, device=weights.device)
        return self.amaxes[at]


def _storage(t: Tensor) -> StorageWeakRef | None:
    """What a tensor shares with its views, not to be taken by another while this is kept; None where it has no memory."""
    try:
        return StorageWeakRef(t.untyped_storage())
    except NotImplementedError:  # sparse, or under vmap
        return None


def _inside_checkpoint() -> bool:
    """Whether an activation checkpoint has begun since the converted module's forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_globals is globals() and frame.f_code.co_name == "forward"):
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
