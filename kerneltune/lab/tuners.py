"""Other people's tuners, and ours, on one case: each searches the same configs, with nothing compiled before it begins.

A side is a function of a Task, run in a fresh process with a Triton cache of its own. Decides nothing about their results.
"""

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerneltune.plan import Options
from kerneltune.search.loop import Search
from kerneltune.search.task import Task, knobs_of
from kerneltune.spec import Config, Inputs, Variant
from kerneltune.tuning.candidates import Given, candidates, narrowed
from kerneltune.tuning.stage import Machines
from kerneltune.tuning.tuner import tune

US = "kerneltune tune"
EXHAUSTIVE = "@triton.autotune"
HELION = "Helion autotune"


@dataclass(frozen=True, slots=True)
class ContestTask:
    """What to tune, by names that another process can look up.

    Attributes:
        knobs: values that the space is narrowed to.
        folder: empty, for what a side has to write.
        began: when the process of the side was asked for (time.monotonic()).
        limit_s: seconds after which Helion is to stop with its best so far; None for no limit.
    """

    tuned: Task
    knobs: Given
    search: Search
    options: Options
    folder: Path = Path()
    began: float = 0.0
    limit_s: int | None = None

    @property
    def spent_s(self) -> float:
        """Return seconds since the process was asked for."""
        return time.monotonic() - self.began

    def narrow(self) -> Variant:
        """Return the variant with the space of the contest."""
        return narrowed(self.tuned.variant, self.knobs)

    def load(self) -> tuple[Variant, list[Config]]:
        """Return the variant with the space of the contest, and the configs to choose from, the default first."""
        variant = self.narrow()
        return variant, candidates(replace(self.tuned, variant=variant))


@dataclass(frozen=True, slots=True)
class TunerResult:
    """What a tuner ended with.

    Attributes:
        config: its choice.
        wall_s: seconds from when its process was asked for: imports, and all processes that it starts, included.
        evaluations: configs that it tried.
        best: its ranking as far as it has one, its choice first.
        remark: what else is to be said.
    """

    config: Config
    wall_s: float
    evaluations: int
    best: tuple[Config, ...]
    remark: str = ""


def by_kerneltune(task: ContestTask) -> TunerResult:
    """Run `kerneltune tune` with an empty trial store and an empty config cache.

    Raises:
        NothingPassedError, ChildLostError: there is no config.
    """
    options = replace(task.options, configs=task.folder / "configs", results=task.folder / "results")
    with Machines(options) as machines, machines.deciding():
        variant = task.narrow()  # while the pool starts
        tuner = machines.tuner(replace(task.tuned, variant=variant))
        entry = tune(tuner, task.search, options.configs)
        usage = machines.usage_of(tuner)
    wall_s = task.spent_s
    chosen = variant.config_from(entry.config)
    ranked = [variant.config_from(knobs) for knobs in tuner.store.ranked(tuner.task)]
    best = tuple(dict.fromkeys([chosen, *ranked]))
    first_s = (tuner.began or task.began) - task.began
    remark = f"first config compiled after {first_s:.1f} s, from there GPU idle for {100 * usage.idle:.0f} %"
    if task.search.until_gain is not None:
        remark += f"; stops when the rest is expected to gain less than {100 * task.search.until_gain:g} %"
    return TunerResult(chosen, wall_s, usage.evaluations, best, remark)


class _Launch:
    """What Triton's Autotuner takes for a kernel: runs the variant, whatever it launches."""

    def __init__(self, variant: Variant, inputs: Inputs) -> None:
        self.fn = _nothing  # the Autotuner looks for a function behind its kernel
        self._variant, self._inputs = variant, inputs
        self.refused: dict[Config, str] = {}

    def run(self, *, config: Config, **_meta: Any) -> None:
        """Launch under a config; one that cannot be launched counts as one that lacks resources, which an Autotuner drops."""
        from triton.runtime.errors import OutOfResources

        try:
            self._variant.run(self._inputs, config)
        except Exception as error:  # a compiler or a driver may raise anything
            self.refused[config] = str(error)
            raise OutOfResources(0, 0, type(error).__name__) from error


def _nothing() -> None: ...


def by_triton(task: ContestTask, do_bench: Callable[..., Any] | None = None, where: str = "cuda") -> TunerResult:
    """Run Triton's own Autotuner over all configs: it compiles one after the other and times each by do_bench.

    It checks no result. do_bench: in place of the Autotuner's own.

    Raises:
        ValueError: no config could be launched.
    """
    import triton
    from triton.runtime.autotuner import Autotuner

    variant, configs = task.load()
    launch = _Launch(variant, task.tuned.op.inputs(task.tuned.case, device=where, seed=0))
    offered = [triton.Config({"config": config}) for config in configs]
    tuner = Autotuner(launch, [], offered, [], None, None, do_bench=do_bench)
    tuner.run()
    wall_s = task.spent_s
    times = {given.kwargs["config"]: float(timings[0]) for given, timings in getattr(tuner, "configs_timings", {}).items()}
    ranked = tuple(sorted((config for config in times if times[config] < float("inf")), key=lambda config: times[config]))
    if not ranked:
        raise ValueError(next(iter(launch.refused.values()), "no config could be launched"))
    remark = "one compilation after the other, no check of results"
    if launch.refused:
        remark += f", {len(launch.refused)} could not be launched"
    return TunerResult(ranked[0], wall_s, len(configs), ranked, remark)


_HELION_QUICK = {"autotune_effort": "quick", "initial_population": 30, "copies": 2, "max_generations": 5}
"""At its full effort Helion ends with more than a minute of final selection, however short the search was."""


def by_helion(task: ContestTask, where: str = "cuda") -> TunerResult:
    """Run Helion's PatternSearch at its quick effort over the knobs of a kernel that is not written in Helion.

    It knows no constraint between knobs: a config that is not valid is one that lacks resources when it is launched.

    Raises:
        Whatever Helion raises.
    """
    from helion.autotuner import EnumFragment, autotune
    from triton.runtime.errors import OutOfResources

    variant, configs = task.load()
    offered, default = set(configs), knobs_of(configs[0])
    tried: set[Config] = set()

    def compiled(given: Mapping[str, Any]) -> Callable[..., Any]:
        config = variant.config_from(dict(given))
        tried.add(config)

        def launch(*_tensors: Any) -> Any:
            if config not in offered:
                raise OutOfResources(0, 0, "knobs that go together")
            return tuple(variant.run(inputs, config).values())

        return launch

    inputs = task.tuned.op.inputs(task.tuned.case, device=where, seed=0)
    tensors = [value for value in inputs.values() if hasattr(value, "dtype")]
    spaces = {name: dict.fromkeys([default[name], *(getattr(config, name) for config in configs)]) for name in default}
    tunables = {name: EnumFragment(tuple(offer)) for name, offer in spaces.items()}
    limits = {} if task.limit_s is None else {"autotune_budget_seconds": task.limit_s}
    began = time.monotonic()
    found = autotune(tunables, compiled, tensors, autotune_accuracy_check=False, **_HELION_QUICK, **limits)
    searched_s = time.monotonic() - began
    chosen = variant.config_from(dict(found))
    remark = "PatternSearch, quick effort, no check of results"
    if task.limit_s is not None and searched_s >= task.limit_s:
        remark += f", stopped after {searched_s:.0f} s"
    return TunerResult(chosen, task.spent_s, len(tried), (chosen,), remark)


SIDES: Mapping[str, Callable[[ContestTask], TunerResult]] = {US: by_kerneltune, EXHAUSTIVE: by_triton, HELION: by_helion}
"""Ours first, then the one that visits every config."""


def unable() -> Mapping[str, str]:
    """Return the tuners that cannot run here, and why."""
    lacking = {} if importlib.util.find_spec("helion") else {HELION: "helion is not installed"}
    return lacking | {"Kernel Tuner": "compiles CUDA, HIP, OpenCL, C and Fortran sources, no Triton kernels"}


def helion_version() -> str:
    """Return the version of the Helion that would be asked; empty where it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("helion")
    return ""


def finalists(found: Sequence[TunerResult], default: Config, count: int) -> list[Config]:
    """Return the choices of all sides, the default, and the best few of every ranking, each once."""
    several = [config for side in found for config in side.best[:count]]
    return list(dict.fromkeys([*(side.config for side in found), default, *several]))
