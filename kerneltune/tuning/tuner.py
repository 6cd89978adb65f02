"""What becomes of each config: refused for what the compiler says, or measured on a bench, and stored; and the paired final.

Does not know which configs are tried; see one_case. Imports bench, compiler, device, isolated, occupancy, search, spec and stats.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

from kerneltune import device
from kerneltune.measuring.assembly import LIMITS, resident
from kerneltune.measuring.compiler import CompileResult, PendingCompile
from kerneltune.search.task import Task
from kerneltune.search.trials import Evaluation, TrialStore
from kerneltune.spec import Config
from kerneltune.stats import Samples, median_interval, ratio_interval
from kerneltune.tuning.bench import SCREEN_SAMPLES, TRIED_WHOLE
from kerneltune.tuning.isolated import ChildCrashedError, IsolatedBench

_POLL_S = 0.001


@dataclass(slots=True)
class Begun:
    """A `search.loop.Started`: a config that is being compiled, then measured by a tuner."""

    tuner: "Tuner"
    config: Config
    pending: PendingCompile
    _refusal: Evaluation | None = None
    _measured: "Future[Evaluation] | None" = None

    def done(self) -> bool:
        """Return whether it is compiled."""
        return self.pending.done()

    def refused(self) -> bool:
        """Return whether the compiler's word is enough."""
        self.tuner.began = self.tuner.began or time.monotonic()
        self._refusal = self.tuner.refusal(self.config, self.pending.result())
        return self._refusal is not None

    def measure(self) -> None:
        """Behind what the bench was given before."""
        self._measured = self.tuner.in_turn(self.tuner.evaluate, self.config, self.pending.result(), None)

    def measured(self) -> bool:
        """Return whether its time is there."""
        return self._measured is not None and self._measured.done()

    def result(self) -> Evaluation:
        """Wait for it; stored by then."""
        if self._measured is not None:
            return self._measured.result()
        return self.tuner.evaluate(self.config, self.pending.result(), self._refusal)

    def cancel(self) -> None:
        """Stop compiling, or do not begin to measure."""
        self.pending.cancel()
        if self._measured is not None:
            self._measured.cancel()


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

    def __init__(
        self, task: Task, store: TrialStore, bench: IsolatedBench, compiling: Callable[[Config], PendingCompile]
    ) -> None:
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
        self._opened = False
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
        self._open()
        return self.bench.trial(config, self._best_us if self.samples == SCREEN_SAMPLES else None, self.samples)

    def trials(self, configs: Sequence[Config]) -> list[Evaluation]:
        """Measure every config anew; store nothing."""
        return [self.in_turn(self.measure, config).result() for config in configs]

    def _samples(self, configs: Sequence[Config]) -> Sequence[Samples | None]:
        self._open()
        return self.bench.samples(configs)

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
        self._open()
        with suppress(ChildCrashedError):  # the first trial starts another child, or says so
            self.bench.prepare()

    def run_final(self, configs: Sequence[Config], default: Config | None = None) -> tuple[Config, dict[str, Any]]:
        """Return the best of correct configs, timed interleaved; the first is the incumbent and is kept unless surely slower.

        One for which there is no memory beside those before it drops out.

        The evidence has the default's time, too, and the interval of default over best, from the same rounds, where it is one
        of them.

        Of challengers that cannot be told apart the one with the fewest registers wins, then the first.
        """
        asked = self.in_turn(self._samples, configs)
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
        self._opened = False

    def _open(self) -> None:
        if not self._opened:
            self.bench.open(self.task)
            self._opened = True


def _resident(compiled: CompileResult) -> int:
    """Return programs that one SM holds of the config's cooperative grids, all of which must fit to be launched.

    Where there is none, of the kernel of which it holds most: which one `ctas` is about is not known, and any of them runs. Any
    number where the GPU's limits are not known.
    """
    arch = device.current().arch
    programs = [(kernel.cooperative, resident(kernel, arch).programs) for kernel in compiled.kernels if arch in LIMITS]
    together = [fitting for cooperative, fitting in programs if cooperative]
    return min(together) if together else max((fitting for _, fitting in programs), default=sys.maxsize)
