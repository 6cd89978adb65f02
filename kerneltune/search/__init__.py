"""The search for a config in a finite space, what it leaves behind, and samplers for any Optuna study: no GPU, no torch.

`FiniteGPSampler`, `ListSampler` and `UntriedSampler` are public; Optuna is imported when one of them is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerneltune.search.study import FiniteGPSampler, ListSampler, UntriedSampler

__all__ = ["FiniteGPSampler", "ListSampler", "UntriedSampler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kerneltune.search import study

    return getattr(study, name)
