"""Own what the searches of a run share: the GPU's worker process, the compile pool, the trial stores and the compile queue."""

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from kerneltune import device
from kerneltune.measuring.compare import commit
from kerneltune.measuring.compiler import TARGETS, CompilePool, PendingCompile, compile_job
from kerneltune.processes import start_server
from kerneltune.run_options import Options
from kerneltune.search.task import Evaluation, Run, Task, TaskKey, Trial, store_path
from kerneltune.spec import Config
from kerneltune.sweep import results_root
from kerneltune.tune.candidates import present
from kerneltune.tune.gpu_worker import GpuWorker, split_cores
from kerneltune.tune.tuner import Tuner

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore

_STORES = "kerneltune.search.trials"


@dataclass(frozen=True, slots=True)
class Usage:
    """The time and evaluations of one search, or of all searches of a run.

    Attributes:
        wall_s: from the first compiled config to the end.
        busy_s: of that, spent by the measuring processes, all together, on inputs, checks and samples.
        evaluations: configs tried that were not known before.
        gpus: that took part.
    """

    wall_s: float
    busy_s: float
    evaluations: int
    gpus: int = 1

    @property
    def idle(self) -> float:
        """The share of the time in which a GPU waited."""
        return max(0.0, 1.0 - self.busy_s / (self.gpus * self.wall_s)) if self.wall_s > 0 else 0.0

    @property
    def values(self) -> dict[str, float]:
        """Return the usage as JSON."""
        return {name: round(value, 3) for name, value in (asdict(self) | {"idle": self.idle}).items()}

    @property
    def text(self) -> str:
        """Write the usage on one line."""
        who = "GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        share = f"{100 * self.idle:.0f} % of {self.wall_s:.1f} s"
        return f"{who} idle for {share} after the first compiled config, {self.evaluations} evaluations"


class TuningSession:
    """The measuring process, compilers and stores of a stage. Use as a context manager."""

    def __init__(
        self, options: Options, on_trial: Callable[[Config, Evaluation], None] = lambda _config, _evaluation: None
    ) -> None:
        """Begin to start processes. on_trial: told every new evaluation."""
        start_server()
        measuring, self._cores = split_cores()
        self.pool: CompilePool
        self.bench = GpuWorker(cores=measuring)
        self._on_trial = on_trial
        self._options = options
        self._began: float | None = None
        self._evaluations = 0
        self._stores: dict[tuple[str, str], TrialStore] = {}
        self._begun: list[PendingCompile] = []
        self._ahead: dict[tuple[TaskKey, Config], PendingCompile] = {}
        self._later: Iterator[Run] = iter(())

    def know(self, task: Task, known: Iterable[Trial] = ()) -> None:
        """Open the store of a task's variant; `known` are evaluations that it finds as well. `force` forgets transient failures.

        Raises:
            ValueError: the store cannot be read.
        """
        from kerneltune.search.trials import TrialStore  # begun to be imported in `__enter__`

        store = TrialStore(store_path(self._folder, task.op.name), commit(), **present(task.variant))
        self._stores[task.op.name, task.variant.name] = store
        store.on_put = self._on_trial
        store.know(known)
        if self._options.force:
            store.forget_transient()

    def tuner(self, task: Task) -> Tuner:
        """Return a tuner that remembers what was tried before.

        Raises:
            ValueError: the store cannot be read.
        """
        if (task.op.name, task.variant.name) not in self._stores:
            self.know(task)
        tuner = Tuner(task, self._stores[task.op.name, task.variant.name], self.bench, partial(self._compiling, task))
        tuner.compilers, tuner.meanwhile = self.pool.workers, self.fill
        tuner.whole = self._options.force or bool(self._options.knobs)
        return tuner

    def _compiling(self, task: Task, config: Config) -> PendingCompile:
        """Begin to compile a config, unless that was begun ahead."""
        return self._ahead.pop((task.key, config), None) or self._begin(task, config)

    def _begin(self, task: Task, config: Config) -> PendingCompile:
        self._begun.append(self.pool.submit(compile_job(task, config)))
        return self._begun[-1]

    def look_ahead(self, later: Iterable[tuple[Tuner, Config]]) -> None:
        """Say which configs come next, in place of what was said before; `fill` compiles them."""
        self._later = ((tuner.task, config) for tuner, config in later if (tuner.task.key, config) not in self._ahead)

    def fill(self) -> None:
        """Begin to compile what later cases will ask for first where a core has nothing to do."""
        self._begun = [one for one in self._begun if not one.done()]
        while len(self._begun) < self.pool.workers:
            following = next(self._later, None)
            if following is None:
                return
            task, config = following
            self._ahead[task.key, config] = self._begin(task, config)

    def forget_ahead(self, tuner: Tuner) -> None:
        """Let go of what was compiled ahead for a case whose search is over."""
        over = tuner.task.key
        self._ahead = {(place, config): begun for (place, config), begun in self._ahead.items() if place != over}

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Keep this thread off the measuring core: what is tried next is decided while something is measured."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores or before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def usage_of(self, tuner: Tuner) -> Usage:
        """Return the usage of a search that is over, from its first compiled config until now; `usage` counts it too."""
        usage = self._usage(tuner.began, tuner.evaluations)
        self._began, self._evaluations = self._began or tuner.began, self._evaluations + tuner.evaluations
        return usage

    @property
    def usage(self) -> Usage:
        """Return the usage of all searches, from the first compiled config until now."""
        return self._usage(self._began, self._evaluations)

    def _usage(self, began: float | None, evaluations: int) -> Usage:
        now = time.monotonic()
        since = began or now
        return Usage(now - since, self.bench.busy_since(since), evaluations)

    def __enter__(self) -> "TuningSession":
        """Start the measuring child, then the compilers.

        Raises:
            ValueError: a GPU that nothing can be compiled for ahead of time.
        """
        with ExitStack() as entered:
            entered.enter_context(self.bench)
            self.bench.begin()  # asks for the driver while this process does, which takes as long
            Thread(target=importlib.import_module, args=(_STORES,), daemon=True).start()  # Optuna takes 0.4 s
            here = device.current()
            target = TARGETS.get(here.arch)
            if target is None:
                raise ValueError(f"cannot compile ahead of time for {here.arch}; known targets: {', '.join(TARGETS)}")
            self._folder = results_root(self._options.results) / "runs" / "trials" / here.slug
            self.pool = entered.enter_context(CompilePool(target, self._options.workers, self._cores))
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
