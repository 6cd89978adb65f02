"""Search the best config of a variant on a case and store the config in the cache.

compile -> drop configs that spill much or do not fit -> check on poisoned outputs -> screen -> final against the incumbent.
The incumbent is the config of a call without `config=` before the search; it stays unless the interval says that a challenger
is faster. `search.loop` decides which configs are tried. A tuner refuses or measures a config, and stores the evaluation.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from kerneltune import cache, device
from kerneltune.measuring.assembly import TARGETS, occupancy_of
from kerneltune.measuring.compiler import CompilePool, CompileResult
from kerneltune.plan import Options
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.search.loop import explore, times_of
from kerneltune.spec import Config, TaskKey
from kerneltune.stats import median_interval, ratio_interval
from kerneltune.task import Evaluation, Run, Task, knobs_of, provenance
from kerneltune.tune.candidates import candidates
from kerneltune.tune.gpu_worker import GpuWorker

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

_POLL_S = 0.001
SMALL_SPILL = 32
"""Spilled bytes of a thread up to which a config is measured. In 68 of 356 cases of `int4_fp8_grouped_gemm` the fastest of all
configs spills 8 to 32 bytes, in five more (H200, 2026-11-28, benchmarks/trials)."""
_MAX_UNPRUNED_CONFIGS = 20
"""Largest number of configs of a space that are all measured, even if they spill: so small a space is a published list."""
_FINALISTS = 4
_FINAL_MARGIN = 1.04
_CONFIGS_AHEAD = 256
"""Configs of a later case that are compiled ahead. Large inputs and a paired final leave the compilers much idle time."""


class CompileQueue:
    """Compile the configs that searches ask for, and in idle time the first configs of the next searches.

    Attributes:
        compilers: number of configs that compile at the same time.
    """

    def __init__(self, pool: CompilePool) -> None:
        self._pool, self.compilers = pool, pool.workers
        self._begun: list[Future[CompileResult]] = []
        self._ahead: dict[tuple[TaskKey, Config], Future[CompileResult]] = {}
        self._later: Iterator[Run] = iter(())

    def compile(self, task: Task, config: Config) -> "Future[CompileResult]":
        """Begin to compile a config, or return a compilation that began ahead."""
        return self._ahead.pop((task.key, config), None) or self._submit(task, config)

    def look_ahead(self, later: Iterable[Run]) -> None:
        """Replace the configs that later searches need first; `fill` compiles them."""
        self._later = (run for run in later if (run.task.key, run.config) not in self._ahead)

    def fill(self) -> None:
        """Begin to compile configs of later searches while a core is idle."""
        self._begun = [pending for pending in self._begun if not pending.done()]
        while len(self._begun) < self.compilers:
            following = next(self._later, None)
            if following is None:
                return
            self._ahead[following.task.key, following.config] = self._submit(*following)

    def forget(self, task: Task) -> None:
        """Drop compilations that began ahead for a task whose search is over."""
        self._ahead = {run: compiling for run, compiling in self._ahead.items() if run[0] != task.key}

    def _submit(self, task: Task, config: Config) -> "Future[CompileResult]":
        self._begun.append(self._pool.submit(Run(task, config)))
        return self._begun[-1]


class NothingPassedError(Exception):
    """Report that no config of a search was correct and timed."""


class Final(NamedTuple):
    """Hold the result of a paired final: the incumbent, the best config, and the evidence of an entry."""

    incumbent: Config
    best: Config
    evidence: dict[str, Any]


class Tuner:
    """Search a task. As the `search.loop.Evaluator` of a GPU, evaluate each config at most once.

    Attributes:
        requests: thread that sends requests to the worker in order; the GPU does not wait for decisions of this process.
        options: limits of the search.
        compilers: number of configs that compile at the same time.
        program_registers: registers of all threads of the largest program of every compiled config.
    """

    def __init__(self, task: Task, store: "TrialStore", worker: GpuWorker, queue: CompileQueue, options: Options) -> None:
        self.task, self.store, self.worker, self.queue, self.options = task, store, worker, queue, options
        self.compilers = queue.compilers
        self.program_registers: dict[Config, int] = {}
        self._best_us: float | None = None
        self.requests = ThreadPoolExecutor(1)
        self._preparing: Future[Any] | None = None

    def tune(self) -> cache.CacheEntry:
        """Search the task, store the best config, and return its entry.

        Raises:
            NothingPassedError: there is no config to store.
            WorkerCrashedError: the worker's process crashed over every finalist.
            WorkerStoppedError: the worker was stopped.
        """
        with self:
            offered = candidates(self.task, self.store, self.options)
            stored = self._evaluations(offered.pool)
            if len(stored) < len(offered.pool):
                self.prepare()
            explored = explore(offered, self.options.search, self, stored)
            times = times_of(explored)
            before = self.task.chooser.find(self.task.op.case_of_call(self.task.case))
            if before.config not in explored:  # the incumbent takes part in the final even if the search left it out
                evaluation = self.evaluate(before.config, self.compile(before.config)).result()
                times |= times_of({before.config: evaluation})
            return self._decide(before, times, len(explored))

    def first_runs(self) -> Iterator[Run]:
        """Yield the configs that the search would try first; nothing if the task was searched before."""
        offered, limits = candidates(self.task, self.store, self.options), self.options.search
        if not self._evaluations(offered.pool):
            order = offered.in_order(limits)
            yield from (Run(self.task, config) for config in order[: min(_CONFIGS_AHEAD, limits.trials or _CONFIGS_AHEAD)])

    def _evaluations(self, pool: Sequence[Config]) -> dict[Config, Evaluation]:
        trials = {config: self.stored_trial(config) for config in pool}
        return {config: evaluation for config, evaluation in trials.items() if evaluation is not None}

    def _decide(self, before: cache.Choice, times: dict[Config, float], num_trials: int) -> cache.CacheEntry:
        """Time the fastest configs against the incumbent, and store the winner. The default stands in for a failed incumbent."""
        task, default = self.task, self.task.default
        incumbents = list(dict.fromkeys(config for config in (before.config, default) if config in times))
        ranked = sorted(times, key=lambda config: times[config])
        if not ranked:
            evaluation = self.stored_trial(default)
            why = f"; the default: {evaluation.reason}" if evaluation is not None and evaluation.reason else ""
            raise NothingPassedError(f"{task.op.name} {task.variant.name}: no config can be timed for {task.case.label}{why}")
        close = [config for config in ranked if times[config] <= _FINAL_MARGIN * times[ranked[0]]][:_FINALISTS]
        finalists = list(dict.fromkeys([*(incumbents or ranked[:1]), *close]))
        final = Final(ranked[0], ranked[0], {"time_us": times[ranked[0]], "default_us": times.get(default)})
        if len(finalists) > 1:
            final = self._crash_safe_final(finalists, default)
        evidence = dict(final.evidence)
        if final.incumbent == before.config:
            evidence["before"] = before.source.name
        evidence |= {"trials": num_trials, **provenance(task.variant)}
        if self.options.search.is_time_over:
            evidence["ended_early"] = True
        entry = cache.CacheEntry(**task.key._asdict(), config=knobs_of(final.best), evidence=evidence)
        cache.store(device.current().slug, entry)
        return entry

    def _crash_safe_final(self, finalists: Sequence[Config], default: Config) -> Final:
        """Run the final, also if a config crashes the worker.

        If the worker crashes, let each challenger meet the incumbent in a final of two configs. If a final of two crashes, its
        challenger drops out. If the incumbent crashes in a final of its own, the next challenger takes its place.

        Raises:
            WorkerCrashedError: all configs dropped out.
        """
        incumbent, *challengers = finalists
        try:
            return self.run_final(finalists, default)
        except WorkerCrashedError:
            if not challengers:
                raise
        try:
            alone = self.run_final([incumbent], default)
        except WorkerCrashedError:
            return self._crash_safe_final(challengers, default)
        finals = []
        for challenger in challengers:
            with suppress(WorkerCrashedError):
                finals.append(self.run_final([incumbent, challenger], default))
        return max((*finals, alone), key=lambda final: final.evidence["speedup"])

    @cached_property
    def drops_unfit(self) -> bool:
        """Return whether configs that spill much or do not fit an SM are dropped without a measurement."""
        return sum(1 for _ in self.task.variant.configs(self.task.case)) > _MAX_UNPRUNED_CONFIGS

    def compile(self, config: Config) -> "Future[CompileResult]":
        """Begin to compile a config."""
        return self.queue.compile(self.task, config)

    def evaluate(self, config: Config, compilation: "Future[CompileResult]") -> "Future[Evaluation]":
        """Return the evaluation of a config that has begun to compile, which is stored when it is done.

        If the compiler refuses the config, the future is done; otherwise it waits for the worker.
        """
        compiled = compilation.result()
        refusal = self.refusal(config, compiled)
        if refusal is None:
            return self.requests.submit(self.stored_or_measured, config, compiled, None)
        refused: Future[Evaluation] = Future()
        refused.set_result(self.stored_or_measured(config, compiled, refusal))
        return refused

    def use_idle_time(self) -> None:
        """Compile configs of later cases where a core is idle."""
        self.queue.fill()

    def stored_trial(self, config: Config) -> Evaluation | None:
        """Return the stored evaluation of a config; None if there is none."""
        evaluation = self.store.get(self.task, config)
        return None if evaluation is None else self._remember(config, evaluation)

    def stored_or_measured(self, config: Config, compiled: CompileResult, refusal: Evaluation | None) -> Evaluation:
        """Return the stored evaluation of a config; if there is none, measure the config unless it is refused, and store it."""
        evaluation = self.stored_trial(config)
        if evaluation is None:
            evaluation = replace(
                refusal or self.measure_config(config),
                program_registers=compiled.program_registers,
                spill_bytes=compiled.spill_bytes,
                shared_bytes=max((kernel.shared_bytes for kernel in compiled.kernels), default=0),
            )
            self.store.put(self.task, config, evaluation)
        return self._remember(config, evaluation)

    def _remember(self, config: Config, evaluation: Evaluation) -> Evaluation:
        self.program_registers[config] = evaluation.program_registers
        if evaluation.time_us is not None:
            self._best_us = min(evaluation.time_us, self._best_us or evaluation.time_us)
        return evaluation

    def refusal(self, config: Config, compiled: CompileResult) -> Evaluation | None:
        """Return the evaluation of a config that is refused after its compilation; None for a config to be measured."""
        if compiled.unknown:  # the worker compiles it
            return None
        if compiled.error:
            return Evaluation("crashed" if compiled.crashed else "compile", reason=compiled.error)
        if not self.drops_unfit or config == self.task.default:  # every other config is compared with the default
            return None
        if compiled.spill_bytes > SMALL_SPILL:
            return Evaluation("spills", reason=f"{compiled.spill_bytes} bytes per thread")
        needed, fitting = getattr(config, "ctas", 0), _fitting_programs(compiled)
        if needed > fitting:
            return Evaluation("occupancy", reason=f"{fitting} programs fit an SM, not {needed}")
        return None

    def measure_config(self, config: Config) -> Evaluation:
        """Check and time a config on the GPU, with fewer samples far behind the best."""
        return self.worker.measure(self.task, config, self._best_us)

    def prepare(self) -> None:
        """Let the worker make inputs and the reference while the first configs compile; a measurement tells why it cannot."""
        self._preparing = self.requests.submit(self.worker.prepare, self.task)

    def is_ready(self) -> bool:
        """Return whether inputs and the reference are made."""
        return self._preparing is None or self._preparing.done()

    def run_final(self, configs: Sequence[Config], default: Config) -> Final:
        """Time correct configs interleaved, and choose the best config.

        The first config is the incumbent, which stays unless another config is surely faster. Of challengers with
        indistinguishable times the config with the fewest registers wins, then the first. A config drops out if the GPU has no
        memory for its inputs beside the inputs of the configs before it. If `default` is among the configs, the evidence has
        its time and the interval of its time over the best time, from the same rounds.
        """
        request = self.requests.submit(self.worker.time_interleaved, self.task, configs)
        while not request.done():
            self.use_idle_time()
            time.sleep(_POLL_S)
        samples = {config: times for config, times in zip(configs, request.result(), strict=True) if times is not None}
        incumbent = next(iter(samples))
        gains = {config: ratio_interval(samples[incumbent], times) for config, times in samples.items()}
        faster = [config for config, gain in gains.items() if gain.low > 1.0]
        if self.task.op.weighs_hot and self.task.policy == "cold" and default in samples:
            lost = self._hot_losses(default, faster)
            faster = [config for config in faster if ratio_interval(samples[default], samples[config]).median > lost[config]]
        fastest = max(faster, key=lambda config: gains[config].median, default=incumbent)
        tied = [
            config for config in faster if config == fastest or ratio_interval(samples[config], samples[fastest]).contains(1.0)
        ]
        best = min(tied, key=lambda config: self.program_registers.get(config, 0), default=incumbent)
        medians = {config: round(median_interval(times).median, 4) for config, times in samples.items()}
        evidence: dict[str, Any] = {
            "time_us": medians[best],
            "incumbent_us": medians[incumbent],
            "speedup": round(gains[best].median, 4),
            "ci_low": round(gains[best].low, 4),
            "ci_high": round(gains[best].high, 4),
            "default_us": medians.get(default),
        }
        if default in samples:
            over_default = ratio_interval(samples[default], samples[best])
            evidence["over_default"] = [round(over_default.low, 4), round(over_default.high, 4)]
            evidence["gain"] = round(over_default.median, 4)
        return Final(incumbent, best, evidence)

    def _hot_losses(self, default: Config, configs: Sequence[Config]) -> dict[Config, float]:
        """Return how many times as long as the default each config surely takes with a hot L2; 0 where it takes no longer.

        A program may launch a kernel right behind the kernel that wrote its inputs.
        """
        if not configs:
            return {}
        request = self.requests.submit(self.worker.time_interleaved, replace(self.task, policy="hot"), [default, *configs])
        first, *others = request.result()
        ratios = [None if first is None or times is None else ratio_interval(times, first) for times in others]
        return {config: r.median if r and r.low > 1.0 else 0.0 for config, r in zip(configs, ratios, strict=True)}

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the present request, except after an interrupt, and let the worker free inputs and reference."""
        if kind is not None and not issubclass(kind, Exception):
            self.worker.stop()
        self.requests.shutdown(cancel_futures=True)
        self.requests = ThreadPoolExecutor(1)
        self.worker.close()


def _fitting_programs(compiled: CompileResult) -> int:
    """Return how many programs of the config's cooperative grids fit an SM, where all programs must run at once.

    Without a cooperative grid, return the largest number that fits for any kernel, because `ctas` may concern any kernel. On a
    GPU with unknown limits every number fits.
    """
    arch = device.current().arch
    if arch not in TARGETS:
        return sys.maxsize
    cooperative = [kernel for kernel in compiled.kernels if kernel.cooperative]
    if cooperative:
        return min(occupancy_of(kernel, arch).programs for kernel in cooperative)
    return max((occupancy_of(kernel, arch).programs for kernel in compiled.kernels), default=sys.maxsize)
