"""One case tuned by several tuners over the same configs on the same machine: how long each took, how good its config is.

Every side runs in a fresh process with an empty Triton cache, one after the other; what it found is kept, and a contest that was
interrupted goes on with the next side. The configs they end with, the default, and the best few of every ranking are then checked
and timed in one interleaved run; the fastest of these stands for the best of the whole space. Changes no config cache. Prints
nothing.
"""

import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kerneltune import device
from kerneltune.errors import without_places
from kerneltune.files import decode, read_bytes, replace_bytes, replace_text
from kerneltune.lab.tuners import EXHAUSTIVE, HELION, SIDES, US, ContestTask, TunerResult, finalists, helion_version, unable
from kerneltune.measuring.check import release_memory
from kerneltune.measuring.compare import commit, obstacle
from kerneltune.measuring.compiler import TARGETS, CompilePool, compile_job
from kerneltune.plan import Options, Progress, require_gpu, results_folder
from kerneltune.processes import in_fresh_processes, start_server
from kerneltune.search.loop import Search
from kerneltune.search.task import Task, knobs_of
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.stats import Interval, median_interval, ratio_interval
from kerneltune.sweep import results_root
from kerneltune.table import Column, Row, Table
from kerneltune.tuning.bench import GpuBench, IsolatedBench, split_cores
from kerneltune.tuning.candidates import Given, checked_space, narrowed
from kerneltune.tuning.stage import empty_caches

DEFAULT = "default config"
BEST = "best of the space"
_RANKED = 6
_SIDE_TIMEOUT_S = 4 * 3600.0
"""One compilation after the other, a large space takes hours."""
_PAST_LIMIT_S = 60.0
"""A side that has a limit ends what it has begun."""


@dataclass(frozen=True, slots=True)
class ContestLine:
    """One tuner, or one config to hold the others against.

    Attributes:
        wall_s, evaluations: None where nothing was searched.
        config: knob values; None where the side gave none.
        time_us: in the common run; None where the config was wrong there.
        gap: how much slower than the best, a fraction, with its interval.
        remark: anything else, or why there is no config.
    """

    name: str
    wall_s: float | None
    evaluations: int | None
    config: Mapping[str, Any] | None
    time_us: Interval | None
    gap: Interval | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Contest:
    """All lines of a case, ours first; configs: of the space; share: our wall time over that of the exhaustive search."""

    op: str
    variant: str
    case: Case
    policy: str
    configs: int
    lines: tuple[ContestLine, ...]

    @property
    def share(self) -> float | None:
        """Return our wall time over that of the exhaustive search; None where either has no result."""
        seconds = {line.name: line.wall_s for line in self.lines}
        ours, theirs = seconds.get(US), seconds.get(EXHAUSTIVE)
        return None if ours is None or theirs is None else ours / theirs


def contest(
    op: Op,
    case: Case,
    variant: Variant,
    knobs: Given,
    search: Search,
    options: Options,
    progress: Progress,
    sides: Mapping[str, Callable[[ContestTask], TunerResult]] = SIDES,
    judge: Callable[[], GpuBench] | None = None,
    limit_s: int | None = None,
) -> Contest:
    """Let every side tune the case, unless that was done before an interruption, then compare what they found.

    Args:
        knobs: values that the space is narrowed to.
        judge: makes the bench of the common run; the measuring child if not given.
        limit_s: seconds after which Helion is to stop with its best so far.

    Raises:
        ValueError: no GPU, a case that does not fit or cannot be cold, a space that makes no sense, a journal that cannot be read
            or written, or no side found a config.
    """
    require_gpu("lab versus")
    tuned = Task(op, case, variant, options.policy)
    space = checked_space(replace(tuned, variant=narrowed(variant, knobs)))
    if len(space) < 2:
        raise ValueError(f"{op.name} {case.label}: one config: expected a space to search")
    reason = obstacle(tuned)
    if reason is not None:
        raise ValueError(f"{op.name} {case.label}: {reason}")
    task = ContestTask(tuned, knobs, search, options, limit_s=limit_s)
    journal = _journals(op.name, case, variant.name, options) / f"{_digest(op, task)}.json"
    kept = _kept(journal, variant)
    release_memory()
    lacking = unable()
    found: dict[str, TunerResult] = {}
    reasons: dict[str, str] = {}
    wanted = [name for name in sides if name not in lacking]
    progress.stage("versus", len(wanted) + 1)
    for name in wanted:
        limited = f"{name} {limit_s} s" if name == HELION and limit_s else name
        if limited in kept:
            found[name] = kept[limited]
            progress.note(f"{name}: {found[name].wall_s:.1f} s, before an interruption")
        else:
            try:
                found[name] = kept[limited] = tune_side(name, sides[name], task)
            except Exception as error:  # what another tuner raises is its result
                reasons[name] = f"{type(error).__name__}: {without_places(' '.join(str(error).split()))[:200]}"
            else:
                replace_bytes(journal, msgspec.json.encode(kept))
                progress.best(f"{name} {found[name].wall_s:.1f} s")
        progress.advance(name)
    if not found:
        raise ValueError(f"{op.name} {case.label}: no side found a config: {'; '.join(reasons.values())}")
    default = variant.default_config(case)
    judged, wrong = judge_configs(tuned, finalists(list(found.values()), default, _RANKED), judge)
    progress.advance("the common run")
    best = min(judged, key=lambda config: judged[config][0].median, default=default)
    lines = [_line(name, side.config, judged, wrong, side.wall_s, side.evaluations, side.remark) for name, side in found.items()]
    lines += [ContestLine(name, None, None, None, None, None, reason) for name, reason in (*reasons.items(), *lacking.items())]
    lines += [_line(name, config, judged, wrong) for name, config in ((DEFAULT, default), (BEST, best))]
    return Contest(op.name, variant.name, case, options.policy, len(space), tuple(lines))


def tune_side(name: str, side: Callable[[ContestTask], TunerResult], task: ContestTask) -> TunerResult:
    """Return what a side finds; raise what it raises."""
    timeout_s = task.limit_s + _PAST_LIMIT_S if name == HELION and task.limit_s is not None else _SIDE_TIMEOUT_S
    first = start_server if name == US else None  # as the command does
    with empty_caches() as folder:
        begun = replace(task, folder=folder, began=time.monotonic())
        (found,) = in_fresh_processes(1, side, begun, timeout_s=timeout_s, first=first)
    return found


def _labels(op: str, variant: str, case: Case, policy: str) -> str:
    return device.slug(" ".join((op, variant, case.name, case.dtype, case.quant, policy)))


def _journals(op: str, case: Case, variant: str, options: Options) -> Path:
    """Return the folder of what sides have found until all have; it goes when the contest's results are written."""
    return results_root(options.results) / "runs" / device.current().slug / "versus" / _labels(op, variant, case, options.policy)


def _kept(journal: Path, variant: Variant) -> dict[str, TunerResult]:
    """Return what sides had found before an interruption, by name.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    if not journal.exists():
        return {}
    data = read_bytes(journal)
    try:
        found = decode(data, dict[str, TunerResult])
    except ValueError as error:
        raise ValueError(f"{journal}: {error}; move the file away to start anew") from error
    make = variant.config_from
    return {name: replace(one, config=make(one.config), best=tuple(map(make, one.best))) for name, one in found.items()}


def _digest(op: Op, task: ContestTask) -> str:
    """Return a digest of everything that the result of a side depends on."""
    case, options, here = task.tuned.case, task.options, device.current()
    depends_on = {
        "op": op.name, "variant": task.tuned.variant.name, "case": case.name, "axes": dict(case.axes), "dtype": case.dtype,
        "quant": case.quant, "options": dict(case.options), "policy": options.policy, "knobs": task.knobs,
        "search": asdict(task.search), "workers": options.workers,
        "cores": len(os.sched_getaffinity(0)), "device": here.name, "driver": here.driver,
        "source_hash": op.variant(task.tuned.variant.name).source_hash,
        "commit": commit(), "helion": helion_version(), **device.versions(),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]


_Judged = dict[Config, tuple[Interval, Interval]]


def judge_configs(
    task: Task, configs: Sequence[Config], make: Callable[[], GpuBench] | None
) -> tuple[_Judged, dict[Config, str]]:
    """Return time and gap to the fastest of correct configs, and the defects of the others."""
    measuring, _ = split_cores()
    if make is None:
        _compile(task, configs)
    with IsolatedBench(cores=measuring) if make is None else IsolatedBench(make) as bench:
        trials = {config: bench.trial(task, config, None) for config in configs}
        wrong = {config: f"{trial.status}: {trial.detail}" for config, trial in trials.items() if trial.time_us is None}
        correct = [config for config in configs if config not in wrong]
        taken = dict(zip(correct, bench.samples(task, correct), strict=True)) if correct else {}
        bench.close()
    samples = {config: times for config, times in taken.items() if times is not None}
    wrong |= {config: "memory: none is left beside the others" for config in taken if config not in samples}
    if not samples:
        return {}, wrong
    fastest = min(samples.values(), key=lambda taken: median_interval(taken).median)
    judged = {config: (median_interval(taken), ratio_interval(taken, fastest)) for config, taken in samples.items()}
    return judged, wrong


def _compile(task: Task, configs: Sequence[Config]) -> None:
    """Compile all configs side by side, so that launches find them: no side has left anything compiled."""
    target = TARGETS.get(device.current().arch)
    if target is not None:
        with CompilePool(target) as pool:
            list(pool.compile([compile_job(task, config) for config in configs]))


def _line(
    name: str,
    config: Config,
    judged: _Judged,
    wrong: Mapping[Config, str],
    wall_s: float | None = None,
    evaluations: int | None = None,
    remark: str = "",
) -> ContestLine:
    remark = "; ".join(text for text in (remark, wrong.get(config, "")) if text)
    if config not in judged:
        return ContestLine(name, wall_s, evaluations, knobs_of(config), None, None, remark)
    time_us, ratio = judged[config]
    gap = Interval(ratio.median - 1, ratio.low - 1, ratio.high - 1)
    return ContestLine(name, wall_s, evaluations, knobs_of(config), time_us, gap, remark)


def keep(contest: Contest, command: Sequence[str], options: Options) -> list[Path]:
    """Write a contest, and the table of all contests of this GPU, under results/<gpu>/versus; returns the files.

    The next contest of the same begins anew.

    Raises:
        ValueError: they cannot be written.
    """
    here, case = device.current(), contest.case
    folder = results_folder(options) / "versus"
    row = {
        **{name: value for name, value in asdict(contest).items() if name != "case"},
        "case": case.name, "axes": dict(case.axes), "dtype": case.dtype, "quant": case.quant, "options": dict(case.options),
        "device": here.name, "driver": here.driver, **device.versions(), "cores": len(os.sched_getaffinity(0)),
        "commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "command": shlex.join(command),
        "share": contest.share,
    }  # fmt: skip
    path = folder / f"{_labels(contest.op, contest.variant, case, contest.policy)}.json"
    replace_text(path, json.dumps(row, indent=1) + "\n")
    rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    replace_text(folder / "versus.md", _markdown(rows))
    shutil.rmtree(_journals(contest.op, case, contest.variant, options), ignore_errors=True)
    return [path, folder / "versus.md"]


def contest_table(lines: Iterable[Mapping[str, Any]]) -> Table:
    """Return a row per tuner; lines as `asdict` makes them of a ContestLine."""
    names = ("tuner", "wall s", "evaluations", "time µs", "slower than the best %", "from %", "to %", "remark")
    digits = (None, 1, 0, 2, 1, 1, 1, None)
    columns = [Column(name, digits=of, rank=int(name == "remark")) for name, of in zip(names, digits, strict=True)]
    rows = []
    for line in lines:
        gaps = [100 * line["gap"][end] if line["gap"] else None for end in ("median", "low", "high")]
        time_us = line["time_us"] and line["time_us"]["median"]
        rows.append(Row((line["name"], line["wall_s"], line["evaluations"], time_us, *gaps, None), line["remark"]))
    return Table(tuple(columns), tuple(rows))


def _markdown(contests: Iterable[Mapping[str, Any]]) -> str:
    """Make a table for every contest."""
    text = []
    for row in contests:
        share = "" if row["share"] is None else f"; wall time {row['share']:.2f} of the exhaustive search"
        text += [
            f"**{row['op']} {row['variant']} {row['case']} {row['dtype']} {row['quant']}**: {row['configs']} configs{share}. "
            f"{row['device']}, {row['cores']} cores, driver {row['driver']}, torch {row['torch']}, triton {row['triton']}, "
            f"{row['date'][:10]}, commit {row['commit']}: `{row['command']}`",
            "",
            contest_table(row["lines"]).markdown(),
        ]
    return "\n".join(text)
