"""Choose the candidates of a search and its first configs, from stored trials and the cache."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from kerneltune import device
from kerneltune.plan import Options
from kerneltune.search.loop import Candidates
from kerneltune.spec import Case, Config, Variant
from kerneltune.task import Task

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

_NEIGHBOURS = 3
"""Near entries of the cache whose configs a search tries first."""
_TRANSFERRED = 16
"""Fastest configs of the other 16-bit type that are searched in place of the whole space."""


def candidates(task: Task, store: "TrialStore", options: Options) -> Candidates:
    """Return the configs that a search may try: the default, then the space.

    If the other 16-bit type was searched, its fastest configs stand for the space, unless `retune` is `all`. A search begins with
    the default, the promising configs, and the cached configs of this case and of the nearest cases.
    """
    space, default = checked_space(task), task.default
    offered = {default, *space}
    other_dtype = {"bfloat16": "float16", "float16": "bfloat16"}.get(task.case.dtype, "")
    if options.retune != "all" and other_dtype in task.op.dtypes:
        ranked = store.ranked(replace(task, case=replace(task.case, dtype=other_dtype)))
        if len(ranked) > max(_TRANSFERRED, len(store.ranked(task))):
            fastest = [task.variant.config_from(values) for values in ranked[:_TRANSFERRED]]
            space = [config for config in fastest if config in offered]
    pool = list(dict.fromkeys([default, *space]))
    matches = task.chooser.matches(task.case, device.current().slug)
    nearest = [match.config for match in itertools.islice(matches, _NEIGHBOURS)]
    first = dict.fromkeys([default, *task.variant.promising(task.case), *nearest])
    return Candidates(pool, [config for config in first if config in pool])


def checked_space(task: Task) -> list[Config]:
    """Return the valid configs of a space, each once, after checking the default and the promising configs."""
    case, variant = task.case, task.variant
    try:
        configs, default = list(dict.fromkeys(variant.configs(case))), task.default
        for field, config in (("default", default), *(("promising", config) for config in variant.promising(case))):
            if type(config) is not variant.config:
                raise ValueError(f"{field}: {config!r}: expected a {getattr(variant.config, '__name__', None)}")
        reason = variant.invalid(case, default) if configs else None
        if reason is not None:
            raise ValueError(f"default: {reason}")
    except Exception as error:  # an operator's own code may fail in any way
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        where = f"{task.op.name} {variant.name}: {case.label}"
        raise ValueError(f"{where}: {kind}{' '.join(str(error).split())}") from error
    if not configs:
        raise ValueError(f"{task.op.name} {variant.name}: no valid config for {case.label}{_why(variant, case)}")
    return configs


def _why(variant: Variant, case: Case) -> str:
    """Return the knob without a value, else the most frequent reason that `invalid` gives."""
    assert variant.config is not None
    space = variant.space(case)
    for knob, offered in space.items():
        if not offered:
            return f": {knob}: no value"
    configs = (variant.config(**dict(zip(space, values, strict=True))) for values in itertools.product(*space.values()))
    reasons = Counter(variant.invalid(case, config) for config in configs)
    ((reason, count),) = reasons.most_common(1)
    return f": {reason} ({count} of {reasons.total()} configs)"
