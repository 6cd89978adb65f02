"""What a search chooses from, what it begins with, and what of it is likely to be refused: from what is stored and cached.

Measures nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from kerneltune.search.refusals import REFUSED, chances
from kerneltune.search.trials import TrialStore, knobs_of
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tuning.cached import fitting
from kerneltune.tuning.knobs import checked_space

_NEIGHBOURS = 3
_TRANSFERRED = 16
TOLD = 2000
"""Refusals of other sizes that are asked, the newest: more take longer than they are worth."""


def neighbour_dtype(op: Op, case: Case) -> Case | None:
    """The same case in the other 16-bit type, whose ranking this one may start from."""
    other = {"bfloat16": "float16", "float16": "bfloat16"}.get(case.dtype)
    return Case(case.name, case.axes, other, case.quant, case.options) if other in op.dtypes and other else None


def candidates(op: Op, case: Case, variant: Variant, policy: str, store: TrialStore | None = None) -> list[Config]:
    """Default first, then the space; only the neighbour's best where the other 16-bit type was searched before.

    store: of what was searched before; without it all of the space is a candidate.

    Raises:
        ValueError: the space has no valid config for the case, or says what makes no sense.
    """
    space = checked_space(op, case, variant)
    neighbour = neighbour_dtype(op, case)
    if store is not None and neighbour is not None:
        ranked = store.ranked(op, neighbour, variant, policy)
        if len(ranked) > max(_TRANSFERRED, len(store.ranked(op, case, variant, policy))):
            space = [config for values in ranked[:_TRANSFERRED] if (config := variant.config_from(values)) in set(space)]
    default = variant.default_config(case)
    return [default, *(config for config in space if config != default)]


def starting_points(op: Op, case: Case, variant: Variant, policy: str, pool: Sequence[Config], root: Path | None) -> list[Config]:
    """The default, what is promising, then what the cache holds for this case and the nearest: sizes, options, 16-bit type."""
    near = fitting(op, case, variant, policy, root)
    nearest = [config for _, config in sorted(near, key=lambda found: found[0].distance)[:_NEIGHBOURS]]
    offered = set(pool)
    found = [config for config in (*variant.promising(case), *nearest) if config in offered]
    return list(dict.fromkeys([pool[0], *found]))


def chances_of(op: Op, case: Case, variant: Variant, store: TrialStore, pool: Sequence[Config]) -> dict[Config, float] | None:
    """How likely each config is not to be refused, by what was stored of other sizes; None where there is nothing of these."""
    told = [
        (axes, knobs, trial.status in REFUSED)
        for axes, knobs, trial in store.of_other_sizes(op, case, variant)[-TOLD:]
        if list(knobs) == list(knobs_of(pool[0]))
    ]
    found = chances(case.axes, [knobs_of(config) for config in pool], told)
    return None if found is None else dict(zip(pool, map(float, found), strict=True))
