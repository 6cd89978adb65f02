"""Let the configs that autotuners of a variant's kernels choose among be values of a knob, so that checks run each."""

import functools
from collections.abc import Iterable
from dataclasses import astuple, make_dataclass, replace
from typing import Any

from kerneltune.interpreter.facts import Fact
from kerneltune.interpreter.modes import taking
from kerneltune.spec import Config, Inputs, Outputs, Variant, knobs_of_class

_KNOB = "autotuner_config"
"""Name of the knob: the number of a config in the list of each autotuner, from 0."""


def num_autotuned(facts: Iterable[Fact]) -> int:
    """Return the length of the longest list of an autotuner's configs among facts of launches; 1 without an autotuner."""
    return max((int(fact.where) for fact in facts if fact.kind == "autotuned"), default=1)


def with_knob(variant: Variant, number: int) -> Variant:
    """Return a variant with the knob `_KNOB` beside its own knobs, with `number` values; the default is 0."""
    own: Any = variant.config

    def own_config(config: Config) -> Config:
        return None if own is None or config is None else own(*astuple(config)[:-1])

    def run(inputs: Inputs, config: Config) -> Outputs:
        with taking(0 if config is None else getattr(config, _KNOB)):
            return variant.run(inputs, own_config(config))

    return replace(
        variant,
        run=run,
        config=_config_class(own),
        space=lambda case: {**variant.space(case), _KNOB: tuple(range(number))},
        invalid=lambda case, config: variant.invalid(case, own_config(config)),
        default=lambda case: _config(own, [] if own is None else astuple(variant.default_config(case)), 0),
    )


@functools.cache
def _config_class(own: Any) -> Any:
    """Return a class of configs with the knobs of a class, or with none, and `_KNOB`; other processes can make its configs."""
    knobs = {} if own is None else knobs_of_class(own)
    namespace = {"__reduce__": lambda config: (_config, (own, astuple(config)[:-1], getattr(config, _KNOB)))}
    return make_dataclass("Knobs", [*knobs.items(), (_KNOB, int)], frozen=True, namespace=namespace)


def _config(own: Any, values: Iterable[Any], number: int) -> Config:
    return _config_class(own)(*values, number)
