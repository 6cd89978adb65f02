"""The search for the best config of a variant on a case, and its entry in the cache.

compile -> drop what spills or does not fit -> check on poisoned outputs -> screen -> paired final against the incumbent. The
incumbent is what a call without `config=` ran with before; it stays unless the interval says that the winner is faster. What to
try is decided in search. A tuner refuses a config for what the compiler says, or has it measured, and stores it.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kerneltune import cache, device
from kerneltune.measuring.assembly import LIMITS, resident
from kerneltune.measuring.compiler import CompileResult, PendingCompile
from kerneltune.search.loop import Search, explore, opening, times_of
from kerneltune.search.task import Evaluation, Task, knobs_of
from kerneltune.spec import Config
from kerneltune.stats import median_interval, ratio_interval
from kerneltune.tune.candidates import candidates, checked_space, feasibility_of, looked_up, stamp, starting_points
from kerneltune.tune.gpu_worker import SCREEN_SAMPLES, TRIED_WHOLE, ChildCrashedError, GpuWorker

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

_POLL_S = 0.001
_FINALISTS = 4
_FINAL_MARGIN = 1.04
_AHEAD = 256
"""Configs of a later case to compile; there may be nothing else to do while large inputs are made and a paired final runs."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A `search.loop.Started`: a config that is being compiled, then measured by a tuner."""

    tuner: "Tuner"
    config: Config
    pending: PendingCompile

    def done(self) -> bool:
        """Return whether it is compiled."""
        return self.pending.done()

    def evaluate(self) -> "Future[Evaluation]":
        """Return its evaluation, stored by then: at once where the compiler's word is enough, else behind earlier ones."""
        self.tuner.began = self.tuner.began or time.monotonic()
        compiled = self.pending.result()
        refusal = self.tuner.refusal(self.config, compiled)
        if refusal is None:
            return self.tuner.in_turn(self.tuner.evaluate, self.config, compiled, None)
        refused: Future[Evaluation] = Future()
        refused.set_result(self.tuner.evaluate(self.config, compiled, refusal))
        return refused

    def cancel(self) -> None:
        """Stop compiling."""
        self.pending.cancel()


class Tuner:
    """Evaluates configs of one task, each once, on a bench.

    What needs the bench is done by a thread, one thing after the other, so that the bench does not wait while this process
    decides what to try next. Use as a context manager, which gives the bench back.

    Attributes:
        resources: registers of all threads of a config's largest program, as far as it was compiled.
        began: when the first config was there, compiled, to be evaluated (time.monotonic); None before.
        evaluations: trials that it has stored.
        compilers: how many configs compile at the same time.
        whole: whether all of the space is searched, whatever was found for the other 16-bit type.
        meanwhile: called again and again while the bench is waited for.
    """

    def __init__(self, task: Task, store: "TrialStore", bench: GpuWorker, compiling: Callable[[Config], PendingCompile]) -> None:
        """compiling: begins to compile a config."""
        self.task, self.store, self.bench, self.compiling = task, store, bench, compiling
        self.resources: dict[Config, int] = {}
        self.samples = SCREEN_SAMPLES
        self.measures_spills = False
        self.began: float | None = None
        self.evaluations = 0
        self._counting = Lock()
        self.compilers, self.whole = 1, False
        self.meanwhile: Callable[[], None] = lambda: None
        self._best_us: float | None = None
        self._in_turn = ThreadPoolExecutor(1)
        self._preparing: Future[Any] | None = None

    @cached_property
    def prune(self) -> bool:
        """Return whether a config is dropped for what the compiler says."""
        return sum(1 for _ in self.task.variant.configs(self.task.case)) > TRIED_WHOLE

    def begin(self, config: Config) -> Begun:
        """Begin to compile a config."""
        return Begun(self, config, self.compiling(config))

    def known(self, config: Config) -> Evaluation | None:
        """Return the stored trial of a config."""
        trial = self.store.get(self.task, config)
        return None if trial is None else self._remember(config, trial)

    def evaluate(self, config: Config, compiled: CompileResult, refusal: Evaluation | None) -> Evaluation:
        """Return the stored trial of a config, else store a new one: its `refusal`, or measured here where there is none."""
        known = self.known(config)
        if known is None:
            known = replace(
                refusal or self.measure(config),
                resources=compiled.resources,
                spill_bytes=compiled.spill_bytes,
                shared_bytes=max((kernel.shared_bytes for kernel in compiled.kernels), default=0),
            )
            self.store.put(self.task, config, known)
            with self._counting:  # what is refused is stored by another thread than what is measured
                self.evaluations += 1
        return self._remember(config, known)

    def _remember(self, config: Config, trial: Evaluation) -> Evaluation:
        self.resources[config] = trial.resources
        if trial.time_us is not None:
            self._best_us = min(trial.time_us, self._best_us or trial.time_us)
        return trial

    def refusal(self, config: Config, compiled: CompileResult) -> Evaluation | None:
        """Return the trial of a config that is not measured for what the compiler says; None for one that is measured."""
        if compiled.error:
            return Evaluation("lost" if compiled.lost else "compile", detail=compiled.error)
        if compiled.spill_bytes and self.prune and not self.measures_spills:
            return Evaluation("spills", detail=f"{compiled.spill_bytes} bytes per thread")
        wanted, fitting = getattr(config, "ctas", 0), _resident(compiled)
        if wanted > fitting and self.prune and config != self.task.default:  # all others are held to that
            return Evaluation("occupancy", detail=f"{fitting} programs fit an SM, not {wanted}")
        return None

    def measure(self, config: Config) -> Evaluation:
        """Check a config and time it on the bench."""
        return self.bench.trial(self.task, config, self._best_us if self.samples == SCREEN_SAMPLES else None, self.samples)

    def trials(self, configs: Sequence[Config]) -> list[Evaluation]:
        """Measure every config anew; store nothing."""
        return [self.in_turn(self.measure, config).result() for config in configs]

    def in_turn(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Have the thread do what needs the bench, behind everything that it was given before."""
        return self._in_turn.submit(work, *arguments)

    def prepare(self) -> None:
        """Have the bench make ready while the first configs compile."""
        self._preparing = self.in_turn(self._prepare)

    def ready(self) -> bool:
        """Return whether the bench makes nothing ready any more."""
        return self._preparing is None or self._preparing.done()

    def _prepare(self) -> None:
        with suppress(ChildCrashedError):  # the first trial starts another child, or says so
            self.bench.prepare(self.task)

    def run_final(self, configs: Sequence[Config], default: Config | None = None) -> tuple[Config, dict[str, Any]]:
        """Return the best of correct configs, timed interleaved; the first is the incumbent and is kept unless surely slower.

        One for which there is no memory beside those before it drops out.

        The evidence has the default's time, too, and the interval of default over best, from the same rounds, where it is one
        of them.

        Of challengers that cannot be told apart the one with the fewest registers wins, then the first.
        """
        asked = self.in_turn(self.bench.samples, self.task, configs)
        while not asked.done():
            self.meanwhile()
            time.sleep(_POLL_S)
        timed = [(config, taken) for config, taken in zip(configs, asked.result(), strict=True) if taken is not None]
        configs, samples = [config for config, _ in timed], [taken for _, taken in timed]
        gains = [ratio_interval(samples[0], sample) for sample in samples]
        best = max(range(len(configs)), key=lambda i: gains[i].median)
        faster = [i for i in range(len(configs)) if gains[i].low > 1.0]
        tied = [i for i in faster if i == best or ratio_interval(samples[i], samples[best]).contains(1.0)]
        chosen = min(tied, key=lambda i: (self.resources.get(configs[i], 0), i), default=0)
        times = median_interval(samples[chosen])
        evidence: dict[str, Any] = {
            "time_us": round(times.median, 4),
            "incumbent_us": round(median_interval(samples[0]).median, 4),
            "speedup": round(gains[chosen].median, 4),
            "ci_low": round(gains[chosen].low, 4),
            "ci_high": round(gains[chosen].high, 4),
            "default_us": None,
        }
        if default in configs:
            beside = samples[configs.index(default)]
            over = ratio_interval(beside, samples[chosen])
            evidence |= {
                "default_us": round(median_interval(beside).median, 4),
                "over_default": [round(over.low, 4), round(over.high, 4)],
            }
        return configs[chosen], evidence

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for what the bench is at, unless interrupted, and have it give the memory of inputs and reference back."""
        if kind is not None and not issubclass(kind, Exception):
            self.bench.stop()
        self._in_turn.shutdown(cancel_futures=True)
        self._in_turn = ThreadPoolExecutor(1)
        self.bench.close()


def _resident(compiled: CompileResult) -> int:
    """Return programs that one SM holds of the config's cooperative grids, all of which must fit to be launched.

    Where there is none, of the kernel of which it holds most: which one `ctas` is about is not known, and any of them runs. Any
    number where the GPU's limits are not known.
    """
    arch = device.current().arch
    programs = [(kernel.cooperative, resident(kernel, arch).programs) for kernel in compiled.kernels if arch in LIMITS]
    together = [fitting for cooperative, fitting in programs if cooperative]
    return min(together) if together else max((fitting for _, fitting in programs), default=sys.maxsize)


class NothingPassedError(Exception):
    """A search in which no config was correct and timed."""


def tune(
    tuner: Tuner,
    search: Search,
    root: Path | None,
    on_trial: Callable[[Config, Evaluation], None] = lambda _config, _trial: None,
) -> cache.CacheEntry:
    """Search one case and store the best config.

    Args:
        tuner: of the case.
        search: how much to search.
        root: the configs folder, None for the usual one.
        on_trial: told every new evaluation.

    Returns:
        The entry that is now in the cache.

    Raises:
        NothingPassedError: there is no config to store.
        ChildCrashedError: the measuring process crashed over every finalist, or stopped.
    """
    with tuner:
        pool = _pool(tuner)
        first, feasibility = starting_points(tuner.task, pool, root), feasibility_of(tuner.task, tuner.store, pool)
        explored = _explored(tuner, pool, first, search, on_trial, feasibility)
        times = times_of(explored)
        before = looked_up(tuner.task, root)
        if before.config not in times and before.config not in explored:  # the incumbent is judged, whatever the search left out
            trial = tuner.begin(before.config).evaluate().result()
            times |= {before.config: trial.time_us} if trial.time_us is not None else {}
        return _decide(tuner, before, times, explored, root)


def measure_space(tuner: Tuner, some: Sequence[Config] | None = None) -> dict[Config, Evaluation]:
    """Evaluate configs in random order with three times the samples of a search; decide nothing.

    some: the configs, None for every valid one of the space.

    Raises:
        ValueError: the space has no valid config for the case, or says what makes no sense.
    """
    pool = checked_space(tuner.task) if some is None else list(some)
    tuner.samples = 3 * SCREEN_SAMPLES
    with tuner:
        return _explored(tuner, pool, (), Search(sampler="random"))


def _explored(
    tuner: Tuner,
    pool: Sequence[Config],
    first: Sequence[Config],
    search: Search,
    on_trial: Callable[[Config, Evaluation], None] = lambda _config, _trial: None,
    feasibility: Mapping[Config, float] | None = None,
) -> dict[Config, Evaluation]:
    known = _known(tuner, pool)
    if len(known) < len(pool):
        tuner.prepare()
    pace = tuner.compilers, tuner.meanwhile
    return explore(pool, first, search, tuner.begin, on_trial, known, *pace, feasibility, tuner.ready)


def first_asked(tuner: Tuner, search: Search, root: Path | None) -> Iterator[tuple[Tuner, Config]]:
    """Yield what the search of a case would try first now; nothing where some of it was tried before.

    Raises:
        ValueError: the space has no valid config for the case, or says what makes no sense.
    """
    pool = _pool(tuner)
    if not _known(tuner, pool):
        feasibility = feasibility_of(tuner.task, tuner.store, pool)
        order = opening(pool, starting_points(tuner.task, pool, root), search, feasibility)
        yield from ((tuner, config) for config in order[: min(_AHEAD, search.trials or _AHEAD)])


def _pool(tuner: Tuner) -> list[Config]:
    return candidates(tuner.task, None if tuner.whole else tuner.store)


def _known(tuner: Tuner, pool: Sequence[Config]) -> dict[Config, Evaluation]:
    return {config: trial for config in pool if (trial := tuner.known(config)) is not None}


def _decide(
    tuner: Tuner, before: cache.Choice, times: dict[Config, float], explored: Mapping[Config, Evaluation], root: Path | None
) -> cache.CacheEntry:
    op, case, variant, default = tuner.task.op, tuner.task.case, tuner.task.variant, tuner.task.default
    standing = list(dict.fromkeys(config for config in (before.config, default) if config in times))
    ranked = sorted(times, key=lambda config: times[config])
    if not ranked:
        raise NothingPassedError(f"{op.name} {variant.name}: no config passed its check for {case.label}")
    close = [config for config in ranked if times[config] <= _FINAL_MARGIN * times[ranked[0]]][:_FINALISTS]
    finalists = list(dict.fromkeys([*(standing or ranked[:1]), *close]))
    if len(finalists) > 1:
        best, evidence = _run_final(tuner, finalists, default)
    else:
        best, evidence = finalists[0], {"time_us": times[finalists[0]], "default_us": times.get(default)}
    if standing[:1] == [before.config]:
        evidence["before"] = before.source
    evidence |= {"trials": len(explored), **stamp(variant)}
    entry = cache.CacheEntry(
        variant=variant.name,
        case=case.name,
        axes=case.axes,
        dtype=case.dtype,
        quant=case.quant,
        options=case.options,
        policy=tuner.task.policy,
        config=knobs_of(best),
        evidence=evidence,
    )
    cache.store(op.name, device.current().slug, entry, root)
    return entry


def _run_final(tuner: Tuner, finalists: Sequence[Config], default: Config) -> tuple[Config, dict[str, Any]]:
    """Run the tuner's final; where it crashes the child, let each challenger meet the incumbent in a final of two.

    What loses that drops out: a challenger beside the incumbent, or the incumbent alone, whom the next then follows.

    Raises:
        ChildCrashedError: all dropped out, or the bench stopped.
    """
    try:
        return tuner.run_final(finalists, default)
    except ChildCrashedError:
        if len(finalists) == 1:
            raise
    incumbent, *challengers = finalists
    try:
        alone = tuner.run_final([incumbent], default)
    except ChildCrashedError:
        return _run_final(tuner, challengers, default)
    finals = []
    for challenger in challengers:
        with suppress(ChildCrashedError):
            finals.append(tuner.run_final([incumbent, challenger], default))
    return max((*finals, alone), key=lambda final: final[1]["speedup"])
