"""Multiply groups of rows by expert weights whose fp8 can be kept from microbatch to microbatch."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.compat import unsafe_view
from kerneltune.nn.delayed import DelayedScaling, LayerScaling
from kerneltune.nn.grouped_mm import check_ends, check_product, fp8_grouped_mm
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import Fp8Operand, Recipe, recipe_of
from kerneltune.rounding import ALIGNED


class GroupedLinear(nn.Module):
    """Multiply each group of rows by the weight of its expert, y = x Wᵀ; no bias.

    Args:
        num_experts, in_features, out_features: E, K, N; K and N multiples of 16.
        recipe: as for `fp8_grouped_mm`, or `delayed`, which takes `update_scales` in every step; None multiplies in x's
            type, by torch's grouped product.

    Attributes:
        weight: (E, N, K).
    """

    weight: nn.Parameter
    delayed: DelayedScaling | None
    _fresh: Recipe | None

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        recipe: str | Recipe | DelayedScaling | None = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (num_experts, in_features, out_features)
        if not all(type(size) is int and size > 0 for size in sizes) or in_features % ALIGNED or out_features % ALIGNED:
            raise ValueError(
                f"GroupedLinear takes an expert or more and sizes that are multiples of {ALIGNED}, "
                f"got {num_experts=} {in_features=} {out_features=}"
            )
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype))
        self.kept = KeptWeights(num_experts, self.weight.device)
        self.set_recipe(recipe)
        self.reset_parameters()

    @property
    def recipe(self) -> Recipe | DelayedScaling | None:
        """Return how the layer multiplies."""
        return self._fresh if self.delayed is None else self.delayed

    def set_recipe(self, recipe: str | Recipe | DelayedScaling | None) -> None:
        """Multiply by another recipe from now on; the fp8 weights are released.

        Raises:
            ValueError: an unknown recipe, or a DelayedScaling of another number of experts. The layer stays as it is.
        """
        if recipe == "delayed":
            recipe = LayerScaling(self.num_experts, device=self.weight.device)
        if not isinstance(recipe, DelayedScaling):
            self._fresh, self.delayed = None if recipe is None else recipe_of(recipe, "delayed"), None
        elif recipe.num_experts == self.num_experts:
            self._fresh, self.delayed = None, recipe
        else:
            raise ValueError(f"recipe must scale {self.num_experts} experts, got {recipe.num_experts}")
        self.kept.clear()

    def reset_parameters(self) -> None:
        """Draw the weight as torch.nn.Linear does: uniform within 1 / √in_features."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, x: Tensor, offs: Tensor, *, is_first_microbatch: bool | None = None, skip_update: Tensor | None = None
    ) -> Tensor:
        """Multiply x (M, K), in groups that end at offs (E,) int32, to (M, N) of x's type.

        Args:
            is_first_microbatch: None casts the weight and keeps no fp8, unless `set_first_microbatch` says more. True casts
                into kept memory. False reads that memory, and casts only if torch knows that the weight has changed: an
                optimizer step counts, a change through `.data` does not. True and False break torch.compile's graph.
            skip_update: with True or False, one value on the device: not 0 keeps the fp8 as it is. For captured steps, which
                are replayed for first and later microbatches.
        """
        if skip_update is not None:
            self._check_skip(skip_update, is_first_microbatch)
        b_t = self.weight.transpose(1, 2)
        recipe = self.recipe
        if recipe is None:
            check_product(x, b_t, offs, Recipe())
            if offs.device.type == "cpu" and not torch.compiler.is_compiling():
                check_ends(offs, x.shape[0])
            product = nn.functional.grouped_mm(x, b_t.to(x.dtype), offs=offs)
            y: Tensor = _DenseGradient.apply(product)  # type: ignore[no-untyped-call]
            return y
        if isinstance(recipe, LayerScaling):
            recipe = recipe.on(x.device)
        weights: KeptWeights | Fp8Operand = self.kept
        if is_first_microbatch is not None:
            check_product(x, b_t, offs, recipe)  # before the weight is cast
            weights = self.kept.current(self.weight, recipe, update=is_first_microbatch, skip=skip_update)
        return fp8_grouped_mm(x, b_t, offs, recipe=recipe, weights=weights)

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        recipe = self._fresh if self.delayed is None else "delayed"
        return f"{self.num_experts}, {self.in_features}, {self.out_features}, recipe={recipe}"

    def _check_skip(self, skip: Tensor, is_first_microbatch: bool | None) -> None:
        if is_first_microbatch is None:
            raise ValueError("skip_update takes is_first_microbatch True or False, got None")
        is_tensor = isinstance(skip, Tensor)
        if not is_tensor or skip.numel() != 1 or skip.device != self.weight.device:
            got = f"{tuple(skip.shape)} on {skip.device}" if is_tensor else repr(skip)
            raise ValueError(f"skip_update must be one number on {self.weight.device}, got {got}")


class _DenseGradient(torch.autograd.Function):
    """Return a tensor as it is, and copy an expanded gradient, as that of a sum, which torch's grouped product refuses."""

    @staticmethod
    def forward(_ctx: Any, y: Tensor) -> Tensor:
        return unsafe_view(y, list(y.shape))  # no view, because autograd lets no caller change that in place

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
