"""Print results on standard output and everything else on standard error; announce written files."""

import io
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer
from rich.console import Console

from kerneltune.files import replace_text
from kerneltune.records import Record
from kerneltune.reporting.naming import failure_lines
from kerneltune.table import Table
from kerneltune.task import is_of_contract
from kerneltune.wording import printable, wrapped

_PIPED_WIDTH, _LEAST_WIDTH = 100, 20

console = Console(highlight=False)
messages = Console(stderr=True, highlight=False)
for _console in (console, messages):
    if _console.width < _LEAST_WIDTH:  # rich prints nothing into no columns
        _console.width = _PIPED_WIDTH


def write_any_character() -> None:
    """Let both streams write `?` for a character that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def width() -> int:
    """Return the width of tables in characters: the terminal's, or 100, the width of published tables, without a terminal."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else _PIPED_WIDTH


def show(text: str, target: Console = console) -> None:
    """Print a text without markup and wrapping."""
    target.print(printable(text.rstrip("\n")), markup=False, soft_wrap=True)


def show_wrapped(text: str, indent: str = "  ", target: Console = console) -> None:
    """Print the words of a text, wrapped to the width, with an indent from the second line on."""
    show("\n".join(wrapped(text, width(), indent)), target)


def show_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], target: Console = console) -> None:
    """Print a table of texts, columns of numbers right-aligned; cells wrap if the output is too narrow."""
    show(Table.of_texts(head, rows).text(width()), target)


def note(text: str) -> None:
    """Print a remark that is no part of the result, wrapped to the width."""
    show_wrapped(text, target=messages)


def unaccepted(lines: Sequence[str], accepted: Sequence[str]) -> list[str]:
    """Return the lines that have none of the accepted texts; name each accepted text that no line has."""
    for text in accepted:
        if not any(text in line for line in lines):
            note(f"--accept {text!r}: no line has this text")
    return [line for line in lines if not any(text in line for text in accepted)]


def error_line(text: str) -> None:
    """Print an error on a single line."""
    show(" ".join(text.split()), messages)


def end_if_failed(records: Iterable[Record], verdict: str = "", passed: Sequence[Record] = ()) -> None:
    """Print a line for each mistake of failed records; end with 1 if a variant failed, with 2 if inputs or a reference did.

    Args:
        verdict: the last line before the end.
        passed: of `failure_lines`.
    """
    records = list(records)
    failed = [record for record in records if record.status == "failed"]
    for line in failure_lines(records, passed):
        show_wrapped(" ".join(f"failed: {line}".split()))
    if failed:
        if verdict:
            show(verdict)
        raise typer.Exit(2 if any(is_of_contract(record.reason) for record in failed) else 1)


STDOUT = Path("-")


def deliver(text: str, output: Path | None) -> None:
    """Print `text`, or write it to a file; the file `-` is standard output."""
    if output in (None, STDOUT):
        show(text)
    else:
        write(output, text)


def write(path: Path, text: str) -> None:
    """Write a file as a whole, and print its name."""
    replace_text(path, text)
    show(f"wrote {path}", messages)
