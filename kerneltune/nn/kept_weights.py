"""Cast the weights of converted modules once for several microbatches, without a graph break."""

from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.compat import apply_to_tensors
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.fp8_products import Fp8Weights, cast_traced_weights
from kerneltune.nn.recipes import Recipe


class KeptWeights(nn.Module):
    """Hold what one weight's casts need from step to step.

    Attributes:
        amax: (E,) fp32, the largest magnitudes of the weight at the last cast, as `fp8_grouped_mm` takes them.
        is_first_microbatch: None casts in every forward pass; True casts into the buffers; False takes the buffers as they are.
    """

    amax: Tensor

    def __init__(self, num_experts: int, device: torch.device) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.is_first_microbatch: bool | None = None
        self.register_buffer("amax", torch.zeros(num_experts, dtype=torch.float32, device=device), persistent=False)
        for name in Fp8Weights._fields:
            self.register_buffer(name, None, persistent=False)

    def weights(self, weight: Tensor, recipe: Recipe | DelayedScaling) -> Fp8Weights | None:
        """Return weight (E, K, N) in fp8 out of the buffers, or None where every forward pass casts."""
        if self.is_first_microbatch is None:
            return None
        if not self._fits(weight, recipe):
            self._allocate(weight.detach(), recipe)
        elif self.is_first_microbatch:
            self._refresh(weight.detach(), recipe)
        return Fp8Weights(*(getattr(self, name) for name in Fp8Weights._fields))

    def clear(self) -> None:
        """Release the buffers."""
        for name in Fp8Weights._fields:
            setattr(self, name, None)

    def _fits(self, weight: Tensor, recipe: Recipe | DelayedScaling) -> bool:
        q: Any = self.q
        scale: Any = self.scale
        rowwise = isinstance(recipe, Recipe) and recipe.scaling == "rowwise"
        return q is not None and q.shape == weight.shape and q.device == weight.device and (scale.ndim == 2) == rowwise

    def _allocate(self, weight: Tensor, recipe: Recipe | DelayedScaling) -> None:
        with torch.inference_mode(False):  # what an evaluation casts is there for training, too
            made = _cast(weight, recipe, self.amax)
        for name, t in zip(Fp8Weights._fields, made, strict=True):
            setattr(self, name, t)

    def _refresh(self, weight: Tensor, recipe: Recipe | DelayedScaling) -> None:
        with torch.no_grad():
            for name, t in zip(Fp8Weights._fields, _cast(weight, recipe, self.amax), strict=True):
                getattr(self, name).copy_(t)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.clear()
        moved = apply_to_tensors(self, fn, recurse)
        self.amax = torch.zeros(self.num_experts, dtype=torch.float32, device=self.amax.device)
        return moved

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"is_first_microbatch={self.is_first_microbatch}"


def set_first_microbatch(model: nn.Module, is_first: bool | None) -> int:
    """Say which microbatch of a gradient accumulation the next forward passes of a converted model are.

    Weights are then cast once per optimizer step: into buffers in the first microbatch, and read from there in later ones. The
    buffers take 2 bytes per weight, and stay at their addresses, so that graphs can be captured. A GroupedLinear takes
    `is_first_microbatch` in its forward pass instead.

    Args:
        model: with converted expert modules or Fp8Linear layers.
        is_first: True casts and keeps; False takes what is kept, also after the weights changed; None casts in every forward
            pass and releases the buffers.

    Returns:
        The number of weights.

    Raises:
        ValueError: a model without converted modules.
    """
    found = [module for module in model.modules() if isinstance(module, KeptWeights)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no converted modules: call convert_to_fp8_training first")
    for module in found:
        module.is_first_microbatch = is_first
        if is_first is None:
            module.clear()
    return len(found)


def _cast(weight: Tensor, recipe: Recipe | DelayedScaling, amax: Tensor) -> Fp8Weights:
    if isinstance(recipe, DelayedScaling):
        return recipe.cast_weights(weight.mT)
    return cast_traced_weights(weight, recipe, amax)
