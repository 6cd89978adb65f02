"""One operator's variant on one case: searched, or its whole space measured, on the machines of one GPU.

The unit of work of a tuning stage, wherever it runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerneltune import cache, device
from kerneltune.measuring.compare import obstacle
from kerneltune.plan import Options, Progress
from kerneltune.search import spaces
from kerneltune.search.loop import Search
from kerneltune.search.trials import Evaluation, knobs_of
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.sweep import results_root
from kerneltune.tuning.candidates import widened
from kerneltune.tuning.isolated import ChildCrashedError
from kerneltune.tuning.machines import Machines, Usage
from kerneltune.tuning.one_case import NothingPassedError, measure_space, tune
from kerneltune.tuning.tuner import Tuner

_FROM = {"own": "its own config", "near": "of a near case", "rule": "by the rule", "default": "the default"}
_CASES_AHEAD = 6
"""Every other of them is the ceiling of one, which is compiled in no time."""


@dataclass(frozen=True, slots=True)
class TuningTask:
    """What is to be tuned."""

    op: Op
    case: Case
    variant: Variant

    @property
    def label(self) -> str:
        """Name the task on one line."""
        return f"{self.op.name} {self.variant.name} {self.case.name} {self.case.dtype} {self.case.quant}"

    def identity(self, policy: str) -> Mapping[str, Any]:
        """Return the task as JSON."""
        op, case = self.op, self.case
        names = {"op": op.name, "variant": self.variant.name, "case": case.name, "axes": dict(case.axes)}
        return {**names, "dtype": case.dtype, "quant": case.quant, "options": dict(case.options), "policy": policy}


@dataclass(frozen=True, slots=True)
class TuningResult:
    """What became of it.

    Attributes:
        entry: stored in the config cache; None where whole spaces are measured, or nothing passed.
        space: the file of a measured space.
        best: what was found, in a few words.
        skipped: why it cannot be done on this GPU; empty where it can.
        problem: why nothing was found though it can; empty where all is well.
        usage: None where the search did not begin.
    """

    entry: cache.CacheEntry | None = None
    space: Path | None = None
    best: str = ""
    skipped: str = ""
    problem: str = ""
    usage: Usage | None = None


def search_of(options: Options) -> Search:
    """Return how much to search.

    Raises:
        ValueError: it makes no sense.
    """
    return Search(options.budget_s, options.trials, options.sampler, until_gain=options.until_gain or None)


def perform(machines: Machines, work: TuningTask, following: Sequence[TuningTask], family: str, options: Options) -> TuningResult:
    """Do it; `following` is what these machines are expected to do next, in this order.

    Raises:
        ValueError: a space that makes no sense, a store that cannot be read, or a folder that cannot be written.
    """
    op, case = work.op, work.case
    reason = obstacle(op, case, options.policy)
    if reason is not None:
        return TuningResult(skipped=f"not tuned: {op.name} {case.name}: {reason}")
    tuner = machines.tuner(op, case, widened(work.variant, options.knobs))
    try:
        with machines.deciding():
            done = (
                _measured(machines, tuner, family, options) if options.exhaustive else _tuned(machines, tuner, following, options)
            )
    except NothingPassedError as error:
        done = TuningResult(problem=str(error))
    except ChildCrashedError as error:
        done = TuningResult(problem=f"not tuned: {work.label}: {error}")
    machines.forget_ahead(tuner)
    return replace(done, usage=machines.usage_of(tuner))


def _tuned(machines: Machines, tuner: Tuner, following: Sequence[TuningTask], options: Options) -> TuningResult:
    search, next_ones = search_of(options), following[:_CASES_AHEAD]
    later = [machines.tuner(one.op, one.case, widened(one.variant, options.knobs)) for one in next_ones]
    machines.look_ahead(later, search)
    entry = tune(tuner, search, machines.compiling(tuner), options.configs)
    gain, before = entry.evidence.get("speedup"), entry.evidence.get("before", "default")
    return TuningResult(
        entry, best=f"{entry.config}" + (f" {gain:.2f}x what calls ran with before ({_FROM[before]})" if gain else "")
    )


def _measured(machines: Machines, tuner: Tuner, family: str, options: Options) -> TuningResult:
    path, best = _export(tuner, measure_space(tuner, machines.compiling(tuner)), family, options)
    return TuningResult(space=path, best=best)


def tell(progress: Progress, work: TuningTask, done: TuningResult) -> None:
    """Say what became of a piece of work."""
    if reason := done.skipped or done.problem:
        progress.note(reason)
    if done.best:
        progress.best(f"{done.best}: {done.space}" if done.space else done.best)
    progress.advance(work.label)


def _export(tuner: Tuner, trials: Mapping[Config, Evaluation], family: str, options: Options) -> tuple[Path, str]:
    """Write the measured space of a case; the file, and what is in it.

    Raises:
        NothingPassedError: no config has a time.
    """
    if all(trial.time_us is None for trial in trials.values()):
        raise NothingPassedError(f"{tuner.op.name} {tuner.variant.name}: no config has a time for {tuner.case.label}")
    op, case, variant, here = tuner.op, tuner.case, tuner.variant, device.current()
    stored = tuner.store.of_case(op, case, variant, tuner.policy)
    newest = max(stored.values(), key=lambda evaluation: evaluation.date)
    flags = [f"--knob {name}={','.join(texts)}" for name, texts in options.knobs]
    parts = ["kerneltune tune", family, "--exhaustive --op", op.name, "--case", case.name, "--dtype", case.dtype]
    command = [*parts, "--quant", case.quant, "--variant", variant.name, *flags]
    space = spaces.MeasuredSpace(
        op=op.name, variant=variant.name, case=case.name, axes=case.axes, dtype=case.dtype, quant=case.quant,
        options=case.options, policy=tuner.policy, default=_knobs(variant.default_config(case)), device=here.name,
        driver=here.driver, source_hash=variant.source_hash, commit=newest.commit, date=newest.date, command=" ".join(command),
        trials={_knobs(config): trials[config] for config in variant.configs(case) if config in trials}, **device.versions(),
    )  # fmt: skip
    path = spaces.write(results_root(options.results) / here.slug / "spaces", space)
    best = f"{len(space.feasible)} of {len(space.trials)} configs have a time, best {min(space.feasible.values()):.2f} µs"
    return path, best


def _knobs(config: Config) -> spaces.Knobs:
    return tuple(knobs_of(config).items())
