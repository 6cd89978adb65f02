"""Search a finite space of configs and store the trials. Needs no GPU and no torch.

`FiniteGPSampler` and `ListSampler` are public samplers for any Optuna study. Optuna is imported with the first use of a sampler.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerneltune.search.samplers import FiniteGPSampler, ListSampler

__all__ = ["FiniteGPSampler", "ListSampler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kerneltune.search import samplers

    return getattr(samplers, name)
