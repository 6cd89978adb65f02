"""Tune a capture: search each class of launches, let classes share a config where none gains by its own, write the table.

All classes of an author's key share a config, unless a paired comparison shows a gain by another config.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kerneltune import cache, device, sweep_file
from kerneltune.adopt import ahead
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.folder import BLOCKS, MISSES, KernelCode, LaunchClass, add_misses, read_blocks, remove_parts, write_json
from kerneltune.adopt.operators import (
    TUNED,
    candidate_of,
    case_of,
    config_of,
    lacks_blocks,
    operator_name,
    operators_of,
    write_capture_sweep,
)
from kerneltune.adopt.overview import Capture, read_capture
from kerneltune.adopt.program import LAUNCH_FAILURES
from kerneltune.adopt.replay import ReplayError, live_kernel, make_replay
from kerneltune.adopt.table import Group, ServingRow, ServingTable, TableKernel, table_path, write_table
from kerneltune.errors import first_line
from kerneltune.files import replace_text
from kerneltune.measuring.compiler import CompileResult
from kerneltune.plan import Options, Plan, Selection
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.progress import Progress
from kerneltune.records import grouped
from kerneltune.search.loop import times_of
from kerneltune.search.trials import TrialStore, open_store
from kerneltune.spec import Config
from kerneltune.stats import ratio_interval
from kerneltune.task import Evaluation, Run, Task, is_outdated, is_stale
from kerneltune.tune.candidates import checked_space
from kerneltune.tune.gpu_worker import GpuWorker
from kerneltune.tune.run import expected_work, run_tune
from kerneltune.tune.session import TuningSession
from kerneltune.wording import counted

FAMILY = "captured"
_MOST_CONFIGS = 4
"""Configs of a row: the chosen config and the configs that a launch may fall back to."""
_COLD_BYTES = 1 << 20
"""Bytes of arguments below which a class is timed with a hot L2: a cold L2 would need hundreds of sets of arguments."""
_FORCED = "forced"
"""File in a capture: the date when a search of all classes began, until the search has ended."""
LEAST_GAIN = 1.03
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


@dataclass(slots=True)
class TunedCapture:
    """Hold the written table and its SHA-256, the tuned classes, name and reason of each other class, seconds of wall time."""

    table: Path
    digest: str
    tuned: list[TunedClass]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


_CLASS_S = 1.2
"""Seconds for a class beside its search, to make its arguments and to learn its results. H200, 16 cores."""


class Forecast(NamedTuple):
    """Estimate the work of `tune_capture`.

    Attributes:
        num_classes: number of classes that it tunes.
        num_configs: largest number of configs that it tries.
        seconds: seconds of wall time.
        skipped: name and reason of each other class.
    """

    num_classes: int
    num_configs: int
    seconds: float
    skipped: list[tuple[str, str]]


def forecast(root: Path, share: float, workers: int | None) -> Forecast:
    """Estimate what `tune_capture` will try; needs no GPU."""
    capture = read_capture(root, untried="")
    chosen, reasons = _chosen(capture, share, gpu=None)
    works = [expected_work(task, Options(workers=workers)) for task in _tasks(capture, chosen)]
    num_configs, seconds = sum(configs for configs, _ in works), sum(seconds + _CLASS_S for _, seconds in works)
    return Forecast(len(chosen), num_configs, seconds, _skipped(capture, reasons))


def tune_capture(
    root: Path,
    progress: Progress,
    *,
    budget_s: float | None = None,
    share: float = 1.0,
    force: bool = False,
    workers: int | None = None,
) -> TunedCapture:
    """Tune the classes of a capture, the most expensive first, and write the table that serving reads.

    Args:
        budget_s: seconds in all. The search that they end keeps its best config so far; the next call goes on with it.
        share: fraction of the captured GPU time that is tuned.
        force: search classes again that have a config.
        workers: processes that compile.
    """
    began = time.monotonic()
    device.require_gpu("tune")
    remove_parts(root)
    if added := add_misses(root):
        progress.note(f"{counted(added, 'class', 'classes')} of {root / MISSES} {'is' if added == 1 else 'are'} tuned as well")
    capture = read_capture(root)
    chosen, reasons = _chosen(capture, share, device.current().slug)
    until = began + budget_s if budget_s else math.inf
    limits = replace(Options().search, until=until)
    options = Options(workers=workers, retune="all" if force else "", search=limits)
    if probe_blocks(capture, chosen, options, progress, began + budget_s / 2 if budget_s else math.inf):
        capture = read_capture(root)
        by_digest = {launch_class.digest: launch_class for launch_class in capture.classes}
        chosen = [by_digest[launch_class.digest] for launch_class in chosen]
    tasks = _tasks(capture, chosen)
    cache.use_root(root / "configs")
    sweep, forced = write_capture_sweep(capture), root / _FORCED
    if force and not forced.is_file():  # else an earlier command was interrupted
        replace_text(forced, datetime.now(UTC).isoformat(timespec="seconds"))
    since = forced.read_text(encoding="utf-8") if force else ""
    due = _due(root, chosen, tasks, since)
    again = [] if force else [task for task in due if task.own_entry()]
    if len(due) < len(tasks) and force:
        progress.note(f"the --force of {since} goes on: {len(due)} of {counted(len(tasks), 'class', 'classes')} left")
    failures = search_tasks(root, FAMILY, sweep, due if force else tasks, options, progress)
    if again and not limits.is_time_over:  # searched before their blocks were tried, or not to the end
        search_tasks(root, FAMILY, sweep, again, replace(options, retune="all"), progress)
    left = _due(root, chosen, tasks, since)
    if left and limits.is_time_over:
        more_s = sum(expected_work(task, options).seconds + _CLASS_S for task in left)
        needed = f"the command again takes about {max(more_s, 1):.0f} s more"
        progress.note(f"the budget of {budget_s:g} s is used: {counted(len(left), 'class', 'classes')} left: {needed}")
    elif force:
        forced.unlink()
    tuned, without_config = _collect(capture, failures)
    skipped, table = _skipped(capture, without_config | reasons), _table(tuned)
    digest = write_table(root, table)
    _keep_compiled(root, table, tuned, progress)
    return TunedCapture(table_path(root, table.device), digest, tuned, skipped, time.monotonic() - began)


def _due(root: Path, classes: Sequence[LaunchClass], tasks: Sequence[Task], since: str) -> list[Task]:
    """Return the tasks that have no config or were searched before their blocks were tried; then those not searched to the end.

    since: date before which a search does not count, nor one with other code; empty for none.
    """
    results = list(zip(classes, tasks, search_results(root, tasks), strict=True))
    ended_early = [task for _, task, (_, own) in results if own and own.entry.evidence.get("ended_early")]
    due = [
        task
        for of, task, (trials, own) in results
        if own is None
        or lacks_blocks(of, checked_space(task), trials)
        or own.entry.evidence.get("date", "") < since
        or (since and (is_stale(task.variant, own.entry) or is_outdated(task.variant, own.entry)))
    ]
    return [task for task in due if task not in ended_early] + ended_early


def search_tasks(
    root: Path, family: str, file: Path, tasks: Sequence[Task], options: Options, progress: Progress
) -> dict[str, str]:
    """Search tasks of a sweep into a folder, whose configs this process then uses; return by label why tasks failed untried."""
    cache.use_root(root / "configs")
    by_name, failures = {task.op.name: task.op for task in tasks}, dict[str, str]()
    for policy in dict.fromkeys(task.policy for task in tasks):
        entries = tuple(sweep_file.SweepCase(task.op.name, task.case) for task in tasks if task.policy == policy)
        in_folder = replace(options, results=root / "results", policy=policy)
        plan = Plan(by_name, sweep_file.Sweep(family, file, (), entries, {}), Selection(family, variants=(TUNED,)), in_folder)
        failed = [result for result in run_tune(plan, progress) if result.label]
        failures |= {result.label: result.reason.removeprefix(f"not tuned: {result.label}: ") for result in failed}
        if options.search.is_time_over:
            break
    return failures


SearchResult = tuple[Mapping[Config, Evaluation], cache.Match | None]
"""The trials of a task, and its best config; None if there is none."""


def search_results(root: Path, tasks: Sequence[Task]) -> Iterator[SearchResult]:
    """Yield the results of each task that was searched into a folder."""
    stores: dict[str, TrialStore] = {}
    for task in tasks:
        if (name := task.op.name) not in stores:
            stores[name] = open_store(task.op, task.variant, root / "results")
        yield stores[name].evaluations(task), task.own_entry()


def probe_blocks(
    capture: Capture, classes: Sequence[LaunchClass], options: Options, progress: Progress, until: float = math.inf
) -> bool:
    """Launch classes of kernels without an autotuner with twice and half of each block that their grids read.

    A block may change only if these launches leave the same results: the program may have sorted, padded or allocated by the
    block. Write the verdicts beside the classes, and return whether a block was to be tried. No further block is tried after
    `until`, in s of the monotonic clock.
    """
    blocks = read_blocks(capture.root)
    plain = [launch_class for launch_class in classes if launch_class.is_plain]
    untried = [
        (launch_class, task, name)
        for launch_class, task in zip(plain, _tasks(capture, plain), strict=True)
        for name in launch_class.candidates[0].config.kwargs
        if name not in blocks.get(launch_class.digest, {})
    ]
    if not untried:
        return False
    progress.stage("try blocks", len(untried))
    with TuningSession(options) as session:
        trials = [
            [(value, run, session.queue.compile(*run)) for value, run in _other_values(launch_class, task, name)]
            for launch_class, task, name in untried
        ]
        for (launch_class, _, name), tried in zip(untried, trials, strict=True):
            wait([compilation for *_, compilation in tried], None if until == math.inf else max(until - time.monotonic(), 0.0))
            if time.monotonic() >= until:
                progress.note("half of the budget is used: blocks that were not tried yet keep the program's value")
                break
            blocks.setdefault(launch_class.digest, {})[name] = _why_coupled(session.worker, name, tried)
            progress.advance(f"{launch_class.label}: {name}")
    write_json(capture.root / BLOCKS, {"classes": blocks})
    return True


def _other_values(launch_class: LaunchClass, task: Task, name: str) -> Iterator[tuple[int, Run]]:
    """Yield twice and half of a block with the run that launches it."""
    own, kind = launch_class.candidates[0].config, task.variant.config
    assert kind is not None
    for value in (own.kwargs[name] * 2, own.kwargs[name] // 2):
        candidate = launch_class.candidate(replace(own, kwargs={**own.kwargs, name: value}))
        if candidate is not None:
            yield value, Run(task, config_of(candidate.config, launch_class, kind))


def _why_coupled(worker: GpuWorker, name: str, trials: Iterable[tuple[int, Run, "Future[CompileResult]"]]) -> str:
    """Return why a block may not change; empty if launches with other values leave the same results."""
    passed = False
    for value, run, compilation in trials:
        reason = compilation.result().error
        if not reason:
            outcome = worker.check(*run)
            reason = "" if outcome.status == "checked" else outcome.reason or outcome.status
        if not reason:
            passed = True
        elif not any(failure in reason for failure in LAUNCH_FAILURES):
            return f"{name}={value}: {reason}"
    return "" if passed else f"{name}: no other value can be launched"


def _tasks(capture: Capture, classes: Sequence[LaunchClass]) -> list[Task]:
    """Return the tasks of tuning classes."""
    by_name = {op.name: op for op in operators_of(capture)}
    ops = [by_name[operator_name(launch_class)] for launch_class in classes]
    policies = ["cold" if launch_class.argument_bytes >= _COLD_BYTES else "hot" for launch_class in classes]
    return [
        Task(op, case_of(launch_class, op.axes), op.variant(TUNED), policy)
        for launch_class, op, policy in zip(classes, ops, policies, strict=True)
    ]


def _chosen(capture: Capture, share: float, gpu: str | None) -> tuple[list[LaunchClass], dict[str, str]]:
    """Return the classes that are tuned, the most expensive first, and by digest why each other class is not."""
    chosen, reasons = list[LaunchClass](), dict[str, str]()
    covered, shares = 0.0, capture.shares()
    for launch_class in sorted(capture.classes, key=lambda launch_class: -shares[launch_class.digest]):
        if covered >= share and chosen:
            reasons[launch_class.digest] = f"below --share {share:g}: keeps the author's choice"
            continue
        covered += shares[launch_class.digest]
        if reason := why_untunable(launch_class, gpu):
            reasons[launch_class.digest] = reason
        else:
            chosen.append(launch_class)
    return chosen, reasons


def _skipped(capture: Capture, reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return name and reason of each file that cannot be read, and of each class that is not tuned."""
    labels = {launch_class.digest: launch_class.label for launch_class in capture.classes}
    damaged = [(name, reason) for name, _, reason in (text.partition(": ") for text in capture.problems)]
    return damaged + [(labels[digest], reason) for digest, reason in reasons.items()]


def why_untunable(launch_class: LaunchClass, gpu: str | None = None) -> str:
    """Return why a class cannot be tuned on a GPU; empty if it can; gpu: folder name of the GPU, None for any GPU."""
    if gpu not in (None, launch_class.device):
        return f"captured on {launch_class.device}, this is {gpu}: capture again here"
    if launch_class.problem:
        return launch_class.problem
    grids = [candidate.grid for candidate in launch_class.offered]
    if not grids:
        return launch_class.candidates[0].problem
    if any(grid is not None and 0 in grid for grid in grids):
        return "its grid is empty: nothing is launched"
    if launch_class.lacks_values:
        return "values were not kept (seen in a graph capture, or over --max-bytes)"
    try:
        live_kernel(launch_class)
    except ReplayError as error:
        return str(error)
    return ""


def _collect(capture: Capture, failures: Mapping[str, str]) -> tuple[list[TunedClass], dict[str, str]]:
    """Return the classes that the search has found a config for, with all times, and by digest why other classes have none."""
    tuned, reasons = list[TunedClass](), dict[str, str]()
    tasks = _tasks(capture, capture.classes)
    for launch_class, task, (tried, stored) in zip(capture.classes, tasks, search_results(capture.root, tasks), strict=True):
        if stored is None:
            failure = next((evaluation.reason for evaluation in tried.values() if evaluation.reason), "")
            untried = failures.get(task.key.label, "not reached: run the command again")
            reasons[launch_class.digest] = f"no config passed: {failure}" if tried else untried
            continue
        times_us = {task.variant.config_from(dict(knobs)): time_us for knobs, time_us in times_of(tried).items()}
        tuned_class = TunedClass(
            launch_class,
            task,
            best=candidate_of(stored.config, launch_class).config,
            author=launch_class.author_choice,
            times={candidate_of(config, launch_class).config: time_us for config, time_us in times_us.items()},
            evidence=dict(stored.entry.evidence),
            cost_us=capture.cost_us(launch_class),
        )
        tuned.append(tuned_class)
    return tuned, reasons


def _table(tuned: Sequence[TunedClass]) -> ServingTable:
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


def _keep_compiled(root: Path, table: ServingTable, tuned: Sequence[TunedClass], progress: Progress) -> None:
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
        split = differing_sizes(members) if len(rows) == len(members) else ()
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
        return screened if screened >= LEAST_GAIN else None
    gain = ratio_interval(of_shared, of_best)
    is_surely_faster = gain.median >= LEAST_GAIN and gain.low > 1.0
    is_author_faster = of_author is not None and ratio_interval(of_shared, of_author).low > 1.0
    return gain.median if is_surely_faster or is_author_faster else None


def differing_sizes(members: Sequence[TunedClass]) -> tuple[str, ...]:
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
