"""Compile configs for several targets on the CPU alone: `inspect` shows the rows, the static gate judges them."""

import os
from collections.abc import Sequence

from kerneltune import device
from kerneltune.inspection.static import StaticRow, Survey
from kerneltune.measuring.assembly import TARGETS, Kernel, occupancy_of
from kerneltune.measuring.compiler import CompilePool, CompileResult
from kerneltune.progress import Progress
from kerneltune.task import Run, knobs_of
from kerneltune.wording import counted

_MANY = 40
"""Number of compilations above which their number and time are said first."""
_COMPILE_S = 1.0
"""Seconds of a compilation in one process: 0.5 to 1 for RMSNorm and casts, 1 to 2 for products (2 busy cores, 2026-11-27)."""


def survey(runs: Sequence[Run], targets: Sequence[str], workers: int | None, progress: Progress) -> Survey:
    """Compile every config for every target; a config that cannot be compiled is a row with its error.

    Equal kernels of different configs come from Triton's disk cache.
    """
    rows = []
    processes = min(len(runs), workers or len(os.sched_getaffinity(0)))
    if (count := len(runs) * len(targets)) > _MANY:
        kinds = f"{counted(len(runs), 'config')} for {counted(len(targets), 'target')}"
        about_s = count * _COMPILE_S / processes
        progress.note(f"{count} compilations, {kinds}: about {about_s:.0f} s on {processes} cores, less what Triton has cached")
    progress.stage("compile", count)
    for target in targets:
        with CompilePool(TARGETS[target], processes) as pool:
            for run, compiled in zip(runs, pool.compile(runs), strict=True):
                rows.append(_row(run, target, compiled))
                progress.advance(f"{target} {run.task.op.name} {run.task.variant.name} {run.task.case.name}")
    return Survey(device.versions()["triton"], tuple(rows))


def _row(run: Run, target: str, compiled: CompileResult) -> StaticRow:
    """Make a row; merge launches of a kernel with equal resources, so that a kernel launched once per tensor counts once."""
    task, config = run
    kernels = tuple(dict.fromkeys(compiled.kernels))
    return StaticRow(
        task.op.name,
        task.variant.name,
        f"{task.case.name} {task.case.label}",
        task.policy,
        target,
        knobs_of(config),
        () if compiled.error else kernels,
        compiled.error or _unfit(kernels, target, getattr(config, "ctas", 0)),
    )


def _unfit(kernels: Sequence[Kernel], target: str, ctas: int) -> str:
    """Return the reason why a compiled kernel cannot be launched; empty if it can.

    ctas: programs of a cooperative grid that an SM must hold at once.
    """
    for kernel in kernels:
        held = occupancy_of(kernel, target)
        if not held.programs:
            return f"{kernel.name}: no program fits an SM: {held.limiter}"
        if kernel.cooperative and held.programs < ctas:
            return f"{kernel.name}: {held.programs} programs fit an SM, not {ctas}: {held.limiter}"
    return ""
