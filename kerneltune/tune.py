"""The search for the best config of a variant on a case; the only writer of configs.

compile -> drop what spills or cannot be resident -> check on poisoned outputs -> screen -> duel with the incumbent. The winner
replaces the incumbent, default or cached, only where the interval says that it is faster. May import torch and optuna.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kerneltune import cache, device
from kerneltune.check import Checker
from kerneltune.compare import commit, config_values
from kerneltune.compiler import Compiled, CompilePool, Job
from kerneltune.measure import POLICIES, Contender, interleave, rotation
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.stats import median_interval, ratio_interval
from kerneltune.trials import Trial, TrialStore

ENUMERATE_UP_TO = 120
_FINALISTS = 4
_FINAL_MARGIN = 1.04
_SCREEN_SAMPLES = 5
_TRIED_WHOLE = 20
"""Spaces up to this size are published lists, and run even where they spill."""
_SCREEN_US = 250.0
_TRANSFERRED = 16
_BATCH = 16
_ENUMERATED_BATCH = 48


class NothingPassedError(Exception):
    """A search in which no config was correct and timed."""


@dataclass(frozen=True, slots=True)
class Search:
    """How much to search. budget_s: seconds per case, None for no limit; trials: most configs; sampler: above
    ENUMERATE_UP_TO configs, one of `tpe`, `gp`, `random`, `qmc`; seed."""

    budget_s: float | None = None
    trials: int | None = None
    sampler: str = "tpe"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget_s is not None and self.budget_s <= 0:
            raise ValueError(f"budget must be above 0 seconds, got {self.budget_s}")
        if self.trials is not None and self.trials <= 0:
            raise ValueError(f"trials must be above 0, got {self.trials}")
        if self.sampler not in _SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(_SAMPLERS)}, got {self.sampler!r}")


def jobs(op: Op, case: Case, configs: Iterable[Config], variant: Variant) -> list[Job]:
    """What a compile pool is given to compile configs of a variant."""
    return [Job(partial(op.inputs, case), variant.run, config) for config in configs]


def neighbour_dtype(op: Op, case: Case) -> Case | None:
    """The same case in the other 16-bit type, whose ranking this one may start from."""
    other = {"bfloat16": "float16", "float16": "bfloat16"}.get(case.dtype)
    return Case(case.name, case.axes, other, case.quant, case.options) if other in op.dtypes and other else None


def candidates(op: Op, case: Case, variant: Variant, policy: str, store: TrialStore) -> list[Config]:
    """Default first, then the space; only the neighbour's best where the other 16-bit type was searched before.

    Raises:
        ValueError: the space has no valid config for the case.
    """
    space = list(variant.configs(case))
    if not space:
        raise ValueError(f"{op.name} {variant.name}: no valid config for {case.label}")
    neighbour = neighbour_dtype(op, case)
    ranked = store.ranked(op, neighbour, variant, policy) if neighbour else []
    if len(ranked) > max(_TRANSFERRED, len(store.ranked(op, case, variant, policy))):
        space = [config for values in ranked[:_TRANSFERRED] if (config := variant.config_from(values)) in set(space)]
    default = variant.default_config(case)
    return [default, *(config for config in space if config != default)]


class Tuner:
    """Evaluates configs of one variant on one case, on the GPU of this process."""

    def __init__(self, op: Op, case: Case, variant: Variant, policy: str, store: TrialStore) -> None:
        self.op, self.case, self.variant, self.policy, self.store = op, case, variant, policy, store
        self._checker: Checker | None = None
        self._inputs: list[Any] = []
        self.resources: dict[Config, int] = {}
        self.prune = sum(1 for _ in variant.configs(case)) > _TRIED_WHOLE

    def evaluate(self, config: Config, compiled: Compiled) -> Trial:
        """The stored trial of a config, or a new one, stored."""
        self.resources[config] = compiled.resources
        known = self.store.get(self.op, self.case, self.variant, self.policy, config)
        if known is None:
            known = self._evaluate(config, compiled)
            self.store.put(self.op, self.case, self.variant, self.policy, config, known)
        return known

    def _evaluate(self, config: Config, compiled: Compiled) -> Trial:
        if compiled.error:
            return Trial("compile", detail=compiled.error)
        if compiled.spill_bytes and self.prune:
            return Trial("spills", detail=f"{compiled.spill_bytes} bytes per thread")
        self._prepare()
        assert self._checker is not None
        errors = self._checker.errors(self.variant, config)
        if errors:
            return Trial("wrong", detail="; ".join(errors))
        try:
            contender = self._contender(config, _SCREEN_US)
            return Trial("ok", time_us=float(np.median([contender.sample_us() for _ in range(_SCREEN_SAMPLES)])))
        except RuntimeError as error:
            torch.cuda.synchronize()
            return Trial("failed", detail=str(error).splitlines()[0][:200])

    def duel(self, configs: Sequence[Config]) -> tuple[Config, dict[str, Any]]:
        """The best of correct configs, timed interleaved; the first is the incumbent and is kept unless surely slower.

        Of challengers that cannot be told apart the one with the fewest registers wins, then the first.
        """
        self._prepare()
        contenders = {str(i): self._contender(config) for i, config in enumerate(configs)}
        samples = interleave(contenders, min_rounds=15, max_rounds=40)
        gains = [ratio_interval(samples["0"], samples[str(i)]) for i in range(len(configs))]
        best = max(range(len(configs)), key=lambda i: gains[i].median)
        faster = [i for i in range(len(configs)) if gains[i].low > 1.0]
        tied = [i for i in faster if i == best or ratio_interval(samples[str(i)], samples[str(best)]).contains(1.0)]
        chosen = min(tied, key=lambda i: (self.resources.get(configs[i], 0), i), default=0)
        times = median_interval(samples[str(chosen)])
        evidence = {
            "time_us": round(times.median, 4),
            "incumbent_us": round(median_interval(samples["0"]).median, 4),
            "speedup": round(gains[chosen].median, 4),
            "ci_low": round(gains[chosen].low, 4),
            "ci_high": round(gains[chosen].high, 4),
        }
        return configs[chosen], evidence

    def release(self) -> None:
        """Give the memory of inputs and reference back."""
        self._checker, self._inputs = None, []
        torch.cuda.empty_cache()

    def _prepare(self) -> None:
        if self._checker is None:
            self._checker = Checker(self.op, self.case, "cuda")
            free, _ = torch.cuda.mem_get_info()
            sets = rotation(POLICIES[self.policy], self.op.traffic(self.case).total, device.current().l2_bytes, free)
            self._inputs = [self.op.inputs(self.case, device="cuda", seed=i) for i in range(sets)]

    def _contender(self, config: Config, sample_us: float = 800.0) -> Contender:
        return Contender(lambda i: self.variant.run(self._inputs[i], config), len(self._inputs), POLICIES[self.policy], sample_us)


def tune(
    tuner: Tuner,
    search: Search,
    compiled: Callable[[Sequence[Config]], Iterable[Compiled]],
    root: Path | None,
    on_trial: Callable[[Config, Trial], None] = lambda _config, _trial: None,
) -> cache.Entry:
    """Search one case and store the best config.

    Args:
        compiled: answers with what compiling configs gave, in their order.
        root: the configs folder, None for the usual one.

    Returns:
        The entry that is now in the cache.

    Raises:
        NothingPassedError: there is no config to store.
    """
    op, case, variant = tuner.op, tuner.case, tuner.variant
    started = time.monotonic()
    pool = candidates(op, case, variant, tuner.policy, tuner.store)
    proposals = _enumerate(pool) if len(pool) <= ENUMERATE_UP_TO else _Feedback(pool, search)
    times: dict[Config, float] = {}
    seen = 0
    out_of_time = False
    batch = next(proposals, None)
    while batch:
        batch = batch[: search.trials - seen] if search.trials is not None else batch
        for config, result in zip(batch, compiled(batch), strict=True):
            trial = tuner.evaluate(config, result)
            on_trial(config, trial)
            seen += 1
            if trial.time_us is not None:
                times[config] = trial.time_us
            out_of_time = search.budget_s is not None and time.monotonic() - started > search.budget_s
            if out_of_time:
                break
        if out_of_time or seen == search.trials:
            break
        batch = proposals.send(times) if isinstance(proposals, _Feedback) else next(proposals, None)
    cached = _cached(tuner, root)
    if cached is not None and cached not in times:  # whatever the budget left out, the incumbent is judged anew
        trial = tuner.evaluate(cached, *compiled([cached]))
        times |= {cached: trial.time_us} if trial.time_us is not None else {}
    try:
        return _decide(tuner, cached, times, seen, root)
    finally:
        tuner.release()


def _decide(tuner: Tuner, cached: Config | None, times: dict[Config, float], seen: int, root: Path | None) -> cache.Entry:
    op, case, variant = tuner.op, tuner.case, tuner.variant
    default = variant.default_config(case)
    standing = [config for config in (cached, default) if config in times]
    ranked = sorted(times, key=lambda config: times[config])
    if not ranked:
        raise NothingPassedError(f"{op.name} {variant.name}: no config passed its check for {case.label}")
    close = [config for config in ranked if times[config] <= _FINAL_MARGIN * times[ranked[0]]][:_FINALISTS]
    finalists = list(dict.fromkeys([*(standing or ranked[:1]), *close]))
    best, evidence = tuner.duel(finalists) if len(finalists) > 1 else (finalists[0], {"time_us": times.get(finalists[0])})
    evidence |= {
        "default_us": round(times[default], 4) if default in times else None,
        "trials": seen,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "driver": device.current().driver,
        "source_hash": op.source_hash,
        **device.versions(),
    }
    entry = cache.Entry(
        variant=variant.name,
        case=case.name,
        axes=case.axes,
        dtype=case.dtype,
        quant=case.quant,
        options=case.options,
        policy=tuner.policy,
        config=config_values(best) or {},
        evidence=evidence,
    )
    cache.store(op.name, device.current().slug, entry, root)
    return entry


def _cached(tuner: Tuner, root: Path | None) -> Config | None:
    """The config that the cache holds for exactly this case, if it still fits."""
    op, case, variant = tuner.op, tuner.case, tuner.variant
    hit = cache.lookup(
        op.name, variant.name, device.current().slug, case.axes, case.dtype, case.quant, case.options, tuner.policy, (), root
    )
    if hit is None or not hit.exact:
        return None
    try:
        config = variant.config_from(hit.entry.config)
    except ValueError:
        return None
    return config if variant.valid(case, config) is None else None


def _enumerate(pool: Sequence[Config]) -> Iterator[list[Config]]:
    """All configs, in batches that keep a compile pool busy and a budget in force."""
    for first in range(0, len(pool), _ENUMERATED_BATCH):
        yield list(pool[first : first + _ENUMERATED_BATCH])


class _Feedback(Iterator[list[Config]]):
    """Asks Optuna for batches of configs, each knob a category, and tells it the times of those before."""

    def __init__(self, pool: Sequence[Config], search: Search) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler, settings = _SAMPLERS[search.sampler]
        self._study = optuna.create_study(sampler=getattr(optuna.samplers, sampler)(seed=search.seed, **settings))
        self._left = dict.fromkeys(pool)
        knobs = list(config_values(pool[0]) or {})
        self._space: dict[str, optuna.distributions.BaseDistribution] = {
            knob: optuna.distributions.CategoricalDistribution(sorted({getattr(config, knob) for config in pool}, key=repr))
            for knob in knobs
        }
        self._asked: dict[Config, Any] = {}
        self._random = random.Random(search.seed)
        self._make = type(pool[0])
        self._first = list(pool[:1])

    def __next__(self) -> list[Config]:
        return self.send({})

    def send(self, times: dict[Config, float]) -> list[Config]:
        """The next batch, none of it asked before; empty when the space is used up."""
        import optuna

        for config, trial in list(self._asked.items()):
            if config in times:
                self._study.tell(trial, times[config])
            else:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            del self._asked[config]
        batch: list[Config] = []
        if self._first:
            batch, self._first = self._first, []
            self._left.pop(batch[0], None)
        attempts = 0
        while self._left and len(batch) < _BATCH:
            attempts += 1
            trial = self._study.ask(self._space)
            config = self._make(**trial.params)
            if config in self._left:
                self._asked[config] = trial
            else:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # asked before, or not valid
                if attempts < 20 * _BATCH:
                    continue
                config = self._random.choice(list(self._left))
            del self._left[config]
            batch.append(config)
        return batch


_SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tpe": ("TPESampler", {"multivariate": True, "constant_liar": True, "n_startup_trials": 16}),
    "gp": ("GPSampler", {}),
    "random": ("RandomSampler", {}),
    "qmc": ("QMCSampler", {}),
}


def compile_with(pool: CompilePool, op: Op, case: Case, variant: Variant) -> Callable[[Sequence[Config]], Iterable[Compiled]]:
    """`compiled` for `tune`, from a pool."""
    return lambda configs: pool.compile(jobs(op, case, configs, variant))
