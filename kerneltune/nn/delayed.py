"""Scale operands by the largest magnitudes of past steps, so that a cast is one launch.

Source: TransformerEngine's delayed scaling, from its contract.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.compat import apply_to_tensors
from kerneltune.kernel_lib.tl_lib import FP8_MAX
from kerneltune.nn.fp8_products import Fp8Weights, Operand
from kerneltune.ops import fp8
from kerneltune.ops.multi_cast_transpose import multi_cast_transpose

_FP8_MAX = FP8_MAX["e4m3"]
_LEAST = 1e-12
"""The least magnitude that a scale is computed from, as in fresh casts."""
ROWS, GRADS, WEIGHTS = 0, 1, 2
"""Indices of the scales of the rows, of the gradients, and of the first expert's weights."""


class DelayedScaling(nn.Module):
    """Hold the scales of one expert layer's rows, gradients and weights, and the largest magnitudes behind the scales.

    Call `update` once per optimizer step. Until an update has seen rows, gradients and every expert's weights with a value
    that is neither 0 nor infinite, each cast computes fresh scales, as under `tensorwise`. The state stays fp32 if the layer is
    cast.

    Args:
        num_experts: E.
        history: steps whose largest magnitudes count.

    Attributes:
        num_experts: E.
        known: whether casts use `scales`.
        scales: (2 + E,) fp32, the factors of the values before their cast; 1 until a magnitude is known.
        history: (history, 2 + E) fp32, the largest magnitudes of each step, the present step first.
    """

    scales: Tensor
    history: Tensor

    def __init__(self, num_experts: int, history: int = 16, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        if num_experts < 1 or history < 1:
            raise ValueError(f"DelayedScaling takes an expert and a step or more, got {num_experts=} {history=}")
        self.num_experts = num_experts
        self.register_buffer("scales", torch.empty(2 + num_experts, dtype=torch.float32, device=device))
        self.register_buffer("history", torch.empty(history, 2 + num_experts, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget all steps."""
        self.known = False
        self.scales.fill_(1.0)
        self.history.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Make new scales, and start the next step's largest magnitudes from nothing.

        Operands that were only 0 or infinite keep their scale. Waits for the device until the scales are known.
        """
        amax = self.history.amax(0)
        usable = (amax > 0) & amax.isfinite()
        self.scales.copy_(torch.where(usable, _FP8_MAX / amax.clamp(min=_LEAST), self.scales))
        self.history.copy_(self.history.roll(1, 0))
        self.history[0].zero_()
        self.known = self.known or usable.is_meta or bool(usable.all())

    def cast_rows(self, x: Tensor, offs: Tensor, is_gradient: bool) -> Operand:
        """Cast x (M, K), rows or their gradient in groups that end at offs, in both layouts."""
        mine = slice(GRADS, GRADS + 1) if is_gradient else slice(ROWS, ROWS + 1)
        if self.known:
            cast = fp8.fp8_delayed_2d(x, offs, self.scales[mine], self.history[0, mine])
        else:
            cast = fp8.fp8_tensorwise_2d(x, layout="both", pow2=False, inverse=True, offs=offs)
            self._remember(mine, cast.scale)
        return Operand(cast.q, cast.scale, cast.q_t, cast.scale)

    def cast_weights(self, weight: Tensor, into: Fp8Weights | None = None, skip: Tensor | None = None) -> Fp8Weights:
        """Return weight (E, N, K), contiguous or column-major, in fp8 in both layouts.

        into: tensors to write; skip: (1,) fp32, not 0 to leave `into` as it is. Both are None until the scales are known.
        """
        if not weight.is_contiguous() and weight.mT.is_contiguous():
            return self.cast_weights(weight.mT, into and into.transposed(), skip).transposed()
        mine = slice(WEIGHTS, None)
        if not self.known:
            assert into is None and skip is None
            fresh = fp8.fp8_tensorwise_3d(weight.transpose(1, 2), layout="both", pow2=False, inverse=True)
            assert fresh.q is not None and fresh.q_t is not None
            self._remember(mine, fresh.scale)
            return Fp8Weights(fresh.q, fresh.scale, fresh.q_t, fresh.scale)
        if into is None:
            E, N, K = weight.shape
            q, q_t = (weight.new_empty(shape, dtype=torch.float8_e4m3fn).transpose(1, 2) for shape in ((E, N, K), (E, K, N)))
            scale = weight.new_empty(E, dtype=torch.float32)
            into = Fp8Weights(q, scale, q_t, scale)
        outputs = list(zip(into.q.transpose(1, 2).unbind(0), into.q_t.transpose(1, 2).unbind(0), strict=True))
        multi_cast_transpose(
            weight.unbind(0), self.scales[mine], self.history[0, mine], outputs=outputs, scale_inv=into.scale, skip=skip
        )
        return into

    def _remember(self, mine: slice, scale_inv: Tensor) -> None:
        seen = self.history[0, mine]
        amax = nn.functional.threshold(scale_inv * _FP8_MAX, 1.0001 * _LEAST, 0.0)  # because fresh casts raise 0 to _LEAST
        torch.maximum(seen, amax, out=seen)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def moved(t: Tensor) -> Tensor:
            made: Tensor = fn(t)
            return made if made.dtype == t.dtype else t.to(made.device)

        return apply_to_tensors(self, moved, recurse)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load the scales; a checkpoint of a model that was not converted has none, and leaves them as they are."""
        if any(name.startswith(prefix) for name in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self) -> Tensor:
        """Return whether the scales are known, as a tensor, because `save_pretrained` of transformers saves nothing else."""
        return torch.tensor(self.known, device="cpu")

    def set_extra_state(self, state: Tensor | bool) -> None:
        """Load whether the scales are known."""
        self.known = bool(state)

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        return f"{self.num_experts}, history={self.history.shape[0]}"


def update_scales(model: nn.Module) -> int:
    """Update every DelayedScaling of a model, once per optimizer step, and return their number."""
    layers = [module for module in model.modules() if isinstance(module, DelayedScaling)]
    for layer in layers:
        layer.update()
    return len(layers)
