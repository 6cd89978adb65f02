"""Tune a capture: search each class of launches, then write the table whose rows `shared_rows.py` chooses."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kerneltune import cache, device, sweep_file
from kerneltune.adopt.folder import BLOCKS, MISSES, LaunchClass, add_misses, read_blocks, remove_parts, write_json
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
from kerneltune.adopt.replay import ReplayError, live_kernel
from kerneltune.adopt.shared_rows import TunedClass, keep_compiled, make_table
from kerneltune.adopt.table import table_path, write_table
from kerneltune.files import replace_text
from kerneltune.measuring.compiler import CompileResult
from kerneltune.plan import Options, Plan, Selection
from kerneltune.progress import Progress
from kerneltune.search.loop import times_of
from kerneltune.search.trials import TrialStore, open_store
from kerneltune.task import Evaluation, Knobs, Run, Task, is_outdated, is_stale
from kerneltune.tune.candidates import checked_space
from kerneltune.tune.gpu_worker import GpuWorker
from kerneltune.tune.run import expected_work, run_tune
from kerneltune.tune.session import TuningSession
from kerneltune.wording import counted

FAMILY = "captured"
_COLD_BYTES = 1 << 20
"""Bytes of arguments below which a class is timed with a hot L2: a cold L2 would need hundreds of sets of arguments."""
_FORCED = "forced"
"""File in a capture: the date when a search of all classes began, until the search has ended."""


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
    options = Options(workers=workers, retune="all" if force else "").ending(budget_s, began)
    if probe_blocks(capture, chosen, options.ending(budget_s and budget_s / 2, began), progress):
        capture = read_capture(root)
        by_digest = {launch_class.digest: launch_class for launch_class in capture.classes}
        chosen = [by_digest[launch_class.digest] for launch_class in chosen]
    tasks = _tasks(capture, chosen)
    cache.use_root(root / "configs")
    sweep, since = write_capture_sweep(capture), _forced_since(root) if force else ""
    due = _due(root, chosen, tasks, since)
    again = [] if force else [task for task in due if task.own_entry()]
    if len(due) < len(tasks) and force:
        progress.note(f"the --force of {since} goes on: {len(due)} of {counted(len(tasks), 'class', 'classes')} left")
    failures = search_tasks(root, FAMILY, sweep, due if force else tasks, options, progress)
    if again and not options.search.is_time_over:  # searched before their blocks were tried, or not to the end
        search_tasks(root, FAMILY, sweep, again, replace(options, retune="all"), progress)
    left = _due(root, chosen, tasks, since)
    if left and options.search.is_time_over:
        more_s = sum(expected_work(task, options).seconds + _CLASS_S for task in left)
        needed = f"the command again takes about {max(more_s, 1):.0f} s more"
        progress.note(f"the budget of {budget_s:g} s is used: {counted(len(left), 'class', 'classes')} left: {needed}")
    elif force:
        (root / _FORCED).unlink()
    tuned, without_config = _collect(capture, failures)
    skipped, table = _skipped(capture, without_config | reasons), make_table(tuned)
    digest = write_table(root, table)
    keep_compiled(root, table, tuned, progress)
    return TunedCapture(table_path(root, table.device), digest, tuned, skipped, time.monotonic() - began)


def _forced_since(root: Path) -> str:
    """Return when a search with `force` began: now, or when an earlier command began it that was interrupted."""
    forced = root / _FORCED
    if not forced.is_file():
        replace_text(forced, datetime.now(UTC).isoformat(timespec="seconds"))
    return forced.read_text(encoding="utf-8")


def _due(root: Path, classes: Sequence[LaunchClass], tasks: Sequence[Task], since: str) -> list[Task]:
    """Return the tasks that have no config or were searched before their blocks were tried; then those not searched to the end.

    since: date before which a search does not count, nor one with other code; empty for none.
    """
    due, ended_early = list[Task](), list[Task]()
    for of, task, (trials, own) in zip(classes, tasks, search_results(root, tasks), strict=True):
        entry = own.entry if own else None
        if entry and entry.evidence.get("ended_early"):
            ended_early.append(task)
        elif not entry or lacks_blocks(of, checked_space(task), trials) or (since and _is_older(task, entry, since)):
            due.append(task)
    return due + ended_early


def _is_older(task: Task, entry: cache.CacheEntry, since: str) -> bool:
    """Return whether a task was searched before a date, or with other code, another driver, torch or triton."""
    return entry.evidence.get("date", "") < since or is_stale(task.variant, entry) or is_outdated(task.variant, entry)


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


SearchResult = tuple[Mapping[Knobs, Evaluation], cache.Match | None]
"""The trials of a task, and its best config; None if there is none."""


def search_results(root: Path, tasks: Sequence[Task]) -> Iterator[SearchResult]:
    """Yield the results of each task that was searched into a folder."""
    stores: dict[str, TrialStore] = {}
    for task in tasks:
        if (name := task.op.name) not in stores:
            stores[name] = open_store(task.op, task.variant, root / "results")
        yield stores[name].evaluations(task), task.own_entry()


def probe_blocks(capture: Capture, classes: Sequence[LaunchClass], options: Options, progress: Progress) -> bool:
    """Launch classes of kernels without an autotuner with twice and half of each block that their grids read.

    A block may change only if these launches leave the same results: the program may have sorted, padded or allocated by the
    block. Write the verdicts beside the classes, and return whether a block was to be tried. No further block is tried after
    `until` of the limits.
    """
    blocks, until = read_blocks(capture.root), options.search.until
    plain = [launch_class for launch_class in classes if launch_class.is_plain]
    untried = list[tuple[LaunchClass, Task, str]]()
    for launch_class, task in zip(plain, _tasks(capture, plain), strict=True):
        known, names = blocks.get(launch_class.digest, {}), launch_class.candidates[0].config.kwargs
        untried += [(launch_class, task, name) for name in names if name not in known]
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
            if options.search.is_time_over:
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
