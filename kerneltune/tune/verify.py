"""Judge cached configs: fresh, stale but good, stale and slower, or invalid."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kerneltune import cache, device
from kerneltune.cache import CacheEntry
from kerneltune.errors import unknown
from kerneltune.run_options import Options, Progress
from kerneltune.search.task import Run, Task, TaskKey, knobs_of
from kerneltune.spec import Config, Op
from kerneltune.tune.candidates import changed, stamp
from kerneltune.tune.gpu_worker import ChildCrashedError
from kerneltune.tune.session import TuningSession

RunFinal = Callable[[Task, Sequence[Config]], tuple[int, dict[str, Any]]]
"""(task, configs) -> (place of the fastest config, evidence). The first config wins ties, the last config is the default."""

_OF_THE_SEARCH = ("trials", "imported", "before")
"""Fields of the evidence about the search, which a new timing keeps."""


@dataclass(frozen=True, slots=True)
class EntryVerdict:
    """The verdict on an entry.

    Attributes:
        status: `fresh`, `stale` where no GPU can tell more, `stale-but-good`, `stale-slower` or `invalid`.
        reason: reason on one line.
        renewed: entry of a timed config: the faster of the config and the default, with new evidence.
    """

    entry: CacheEntry
    status: str
    reason: str = ""
    renewed: CacheEntry | None = None


@dataclass(frozen=True, slots=True)
class _Stale:
    """A stale entry that can still run.

    Attributes:
        task: task of the entry.
        configs: config of the entry, then the default if it differs.
        reason: changes since the entry was stored, on one line.
    """

    task: Task
    configs: tuple[Config, ...]
    reason: str


def _without_timing(op: Op, entry: CacheEntry, is_here: bool) -> EntryVerdict | _Stale:
    """Judge an entry without timing it. `is_here`: this machine has the GPU of the entry."""
    case = entry.as_case
    try:
        variant = op.variant(entry.variant)
        task, config = Task(op, case, variant, entry.policy), variant.config_from(entry.config)
        reason = variant.unsupported(case) or variant.valid(case, config)
        configs = tuple(dict.fromkeys([config, task.default]))
    except Exception as error:  # an operator's own code may fail in any way on an old entry
        return EntryVerdict(entry, "invalid", " ".join(str(error).split()) or type(error).__name__)
    if reason is not None:
        return EntryVerdict(entry, "invalid", reason)
    stale = changed(variant, entry, is_here)
    return _Stale(task, configs, stale) if stale else EntryVerdict(entry, "fresh")


def verify(op: Op, entry: CacheEntry, final: RunFinal | None) -> EntryVerdict:
    """Judge an entry of an operator. `final` times it against the default; None on a machine without the entry's GPU."""
    found = _without_timing(op, entry, final is not None)
    if isinstance(found, EntryVerdict):
        return found
    if final is None:
        return EntryVerdict(entry, "stale", found.reason)
    try:
        best, measured = final(found.task, found.configs)
    except ValueError as error:
        return EntryVerdict(entry, "invalid", str(error))
    evidence = measured | stamp(found.task.variant)
    if best:
        renewed = replace(entry, config=knobs_of(found.task.default), evidence=evidence)
        return EntryVerdict(entry, "stale-slower", f"{found.reason}: the default is faster", renewed)
    kept = {name: entry.evidence[name] for name in _OF_THE_SEARCH if name in entry.evidence}
    return EntryVerdict(entry, "stale-but-good", found.reason, replace(entry, evidence={**evidence, **kept}))


def verify_cache(
    ops: Mapping[str, Op],
    entries: Sequence[tuple[str, str, CacheEntry]],
    options: Options,
    progress: Progress,
    renew: bool = False,
) -> list[tuple[str, str, EntryVerdict]]:
    """Judge cached entries, each given as (device, operator, entry), and time stale entries of this machine's GPU again.

    Args:
        ops: operators by name.
        entries: entries in the order in which to judge them.
        options: after `budget_s` seconds no stale entry is timed; None for no limit.
        progress: observer that is told every entry.
        renew: store the faster of a stale config and the default, with new evidence.

    Raises:
        ValueError: an operator does not exist, or a folder cannot be written.
    """
    here = device.current()
    for _, name, _ in entries:
        if name not in ops:
            raise unknown("op", name, ops)
    found = []
    progress.stage("verify", len(entries))
    with ExitStack() as stack:
        session = stack.enter_context(TuningSession(options)) if any(slug == here.slug for slug, *_ in entries) else None
        over: set[TaskKey] = set()
        if session is not None:
            session.look_ahead(_stale(entries, ops, over))
        began = time.monotonic()
        for slug, name, entry in entries:
            in_time = options.budget_s is None or time.monotonic() - began < options.budget_s
            final = partial(_final, session, over) if session is not None and slug == here.slug and in_time else None
            verdict = verify(ops[name], entry, final)
            if renew and verdict.renewed is not None:
                cache.store(name, slug, verdict.renewed, options.configs)
            found.append((slug, name, verdict))
            progress.advance(f"{name} {entry.variant} {entry.case} {entry.dtype} {entry.quant}")
    return found


def _stale(entries: Iterable[tuple[str, str, CacheEntry]], ops: Mapping[str, Op], over: Collection[TaskKey]) -> Iterator[Run]:
    """Yield the configs that finals of this GPU's stale entries need, except for finals that are over."""
    for slug, name, entry in entries:
        found = _without_timing(ops[name], entry, is_here=True) if slug == device.current().slug else None
        if isinstance(found, _Stale) and found.task.key not in over:
            yield from ((found.task, config) for config in found.configs)


def _final(session: TuningSession, over: set[TaskKey], task: Task, configs: Sequence[Config]) -> tuple[int, dict[str, Any]]:
    """Time configs as a `RunFinal` does.

    Raises:
        ValueError: the first config is wrong now, or cannot be timed.
    """
    tuner = session.tuner(task)
    over.add(task.key)
    try:
        with tuner:
            begun = [tuner.begin(config) for config in configs]
            tuner.prepare()
            session.queue.fill()
            for one in begun:
                one.pending.result()
            trials = tuner.trials(configs)
            if trials[0].time_us is None:
                raise ValueError(f"{trials[0].status}: {trials[0].detail}")
            timed = [config for config, trial in zip(configs, trials, strict=True) if trial.time_us is not None]
            best, evidence = tuner.run_final(timed, configs[-1])
    except ChildCrashedError as error:
        raise ValueError(f"crashed: {error}") from error
    session.close(tuner)
    return configs.index(best), evidence
