"""The compile pool, the measuring child and the trial stores of a tuning stage on one GPU.

Decides nothing about configs and prints nothing.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def empty_caches() -> Iterator[Path]:
    """An empty folder, and in the environment an empty one for what Triton compiles, also in processes started from here."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="kerneltune-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


class Machines:
    """For as long as a stage lasts. Use as a context manager."""

    def __init__(self, options: Options, on_trial: Callable[[str], None] = lambda _line: None) -> None:
        """on_trial: told every new trial, as a line of its store.

        Raises:
            ValueError: a GPU that nothing can be compiled for ahead of time.
        """
        here = device.current()
        target = TARGETS.get(here.arch)
        if target is None:
            raise ValueError(f"cannot compile ahead of time for {here.arch}; known targets: {', '.join(TARGETS)}")
        measuring, compiling = split_cores()
        self.pool = CompilePool(target, options.workers, compiling)
        self.bench = IsolatedBench(cores=measuring)
        self._on_trial = on_trial
        self._options, self._folder = options, results_root(options) / "runs" / "trials" / here.slug
        self._began: float | None = None
        self._evaluations = 0
        self._ahead: dict[tuple[str, str, Case, Config], Compiling] = {}

    def tuner(self, op: Op, case: Case, variant: Variant, policy: str = "") -> Tuner:
        """A tuner that remembers what was tried before.

        Raises:
            ValueError: the store cannot be read.
        """
        prints = {"source_hash": op.source_hash, "driver": device.current().driver, **device.versions()}
        store = TrialStore(self._folder / f"{op.name}.jsonl", commit(), **prints)
        store.on_put = self._on_trial
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

    def count(self, began: float, evaluations: int) -> None:
        """Add a search to those of the stage."""
        self._began, self._evaluations = self._began or began, self._evaluations + evaluations

    @property
    def usage(self) -> Usage:
        """Of all searches, from the first compiled config until now."""
        now = time.monotonic()
        return Usage(now - (self._began or now), self.bench.busy_s, self._evaluations)

    def __enter__(self) -> "Machines":
        self.pool.__enter__()
        self.bench.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bench.__exit__(*error)
        self.pool.__exit__(*error)


class Clock:
    """How busy the measuring child of some machines is with one search; made when it begins."""

    def __init__(self, machines: Machines) -> None:
        self._machines, self._busy_s = machines, machines.bench.busy_s

    def usage(self, tuner: Tuner) -> Usage:
        """From the search's first compiled config until now."""
        began = tuner.began or time.monotonic()
        self._machines.count(began, tuner.evaluations)
        return Usage(time.monotonic() - began, self._machines.bench.busy_s - self._busy_s, tuner.evaluations)
