"""Show captures, tune them, and show the tuned classes: for `capture`, `tune` and `adopt`."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from kerneltune.cli import loading
from kerneltune.cli.console import console, error_line, note, show, show_table, show_wrapped
from kerneltune.cli.progress import Reporter
from kerneltune.wording import counted, first_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kerneltune.adopt.overview import Capture
    from kerneltune.adopt.shared_rows import TunedClass

_SHOWN = 5
"""Kernels that are named."""


def _show_forecast(folder: Path, share: float, workers: int | None, budget: float | None) -> None:
    """Print how many classes and configs of a capture `tune` will try, and about how long that takes."""
    from kerneltune.adopt.tuning import forecast

    work = forecast(folder, share, workers)
    _show_skipped(work.skipped)
    if not work.num_classes:
        raise ValueError(f"{folder}: no class can be tuned")
    tried = f"{counted(work.num_classes, 'class', 'classes')}, up to {counted(work.num_configs, 'config')}"
    ends = f"; --budget ends it after {budget:g} s" if budget and budget < work.seconds else ""
    show_wrapped(f"{tried}: about {max(work.seconds / 60, 0.1):.1f} minutes on an idle GPU, if none is tuned yet{ends}")


def _show_skipped(skipped: "Sequence[tuple[str, str]]") -> None:
    """Print name and reason of the launches that are not tuned, with a line for each reason."""
    from kerneltune.records import grouped

    for reason, launches in grouped(skipped, lambda name_and_reason: name_and_reason[1]).items():
        note(f"skipped: {first_of((name for name, _ in launches), 1)}: {reason}")


def tune_folder(folder: Path, budget: float | None, share: float | None, force: bool, workers: int | None, dry_run: bool) -> None:
    """Tune a capture, and show the configs that serving will launch; with `dry_run` only say how many configs there are."""
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"share: {share!r}: expected a fraction above 0, up to 1")
    if dry_run:
        return _show_forecast(folder, share or 1.0, workers, budget)
    loading.require_writable(folder)
    from kerneltune.processes.start import start_server

    start_server()
    from kerneltune.adopt.tuning import tune_capture

    with Reporter() as progress:
        outcome = tune_capture(folder, progress, budget_s=budget, share=share or 1.0, force=force, workers=workers)
    show_table(*_tuned_table(outcome.tuned))
    _show_skipped(outcome.skipped)
    count = counted(len(outcome.tuned), "class", "classes")
    show(f"{count} tuned in {outcome.seconds:.0f} s; SHA-256 {outcome.digest[:16]} {outcome.table}")
    if not outcome.tuned:
        raise typer.Exit(1)


def _tuned_table(tuned: "Sequence[TunedClass]") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows of the tuned classes: the author's config and ours.

    The author's config is the choice of the author's tuning where the capture let it run (`--autotune`), else the first config.
    """
    has_choice = [tuned_class.launch_class.choice is not None for tuned_class in tuned]
    author = "author µs" if any(has_choice) else "author's first µs"
    if tuned and all(has_choice):
        author = "author's choice µs"
    head: tuple[str, ...] = ("launch", author, "ours µs", "speedup", "95 %", "config")
    by_cost = sorted(tuned, key=lambda tuned_class: -tuned_class.cost_us)
    return head, [(each.launch_class.label, *time_cells(each.evidence), each.best.label) for each in by_cost]


def time_cells(evidence: "Mapping[str, Any]") -> tuple[str, ...]:
    """Return both times of a search, the speedup and its interval as cells of a table."""
    own_us, ours_us = evidence.get("default_us"), evidence.get("time_us")
    low, high = evidence.get("over_default") or (1.0, 1.0)
    times = [f"{value:.1f}" if value else "-" for value in (own_us, ours_us)]
    gain = evidence.get("gain") or (own_us / ours_us if own_us and ours_us else None)  # as of the interval, by pairs of times
    return (*times, f"{gain:.3f}x" if gain else "-", f"{low:.3f}-{high:.3f}")


def show_capture(capture: "Capture", target: Console = console) -> None:
    """Print the table of a capture and its notes; target: standard error where a program's output must stay as it is."""
    from kerneltune.adopt.overview import seed_hint

    head, rows = _table_of_kernels(capture)
    show_table(head, rows, target)
    if any("*" in row[-1] for row in rows):
        note("* differs between launches that the key does not tell apart; x.0 is the first side of x")
    for text in capture.problems:
        error_line(f"skipped: {text}")
    for kernel, reason in capture.notes.refused.items():
        note(f"{kernel}: {reason}")
    plain = capture.plain()
    if plain:
        note(f"plain @triton.jit, captured only under --plain: {first_of(plain, _SHOWN)}")
    for classes in capture.by_kernel():
        hint = seed_hint(classes)
        if hint:
            note(f"{classes[0].kernel.text}: {hint}")
    for subclass, kernels in capture.own_runs().items():
        why = f"{counted(len(kernels), 'kernel')} of {subclass}, whose run does not call Triton's"
        note(f"not captured: {why}: {first_of(kernels, _SHOWN)}")


def _table_of_kernels(capture: "Capture") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows of the table of kernels, the most expensive first; with modules where kernels of two share a name."""
    from kerneltune.adopt.overview import unkeyed_dimensions, varying_sizes

    shared = "time %" if any(count.time_us for count in capture.notes.launches.values()) else "bytes %"
    shares = capture.shares()
    rows: list[tuple[str, ...]] = []
    kernels = capture.by_kernel()
    homes = {(classes[0].kernel.name, classes[0].kernel.module) for classes in kernels}
    num_homes = Counter(name for name, _module in homes)
    for classes in kernels:
        share = sum(shares[launch_class.digest] for launch_class in classes)
        first = classes[0]
        varying = varying_sizes(classes)
        out = [*(f"{name}*" for name in varying), *(name for name in unkeyed_dimensions(classes) if name not in varying)]
        count = sum(capture.count(launch_class).launches for launch_class in classes)
        key = "(plain)" if first.is_plain else " ".join(first.key_names) or "-"
        cells = (str(len(classes)), str(count), f"{100 * share:.1f}", str(first.list_size), key, " ".join(out[:4]) or "-")
        rows.append((first.kernel.text if num_homes[first.kernel.name] > 1 else first.kernel.name, *cells))
    return ("kernel", "classes", "launches", shared, "configs", "key", "key leaves out"), rows
