"""The one place that prints: results on standard output, everything else on standard error; files are announced."""

import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kerneltune.files import replace_bytes

_PIPED_WIDTH = 100

console = Console(highlight=False)
messages = Console(stderr=True, highlight=False)


def width() -> int:
    """Columns to lay a table out for; as many as the published tables have where the output is no terminal."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else _PIPED_WIDTH


def show(text: str) -> None:
    """Print as it is: no markup, no wrapping."""
    console.print(text.rstrip("\n"), markup=False, soft_wrap=True)


def show_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """A plain table; cells wrap where the output is too narrow for them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(head):
        table.add_column(name, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.width = width()
    console.print(table)


def note(text: str) -> None:
    """A remark that is no part of the result."""
    messages.print(text, markup=False, soft_wrap=True)


def error_line(text: str) -> None:
    """What is wrong, on one line."""
    messages.print(" ".join(text.split()), markup=False, soft_wrap=True)


def deliver(text: str, output: Path | None) -> None:
    """Print `text`, or write it to a file.

    Raises:
        ValueError: the file cannot be written.
    """
    if output is None:
        show(text)
        return
    write(output, text)


def write(path: Path, content: str | bytes) -> None:
    """Write a file as a whole, and say so.

    Raises:
        ValueError: it cannot be written; what stood there stays.
    """
    replace_bytes(path, content.encode() if isinstance(content, str) else content)
    note(f"wrote {path}")
