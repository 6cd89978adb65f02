"""Keep weights in fp8 from microbatch to microbatch, at the same addresses, so that captured graphs find them there.

With None as the setting of `set_first_microbatch`, a forward pass casts the weight and keeps nothing; with True it casts the
weight into the buffers; with False it reads the buffers. So does every compiled graph. The argument `is_first_microbatch` of
a GroupedLinear overrides the setting for a call, which is not traced. A call with False casts again if torch knows that the
weight has changed since the last call.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kerneltune.compat import apply_to_tensors, leave_out_of_broadcasts, preserved_versions, untraced, version
from kerneltune.nn.recipes import AnyRecipe, Fp8Operand


@dataclass(eq=False)
class _LastCall:
    """Hold the facts of the last call with the argument `is_first_microbatch`. A copy holds no facts.

    Attributes:
        lock: lock that the present call holds.
        weight: the weight of the last call.
        state: address, version, shape, type and device of that weight, and the recipe.
        steps: number of optimizer steps before the last call.
        may_be_old: whether a flag on the device may have kept the cast of an older weight.
        written: the event behind the last write of the buffers.
        streams: CUDA streams that have used the buffers since.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    weight: weakref.ref[Tensor] | None = None
    state: tuple[object, ...] = ()
    steps: int = 0
    may_be_old: bool = False
    written: torch.cuda.Event | None = None
    streams: list[torch.cuda.Stream] = field(default_factory=list)

    def __reduce__(self) -> Any:
        return _LastCall, ()

    @contextmanager
    def ordered(self, device: torch.device, read: Fp8Operand | None) -> Iterator[None]:
        """Let the current CUDA stream wait for the last write before it reads buffers, and for all readers before it writes.

        During a capture nothing waits, because a capture may not wait for work from outside.

        Args:
            device: device of the weight.
            read: the buffers to read; None if the buffers are written.
        """
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield
            return
        current = torch.cuda.current_stream(device)
        if read is None:
            for stream in self.streams:
                if stream != current:
                    current.wait_stream(stream)
        elif self.written is not None and current not in self.streams:
            current.wait_event(self.written)
            self.streams.append(current)
            for tensor in read:
                tensor.record_stream(current)
        yield
        if read is None:
            self.written, self.streams = current.record_event(), [current]


class KeptWeights(nn.Module):
    """Hold a weight in fp8, and the largest magnitudes of its last cast.

    Any thread may call `current`, on any stream. A copy, by deepcopy or pickle, holds no weights.

    Attributes:
        amax: (E,) fp32, the largest magnitudes of the weight at the last cast, as `fp8_grouped_mm` takes them. A buffer
            stays at its address, so that compiled graphs may write to it.
        is_first_microbatch: the setting of `set_first_microbatch`.
    """

    amax: Tensor

    def __init__(self, num_experts: int, device: torch.device) -> None:
        super().__init__()
        self.is_first_microbatch: bool | None = None
        self.register_buffer("amax", torch.zeros(num_experts, dtype=torch.float32, device=device), persistent=False)
        for name in Fp8Operand._fields:
            self.register_buffer(name, None, persistent=False)
        self._last = _LastCall()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the weights in fp8."""
        return vars(self) | {"_buffers": dict.fromkeys(Fp8Operand._fields) | {"amax": self.amax}}

    @property
    def held(self) -> Fp8Operand | None:
        """Return the fp8 weights in the buffers, or None."""
        return None if self.q is None else Fp8Operand(*(getattr(self, name) for name in Fp8Operand._fields))

    @property
    def nbytes(self) -> int:
        """Return the number of bytes held."""
        return sum(t.untyped_storage().nbytes() for t in {id(t): t for t in self.held or ()}.values())

    def clear(self) -> None:
        """Release the memory."""
        with self._last.lock:
            for name in Fp8Operand._fields:
                setattr(self, name, None)
        self._last = _LastCall()

    def cast(self, b_t: Tensor, recipe: AnyRecipe, has_gradient: bool) -> Fp8Operand | None:
        """Return a weight (E, K, N) in fp8 by the model's setting, or None for the product to cast it; traced by torch.compile.

        has_gradient: whether the product's rows take a gradient, which needs the transpose of the weight.
        """
        if self.is_first_microbatch is None:
            is_expected = recipe.uses_amax and has_gradient and torch.is_grad_enabled() and b_t.shape[0] == self.amax.shape[0]
            return self._cast(b_t, recipe) if is_expected else None
        held = self._fitting(b_t, recipe)
        if held is None:
            return self._allocate(b_t, recipe)
        if self.is_first_microbatch:
            self._write(held, b_t, recipe)
        return held

    @untraced
    def current(self, weight: Tensor, recipe: AnyRecipe, *, update: bool, skip: Tensor | None = None) -> Fp8Operand:
        """Return weight (E, N, K), contiguous or column-major, in fp8. The first call allocates, later calls write in place.

        Args:
            weight: a parameter, or a tensor that stands for a parameter.
            recipe: recipe of the cast.
            update: whether to cast in any case. If False, the weight is cast only if it has changed since the last call: it
                is another tensor, or at another address, or of another version. A weight that takes gradients also counts as
                changed after a step of any optimizer, because FSDP gathers weights without a new version. Changes that torch
                does not count are not found: through `.data`, of weights made under inference_mode, and by a replayed graph.
            skip: one value on the device; if it is not 0, the fp8 weights stay. The device reads the value when the work
                runs, also in every replay of a graph. Only delayed scaling saves the time of the cast. The first call always
                casts.
        """
        last, b_t = self._last, weight.transpose(1, 2)
        with last.lock:
            state = (weight.data_ptr(), version(weight), weight.shape, weight.dtype, weight.device, recipe)
            steps = _optimizer_steps()["made"] if weight.requires_grad else 0
            has_stepped = last.steps != steps
            has_changed = last.weight is None or last.weight() is not weight or last.state != state
            is_old = has_changed or (last.may_be_old and skip is None)
            held = self._fitting(b_t, recipe)
            writes = held is None or update or skip is not None or is_old or has_stepped
            with last.ordered(weight.device, None if writes else held):
                if held is None:
                    held, last.may_be_old = self._allocate(b_t, recipe), False
                elif writes:
                    # with a new version, a backward pass that needs the older bytes raises
                    with torch.inference_mode(False), nullcontext() if is_old else preserved_versions(tuple(held)):
                        self._write(held, b_t, recipe, skip)
                    last.may_be_old = skip is not None and (last.may_be_old or has_changed or has_stepped)
            last.weight, last.state, last.steps = weakref.ref(weight), state, steps
            return held

    def _amax_on(self, device: torch.device) -> Tensor:
        if self.amax.device != device:  # a parameter on another device took the place of the weight
            self.amax = torch.zeros_like(self.amax, device=device)
        return self.amax

    def _fitting(self, b_t: Tensor, recipe: AnyRecipe) -> Fp8Operand | None:
        """Return the buffers if b_t (E, K, N) fits them, else None."""
        held = self.held
        if held is None or held.q.shape != b_t.shape or held.q.device != b_t.device:
            return None
        return held if (held.scale.ndim == 2) == recipe.is_rowwise else None

    def _allocate(self, b_t: Tensor, recipe: AnyRecipe) -> Fp8Operand:
        """Make the buffers of b_t (E, K, N) in fp8."""
        with torch.inference_mode(False):  # because training also reads the buffers that an evaluation fills
            made = self._cast(b_t, recipe)
            for name, t in zip(Fp8Operand._fields, made, strict=True):
                setattr(self, name, t)
        return made

    def _write(self, held: Fp8Operand, b_t: Tensor, recipe: AnyRecipe, skip: Tensor | None = None) -> None:
        """Write b_t (E, K, N) into the buffers, which get a new version; not where the flag on the device is set."""
        if recipe.can_write(skip) and not torch.compiler.is_compiling():
            recipe.write_weights(held, b_t.detach(), self._amax_on(b_t.device), skip)
            torch.autograd.graph.increment_version(list(held))
            return
        with torch.no_grad():
            for t, new in zip(held, self._cast(b_t, recipe), strict=True):
                if skip is None:
                    t.copy_(new)
                else:
                    bits = torch.uint8 if t.dtype.itemsize == 1 else t.dtype  # because torch.where does not support fp8
                    torch.where(skip != 0, t.view(bits), new.view(bits), out=t.view(bits))

    def _cast(self, b_t: Tensor, recipe: AnyRecipe) -> Fp8Operand:
        """Return b_t (E, K, N) in fp8 in new tensors, by operators that torch.compile traces."""
        return recipe.cast_weights(b_t.detach(), amax=self._amax_on(b_t.device))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.clear()
        moved = apply_to_tensors(self, fn, recurse)
        self.amax = torch.zeros(self.amax.shape, dtype=torch.float32, device=self.amax.device)
        return moved

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        return f"is_first_microbatch={self.is_first_microbatch}"


def set_first_microbatch(model: nn.Module, is_first: bool | None) -> int:
    """Set whether the next forward passes of a converted model belong to the first microbatch of a gradient accumulation.

    Weights are then cast once per optimizer step. The buffers take 2 bytes per weight, and stay at their addresses, so that
    graphs can be captured.

    Args:
        model: model with converted expert modules, or GroupedLinear or Fp8Linear layers.
        is_first: True casts and keeps; False reads the buffers, also after the weights changed; None casts in every forward
            pass and releases the buffers.

    Returns:
        The number of weights.
    """
    weights = kept_weights_of(model)
    if not weights:
        raise ValueError(f"{type(model).__name__} has no converted modules: call convert_to_fp8_training first")
    for module in weights:
        module.is_first_microbatch = is_first
        if is_first is None:
            module.clear()
    return len(weights)


def kept_weights_of(model: nn.Module) -> list[KeptWeights]:
    """Return all KeptWeights of a model, and keep their buffers out of the broadcasts of DistributedDataParallel."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, KeptWeights)}
    leave_out_of_broadcasts(model, {f"{name}.{buffer}" for name in found for buffer in ("amax", *Fp8Operand._fields)})
    return list(found.values())


@cache
def _optimizer_steps() -> Counter[str]:
    """Return a counter with one key, `made`: the steps of all torch optimizers since the first call; a hook counts them."""
    steps: Counter[str] = Counter()
    register_optimizer_step_post_hook(lambda *_: steps.update(["made"]))
    return steps
