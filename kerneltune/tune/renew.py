"""Time configs that other code chose against their default, and store the faster."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kerneltune import cache, device
from kerneltune.cache import CacheEntry
from kerneltune.plan import Plan
from kerneltune.progress import Progress
from kerneltune.search.task import Run, Task, TaskKey, knobs_of
from kerneltune.spec import Config, Op
from kerneltune.tune.gpu_worker import WorkerCrashedError
from kerneltune.tune.provenance import stamp
from kerneltune.tune.session import TuningSession

StaleConfig = tuple[str, CacheEntry]
"""Name of an operator, and an entry of its cache that other code chose."""
_OF_THE_SEARCH = ("trials", "before")
"""Fields of the evidence about the search, which a new timing keeps."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The result of timing a stale config.

    Attributes:
        is_kept: whether the config is as fast as the default; else the default has replaced the config, or the config failed.
        failure: reason why the config no longer runs, on one line; empty if it runs.
    """

    op: str
    entry: CacheEntry
    is_kept: bool
    failure: str = ""


def renew(plan: Plan, configs: Sequence[StaleConfig], progress: Progress) -> list[Renewal]:
    """Time configs of this GPU against their default in interleaved rounds, and store the faster with new evidence.

    After `search.budget_s` seconds no further config is timed, and the result ends there.
    """
    renewals, ops, options = list[Renewal](), plan.ops, plan.options
    until = time.monotonic() + (math.inf if options.search.budget_s is None else options.search.budget_s)
    progress.stage("time stale configs", len(configs))
    with TuningSession(options) as session:
        over: set[TaskKey] = set()
        session.queue.look_ahead(_later(ops, configs, over))
        for name, entry in configs:
            if time.monotonic() >= until:
                break
            try:
                renewed = _renewed(session, ops[name], entry, over)
            except ValueError as error:
                renewals.append(Renewal(name, entry, False, str(error)))
            else:
                cache.store(name, device.current().slug, renewed, options.configs)
                renewals.append(Renewal(name, entry, renewed.config == entry.config))
            progress.advance(f"{name} {entry.label}")
    return renewals


def _runs_of(op: Op, entry: CacheEntry) -> tuple[Task, list[Config]]:
    """Return the task of an entry, with its config and, if it differs, the default."""
    case = entry.case
    try:
        variant = op.variant(entry.variant)
        task, config = Task(op, case, variant, entry.policy), variant.config_from(entry.config)
        reason = variant.unsupported(case) or variant.valid(case, config)
        configs = list(dict.fromkeys([config, task.default]))
    except Exception as error:  # an operator's own code may fail in any way on an old entry
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    if reason is not None:
        raise ValueError(reason)
    return task, configs


def _later(ops: Mapping[str, Op], configs: Sequence[StaleConfig], over: Collection[TaskKey]) -> Iterator[Run]:
    """Yield the configs to compile for entries whose timing has not begun."""
    for name, entry in configs:
        try:
            task, wanted = _runs_of(ops[name], entry)
        except ValueError:  # reported when its turn comes
            continue
        if task.key not in over:
            yield from (Run(task, config) for config in wanted)


def _renewed(session: TuningSession, op: Op, entry: CacheEntry, over: set[TaskKey]) -> CacheEntry:
    """Return an entry with the faster of its config and the default, and with new evidence."""
    task, configs = _runs_of(op, entry)
    tuner = session.tuner(task)
    over.add(task.key)
    try:
        with tuner:
            begun = [tuner.begin(config) for config in configs]
            tuner.prepare()
            session.queue.fill()
            for one in begun:
                one.result()
            measured = tuner.measure_again(configs)
            if measured[0].time_us is None:
                raise ValueError(f"{measured[0].status}: {measured[0].detail}")
            timed = [config for config, one in zip(configs, measured, strict=True) if one.time_us is not None]
            best, evidence = tuner.run_final(timed, configs[-1])
    except WorkerCrashedError as error:
        raise ValueError(f"crashed: {error}") from error
    session.queue.forget(task)
    evidence |= stamp(task.variant)
    if best == configs[0]:
        kept = {name: entry.evidence[name] for name in _OF_THE_SEARCH if name in entry.evidence}
        return replace(entry, evidence=evidence | kept)
    return replace(entry, config=knobs_of(best), evidence=evidence)
