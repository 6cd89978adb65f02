"""Show the progress of long work on standard error: stage, current config, best result, time left; log lines if no terminal."""

import time
from typing import TYPE_CHECKING, Self

from kerneltune.cli.console import messages, note
from kerneltune.progress import Progress
from kerneltune.wording import counted

if TYPE_CHECKING:
    from rich.progress import Task

_LOG_EVERY_S = 5.0
_WINDOW_S = 3600.0
"""Seconds of past steps from which rich estimates the time left; its default of 30 s is shorter than a step of a search."""


class Reporter(Progress):
    """Show the current stage with its step, its best result and the time left.

    A terminal shows a bar. Without a terminal each stage ends with a line, and prints a line every few seconds before.
    """

    def __init__(self) -> None:
        from rich import progress as bars  # slow to import, and --help is to be quick

        self._bars = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[current]}", markup=False),
            bars.TextColumn("{task.fields[best]}", markup=False, style="green"),
            console=messages,
            speed_estimate_period=_WINDOW_S,
            get_time=time.monotonic,
            disable=not messages.is_terminal,
        )
        self._task: Task | None = None
        self._shown = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if not self._bars.disable:  # else rich would print an empty line
            self._bars.stop()

    def stage(self, name: str, total: int, kept: int = 0) -> None:
        """Begin a stage of `total` steps; an earlier run has done `kept` of them."""
        self._end()
        if self._task is not None:
            self._bars.remove_task(self._task.id)
        self._bars.add_task(name, total=total, completed=kept, current="", best="", kept=kept)
        self._task, self._shown = self._bars.tasks[-1], time.monotonic()

    def advance(self, text: str) -> None:
        """Count a step as done; `text` says which."""
        if self._task is None:
            return
        self._bars.update(self._task.id, advance=1, current=text)
        if self._bars.disable and not self._task.finished and time.monotonic() - self._shown >= _LOG_EVERY_S:
            self._shown = time.monotonic()
            done, left = self._task.completed, self._task.remaining or 0.0
            left_s = (self._task.elapsed or 0.0) / (done - self._task.fields["kept"]) * left
            best = self._task.fields["best"]
            note(f"{self._task.description}: {done:.0f} of {done + left:.0f}: {text}{best} (about {left_s:.0f} s left)")

    def best(self, text: str) -> None:
        """Show the new best so far."""
        if self._task is not None:
            self._bars.update(self._task.id, best=f"{', ' if self._bars.disable else ''}best {text}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        note(text)

    def _end(self) -> None:
        """End the stage: print its line, or leave its bar without a current step."""
        if self._task is None:
            return
        self._bars.update(self._task.id, current="")
        if self._bars.disable:
            kept, best = self._task.fields["kept"], self._task.fields["best"]
            steps, seconds = counted(int(self._task.total or 0), "step"), self._task.elapsed or 0.0
            before = f", {kept} of them before" if kept else ""
            note(f"{self._task.description}: {self._task.completed:.0f} of {steps} in {seconds:.1f} s{before}{best}")
