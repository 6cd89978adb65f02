"""Show the progress of long work on standard error: stage, current config, best result, time left; log lines if no terminal."""

import time
from typing import TYPE_CHECKING, Self

from kerneltune.cli.console import messages, note
from kerneltune.progress import Progress
from kerneltune.wording import counted

if TYPE_CHECKING:
    from rich.progress import Task

_LOG_EVERY_S = 5.0
_FORECAST_SHARE = 0.25
"""Share of the work of a stage, if its steps take different times, from which on the time left is estimated."""


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
            bars.TextColumn("{task.fields[current]}", markup=False),
            bars.TextColumn("{task.fields[best]}", markup=False, style="green"),
            bars.TextColumn("{task.fields[left]}", markup=False),
            console=messages,
            get_time=time.monotonic,
            disable=not messages.is_terminal,
        )
        self._task: Task | None = None
        self._shown, self._work, self._work_done, self._first_forecast = 0.0, 0, 0, 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if not self._bars.disable:  # else rich would print an empty line
            self._bars.stop()

    def stage(self, name: str, total: int, kept: int = 0, work: int = 0) -> None:
        """Begin a stage, see `Progress.stage`."""
        self._end()
        self._work, self._work_done = work or total - kept, 0
        self._first_forecast = _FORECAST_SHARE * work  # several of the longest steps run at once, and none of them has ended
        if self._task is not None:
            self._bars.remove_task(self._task.id)
        self._bars.add_task(name, total=total, completed=kept, current="", best="", left="", kept=kept)
        self._task, self._shown = self._bars.tasks[-1], time.monotonic()

    def advance(self, text: str, work: int = 1) -> None:
        """Count a step of so much work as done; `text` says which."""
        if self._task is None:
            return
        self._work_done += work
        left_s = (self._task.elapsed or 0.0) / self._work_done * (self._work - self._work_done)
        forecast = f" (about {left_s:.0f} s left)" if left_s and self._work_done >= self._first_forecast else ""
        self._bars.update(self._task.id, advance=1, current=text, left=forecast)
        if self._bars.disable and not self._task.finished and time.monotonic() - self._shown >= _LOG_EVERY_S:
            self._shown = time.monotonic()
            done, remaining = self._task.completed, self._task.remaining or 0.0
            best = self._task.fields["best"]
            note(f"{self._task.description}: {done:.0f} of {done + remaining:.0f}: {text}{best}{forecast}")

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
