"""Declare a table once, as columns and rows of plain values, and write it as text, Markdown, CSV or values for a page."""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.cells import cell_len, chop_cells

from kerneltune.wording import printable, wrapped

CellValue = str | float | int | bool | None

_LEAST_ROOM, _NOTE_INDENT, _NOTE_LINES = 30, 8, 3
_NUMBER = re.compile(r"[-+]?[0-9.,]*( ?%|x)?")
"""A cell that is a number, or that stands for a missing number."""
_MARKUP = re.compile(r"\\(?=[|<])|[|<]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that end a cell, begin a tag or, as `_` at an end of a word, begin emphasis in Markdown; a backslash before them."""


@dataclass(frozen=True, slots=True)
class Column:
    """Describe a column of a table.

    Attributes:
        name: the heading, with the unit: `A µs`; `key` is the name in CSV and on a page, else the heading with `_` for spaces.
        digits: decimals of printed numbers, which `suffix` follows; None for left-aligned text. CSV holds the unrounded value.
        rank: if a line is too wide, the columns of the highest rank leave the table first; unshared columns of rank 0 stay.
        shared: whether a line above the rows states the value of a column that left the table, or that all rows share; other
            columns that leave the table are hidden.
        only: the forms that have the column: `text`, `markdown`, `csv`, `page`; all forms if empty.
        wraps: whether a cell may take several lines.
        value: function of the object that a row shows, for `values`.
    """

    name: str
    digits: int | None = None
    suffix: str = ""
    rank: int = 0
    key: str = ""
    shared: bool = False
    only: tuple[str, ...] = ()
    wraps: bool = False
    value: Callable[[Any], CellValue] = field(default=lambda _shown: None, compare=False)

    @property
    def csv_name(self) -> str:
        """Return the column's name in CSV."""
        return self.key or self.name.replace(" ", "_")

    def cell(self, value: CellValue) -> str:
        """Return a value in print, with no minus before zeros alone; empty for None."""
        if value is None:
            return ""
        if self.digits is None or isinstance(value, str | bool):
            return printable(" ".join(str(value).split()))
        return f"{value:z.{self.digits}f}{self.suffix}"


def values(columns: Iterable[Column], shown: Any) -> list[CellValue]:
    """Return the values that some columns have in the row of an object."""
    return [column.value(shown) for column in columns]


class Row(NamedTuple):
    """Hold a row: a value per column, and a note, such as the reason why values are missing."""

    values: tuple[CellValue, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Hold columns, rows, and the lines above and below them.

    Attributes:
        repeated: leading columns that are left blank in text where a row repeats the values of the row above.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    head: tuple[str, ...] = ()
    foot: tuple[str, ...] = ()
    repeated: int = 0
    title: str = field(default="", kw_only=True)

    @classmethod
    def of_texts(cls, head: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
        """Make a table of printed cells that may wrap; columns of numbers are right-aligned."""
        lines, columns = [Row(tuple(row)) for row in rows], []
        for name, *cells in zip(head, *(line.values for line in lines), strict=True):
            is_number = all(map(_NUMBER.fullmatch, cells)) and bool(re.search("[0-9]", "".join(cells)))
            columns.append(Column(name, digits=0 if is_number else None, wraps=True))
        return cls(tuple(columns), tuple(lines))

    def text(self, width: int = 100, all_shown_by: str = "a wider terminal") -> str:
        """Return aligned columns of at most `width` characters, where words allow it, between the lines above and below.

        all_shown_by: the means that shows columns which are hidden here; a line above the rows names both.
        """
        columns, rows = self._printed("text")
        shown, shared, stated, hidden = _places(columns, rows, width)

        def named(cells: Sequence[str], chosen: Sequence[int]) -> str:
            return ", ".join(f"{columns[i].name} {cells[i]}" for i in chosen)

        above = [*self.head, *([f"all rows: {named(rows[0], shared)}"] if shared else [])]
        if hidden:
            above.append(f"not shown in {width} columns: {', '.join(columns[i].name for i in hidden)}; {all_shown_by} shows all")
        blanked, statements = [], []
        for before, cells in zip([None, *rows], rows, strict=False):
            is_stated = bool(stated) and (before is None or any(cells[i] != before[i] for i in stated))
            is_same = not is_stated and before is not None and cells[: self.repeated] == before[: self.repeated]
            statements.append(wrapped(f"-- {named(cells, stated)}", width) if is_stated else [])
            blanked.append(["" if is_same and i < self.repeated else cells[i] for i in shown])
        heading, *blocks = _laid_out([columns[i] for i in shown], blanked, width)
        for row, block, statement in zip(self.rows, blocks, statements, strict=True):
            note = printable(" ".join(row.note.split()))
            heading += [*statement, *(_noted(block, note, width) if note else block)]
        parts = (self.title, _wrapped_lines(above, width), "\n".join(heading), _wrapped_lines(self.foot, width))
        return "\n\n".join(filter(None, parts)) + "\n"

    def markdown(self) -> str:
        """Return a Markdown table below its lines."""
        columns, rows = self._printed("markdown")
        lines = [[column.name for column in columns], ["---" if column.digits is None else "---:" for column in columns]]
        for row, cells in zip(self.rows, rows, strict=True):
            if row.note:  # in the last column if its cell is an empty text, else in place of the first missing number
                empty = [at for at, column in enumerate(columns) if column.digits is not None and not cells[at]]
                at = len(cells) - 1 if not empty or (columns[-1].digits is None and not cells[-1]) else empty[0]
                cells[at] = printable(" ".join(f"{cells[at]} {row.note}".split()))
            lines.append(cells)
        above, below = _markdown_list(self.head), _markdown_list(self.foot)
        grid = "\n".join(f"| {' | '.join(map(markdown_text, cells))} |" for cells in lines)
        title = f"### {markdown_text(self.title)}" if self.title else ""
        return "\n\n".join(filter(None, [title, above, grid, below])) + "\n"

    def csv(self) -> str:
        """Return a heading and a line per row, values unrounded; the note is the last column."""
        shown, text = self._shown_in("csv"), io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*(self.columns[i].csv_name for i in shown), "note"])
        writer.writerows([*(row.values[i] for i in shown), " ".join(row.note.split())] for row in self.rows)
        return text.getvalue()

    def page(self) -> dict[str, Any]:
        """Return the values of a page: headings, printed cells, lines above and below."""
        columns, rows = self._printed("page")
        heads = [{"name": column.name, "text": column.digits is None} for column in columns]
        lines = [{"cells": cells, "note": row.note} for row, cells in zip(self.rows, rows, strict=True)]
        return {"title": self.title, "head": list(self.head), "foot": list(self.foot), "columns": heads, "rows": lines}

    def _shown_in(self, form: str) -> list[int]:
        return [i for i, column in enumerate(self.columns) if not column.only or form in column.only]

    def _printed(self, form: str) -> tuple[list[Column], list[list[str]]]:
        """Return the columns of a form, and the printed cells of every row."""
        shown = self._shown_in(form)
        rows = [[self.columns[i].cell(row.values[i]) for i in shown] for row in self.rows]
        return [self.columns[i] for i in shown], rows


def _places(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], ...]:
    """Return the columns, by number, that a text of `width` characters shows, states above all rows or some, and hides."""
    cells_of = [[cells[i] for cells in rows] for i in range(len(columns))]
    least = [max(_lengths(column, [column.name, *cells])) for column, cells in zip(columns, cells_of, strict=True)]
    shown = [i for i, column in enumerate(columns) if column.rank == 0 or any(cells_of[i])]
    shared = [i for i in shown if columns[i].shared and len(set(cells_of[i])) == 1 < len(rows)]
    shown, moved = [i for i in shown if i not in shared], list[int]()
    for rank in sorted({column.rank for column in columns}, reverse=True):
        if sum(least[i] + 1 for i in shown) - 1 > width:
            moved += [i for i in shown if columns[i].rank == rank and (rank or columns[i].shared)]
            shown = [i for i in shown if i not in moved]
    stated = [i for i in sorted(moved) if columns[i].shared]
    hidden = [i for i in sorted(moved) if not columns[i].shared]
    return shown, shared, stated, hidden


def _wrapped_lines(lines: Iterable[str], width: int) -> str:
    return "\n".join(part for line in lines for part in wrapped(line, width))


def _markdown_list(lines: Iterable[str]) -> str:
    return "\n".join("- " + markdown_text(line.strip()) for line in lines)


def markdown_text(text: str) -> str:
    """Return a text for Markdown, with a backslash before each character that would be markup."""
    return _MARKUP.sub(r"\\\g<0>", text)


def _lengths(column: Column, cells: Iterable[str]) -> list[int]:
    """Return the widths of a column's cells, or of their words where the column wraps; an East Asian letter is two wide."""
    if not column.wraps:
        return list(map(cell_len, cells))
    return [cell_len(word) for cell in cells for word in cell.split() or [""]]


def _laid_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Return the lines of the headings, then of every row, in columns that wrap where a line is wider than `width`."""
    grid = [[column.name for column in columns], *rows]
    lengths = [_lengths(column, cells) for column, cells in zip(columns, zip(*grid, strict=True), strict=True)]
    widths = [max(map(cell_len, cells)) for cells in zip(*grid, strict=True)]
    heads = [max(_lengths(column, [column.name])) for column in columns]
    wrapping = [at for at, column in enumerate(columns) if column.wraps]
    gap = 2 if wrapping and sum(map(max, lengths)) + 2 * (len(columns) - 1) <= width else 1
    while sum(widths) + gap * (len(columns) - 1) > width:
        narrowable = [at for at in wrapping if widths[at] > 1]
        if not narrowable:
            break
        # headings stay whole as long as any other word can be broken; the fewest words are
        widths[min(narrowable, key=lambda at: (widths[at] <= heads[at], lengths[at].count(widths[at]), -widths[at]))] -= 1
    blocks = []
    for cells in grid:
        lines = zip_longest(*(list(map(_wrapped_cell, cells, widths)) or [[""]]), fillvalue="")
        blocks.append([(" " * gap).join(map(_aligned, columns, line, widths)).rstrip() for line in lines])
    return blocks


def _wrapped_cell(cell: str, room: int) -> list[str]:
    """Return a cell on lines of at most `room` columns; text with letters that are two wide is broken at any letter."""
    is_wide, room = cell_len(cell) > len(cell), room or 1
    return (chop_cells(cell, room) if is_wide else textwrap.wrap(cell, room, break_on_hyphens=False)) or [""]


def _aligned(column: Column, text: str, room: int) -> str:
    blanks = " " * (room - cell_len(text))
    return text + blanks if column.digits is None else blanks + text


def _noted(lines: Sequence[str], note: str, width: int) -> list[str]:
    """Return a row's lines with its note behind the last line, or below it if there is little room."""
    is_beside = width - cell_len(lines[-1]) - 2 >= _LEAST_ROOM
    indent = cell_len(lines[-1]) + 2 if is_beside else min(_NOTE_INDENT, width // 2)
    words = textwrap.wrap(note, width - indent, max_lines=_NOTE_LINES, placeholder=" …", break_on_hyphens=False)
    last = f"{lines[-1]}  {words.pop(0)}" if is_beside else lines[-1]
    return [*lines[:-1], last, *(" " * indent + part for part in words)]


def join_tables(tables: Sequence[Table], style: str, width: int) -> str:
    """Return tables below each other as `text`, `markdown` or `csv`; CSV has a single heading where the columns are equal."""
    if style == "text":
        return "\n".join(table.text(width, "a wider terminal or --format markdown|csv") for table in tables)
    texts = [table.markdown() if style == "markdown" else table.csv() for table in tables]
    is_one = style == "csv" and len({table.columns for table in tables}) == 1
    return "".join([texts[0], *(text.partition("\n")[2] for text in texts[1:])]) if is_one else "\n".join(texts)
