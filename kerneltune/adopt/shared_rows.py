"""Choose the rows of the table that serving reads: classes share a config where none gains by its own.

All classes of an author's key share a config, unless a paired comparison shows a gain by another config.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerneltune import device
from kerneltune.adopt import ahead
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.folder import KernelCode, LaunchClass, write_json
from kerneltune.adopt.operators import config_of, operator_name
from kerneltune.adopt.replay import make_replay
from kerneltune.adopt.table import Group, ServingRow, ServingTable, TableKernel
from kerneltune.errors import first_line
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.progress import Progress
from kerneltune.records import grouped
from kerneltune.stats import ratio_interval
from kerneltune.task import Task
from kerneltune.tune.gpu_worker import GpuWorker

_MOST_CONFIGS = 4
"""Configs of a row: the chosen config and the configs that a launch may fall back to."""
_LEAST_GAIN = 1.03
"""Least speedup by a class's own config at which the table's key gets the sizes that the author's key omits."""


@dataclass(frozen=True, slots=True)
class TunedClass:
    """Hold a class with the results of its tuning. Stored configs are equal in all classes of a kernel.

    Attributes:
        best: the config that won the final.
        author: the author's choice.
        times: microseconds of each config that is correct.
        cost_us: GPU time of all captured launches.
    """

    launch_class: LaunchClass
    task: Task
    best: StoredConfig
    author: StoredConfig
    times: dict[StoredConfig, float]
    evidence: dict[str, Any]
    cost_us: float


def make_table(tuned: Sequence[TunedClass]) -> ServingTable:
    """Return the table of the tuned classes."""
    kernels = []
    with GpuWorker() as worker:
        for classes in grouped(tuned, lambda of: (operator_name(of.launch_class), of.launch_class.key_names)).values():
            first = classes[0].launch_class
            shared = None if first.is_plain else _shared_config(classes)
            kernel = TableKernel(
                module=first.kernel.module,
                name=first.kernel.name,
                package=first.versions.get("package", ""),
                groups=tuple(_table_groups(classes, worker)),
                shared=() if shared is None else (shared,),
                **{name: getattr(first, name) for name in KernelCode.__struct_fields__},
            )
            kernels.append(kernel)
    here, pythons = device.current(), {tuned_class.launch_class.versions.get("python", "") for tuned_class in tuned}
    versions = {**device.versions(), "driver": here.driver, "python": "".join(pythons) if len(pythons) == 1 else ""}
    return ServingTable(here.slug, versions, tuple(kernels))


def keep_compiled(root: Path, table: ServingTable, tuned: Sequence[TunedClass], progress: Progress) -> None:
    """Keep the compiled kernels that serving will launch beside the table; if that fails, serving compiles them."""
    kernel_of = {(kernel.module, kernel.name, kernel.configs_digest, kernel.key_names): kernel for kernel in table.kernels}
    names, launchers = [], []
    for launch_class in (tuned_class.launch_class for tuned_class in tuned):
        name = launch_class.kernel
        served = kernel_of[name.module, name.name, launch_class.configs_digest, launch_class.key_names]
        group = served.group(launch_class.key_values, launch_class.dtypes)
        chosen = None if group is None else launch_class.candidate(group.nearest(launch_class.sizes).configs[0])
        if chosen is not None and chosen.is_offered:  # the row may be of a class for which the pruning leaves other configs
            try:
                kernel = make_replay(launch_class, root, "meta", 0).compile(chosen.config)
            except Exception as error:  # Triton's compilation errors share no type
                progress.note(f"a compiled kernel of {launch_class.label} is not kept: {first_line(error)}")
                continue
            if getattr(kernel, "hash", ""):  # nothing is compiled in the interpreter
                names.append(ahead.entry_name(kernel.hash))
                if (launcher := ahead.launcher_of(kernel)) not in launchers:
                    launchers.append(launcher)
    from triton import knobs

    try:
        ahead.copy_entries(Path(knobs.cache.dir), root / ahead.FOLDER, names)
        write_json(root / ahead.LAUNCHERS, {"launchers": launchers})
    except OSError as error:
        progress.note(f"compiled kernels are not kept: {error}")


def _table_groups(classes: Sequence[TunedClass], worker: GpuWorker) -> Iterator[Group]:
    """Yield a group of one kernel's classes for each value of the author's key; the worker times configs side by side."""
    for classes_of_key in grouped(classes, lambda tuned: tuned.launch_class.autotuner_key()).values():
        by_sizes = grouped(classes_of_key, lambda tuned: str(sorted(tuned.launch_class.sizes.items())))
        members = [_as_one(alike) if len(alike) > 1 else alike[0] for alike in by_sizes.values()]
        rows = _rows(members, worker)
        split = _differing_sizes(members) if len(rows) == len(members) else ()
        yield Group(members[0].launch_class.key_values, members[0].launch_class.dtypes, split, tuple(rows))


def _rows(members: Sequence[TunedClass], worker: GpuWorker) -> list[ServingRow]:
    """Return a row for each class of a group; a single row if the shared config serves all classes."""
    shared = _shared_config(members)
    if len(members) == 1 or shared is None:
        return [_row(tuned, tuned.best) for tuned in members]
    gains = [_own_gain(tuned, shared, worker) for tuned in members]
    if all(gain is None for gain in gains):
        return [_row(_as_one(members), shared)]
    return [_row(tuned, shared if gain is None else tuned.best, gain) for tuned, gain in zip(members, gains, strict=True)]


def _as_one(alike: Sequence[TunedClass]) -> TunedClass:
    """Join classes of equal sizes, whose launches serving cannot tell apart, such as in place and out of place.

    Its configs are correct in all of them, and slower than the author's in none.
    """
    first = max(alike, key=lambda tuned: tuned.cost_us)
    slower = {config for tuned in alike for config, time in tuned.times.items() if time > tuned.times.get(tuned.author, time)}
    times = {config: first.times[config] for config in _common_configs(alike) if config not in slower}
    return replace(first, times=times, best=min(times, key=times.__getitem__, default=first.author))


def _shared_config(members: Sequence[TunedClass]) -> StoredConfig | None:
    """Return the fastest config over all classes, weighted by their GPU time; None if no config runs in all."""
    common = _common_configs(members)
    return min(common, key=lambda config: sum(tuned.cost_us * math.log(tuned.times[config]) for tuned in members), default=None)


def _common_configs(members: Sequence[TunedClass]) -> list[StoredConfig]:
    """Return the configs that are correct in all classes."""
    return [config for config in members[0].times if all(config in tuned.times for tuned in members)]


def _own_gain(tuned: TunedClass, shared: StoredConfig, worker: GpuWorker) -> float | None:
    """Return the speedup of a class's own config over the shared config; None if the shared config serves the class.

    The shared config does not serve if the gain is 3 % or more, or if it is surely slower than the author's choice.
    """
    if tuned.best == shared:
        return None
    screened = tuned.times[shared] / tuned.times.get(tuned.best, tuned.times[shared])
    config_class = tuned.task.variant.config
    compared = [config_of(stored, tuned.launch_class, config_class) for stored in (shared, tuned.best, tuned.author)]
    try:
        of_shared, of_best, of_author = worker.time_interleaved(tuned.task, compared)
    except WorkerCrashedError:
        of_shared = of_best = of_author = None
    if of_shared is None or of_best is None:
        return screened if screened >= _LEAST_GAIN else None
    gain = ratio_interval(of_shared, of_best)
    is_surely_faster = gain.median >= _LEAST_GAIN and gain.low > 1.0
    is_author_faster = of_author is not None and ratio_interval(of_shared, of_author).low > 1.0
    return gain.median if is_surely_faster or is_author_faster else None


def _differing_sizes(members: Sequence[TunedClass]) -> tuple[str, ...]:
    """Return the sizes that differ between classes. Of sizes with the same values, an argument goes before a side of a tensor."""
    names = {name for tuned in members for name in tuned.launch_class.sizes}
    by_sizes: dict[tuple[int | None, ...], str] = {}
    for name in sorted(names, key=lambda size: ("." in size, size)):  # sides of tensors have a dot
        by_sizes.setdefault(tuple(tuned.launch_class.sizes.get(name) for tuned in members), name)
    return tuple(sorted(name for sizes, name in by_sizes.items() if len(set(sizes)) > 1))


def _row(tuned: TunedClass, chosen: StoredConfig, gain: float | None = None) -> ServingRow:
    """Return a row: the chosen config, the author's config, then the fastest of the rest to fall back to."""
    ranked = sorted(tuned.times, key=lambda config: tuned.times[config])
    configs = list(dict.fromkeys([chosen, tuned.author, *ranked]))[:_MOST_CONFIGS]
    evidence = {**tuned.evidence, "class": tuned.launch_class.digest}
    if tuned.launch_class.is_plain:
        grids = {candidate.config: candidate.grid for candidate in tuned.launch_class.candidates}
        evidence |= {"grid": grids[chosen], "program_grid": grids[tuned.launch_class.first_config]}
    if gain is not None:
        evidence["own_gain"] = round(gain, 4)
    return ServingRow(tuned.launch_class.sizes, tuple(configs), evidence)
