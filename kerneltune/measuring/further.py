"""Check more than the default config of each check case: pairs of config and case, and the addresses of the largest case.

On a machine with several cores, child processes run these checks while the calling process checks the cases.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from pebble import ProcessPool

from kerneltune.measuring.check import address_errors
from kerneltune.measuring.compare import memory_obstacle
from kerneltune.measuring.pairs import PairChecker
from kerneltune.processes import start_pool
from kerneltune.search.task import Task
from kerneltune.spec import Case, Config, Op

_ADDRESSES_COST, _PAIRS_COST = 1.5, 4.0
"""Cost of an address check, and of the pairs of a variant, in units of `check_cost`."""
_WORTH_A_PROCESS = 10.0
"""Cost of checks from which another process pays, in units of `check_cost`: a process takes 3 s to start."""


def check_cost(op: Op, case: Case) -> float:
    """Estimate the time of a check in the interpreter, in MB of traffic: a constant for the launch, plus the traffic."""
    return 0.2 + op.traffic(case).total / 1e6


@dataclass(frozen=True, slots=True)
class Found:
    """Hold each config that failed, with its errors on one line, and the line about the checked pairs, empty for addresses."""

    failures: list[tuple[Task, Config, str]]
    line: str = ""


@dataclass(frozen=True, slots=True)
class FurtherCheck:
    """Describe a check of a variant in the interpreter; `task` holds the first case."""

    task: Task
    cases: tuple[Case, ...]
    is_of_addresses: bool

    @property
    def cost(self) -> float:
        """Return the check's cost, in units of `check_cost`."""
        return _ADDRESSES_COST if self.is_of_addresses else _PAIRS_COST

    @property
    def label(self) -> str:
        """Name the check on one line."""
        name = f"{self.task.op.name} {self.task.variant.name}"
        return f"{name} {self.cases[0].name}, addresses" if self.is_of_addresses else f"{name}, configs on cases"

    def run(self) -> Found:
        """Run the check in this process."""
        op, variant, policy = self.task.op, self.task.variant, self.task.policy
        if self.is_of_addresses:
            errors = address_errors(op, self.task.case, variant, self.task.default)
            return Found([(self.task, self.task.default, "; ".join(errors))] if errors else [])
        fitting = [case for case in self.cases if memory_obstacle(op, case) is None]
        report = PairChecker(op, fitting, partial(check_cost, op)).check(variant)
        return Found([(Task(op, case, variant, policy), config, text) for config, case, text in report.failures], report.line)


@dataclass(slots=True)
class FurtherChecks:
    """Run checks in this process and in child processes; each process takes the next check that no process has begun."""

    checks: Sequence[FurtherCheck]
    _left: deque[int] = field(default_factory=deque)
    _done: "SimpleQueue[tuple[int, Found | None]]" = field(default_factory=SimpleQueue)
    _found: dict[int, Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Order the checks: the dearest begin first."""
        self._left.extend(sorted(range(len(self.checks)), key=lambda number: -self.checks[number].cost))

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Let a process for each further core run checks until the end of the context, if the checks are worth the processes."""
        processes = min(len(os.sched_getaffinity(0)) - 1, len(self.checks))
        if processes < 1 or sum(check.cost for check in self.checks) < _WORTH_A_PROCESS:
            yield
            return
        pool = start_pool(processes, torch.set_num_threads, 1)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for _ in range(processes):
                Thread(target=self._feed, args=(pool,), daemon=True).start()
            yield
        finally:
            torch.set_num_threads(num_threads)
            pool.stop()
            pool.join()

    def _feed(self, pool: ProcessPool) -> None:
        while (number := self._next()) is not None:
            try:
                self._done.put((number, pool.schedule(FurtherCheck.run, args=(self.checks[number],)).result()))
            except Exception:  # an operator that no other process finds, or a process that died
                self._done.put((number, None))
                return

    def _next(self) -> int | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def finish(self, advance: Callable[[str], None]) -> list[Found]:
        """Run the checks that no process has begun, wait for the other checks, and return all results in order.

        Args:
            advance: gets the label of each finished check.
        """
        while len(self._found) < len(self.checks):
            if (number := self._next()) is not None:
                self._done.put((number, self.checks[number].run()))
            self._collect(advance, waits=number is None)
        return [self._found[number] for number in range(len(self.checks))]

    def _collect(self, advance: Callable[[str], None], waits: bool) -> None:
        """Keep the results of finished checks; a check that failed in another process runs here."""
        try:
            while True:
                number, found = self._done.get(block=waits)
                waits = False
                self._found[number] = found or self.checks[number].run()
                advance(self.checks[number].label)
        except Empty:
            return
