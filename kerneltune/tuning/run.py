"""The tuning stage of a sweep: which cases lack a config or have a stale one, and the processes that find out.

Decides nothing about configs and prints nothing.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from kerneltune import cache, device, sweep
from kerneltune.errors import unknown
from kerneltune.measuring.compare import commit
from kerneltune.measuring.memory import release_memory
from kerneltune.plan import Options, Progress, Selection, load_plan, wanted_variants
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tuning.cached import cached
from kerneltune.tuning.cluster import RayWorkers
from kerneltune.tuning.fleet import Fleet
from kerneltune.tuning.isolated import ChildLostError
from kerneltune.tuning.knobs import checked_space, takes, widened
from kerneltune.tuning.local import LocalWorkers, visible_gpus
from kerneltune.tuning.machines import Machines
from kerneltune.tuning.task import Done, Work, perform, search_of, tell
from kerneltune.tuning.usage import Usage, keep
from kerneltune.tuning.verify import Verdict, changed, verify

CEILING_OP = "stream"


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a run did.

    Attributes:
        device_slug: the GPU model, as its folder is called, that it is for.
        entries: stored in the config cache.
        searched: cases of a variant that were to be searched, or their spaces measured.
        failed: those of them that ended with a problem.
        kept: cases of a variant of which the cache's config was kept as it is.
    """

    device_slug: str
    entries: list[cache.Entry]
    searched: int = 0
    failed: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be searched, and how many configs of the cache are left as they are."""

    works: list[Work]
    kept: int


def run_tune(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> Tuned:
    """Search the selected bench cases, or measure their whole spaces.

    Raises:
        ValueError: no GPU, bad input, a space that makes no sense, or a folder that cannot be written.
    """
    plan = load_plan(ops, selection)
    entries = [entry for entry in plan.bench if selection.takes(entry)]
    if options.knobs:
        _check_knobs(ops, entries, selection, options)
    if options.ray or options.gpus:
        return _tune_on_many(ops, entries, selection, options, progress)
    if not device.current().is_gpu:
        raise ValueError("tune needs a GPU: in the interpreter nothing can be timed")
    return tune_entries(ops, entries, selection, options, progress)


def tune_entries(
    ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options, progress: Progress
) -> Tuned:
    """Search what the cache lacks; the ceiling of every case as well.

    Raises:
        ValueError: a GPU that nothing can be compiled for ahead of time, a space that makes no sense, or a broken config file.
    """
    here = device.current()
    wanted = _wanted(ops, entries, selection, options, here.slug, progress)
    works = wanted.works
    if not works:
        return Tuned(here.slug, [], kept=wanted.kept)
    release_memory()  # the measuring process needs what this one no longer does
    finished: list[tuple[Work, Done]] = []
    progress.stage("measure spaces" if options.exhaustive else "tune", len(works))
    with Machines(options) as machines:
        for number, work in enumerate(works, start=1):
            done = perform(machines, work, works[number:], selection.family, options)
            finished.append((work, done))
            tell(progress, work, done)
        whole = machines.usage
    return _ended(finished, whole, here.slug, wanted.kept, selection, options, progress)


def _tune_on_many(
    ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options, progress: Progress
) -> Tuned:
    """The same on several GPUs at once.

    Raises:
        ValueError: there are none, or no worker on one of them stays alive.
    """

    @lru_cache
    def wanted(device_slug: str) -> _Wanted:
        return _wanted(ops, entries, selection, options, device_slug, progress)

    here = device.current()
    if here.is_gpu and not wanted(here.slug).works:
        return Tuned(here.slug, [], kept=wanted(here.slug).kept)
    with _workers(selection.family, options) as workers:
        fleet = Fleet(workers, options, progress)
        whole = fleet.run(lambda device_slug: wanted(device_slug).works)
    return _ended(fleet.finished, whole, fleet.slug, wanted(fleet.slug).kept, selection, options, progress)


def _workers(family: str, options: Options) -> LocalWorkers | RayWorkers:
    """One for every GPU that the options name."""
    if not options.ray:
        return LocalWorkers(family, options, visible_gpus(options.gpus))
    if options.gpus in ("", "all"):
        return RayWorkers(family, options)
    if not options.gpus.isdecimal() or not int(options.gpus):
        raise ValueError(f"gpus: {options.gpus!r}: expected all or a number of GPUs")
    return RayWorkers(family, options, int(options.gpus))


def _ended(
    finished: Sequence[tuple[Work, Done]],
    whole: Usage,
    device_slug: str,
    kept: int,
    selection: Selection,
    options: Options,
    progress: Progress,
) -> Tuned:
    """Say and keep how busy the GPUs were; what became of it all."""
    if whole.evaluations:
        progress.note(whole.text)
        _keep_usage(finished, whole, device_slug, selection, options)
    cache.clear()
    stored = [done.entry for _, done in finished if done.entry is not None]
    return Tuned(device_slug, stored, len(finished), sum(bool(done.problem) for _, done in finished), kept)


def _keep_usage(
    finished: Sequence[tuple[Work, Done]], whole: Usage, device_slug: str, selection: Selection, options: Options
) -> None:
    """Add a run to the file of runs of a GPU model."""
    searches = [(work.identity(options.policy), done.usage) for work, done in finished if done.usage is not None]
    path = sweep.results_root(options.results) / "runs" / "searches" / f"{device_slug}.jsonl"
    keep(path, whole, searches, family=selection.family, commit=commit())


def verify_cache(
    ops: Mapping[str, Op],
    entries: Sequence[tuple[str, str, cache.Entry]],
    options: Options,
    progress: Progress,
    renew: bool = False,
) -> list[tuple[str, str, Verdict]]:
    """Judge cached entries, given as (device, operator, entry); those of this machine's GPU that are stale are timed again.

    renew: store what is stale but good with the evidence of that.

    Raises:
        ValueError: an operator that does not exist, or a folder that cannot be written.
    """
    here = device.current()
    for _, name, _ in entries:
        if name not in ops:
            raise unknown("op", name, ops)
    found = []
    progress.stage("verify", len(entries))
    with ExitStack() as stack:
        machines = stack.enter_context(Machines(options)) if any(slug == here.slug for slug, *_ in entries) else None
        for slug, name, entry in entries:
            duel = partial(_duel, machines, entry.policy) if machines is not None and slug == here.slug else None
            verdict = verify(ops[name], entry, duel)
            if renew and verdict.renewed is not None:
                cache.store(name, slug, verdict.renewed, options.configs)
            found.append((slug, name, verdict))
            progress.advance(f"{name} {entry.variant} {entry.case} {entry.dtype} {entry.quant}")
    return found


def _duel(
    machines: Machines, policy: str, op: Op, case: Case, variant: Variant, configs: Sequence[Config]
) -> tuple[int, dict[str, Any]]:
    """Which config wins, the first unless another is surely faster, and the evidence; the last is the default.

    Raises:
        ValueError: the first is wrong now, or cannot be timed.
    """
    try:
        with machines.tuner(op, case, variant, policy) as tuner:
            trials = tuner.trials(configs)
            if trials[0].time_us is None:
                raise ValueError(f"{trials[0].status}: {trials[0].detail}")
            timed = [config for config, trial in zip(configs, trials, strict=True) if trial.time_us is not None]
            best, evidence = tuner.duel(timed, configs[-1])
    except ChildLostError as error:
        raise ValueError(f"lost: {error}") from error
    return configs.index(best), evidence


def _check_knobs(ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options) -> None:
    for name in dict.fromkeys(entry.op for entry in entries):
        for variant in wanted_variants(ops[name], selection, options):
            if variant.config is not None:
                widened(variant, options.knobs)


def _wanted(
    ops: Mapping[str, Op],
    entries: Sequence[sweep.Entry],
    selection: Selection,
    options: Options,
    device_slug: str,
    progress: Progress,
) -> _Wanted:
    """What the cache has no config for, or a stale one where those are asked for too.

    Before anything is measured or written all spaces are held to make sense and all config files to be whole.

    Raises:
        ValueError: one does not, or is not.
    """
    search_of(options)
    works = _works(ops, entries, selection, options)
    files = {cache.path_of(work.op.name, device_slug, options.configs) for work in works}
    for path in sorted(files if not options.exhaustive else ()):
        if path.exists():
            cache.load_strict(path)
    if options.force or options.exhaustive:
        wanted = _Wanted(works, 0)
    else:
        states = [_state(work, options, device_slug) for work in works]
        stale = states.count("stale")
        if stale and not options.stale:
            progress.note(
                f"{stale} of {len(works) - states.count('lacking')} cached configs are stale: kept (`tune --stale` searches "
                "again, `cache verify --write` holds them to the clock)"
            )
        searched = ("lacking", "stale") if options.stale else ("lacking",)
        chosen = [work for work, state in zip(works, states, strict=True) if state in searched]
        wanted = _Wanted(chosen, len(works) - len(chosen))
    for work in wanted.works:
        checked_space(work.op, work.case, widened(work.variant, options.knobs))
    return wanted


def _state(work: Work, options: Options, device_slug: str) -> str:
    """Of the cache's config for it: `lacking`, `stale` or `fresh`."""
    found = cached(work.op, work.case, work.variant, options.policy, options.configs, device_slug)
    if found is None:
        return "lacking"
    return "stale" if changed(work.variant, found[0], device_slug == device.current().slug) else "fresh"


def _works(ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options) -> list[Work]:
    """Return the ceiling of every case first, then the cases as calls look them up, bf16 before the other types.

    No ceilings, and every case as it is, where whole spaces are measured.

    Raises:
        ValueError: a variant that cannot say whether it takes a case.
    """
    work: dict[tuple[str, str, Case], Work] = {}
    ceiling = ops.get(CEILING_OP)
    for entry in sorted(entries, key=lambda e: e.case.dtype != "bfloat16"):
        op = ops[entry.op]
        case = entry.case if options.exhaustive else op.called(entry.case)
        for variant in wanted_variants(op, selection, options):
            if variant.config is not None and takes(op, case, variant):
                work[op.name, variant.name, case] = Work(op, case, variant)
        if ceiling is not None and not options.exhaustive:
            stream_case = ceiling_case(op, case)
            work[ceiling.name, ceiling.variants[0].name, stream_case] = Work(ceiling, stream_case, ceiling.variants[0])
    return list(work.values())


def ceiling_case(op: Op, case: Case) -> Case:
    """The case of the streaming operator that moves as many bytes."""
    traffic = op.traffic(case)
    return Case(f"{traffic.read}+{traffic.write}", (("read", traffic.read), ("write", traffic.write)), "int32")
