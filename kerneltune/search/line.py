"""Configs between being asked for and having a trial: they compile, wait for the bench, and are measured one after the other.

Decides nothing about configs.
"""

import time
from collections import deque
from typing import Protocol

from kerneltune.search.trials import Trial
from kerneltune.spec import Config

_HANDED_OVER = 2
"""Configs that the bench has: with one measured and the next one at hand, it does not wait for what is decided here."""
_POLL_S = 0.001


class Started(Protocol):
    """A config whose evaluation has begun: it is compiled, then measured unless it is refused for what the compiler says."""

    def done(self) -> bool:
        """Whether it is compiled."""

    def refused(self) -> bool:
        """Of a compiled one, whether its trial needs no bench."""

    def measure(self) -> None:
        """Hand a compiled one to the bench, which measures one after the other."""

    def measured(self) -> bool:
        """Whether the bench is done with it."""

    def result(self) -> Trial:
        """The trial of one that is refused, or was handed to the bench: waits for it."""

    def cancel(self) -> None:
        """Give it up; what was stored stays."""


class Line:
    """Configs on their way: compiling, compiled, handed to the bench. One slow compilation does not keep the others waiting."""

    def __init__(self, compilers: int) -> None:
        self._compilers = compilers
        self._compiling: list[tuple[Config, Started]] = []
        self._compiled: deque[tuple[Config, Started]] = deque()
        self._handed: deque[tuple[Config, Started]] = deque()

    @property
    def length(self) -> int:
        """Configs that were asked for and have no trial yet."""
        return len(self._compiling) + len(self._compiled) + len(self._handed)

    def has_room(self, ahead: int) -> bool:
        """Whether to ask for another config."""
        return self.length < ahead or (not self._compiled and len(self._compiling) < self._compilers)

    def add(self, config: Config, begun: Started) -> None:
        """A config that begins to compile."""
        self._compiling.append((config, begun))

    def move(self) -> list[tuple[Config, Trial]]:
        """Everything one step on, as far as it is done; the trials there are now. Waits a little where there is none."""
        trials = []
        for one in [one for one in self._compiling if one[1].done()]:
            self._compiling.remove(one)
            if one[1].refused():
                trials.append((one[0], one[1].result()))
            else:
                self._compiled.append(one)
        while self._handed and self._handed[0][1].measured():
            config, begun = self._handed.popleft()
            trials.append((config, begun.result()))
        while self._compiled and len(self._handed) < _HANDED_OVER:
            self._handed.append(self._compiled.popleft())
            self._handed[-1][1].measure()
        if not trials:
            time.sleep(_POLL_S)
        return trials

    def give_up(self, also_measured: bool = False) -> None:
        """Give up what the bench has not been given, or all."""
        for _, begun in (*self._compiling, *self._compiled, *(self._handed if also_measured else ())):
            begun.cancel()
        self._compiling.clear()
        self._compiled.clear()
