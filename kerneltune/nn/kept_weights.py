"""Keep weights in fp8 from microbatch to microbatch, at the same addresses, so that captured graphs find them there."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kerneltune.compat import apply_to_tensors, preserved_versions, version
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.fp8_products import Fp8Weights, cast_product_weights, cast_weights
from kerneltune.nn.recipes import Recipe


class _Streams:
    """Order the uses of tensors on several CUDA streams: a reader waits for the last write, a writer for all readers.

    On other devices, and while a graph is captured, nothing waits: a capture may not wait for an event from outside.
    """

    def __init__(self) -> None:
        self._written: torch.cuda.Event | None = None
        self._users: dict[int, torch.cuda.Stream] = {}

    def before_write(self, device: torch.device) -> None:
        """Make the current stream wait for all work launched so far on streams that use the tensors."""
        if (current := _current_stream(device)) is not None:
            for key, stream in self._users.items():
                if key != current.cuda_stream:
                    current.wait_stream(stream)

    def after_write(self, device: torch.device) -> None:
        """Remember that the current stream wrote the tensors."""
        if (current := _current_stream(device)) is not None:
            self._written, self._users = current.record_event(), {current.cuda_stream: current}

    def before_read(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Make the current stream wait for the last write, once per write and stream."""
        current = _current_stream(device)
        if current is None or self._written is None or current.cuda_stream in self._users:
            return
        current.wait_event(self._written)
        self._users[current.cuda_stream] = current
        for tensor in tensors:
            tensor.record_stream(current)


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream of a GPU; None on another device and while a graph is captured."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device)


class KeptWeights(nn.Module):
    """Hold a weight in fp8, and the largest magnitudes of its last cast.

    A module reads the weight by `options`, which torch.compile traces, or by `current`, which also notices that the weight has
    changed. Any thread may call `current`, on any stream: a call waits for the cast under way, and a stream waits for the cast
    on another stream. A copy, by deepcopy or pickle, holds no weights.

    Attributes:
        amax: (E,) fp32, the largest magnitudes of the weight at the last cast, as `fp8_grouped_mm` takes them. A buffer stays at
            its address, so that compiled graphs may write to it.
        is_first_microbatch: None casts in every forward pass; True casts into the buffers; False reads the buffers.
    """

    amax: Tensor

    def __init__(self, num_experts: int, device: torch.device) -> None:
        super().__init__()
        self.is_first_microbatch: bool | None = None
        self.register_buffer("amax", torch.zeros(num_experts, dtype=torch.float32, device=device), persistent=False)
        for name in Fp8Weights._fields:
            self.register_buffer(name, None, persistent=False)
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._streams = _Streams()
        self._parameter: weakref.ref[Tensor] | None = None
        self._seen: tuple[object, ...] = ()
        self._steps = 0
        self._may_be_old = False
        """True after a call with `skip` on the device: the kept cast may be of an older weight than `_seen`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the weights in fp8."""
        fields = Fp8Weights._fields
        state = {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_parameter", "_streams", "_seen")}
        return state | {"_buffers": {name: None if name in fields else t for name, t in self._buffers.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy that has seen no weight."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._forget()

    @property
    def held(self) -> Fp8Weights | None:
        """Return the fp8 weights in the buffers, or None."""
        return None if self.q is None else Fp8Weights(*(getattr(self, name) for name in Fp8Weights._fields))

    @property
    def nbytes(self) -> int:
        """Return the number of bytes held."""
        return sum(t.untyped_storage().nbytes() for t in {id(t): t for t in self.held or ()}.values())

    def clear(self) -> None:
        """Release the memory."""
        with self._lock:
            for name in Fp8Weights._fields:
                setattr(self, name, None)
            self._forget()

    def options(self, weight: Tensor, recipe: Recipe | DelayedScaling) -> dict[str, Any]:
        """Return the arguments `weights` and `amax` of `fp8_grouped_mm` for weight (E, K, N); traced by torch.compile.

        The weights are None where every forward pass casts, amax is None where nothing is to be expected of the weight.
        """
        if self.amax.device != weight.device:  # a parameter on another device took the place of the weight
            self.amax = torch.zeros_like(self.amax, device=weight.device)
        kept = self.weights(weight, recipe)
        return {"weights": kept, "amax": self.amax if kept is None and weight.shape[0] == self.amax.shape[0] else None}

    def weights(self, weight: Tensor, recipe: Recipe | DelayedScaling) -> Fp8Weights | None:
        """Return weight (E, K, N) in fp8 out of the buffers, or None where every forward pass casts; traced by torch.compile."""
        if self.is_first_microbatch is None:
            return None
        if not self._fits(weight, recipe):
            with torch.inference_mode(False):  # because training also reads the buffers that an evaluation fills
                self._hold(_cast(weight.detach(), recipe, self.amax))
        elif self.is_first_microbatch:
            with torch.no_grad():
                made = _cast(weight.detach(), recipe, self.amax)
                for name, t in zip(Fp8Weights._fields, made, strict=True):
                    getattr(self, name).copy_(t)
        return self.held

    def _fits(self, weight: Tensor, recipe: Recipe | DelayedScaling) -> bool:
        q: Any = self.q
        scale: Any = self.scale
        rowwise = isinstance(recipe, Recipe) and recipe.scaling == "rowwise"
        return q is not None and q.shape == weight.shape and q.device == weight.device and (scale.ndim == 2) == rowwise

    def _hold(self, weights: Fp8Weights) -> None:
        for name, t in zip(Fp8Weights._fields, weights, strict=True):
            setattr(self, name, t)

    def current(self, weight: Tensor, recipe: Recipe | DelayedScaling, *, update: bool, skip: Tensor | None = None) -> Fp8Weights:
        """Return weight (E, N, K), contiguous or column-major, in fp8. The first call allocates, later calls write in place.

        Args:
            weight: a parameter, or a tensor that stands for a parameter.
            recipe: of the cast.
            update: whether to cast in any case. Else a cast follows only where the weight is another tensor than at the last
                call, at another address, or of another version, or where the weight takes gradients and any optimizer has made
                a step since, because FSDP gathers weights without a new version. Changes that torch does not count go unseen:
                through `.data`, of weights made under inference_mode, and by a replayed graph.
            skip: one value on the device; not 0 keeps the fp8 as it is. The device reads the value when the work runs, also in
                every replay of a graph. Only delayed scaling saves the cast then. The first call casts anyway.
        """
        with self._lock:
            if self.amax.device != weight.device:
                self.amax = torch.zeros_like(self.amax, device=weight.device)
            cast = self._current(weight, recipe, update, skip)
            self._streams.before_read(cast, weight.device)
            return cast

    def _current(self, weight: Tensor, recipe: Recipe | DelayedScaling, update: bool, skip: Tensor | None) -> Fp8Weights:
        """Return the fp8 of the weight as it is now; the caller holds the lock."""
        seen = (weight.data_ptr(), version(weight), tuple(weight.shape), weight.dtype, weight.device, recipe)
        is_same = self._parameter is not None and self._parameter() is weight and self._seen == seen
        steps = _optimizer_steps()["made"] if weight.requires_grad else 0
        has_stepped = steps != self._steps
        is_known = is_same and (skip is not None or not self._may_be_old)
        with torch.inference_mode(False):  # because training also reads the buffers that an evaluation fills
            held = self.held
            if held is None or self._seen[2:] != seen[2:]:
                held = _cast(weight.detach().transpose(1, 2), recipe, self.amax)
                self._hold(held)
                self._may_be_old, self._streams = False, _Streams()
                self._streams.after_write(weight.device)
            elif update or skip is not None or not is_known or has_stepped:
                self._refresh(weight, recipe, held, skip)
                self._may_be_old = skip is not None and (self._may_be_old or not is_same or has_stepped)
                if not is_known:  # so that a backward pass that needs the older bytes raises
                    torch.autograd.graph.increment_version(list(held))
        self._parameter, self._seen, self._steps = weakref.ref(weight), seen, steps
        return held

    def _refresh(self, weight: Tensor, recipe: Recipe | DelayedScaling, held: Fp8Weights, skip: Tensor | None) -> None:
        """Write the fp8 in place, without a new version."""
        self._streams.before_write(weight.device)
        with torch.no_grad(), preserved_versions(tuple(held)):
            if isinstance(recipe, DelayedScaling) and recipe.known:
                recipe.cast_weights(weight.detach(), held, None if skip is None else skip.reshape(1).float())
            elif skip is None and isinstance(recipe, Recipe):
                cast_weights(weight.detach().transpose(1, 2), recipe, held, self.amax)
            else:
                fresh = _cast(weight.detach().transpose(1, 2), recipe, self.amax)
                for t, new in {id(t): (t, new) for t, new in zip(held, fresh, strict=True)}.values():
                    if skip is None:
                        t.copy_(new)
                    else:
                        torch.where(skip != 0, _bits(t), _bits(new), out=_bits(t))
        self._streams.after_write(weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.clear()
        moved = apply_to_tensors(self, fn, recurse)
        self.amax = torch.zeros(self.amax.shape, dtype=torch.float32, device=self.amax.device)
        return moved

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        return f"is_first_microbatch={self.is_first_microbatch}"


def set_first_microbatch(model: nn.Module, is_first: bool | None) -> int:
    """Say which microbatch of a gradient accumulation the next forward passes of a converted model are.

    Weights are then cast once per optimizer step: into buffers in the first microbatch, and read from there in later
    microbatches. The buffers take 2 bytes per weight, and stay at their addresses, so that graphs can be captured. The argument
    `is_first_microbatch` of a GroupedLinear goes first.

    Args:
        model: with converted expert modules, or GroupedLinear or Fp8Linear layers.
        is_first: True casts and keeps; False reads the buffers, also after the weights changed; None casts in every forward pass
            and releases the buffers.

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


@cache
def _optimizer_steps() -> Counter[str]:
    """Return how many steps torch's optimizers have `made` since the first call."""
    steps: Counter[str] = Counter()
    register_optimizer_step_post_hook(lambda *_: steps.update(["made"]))
    return steps


def _cast(b_t: Tensor, recipe: Recipe | DelayedScaling, amax: Tensor) -> Fp8Weights:
    """Return b_t (E, K, N) in fp8 in new tensors, by operators that torch.compile traces."""
    if isinstance(recipe, DelayedScaling):
        return recipe.cast_weights(b_t.mT)
    return Fp8Weights(*cast_product_weights(recipe.scaling, recipe.pow2, b_t, True, amax))  # type: ignore[arg-type]


def _bits(t: Tensor) -> Tensor:
    """View the values as integers, because torch.where does not support fp8."""
    dense = t.transpose(1, 2) if t.ndim == 3 else t
    return dense.view(torch.uint8 if t.dtype.itemsize == 1 else torch.int32)
