"""Compile the configs that searches ask for, and in idle time the first configs of the next searches."""

from collections.abc import Iterable, Iterator

from kerneltune.measuring.compiler import CompilePool, PendingCompile, compile_job
from kerneltune.search.task import Run, Task, TaskKey
from kerneltune.spec import Config


class CompileQueue:
    """Queue the compilations of a session in front of its pool."""

    def __init__(self, pool: CompilePool) -> None:
        self._pool = pool
        self._begun: list[PendingCompile] = []
        self._ahead: dict[tuple[TaskKey, Config], PendingCompile] = {}
        self._later: Iterator[Run] = iter(())

    @property
    def compilers(self) -> int:
        """Return the number of configs that compile at the same time."""
        return self._pool.workers

    def begin(self, task: Task, config: Config) -> PendingCompile:
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
        self._ahead = {place: pending for place, pending in self._ahead.items() if place[0] != task.key}

    def _submit(self, task: Task, config: Config) -> PendingCompile:
        self._begun.append(self._pool.submit(compile_job(task, config)))
        return self._begun[-1]
