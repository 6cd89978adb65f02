"""Show the progress of long work on standard error: stage, current config, best result, time left; log lines if no terminal."""

import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from kerneltune.cli.console import messages, note
from kerneltune.table import counted

_LOG_EVERY_S = 5.0


def reporter() -> "RichProgress | LogProgress":
    """Return the reporter that suits standard error."""
    return RichProgress() if messages.is_terminal else LogProgress()


class Remaining:
    """An estimate of the time left in a stage, from the time of the finished steps and the costs of all steps."""

    def __init__(self, total: int, kept: int, costs: Sequence[float], now: float) -> None:
        self._costs = list(costs) or [1.0] * (total - kept)
        self._started = self._stepped = now
        self._done = 0

    def step(self, now: float) -> None:
        """Count a step as done."""
        self._done += 1
        self._stepped = now

    def seconds(self, now: float) -> float | None:
        """Return the seconds left; None before the first step is done."""
        past = sum(self._costs[: self._done])
        if not past:
            return None
        whole = (self._stepped - self._started) / past * sum(self._costs)
        return max(0.0, whole - (now - self._started))


class _RemainingColumn(ProgressColumn):
    """The time left of a task, which counts down between its steps."""

    def render(self, task: Task) -> Text:
        remaining: Remaining | None = task.fields.get("remaining")
        left = None if remaining is None or task.finished else remaining.seconds(time.monotonic())
        return Text("-:--:--" if left is None else str(timedelta(seconds=round(left))), style="progress.remaining")


class RichProgress:
    """A progress bar for the current stage, with the current step and the best result so far."""

    def __init__(self) -> None:
        self._remaining = Remaining(0, 0, (), 0.0)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _RemainingColumn(),
            TextColumn("{task.fields[current]}", markup=False),
            TextColumn("{task.fields[best]}", markup=False, style="green"),
            console=messages,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._bars.update(self._task, current="")
        self._bars.stop()

    def stage(self, name: str, total: int, kept: int = 0, costs: Sequence[float] = ()) -> None:
        """Begin a stage of `total` steps; an earlier run has done `kept` of them; costs as in `run_options.Progress`."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._remaining = Remaining(total, kept, costs, time.monotonic())
        self._task = self._bars.add_task(name, total=total, completed=kept, current="", best="", remaining=self._remaining)

    def advance(self, text: str) -> None:
        """Count a step as done; `text` says which."""
        if self._task is not None:
            self._remaining.step(time.monotonic())
            self._bars.update(self._task, advance=1, current=text)

    def best(self, text: str) -> None:
        """Show the new best so far."""
        if self._task is not None:
            self._bars.update(self._task, best=f"best {text}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._bars.console.print(text, markup=False, soft_wrap=True)


class LogProgress:
    """A log line per stage, and a line every few seconds within a stage."""

    def __init__(self) -> None:
        self._name, self._total, self._kept, self._done, self._best = "", 0, 0, 0, ""
        self._started = self._shown = time.monotonic()
        self._remaining = Remaining(0, 0, (), self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def stage(self, name: str, total: int, kept: int = 0, costs: Sequence[float] = ()) -> None:
        """Begin a stage of `total` steps; an earlier run has done `kept` of them; costs as in `run_options.Progress`."""
        self._end()
        self._name, self._total, self._kept, self._done, self._best = name, total, kept, kept, ""
        self._started = self._shown = time.monotonic()
        self._remaining = Remaining(total, kept, costs, self._started)

    def advance(self, text: str) -> None:
        """Count a step as done; `text` says which."""
        self._done += 1
        now = time.monotonic()
        self._remaining.step(now)
        if now - self._shown >= _LOG_EVERY_S and self._done < self._total:
            self._shown = now
            left = self._remaining.seconds(now) or 0.0
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
