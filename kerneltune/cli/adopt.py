"""`kerneltune adopt`: list the kernels of a capture or a tuned folder, and find suspicious kernels."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cli.console import error_line, note, show, show_table, show_wrapped
from kerneltune.table import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kerneltune.adopt.overview import Capture
    from kerneltune.adopt.sharing import TunedClass

app = typer.Typer(no_args_is_help=True, help="Show what a capture holds, and what is suspicious about its kernels.")
_SHOWN = 5
"""Kernels that are named."""
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a capture.")]


@app.command("list")
def list_command(folder: Folder) -> None:
    """Show the kernels of a capture: launches, share of the GPU time, configs, keys, and sizes that the keys leave out."""
    show_capture(folder)


@app.command("lint")
def lint_command(folder: Folder) -> None:
    """Show suspicious kernels: keys that name no argument or omit sizes, configs that never win, results that vary.

    Exit code 1 if a kernel is suspicious.
    """
    from kerneltune.adopt.overview import findings, read_capture

    found = findings(read_capture(folder))
    for text in found:
        show_wrapped(text)
    if found:
        raise typer.Exit(1)
    show("nothing to report")


def _show_forecast(folder: Path, share: float, widen: bool, workers: int | None) -> None:
    """Print how many classes and configs of a capture `tune` will try, and about how long that takes."""
    from kerneltune.adopt.tuning import forecast

    found = forecast(folder, share, widen, workers)
    for line in found.skipped:
        note(f"skipped: {line}")
    classes, configs = counted(found.classes, "class", "classes"), counted(found.configs, "config")
    show(f"{classes}, {configs}: about {max(found.seconds / 60, 0.1):.1f} minutes on an idle GPU, if none is tuned yet")


def tune_folder(
    folder: Path, budget: float | None, share: float | None, widen: bool, force: bool, workers: int | None, dry_run: bool
) -> None:
    """Tune a capture, and show the configs that serving will launch; with `dry_run` only say how many configs there are."""
    from kerneltune.cli import options

    if share is not None and not 0 < share <= 1:
        raise ValueError(f"share: {share!r}: expected a fraction above 0, up to 1")
    if dry_run:
        return _show_forecast(folder, share or 1.0, widen, workers)
    options.require_writable(folder)
    from kerneltune.processes import start_server

    start_server()
    from kerneltune.adopt.tuning import tune_capture
    from kerneltune.cli.progress import reporter

    with reporter() as progress:
        outcome = tune_capture(folder, progress, budget_s=budget, share=share or 1.0, widen=widen, force=force, workers=workers)
    show_table(*tuned_table(outcome.tuned))
    for line in outcome.skipped:
        note(f"skipped: {line}")
    count = counted(len(outcome.tuned), "class", "classes")
    show(f"{count} tuned in {outcome.seconds:.0f} s; SHA-256 {outcome.digest[:16]} {outcome.table}")
    if not outcome.tuned:
        raise typer.Exit(1)


def tuned_table(tuned: "Sequence[TunedClass]") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows of the tuned classes: the author's config and ours.

    The author's config is the choice of the author's tuning where the capture let it run (`--autotune`), else the first config.
    """
    from kerneltune.adopt.configs import config_label
    from kerneltune.adopt.operators import stored_of_config

    chosen = sum(one.launch.choice is not None for one in tuned)
    author = "author's choice µs" if tuned and chosen == len(tuned) else "author µs" if chosen else "author's first µs"
    head: tuple[str, ...] = ("launch", author, "ours µs", "speedup", "95 %", "config")
    rows: list[tuple[str, ...]] = []
    for one in sorted(tuned, key=lambda each: -each.cost_us):
        default, ours = one.evidence.get("default_us"), one.evidence.get("time_us")
        over = one.evidence.get("over_default") or (1.0, 1.0)
        speedup = f"{default / ours:.3f}x" if default and ours else "-"
        shown = [f"{value:.1f}" if value else "-" for value in (default, ours)]
        config = config_label(stored_of_config(one.best, one.launch))
        rows.append((one.launch.label, *shown, speedup, f"{over[0]:.3f}-{over[1]:.3f}", config))
    return head, rows


def show_capture(folder: Path, to_messages: bool = False) -> None:
    """Print the table of a capture, on standard error where the program's output must stay as it is."""
    from kerneltune.adopt.overview import read_capture
    from kerneltune.cli import console

    capture = read_capture(folder)
    show_table(*table_of(capture), console.messages if to_messages else console.console)
    for text in capture.problems:
        error_line(text)
    for kernel, reason in capture.refused().items():
        note(f"{kernel}: {reason}")
    if plain := capture.plain():
        more = f" and {len(plain) - _SHOWN} more" if len(plain) > _SHOWN else ""
        note(f"plain @triton.jit, captured under --plain: {', '.join(plain[:_SHOWN])}{more}")
    for subclass, kernels in capture.own_runs().items():
        note(f"not captured: {len(kernels)} kernels of {subclass}, whose run does not call Triton's: {', '.join(kernels[:5])}")


def table_of(capture: "Capture") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows of the table of kernels, the most expensive first; with modules where kernels of two share a name."""
    from kerneltune.adopt.overview import left_out, omitted

    head: tuple[str, ...] = ("kernel", "classes", "launches", "time %", "configs", "key", "key leaves out")
    shares = capture.shares()
    rows: list[tuple[str, ...]] = []
    kernels = list(capture.kernels().values())
    names = Counter(name for name, _ in {(one[0].kernel.name, one[0].kernel.module) for one in kernels})
    for launches in kernels:
        share = sum(shares[launch.digest] for launch in launches)
        first = launches[0]
        varying = left_out(launches)
        out = [*(f"{name}*" for name in varying), *(name for name in omitted(first) if name not in varying)]
        count = sum(capture.count(launch).launches for launch in launches)
        key = "(plain)" if first.is_plain else " ".join(first.keys) or "-"
        cells = (str(len(launches)), str(count), f"{100 * share:.1f}", str(first.list_size), key, " ".join(out[:4]) or "-")
        rows.append((first.kernel.text if names[first.kernel.name] > 1 else first.kernel.name, *cells))
    return head, rows
