"""Configs around an author's list: one more step of warps, stages or a power of two from a config of the list.

Imports the standard library and kernels.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kerneltune.adopt.kernels import config_key

MOST = 64
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_MOST_WARPS, _MOST_STAGES, _LARGEST_BLOCK = 16, 7, 1024


def widened(configs: Sequence[Any], most: int = MOST) -> list[Any]:
    """Return up to `most` configs that differ from one of the list in one knob and are not in it; none of mixed pre_hooks."""
    if len({getattr(config, "pre_hook", None) for config in configs}) > 1:
        return []
    seen = {config_key(config) for config in configs}
    found: list[Any] = []
    for config in configs:
        for other in _around(config):
            key = config_key(other)
            if key not in seen and len(found) < most:
                seen.add(key)
                found.append(other)
    return found


def of_space(configs: Sequence[Any], space: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return the configs of a space, each knob not named in it as in the first config; without those that the list has."""
    seen = {config_key(config) for config in configs}
    found = []
    for values in itertools.product(*space.values()):
        given = dict(zip(space, values, strict=True))
        options = {name: given.pop(name) for name in list(given) if name in _OPTIONS}
        other = _changed(configs[0], kwargs={**configs[0].kwargs, **given}, **options)
        if config_key(other) not in seen:
            seen.add(config_key(other))
            found.append(other)
    return found


def _around(config: Any) -> Iterator[Any]:
    for warps in (config.num_warps * 2, config.num_warps // 2):
        if 1 <= warps <= _MOST_WARPS:
            yield _changed(config, num_warps=warps)
    for stages in (config.num_stages + 1, config.num_stages - 1):
        if 1 <= stages <= _MOST_STAGES:
            yield _changed(config, num_stages=stages)
    for name, value in config.kwargs.items():
        if _is_block(value):
            for other in (value * 2, value // 2):
                if _is_block(other):
                    yield _changed(config, kwargs={**config.kwargs, name: other})


def _is_block(value: Any) -> bool:
    return type(value) is int and 8 <= value <= _LARGEST_BLOCK and value & (value - 1) == 0


def _changed(config: Any, **fields: Any) -> Any:
    other = copy.copy(config)
    other.kwargs = dict(config.kwargs)
    for name, value in fields.items():
        setattr(other, name, value)
    return other
