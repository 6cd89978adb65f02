"""Tune a plan: the entry of every search, on the GPU of this process or on several GPUs of this host."""

import math

from kerneltune import cache, device
from kerneltune.run_options import Plan, Progress, require_gpu
from kerneltune.tune.candidates import widened
from kerneltune.tune.fleet import Fleet, visible_gpus
from kerneltune.tune.tune_run import TuningSummary, missing, tune_here


def run_tune(plan: Plan, progress: Progress, until: float = math.inf) -> TuningSummary:
    """Search the selected bench cases, or measure their whole spaces.

    until: as of `tune_here`; several GPUs perform all tasks.
    """
    for op in dict.fromkeys(entry.op for entry in plan.cases() if plan.options.knobs):
        for variant in plan.variants(op):
            if variant.config is not None:
                widened(variant, plan.options.knobs)  # raises for an unknown knob
    gpus = visible_gpus(plan.options.gpus) if plan.options.gpus else []
    require_gpu("tune")
    slug = device.current().slug
    tasks, kept = missing(plan, progress)
    if not tasks:
        return TuningSummary(slug, [], kept=kept)
    finished = Fleet(gpus, plan.options, progress).run(tasks) if gpus else tune_here(plan, tasks, progress, until)
    cache.clear()
    stored = [done.entry for _, done in finished if done.entry is not None]
    return TuningSummary(slug, stored, len(finished), sum(bool(done.problem) for _, done in finished), kept)
