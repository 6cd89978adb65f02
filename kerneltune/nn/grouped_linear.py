"""A layer of expert weights, whose fp8 can be kept from microbatch to microbatch. May import its neighbours."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.compat import apply_to_tensors, untraced
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.fp8_products import Fp8Weights
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.operands import check_operands
from kerneltune.nn.recipes import Recipe, recipe_of
from kerneltune.nn.weight_workspace import WeightWorkspace

_from_workspace: Callable[..., Fp8Weights] = untraced(WeightWorkspace.get)


class GroupedLinear(nn.Module):
    """Rows of x times the weight of the expert whose group they are in, y = x Wᵀ; no bias.

    Args:
        num_experts, in_features, out_features: E, K, N; K and N multiples of 16.
        recipe: as for `fp8_grouped_mm`, or `delayed`, which takes `update_scales` in every step; None multiplies in x's type, by
            torch's grouped product.

    Attributes:
        weight: (E, N, K).

    Raises:
        ValueError: a size or recipe that does not fit.
    """

    weight: nn.Parameter
    delayed: DelayedScaling | None
    _fresh: Recipe | None
    amax: Tensor
    """(E,) fp32, what the weights of the experts are expected to reach: as at the last cast. No part of the state."""

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
        if not all(type(size) is int and size > 0 for size in sizes) or in_features % 16 or out_features % 16:
            raise ValueError(
                "GroupedLinear takes an expert or more and sizes that are multiples of 16, "
                f"got {num_experts=} {in_features=} {out_features=}"
            )
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype))
        self.workspace = WeightWorkspace()
        self.register_buffer("amax", None, persistent=False)  # a buffer stays where it is, so compiled graphs may write to it
        self._expect_nothing()
        self.set_recipe(recipe)
        self.reset_parameters()

    @property
    def recipe(self) -> Recipe | DelayedScaling | None:
        """Return how the layer multiplies."""
        return self._fresh if self.delayed is None else self.delayed

    def set_recipe(self, recipe: str | Recipe | DelayedScaling | None) -> None:
        """Multiply otherwise from now on; the workspace is let go of.

        Raises:
            ValueError: an unknown recipe, or a DelayedScaling of another number of experts. The layer stays as it is.
        """
        if recipe == "delayed":
            recipe = DelayedScaling(self.num_experts, device=self.weight.device)
        if not isinstance(recipe, DelayedScaling):
            self._fresh, self.delayed = None if recipe is None else recipe_of(recipe, "delayed"), None
        elif recipe.num_experts == self.num_experts:
            self._fresh, self.delayed = None, recipe
        else:
            raise ValueError(f"recipe must scale {self.num_experts} experts, got {recipe.num_experts}")
        self.workspace.clear()

    def reset_parameters(self) -> None:
        """Draw the weight as torch.nn.Linear does: uniform within 1 / √in_features."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, x: Tensor, offs: Tensor, *, is_first_microbatch: bool | None = None, skip_update: Tensor | None = None
    ) -> Tensor:
        """Multiply x (M, K), in groups that end at offs (E,) int32, to (M, N) of x's type.

        Args:
            is_first_microbatch: None casts the weight anew and keeps nothing but how large it was. True casts it into the
                workspace, False takes what is there, unless the weight is known to have changed, as an optimiser step lets know
                and a change of its `.data` does not; the workspace breaks torch.compile's graph.
            skip_update: with either, one number on the device: not 0 leaves the workspace as it is. For captured steps, which
                are replayed for first and later microbatches alike.

        Raises:
            ValueError: as `fp8_grouped_mm`; a skip_update without workspace, or that is not one number on the weight's device.
        """
        if skip_update is not None:
            self._check_skip(skip_update, is_first_microbatch)
        b_t = self.weight.transpose(1, 2)
        recipe = self.recipe
        if recipe is None:
            check_operands(x, b_t, offs, Recipe())
            return nn.functional.grouped_mm(x, b_t.to(x.dtype), offs=offs)
        cast = None
        if is_first_microbatch is not None:
            check_operands(x, b_t, offs, recipe)  # before the weight is cast
            cast = _from_workspace(
                self.workspace, self.weight, recipe, update=is_first_microbatch, skip=skip_update, amax=self._expected()
            )
        return fp8_grouped_mm(x, b_t, offs, recipe=recipe, weights=cast, amax=self._expected())

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        recipe = self._fresh if self.delayed is None else "delayed"
        return f"{self.num_experts}, {self.in_features}, {self.out_features}, recipe={recipe}"

    def _check_skip(self, skip: Tensor, is_first_microbatch: bool | None) -> None:
        if is_first_microbatch is None:
            raise ValueError("skip_update takes is_first_microbatch True or False, got None")
        if not isinstance(skip, Tensor):
            raise ValueError(f"skip_update must be one number on {self.weight.device}, got {skip!r}")
        if skip.numel() != 1 or skip.device != self.weight.device:
            raise ValueError(f"skip_update must be one number on {self.weight.device}, got {tuple(skip.shape)} on {skip.device}")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.workspace.clear()  # of a weight that is about to move
        moved = apply_to_tensors(self, fn, recurse)
        self._expect_nothing()
        return moved

    def _expected(self) -> Tensor:
        if self.amax.device != self.weight.device:  # a weight that was put in another's place
            self._expect_nothing()
        return self.amax

    def _expect_nothing(self) -> None:
        self.amax = torch.zeros(self.num_experts, dtype=torch.float32, device=self.weight.device)
