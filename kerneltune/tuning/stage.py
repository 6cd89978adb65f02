"""The tuning stage of a sweep: which cases lack a config or have a stale one, and their search on the GPU of this process.

Decides nothing about configs and prints nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kerneltune import cache, device, sweep
from kerneltune.measuring.compare import CEILING_OP, ceiling_case, commit
from kerneltune.measuring.memory import release_memory
from kerneltune.plan import Options, Progress, Selection, wanted_variants
from kerneltune.spec import Case, Op
from kerneltune.tuning.cached import cached, changed
from kerneltune.tuning.candidates import checked_space, takes, widened
from kerneltune.tuning.machines import Machines, Usage, keep_usage
from kerneltune.tuning.task import TuningResult, TuningTask, perform, search_of, tell


@dataclass(frozen=True, slots=True)
class TuningSummary:
    """What a run did.

    Attributes:
        device_slug: the GPU model, as its folder is called, that it is for.
        entries: stored in the config cache.
        searched: cases of a variant that were to be searched, or their spaces measured.
        failed: those of them that ended with a problem.
        kept: cases of a variant of which the cache's config was kept as it is.
    """

    device_slug: str
    entries: list[cache.CacheEntry]
    searched: int = 0
    failed: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """What is to be searched, and how many configs of the cache are left as they are."""

    works: list[TuningTask]
    kept: int


def tune_entries(
    ops: Mapping[str, Op], entries: Sequence[sweep.SweepCase], selection: Selection, options: Options, progress: Progress
) -> TuningSummary:
    """Search what the cache lacks; the ceiling of every case as well.

    Raises:
        ValueError: a GPU that nothing can be compiled for ahead of time, a space that makes no sense, or a broken config file.
    """
    here = device.current()
    wanted = wanted_works(ops, entries, selection, options, here.slug, progress)
    works = wanted.works
    if not works:
        return TuningSummary(here.slug, [], kept=wanted.kept)
    release_memory()  # the measuring process needs what this one no longer does
    finished: list[tuple[TuningTask, TuningResult]] = []
    progress.stage("measure spaces" if options.exhaustive else "tune", len(works))
    with Machines(options) as machines:
        for number, work in enumerate(works, start=1):
            done = perform(machines, work, works[number:], selection.family, options)
            finished.append((work, done))
            tell(progress, work, done)
        whole = machines.usage
    return ended(finished, whole, here.slug, wanted.kept, selection, options, progress)


def ended(
    finished: Sequence[tuple[TuningTask, TuningResult]],
    whole: Usage,
    device_slug: str,
    kept: int,
    selection: Selection,
    options: Options,
    progress: Progress,
) -> TuningSummary:
    """Say and keep how busy the GPUs were; what became of it all."""
    if whole.evaluations:
        progress.note(whole.text)
        _keep_usage(finished, whole, device_slug, selection, options)
    cache.clear()
    stored = [done.entry for _, done in finished if done.entry is not None]
    return TuningSummary(device_slug, stored, len(finished), sum(bool(done.problem) for _, done in finished), kept)


def _keep_usage(
    finished: Sequence[tuple[TuningTask, TuningResult]], whole: Usage, device_slug: str, selection: Selection, options: Options
) -> None:
    """Add a run to the file of runs of a GPU model."""
    searches = [(work.identity(options.policy), done.usage) for work, done in finished if done.usage is not None]
    path = sweep.results_root(options.results) / "runs" / "searches" / f"{device_slug}.jsonl"
    keep_usage(path, whole, searches, family=sweep.family_name(selection.family), commit=commit())


def wanted_works(
    ops: Mapping[str, Op],
    entries: Sequence[sweep.SweepCase],
    selection: Selection,
    options: Options,
    device_slug: str,
    progress: Progress,
) -> TuningPlan:
    """List the cases that the cache has no config for, or also a stale config where those are asked for.

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
        wanted = TuningPlan(works, 0)
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
        wanted = TuningPlan(chosen, len(works) - len(chosen))
    for work in wanted.works:
        checked_space(work.op, work.case, widened(work.variant, options.knobs))
    return wanted


def _state(work: TuningTask, options: Options, device_slug: str) -> str:
    """Return the state of the cache's config for it: `lacking`, `stale` or `fresh`."""
    found = cached(work.op, work.case, work.variant, options.policy, options.configs, device_slug)
    if found is None:
        return "lacking"
    return "stale" if changed(work.variant, found[0], device_slug == device.current().slug) else "fresh"


def _works(ops: Mapping[str, Op], entries: Sequence[sweep.SweepCase], selection: Selection, options: Options) -> list[TuningTask]:
    """Return the ceiling of every case first, then the cases as calls look them up, bf16 before the other types.

    No ceilings, and every case as it is, where whole spaces are measured.

    Raises:
        ValueError: a variant that cannot say whether it takes a case.
    """
    work: dict[tuple[str, str, Case], TuningTask] = {}
    ceiling = ops.get(CEILING_OP)
    for entry in sorted(entries, key=lambda e: e.case.dtype != "bfloat16"):
        op = ops[entry.op]
        case = entry.case if options.exhaustive else op.called(entry.case)
        for variant in wanted_variants(op, selection, options):
            if variant.config is not None and takes(op, case, variant):
                work[op.name, variant.name, case] = TuningTask(op, case, variant)
        if ceiling is not None and not options.exhaustive:
            stream_case = ceiling_case(op, case)
            work[ceiling.name, ceiling.variants[0].name, stream_case] = TuningTask(ceiling, stream_case, ceiling.variants[0])
    return list(work.values())
