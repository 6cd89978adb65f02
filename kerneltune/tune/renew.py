"""Time configs that other code chose against their default, and store the faster."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from kerneltune import cache, device
from kerneltune.cache import CacheEntry
from kerneltune.plan import Plan
from kerneltune.progress import Progress
from kerneltune.search.task import Run, Task, knobs_of, stamp
from kerneltune.spec import Op
from kerneltune.tune.gpu_worker import WorkerCrashedError
from kerneltune.tune.session import TuningResult, TuningSession

_OF_THE_SEARCH = ("trials", "before")
"""Fields of the evidence about the search, which a new timing keeps."""


def renew(plan: Plan, configs: Sequence[CacheEntry], progress: Progress) -> list[tuple[CacheEntry, TuningResult]]:
    """Time configs of this GPU against their default in interleaved rounds, and store the faster with new evidence.

    Return each timed entry with its result, whose `problem` is the reason why the config no longer runs. After `search.budget_s`
    seconds no further config is timed.
    """
    renewals, options = list[tuple[CacheEntry, TuningResult]](), plan.options
    until = time.monotonic() + (math.inf if options.search.budget_s is None else options.search.budget_s)
    work = [(entry, _runs_of(plan.ops[entry.op], entry)) for entry in configs]
    progress.stage("time stale configs", len(work))
    with TuningSession(options) as session:
        for number, (entry, runs) in enumerate(work, start=1):
            if time.monotonic() >= until:
                break
            session.queue.look_ahead(run for _, later in work[number:] if not isinstance(later, str) for run in later)
            done = TuningResult(problem=runs) if isinstance(runs, str) else _renewed(session, runs, entry)
            if done.entry is not None:
                cache.store(device.current().slug, done.entry, options.configs)
            renewals.append((entry, done))
            progress.advance(entry.key.label)
    return renewals


def _runs_of(op: Op, entry: CacheEntry) -> list[Run] | str:
    """Return an entry's task with its config and, if it differs, with the default; or the reason why the config cannot run."""
    case = entry.case
    try:
        variant = op.variant(entry.variant)
        task, config = Task(op, case, variant, entry.policy), variant.config_from(entry.config)
        reason = variant.unsupported(case) or variant.valid(case, config)
        return reason or [Run(task, one) for one in dict.fromkeys([config, task.default])]
    except Exception as error:  # an operator's own code may fail in any way on an old entry
        return " ".join(str(error).split()) or type(error).__name__


def _renewed(session: TuningSession, runs: Sequence[Run], entry: CacheEntry) -> TuningResult:
    """Return an entry with the faster of its config and the default, and with new evidence; or why its config does not run."""
    task, configs = runs[0].task, [run.config for run in runs]
    try:
        with session.tuner(task) as tuner:
            begun = [tuner.begin(config) for config in configs]
            tuner.prepare()
            session.queue.fill()
            for one in begun:
                one.result()
            measured = tuner.measure_again(configs)
            if measured[0].time_us is None:
                return TuningResult(problem=f"{measured[0].status}: {measured[0].reason}")
            timed = [config for config, one in zip(configs, measured, strict=True) if one.time_us is not None]
            best, evidence = tuner.run_final(timed, configs[-1])
    except (WorkerCrashedError, ValueError) as error:
        return TuningResult(problem=f"{'' if isinstance(error, ValueError) else 'crashed: '}{error}")
    finally:
        session.queue.forget(task)
    evidence |= stamp(task.variant)
    if best == configs[0]:
        evidence |= {name: entry.evidence[name] for name in _OF_THE_SEARCH if name in entry.evidence}
    return TuningResult(replace(entry, config=entry.config if best == configs[0] else knobs_of(best), evidence=evidence))
