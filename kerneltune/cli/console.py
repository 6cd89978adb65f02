"""The one place that prints: results on standard output, everything else on standard error; files are announced."""

import codecs
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kerneltune.files import replace_bytes
from kerneltune.table import printable, wrapped

_PIPED_WIDTH, _LEAST_WIDTH = 100, 20
_GAP, _LEAST_GAP = 2, 1
"""Blanks between the columns of a table, and where it is these that would break words."""

console = Console(highlight=False)
messages = Console(stderr=True, highlight=False)
for each in (console, messages):
    if each.width < _LEAST_WIDTH:  # rich prints nothing into no columns
        each.width = _PIPED_WIDTH


_PLAIN = {"µ": "u", "→": "->", "–": "-", "−": "-", "×": "x", "…": "...", "°": " deg ", "σ": "sigma", "γ": "gamma"}
"""Plain text in place of characters that the encoding of the output lacks."""


def write_any_character() -> None:
    """Have both streams write characters that their encoding lacks as others, rather than fail."""

    def plain(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return "".join(_PLAIN.get(one, "?") for one in error.object[error.start : error.end]), error.end

    codecs.register_error("plain", plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")


def width() -> int:
    """Columns to lay a table out for; as many as the published tables have where the output is no terminal."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else _PIPED_WIDTH


def show(text: str) -> None:
    """Print as it is: no markup, no wrapping."""
    console.print(printable(text.rstrip("\n")), markup=False, soft_wrap=True)


def show_wrapped(text: str, indent: str = "  ") -> None:
    """Print words on as many lines as they need, from the second on with an indent."""
    show("\n".join(wrapped(text, width(), indent)))


def show_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], target: Console = console) -> None:
    """Print a table; where the output is too narrow wrap cells between words as long as these fit, else behind `_`."""
    lines = [tuple(map(printable, row)) for row in rows]
    words, gaps = sum(_longest_words([head, *lines])), len(head) - 1
    gap = _LEAST_GAP if words + _LEAST_GAP * gaps <= width() < words + _GAP * gaps else _GAP
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    widths = _column_widths([head, *lines], width() - gap * gaps)
    for name, columns in zip(head, widths, strict=True):
        table.add_column(name, width=columns, overflow="fold")
    for row in lines:
        table.add_row(*(Text(_folded(cell, columns)) for cell, columns in zip(row, widths, strict=True)))
    target.width = width()
    target.print(table)


def _column_widths(lines: Sequence[tuple[str, ...]], room: int) -> list[int]:
    """Each column's longest word, the first's at any cost, and what is left shared out to those that want more."""
    columns = list(zip(*lines, strict=True))
    widths = _longest_words(lines)
    wanted = [max(map(len, column)) - least for column, least in zip(columns, widths, strict=True)]
    while sum(widths) > room and max(widths[1:], default=1) > 1:
        widths[widths.index(max(widths[1:]), 1)] -= 1
    left = max(0, room - sum(widths))
    for nth, index in enumerate(sorted(range(len(widths)), key=wanted.__getitem__)):
        more = min(wanted[index], left // (len(widths) - nth))
        widths[index] += more
        left -= more
    return widths


def _longest_words(lines: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the length of each column's longest word."""
    return [max(len(word) for cell in column for word in cell.split() or [""]) for column in zip(*lines, strict=True)]


def _folded(cell: str, columns: int) -> str:
    """Split the cell's words into lines of at most `width` columns."""
    lines: list[str] = []
    for line in wrapped(cell, columns, ""):
        lines.append("")
        for part in re.split("(?<=_)", line) if len(line) > columns else [line]:
            if lines[-1] and len(lines[-1]) + len(part) > columns:
                lines.append("")
            lines[-1] += part
    return "\n".join(lines)


def note(text: str) -> None:
    """Print a remark that is no part of the result."""
    messages.print(printable(text), markup=False, soft_wrap=True)


def error_line(text: str) -> None:
    """Print on one line what is wrong."""
    messages.print(printable(" ".join(text.split())), markup=False, soft_wrap=True)


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
