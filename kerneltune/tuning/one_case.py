"""The search for the best config of a variant on a case, and its entry in the cache.

compile -> drop what spills or does not fit -> check on poisoned outputs -> screen -> paired final against the incumbent. The
incumbent is what a call without `config=` ran with before; it stays unless the interval says that the winner is faster. What to
try is decided in search, and measured by a tuner.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kerneltune import cache, device
from kerneltune.search.loop import Search, explore, opening, times_of
from kerneltune.search.task import knobs_of
from kerneltune.search.trials import Evaluation
from kerneltune.spec import Config
from kerneltune.tuning.bench import SCREEN_SAMPLES
from kerneltune.tuning.cached import looked_up, stamp
from kerneltune.tuning.candidates import candidates, checked_space, feasibility_of, starting_points
from kerneltune.tuning.isolated import ChildCrashedError
from kerneltune.tuning.tuner import Tuner

_FINALISTS = 4
_FINAL_MARGIN = 1.04
_AHEAD = 256
"""Configs of a later case to compile; there may be nothing else to do while large inputs are made and a paired final runs."""


class NothingPassedError(Exception):
    """A search in which no config was correct and timed."""


def tune(
    tuner: Tuner,
    search: Search,
    root: Path | None,
    on_trial: Callable[[Config, Evaluation], None] = lambda _config, _trial: None,
) -> cache.CacheEntry:
    """Search one case and store the best config.

    Args:
        tuner: of the case.
        search: how much to search.
        root: the configs folder, None for the usual one.
        on_trial: told every new evaluation.

    Returns:
        The entry that is now in the cache.

    Raises:
        NothingPassedError: there is no config to store.
        ChildCrashedError: the measuring process crashed over every finalist, or stopped.
    """
    with tuner:
        pool = _pool(tuner)
        first, feasibility = starting_points(tuner.task, pool, root), feasibility_of(tuner.task, tuner.store, pool)
        explored = _explored(tuner, pool, first, search, on_trial, feasibility)
        times = times_of(explored)
        before = looked_up(tuner.task, root)
        if before.config not in times and before.config not in explored:  # the incumbent is judged, whatever the search left out
            begun = tuner.begin(before.config)
            if not begun.refused():
                begun.measure()
            trial = begun.result()
            times |= {before.config: trial.time_us} if trial.time_us is not None else {}
        return _decide(tuner, before, times, explored, root)


def measure_space(tuner: Tuner, some: Sequence[Config] | None = None) -> dict[Config, Evaluation]:
    """Evaluate configs in random order with three times the samples of a search; decide nothing.

    some: the configs, None for every valid one of the space.

    Raises:
        ValueError: the space has no valid config for the case, or says what makes no sense.
    """
    pool = checked_space(tuner.task) if some is None else list(some)
    tuner.samples = 3 * SCREEN_SAMPLES
    with tuner:
        return _explored(tuner, pool, (), Search(sampler="random"))


def _explored(
    tuner: Tuner,
    pool: Sequence[Config],
    first: Sequence[Config],
    search: Search,
    on_trial: Callable[[Config, Evaluation], None] = lambda _config, _trial: None,
    feasibility: Mapping[Config, float] | None = None,
) -> dict[Config, Evaluation]:
    known = _known(tuner, pool)
    if len(known) < len(pool):
        tuner.prepare()
    pace = tuner.compilers, tuner.meanwhile
    return explore(pool, first, search, tuner.begin, on_trial, known, *pace, feasibility, tuner.ready)


def first_asked(tuner: Tuner, search: Search, root: Path | None) -> Iterator[tuple[Tuner, Config]]:
    """Yield what the search of a case would try first now; nothing where some of it was tried before.

    Raises:
        ValueError: the space has no valid config for the case, or says what makes no sense.
    """
    pool = _pool(tuner)
    if not _known(tuner, pool):
        feasibility = feasibility_of(tuner.task, tuner.store, pool)
        order = opening(pool, starting_points(tuner.task, pool, root), search, feasibility)
        yield from ((tuner, config) for config in order[: min(_AHEAD, search.trials or _AHEAD)])


def _pool(tuner: Tuner) -> list[Config]:
    return candidates(tuner.task, None if tuner.whole else tuner.store)


def _known(tuner: Tuner, pool: Sequence[Config]) -> dict[Config, Evaluation]:
    return {config: trial for config in pool if (trial := tuner.known(config)) is not None}


def _decide(
    tuner: Tuner, before: cache.Choice, times: dict[Config, float], explored: Mapping[Config, Evaluation], root: Path | None
) -> cache.CacheEntry:
    op, case, variant, default = tuner.task.op, tuner.task.case, tuner.task.variant, tuner.task.default
    standing = list(dict.fromkeys(config for config in (before.config, default) if config in times))
    ranked = sorted(times, key=lambda config: times[config])
    if not ranked:
        raise NothingPassedError(f"{op.name} {variant.name}: no config passed its check for {case.label}")
    close = [config for config in ranked if times[config] <= _FINAL_MARGIN * times[ranked[0]]][:_FINALISTS]
    finalists = list(dict.fromkeys([*(standing or ranked[:1]), *close]))
    if len(finalists) > 1:
        best, evidence = _run_final(tuner, finalists, default)
    else:
        best, evidence = finalists[0], {"time_us": times[finalists[0]], "default_us": times.get(default)}
    if standing[:1] == [before.config]:
        evidence["before"] = before.source
    evidence |= {"trials": len(explored), **stamp(variant)}
    entry = cache.CacheEntry(
        variant=variant.name,
        case=case.name,
        axes=case.axes,
        dtype=case.dtype,
        quant=case.quant,
        options=case.options,
        policy=tuner.task.policy,
        config=knobs_of(best),
        evidence=evidence,
    )
    cache.store(op.name, device.current().slug, entry, root)
    return entry


def _run_final(tuner: Tuner, finalists: Sequence[Config], default: Config) -> tuple[Config, dict[str, Any]]:
    """Run the tuner's final; where it crashes the child, let each challenger meet the incumbent in a final of two.

    What loses that drops out: a challenger beside the incumbent, or the incumbent alone, whom the next then follows.

    Raises:
        ChildCrashedError: all dropped out, or the bench stopped.
    """
    try:
        return tuner.run_final(finalists, default)
    except ChildCrashedError:
        if len(finalists) == 1:
            raise
    incumbent, *challengers = finalists
    try:
        alone = tuner.run_final([incumbent], default)
    except ChildCrashedError:
        return _run_final(tuner, challengers, default)
    finals = []
    for challenger in challengers:
        with suppress(ChildCrashedError):
            finals.append(tuner.run_final([incumbent, challenger], default))
    return max((*finals, alone), key=lambda final: final[1]["speedup"])
