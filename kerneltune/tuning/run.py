"""`kerneltune tune`: the cases that lack a config, searched on the GPU of this process or spread over several.

Decides nothing about configs and prints nothing.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from kerneltune import device, sweep
from kerneltune.plan import Options, Progress, Selection, load_plan, wanted_variants
from kerneltune.spec import Op
from kerneltune.tuning.candidates import widened
from kerneltune.tuning.cluster import RayWorkers
from kerneltune.tuning.fleet import Fleet
from kerneltune.tuning.local import LocalWorkers, visible_gpus
from kerneltune.tuning.stage import TuningPlan, TuningSummary, ended, tune_entries, wanted_works


def run_tune(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> TuningSummary:
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


def _tune_on_many(
    ops: Mapping[str, Op], entries: Sequence[sweep.SweepCase], selection: Selection, options: Options, progress: Progress
) -> TuningSummary:
    """Tune on several GPUs at once.

    Raises:
        ValueError: there are none, or no worker on one of them stays alive.
    """

    @lru_cache
    def wanted(device_slug: str) -> TuningPlan:
        return wanted_works(ops, entries, selection, options, device_slug, progress)

    here = device.current()
    if here.is_gpu and not wanted(here.slug).works:
        return TuningSummary(here.slug, [], kept=wanted(here.slug).kept)
    with make_workers(selection.family, options) as workers:
        fleet = Fleet(workers, options, progress)
        whole = fleet.run(lambda device_slug: wanted(device_slug).works)
    return ended(fleet.finished, whole, fleet.slug, wanted(fleet.slug).kept, selection, options, progress)


def make_workers(family: str, options: Options) -> LocalWorkers | RayWorkers:
    """Make one worker for every GPU that the options name."""
    if not options.ray:
        return LocalWorkers(family, options, visible_gpus(options.gpus))
    if options.gpus in ("", "all"):
        return RayWorkers(family, options)
    if not options.gpus.isdecimal() or not int(options.gpus):
        raise ValueError(f"gpus: {options.gpus!r}: expected all or a number of GPUs")
    return RayWorkers(family, options, int(options.gpus))


def _check_knobs(ops: Mapping[str, Op], entries: Sequence[sweep.SweepCase], selection: Selection, options: Options) -> None:
    for name in dict.fromkeys(entry.op for entry in entries):
        for variant in wanted_variants(ops[name], selection, options):
            if variant.config is not None:
                widened(variant, options.knobs)
