"""Expert weights in fp8 that stay in one place, refreshed there once per optimiser step. May import its neighbours."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from kerneltune.compat import preserved_versions, version
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.fp8_products import Fp8Weights, cast_weights
from kerneltune.nn.recipes import Recipe


class _Streams:
    """Orders the uses of tensors on several CUDA streams: whoever reads waits for the last write, whoever writes for all readers.

    Does nothing on other devices, nor while a graph is captured: events of the outside may not be waited for there.
    """

    def __init__(self) -> None:
        self._written: torch.cuda.Event | None = None
        self._users: dict[int, torch.cuda.Stream] = {}

    def before_write(self, device: torch.device) -> None:
        """Make the current stream wait for what was launched so far on streams that use the tensors."""
        if (current := _current(device)) is not None:
            for key, stream in self._users.items():
                if key != current.cuda_stream:
                    current.wait_stream(stream)

    def after_write(self, device: torch.device) -> None:
        """Remember that the current stream wrote the tensors."""
        if (current := _current(device)) is not None:
            self._written, self._users = current.record_event(), {current.cuda_stream: current}

    def before_read(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Make the current stream wait for the last write, once per write and stream."""
        current = _current(device)
        if current is None or self._written is None or current.cuda_stream in self._users:
            return
        current.wait_event(self._written)
        self._users[current.cuda_stream] = current
        for tensor in tensors:
            tensor.record_stream(current)


def _current(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream of a GPU; None on another device and while a graph is captured."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device)


class WeightWorkspace:
    """The fp8 of one weight. The first call allocates; later ones write to the same addresses, so that graphs find it there.

    Any thread may call it, on any stream: a call waits for the one under way, and work on one stream for the cast on another.
    A copy, by deepcopy or pickle, is empty.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams = _Streams()
        self.weights: Fp8Weights | None = None
        self._of: weakref.ref[Tensor] | None = None
        self._seen: tuple[object, ...] = ()
        self._steps = 0
        self._unsure = False
        """True if a flag on the device may have kept the cast of an older weight than the one seen."""

    def __reduce__(self) -> tuple[type["WeightWorkspace"], tuple[()]]:
        return WeightWorkspace, ()

    @property
    def nbytes(self) -> int:
        """Return bytes held."""
        return 0 if self.weights is None else sum(t.untyped_storage().nbytes() for t in {id(t): t for t in self.weights}.values())

    def clear(self) -> None:
        """Let go of the memory."""
        with self._lock:
            self.weights, self._of, self._seen, self._unsure, self._streams = None, None, (), False, _Streams()

    def get(
        self,
        weight: Tensor,
        recipe: Recipe | DelayedScaling,
        *,
        update: bool,
        skip: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> Fp8Weights:
        """Return weight (E, N, K) in fp8, contiguous or column-major.

        Args:
            update: cast again whatever is known of the weight. Else only where it is another tensor than at the last call,
                elsewhere, or of another version, or where it takes gradients and an optimiser has made a step since, whosever:
                what FSDP gathers has no new version. Not seen are changes that torch does not count: through `.data`, of
                weights made under inference_mode, and by a replayed graph.
            skip: one number on the device; where it is not 0 what is there stays. Read when the work runs, also in every
                replay of a graph; saves the cast under delayed scaling alone. The first call casts anyway.
            amax: as in `fp8_grouped_mm`.
        """
        with self._lock:
            cast = self._known_cast(weight, recipe, update, skip, amax)
            self._streams.before_read(cast, weight.device)
            return cast

    def _known_cast(
        self, weight: Tensor, recipe: Recipe | DelayedScaling, update: bool, skip: Tensor | None, amax: Tensor | None
    ) -> Fp8Weights:
        """Return the fp8 of the weight as it is now; the caller holds the lock."""
        seen = (weight.data_ptr(), version(weight), tuple(weight.shape), weight.dtype, weight.device, recipe)
        same = self._of is not None and self._of() is weight and self._seen == seen
        steps = _optimiser_steps()["made"] if weight.requires_grad else 0
        stepped = steps != self._steps
        known = same and (skip is not None or not self._unsure)
        with torch.inference_mode(False):  # what an evaluation casts is there for training, too
            if self.weights is None or self._seen[2:] != seen[2:]:
                self.weights, self._unsure, self._streams = _cast(weight, recipe, amax), False, _Streams()
                self._streams.after_write(weight.device)
            elif update or skip is not None or not known or stepped:
                self._refresh(weight, recipe, skip, amax)
                self._unsure = skip is not None and (self._unsure or not same or stepped)
                if not known:  # backwards under way were to go on with other bytes
                    torch.autograd.graph.increment_version(list(self.weights))
        self._of, self._seen, self._steps = weakref.ref(weight), seen, steps
        return self.weights

    def _refresh(self, weight: Tensor, recipe: Recipe | DelayedScaling, skip: Tensor | None, amax: Tensor | None) -> None:
        """Write the fp8 in place, without a new version."""
        assert self.weights is not None
        self._streams.before_write(weight.device)
        self._write(weight, recipe, self.weights, skip, amax)
        self._streams.after_write(weight.device)

    @staticmethod
    def _write(
        weight: Tensor, recipe: Recipe | DelayedScaling, cast: Fp8Weights, skip: Tensor | None, amax: Tensor | None
    ) -> None:
        with torch.no_grad(), preserved_versions(tuple(cast)):
            if isinstance(recipe, DelayedScaling) and recipe.known:
                recipe.cast_weights(weight.detach(), cast, None if skip is None else skip.reshape(1).float())
                return
            if skip is None and isinstance(recipe, Recipe):
                cast_weights(weight.detach().transpose(1, 2), recipe, cast, amax)
                return
            fresh = _cast(weight, recipe, amax)
            for t, new in {id(t): (t, new) for t, new in zip(cast, fresh, strict=True)}.values():
                if skip is None:
                    t.copy_(new)
                else:
                    torch.where(skip != 0, _bits(t), _bits(new), out=_bits(t))


@cache
def _optimiser_steps() -> Counter[str]:
    """Return how many steps torch's optimisers have `made` since this was first asked."""
    steps: Counter[str] = Counter()
    register_optimizer_step_post_hook(lambda *_: steps.update(["made"]))
    return steps


def _cast(weight: Tensor, recipe: Recipe | DelayedScaling, amax: Tensor | None) -> Fp8Weights:
    if isinstance(recipe, DelayedScaling):
        return recipe.cast_weights(weight.detach())
    return cast_weights(weight.detach().transpose(1, 2), recipe, amax=amax)


def _bits(t: Tensor) -> Tensor:
    """View the values as integers, which torch.where accepts for fp8 too."""
    dense = t.transpose(1, 2) if t.ndim == 3 else t
    return dense.view(torch.uint8 if t.dtype.itemsize == 1 else torch.int32)
