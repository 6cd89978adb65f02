"""Scale operands by the largest magnitudes of past steps, so that a cast is one launch.

Source: TransformerEngine's delayed scaling, from its contract.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.compat import apply_to_tensors
from kerneltune.kernel_lib.tl_lib import FP8_MAX
from kerneltune.nn.recipes import Fp8Operand
from kerneltune.ops import fp8
from kerneltune.ops.multi_cast_transpose import multi_cast_transpose

_FP8_MAX = FP8_MAX["e4m3"]
_LEAST = 1e-12
"""The least magnitude that a scale is computed from, as in fresh casts."""
_ROWS, _GRADS, _WEIGHTS = slice(0, 1), slice(1, 2), slice(2, None)
"""Places of the scales of the rows, of the gradients, and of the experts' weights."""


class DelayedScaling(nn.Module):
    """Hold the scales of one expert layer's rows, gradients and weights, and the largest magnitudes behind the scales.

    Call `update` once per optimizer step. Until an update has seen rows, gradients and every expert's weights with a value
    that is neither 0 nor infinite, each cast computes fresh scales, as under `tensorwise`. The state stays fp32 if the layer
    is cast.

    Args:
        num_experts: E.
        history: steps whose largest magnitudes count.

    Attributes:
        num_experts: E.
        known: whether casts use `scales`.
        scales: (2 + E,) fp32, multipliers of the values before their cast, not factors as elsewhere in nn; 1 until a magnitude
            is known.
        history: (history, 2 + E) fp32, the largest magnitudes of each step, the present step first.
    """

    scales: Tensor
    history: Tensor
    # as of any recipe
    keep_weights, is_rowwise, uses_amax = True, False, False

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

    def can_write(self, skip: Tensor | None) -> bool:
        """Return whether the scales are known: their cast reads a flag, if there is any."""
        return self.known

    def cast_rows(
        self, x: Tensor, offs: Tensor | None, *, for_product: bool = True, for_dw: bool = True, is_gradient: bool = False
    ) -> Fp8Operand:
        """Cast x (M, K), rows or their gradient in groups that end at offs, in both layouts whatever is asked for."""
        mine = _GRADS if is_gradient else _ROWS
        if self.known:
            assert offs is not None
            cast = fp8.fp8_delayed_2d(x, offs, self.scales[mine], self.history[0, mine])
        else:
            cast = fp8.fp8_tensorwise_2d(x, layout="both", pow2=False, inverse=True, offs=offs)
            self._remember(mine, cast.scale)
        return Fp8Operand(cast.q, cast.scale, cast.q_t, cast.scale)

    def cast_weights(self, b: Tensor, *, for_dx: bool = True, amax: Tensor | None = None) -> Fp8Operand:
        """Cast a weight b (E, K, N) of either order in both layouts, whatever is asked for."""
        if b.is_contiguous():
            return self.cast_weights(b.mT).transposed()
        if not self.known:
            fresh = fp8.fp8_tensorwise_3d(b, layout="both", pow2=False, inverse=True)
            self._remember(_WEIGHTS, fresh.scale)
            return Fp8Operand(fresh.q, fresh.scale, fresh.q_t, fresh.scale)
        E, K, N = b.shape
        q, q_t = (b.new_empty(shape, dtype=torch.float8_e4m3fn).transpose(1, 2) for shape in ((E, N, K), (E, K, N)))
        scale = b.new_empty(E, dtype=torch.float32)
        made = Fp8Operand(q, scale, q_t, scale)
        self.write_weights(made, b)
        return made

    def write_weights(self, into: Fp8Operand, b: Tensor, amax: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Cast b (E, K, N), of either order, into the tensors of an earlier cast of the same size.

        Takes known scales. skip: one value, not 0 to leave `into` as it is.
        """
        if b.is_contiguous():
            b, into = b.mT, into.transposed()
        multi_cast_transpose(
            b.mT.unbind(0),
            self.scales[_WEIGHTS],
            self.history[0, _WEIGHTS],
            outputs=list(zip(into.q.transpose(1, 2).unbind(0), into.q_t.transpose(1, 2).unbind(0), strict=True)),
            scale_inv=into.scale,
            skip=None if skip is None else skip.reshape(1).float(),
        )

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


class LayerScaling(DelayedScaling):
    """Hold the scales of a layer that may be made on the meta device: memory of a real device holds no step at first."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        was_meta = self.scales.is_meta
        moved = super()._apply(fn, recurse)
        if was_meta and not self.scales.is_meta:
            self.reset_parameters()
        return moved

    def on(self, device: torch.device) -> "LayerScaling":
        """Return the scales, which get memory on a device if they have none, as after `load_state_dict(…, assign=True)`."""
        if self.scales.is_meta and device.type != "meta":
            with torch.inference_mode(False):  # because training changes the scales that an evaluation makes
                self.to_empty(device=device)
        return self


def update_scales(model: nn.Module) -> int:
    """Update every DelayedScaling of a model, once per optimizer step, and return their number."""
    layers = [module for module in model.modules() if isinstance(module, DelayedScaling)]
    for layer in layers:
        layer.update()
    return len(layers)
