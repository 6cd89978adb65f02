"""The compile pool, the measuring child and the trial stores of a tuning stage on one GPU.

Decides nothing about configs and prints nothing.
"""

import time
from collections.abc import Callable

from kerneltune import device
from kerneltune.measuring.compare import commit
from kerneltune.measuring.compiler import TARGETS, CompilePool
from kerneltune.plan import Options, results_root
from kerneltune.search.loop import Search
from kerneltune.search.trials import TrialStore
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tuning.bench import IsolatedBench, split_cores
from kerneltune.tuning.tuner import Compiling, Tuner, first_asked, job
from kerneltune.tuning.usage import Usage

_AHEAD = 8


class Machines:
    """For as long as a stage lasts. Use as a context manager."""

    def __init__(self, options: Options) -> None:
        """Raises ValueError for a GPU that nothing can be compiled for ahead of time."""
        here = device.current()
        target = TARGETS.get(here.arch)
        if target is None:
            raise ValueError(f"cannot compile ahead of time for {here.arch}; known targets: {', '.join(TARGETS)}")
        measuring, compiling = split_cores()
        self.pool = CompilePool(target, options.workers, compiling)
        self.bench = IsolatedBench(cores=measuring)
        self._options, self._folder = options, results_root(options) / "runs" / "trials" / here.slug
        self._ahead: dict[tuple[str, str, Case, Config], Compiling] = {}

    def tuner(self, op: Op, case: Case, variant: Variant, policy: str = "") -> Tuner:
        """A tuner that remembers what was tried before.

        Raises:
            ValueError: the store cannot be read.
        """
        prints = {"source_hash": op.source_hash, "driver": device.current().driver, **device.versions()}
        store = TrialStore(self._folder / f"{op.name}.jsonl", commit(), **prints)
        return Tuner(op, case, variant, policy or self._options.policy, store, self.bench)

    def compiling(self, tuner: Tuner) -> Callable[[Config], Compiling]:
        """What begins to compile a tuner's configs, or hands out those that were begun ahead."""
        op, case, variant = tuner.op, tuner.case, tuner.variant

        def begin(config: Config) -> Compiling:
            begun = self._ahead.pop((op.name, variant.name, case, config), None)
            return begun or self.pool.submit(job(op, case, config, variant))

        return begin

    def compile_ahead(self, tuner: Tuner, search: Search) -> None:
        """Begin to compile what the search of a later case will ask for first, so that the GPU does not wait for it."""
        begin = self.compiling(tuner)
        for config in first_asked(tuner, search, self._options.configs, _AHEAD):
            self._ahead[tuner.op.name, tuner.variant.name, tuner.case, config] = begin(config)

    def __enter__(self) -> "Machines":
        self.pool.__enter__()
        self.bench.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bench.__exit__(*error)
        self.pool.__exit__(*error)


class Clock:
    """How busy the measuring child of some machines is from now on."""

    def __init__(self, machines: Machines) -> None:
        self._bench, self._busy_s = machines.bench, machines.bench.busy_s
        self._began: float | None = None
        self._evaluations = 0

    def usage(self, tuner: Tuner) -> Usage:
        """Of this tuner's search, and of those asked about before, from the first compiled config to now."""
        self._began = self._began or tuner.began or time.monotonic()
        self._evaluations += tuner.evaluations
        return Usage(time.monotonic() - self._began, self._bench.busy_s - self._busy_s, self._evaluations)
