"""Expert weights in fp8 that stay in one place, refreshed there once per optimiser step. May import its neighbours."""

import weakref
from collections import Counter
from functools import cache

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim.optimizer import register_optimizer_step_post_hook

from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.fp8_products import Fp8Weights, cast_weights
from kerneltune.nn.recipes import Recipe


class WeightWorkspace:
    """The fp8 of one weight. The first call allocates; later ones write to the same addresses, so that graphs find it there.

    A copy, by deepcopy or pickle, is empty.
    """

    def __init__(self) -> None:
        self._cast: Fp8Weights | None = None
        self._of: weakref.ref[Tensor] | None = None
        self._seen: tuple[object, ...] = ()
        self._steps = 0
        self._unsure = False
        """Whether a flag on the device may have kept what an older weight was cast to than the one seen."""

    def __reduce__(self) -> tuple[type["WeightWorkspace"], tuple[()]]:
        return WeightWorkspace, ()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._cast is None else sum(t.untyped_storage().nbytes() for t in {id(t): t for t in self._cast}.values())

    def clear(self) -> None:
        """Let go of the memory."""
        self._cast, self._of, self._seen, self._unsure = None, None, (), False

    def get(
        self,
        weight: Tensor,
        recipe: Recipe | DelayedScaling,
        *,
        update: bool,
        skip: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> Fp8Weights:
        """The fp8 of weight (E, N, K), contiguous or column-major.

        Args:
            update: cast again whatever is known of the weight. Else only where it is another tensor than at the last call,
                elsewhere, or of another version, or where it takes gradients and an optimiser has made a step since, whosever:
                what FSDP gathers has no new version. Not seen are changes that torch does not count: through `.data`, of
                weights made under inference_mode, and by a replayed graph.
            skip: one number on the device; where it is not 0 what is there stays. Read when the work runs, also in every
                replay of a graph; saves the cast under delayed scaling alone. The first call casts anyway.
            amax: as in `fp8_grouped_mm`.
        """
        version = 0 if weight.is_inference() else weight._version
        seen = (weight.data_ptr(), version, tuple(weight.shape), weight.dtype, weight.device, recipe)
        same = self._of is not None and self._of() is weight and self._seen == seen
        steps = _optimiser_steps()["made"] if weight.requires_grad else 0
        stepped = steps != self._steps
        known = same and (skip is not None or not self._unsure)
        with torch.inference_mode(False):  # what an evaluation casts is there for training, too
            if self._cast is None or self._seen[2:] != seen[2:]:
                self._cast, self._unsure = _cast(weight, recipe, amax), False
            elif update or skip is not None or not known or stepped:
                self._refresh(weight, recipe, skip, amax)
                self._unsure = skip is not None and (self._unsure or not same or stepped)
                if not known:  # backwards under way were to go on with other bytes
                    torch.autograd.graph.increment_version(list(self._cast))
        self._of, self._seen, self._steps = weakref.ref(weight), seen, steps
        return self._cast

    def _refresh(self, weight: Tensor, recipe: Recipe | DelayedScaling, skip: Tensor | None, amax: Tensor | None) -> None:
        """In place, no version counted up."""
        assert self._cast is not None
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._cast)):
            if isinstance(recipe, DelayedScaling) and recipe.known:
                recipe.cast_weights(weight.detach(), self._cast, None if skip is None else skip.reshape(1).float())
                return
            if skip is None and isinstance(recipe, Recipe):
                cast_weights(weight.detach().transpose(1, 2), recipe, self._cast, amax)
                return
            fresh = _cast(weight, recipe, amax)
            for t, new in {id(t): (t, new) for t, new in zip(self._cast, fresh, strict=True)}.values():
                if skip is None:
                    t.copy_(new)
                else:
                    torch.where(skip != 0, _bits(t), _bits(new), out=_bits(t))


@cache
def _optimiser_steps() -> Counter[str]:
    """How many steps torch's optimisers have `made` since this was first asked."""
    steps: Counter[str] = Counter()
    register_optimizer_step_post_hook(lambda *_: steps.update(["made"]))
    return steps


def _cast(weight: Tensor, recipe: Recipe | DelayedScaling, amax: Tensor | None) -> Fp8Weights:
    if isinstance(recipe, DelayedScaling):
        return recipe.cast_weights(weight.detach())
    return cast_weights(weight.detach().transpose(1, 2), recipe, amax=amax)


def _bits(t: Tensor) -> Tensor:
    """The values as integers, which torch.where takes of fp8 too."""
    dense = t.transpose(1, 2) if t.ndim == 3 else t
    return dense.view(torch.uint8 if t.dtype.itemsize == 1 else torch.int32)
