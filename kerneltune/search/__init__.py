"""Search a finite space of configs and store the trials. Needs no GPU and no torch.

`FiniteGPSampler` is a public sampler for any Optuna study. Optuna is imported with its first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerneltune.search.samplers import FiniteGPSampler

__all__ = ["FiniteGPSampler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kerneltune.search import samplers

    return getattr(samplers, name)
