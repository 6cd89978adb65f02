"""Multiply all rows by a weight, or groups of rows by expert weights, in fp8, forward and backward: the layers."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerneltune.compat import unsafe_view, untraced
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.nn.delayed import DelayedScaling, LayerScaling
from kerneltune.nn.grouped_mm import check_ends, check_product, fp8_grouped_mm, fp8_product, output_dtype
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import Fp8Operand, Recipe, one_group, recipe_of
from kerneltune.rounding import ALIGNED

LEAST_SIZE = 350
"""Least N K / (N + K) at which fp8 is faster than bf16. Per token, products save 4e-15 s for each of N K values, and casts
cost 1.4e-12 s for each of N + K values: an H200 multiplies at about 650 TFLOP/s in bf16 and 1150 in fp8, and moves 4.2
TB/s."""


class Fp8Linear(nn.Linear):
    """Multiply as `nn.Linear` does, in fp8: y = x Wᵀ + bias, with gradients in fp8 as well.

    Args:
        in_features, out_features: K, N; multiples of 16.
        recipe: `tensorwise`, `rowwise`, a Recipe, or `delayed`, which takes `update_scales` once per optimizer step and
            breaks torch.compile's graph.
    """

    fp8_recipe: Recipe | str
    fp8_scaling: LayerScaling | None
    fp8_kept: KeptWeights

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_recipe(recipe)

    @staticmethod
    def from_linear(linear: nn.Linear, recipe: str | Recipe) -> "Fp8Linear":
        """Make a linear layer multiply in fp8, in place; parameters and hooks stay.

        Raises:
            ValueError: a size, type or recipe that does not fit; the layer stays as it is.
        """
        if type(linear) not in (nn.Linear, Fp8Linear):
            raise ValueError(f"from_linear takes an nn.Linear, got {type(linear).__name__}")
        Fp8Linear.set_recipe(linear, recipe)  # type: ignore[arg-type]
        linear.__class__ = Fp8Linear
        assert isinstance(linear, Fp8Linear)
        return linear

    def to_linear(self) -> nn.Linear:
        """Make the layer multiply as `nn.Linear` again, in place."""
        del self.fp8_recipe, self.fp8_scaling, self.fp8_kept
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def set_recipe(self, recipe: str | Recipe) -> None:
        """Multiply by another recipe from now on."""
        if (why := why_no_product("weight", self.weight)) is not None:
            raise ValueError(f"Fp8Linear: {why}")
        self.fp8_recipe = recipe if recipe == "delayed" else recipe_of(recipe, "delayed")
        self.fp8_scaling = LayerScaling(1, device=self.weight.device) if recipe == "delayed" else None
        self.fp8_kept = KeptWeights(1, self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply x (…, K) to (…, N) of x's type, or of the autocast type."""
        x = input  # nn.Linear has this name, which callers may use
        if x.ndim < 1 or x.shape[-1] != self.in_features or x.device != self.weight.device:
            raise ValueError(
                f"Fp8Linear takes (…, {self.in_features}) on {self.weight.device}, got {tuple(x.shape)} on {x.device}"
            )
        if x.numel() == 0:
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        if (padding := -(x.numel() // self.in_features) % ALIGNED) != 0:  # the weight gradient's products contract over rows
            padded = F.pad(x.reshape(-1, self.in_features), (0, 0, 0, padding))
            # not `self(padded)`, which would run the layer's hooks twice
            padded_y = Fp8Linear.forward(self, padded)[:-padding].view(*x.shape[:-1], self.out_features)
            return padded_y.clone()  # because FSDP2 loses its hooks where a caller changes a view in place
        b_t, how, dtype = self.weight.t()[None], self.fp8_recipe, output_dtype(x)
        if isinstance(how, Recipe):
            y = fp8_product(x, b_t, how, dtype, w_cast=self.fp8_kept.cast(b_t, how, x.requires_grad))
        else:
            y = _delayed_product(self, x, dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        return f"{super().extra_repr()}, recipe={self.fp8_recipe}"


@untraced
def _delayed_product(layer: Fp8Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply under delayed scaling, without tracing any of it, because torch.compile fails after the graph break inside."""
    rows = x.reshape(-1, layer.in_features)
    offs = one_group(rows)
    assert layer.fp8_scaling is not None
    scaling = layer.fp8_scaling.on(rows.device)
    y = fp8_grouped_mm(rows.to(dtype), layer.weight.t()[None], offs, recipe=scaling, weights=layer.fp8_kept)
    return y.view(*x.shape[:-1], layer.out_features)


def why_not_fp8(linear: nn.Linear) -> str | None:
    """Return why a linear layer should stay in bf16, or None."""
    if type(linear) not in (nn.Linear, Fp8Linear) or ("forward" in vars(linear) and type(linear) is not Fp8Linear):
        return f"a {type(linear).__name__}, which may have a forward of its own"
    N, K = linear.weight.shape
    is_small = N * K < LEAST_SIZE * (N + K)
    small = f"{K} x {N} is too small: casts would cost more than the products save"
    return why_no_product("weight", linear.weight) or (small if is_small else None)


def why_no_product(name: str, weight: Tensor) -> str | None:
    """Return why no fp8 product supports a weight (…, N, K), or None."""
    if weight.numel() == 0 or weight.shape[-2] % ALIGNED or weight.shape[-1] % ALIGNED:
        axes = "(N, K)" if weight.ndim == 2 else "(E, N, K)"
        return f"{name} must be {axes}, N and K multiples of {ALIGNED}, got {tuple(weight.shape)}"
    if weight.dtype not in DTYPE_NAMES:
        return f"{name} must be one of {', '.join(DTYPE_NAMES.values())}, got {weight.dtype}"
    return None


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
