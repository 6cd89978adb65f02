"""Show the progress of long work on standard error: stage, current config, best result, time left; log lines if no terminal."""

import time
from types import TracebackType
from typing import Self

from rich import progress as bars

from kerneltune.cli.console import messages, note
from kerneltune.progress import Progress
from kerneltune.wording import counted

_LOG_EVERY_S = 5.0
_WINDOW_S = 3600.0
"""Seconds of past steps from which rich estimates the time left; its default of 30 s is shorter than a step of a search."""


def reporter() -> "RichProgress | LogProgress":
    """Return the reporter that suits standard error."""
    return RichProgress() if messages.is_terminal else LogProgress()


class RichProgress(Progress):
    """Show a progress bar for the current stage, with the current step and the best result so far."""

    def __init__(self) -> None:
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
        )
        self._task: bars.TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._bars.update(self._task, current="")
        self._bars.stop()

    def stage(self, name: str, total: int, kept: int = 0) -> None:
        """Begin a stage of `total` steps; an earlier run has done `kept` of them."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(name, total=total, completed=kept, current="", best="")

    def advance(self, text: str) -> None:
        """Count a step as done; `text` says which."""
        if self._task is not None:
            self._bars.update(self._task, advance=1, current=text)

    def best(self, text: str) -> None:
        """Show the new best so far."""
        if self._task is not None:
            self._bars.update(self._task, best=f"best {text}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._bars.console.print(text, markup=False, soft_wrap=True)


class LogProgress(Progress):
    """Print a log line per stage, and a line every few seconds within a stage."""

    def __init__(self) -> None:
        self._name, self._total, self._kept, self._done, self._best = "", 0, 0, 0, ""
        self._started = self._shown = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def stage(self, name: str, total: int, kept: int = 0) -> None:
        """Begin a stage of `total` steps; an earlier run has done `kept` of them."""
        self._end()
        self._name, self._total, self._kept, self._done, self._best = name, total, kept, kept, ""
        self._started = self._shown = time.monotonic()

    def advance(self, text: str) -> None:
        """Count a step as done; `text` says which."""
        self._done += 1
        now = time.monotonic()
        if now - self._shown >= _LOG_EVERY_S and self._done < self._total:
            self._shown = now
            left = (now - self._started) / (self._done - self._kept) * (self._total - self._done)
            note(f"{self._name}: {self._done} of {self._total}: {text}{self._best} (about {left:.0f} s left)")

    def best(self, text: str) -> None:
        """Show the new best so far."""
        self._best = f", best {text}"

    def note(self, text: str) -> None:
        """Print a line that stays."""
        note(text)

    def _end(self) -> None:
        if self._name:
            before, seconds = f", {self._kept} of them before" if self._kept else "", time.monotonic() - self._started
            note(f"{self._name}: {self._done} of {counted(self._total, 'step')} in {seconds:.1f} s{before}{self._best}")
        self._name = ""
