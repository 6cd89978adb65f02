"""Let the configs that autotuners of a variant's kernels choose among be values of a knob, so that checks run each."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, make_dataclass, replace
from typing import Any

from kerneltune.interpreter.modes import taking
from kerneltune.spec import Case, Config, Inputs, Outputs, Variant, knobs_of_class

_KNOB = "autotuner_config"
"""Name of the knob: the number of a config in the list of each autotuner, from 0."""


def with_knob(variant: Variant, kept: Mapping[Case, Sequence[int]]) -> Variant:
    """Return a variant with the knob `_KNOB` beside its own knobs.

    Args:
        kept: each case's numbers of configs, of which the first is the default; a missing or empty list stands for the first.
    """
    own: Any = variant.config

    def own_config(config: Config) -> Config:
        return None if own is None or config is None else own(*astuple(config)[:-1])

    def run(inputs: Inputs, config: Config) -> Outputs:
        with taking(0 if config is None else getattr(config, _KNOB)):
            return variant.run(inputs, own_config(config))

    def numbers(case: Case) -> Sequence[int]:
        return kept.get(case) or (0,)

    return replace(
        variant,
        run=run,
        config=_config_class(own),
        space=lambda case: {**variant.space(case), _KNOB: tuple(numbers(case))},
        invalid=lambda case, config: variant.invalid(case, own_config(config)),
        default=lambda case: _config(own, [] if own is None else astuple(variant.default_config(case)), numbers(case)[0]),
    )


def variant_of(variant: Variant, config: Config) -> Variant:
    """Return the variant that runs a config of a pair: with `_KNOB` if the config has it."""
    return with_knob(variant, {}) if hasattr(config, _KNOB) else variant


@functools.cache
def _config_class(own: Any) -> Any:
    """Return a class of configs with the knobs of a class, or with none, and `_KNOB`; other processes can make its configs."""
    knobs = {} if own is None else knobs_of_class(own)
    namespace = {"__reduce__": lambda config: (_config, (own, astuple(config)[:-1], getattr(config, _KNOB)))}
    return make_dataclass("Knobs", [*knobs.items(), (_KNOB, int)], frozen=True, namespace=namespace)


def _config(own: Any, values: Iterable[Any], number: int) -> Config:
    return _config_class(own)(*values, number)
